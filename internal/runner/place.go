package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Workspaces makes the directories of jobs; workspace.Root is one.
type Workspaces interface {
	Sweep(ctx context.Context) ([]protocol.AttemptRef, error)
	New(lease ci.LeaseRef) (Workspace, error)
}

// Workspace is one job's directories.
type Workspace struct {
	Work, Home, Tmp string
	Remove          func() error
	Forget          func() error
}

// place is where one job runs, and the files through which runner and steps
// speak. Those lie in the job's own temporary directory and are opened below it
// without following links: the job may have put anything in their place.
type place struct {
	work, home, tmp string
	room            Workspace
}

func outputName(step int) string { return fmt.Sprintf("forgeci-output-%d", step+1) }

// outputFile makes the empty FORGECI_OUTPUT file of a step and returns its path.
func (p *place) outputFile(step int) (string, error) {
	return p.write(outputName(step), nil)
}

// needsFile writes the FORGECI_NEEDS file, if the job has needs, and returns its path.
func (p *place) needsFile(needs map[string]protocol.NeedResult) (string, error) {
	if len(needs) == 0 {
		return "", nil
	}
	doc, err := needsDocument(needs)
	if err != nil {
		return "", err
	}
	return p.write("forgeci-needs.json", doc)
}

func (p *place) write(name string, content []byte) (string, error) {
	path := filepath.Join(p.tmp, name)
	wrap := func(err error) error {
		return ci.Errorf(ci.ErrUnavailable, "%s cannot be written", name).WithCause(err)
	}
	root, err := os.OpenRoot(p.tmp)
	if err != nil {
		return "", wrap(err)
	}
	defer root.Close()
	if err := root.RemoveAll(name); err != nil {
		return "", wrap(err)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", wrap(err)
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Close()); err != nil {
		return "", wrap(err)
	}
	return path, nil
}

// takeOutput returns what a step wrote to its output file, and removes it. What
// is no longer a plain file of its own is refused.
func (p *place) takeOutput(step int) ([]byte, error) {
	name := outputName(step)
	root, err := os.OpenRoot(p.tmp)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "the step has removed TMPDIR").WithCause(err)
	}
	defer root.Close()
	refuse := func(err error) error {
		return ci.Errorf(ci.ErrInvalid, "FORGECI_OUTPUT is no longer the file that it was").WithCause(err)
	}
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, refuse(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil, refuse(err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
		return nil, refuse(errors.New("it has another name"))
	}
	content, err := io.ReadAll(io.LimitReader(f, maxOutputFile+1))
	if err != nil {
		return nil, refuse(err)
	}
	if err := root.Remove(name); err != nil {
		return nil, refuse(err)
	}
	return content, nil
}
