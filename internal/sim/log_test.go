package sim

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
)

// smallLog is what is stored of an attempt's log where logs are cut.
const smallLog = 600

// newLogs returns the log service of one process life.
func (w *world) newLogs(incarnation string, mono func() time.Duration, gather func()) *logs.Service {
	c := logs.Config{
		Store: w.store, Blob: w.blobs, Log: quiet(), Incarnation: incarnation, IDs: w.idSource(), Monotonic: mono, Gather: gather,
		Temp: "/nonexistent: archives are small here", Cache: 64 << 10,
	}
	if w.seed%5 == 0 {
		c.Limit = smallLog
	}
	return logs.New(c)
}

// written is what an attempt has written, with what was acknowledged of it.
type written struct {
	key    store.AttemptKey
	org    ci.OrgID
	chunks []protocol.Chunk // in the order of their numbers
	ends   map[store.LogStream]int64
	acked  map[store.LogStream]int64
	full   bool // the runner was told that the limit is reached
	gone   bool // nothing more is sent
}

func streamOf(c protocol.Chunk) store.LogStream {
	return store.LogStream{Step: c.Step, Stream: c.Stream}
}

// write makes the next chunk: a text that no other chunk begins with.
func (l *written) write(w *world, lease ci.LeaseID) {
	r := w.rng
	streams := []store.LogStream{{Step: 0, Stream: protocol.Stdout}, {Step: 0, Stream: protocol.Stderr}, {Step: protocol.StepSystem, Stream: protocol.System}}
	st := streams[r.IntN(len(streams))]
	c := protocol.Chunk{Step: st.Step, Stream: st.Stream, Sequence: int64(len(l.chunks)) + 1, Offset: l.ends[st], AtMicros: w.now}
	text := fmt.Sprintf("%s %06d %s", lease, c.Sequence, strings.Repeat("output ", r.IntN(12)))
	if r.IntN(4) > 0 {
		text += "\n"
	}
	if r.IntN(6) == 0 {
		text += "\nmore\n\n"
	}
	if l.full || r.IntN(40) == 0 {
		c.Discarded = int64(len(text))
	} else {
		c.Data = []byte(text)
	}
	l.ends[st] += c.Len()
	l.chunks = append(l.chunks, c)
}

// unacked returns the chunks that are not acknowledged as a whole.
func (l *written) unacked() (out []protocol.Chunk) {
	for _, c := range l.chunks {
		if c.Offset+c.Len() > l.acked[streamOf(c)] {
			out = append(out, c)
		}
	}
	return out
}

// finals are the final lengths of the streams.
func (l *written) finals() (out []protocol.StreamEnd) {
	for st, n := range l.ends {
		out = append(out, protocol.StreamEnd{Step: st.Step, Stream: st.Stream, Length: n})
	}
	slices.SortFunc(out, func(a, b protocol.StreamEnd) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Stream, b.Stream))
	})
	return out
}

// output returns what the attempt has written, making it at first.
func (w *world) output(ref ci.LeaseRef, org ci.OrgID) *written {
	key := store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch}
	l := w.mirror.logs[key]
	if l == nil {
		l = &written{key: key, org: org, ends: map[store.LogStream]int64{}, acked: map[store.LogStream]int64{}}
		w.mirror.logs[key] = l
		w.mirror.logOrder = append(w.mirror.logOrder, l)
	}
	return l
}

// log writes a little and sends it, with what is not acknowledged now and then:
// several calls are under way, and one repeats in another group what another
// has stored.
func (k *work) log() {
	w := k.r.w
	l := k.out
	first := len(l.chunks)
	for range 1 + w.rng.IntN(3) {
		l.write(w, k.ref.Lease)
	}
	k.sendLog(l.chunks[first:], w.rng.IntN(4) == 0)
}

