package logs_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
)

// Whatever lengths a runner may report, its log can be sealed and read.
func TestTheLongestStreamsCanBeSealed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.dropped(0, protocol.Stdout, protocol.MaxStreamLength), wr.dropped(0, protocol.Stdout, protocol.MaxStreamLength),
			wr.chunk(0, protocol.Stderr, "end\n"))
		var ends []protocol.StreamEnd
		for step := range protocol.MaxSteps {
			for _, s := range []protocol.Stream{protocol.Stdout, protocol.Stderr, protocol.System} {
				ends = append(ends, protocol.StreamEnd{Step: step, Stream: s, Length: protocol.MaxStreamLength})
			}
		}
		w.seal(ref, ends...)
		w.svc = logs.New(w.cfg) // nothing in memory
		if got := w.follow(query(ref)); !strings.Contains(text(got), "end\n") {
			t.Errorf("the log is %.200q", text(got))
		}
	})
}

// A runner that never fills a hole is stopped by itself: what others send is
// stored, and what it sends behind the hole again is known.
func TestChunksFarBehindAHoleAreRefused(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref, other := w.job(), w.job()
		chunk := func(seq int64) protocol.Chunk {
			return protocol.Chunk{Step: int(seq % 2), Stream: protocol.Stdout, Sequence: seq, Offset: seq, Discarded: 1}
		}
		w.append(ref, chunk(protocol.MaxAhead))
		w.append(ref, chunk(protocol.MaxAhead)) // a repeat
		_, err := w.svc.Append(t.Context(), w.held(ref), []protocol.Chunk{chunk(protocol.MaxAhead + 1)})
		if !errors.Is(err, ci.ErrTooLarge) || !strings.Contains(err.Error(), "behind a hole") {
			t.Errorf("too far behind a hole: %v", err)
		}
		var wr writer
		w.append(other, wr.chunk(0, protocol.Stdout, "stored\n"))
	})
}

// A log has no more pieces than it may: what comes then is marked as dropped, the
// runner is told, and markers without end are refused.
func TestThePiecesOfALogAreLimited(t *testing.T) {
	t.Parallel()
	w := newWorld(t, storetest.SQLite(t), logs.Config{})
	w.stop()
	w.cfg.Pieces = 3
	w.svc = w.start()
	ref := w.job()
	var wr writer
	var full bool
	for i := range 5 {
		full = w.append(ref, wr.chunk(i%2, protocol.Stdout, "piece\n")).Full
		if full != (i >= 2) {
			t.Errorf("piece %d: full %v", i, full)
		}
	}
	refused := false
	for range 20 {
		var many []protocol.Chunk
		for i := range protocol.MaxChunksPerBody {
			many = append(many, wr.dropped(i%2, protocol.Stdout, 1))
		}
		if _, err := w.svc.Append(t.Context(), w.held(ref), many); err != nil {
			refused = errors.Is(err, ci.ErrTooLarge)
			break
		}
	}
	if !refused {
		t.Error("markers are taken without end")
	}
	w.seal(ref)
	if got := text(w.follow(query(ref))); !strings.HasPrefix(got, "piece\npiece\npiece\n<discarded 6>") {
		t.Errorf("the log is %.100q", got)
	}
}

// Archives that could not be recorded are not stored again, whether the database
// has not taken them or has and could not say so.
func TestArchivesAreStoredOnceWhateverTheDatabaseSays(t *testing.T) {
	t.Parallel()
	for _, at := range []store.Point{store.PointBegin, store.PointCommit, store.PointCommitted} {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, storetest.SQLite(t), logs.Config{})
			w.stop()
			w.svc = logs.New(w.cfg)
			refs, _ := w.ended([]string{"one\n", "two\n", noise(1, 200_000)}, 1)
			w.Advance(time.Minute)
			w.Fail(func(p store.Point) error {
				if p == at {
					return ci.Errorf(ci.ErrUnavailable, "the database is away")
				}
				return nil
			})
			var stored []string
			for range 5 {
				if _, err := w.svc.SealEnded(t.Context()); err == nil {
					t.Fatal("sealed without a database")
				}
				stored = w.objects("logs/archives/")
				if len(stored) != 2 {
					t.Fatalf("archives %q", stored)
				}
			}
			w.Fail(func(store.Point) error { return nil })
			if _, err := w.svc.SealEnded(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := w.objects("logs/archives/"); !slices.Equal(got, stored) {
				t.Errorf("archives %q, and then %q", stored, got)
			}
			w.books()
			w.svc = logs.New(w.cfg) // nothing in memory
			for i, want := range []string{"one\n", "two\n", noise(1, 200_000)} {
				if l := w.row(refs[i]); l.State != store.LogSealed || w.raw(query(refs[i])) != want {
					t.Errorf("log %d is %s with %d bytes", i, l.State, len(w.raw(query(refs[i]))))
				}
			}
		})
	}
}
