package process

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"time"

	"forgeci/internal/runner/executor/process/jobhelper"
)

// A helper whose job has ended without being asked twice waits a moment for the
// next job: starting one costs several times what it does. It holds nothing of
// the job that has ended, and no process of it exists. With it waits its
// record, empty and under a name that Sweep does not take for a sandbox's; the
// helper keeps it locked.

// parked is a helper that waits for a job.
type parked struct {
	help *client
	file *os.File
	path string
	idle *time.Timer
}

const (
	parkedSuffix = ".parked"
	// parkTime is how long a helper waits: a busy runner has the next job at once.
	parkTime = time.Second
	// mostParked bounds the helpers that wait.
	mostParked = 32
	// resumeWait bounds how long a helper that has waited may take to answer. One
	// that does not is replaced.
	resumeWait = 2 * time.Second
)

// park lets the sandbox's helper wait for another job. It returns false, and has
// ended the helper, when that cannot be.
func (e *Executor) park(s *sandbox) bool {
	p := &parked{help: s.help, file: s.file, path: filepath.Join(e.opts.Dir, s.rec.ID+parkedSuffix)}
	if s.file.Truncate(0) != nil || os.Rename(s.rec.path, p.path) != nil {
		s.help.close()
		return false
	}
	e.mu.Lock()
	delete(e.live, s.rec.ID)
	if len(e.parked) == mostParked {
		e.mu.Unlock()
		p.end()
		return true
	}
	defer e.mu.Unlock()
	e.parked = append(e.parked, p)
	p.idle = time.AfterFunc(parkTime, func() {
		if e.unpark(p) != nil {
			p.end()
		}
	})
	return true
}

// unpark takes a helper that waits, this one or, when it is nil, the one that was
// parked last.
func (e *Executor) unpark(this *parked) *parked {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, p := range slices.Backward(e.parked) {
		if this == nil || p == this {
			p.idle.Stop()
			e.parked = append(e.parked[:i], e.parked[i+1:]...)
			return p
		}
	}
	return nil
}

// Close implements executor.Executor.
func (e *Executor) Close() {
	for p := e.unpark(nil); p != nil; p = e.unpark(nil) {
		p.end()
	}
	_ = os.Remove(filepath.Join(e.opts.Dir, preludeName))
}

// end ends a helper that waits.
func (p *parked) end() {
	p.help.close()
	_ = os.Remove(p.path)
	_ = p.file.Close()
}

// resume gives the sandbox a helper that has waited. It returns false when there
// is none that answers; nothing of the sandbox exists then.
func (s *sandbox) resume(group *jobhelper.Group) bool {
	p := s.exec.unpark(nil)
	if p == nil {
		return false
	}
	s.rec.path = filepath.Join(s.exec.opts.Dir, s.rec.ID+recordSuffix)
	// Whole before it has the name of a record.
	rec, err := json.Marshal(s.rec)
	if err == nil {
		var helper []byte
		if helper, err = json.Marshal(p.help.id); err == nil {
			_, err = p.file.Write(append(append(append(rec, '\n'), helper...), '\n'))
		}
	}
	if err == nil {
		err = os.Rename(p.path, s.rec.path)
	}
	if err != nil {
		p.help.kill()
		p.end()
		return false
	}
	s.help, s.file = p.help, p.file
	s.help.wait = resumeWait
	err = s.openJob(group)
	s.help.wait = s.exec.helperWait
	if err != nil {
		s.help.kill()
		s.help.close()
		_ = os.Remove(s.rec.path)
		_ = s.file.Close()
		s.help, s.file = nil, nil
		return false
	}
	return true
}

// sweepParked removes the records of helpers that waited when their runner ended.
func (e *Executor) sweepParked() error {
	paths, err := filepath.Glob(filepath.Join(e.opts.Dir, "*"+parkedSuffix))
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.parked {
		for i := range paths {
			if paths[i] == p.path {
				paths[i] = ""
			}
		}
	}
	for _, path := range paths {
		if path != "" {
			_ = os.Remove(path)
		}
	}
	return nil
}
