//go:build unix

package cli

import "syscall"

// ownGroup gives a child a process group of its own.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
