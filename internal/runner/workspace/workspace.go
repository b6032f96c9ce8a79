// Package workspace owns the directory below which a runner keeps its jobs'
// files: it makes a private directory for each lease, removes it, removes what a
// crashed runner left, and remembers which attempts are in progress.
//
// The layout, below a root that this package has made or found empty:
//
//	.forgeci-workspace   the mark of ownership, and the lock against a second runner
//	attempts             the attempts whose termination is not yet reported
//	jobs/KEY/            one lease: work, home, tmp, steps
//
// What is below jobs is the runner's by the mark above it. KEY is a digest of the
// lease's tuple and not the tuple itself, since programs put sockets below TMPDIR
// and the address of a socket has at most 107 bytes.
// Anything else below the root is not this package's and is never touched.
package workspace

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"forgeci/internal/ci"
)

// Names below the root.
const (
	markFile     = ".forgeci-workspace"
	attemptsFile = "attempts"
	jobsDir      = "jobs"
)

// markText begins the mark's file; the process ID of the runner follows.
const markText = "Jobs of a ForgeCI runner. Directories below jobs are deleted without asking.\n"

// Root is an open root, held by this process alone. It is safe for concurrent use.
type Root struct {
	path string // absolute, symbolic links of its parents resolved
	dir  *os.Root
	mark *os.File // locked
	log  *slog.Logger

	journal *journal

	mu   sync.Mutex
	open map[string]bool // keys of jobs in use by this process
}

// Open takes possession of root, an absolute path. A root that does not exist is
// made, an empty one adopted. It refuses with ci.ErrUnsafe a root that is a
// symbolic link, belongs to another user, lies where anyone can replace it, or
// holds files and not the mark of an earlier Open; and with ci.ErrConflict, which
// names the process, a root that another runner holds.
func Open(root string, log *slog.Logger) (*Root, error) {
	if !filepath.IsAbs(root) || strings.Contains(root, "\x00") {
		return nil, ci.Errorf(ci.ErrInvalid, "workspace root %q is not an absolute path", root)
	}
	path, err := place(filepath.Clean(root))
	if err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "open workspace root %s", path).WithCause(err)
	}
	r := &Root{path: path, dir: dir, log: log, open: map[string]bool{}}
	if err := r.take(); err != nil {
		_ = dir.Close()
		return nil, err
	}
	return r, nil
}

// place makes the root's directory if it is not there, and judges where it lies.
func place(root string) (string, error) {
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "make the directory of workspace root %s", root).WithCause(err)
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(root))
	if err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "open the directory of workspace root %s", root).WithCause(err)
	}
	if fi, err := os.Stat(parent); err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "open the directory of workspace root %s", root).WithCause(err)
	} else if fi.Mode().Perm()&0o002 != 0 && fi.Mode()&fs.ModeSticky == 0 {
		return "", ci.Errorf(ci.ErrUnsafe, "workspace root %s lies in a directory that anyone can write: choose another, or chmod o-w %s", root, parent)
	}
	path := filepath.Join(parent, filepath.Base(root))
	err = os.Mkdir(path, 0o711)
	if err == nil {
		err = os.Chmod(path, 0o711) // whatever the umask: a job's user passes through
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", ci.Errorf(ci.ErrUnavailable, "make workspace root %s", path).WithCause(err)
	}
	fi, err := os.Lstat(path)
	switch {
	case err != nil:
		return "", ci.Errorf(ci.ErrUnavailable, "open workspace root %s", path).WithCause(err)
	case fi.Mode()&fs.ModeSymlink != 0:
		return "", ci.Errorf(ci.ErrUnsafe, "workspace root %s is a symbolic link: name the directory itself", path)
	case !fi.IsDir():
		return "", ci.Errorf(ci.ErrUnsafe, "workspace root %s is not a directory", path)
	case !ownedByUs(fi):
		return "", ci.Errorf(ci.ErrUnsafe, "workspace root %s belongs to another user", path)
	}
	return path, nil
}

