package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
)

// logQuery reads the parameters of the log routes.
func logQuery(r *http.Request) (logs.Query, error) {
	v := r.URL.Query()
	q := logs.Query{Job: jobID(r), Stream: v.Get("stream"), Search: v.Get("q"), After: v.Get("after")}
	if q.After == "" {
		q.After = r.Header.Get("Last-Event-ID")
	}
	var err error
	read := func(name string, absent, least, most int64) (n int64) {
		if err == nil {
			n, err = intParam(v.Get, name, absent, least, most)
		}
		return n
	}
	const far = 1 << 50
	q.Epoch = read("attempt", 0, 0, far)
	q.Tail = read("tail", 0, 0, far)
	q.From = read("from", 0, 0, far)
	q.Limit = int(read("limit", 0, 0, 10_000))
	if v.Get("step") != "" {
		n := int(read("step", 0, protocol.StepSystem, 10_000))
		q.Step = &n
	}
	switch q.Stream {
	case "", protocol.Stdout.String(), protocol.Stderr.String(), protocol.System.String():
	default:
		return q, ci.Errorf(ci.ErrInvalid, "?stream=%s: stdout, stderr or system is expected", clip(q.Stream, 20))
	}
	return q, err
}

// jobLog answers the bytes as they were written. A failure in the middle breaks
// the connection, so that a part cannot be taken for the whole.
func (a *API) jobLog(w http.ResponseWriter, r *http.Request, c caller) error {
	q, err := logQuery(r)
	if err != nil {
		return err
	}
	raw, err := a.Logs.Raw(r.Context(), c.viewer, q)
	if err != nil {
		return err
	}
	defer func() { _ = raw.Close() }()
	h := w.Header()
	h.Set("Content-Type", protocol.MediaBytes)
	h.Set("Content-Disposition", `attachment; filename="`+safeName(string(q.Job))+`.log"`)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set(protocol.HeaderLogEpoch, strconv.FormatInt(raw.Epoch, 10))
	h.Set(protocol.HeaderLogSealed, strconv.FormatBool(raw.Sealed))
	h.Set(protocol.HeaderLogTruncated, strconv.FormatBool(raw.Truncated))
	h.Set(protocol.HeaderLogLines, strconv.FormatInt(raw.Lines, 10))
	h.Set(protocol.HeaderLogTotal, strconv.FormatInt(raw.Total, 10))
	buf := make([]byte, 64<<10)
	n, err := raw.Read(buf) // the first bytes prove that there are any, before the status
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	w.WriteHeader(http.StatusOK)
	if _, werr := w.Write(buf[:n]); werr != nil || errors.Is(err, io.EOF) {
		return nil // the caller has gone
	}
	if _, err := io.CopyBuffer(w, struct{ io.Reader }{raw}, buf); err != nil {
		a.Log.WarnContext(r.Context(), "log was not sent whole", "job", q.Job, "error", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (a *API) jobLogLines(w http.ResponseWriter, r *http.Request, c caller) error {
	q, err := logQuery(r)
	if err != nil {
		return err
	}
	slice, err := a.Logs.Lines(r.Context(), c.viewer, q)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, slice)
}

// sse writes server-sent events. It is safe for concurrent use: a heartbeat runs
// beside the events.
type sse struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	rc   *http.ResponseController
	last time.Time
}

// How often a silent stream shows a sign of life, and how long one write may take
// before the viewer is given up.
const (
	sseHeartbeat = 10 * time.Second
	sseWrite     = 30 * time.Second
)

// startSSE begins a stream. It says nothing yet about the object's existence:
// call it after the first read has succeeded.
func startSSE(w http.ResponseWriter) *sse {
	h := w.Header()
	h.Set("Content-Type", protocol.MediaEvents)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	s := &sse{w: w, rc: http.NewResponseController(w), last: time.Now()}
	_ = s.rc.Flush()
	return s
}

func (s *sse) send(name, id string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var text string
	if id != "" {
		text = "id: " + id + "\n"
	}
	return s.write(text + "event: " + name + "\ndata: " + string(b) + "\n\n")
}

func (s *sse) write(text string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.rc.SetWriteDeadline(time.Now().Add(sseWrite)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := io.WriteString(s.w, text); err != nil {
		return err
	}
	s.last = time.Now()
	return s.rc.Flush()
}

// beat keeps the connection alive until ctx ends; a failed write calls gone.
func (s *sse) beat(ctx context.Context, gone func()) {
	t := time.NewTicker(sseHeartbeat)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			s.mu.Lock()
			quiet := time.Since(s.last) >= sseHeartbeat
			s.mu.Unlock()
			if quiet && s.write(": alive\n\n") != nil {
				gone()
				return
			}
		}
	}
}

