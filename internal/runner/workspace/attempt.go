package workspace

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// Attempt is one attempt in progress: what a restarted runner must know of it to
// report its termination (SPEC decision 5).
type Attempt struct {
	Lease ci.LeaseRef `json:"lease"`
	// Started is the runner's wall clock when the attempt was begun.
	Started time.Time `json:"started"`
}

// Begin records an attempt durably. It is called before the attempt's sandbox is
// opened; a second call with the same lease changes nothing but the time.
func (r *Root) Begin(a Attempt) error {
	b, err := json.Marshal(a)
	if err != nil {
		return ci.Errorf(ci.ErrInternal, "write attempt").WithCause(err)
	}
	return r.writeDurably(attemptsDir, key(a.Lease)+".json", b)
}

// End forgets an attempt, once its termination has been reported and accepted.
// An attempt that is not recorded is no error.
func (r *Root) End(lease ci.LeaseRef) error {
	err := r.dir.Remove(filepath.Join(attemptsDir, key(lease)+".json"))
	if err == nil {
		err = r.syncDir(attemptsDir)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return ci.Errorf(ci.ErrUnavailable, "forget attempt of %s", leaseText(lease)).WithCause(err)
	}
	return nil
}

// Attempts returns what Begin recorded and End has not forgotten, of this and of
// earlier processes, oldest first. A file that Begin cannot have written is left
// where it is and logged.
func (r *Root) Attempts() ([]Attempt, error) {
	names, err := r.names(attemptsDir)
	if err != nil {
		return nil, err
	}
	var attempts []Attempt
	for _, name := range names {
		if strings.HasPrefix(name, ".") {
			continue // was being written when the runner crashed: the attempt was not begun
		}
		b, err := r.dir.ReadFile(filepath.Join(attemptsDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, ci.Errorf(ci.ErrUnavailable, "read attempt %s", name).WithCause(err)
		}
		var a Attempt
		if json.Unmarshal(b, &a) != nil || name != key(a.Lease)+".json" {
			r.log.Warn("not a record of an attempt", "file", filepath.Join(r.path, attemptsDir, name))
			continue
		}
		attempts = append(attempts, a)
	}
	slices.SortFunc(attempts, func(a, b Attempt) int { return a.Started.Compare(b.Started) })
	return attempts, nil
}