// take finds or writes the mark and locks it. The mark is the first file that is
// ever made in a root, so a root with files and no mark is somebody else's.
func (r *Root) take() error {
	mark, err := r.dir.OpenFile(markFile, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		names, err := r.names(".")
		if err != nil {
			return err
		}
		for _, name := range names {
			if name != markFile { // another runner may have made it just now
				return ci.Errorf(ci.ErrUnsafe, "workspace root %s holds files that are not a runner's (%q): choose an empty directory", r.path, name)
			}
		}
		mark, err = r.dir.OpenFile(markFile, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return ci.Errorf(ci.ErrUnavailable, "mark workspace root %s", r.path).WithCause(err)
		}
	} else if err != nil {
		return ci.Errorf(ci.ErrUnsafe, "the mark %s of workspace root %s cannot be opened", markFile, r.path).WithCause(err)
	}
	if err := r.lock(mark); err != nil {
		_ = mark.Close()
		return err
	}
	r.mark = mark
	err = r.dir.Mkdir(jobsDir, 0o711)
	if err == nil {
		err = r.dir.Chmod(jobsDir, 0o711)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		_ = mark.Close()
		return ci.Errorf(ci.ErrUnavailable, "make %s in workspace root %s", jobsDir, r.path).WithCause(err)
	}
	if r.journal, err = openJournal(r); err != nil {
		_ = mark.Close()
		return err
	}
	if jobs, err := r.dir.Open(jobsDir); err == nil {
		spread(jobs)
		_ = jobs.Close()
	}
	return nil
}

func (r *Root) lock(mark *os.File) error {
	held, err := lockFile(mark)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "lock workspace root %s", r.path).WithCause(err)
	}
	text, err := io.ReadAll(io.LimitReader(mark, 4096))
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "read the mark of workspace root %s", r.path).WithCause(err)
	}
	rest, ours := bytes.CutPrefix(text, []byte(markText))
	if !ours && len(text) > 0 { // empty: a crash right after it was made
		return ci.Errorf(ci.ErrUnsafe, "workspace root %s has a %s that no runner wrote", r.path, markFile)
	}
	if held {
		pid := strings.TrimSpace(string(rest))
		if pid == "" {
			pid = "unknown"
		}
		return ci.Errorf(ci.ErrConflict, "the directory %s is in use by another runner (process %s): stop it, or give this one its own --data", r.path, pid)
	}
	line := markText + strconv.Itoa(os.Getpid()) + "\n"
	if _, err = mark.WriteAt([]byte(line), 0); err == nil {
		err = mark.Truncate(int64(len(line)))
	}
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "mark workspace root %s", r.path).WithCause(err)
	}
	return nil
}

// Close gives the root back. Directories of open jobs stay.
func (r *Root) Close() error {
	r.journal.mu.Lock()
	defer r.journal.mu.Unlock()
	if r.journal.file != nil {
		r.journal.drop()
	}
	return errors.Join(r.mark.Close(), r.dir.Close())
}

// Path is the root's absolute path.
func (r *Root) Path() string { return r.path }

// names lists a directory of the root.
func (r *Root) names(dir string) ([]string, error) {
	f, err := r.dir.Open(dir)
	if err == nil {
		defer f.Close()
		var names []string
		if names, err = f.Readdirnames(-1); err == nil {
			return names, nil
		}
	}
	return nil, ci.Errorf(ci.ErrUnavailable, "list %s", filepath.Join(r.path, dir)).WithCause(err)
}

// writeDurably makes a file that is there after a crash, whole or not at all.
func (r *Root) writeDurably(dir, name string, content []byte) error {
	path, temporary := filepath.Join(dir, name), filepath.Join(dir, "."+name)
	err := func() error {
		f, err := r.dir.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		_, err = f.Write(content)
		if err == nil {
			err = f.Sync()
		}
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
		if err := r.dir.Rename(temporary, path); err != nil {
			return err
		}
		return r.syncDir(dir)
	}()
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "write %s", filepath.Join(r.path, path)).WithCause(err)
	}
	return nil
}

func (r *Root) syncDir(dir string) error {
	d, err := r.dir.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if e := d.Close(); err == nil {
		err = e
	}
	return err
}

// isKey reports whether a name is one that key makes.
func isKey(name string) bool {
	if len(name) != keyLength {
		return false
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}

func leaseText(l ci.LeaseRef) string {
	return fmt.Sprintf("job %s, epoch %d", l.Job, l.Epoch)
}
