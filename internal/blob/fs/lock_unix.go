//go:build unix

package fs

import (
	"errors"
	"os"
	"syscall"
)

// lockDir locks a directory for this open file and returns it, or nil if some
// living process holds the lock. The lock ends with the process.
func lockDir(path string) (*os.File, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, err
}

// syncDir makes the entries of a directory durable. When it could not be opened,
// by which nothing is lost, the error is an unopened.
func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return unopened{err}
	}
	return errors.Join(f.Sync(), f.Close())
}
