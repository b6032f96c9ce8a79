//go:build unix

package server

import (
	"os"
	"syscall"
)

// lockFile takes the file for this process until it is closed; false when
// another process holds it.
func lockFile(f *os.File) bool {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}
