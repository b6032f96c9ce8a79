package logs

import (
	"bytes"
	"context"
	"slices"
	"unicode/utf8"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

// Bounds of one answer of Lines.
const (
	defaultLines = 1000
	maxLines     = 10_000
	maxAnswer    = 4 << 20   // bytes of text
	maxScan      = 512 << 20 // bytes that one search looks at
	maxSearch    = 1 << 10   // bytes of what is searched for
)

// Lines returns a window of a log as text: from line q.From on, or the last
// q.Tail, of a step or a stream, or only the lines that contain q.Search. Lines
// keep their numbers in the attempt. A line of more than Config.LineText bytes
// is cut on a character's border and says by how much; of one that was redrawn
// with carriage returns the last drawing is kept. What does not fit into
// the answer follows from Next on, and Truncated is set; of the last q.Tail lines
// it is the first that do not fit, and the answer always reaches the end. An
// expired log is ErrGone.
func (s *Service) Lines(ctx context.Context, viewer auth.Viewer, q Query) (protocol.LogSlice, error) {
	if len(q.Search) > maxSearch {
		return protocol.LogSlice{}, ci.Errorf(ci.ErrInvalid, "search for at most %d bytes", maxSearch)
	}
	t, err := s.find(ctx, viewer, q)
	if err != nil {
		return protocol.LogSlice{}, err
	}
	if t.none {
		return protocol.LogSlice{Lines: []protocol.LogLine{}}, nil
	}
	v, done := s.open(viewer.Org, t.key)
	defer done()
	for try := 0; ; try++ {
		snap, err := s.look(ctx, v, 0)
		if err != nil {
			return protocol.LogSlice{}, err
		}
		if snap.log.State == store.LogExpired {
			return protocol.LogSlice{}, expired(snap.log)
		}
		w := window{s: s, snap: snap, sel: t.sel, search: []byte(q.Search), ends: q.Tail > 0}
		out, err := w.collect(ctx, q)
		if moved(err) && try < 3 {
			continue // sealed meanwhile: the next look sees the archive
		}
		if err != nil {
			return out, err
		}
		out.Epoch, out.Sealed = t.key.Epoch, snap.sealed()
		if out.Next == 0 && !out.Sealed {
			out.Cursor = cursor(t.key.Epoch, snap.end)
		}
		return out, nil
	}
}

// window collects lines of one snapshot.
type window struct {
	s       *Service
	snap    snapshot
	sel     selection
	search  []byte
	ends    bool // it is the end that is wanted: what is full loses its first lines
	limit   int
	scanned int64
	text    int
}

func (w *window) collect(ctx context.Context, q Query) (protocol.LogSlice, error) {
	w.limit = q.Limit
	if w.limit <= 0 {
		w.limit = defaultLines
	}
	w.limit = min(w.limit, maxLines)
	from := max(q.From, 1)
	out := protocol.LogSlice{Lines: []protocol.LogLine{}, Total: w.snap.total(w.sel)}
	if w.ends {
		first := max(from, w.snap.tail(w.sel, q.Tail))
		from = w.behind(first)
		out.Truncated = from > first
	}
	for i := w.snap.from(from); i < len(w.snap.recs); i++ {
		r := w.snap.recs[i]
		if !w.sel.has(r.stream) || r.lines() == 0 {
			continue
		}
		if !w.ends && (w.full(&out) && len(w.search) == 0 || w.scanned >= maxScan) {
			out.Truncated, out.Next = true, max(r.line+1, from)
			break
		}
		next, err := w.record(ctx, i, from, &out)
		if err != nil {
			return protocol.LogSlice{}, err
		}
		if next > 0 {
			out.Truncated, out.Next = true, next
			break
		}
	}
	if len(out.Lines) > 0 {
		out.First = out.Lines[0].Number
	}
	return out, nil
}

// full reports whether there is no room for another line.
func (w *window) full(out *protocol.LogSlice) bool {
	return len(out.Lines) == w.limit || w.text >= maxAnswer
}

// behind returns the first line from which on the end can be had within maxScan, and
// within the limit if each line counts; at least from.
func (w *window) behind(from int64) int64 {
	if len(w.search) == 0 {
		from = max(from, w.snap.tail(w.sel, int64(w.limit)))
	}
	size, first := int64(0), w.snap.from(from)
	for i := len(w.snap.recs) - 1; i >= first; i-- {
		r := w.snap.recs[i]
		if !w.sel.has(r.stream) {
			continue
		}
		if r.kind == data {
			size += r.n
		}
		if size > maxScan {
			return max(from, r.line+r.lines()+1)
		}
	}
	return from
}

// record adds the lines that begin in record i; next is the number of the first
// that found no room. In a window that ends with the log, earlier ones make room.
func (w *window) record(ctx context.Context, i int, from int64, out *protocol.LogSlice) (next int64, err error) {
	r := w.snap.recs[i]
	var b []byte
	if r.kind == data {
		if b, err = w.s.load(ctx, w.snap, r); err != nil {
			return 0, err
		}
		w.scanned += r.n
	}
	open := r.kind != data || r.lastNL != r.n-1 // its last line goes on behind it
	if len(w.search) > 0 && !open && !bytes.Contains(b, w.search) {
		return 0, nil
	}
	number, at := max(from, r.line+1), lineStart(r, b, from)
	for last := r.line + r.lines(); number <= last; number++ {
		l, found, err := w.line(ctx, i, at, b, number)
		if err != nil {
			return 0, err
		}
		if found {
			if !w.ends && w.full(out) {
				return number, nil
			}
			for len(out.Lines) > 0 && w.full(out) {
				w.text -= len(out.Lines[0].Text)
				out.Lines, out.Truncated = out.Lines[1:], true
			}
			out.Lines = append(out.Lines, l)
			w.text += len(l.Text)
		}
		if number < last {
			at += int64(bytes.IndexByte(b[at:], '\n')) + 1
		}
	}
	return 0, nil
}

// line puts together the line that begins at a place of record i. found is false
// when it does not hold what is searched for.
func (w *window) line(ctx context.Context, i int, at int64, b []byte, number int64) (l protocol.LogLine, found bool, err error) {
	r := w.snap.recs[i]
	l = protocol.LogLine{Number: number, Step: r.stream.Step, Stream: r.stream.Stream.String(), At: r.at}
	found = len(w.search) == 0
	var text, carry []byte
	most := w.s.cfg.LineText
	length := int64(0)
	shared := false // text is still a part of the record
	var pieces []span
	done := func(open bool) (protocol.LogLine, bool, error) {
		if int64(len(text)) < length {
			// What a terminal shows of a redrawn line is what was drawn last.
			last, drawn, err := w.lastDrawing(ctx, pieces)
			if err != nil {
				return l, false, err
			}
			if drawn {
				return finish(l, last, length, open, false), found, nil
			}
		}
		return finish(l, text, length, open, true), found, nil
	}
	take := func(b []byte) {
		length += int64(len(b))
		if !found {
			// A match may lie across records.
			if len(carry) > 0 {
				look := append(carry, b[:min(len(b), len(w.search)-1)]...)
				found = bytes.Contains(look, w.search)
			}
			found = found || bytes.Contains(b, w.search)
			keep := append(carry, b[max(0, len(b)-len(w.search)+1):]...)
			carry = append([]byte(nil), keep[max(0, len(keep)-len(w.search)+1):]...)
		}
		room := min(len(b), most-len(text))
		if len(text) == 0 {
			text, shared = b[:room:room], true
			return
		}
		if shared {
			text, shared = append([]byte(nil), text...), false
		}
		text = append(text, b[:room]...)
	}
	for first := true; ; first = false {
		r := w.snap.recs[i]
		switch {
		case r.kind != data && !first && (r.begins || length > 0):
			// A marker ends the line.
			return done(false)
		case r.kind == lost:
			l.Lost += r.n
		case r.kind == discarded:
			l.Discarded += r.n
		default:
			rest := int64(-1) // where the line ends in this record
			if first {
				if n := bytes.IndexByte(b[at:], '\n'); n >= 0 {
					rest = at + int64(n)
				}
			} else if rest, at = r.firstNL, 0; len(text) < most || !found {
				// Its bytes are wanted; else it is enough to count them.
				if b, err = w.s.load(ctx, w.snap, r); err != nil {
					return l, false, err
				}
				w.scanned += r.n
			} else {
				b = nil
			}
			stop := rest
			if rest < 0 {
				stop = r.n
			}
			if b == nil {
				length += stop - at
			} else {
				take(b[at:stop])
			}
			pieces = append(pieces, span{r, at, stop})
			if rest >= 0 {
				return done(false)
			}
		}
		next := w.snap.next(i)
		if next < 0 {
			return done(w.snap.log.State == store.LogOpen)
		}
		i = next
	}
}

// span is a part of a record.
type span struct {
	record
	from, to int64
}

// lastDrawing returns what stands behind the last carriage return of a line, if
// that is no more than a line's text.
func (w *window) lastDrawing(ctx context.Context, pieces []span) (last []byte, ok bool, err error) {
	ended := false // the carriage return before the newline draws nothing
	for _, p := range slices.Backward(pieces) {
		if p.from == p.to {
			continue
		}
		b, err := w.s.load(ctx, w.snap, p.record)
		if err != nil {
			return nil, false, err
		}
		b = b[p.from:p.to]
		if !ended {
			b, ended = bytes.TrimSuffix(b, []byte{'\r'}), true
		}
		cr := bytes.LastIndexByte(b, '\r')
		if len(last)+len(b)-cr-1 > w.s.cfg.LineText {
			return nil, false, nil
		}
		last = append(bytes.Clone(b[cr+1:]), last...)
		if cr >= 0 {
			return last, true, nil
		}
	}
	return nil, false, nil
}

// finish ends a line: cut on a character's border unless whole text was put in
// place of it, every byte that is not UTF-8 replaced.
func finish(l protocol.LogLine, text []byte, length int64, open, border bool) protocol.LogLine {
	if border && int64(len(text)) < length {
		for n := len(text); n > 0 && len(text)-n < utf8.UTFMax; n-- {
			if utf8.RuneStart(text[n-1]) {
				if !utf8.FullRune(text[n-1:]) {
					text = text[:n-1]
				}
				break
			}
		}
	}
	l.Cut, l.Open = length-int64(len(text)), open
	l.Text = string(text)
	if !utf8.ValidString(l.Text) {
		l.Text = string([]rune(l.Text))
	}
	return l
}
