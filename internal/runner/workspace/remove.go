package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"forgeci/internal/ci"
)

const (
	// maxOpen is how many directories deep a removal goes before it moves a
	// directory up: each level holds a descriptor.
	maxOpen = 64
	// batch is how many names of a directory are in memory at once.
	batch = 4096
)

// Sweep removes the directories of jobs that are not open in this process: what
// a crashed runner left. It is called after the executor's Sweep, when no process
// of those jobs is left. Whatever has a name that this package does not make is
// left alone. A directory that cannot be removed does not keep the others.
func (r *Root) Sweep(ctx context.Context) error {
	names, err := r.names(jobsDir)
	if err != nil {
		return err
	}
	var failures []error
	for _, name := range names {
		r.mu.Lock()
		open := r.open[name]
		r.mu.Unlock()
		if open {
			continue
		}
		if !isKey(name) {
			r.log.WarnContext(ctx, "not a directory of a job, left alone", "path", filepath.Join(r.path, jobsDir, name))
			continue
		}
		if err := r.remove(ctx, name); err != nil {
			failures = append(failures, err)
			continue
		}
		r.log.InfoContext(ctx, "removed the workspace of a crashed runner", "path", filepath.Join(r.path, jobsDir, name))
	}
	return errors.Join(failures...)
}

// remove deletes jobs/key.
func (r *Root) remove(ctx context.Context, key string) error {
	path := filepath.Join(r.path, jobsDir, key)
	if err := unmountBelow(path); err != nil {
		return err
	}
	jobs, err := r.dir.OpenRoot(jobsDir)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "open %s", filepath.Join(r.path, jobsDir)).WithCause(err)
	}
	defer jobs.Close()
	rm := &remover{ctx: ctx, shown: path, tag: fmt.Sprintf(".deep-%x-", time.Now().UnixNano())}
	if done := rm.entry(jobs, key, "", 0); done || rm.err == nil {
		return nil
	}
	return rm.err
}

// remover deletes one tree from the bottom up through directories that it holds
// open, so that no path is followed twice and none leaves the tree.
type remover struct {
	ctx   context.Context //nolint:containedctx // the life of one removal
	shown string          // the tree's path, for errors
	top   *os.Root        // the tree itself, once it is open
	tag   string          // begins the names of directories that were moved up
	moved int
	err   error // the first that matters
}

func (rm *remover) fail(rel string, err error) {
	if rm.err != nil {
		return
	}
	detail := "cannot be deleted"
	switch {
	case errors.Is(err, fs.ErrPermission) && os.Geteuid() == 0:
		detail = "cannot be deleted even by root: it may be immutable (lsattr shows it)"
	case errors.Is(err, fs.ErrPermission):
		detail = "cannot be deleted: a step made it as another user"
	}
	rm.err = ci.Errorf(ci.ErrConflict, "%s %s", filepath.Join(rm.shown, rel), detail).WithCause(err)
}

// entry deletes the name in dir and reports whether it is gone. rel is its path
// below the tree.
func (rm *remover) entry(dir *os.Root, name, rel string, depth int) bool {
	fi, err := dir.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	if err != nil {
		rm.fail(rel, err)
		return false
	}
	if fi.IsDir() {
		// Its owner may have taken away what is needed to empty or to move it.
		if fi.Mode().Perm()&0o700 != 0o700 {
			if err := dir.Chmod(name, 0o700); err != nil {
				rm.fail(rel, err)
				return false
			}
		}
		if depth > maxOpen {
			rm.moved++
			if err := rm.top.Rename(rel, fmt.Sprint(rm.tag, rm.moved)); err != nil {
				rm.fail(rel, err)
				return false
			}
			return true // to be met again at the top
		}
		sub, err := dir.OpenRoot(name)
		if err != nil {
			rm.fail(rel, err)
			return false
		}
		if rm.top == nil {
			rm.top = sub
		}
		empty := rm.clear(sub, rel, depth)
		_ = sub.Close()
		if !empty {
			return false
		}
	}
	if err := dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		rm.fail(rel, err)
		return false
	}
	return true
}

// clear deletes everything in dir and reports whether it is empty.
func (rm *remover) clear(dir *os.Root, rel string, depth int) bool {
	stuck := map[string]bool{}
	for {
		if err := rm.ctx.Err(); err != nil {
			rm.fail(rel, context.Cause(rm.ctx))
			return false
		}
		names, err := someNames(dir, len(stuck)+batch)
		if err != nil {
			rm.fail(rel, err)
			return false
		}
		fresh := false
		for _, name := range names {
			if stuck[name] {
				continue
			}
			fresh = true
			if !rm.entry(dir, name, filepath.Join(rel, name), depth+1) {
				stuck[name] = true
			}
		}
		if !fresh {
			return len(stuck) == 0
		}
	}
}

// someNames lists up to n names of a directory.
func someNames(dir *os.Root, n int) ([]string, error) {
	f, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(n)
	if err == io.EOF {
		err = nil
	}
	return names, err
}
