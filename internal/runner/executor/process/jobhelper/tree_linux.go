package jobhelper

import (
	"os"
	"syscall"
)

// Proc is one process as /proc showed it.
type Proc struct {
	PID, PPID int
	Session   int
	State     byte   // 'Z' for a zombie
	Start     uint64 // clock ticks since boot; with PID it names the process
}

// Dead reports whether p has ended and only waits to be reaped.
func (p Proc) Dead() bool { return p.State == 'Z' || p.State == 'X' }

// ReadProc reads /proc/PID/stat.
func ReadProc(pid int) (Proc, error) {
	b, err := os.ReadFile("/proc/" + itoa(pid) + "/stat")
	if err != nil {
		return Proc{}, err
	}
	// The command's name is in parentheses and may hold anything.
	i := len(b) - 1
	for i >= 0 && b[i] != ')' {
		i--
	}
	f := fields(string(b[i+1:]))
	if i < 0 || len(f) < 20 {
		return Proc{}, syscall.ESRCH
	}
	p := Proc{PID: pid, State: f[0][0]}
	p.PPID, _ = atoi(f[1])
	p.Session, _ = atoi(f[3])
	start, ok := atoi(f[19])
	if !ok {
		return Proc{}, syscall.ESRCH
	}
	p.Start = uint64(start)
	return p, nil
}

// Processes lists all processes that /proc shows. A process that starts or ends
// meanwhile may be missing.
func Processes() ([]Proc, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	procs := make([]Proc, 0, len(names))
	for _, name := range names {
		pid, ok := atoi(name)
		if !ok {
			continue
		}
		if p, err := ReadProc(pid); err == nil {
			procs = append(procs, p)
		}
	}
	return procs, nil
}

// Descendants returns the processes below any of the roots, the roots
// themselves left out.
func Descendants(procs []Proc, roots ...int) []Proc {
	children := make(map[int][]Proc, len(procs))
	for _, p := range procs {
		children[p.PPID] = append(children[p.PPID], p)
	}
	seen := make(map[int]bool, len(roots))
	for _, r := range roots {
		seen[r] = true
	}
	var found []Proc
	for next := append([]int(nil), roots...); len(next) > 0; next = next[1:] {
		for _, c := range children[next[0]] {
			if !seen[c.PID] {
				seen[c.PID] = true
				found = append(found, c)
				next = append(next, c.PID)
			}
		}
	}
	return found
}

// System call numbers that all Linux architectures share.
const (
	sysPidfdSendSignal = 424
	sysPidfdOpen       = 434
	sysCloseRange      = 436
)

// Signal sends sig to exactly the process that p describes: when its number was
// given to another process since, nobody gets it and the error is ESRCH.
func Signal(p Proc, sig syscall.Signal) error {
	fd, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(p.PID), 0, 0)
	if errno == syscall.ENOSYS { // before Linux 5.3
		if now, err := ReadProc(p.PID); err != nil || now.Start != p.Start {
			return syscall.ESRCH
		}
		return syscall.Kill(p.PID, sig)
	}
	if errno != 0 {
		return errno
	}
	defer syscall.Close(int(fd))
	// The descriptor names whoever has the number now; look only after it is open.
	if now, err := ReadProc(p.PID); err != nil || now.Start != p.Start {
		return syscall.ESRCH
	}
	if _, _, errno := syscall.Syscall6(sysPidfdSendSignal, fd, uintptr(sig), 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// Terminate asks each process to end, and wakes those that are stopped so that
// they can.
func Terminate(procs []Proc) {
	for _, p := range procs {
		if Signal(p, syscall.SIGTERM) == nil {
			_ = Signal(p, syscall.SIGCONT)
		}
	}
}

// KillFound kills what find returns and returns how many processes it met in the
// last look. They are stopped first, until a look finds no new one, so that a
// tree that keeps forking cannot outrun the signal.
func KillFound(find func() []Proc) int {
	stopped := map[procID]bool{}
	var procs []Proc
	for range 10 {
		procs = procs[:0]
		fresh := 0
		for _, p := range find() {
			if p.Dead() {
				continue
			}
			procs = append(procs, p)
			if !stopped[procID{p.PID, p.Start}] {
				stopped[procID{p.PID, p.Start}] = true
				fresh++
				_ = Signal(p, syscall.SIGSTOP)
			}
		}
		if fresh == 0 {
			break
		}
	}
	for _, p := range procs {
		_ = Signal(p, syscall.SIGKILL)
	}
	return len(procs)
}

const prSetChildSubreaper = 36

// BecomeSubreaper makes the calling process the parent of all orphans among its
// descendants. It holds for the whole process and cannot fail on Linux 3.4 or later.
func BecomeSubreaper() error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		return errno
	}
	return nil
}

// inheritNothing makes every descriptor from first on close-on-exec, also those
// that a careless parent of the runner left open.
func inheritNothing(first int) {
	const cloexec = 4
	if _, _, errno := syscall.Syscall(sysCloseRange, uintptr(first), uintptr(^uint32(0)), cloexec); errno == 0 {
		return
	}
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if fd, ok := atoi(name); ok && fd >= first {
			syscall.CloseOnExec(fd)
		}
	}
}

// The following would be in strconv and strings, which this package cannot use
// (see the package comment).

// atoi reads a decimal number without a sign.
func atoi(s string) (n int, ok bool) {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' || n > (1<<63-1)/10-1 {
			return 0, false
		}
		n = n*10 + int(s[i]-'0')
	}
	return n, len(s) > 0
}

// itoa writes a number that is not negative.
func itoa(n int) string {
	var b [20]byte
	i := len(b)
	for {
		i--
		b[i] = byte('0' + n%10)
		if n /= 10; n == 0 {
			return string(b[i:])
		}
	}
}

// fields splits s at spaces and newlines.
func fields(s string) []string {
	var f []string
	for begin, i := -1, 0; i <= len(s); i++ {
		space := i == len(s) || s[i] == ' ' || s[i] == '\n'
		switch {
		case space && begin >= 0:
			f, begin = append(f, s[begin:i]), -1
		case !space && begin < 0:
			begin = i
		}
	}
	return f
}
