package process

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor/process/jobhelper"
)

const (
	// defaultHelperWait bounds how long the helper may take for an answer that does
	// not depend on the job. A helper that takes longer was stopped or starved; it
	// is killed and the sandbox with it.
	defaultHelperWait = 30 * time.Second
	// defaultKillWait bounds how long killed processes may take to disappear. Only
	// the kernel can delay them (a dead network file system).
	defaultKillWait = 10 * time.Second
)

// client is the runner's side of one helper.
type client struct {
	conn   *net.UnixConn
	wait   time.Duration // helperWait
	proc   *os.Process
	id     process
	events chan *jobhelper.Message // closed when the helper's end of the socket is closed
	exited chan struct{}           // closed when the helper has ended and was reaped
	quit   chan struct{}           // closed by close
}

// startHelper starts this binary again as a helper, with the record as the one
// file it holds.
func startHelper(rec *record, file *os.File, wait time.Duration) (*client, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	theirs := os.NewFile(uintptr(fds[1]), "helper")
	defer theirs.Close()
	ours := os.NewFile(uintptr(fds[0]), "runner")
	c, err := net.FileConn(ours) // a duplicate in non-blocking mode
	_ = ours.Close()
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, errors.New("not a unix socket")
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	defer null.Close()
	proc, err := os.StartProcess("/proc/self/exe", []string{jobhelper.Name, rec.ID}, &os.ProcAttr{
		Dir:   "/",
		Env:   []string{"GOMAXPROCS=2"},
		Files: []*os.File{null, null, file, theirs},
		// Not a session of its own: that tells helpers from processes of jobs.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	h := &client{
		conn: conn, wait: wait, proc: proc, id: process{PID: proc.Pid},
		events: make(chan *jobhelper.Message), exited: make(chan struct{}), quit: make(chan struct{}),
	}
	if p, err := jobhelper.ReadProc(proc.Pid); err == nil {
		h.id.Start = p.Start
	}
	if b, err := json.Marshal(h.id); err == nil {
		_, _ = file.Write(append(b, '\n'))
	}
	go func() {
		_, _ = proc.Wait()
		close(h.exited)
	}()
	go func() {
		defer close(h.events)
		for {
			m, err := jobhelper.ReadMessage(conn)
			if err != nil {
				return
			}
			select {
			case h.events <- m:
			case <-h.quit:
				return
			}
		}
	}()
	return h, nil
}

// send sends a message, with descriptors for KindStart.
func (c *client) send(m *jobhelper.Message, fds ...int) error {
	header, payload, err := jobhelper.Encode(m)
	if err != nil {
		return err
	}
	if err := c.conn.SetWriteDeadline(time.Now().Add(c.wait)); err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	if _, _, err := c.conn.WriteMsgUnix(header, rights, nil); err != nil {
		return err
	}
	_, err = c.conn.Write(payload)
	return err
}

// expect returns the first message of one of the kinds, for the step seq or for
// the job. It fails with a sandbox failure when the helper is gone or silent.
func (c *client) expect(seq uint32, kinds ...jobhelper.Kind) (*jobhelper.Message, error) {
	silent := time.NewTimer(c.wait)
	defer silent.Stop()
	for {
		select {
		case m, ok := <-c.events:
			if !ok {
				return nil, errHelperGone()
			}
			for _, k := range kinds {
				if m.Kind == k && m.Seq == seq {
					return m, nil
				}
			}
		case <-silent.C:
			return nil, ci.Errorf(ci.ErrUnavailable, "the job's helper process does not answer")
		}
	}
}

func errHelperGone() *ci.Error {
	return ci.Errorf(ci.ErrUnavailable, "the job's helper process was killed")
}

// kill ends the helper if it has not ended, and returns when it was reaped: from
// then on the kernel has given its children to the runner.
func (c *client) kill() {
	select {
	case <-c.exited:
	default:
		_ = c.proc.Kill()
		<-c.exited
	}
}

// close frees what the client holds. The helper has ended or ends by it.
func (c *client) close() {
	close(c.quit)
	_ = c.conn.Close()
	for range c.events { // wait until the reader has ended
	}
	<-c.exited
}

// startInGroup tries whether a new process can be put into a cgroup v2 as it is
// made: it starts a helper that has no socket and therefore ends at once.
func startInGroup(g *jobhelper.Group) error {
	dir, err := os.Open(g.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	proc, err := os.StartProcess("/proc/self/exe", []string{jobhelper.Name, filepath.Base(g.Dir)}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{null, null, null, null},
		Sys: &syscall.SysProcAttr{Setpgid: true, UseCgroupFD: true, CgroupFD: int(dir.Fd())},
	})
	if err != nil {
		return err
	}
	state, err := proc.Wait()
	if err == nil && !state.Success() {
		err = &fs.PathError{Op: "start", Path: g.Dir, Err: syscall.EIO}
	}
	return err
}