// sendLog sends chunks; all: with everything that is not acknowledged.
func (k *work) sendLog(chunks []protocol.Chunk, all bool) {
	w, l := k.r.w, k.out
	if all {
		chunks = l.unacked()
	}
	if len(chunks) == 0 {
		return
	}
	chunks = slices.Clone(chunks)
	k.flying++
	last := chunks[len(chunks)-1]
	text := fmt.Sprintf("chunks %d to %d", chunks[0].Sequence, last.Sequence)
	c := k.lease(routeLog, text, func(n *node, held engine.Held) (any, error) {
		var body []byte
		for _, c := range chunks {
			body = protocol.AppendChunk(body, c)
		}
		return n.logs.AppendBody(w.ctx, held, bytes.NewReader(body), int64(len(body)))
	})
	c.merges = true
	c.truth = func(rep any) {
		reply := rep.(protocol.LogReply)
		if c.tries > 1 {
			w.saw(evLogTwice)
		}
		for _, e := range reply.Streams {
			st := store.LogStream{Step: e.Step, Stream: e.Stream}
			if e.Length > l.ends[st] {
				w.bad("I4 log bytes", "%d bytes of %v of %s/%d were acknowledged, %d were written", e.Length, st, l.key.Job, l.key.Epoch, l.ends[st])
			}
			if behind := streamOf(last) == st && e.Length < last.Offset; behind {
				w.saw(evLogHole)
			}
			l.acked[st] = max(l.acked[st], e.Length)
		}
		if reply.Full {
			l.full = true
			w.saw(evLogFull)
		}
	}
	c.done = func(_ any, err error) {
		k.flying--
		if err == nil {
			return
		}
		l.gone = true
		w.saw(evLogRefused)
		switch {
		case k.gone || k.stage >= stageEnding:
		case ci.KindOf(err) == ci.ErrLeaseLost, ci.KindOf(err) == ci.ErrRunEnded:
			k.drop()
		}
	}
	w.send(c)
}

// flushed reports whether the attempt need not wait for its log any more.
func (k *work) flushed() bool {
	if k.out.gone || len(k.out.unacked()) == 0 {
		return true
	}
	if k.r.w.now >= k.flushBy { // the tail is a loss
		k.r.w.saw(evLogLoss)
		return true
	}
	if k.flying == 0 {
		k.sendLog(nil, true)
	}
	return false
}

// tend lets a node do what its loops do beside the sweep.
func (w *world) tend(n *node) {
	r := w.rng
	var err error
	what := []string{"seals logs", "collects logs", "collects artifacts"}[max(r.IntN(5)-2, 0)]
	w.tell("node %d %s", n.index, what)
	n.serve(func() {
		switch what {
		case "seals logs":
			var sealed int
			if sealed, err = n.logs.SealEnded(w.ctx); sealed > 0 {
				w.tell("  %d sealed", sealed)
				w.saw(evLogSealed)
			}
		case "collects logs":
			err = n.logs.Collect(w.ctx)
		default:
			err = n.files.Collect(w.ctx)
		}
	})
	if err == nil {
		return
	}
	w.tell("  %s", strings.ReplaceAll(err.Error(), "\n", "; "))
	if ci.KindOf(err) == ci.ErrInternal {
		w.bad("no defect", "node %d %s: %v", n.index, what, err)
	}
	w.saw(evTendFailed)
}

// peruse lets a person read a log through a node while things go wrong.
func (w *world) peruse(n *node) {
	if len(w.mirror.logOrder) == 0 {
		return
	}
	l := w.mirror.logOrder[w.rng.IntN(len(w.mirror.logOrder))]
	var row store.Log
	var got []byte
	var err error
	if n.serve(func() { row, got, err = w.readLog(n.logs, l) }) {
		return
	}
	switch kind := ci.KindOf(err); {
	case err == nil:
		w.tell("log of %s/%d read: %d bytes", short(l.key.Job), l.key.Epoch, len(got))
		w.compareLog(l, row, got)
	case kind == ci.ErrUnavailable || kind == ci.ErrDigest || kind == ci.ErrNotFound:
		w.saw(evReadFailed)
		w.tell("log of %s/%d not read: %s", short(l.key.Job), l.key.Epoch, kind)
	default:
		w.bad("typed refusals", "reading the log of %s/%d: %v", l.key.Job, l.key.Epoch, err)
	}
}

// readLog reads a log as a person does, with its row as it was before.
func (w *world) readLog(s *logs.Service, l *written) (row store.Log, got []byte, err error) {
	q := logs.Query{Job: l.key.Job, Epoch: l.key.Epoch}
	viewer := auth.Viewer{Org: l.org}
	if row, err = s.Status(w.ctx, viewer, q); err != nil {
		return row, nil, err
	}
	r, err := s.Raw(w.ctx, viewer, q)
	if err != nil {
		return row, nil, err
	}
	got, err = io.ReadAll(r)
	if closeErr := r.Close(); err == nil {
		err = closeErr
	}
	return row, got, err
}

