package process

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// orphanWait is how long Sweep gives the helper of a dead runner to end its job,
// which it does at once.
const orphanWait = 5 * time.Second

// Sweep implements executor.Executor.
func (e *Executor) Sweep(ctx context.Context) ([]protocol.AttemptRef, error) {
	if err := e.sweepParked(); err != nil {
		return nil, err
	}
	paths, err := filepath.Glob(filepath.Join(e.opts.Dir, "*"+recordSuffix))
	if err != nil {
		return nil, err
	}
	var ended []protocol.AttemptRef
	var failures []error
	for _, path := range paths {
		rec, err := e.sweep(ctx, path)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		if rec != nil && rec.Attempt != (protocol.AttemptRef{}) { // else it was Check's own
			ended = append(ended, rec.Attempt)
		}
	}
	return ended, errors.Join(failures...)
}

// sweep ends what is left of one sandbox and returns its record, or nil when
// there is nothing to tell.
func (e *Executor) sweep(ctx context.Context, path string) (*record, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "read sandbox record").WithCause(err)
	}
	defer f.Close()
	rec, err := readRecord(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "read sandbox record").WithCause(err)
	}
	e.mu.Lock()
	mine := e.live[rec.ID]
	e.mu.Unlock()
	if mine || rec.ID != "" && rec.Runner.PID != os.Getpid() && rec.Runner.alive() {
		return nil, nil
	}
	if err := lockDead(ctx, f, rec); err != nil {
		return nil, err
	}
	if rec, err = readRecord(path); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "read sandbox record").WithCause(err)
	}
	if rec.ID != "" && !rec.ended {
		if err := e.killMarked(ctx, rec); err != nil {
			return nil, err
		}
	}
	if err := os.Remove(path); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "remove sandbox record").WithCause(err)
	}
	if rec.ID == "" {
		return nil, nil
	}
	e.log.InfoContext(ctx, "ended what a crashed runner left", "job", string(rec.Attempt.Job), "epoch", rec.Attempt.Epoch)
	return rec, nil
}

// lockDead returns when the sandbox's helper is dead: it holds the lock of its
// record while it lives. A helper that does not end by itself is killed.
func lockDead(ctx context.Context, f *os.File, rec *record) error {
	deadline := time.Now().Add(orphanWait)
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return ci.Errorf(ci.ErrUnavailable, "lock sandbox record").WithCause(err)
		}
		if time.Now().After(deadline) {
			if rec.helper.PID == 0 {
				return ci.Errorf(ci.ErrUnavailable, "the helper of job %s is still alive", rec.Attempt.Job)
			}
			if err := jobhelper.Signal(jobhelper.Proc{PID: rec.helper.PID, Start: rec.helper.Start}, syscall.SIGKILL); err != nil {
				return ci.Errorf(ci.ErrUnavailable, "the helper of job %s (process %d) is still alive", rec.Attempt.Job, rec.helper.PID).WithCause(err)
			}
			deadline = time.Now().Add(orphanWait)
			rec.helper.PID = 0
		}
		select {
		case <-ctx.Done():
			return ci.Errorf(ci.ErrUnavailable, "clean up after a crashed runner").WithCause(context.Cause(ctx))
		case <-time.After(delay):
		}
	}
}

// killMarked kills what is left of a sandbox whose helper was killed: members of
// its cgroup, and processes that carry its mark in their environment, with all
// that descends from them.
func (e *Executor) killMarked(ctx context.Context, rec *record) error {
	group := rec.group()
	mark := []byte(MarkVariable + "=" + rec.ID)
	find := func() []jobhelper.Proc {
		procs, err := jobhelper.Processes()
		if err != nil {
			return nil
		}
		var found []jobhelper.Proc
		var roots []int
		for _, p := range procs {
			if !p.Dead() && hasVariable(p.PID, mark) {
				found = append(found, p)
				roots = append(roots, p.PID)
			}
		}
		found = append(found, jobhelper.Descendants(procs, roots...)...)
		if group != nil {
			found = append(found, group.Procs()...)
		}
		return found
	}
	deadline := time.Now().Add(e.killWait)
	clean := 0
	for delay := time.Millisecond; clean < 2; delay = min(2*delay, 100*time.Millisecond) {
		if group != nil {
			group.Kill()
		}
		if jobhelper.KillFound(find) == 0 && (group == nil || group.Empty()) {
			clean++
			continue
		}
		clean = 0
		if time.Now().After(deadline) {
			return ci.Errorf(ci.ErrUnavailable, "processes of job %s do not end although they were killed", rec.Attempt.Job)
		}
		select {
		case <-ctx.Done():
			return ci.Errorf(ci.ErrUnavailable, "clean up after a crashed runner").WithCause(context.Cause(ctx))
		case <-time.After(delay):
		}
	}
	if group != nil {
		if err := group.Remove(); err != nil {
			return ci.Errorf(ci.ErrUnavailable, "a cgroup of job %s cannot be removed", rec.Attempt.Job).WithCause(err)
		}
	}
	return nil
}

// hasVariable reports whether the process was started with the variable, given
// as NAME=value. What cannot be read is another user's.
func hasVariable(pid int, variable []byte) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	for kv := range bytes.SplitSeq(b, []byte{0}) {
		if bytes.Equal(kv, variable) {
			return true
		}
	}
	return false
}
