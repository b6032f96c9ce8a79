package testkit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Binary returns the path of the forgeci binary, built from the sources of this
// tree once per test process.
func Binary(t testing.TB) string {
	t.Helper()
	path, err := builtBinary()
	if err != nil {
		t.Fatalf("build forgeci: %v", err)
	}
	return path
}

// builtBinary builds once; it is a function, not state.
var builtBinary = sync.OnceValues(func() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cacheDir(), "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	fresh := filepath.Join(dir, "building-"+randomText(8))
	defer os.Remove(fresh) // it has been renamed when all went well
	cmd := exec.Command("go", "build", "-o", fresh, "./cmd/forgeci")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	// Named after its content: processes that build at the same time share one
	// file, and no running program is ever written to.
	digest, err := fileDigest(fresh)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "forgeci-"+digest[:16])
	if err := os.Rename(fresh, path); err != nil {
		return "", err
	}
	return path, removeOlder(dir, path, 24*time.Hour)
})

// cacheDir is where the kit keeps what it made once for many runs.
func cacheDir() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "forgeci-test")
}

// moduleRoot finds the directory of go.mod above the working directory, which
// for a test is its package's.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}

func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// removeOlder deletes the files of dir, except keep, that have not been
// modified for age.
func removeOlder(dir, keep string, age time.Duration) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		path := filepath.Join(dir, e.Name())
		if err != nil || path == keep || time.Since(info.ModTime()) < age {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Command says what to start.
type Command struct {
	// Path is the program; empty means the forgeci binary of this tree.
	Path string
	Args []string
	// Env is added to PATH, LC_ALL and a HOME and TMPDIR of the test's own;
	// nothing else is inherited.
	Env []string
	// Dir is the working directory; empty means a fresh one.
	Dir string
	// Stdin is the whole input.
	Stdin string
}

// Process is a started program. Its output goes to the test's log, line by
// line, and is kept. It is killed with its process group when the test ends,
// and also when the test process is killed. Methods may be called from any
// goroutine.
type Process struct {
	name           string
	pid            int
	stdout, stderr *capture
	exited         chan struct{}
	state          *os.ProcessState // set before exited is closed
}

// Start starts the program in a process group of its own.
func Start(t testing.TB, c Command) *Process {
	t.Helper()
	path := c.Path
	if path == "" {
		path = Binary(t)
	}
	cmd := exec.Command(path, c.Args...)
	cmd.Dir = c.Dir
	if cmd.Dir == "" {
		cmd.Dir = t.TempDir()
	}
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "HOME=" + t.TempDir(), "TMPDIR=" + t.TempDir()}, c.Env...)
	if c.Stdin != "" {
		cmd.Stdin = strings.NewReader(c.Stdin)
	}
	p := &Process{name: filepath.Base(path), exited: make(chan struct{})}
	if len(c.Args) > 0 {
		p.name = c.Args[0]
	}
	p.stdout, p.stderr = &capture{prefix: p.name + ": ", log: t.Output()}, &capture{prefix: p.name + ": ", log: t.Output()}
	cmd.Stdout, cmd.Stderr = p.stdout, p.stderr
	// A grandchild may hold the pipes open after the program has ended.
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error)
	go func() {
		// The death signal is tied to the thread that starts the program, so
		// that thread has to live as long as the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // says what the state says, or that a grandchild held the output open
		p.state = cmd.ProcessState
		close(p.exited)
	}()
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	t.Cleanup(func() {
		// The group may outlive its leader.
		if err := syscall.Kill(-p.pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Errorf("end %s: %v", p.name, err)
		}
		<-p.exited
		p.stdout.end()
		p.stderr.end()
	})
	return p
}

// PID returns the process ID.
func (p *Process) PID() int { return p.pid }

// Stdout returns what the program has written to its standard output so far.
func (p *Process) Stdout() string { return p.stdout.String() }

// Stderr returns what the program has written to its standard error so far.
func (p *Process) Stderr() string { return p.stderr.String() }

// Exited is closed when the program has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Signal sends a signal to the program alone, not to its children: SIGTERM asks
// it to end, SIGKILL is a crash, SIGSTOP and SIGCONT pause it.
func (p *Process) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	select {
	case <-p.exited:
		t.Fatalf("%v to %s: it has ended: %v", sig, p.name, p.state)
	default:
	}
	if err := syscall.Kill(p.pid, sig); err != nil {
		t.Fatalf("%v to %s: %v", sig, p.name, err)
	}
}

// Wait waits for the program's end and returns its exit code; a program that
// was ended by signal N counts as 128+N. It fails the test after the timeout.
func (p *Process) Wait(t testing.TB, timeout time.Duration) int {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(timeout):
		t.Fatalf("%s did not end within %v", p.name, timeout)
	}
	if status, ok := p.state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return p.state.ExitCode()
}

// WaitReady waits until a GET of the URL answers 2xx. It fails the test at once
// when the program ends before, and after a minute.
func (p *Process) WaitReady(t testing.TB, url string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A client of its own: no connection is kept for a later test.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	for {
		last := probe(ctx, client, url)
		if last == nil {
			return
		}
		select {
		case <-p.exited:
			t.Fatalf("%s ended before %s answered: %v\n%s", p.name, url, p.state, p.Stderr())
		case <-ctx.Done():
			t.Fatalf("%s: %s is not ready: %v", p.name, url, last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func probe(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return errors.New(resp.Status)
	}
	return nil
}

// Result is what a program that has ended left behind.
type Result struct {
	Code           int // as of Process.Wait
	Stdout, Stderr string
}

// Run starts the program and waits up to a minute for its end.
func Run(t testing.TB, c Command) Result {
	t.Helper()
	p := Start(t, c)
	code := p.Wait(t, time.Minute)
	return Result{Code: code, Stdout: p.Stdout(), Stderr: p.Stderr()}
}

// FreeAddr returns a loopback address whose port was free a moment ago, for a
// program that has to be told where to listen.
func FreeAddr(t testing.TB) string {
	t.Helper()
	port, err := freePort()
	if err != nil {
		t.Fatalf("find a free port: %v", err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// ProcessesWith returns the IDs of the processes of this machine that carry the
// variable in the environment they were started with, for example
// ProcessesWith(t, "FORGECI_OPERATION_ID=op_1"). Zombies carry none. The
// calling process is left out.
func ProcessesWith(t testing.TB, variable string) []int {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range paths {
		env, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile, or is another user's
		}
		if !bytes.Contains(append([]byte{0}, env...), []byte("\x00"+variable+"\x00")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		if pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// capture keeps everything that is written and copies whole lines to a test's
// log.
type capture struct {
	prefix string
	log    io.Writer

	mu    sync.Mutex
	all   bytes.Buffer // guarded by mu
	shown int          // bytes of all that are in the log; guarded by mu
	ended bool         // the test is over and its log closed; guarded by mu
}

// Write never fails.
func (c *capture) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all.Write(b)
	for !c.ended {
		rest := c.all.Bytes()[c.shown:]
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			break
		}
		fmt.Fprintf(c.log, "%s%s", c.prefix, rest[:i+1])
		c.shown += i + 1
	}
	return len(b), nil
}

func (c *capture) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all.String()
}

// end shows what is left and writes no more to the test's log.
func (c *capture) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rest := c.all.Bytes()[c.shown:]; len(rest) > 0 {
		fmt.Fprintf(c.log, "%s%s\n", c.prefix, rest)
	}
	c.ended = true
}
