//go:build unix

package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

// openNonblock keeps the opening of a pipe from blocking.
const openNonblock = syscall.O_NONBLOCK

func ownedByUs(fi fs.FileInfo) bool {
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}

// lockFile locks f for this process until it is closed and reports whether
// another process holds it.
func lockFile(f *os.File) (held bool, err error) {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EWOULDBLOCK):
			return true, nil
		default:
			return false, err
		}
	}
}

// reachable says which directory on the way to path keeps the user out.
func reachable(path string, u *executor.User) error {
	for dir := path; ; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err != nil {
			return ci.Errorf(ci.ErrUnavailable, "open %s", dir).WithCause(err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return ci.Errorf(ci.ErrInternal, "the owner of %s is not known", dir)
		}
		bit := fs.FileMode(0o001)
		switch {
		case st.Uid == u.UID:
			bit = 0o100
		case st.Gid == u.GID || slices.Contains(u.Groups, st.Gid):
			bit = 0o010
		}
		if fi.Mode().Perm()&bit == 0 {
			return ci.Errorf(ci.ErrInvalid, "the job user %s cannot reach the workspaces: %s is closed to it; choose another --data, or chmod a+x %s", u.Name, dir, dir)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}
