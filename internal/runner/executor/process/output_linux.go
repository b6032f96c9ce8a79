package process

import (
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stream carries one output of one step from a pipe to its writer.
type stream struct {
	r       *os.File
	w       io.Writer
	settled chan struct{} // closed when no Write will begin any more
	ended   chan struct{} // closed when the goroutine has ended

	mu        sync.Mutex
	last      bool // take what is in the pipe now, then settle
	abandoned bool // begin no Write
	eof       bool // every holder of the pipe has closed it
}

// newStream makes a pipe and starts to read it. The descriptor is the write end,
// in blocking mode, for the step; the caller closes it.
func newStream(w io.Writer) (*stream, int, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, 0, err
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		_ = syscall.Close(fds[0])
		_ = syscall.Close(fds[1])
		return nil, 0, err
	}
	s := &stream{
		r: os.NewFile(uintptr(fds[0]), "output"), w: w,
		settled: make(chan struct{}), ended: make(chan struct{}),
	}
	go s.copy()
	return s, fds[1], nil
}

// copy reads the pipe until its end, or until the stream is closed.
func (s *stream) copy() {
	defer close(s.ended)
	buf := make([]byte, 32<<10)
	for !s.isLast() {
		n, err := s.r.Read(buf)
		s.deliver(buf[:n])
		if err != nil && !os.IsTimeout(err) {
			s.settle(err == io.EOF)
			return
		}
	}
	// What was written before finish was called is still in the pipe, however
	// long the writer blocked; more than that nobody waits for.
	left := s.inPipe()
	for left > 0 {
		n, err := s.r.Read(buf[:min(left, len(buf))])
		s.deliver(buf[:n])
		if err != nil {
			break
		}
		left -= n
	}
	s.settle(s.atEOF())
	for {
		if _, err := s.r.Read(buf); err != nil {
			return
		}
	}
}

// deliver writes b unless the stream was abandoned or its writer has failed.
func (s *stream) deliver(b []byte) {
	if len(b) == 0 {
		return
	}
	s.mu.Lock()
	skip := s.abandoned
	s.mu.Unlock()
	if skip {
		return
	}
	if _, err := s.w.Write(b); err != nil {
		s.abandon()
	}
}

func (s *stream) isLast() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last {
		_ = s.r.SetReadDeadline(time.Time{})
	}
	return s.last
}

func (s *stream) settle(eof bool) {
	s.mu.Lock()
	s.eof = eof
	s.mu.Unlock()
	close(s.settled)
}

// finish makes the stream settle after it has delivered what is in the pipe.
func (s *stream) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = true
	_ = s.r.SetReadDeadline(time.Unix(1, 0)) // ends a Read that waits
}

// abandon makes every later Write a discard.
func (s *stream) abandon() {
	s.mu.Lock()
	s.abandoned = true
	s.mu.Unlock()
}

func (s *stream) isEOF() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.eof
}

// inPipe is how many bytes can be read without waiting.
func (s *stream) inPipe() int {
	n := 0
	if conn, err := s.r.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}

// atEOF reports whether no process holds the other end.
func (s *stream) atEOF() bool {
	gone := false
	if conn, err := s.r.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			gone = err == nil && n > 0 && p[0].Revents&unix.POLLHUP != 0
		})
	}
	return gone
}

// close ends reading. It waits for the goroutine unless a Write blocks.
func (s *stream) close() {
	s.abandon()
	_ = s.r.Close()
	select {
	case <-s.settled:
		<-s.ended
	default:
	}
}
