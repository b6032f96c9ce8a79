//go:build !unix

package fs

import (
	"os"
	"path/filepath"
)

// lockDir keeps a file open in the directory: the system refuses to remove a
// directory that holds an open file, which is what the lock is for.
func lockDir(path string) (*os.File, error) {
	name := filepath.Join(path, "lock")
	if os.Remove(name) != nil {
		if _, err := os.Stat(name); err == nil {
			return nil, nil
		}
	}
	return os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
}

// syncDir does nothing: the system has no call for it and orders renames and
// links in its own journal.
func syncDir(string) error { return nil }
