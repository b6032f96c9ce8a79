package runner

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/workspace"
)

// settle makes the job's directory and begins to record the attempt, so that a
// restarted runner knows what to report. The record is durable when the channel
// says so; nothing of the job's may run before.
func (w *worker) settle() (<-chan error, error) {
	dir, err := w.r.cfg.Workspaces.New(w.lease, w.r.cfg.JobUser)
	if err != nil {
		return nil, err
	}
	w.dir = dir
	recorded := make(chan error, 1)
	go func() { recorded <- w.r.cfg.Workspaces.Begin(workspace.Attempt{Lease: w.lease, Started: time.Now()}) }()
	return recorded, nil
}

// needsFile writes the FORGECI_NEEDS file, if the job has needs, and returns its
// path. It lies where the executor's own files are: with a user of its own the
// job can read and not change it.
func (w *worker) needsFile(needs map[string]protocol.NeedResult) (string, error) {
	if len(needs) == 0 {
		return "", nil
	}
	doc, err := needsDocument(needs)
	if err != nil {
		return "", err
	}
	path := filepath.Join(w.dir.Steps(), "needs.json")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		_, err = f.Write(doc)
		err = errors.Join(err, f.Chmod(0o444), f.Close())
	}
	if err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "the results of needs cannot be written").WithCause(err)
	}
	return path, nil
}
