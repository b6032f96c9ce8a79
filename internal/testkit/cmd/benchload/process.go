package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"forgeci/internal/testkit"
)

func buildBinary() (string, error) { return testkit.BuildBinary() }

// process is a program that was started, with its output in a file. It ends
// with this program at the latest.
type process struct {
	name   string
	pid    int
	log    string // file of its output
	admin  string // address of its profiles, if they are wanted
	exited chan struct{}
	state  *os.ProcessState // set before exited is closed
}

// environment is all that a started program inherits.
func (b *bench) environment() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "HOME=" + b.dir, "TMPDIR=" + b.dir}
}

// start starts a program in a process group of its own.
func (b *bench) start(name, path string, args ...string) (*process, error) {
	log, err := os.CreateTemp(b.dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &process{name: name, log: log.Name(), exited: make(chan struct{})}
	more, err := b.adminArgs(&p.admin)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, append(args, more...)...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = b.dir, b.environment(), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The death signal is tied to the thread that starts the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		p.pid = cmd.Process.Pid
		started <- nil
		_ = cmd.Wait() // says what the state says
		p.state = cmd.ProcessState
		close(p.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// stop asks the program to end, gently and then not, and removes its log. It is
// an error if it had ended before or did not obey.
func (p *process) stop() error {
	defer os.Remove(p.log) // it is in a directory that is removed
	select {
	case <-p.exited:
		return fmt.Errorf("%s had ended: %v\n%s", p.name, p.state, p.tail())
	default:
	}
	if err := syscall.Kill(p.pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("end %s: %w", p.name, err)
	}
	select {
	case <-p.exited:
		return nil
	case <-time.After(20 * time.Second):
	}
	err := fmt.Errorf("%s did not end within 20 s of SIGTERM\n%s", p.name, p.tail())
	if kill := syscall.Kill(-p.pid, syscall.SIGKILL); kill != nil && !errors.Is(kill, syscall.ESRCH) {
		err = errors.Join(err, kill)
	}
	<-p.exited
	return err
}

// tail is the end of the program's output.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// cpu is the processor time that the process itself has used.
func (p *process) cpu() (time.Duration, error) {
	own, _, err := p.times()
	return own, err
}

// times is the processor time of the process and of its children that have ended.
func (p *process) times() (own, children time.Duration, err error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "stat"))
	if err != nil {
		return 0, 0, err
	}
	// The name, in parentheses, may hold anything; utime, stime, cutime and cstime
	// are fields 14 to 17.
	_, rest, ok := bytes.Cut(text[max(bytes.LastIndexByte(text, ')'), 0):], []byte(") "))
	fields := strings.Fields(string(rest))
	if !ok || len(fields) < 15 {
		return 0, 0, fmt.Errorf("stat of %s cannot be read", p.name)
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	var sums [2]time.Duration
	for i, field := range fields[11:15] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("stat of %s: %w", p.name, err)
		}
		sums[i/2] += time.Duration(n) * tick
	}
	return sums[0], sums[1], nil
}

// memory is what /proc/PID/status says of a process, in bytes.
type memory struct{ anon, rss, peak int64 }

func (p *process) memory() (memory, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "status"))
	if err != nil {
		return memory{}, err
	}
	var m memory
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			continue // a line that is no size
		}
		switch key {
		case "RssAnon":
			m.anon = kib << 10
		case "VmRSS":
			m.rss = kib << 10
		case "VmHWM":
			m.peak = kib << 10
		}
	}
	if m.anon == 0 || m.rss == 0 || m.peak == 0 {
		return memory{}, fmt.Errorf("status of %s cannot be read", p.name)
	}
	return m, nil
}
