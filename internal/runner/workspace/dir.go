package workspace

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

// keyLength is 60 bits in base32.
const keyLength = 12

// key names a lease below the root.
func key(l ci.LeaseRef) string {
	sum := sha256.Sum256([]byte(l.String()))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:keyLength]
}

// Dir is the private directory of one lease.
type Dir struct {
	root  *Root
	key   string
	lease ci.LeaseRef
	owner *executor.User
}

// Reachable reports whether a user can pass to the directories of jobs. If not it
// is ci.ErrInvalid and names the directory in the way.
func (r *Root) Reachable(u *executor.User) error {
	return reachable(filepath.Join(r.path, jobsDir), u)
}

// New makes the directory of a lease with what a job needs in it. Only the
// runner's user can enter it, and owner when it is not nil, who owns all in it
// that a job may write. It is ci.ErrConflict when the lease has one already, and
// ci.ErrInvalid, naming the directory in the way, when owner cannot reach it.
func (r *Root) New(lease ci.LeaseRef, owner *executor.User) (*Dir, error) {
	if _, err := ci.ParseLeaseRef(lease.String()); err != nil {
		return nil, err
	}
	d := &Dir{root: r, key: key(lease), lease: lease, owner: owner}
	if owner != nil {
		if err := r.Reachable(owner); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	taken := r.open[d.key]
	r.open[d.key] = true
	r.mu.Unlock()
	if taken {
		return nil, ci.Errorf(ci.ErrConflict, "%s has a workspace already", leaseText(lease))
	}
	if err := d.make(); err != nil {
		if !errors.Is(err, ci.ErrConflict) {
			_ = r.remove(context.Background(), d.key)
		}
		r.release(d.key)
		return nil, err
	}
	return d, nil
}

func (d *Dir) make() error {
	fail := func(err error) error {
		return ci.Errorf(ci.ErrUnavailable, "make the workspace of %s", leaseText(d.lease)).WithCause(err)
	}
	if err := d.root.dir.Mkdir(d.rel(""), 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return ci.Errorf(ci.ErrConflict, "%s has a workspace already", leaseText(d.lease)).WithCause(err)
		}
		return fail(err)
	}
	for _, name := range []string{"work", "home", "tmp", "steps"} {
		if err := d.root.dir.Mkdir(d.rel(name), 0o700); err != nil {
			return fail(err)
		}
	}
	if d.owner == nil {
		return nil
	}
	// The owner passes through these two by their group, and cannot change them.
	for _, name := range []string{"", "steps"} {
		if err := d.root.dir.Lchown(d.rel(name), os.Geteuid(), int(d.owner.GID)); err != nil {
			return fail(err)
		}
		if err := d.root.dir.Chmod(d.rel(name), 0o710); err != nil {
			return fail(err)
		}
	}
	for _, name := range []string{"work", "home", "tmp"} {
		if err := d.root.dir.Lchown(d.rel(name), int(d.owner.UID), int(d.owner.GID)); err != nil {
			return fail(err)
		}
	}
	return nil
}

// rel is a path in d, relative to the root.
func (d *Dir) rel(name string) string { return filepath.Join(jobsDir, d.key, name) }

// Path is the absolute path of the whole directory.
func (d *Dir) Path() string { return filepath.Join(d.root.path, d.rel("")) }

// Work is where the source goes and steps run.
func (d *Dir) Work() string { return filepath.Join(d.root.path, d.rel("work")) }

// Home is the steps' HOME.
func (d *Dir) Home() string { return filepath.Join(d.root.path, d.rel("home")) }

// Tmp is the steps' TMPDIR.
func (d *Dir) Tmp() string { return filepath.Join(d.root.path, d.rel("tmp")) }

// Steps is where scripts and output files of the steps are. A job with a user of
// its own cannot make, replace or remove files in it.
func (d *Dir) Steps() string { return filepath.Join(d.root.path, d.rel("steps")) }

// Job is the sandbox to open for this directory.
func (d *Dir) Job(grace time.Duration) executor.Job {
	return executor.Job{
		Lease: d.lease, Workspace: d.Work(), Home: d.Home(), Tmp: d.Tmp(), Steps: d.Steps(), Grace: grace,
	}
}

// GiveToOwner makes the owner of the directory the owner of everything below
// Work, after the runner has put the source there and before the first step.
// Links are not followed. Without an owner it does nothing.
func (d *Dir) GiveToOwner() error {
	if d.owner == nil {
		return nil
	}
	work, err := d.root.dir.OpenRoot(d.rel("work"))
	if err == nil {
		defer work.Close()
		err = fs.WalkDir(work.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return work.Lchown(path, int(d.owner.UID), int(d.owner.GID))
		})
	}
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "give the workspace to the job's user").WithCause(err)
	}
	return nil
}

// NewOutput makes the empty file through which a step gives its outputs
// (FORGECI_OUTPUT) and returns its absolute path. The step may write it; only
// with a user of its own it cannot replace it.
func (d *Dir) NewOutput(step int) (string, error) {
	rel := d.rel(outputName(step))
	f, err := d.root.dir.OpenFile(rel, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		err = f.Close()
		if err == nil && d.owner != nil {
			err = d.root.dir.Lchown(rel, int(d.owner.UID), int(d.owner.GID))
		}
	}
	if err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "make the output file of step %d", step).WithCause(err)
	}
	return filepath.Join(d.root.path, rel), nil
}

func outputName(step int) string { return filepath.Join("steps", "output-"+strconv.Itoa(step)) }

// ReadOutput returns what a step wrote to its output file. What is there is not
// trusted: a file larger than limit bytes is ci.ErrTooLarge, anything but a
// plain file (a link, a pipe that would block the reader) ci.ErrInvalid. A file
// that the step removed is empty.
func (d *Dir) ReadOutput(step int, limit int64) ([]byte, error) {
	rel := d.rel(outputName(step))
	notPlain := func(err error) error {
		return ci.Errorf(ci.ErrInvalid, "the output file of step %d was replaced by something that is not a plain file", step).WithCause(err)
	}
	before, err := d.root.dir.Lstat(rel)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil || !before.Mode().IsRegular() {
		return nil, notPlain(err)
	}
	f, err := d.root.dir.OpenFile(rel, os.O_RDONLY|openNonblock, 0)
	if err != nil {
		return nil, notPlain(err)
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !os.SameFile(fi, before) {
		return nil, notPlain(err)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "read the output file of step %d", step).WithCause(err)
	}
	if int64(len(b)) > limit {
		return nil, ci.Errorf(ci.ErrTooLarge, "the output file of step %d is larger than %d bytes", step, limit)
	}
	return b, nil
}

// Remove deletes the directory with all that is in it; only after the job's
// sandbox has ended. It follows no link and leaves file systems that were mounted
// in it alone. The error names the first entry that cannot be deleted; the rest
// is deleted all the same, and Sweep tries again when the runner starts.
func (d *Dir) Remove(ctx context.Context) error {
	if err := d.root.remove(ctx, d.key); err != nil {
		return err
	}
	d.root.release(d.key)
	return nil
}

func (r *Root) release(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, key)
}
