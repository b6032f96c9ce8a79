package testkit

import (
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// postgresAccount returns the account under which PostgreSQL runs: nil for the
// caller's own, the system user postgres when the caller is root, since the
// server refuses root.
func postgresAccount() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil //nolint:nilnil // nil is the documented answer: no change of account
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root and there is no user postgres: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// copyTree copies a directory with owners, modes and times.
func copyTree(from, to string) error {
	if out, err := exec.Command("cp", "-a", "--reflink=auto", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w\n%s", from, err, out)
	}
	return nil
}

// Ports for programs that are told where to listen: below those that systems
// choose themselves (Linux begins at 32768), so that no connection and no listener
// without a choice takes one before its program does.
const (
	firstPort = 20_000
	lastPort  = 32_000
)

// freePort returns a TCP port of the loopback interface on which nobody listens.
// No other caller on this machine is given it while this process lives.
func freePort() (int, error) {
	if err := os.MkdirAll(cacheDir(), 0o755); err != nil {
		return 0, err
	}
	// Not os.OpenFile: the lock is held until the process ends.
	file, err := syscall.Open(filepath.Join(cacheDir(), "ports"), syscall.O_RDWR|syscall.O_CREAT|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return 0, fmt.Errorf("open the list of ports: %w", err)
	}
	for range 1000 {
		port := firstPort + mathrand.IntN(lastPort-firstPort)
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(port), Len: 1}
		if unix.FcntlFlock(uintptr(file), unix.F_OFD_SETLK, &lock) != nil {
			continue // somebody has it
		}
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue // the lock that is left behind harms nobody
		}
		return port, l.Close()
	}
	return 0, errors.Join(errors.New("no free port"), syscall.Close(file))
}

// randomText returns n lower-case letters and digits.
func randomText(n int) string {
	return strings.ToLower(rand.Text())[:n]
}

// childrenOf lists the direct children of a process.
func childrenOf(parent int) ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		// pid (name) state ppid …; the name may hold anything, so cut after it.
		text := string(b)
		fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		if len(fields) < 2 || fields[1] != strconv.Itoa(parent) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