// recheck is how often a stream asks again whether its viewer may still read.
// Together with how long auth remembers a credential it stays under 5 s.
const recheck = 2 * time.Second

// watchViewer ends a stream whose credential does not hold any more.
func (a *API) watchViewer(ctx context.Context, r *http.Request, gone func()) {
	t := time.NewTicker(recheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if _, err := a.Auth.ViewerOf(r, false); errors.Is(err, ci.ErrUnauthorized) {
				gone()
				return
			}
		}
	}
}

// stream runs a server-sent event stream until f returns, its viewer is gone, or
// the server is stopping: the viewer comes back to another node or to its
// successor. It does not when f returns an error that would be the same there: that
// is the stream's last event.
func (a *API) stream(w http.ResponseWriter, r *http.Request, f func(context.Context, *sse) error) error {
	ctx, cancel := context.WithCancel(r.Context())
	s := startSSE(w)
	var wg sync.WaitGroup
	wg.Go(func() { s.beat(ctx, cancel) })
	wg.Go(func() { a.watchViewer(ctx, r, cancel) })
	wg.Go(func() {
		select {
		case <-a.Engine.Stopping():
			cancel()
		case <-ctx.Done():
		}
	})
	err := f(ctx, s)
	final := ctx.Err() == nil && isFinal(err)
	cancel()
	wg.Wait()
	if final {
		_ = s.send(protocol.EventProblem, "", protocol.ProblemFrom(err, w.Header().Get(protocol.HeaderRequest)))
	}
	if err != nil && r.Context().Err() == nil {
		level := slog.LevelDebug
		if ci.KindOf(err) == ci.ErrDigest {
			level = slog.LevelWarn
		}
		a.Log.Log(r.Context(), level, "event stream ended", "path", r.URL.Path, "error", err)
	}
	return nil
}

// isFinal reports whether a stream's error is a refusal that the next try would meet
// again. What is not found is not: the next try is told at once if it is the log,
// and an object of it may come back.
func isFinal(err error) bool {
	e, ok := errors.AsType[*ci.Error](err)
	if !ok {
		return false
	}
	switch e.Kind {
	case ci.ErrUnavailable, ci.ErrRateLimited, ci.ErrInternal, ci.ErrNotFound:
		return false
	default:
		return true
	}
}

func (a *API) jobLogEvents(w http.ResponseWriter, r *http.Request, c caller) error {
	q, err := logQuery(r)
	if err != nil {
		return err
	}
	if err := a.Logs.Followable(r.Context(), c.viewer, q); err != nil {
		return err
	}
	return a.stream(w, r, func(ctx context.Context, s *sse) error {
		return a.Logs.Events(ctx, c.viewer, q, func(e logs.Event) error {
			if e.Sealed != nil {
				return s.send(protocol.EventSealed, e.Cursor, e.Sealed)
			}
			return s.send(protocol.EventLog, e.Cursor, e.Log)
		})
	})
}

// runEvents tells the run's summary at once and after each change until it has
// finished. Wake-ups are hints: it also looks by itself.
func (a *API) runEvents(w http.ResponseWriter, r *http.Request, c caller) error {
	id := runID(r)
	doc, err := a.Reader.Summary(r.Context(), c.viewer, id)
	if err != nil {
		return err
	}
	changes, stop := a.Engine.WatchRuns(c.viewer.Org, id)
	defer stop()
	return a.stream(w, r, func(ctx context.Context, s *sse) error {
		look := time.NewTicker(5 * time.Second)
		defer look.Stop()
		said := ""
		for {
			text := fmt.Sprint(doc.State, doc.Conclusion, doc.Jobs)
			if text != said {
				said = text
				if err := s.send(protocol.EventRun, "", doc); err != nil || doc.State == ci.StateFinished {
					return err
				}
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case _, more := <-changes:
				if !more {
					return nil // the server is stopping; the client comes back
				}
			case <-look.C:
			}
			next, err := a.Reader.Summary(ctx, c.viewer, id)
			switch {
			case err == nil:
				doc = next
			case ci.KindOf(err) != ci.ErrUnavailable:
				return err
			}
		}
	})
}
