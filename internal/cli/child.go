package cli

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"forgeci/internal/ci"
)

// child is a process of this binary that this process looks after. It has a
// process group of its own, so that Ctrl-C in a terminal reaches the parent
// alone, and it ends when the parent does, however that happens: it watches its
// standard input, whose other end is here.
type child struct {
	cmd    *exec.Cmd
	life   *os.File
	exited chan struct{} // closed after err is set
	err    error
}

// startChild starts this binary with other arguments. Its output goes to out.
func startChild(args, environ []string, out io.Writer) (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, ci.Errorf(ci.ErrInternal, "this program cannot find itself").WithCause(err)
	}
	stdin, life, err := os.Pipe()
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "start %s", args[0]).WithCause(err)
	}
	defer stdin.Close()
	c := &child{life: life, exited: make(chan struct{})}
	c.cmd = exec.Command(exe, append(args, "--"+lifelineFlag)...) //nolint:noctx // its end is in end, with more than one signal
	c.cmd.Env, c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = environ, stdin, out, out
	c.cmd.SysProcAttr = ownGroup()
	c.cmd.WaitDelay = time.Second
	if err := c.cmd.Start(); err != nil {
		life.Close()
		return nil, ci.Errorf(ci.ErrUnavailable, "start %s", args[0]).WithCause(err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

// stopBound is how long a child may take to stop its jobs and hand them over:
// more than the grace that a job has between SIGTERM and SIGKILL.
const stopBound = ci.DefaultGrace + 10*time.Second

// end asks the child to drain, after drain or when hurry ends to stop, and kills
// it when it does not. It returns when the child has ended.
func (c *child) end(hurry <-chan struct{}, drain time.Duration) {
	defer c.life.Close()
	select {
	case <-c.exited:
		return
	default:
	}
	select {
	case <-hurry:
	default:
		c.ask(syscall.SIGTERM)
		if c.within(hurry, drain) {
			return
		}
	}
	c.ask(syscall.SIGQUIT) // not SIGTERM once more: two that are pending are one
	if c.within(nil, stopBound) {
		return
	}
	_ = c.cmd.Process.Kill() // it may just have ended
	<-c.exited
}

func (c *child) ask(s os.Signal) {
	if c.cmd.Process.Signal(s) != nil {
		c.life.Close() // a system without signals
	}
}

func (c *child) within(hurry <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.exited:
		return true
	case <-t.C:
		return false
	case <-hurry:
		return false
	}
}

// childEnvironment is this process's environment without the variables that
// stand in for flags: a child has what its command line says.
func (a *app) childEnvironment() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(a.variables, name)
	})
}

// Bounds of the pauses between starts of a child that does not stay alive.
const (
	firstRestart   = time.Second
	longestRestart = 30 * time.Second
	settled        = time.Minute // alive for so long, the next pause is the first again
)

// supervise keeps a child alive until ctx ends, then ends it: gently for drain,
// unless hurry ends too. A child that ends with success was asked to drain, by an
// operator or by a signal, and is not started again.
func supervise(ctx context.Context, hurry <-chan struct{}, log *slog.Logger, start func() (*child, error), drain time.Duration) {
	wait := firstRestart
	for {
		began := time.Now()
		c, err := start()
		if err == nil {
			select {
			case <-ctx.Done():
				c.end(hurry, drain)
				return
			case <-c.exited:
				c.life.Close()
				if c.cmd.ProcessState.Success() {
					log.InfoContext(ctx, "the runner beside the server has drained; it starts again with the server")
					<-ctx.Done()
					return
				}
				err = c.err
			}
		}
		if time.Since(began) > settled {
			wait = firstRestart
		}
		log.ErrorContext(ctx, "the runner beside the server has ended", "error", err, "restart_in", wait.String())
		if pause(ctx, wait) != nil {
			return
		}
		wait = min(2*wait, longestRestart)
	}
}
