package process

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// record is what is on disk for an open sandbox, so that the next runner can
// clean up after this one: the first line of the file is JSON, a second line
// names the helper. The file is locked as long as the helper lives, since the
// helper holds the locked description; a machine that restarts unlocks it too.
type record struct {
	ID      string              `json:"id"`
	Attempt protocol.AttemptRef `json:"attempt"`
	// Runner is the process that opened the sandbox.
	Runner process `json:"runner"`
	// CgroupVersion and CgroupDir are empty without a cgroup.
	CgroupVersion string `json:"cgroup_version,omitempty"`
	CgroupDir     string `json:"cgroup_dir,omitempty"`

	path   string
	ended  bool    // the helper proved that nothing is left
	helper process // zero when it was not started, or the runner died at this very moment
}

// process names one process for as long as the machine runs.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// alive reports whether the process exists and has not ended.
func (p process) alive() bool {
	now, err := jobhelper.ReadProc(p.PID)
	return err == nil && now.Start == p.Start && !now.Dead()
}

const recordSuffix = ".sandbox"

// newID returns 16 random hexadecimal digits.
func newID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// createRecord writes the record and returns its file, locked, at its end.
func createRecord(dir string, r *record) (*os.File, error) {
	r.path = filepath.Join(dir, r.ID+recordSuffix)
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	// Locked before it has content: Sweep leaves empty files of live runners alone.
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		_, err = f.Write(append(b, '\n'))
	}
	if err != nil {
		_ = f.Close()
		_ = os.Remove(r.path)
		return nil, err
	}
	return f, nil
}

// readRecord reads a record file. One that was cut off while it was written has
// an empty ID: its sandbox was never opened.
func readRecord(path string) (*record, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &record{path: path}
	line, rest, whole := bytes.Cut(b, []byte("\n"))
	if !whole || json.Unmarshal(line, r) != nil {
		return &record{path: path}, nil //nolint:nilerr // a record that was cut off says that much
	}
	r.path = path
	r.ended = bytes.HasSuffix(rest, []byte(jobhelper.EndedMark))
	line, _, _ = bytes.Cut(rest, []byte("\n"))
	_ = json.Unmarshal(line, &r.helper) // absent or cut off: stays zero
	return r, nil
}

// crashText is what a helper that crashed wrote to its standard error, shortened.
func crashText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	parts := strings.SplitN(string(b), "\n", 3)
	if len(parts) < 3 {
		return ""
	}
	return parts[2][:min(len(parts[2]), 2000)]
}

// group is the sandbox's cgroup, or nil.
func (r *record) group() *jobhelper.Group {
	if r.CgroupDir == "" {
		return nil
	}
	return &jobhelper.Group{Version: r.CgroupVersion, Dir: r.CgroupDir}
}

func attemptOf(l ci.LeaseRef) protocol.AttemptRef {
	return protocol.AttemptRef{Job: l.Job, Epoch: l.Epoch}
}

// self names this process.
func self() (process, error) {
	p, err := jobhelper.ReadProc(os.Getpid())
	if err != nil {
		return process{}, errors.New("this system has no /proc")
	}
	return process{PID: p.PID, Start: p.Start}, nil
}
