package logs_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
)

func TestSegmentsGoWhenNothingRefersToThem(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		a, b := w.job(), w.job()
		var wa, wb writer
		w.append(a, wa.chunk(0, protocol.Stdout, "a\n"))
		w.append(b, wb.chunk(0, protocol.Stdout, "b\n"))
		w.seal(a)
		collect := func() {
			t.Helper()
			if err := w.svc.Collect(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		collect()
		if n := len(w.objects("logs/segments/")); n != 2 {
			t.Errorf("%d segments while their readers may be behind", n)
		}
		w.Renew(b, time.Hour)
		w.Advance(30 * time.Minute)
		collect()
		if n := len(w.objects("logs/segments/")); n != 1 {
			t.Errorf("%d segments; one is needed", n)
		}
		if got := w.raw(query(a)) + w.raw(query(b)); got != "a\nb\n" {
			t.Errorf("logs %q", got)
		}
		w.seal(b)
		w.Advance(30 * time.Minute)
		collect()
		if left := w.objects("logs/segments/"); len(left) != 0 {
			t.Errorf("segments left: %q", left)
		}
		w.Advance(100 * 24 * time.Hour)
		collect()
		if left := w.objects("logs/"); len(left) != 0 {
			t.Errorf("objects left after retention: %q", left)
		}
		_, err1 := w.svc.Raw(t.Context(), w.viewer, query(a))
		_, err2 := w.svc.Lines(t.Context(), w.viewer, query(a))
		err3 := w.svc.Events(t.Context(), w.viewer, query(a), func(logs.Event) error { return nil })
		for _, err := range []error{err1, err2, err3} {
			if !errors.Is(err, ci.ErrGone) {
				t.Errorf("an expired log: %v", err)
			}
		}
	})
}

func TestCase_CACHE_08_AWriterThatWasSuspendedFindsItsSegmentRefusedNotMissing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "kept\n"))
		c := wr.chunk(0, protocol.Stdout, "late\n")
		held := w.held(ref)
		suspended := false
		w.blob.on(func(key string) error {
			if strings.Contains(key, "segments") && !suspended {
				suspended = true
				w.Renew(ref, 3*time.Hour) // another node keeps the lease alive
				w.Advance(2 * time.Hour)
			}
			return nil
		}, nil)
		_, err := w.svc.Append(t.Context(), held, []protocol.Chunk{c})
		if !errors.Is(err, ci.ErrUnavailable) {
			t.Fatalf("append of a suspended writer: %v", err)
		}
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := len(w.objects("logs/segments/")); n != 1 {
			t.Errorf("%d segments; the orphan is old enough", n)
		}
		w.svc = w.start()
		w.append(ref, c)
		if got := w.raw(query(ref)); got != "kept\nlate\n" {
			t.Errorf("log %q", got)
		}
	})
}

func TestTwoNodesSealOnceAndLeaveNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		other := w.start()
		for range 10 {
			ref := w.job()
			var wr writer
			w.append(ref, wr.chunk(0, protocol.Stdout, "x\n"))
			w.end(ref)
			k := store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch}
			w.svc.Ended(k)
			other.Ended(k)
			w.waitSealed(ref)
			if got := w.raw(query(ref)); got != "x\n" {
				t.Errorf("log %q", got)
			}
		}
		w.eventually("one archive for each log", func() bool { return len(w.objects("logs/archives/")) == 10 })
	})
}

// What is left over while the database's clock is wrong is found when it is right,
// be it wrong for long or come and gone between two collections.
func TestOrphansAreFoundWhateverTheClockDid(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ before, after time.Duration }{
		"set back":             {-48 * time.Hour, 2 * time.Hour},
		"set back and forward": {-48 * time.Hour, 48 * time.Hour},
		"set forward":          {30 * 24 * time.Hour, 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, w *world) {
				collect := func() {
					t.Helper()
					if err := w.svc.Collect(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				w.Advance(48 * time.Hour)
				collect()
				w.Advance(c.before)
				ref := w.job()
				var wr writer
				w.blob.after(ci.Errorf(ci.ErrUnavailable, "stored, but not answered"))
				other := w.start() // it has not read the clock yet
				if _, err := other.Append(t.Context(), w.held(ref), []protocol.Chunk{wr.chunk(0, protocol.Stdout, "x\n")}); err == nil {
					t.Fatal("acknowledged")
				}
				if n := len(w.objects("logs/segments/")); n != 1 {
					t.Fatalf("%d objects", n)
				}
				w.Advance(c.after)
				collect()
				if n := len(w.objects("logs/segments/")); n != 0 {
					t.Errorf("%d objects left over", n)
				}
			})
		})
	}
}

