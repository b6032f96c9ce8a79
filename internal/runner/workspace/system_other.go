//go:build !unix

package workspace

import (
	"errors"
	"io/fs"
	"os"

	"forgeci/internal/runner/executor"
)

const openNonblock = 0

func ownedByUs(fs.FileInfo) bool { return true }

// lockFile fails: a runner on this system needs another kind of lock first.
func lockFile(*os.File) (held bool, err error) { return false, errors.ErrUnsupported }

func reachable(string, *executor.User) error { return errors.ErrUnsupported }
