package logs_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// TestCase_R15_NoAcknowledgedByteIsLostOrDoubled lets a runner and two nodes
// deliver a drawn log badly: batches out of order, twice and regrouped, a store
// that fails before or after it has stored, nodes that restart. The log that
// comes out is the source, byte for byte and in its order.
func TestCase_R15_NoAcknowledgedByteIsLostOrDoubled(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		rapid.Check(t, func(rt *rapid.T) { w.deliverBadly(rt) })
	})
}

func (w *world) deliverBadly(rt *rapid.T) {
	ref := w.job()
	var wr writer
	var chunks []protocol.Chunk
	streams := map[string]string{}
	whole := ""
	for i := range rapid.IntRange(1, 40).Draw(rt, "chunks") {
		n := rapid.IntRange(1, 300).Draw(rt, "size")
		text := strings.Repeat(fmt.Sprintf("%d,", i), n)[:n]
		if rapid.Bool().Draw(rt, "newline") {
			text += "\n"
		}
		step, stream := rapid.IntRange(-1, 1).Draw(rt, "step"), protocol.Stream(rapid.IntRange(1, 2).Draw(rt, "stream"))
		chunks = append(chunks, wr.chunk(step, stream, text))
		streams[fmt.Sprint(step, stream)] += text
		whole += text
	}
	acked := map[string]int64{}
	deliver := func(batch []protocol.Chunk) bool {
		reply, err := w.svc.Append(w.t.Context(), w.held(ref), batch)
		if err != nil {
			if !errors.Is(err, ci.ErrUnavailable) {
				rt.Fatalf("append: %v", err)
			}
			return false
		}
		for _, e := range reply.Streams {
			k := fmt.Sprint(e.Step, e.Stream)
			if e.Length < acked[k] || e.Length > int64(len(streams[k])) {
				rt.Fatalf("stream %s: acknowledged %d after %d of %d", k, e.Length, acked[k], len(streams[k]))
			}
			acked[k] = e.Length
		}
		return true
	}
	left := slices.Clone(chunks)
	for turns := 0; len(left) > 0; turns++ {
		fault := rapid.IntRange(0, 9).Draw(rt, "fault")
		if turns > 60 {
			fault = 9
		}
		switch fault {
		case 0:
			w.blob.on(func(string) error { return ci.Errorf(ci.ErrUnavailable, "not stored") }, nil)
		case 1:
			w.blob.after(ci.Errorf(ci.ErrUnavailable, "stored, but the answer was lost"))
		case 2:
			w.svc = w.restart()
		}
		at := rapid.IntRange(0, len(left)-1).Draw(rt, "from")
		batch := slices.Clone(left[at:min(len(left), at+rapid.IntRange(1, 8).Draw(rt, "count"))])
		if rapid.Bool().Draw(rt, "again") { // also chunks that were delivered before
			i := rapid.IntRange(0, len(chunks)-1).Draw(rt, "old")
			batch = append(batch, chunks[i:min(len(chunks), i+3)]...)
		}
		ok := deliver(batch)
		w.blob.on(nil, nil)
		w.blob.after(nil)
		if !ok {
			continue
		}
		left = slices.DeleteFunc(left, func(c protocol.Chunk) bool {
			return slices.ContainsFunc(batch, func(b protocol.Chunk) bool { return b.Sequence == c.Sequence })
		})
		if !strings.HasPrefix(whole, w.raw(query(ref))) {
			rt.Fatal("what is visible is not the beginning of the log")
		}
	}
	for k, text := range streams {
		if acked[k] != int64(len(text)) && deliver(chunks) && acked[k] != int64(len(text)) {
			rt.Fatalf("stream %s: %d of %d acknowledged in the end", k, acked[k], len(text))
		}
	}
	var ends []protocol.StreamEnd
	for _, c := range chunks {
		ends = append(ends, wr.length(c.Step, c.Stream))
	}
	live := w.lines(query(ref))
	w.seal(ref, ends...)
	if got := w.raw(query(ref)); sha256.Sum256([]byte(got)) != sha256.Sum256([]byte(whole)) {
		rt.Fatalf("sealed log is not the source: %d of %d bytes", len(got), len(whole))
	}
	for _, c := range chunks {
		q := stepOf(query(ref), c.Step)
		q.Stream = c.Stream.String()
		if got := w.raw(q); got != streams[fmt.Sprint(c.Step, c.Stream)] {
			rt.Fatalf("stream %d %s differs", c.Step, c.Stream)
		}
	}
	sealed := w.lines(query(ref))
	if len(live.Lines) != len(sealed.Lines) || live.Total != sealed.Total {
		rt.Fatalf("%d lines live, %d sealed", len(live.Lines), len(sealed.Lines))
	}
	for i, l := range sealed.Lines {
		if m := live.Lines[i]; m.Text != l.Text || m.Number != l.Number || m.Step != l.Step || m.Stream != l.Stream {
			rt.Fatalf("line %d: live %+v, sealed %+v", i, m, l)
		}
	}
	// A tail is the end of the whole, whatever its length.
	q := query(ref)
	q.Tail = rapid.Int64Range(1, sealed.Total+2).Draw(rt, "tail")
	if s := w.lines(q); int64(len(s.Lines)) != min(q.Tail, sealed.Total) || s.Lines[0].Number != max(1, sealed.Total-q.Tail+1) {
		rt.Fatalf("tail %d of %d: %d lines from %d", q.Tail, sealed.Total, len(s.Lines), s.First)
	}
	// Events from any position on are the rest of the log.
	pos := rapid.IntRange(0, len(whole)).Draw(rt, "position")
	q = query(ref)
	q.After = fmt.Sprintf("%d-%d", ref.Epoch, pos)
	if got := text(w.follow(q)); got != whole[pos:] {
		rt.Fatalf("events behind %d give %d bytes of %d", pos, len(got), len(whole)-pos)
	}
}