// many is a store with very many old segments that no row names.
type many struct {
	blob.Store
	keys  []string
	lists int
}

func (m *many) List(_ context.Context, prefix, after string, limit int) (infos []blob.Info, _ error) {
	if !strings.HasPrefix(prefix, "logs/segments/") {
		return nil, nil
	}
	m.lists++
	at, _ := slices.BinarySearch(m.keys, after+"\x00")
	for _, k := range m.keys[at:min(at+limit, len(m.keys))] {
		infos = append(infos, blob.Info{Key: k})
	}
	return infos, nil
}

func (m *many) Delete(_ context.Context, key string) error {
	at, found := slices.BinarySearch(m.keys, key)
	if found {
		m.keys = slices.Delete(m.keys, at, at+1)
	}
	return nil
}

// One collection looks at a bounded number of objects of before its process; all
// of them come to be looked at.
func TestARoundThroughAllObjectsIsMadeInParts(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		m := &many{}
		fill := func() {
			for i := range 25_000 {
				m.keys = append(m.keys, fmt.Sprintf("logs/segments/0/%016x-obj_%d", i, i))
			}
		}
		fill()
		cfg := w.cfg
		cfg.Blob = m
		svc := logs.New(cfg)
		for _, want := range []int{15_000, 5_000, 0} {
			m.lists = 0
			if err := svc.Collect(t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(m.keys) != want || m.lists > 21 {
				t.Fatalf("%d objects left behind %d lists, not %d", len(m.keys), m.lists, want)
			}
		}
		// What comes of age is found at once, wherever the round is.
		w.Advance(time.Hour)
		fill()
		aged := fmt.Sprintf("logs/segments/0/%016x-obj_aged", w.Now()-(time.Hour+time.Minute).Microseconds())
		m.keys = append(m.keys, aged)
		if err := svc.Collect(t.Context()); err != nil || slices.Contains(m.keys, aged) || len(m.keys) != 15_000 {
			t.Fatalf("%d objects left: %v", len(m.keys), err)
		}
	})
}

// stubborn is a store that cannot delete some objects.
type stubborn struct {
	blob.Store
	keys []string
}

func (s stubborn) Delete(ctx context.Context, key string) error {
	if slices.Contains(s.keys, key) {
		return ci.Errorf(ci.ErrUnavailable, "stubborn")
	}
	return s.Store.Delete(ctx, key)
}

// A segment that cannot be deleted is reported and keeps no other, be it one that
// nothing refers to any more or one that no row names.
func TestOneFailureStopsNoCollection(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		for range 3 {
			ref := w.job()
			var wr writer
			w.append(ref, wr.chunk(0, protocol.Stdout, "x\n"))
			w.seal(ref)
		}
		free := w.objects("logs/segments/")
		if len(free) != 3 {
			t.Fatalf("segments: %q", free)
		}
		at := strings.LastIndexByte(free[0], '/') + 1
		var orphans []string
		for i := range 3 {
			orphans = append(orphans, fmt.Sprintf("%s%016x-orphan", free[0][:at], i+1))
			if err := w.blob.PutNew(t.Context(), orphans[i], strings.NewReader(""), 0, sha256.Sum256(nil)); err != nil {
				t.Fatal(err)
			}
		}
		w.Advance(30 * time.Minute)
		cfg := w.cfg
		cfg.Blob = stubborn{w.blob, []string{free[0], orphans[0]}}
		if err := logs.New(cfg).Collect(t.Context()); !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("error %v, want ErrUnavailable", err)
		}
		if left, want := w.objects("logs/segments/"), []string{orphans[0], free[0]}; !slices.Equal(left, want) {
			t.Errorf("left %q, want %q", left, want)
		}
	})
}