// compareLog requires every acknowledged byte, in order, once, and nothing that
// was not written.
func (w *world) compareLog(l *written, row store.Log, got []byte) {
	rest, lost := got, int64(0)
	var dropped int64 // by the runner, acknowledged
	for _, c := range l.chunks {
		acked := c.Offset+c.Len() <= l.acked[streamOf(c)]
		switch {
		case c.Discarded > 0 && acked:
			dropped += c.Discarded
		case c.Discarded > 0:
		case bytes.HasPrefix(rest, c.Data):
			rest = rest[len(c.Data):]
		case acked:
			lost += c.Len()
		}
	}
	if len(rest) > 0 {
		w.bad("I4 log bytes", "log of %s/%d: %q in place %d was not written there", l.key.Job, l.key.Epoch, clipped(rest), len(got)-len(rest))
	}
	if lost > row.Cut-dropped {
		w.bad("I4 log bytes", "log of %s/%d (%s): %d acknowledged bytes are not there, %d were cut", l.key.Job, l.key.Epoch, row.State, lost, row.Cut-dropped)
	}
}

func clipped(b []byte) []byte { return b[:min(len(b), 80)] }

// checkLogs reads logs back from the store, as a node does that knows nothing of
// them; most is how many, 0 = all.
func (w *world) checkLogs(most int) {
	order := w.mirror.logOrder
	if most > 0 && len(order) > most {
		from := w.step % len(order)
		order = append(slices.Clone(order[from:]), order[:from]...)[:most]
	}
	w.aside(func() {
		reader := w.newLogs(w.incarnation(), func() time.Duration { return time.Duration(w.now) * time.Microsecond }, nil)
		for _, l := range order {
			row, got, err := w.readLog(reader, l)
			if err != nil {
				w.bad("I4 log bytes", "log of %s/%d: %v", l.key.Job, l.key.Epoch, err)
			}
			w.compareLog(l, row, got)
		}
	})
}

func (w *world) incarnation() string {
	for _, n := range w.nodes {
		if n.e != nil {
			return n.e.Incarnation()
		}
	}
	return "1"
}

// checkSealedLogs requires, when everything has ended, that every log is one
// archive that accounts for each byte that its runner declared.
func (w *world) checkSealedLogs() {
	w.read(func(tx *store.Tx) error {
		for _, l := range w.mirror.logOrder {
			row, ok, err := tx.Log(w.ctx, l.org, l.key)
			if err != nil {
				return err
			}
			if !ok { // nothing was ever stored, and its attempt ended without a log
				continue
			}
			if row.State != store.LogSealed || row.Extents > 0 {
				w.bad("everything ends", "log of %s/%d is %s with %d extents", l.key.Job, l.key.Epoch, row.State, row.Extents)
			}
			declared := int64(0)
			for _, n := range row.Finals {
				declared += n
			}
			if row.Gap > 0 {
				w.saw(evLogGap)
			}
			if len(row.Finals) > 0 && row.Bytes+row.Cut+row.Gap != declared {
				w.bad("LG-1 gaps are marked", "log of %s/%d: %d stored, %d cut, %d missing, %d declared", l.key.Job, l.key.Epoch, row.Bytes, row.Cut, row.Gap, declared)
			}
		}
		return nil
	})
}

// collectAll lets time pass until what nothing needs has been deleted, and
// requires that nothing else is left.
func (w *world) collectAll() {
	n := w.up(w.rng)
	for range 4 {
		w.pass(30 * 3600 * second)
		for {
			sealed, err := n.logs.SealEnded(w.ctx)
			if err != nil {
				w.bad("I4 log bytes", "a log cannot be sealed: %v", err)
			}
			if sealed == 0 {
				break
			}
		}
		if err := errors.Join(n.logs.Collect(w.ctx), n.files.Collect(w.ctx)); err != nil {
			w.bad("nothing is left over", "%v", err)
		}
	}
	w.follow()
	w.checkSealedLogs()
	w.checkLogs(0)
	w.checkLeftOver()
}

// checkLeftOver requires that every object is one that a row names.
func (w *world) checkLeftOver() {
	named := map[string]bool{}
	w.read(func(tx *store.Tx) error {
		for _, l := range w.mirror.logOrder {
			row, _, err := tx.Log(w.ctx, l.org, l.key)
			if err != nil {
				return err
			}
			named[row.ArchiveKey] = true
		}
		keys := slices.Sorted(maps.Keys(w.blobs.objects))
		rows, err := tx.ArtifactsByKey(w.ctx, keys)
		for key, a := range rows {
			named[key] = a.State == store.ArtifactSealed
		}
		for _, key := range keys {
			if !named[key] {
				w.bad("nothing is left over", "object %s", key)
			}
		}
		return err
	})
	if n := len(w.blobs.uploads); n > 0 {
		w.bad("nothing is left over", "%d uploads", n)
	}
}
