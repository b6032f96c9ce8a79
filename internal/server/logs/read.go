package logs

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

// Query selects a part of a job's log.
type Query struct {
	Job    ci.JobID
	Epoch  int64  // attempt; 0 means the latest
	Step   *int   // nil means all; protocol.StepSystem is what belongs to no step
	Stream string // empty means all
	Tail   int64  // the last lines only; 0 means all
	From   int64  // Lines: number of the first line, from 1
	Limit  int    // Lines: most lines in one answer; 1000 when 0
	Search string // Lines: only lines that contain it
	After  string // Events: cursor to go on behind
}

// cursor names a position in an attempt's log.
func cursor(epoch, pos int64) string {
	return strconv.FormatInt(epoch, 10) + "-" + strconv.FormatInt(pos, 10)
}

func parseCursor(s string) (epoch, pos int64, err error) {
	e, p, ok := strings.Cut(s, "-")
	epoch, err1 := strconv.ParseInt(e, 10, 64)
	pos, err2 := strconv.ParseInt(p, 10, 64)
	if !ok || err1 != nil || err2 != nil || epoch < 1 || pos < 0 {
		return 0, 0, ci.Errorf(ci.ErrInvalid, "malformed cursor %q of a log", s)
	}
	return epoch, pos, nil
}

// resume returns the query for the attempt of its cursor, if it has one, and the
// position there.
func (q Query) resume() (Query, int64, error) {
	if q.After == "" {
		return q, 0, nil
	}
	epoch, pos, err := parseCursor(q.After)
	q.Epoch = epoch
	return q, pos, err
}

// piece is what one step of a walk yields: part of a record.
type piece struct {
	record
	data []byte // of a data record; must not be changed
	skip int64  // how much of the record lies before the piece
	size int64
}

// walk goes through a log's selection from a position on.
type walk struct {
	s    *Service
	v    *view
	sel  selection
	snap snapshot
	pos  int64
	i    int // record that holds pos, or the end
	// from is the line with which a tail begins; until a stream has come to it,
	// its bytes belong to earlier lines and are left out.
	from int64
	late map[store.LogStream]bool
}

func (s *Service) walk(v *view, sel selection, snap snapshot, pos int64) *walk {
	return &walk{s: s, v: v, sel: sel, snap: snap, pos: pos, i: snap.at(pos)}
}

// tail begins with the last n lines of the selection.
func (w *walk) tail(n int64) {
	w.from = w.snap.tail(w.sel, n)
	w.i = w.snap.from(w.from)
	w.pos = w.snap.end
	if w.i < len(w.snap.recs) {
		w.pos = w.snap.recs[w.i].pos
	}
	w.late = map[store.LogStream]bool{}
}

// use takes a newer snapshot; positions stay.
func (w *walk) use(snap snapshot) { w.snap, w.i = snap, snap.at(w.pos) }

// next returns the next piece of at most most bytes; io.EOF is the end of what
// is visible.
func (w *walk) next(ctx context.Context, most int64) (piece, error) {
	for try := 0; ; {
		if w.i >= len(w.snap.recs) {
			w.pos = max(w.pos, w.snap.end)
			return piece{}, io.EOF
		}
		r := w.snap.recs[w.i]
		if !w.sel.has(r.stream) {
			w.pos = r.pos + r.n
			w.i++
			continue
		}
		var b []byte
		if r.kind == data {
			var err error
			if b, err = w.s.load(ctx, w.snap, r); moved(err) && try < 3 {
				try++
				snap, err := w.s.look(ctx, w.v, 0)
				if err != nil {
					return piece{}, err
				}
				if snap.log.State == store.LogExpired {
					return piece{}, expired(snap.log)
				}
				w.use(snap)
				continue
			} else if err != nil {
				return piece{}, err
			}
		}
		p := piece{record: r, skip: w.pos - r.pos}
		if w.late != nil && !w.late[r.stream] {
			begin := lineStart(r, b, w.from)
			if begin < 0 {
				w.pos = r.pos + r.n
				w.i++
				continue
			}
			w.late[r.stream] = true
			p.skip = max(p.skip, begin)
		}
		p.size = r.n - p.skip
		if r.kind == data {
			p.size = min(p.size, most)
			p.data = b[p.skip : p.skip+p.size]
		}
		w.pos = r.pos + p.skip + p.size
		if w.pos >= r.pos+r.n {
			w.i++
		}
		return p, nil
	}
}

// lineStart returns where in a record the first line that begins in it and has
// at least the number begins, -1 when none does.
func lineStart(r record, b []byte, number int64) int64 {
	number = max(number, r.line+1)
	if r.line+r.lines() < number {
		return -1
	}
	n, at := r.line, int64(0)
	if r.begins {
		n++
	}
	for n < number {
		at += int64(bytes.IndexByte(b[at:], '\n')) + 1
		n++
	}
	return at
}

// Raw is a log's bytes as they were written, in the log's order. Read returns
// the kind of error that Service.Raw documents; nothing stands for bytes that
// are missing.
type Raw struct {
	ctx  context.Context
	walk *walk
	rest []byte
	done func()

	Epoch int64
	// Sealed: nothing will be added.
	Sealed bool
	// Truncated: a limit or a gap has cost bytes of this attempt.
	Truncated bool
	// Lines counts the lines that are answered, Total those of the selection.
	Lines, Total int64
}

