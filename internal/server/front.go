package server

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"time"

	"golang.org/x/net/netutil"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/api"
)

// Bounds of connections. They end who sends or reads too slowly and leave alone
// who waits for an answer: a long poll has sent its body, an event stream shows
// signs of life.
const (
	headerIn = 10 * time.Second // a request's header
	idle     = 2 * time.Minute  // between two requests
	firstIn  = 30 * time.Second // a body, and then as long as
	slowest  = 4 << 10          // bytes a second allow
	blockOut = 30 * time.Second // a reader may not take a block of the answer for
	block    = 256 << 10
	// pageBeat is how often an event stream of the pages shows that it lives and
	// asks whether its viewer may still look: a revoked one is gone within 5 s.
	pageBeat = 4 * time.Second
	// Open connections, at about 20 KiB each; who comes on top waits to be let in.
	connections = 10_000
)

// front is the door: every request passes it, and none leaves with the process
// or holds a connection for ever.
func front(log *slog.Logger, next http.Handler) http.Handler {
	guard := http.NewCrossOriginProtection()
	guard.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		protocol.WriteProblem(w, ci.Errorf(ci.ErrForbidden, "this comes from a page of another site, which may change nothing here"), "")
	}))
	inner := guard.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := &patient{ResponseWriter: w, control: http.NewResponseController(w)}
		_ = out.control.SetWriteDeadline(time.Time{}) // the last answer's on this connection
		if r.ContentLength != 0 {
			in := &steady{body: r.Body, control: out.control, start: time.Now()}
			in.extend()
			r.Body = in
		}
		defer func() {
			p := recover()
			switch {
			case p == nil:
			case p == http.ErrAbortHandler || out.begun:
				panic(http.ErrAbortHandler) // an answer that is not whole must not look so
			default:
				log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
				protocol.WriteProblem(out, ci.Errorf(ci.ErrInternal, "panic"), "")
			}
		}()
		if err := api.WellFormed(r); err != nil {
			protocol.WriteProblem(out, err, "")
			return
		}
		inner.ServeHTTP(out, r)
	})
}

// steady is a body that must keep coming.
type steady struct {
	body    io.ReadCloser
	control *http.ResponseController
	start   time.Time
	n       int64
}

func (s *steady) extend() {
	_ = s.control.SetReadDeadline(s.start.Add(firstIn + time.Duration(s.n)*time.Second/slowest))
}

// Read implements io.Reader; late bytes are os.ErrDeadlineExceeded. At its end
// the connection may be silent again for as long as the answer takes.
func (s *steady) Read(b []byte) (int, error) {
	n, err := s.body.Read(b)
	s.n += int64(n)
	switch {
	case errors.Is(err, io.EOF):
		_ = s.control.SetReadDeadline(time.Time{})
	case err == nil:
		s.extend()
	}
	return n, err
}

// Close implements io.Closer.
func (s *steady) Close() error { return s.body.Close() }

// patient is an answer that must be taken.
type patient struct {
	http.ResponseWriter
	control *http.ResponseController
	begun   bool
}

// Unwrap lets http.ResponseController reach the connection.
func (p *patient) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p *patient) wait() {
	p.begun = true
	_ = p.control.SetWriteDeadline(time.Now().Add(blockOut))
}

// WriteHeader implements http.ResponseWriter.
func (p *patient) WriteHeader(status int) {
	p.wait()
	p.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (p *patient) Write(b []byte) (int, error) {
	done := 0
	for {
		p.wait()
		n, err := p.ResponseWriter.Write(b[done:min(done+block, len(b))])
		done += n
		if err != nil || done == len(b) {
			return done, err
		}
	}
}

// limited bounds the open connections.
func limited(l net.Listener) net.Listener { return netutil.LimitListener(l, connections) }
