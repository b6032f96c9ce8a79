package workspace

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
	"sync"
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

// journal records attempts in one file, a line each for its begin and its end. It
// is written anew when it is opened, when most of it is of ended attempts, and
// after a write that failed, of which nobody knows what is on the disk.
type journal struct {
	root *Root
	mu   sync.Mutex
	file *os.File // nil: to be written anew
	// lines of the file, and the attempts that have not ended, by key
	lines int
	open  map[string]Attempt
}

// entry is one line of the journal; one of the two is set.
type entry struct {
	Begin *Attempt     `json:"begin,omitempty"`
	End   *ci.LeaseRef `json:"end,omitempty"`
}

// How many lines a journal has at least before it is written anew.
const journalLines = 1000

// openJournal reads what earlier processes recorded.
func openJournal(r *Root) (*journal, error) {
	j := &journal{root: r, open: map[string]Attempt{}}
	b, err := r.dir.ReadFile(attemptsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, ci.Errorf(ci.ErrUnavailable, "read the attempts of workspace root %s", r.path).WithCause(err)
	}
	for line := range bytes.Lines(b) {
		var e entry
		switch err := json.Unmarshal(line, &e); {
		case !bytes.HasSuffix(line, []byte("\n")): // a crash in the middle of Begin: it was not begun
		case err == nil && e.Begin != nil:
			j.open[key(e.Begin.Lease)] = *e.Begin
		case err == nil && e.End != nil:
			delete(j.open, key(*e.End))
		default:
			r.log.Warn("not a record of an attempt", "file", attemptsFile, "line", string(line))
		}
	}
	return j, nil
}

// write appends an entry, durably for a begin: an end that is lost is reported
// once more.
func (j *journal) write(e entry) error {
	if j.file != nil && j.lines >= journalLines && j.lines > 4*len(j.open) {
		j.drop()
	}
	if j.file == nil {
		return j.renew()
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = j.file.Write(append(line, '\n'))
	}
	if err == nil && e.Begin != nil {
		err = j.file.Sync()
	}
	if err != nil {
		j.drop()
	}
	j.lines++
	return err
}

// renew writes the file anew with the attempts that have not ended.
func (j *journal) renew() error {
	var b bytes.Buffer
	for _, a := range j.attempts() {
		line, err := json.Marshal(entry{Begin: &a})
		if err != nil {
			return err
		}
		b.Write(append(line, '\n'))
	}
	if err := j.root.writeDurably(".", attemptsFile, b.Bytes()); err != nil {
		return err
	}
	f, err := j.root.dir.OpenFile(attemptsFile, os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		j.file, j.lines = f, len(j.open)
	}
	return err
}

func (j *journal) drop() {
	_ = j.file.Close()
	j.file = nil
}

func (j *journal) attempts() []Attempt {
	var all []Attempt
	for _, a := range j.open {
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b Attempt) int { return a.Started.Compare(b.Started) })
	return all
}

// Begin records an attempt durably. It is called before the attempt's sandbox is
// opened; a second call with the same lease changes nothing but the time.
func (r *Root) Begin(a Attempt) error {
	j := r.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	before, again := j.open[key(a.Lease)]
	j.open[key(a.Lease)] = a
	if err := j.write(entry{Begin: &a}); err != nil {
		delete(j.open, key(a.Lease))
		if again {
			j.open[key(a.Lease)] = before
		}
		return ci.Errorf(ci.ErrUnavailable, "record the attempt of %s", leaseText(a.Lease)).WithCause(err)
	}
	return nil
}

// End forgets an attempt, once its termination has been reported and accepted.
// An attempt that is not recorded is no error.
func (r *Root) End(lease ci.LeaseRef) error {
	j := r.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, ok := j.open[key(lease)]; !ok {
		return nil
	}
	delete(j.open, key(lease))
	if err := j.write(entry{End: &lease}); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "forget attempt of %s", leaseText(lease)).WithCause(err)
	}
	return nil
}

// Attempts returns what Begin recorded and End has not forgotten, of this and of
// earlier processes, oldest first. What Begin cannot have written is logged when
// the root is opened, and dropped.
func (r *Root) Attempts() []Attempt {
	r.journal.mu.Lock()
	defer r.journal.mu.Unlock()
	return r.journal.attempts()
}