// Raw opens a log's bytes, or those of a step, a stream or its last lines, up to
// what is visible now. An expired log is ErrGone; bytes that the store has
// changed are ErrDigest before any of them is returned. The caller closes it.
func (s *Service) Raw(ctx context.Context, viewer auth.Viewer, q Query) (*Raw, error) {
	t, err := s.find(ctx, viewer, q)
	if err != nil {
		return nil, err
	}
	if t.none {
		return &Raw{}, nil
	}
	v, done := s.open(viewer.Org, t.key)
	snap, err := s.look(ctx, v, 0)
	if err == nil && snap.log.State == store.LogExpired {
		err = expired(snap.log)
	}
	if err != nil {
		done()
		return nil, err
	}
	w := s.walk(v, t.sel, snap, 0)
	total := snap.total(t.sel)
	out := &Raw{
		ctx: ctx, walk: w, done: done, Epoch: t.key.Epoch, Sealed: snap.sealed(), Lines: total, Total: total,
		Truncated: snap.cut > 0 || snap.gap > 0,
	}
	if q.Tail > 0 {
		w.tail(q.Tail)
		out.Lines = min(total, q.Tail)
		out.Truncated = out.Truncated || out.Lines < total
	}
	return out, nil
}

// Read implements io.Reader.
func (r *Raw) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.walk == nil {
			return 0, io.EOF
		}
		p, err := r.walk.next(r.ctx, 64<<10)
		if err != nil {
			return 0, err
		}
		r.rest = p.data
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close ends the reading.
func (r *Raw) Close() error {
	if r.done != nil {
		r.done()
	}
	return nil
}

// Event is one event of a followed log: exactly one of Log and Sealed is set.
type Event struct {
	// Cursor resumes behind this event, on any node.
	Cursor string
	Log    *protocol.LogEvent
	Sealed *protocol.LogSealedEvent
}

// eventData is the most bytes in one event: what one viewer costs.
const eventData = 64 << 10

// Events yields an attempt's log from the cursor on, and what is added, until the
// log is sealed (its last event, nil), yield fails, or ctx ends. Over reconnects
// to any node nothing is yielded twice and nothing left out. A slow yield delays
// nobody else; its caller may block.
func (s *Service) Events(ctx context.Context, viewer auth.Viewer, q Query, yield func(Event) error) error {
	q, pos, err := q.resume()
	if err != nil {
		return err
	}
	t, err := s.find(ctx, viewer, q)
	if err != nil {
		return err
	}
	if t.none {
		t.key.Epoch = 1 // the attempt that is to come: what it stores wakes this reader
	}
	v, done := s.open(viewer.Org, t.key)
	defer done()
	snap, err := s.look(ctx, v, 0)
	if err != nil {
		return err
	}
	w := s.walk(v, t.sel, snap, pos)
	if q.Tail > 0 && q.After == "" {
		w.tail(q.Tail)
	}
	for {
		if snap.log.State == store.LogExpired {
			return expired(snap.log)
		}
		for {
			p, err := w.next(ctx, eventData)
			if err == io.EOF {
				break
			} else if err != nil {
				return err
			}
			if err := yield(p.event(t.key.Epoch, w.pos)); err != nil {
				return err
			}
		}
		if w.snap.sealed() {
			return s.yieldSealed(ctx, t.key, w.snap, yield)
		}
		if !pause(ctx, s.cfg.Poll, snap.changed) {
			return context.Cause(ctx)
		}
		if snap, err = s.look(ctx, v, s.cfg.Poll*9/10); err != nil {
			if ci.KindOf(err) != ci.ErrUnavailable {
				return err
			}
			continue // the database or the store is away: what was seen stays
		}
		w.use(snap)
	}
}

// event renders a piece; the data is copied, so that a stuck viewer holds its
// own few kilobytes and nothing of the cache.
func (p piece) event(epoch, pos int64) Event {
	e := &protocol.LogEvent{Epoch: epoch, Step: p.stream.Step, Stream: p.stream.Stream.String(), Offset: p.off + p.skip, At: p.at}
	switch p.kind {
	case data:
		e.Data = append([]byte(nil), p.data...)
	case discarded:
		e.Discarded = p.size
	case lost:
		e.Lost = p.size
	}
	return Event{Cursor: cursor(epoch, pos), Log: e}
}

func (s *Service) yieldSealed(ctx context.Context, k store.AttemptKey, snap snapshot, yield func(Event) error) error {
	var a store.Attempt
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		a, _, err = tx.Attempt(ctx, k.Job, k.Epoch)
		return err
	})
	if err != nil {
		return err
	}
	return yield(Event{Cursor: cursor(k.Epoch, snap.end), Sealed: &protocol.LogSealedEvent{
		Epoch: k.Epoch, Bytes: snap.bytes, Lines: snap.lines, Truncated: snap.cut > 0, Gap: snap.gap > 0, Conclusion: a.Conclusion,
	}})
}

// Followable returns what Events would refuse before its first event: a malformed
// cursor (ErrInvalid), a log that is not there for the viewer (ErrNotFound) or not
// any more (ErrGone).
func (s *Service) Followable(ctx context.Context, viewer auth.Viewer, q Query) error {
	q, _, err := q.resume()
	if err != nil {
		return err
	}
	l, err := s.Status(ctx, viewer, q)
	if err == nil && l.State == store.LogExpired {
		err = expired(l)
	}
	return err
}

// Status says how far a log is, without its bytes.
func (s *Service) Status(ctx context.Context, viewer auth.Viewer, q Query) (store.Log, error) {
	t, err := s.find(ctx, viewer, q)
	if err != nil || t.none {
		return store.Log{}, err
	}
	var l store.Log
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		l, _, err = tx.Log(ctx, viewer.Org, t.key)
		return err
	})
	return l, err
}
