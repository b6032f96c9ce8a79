package logs_test

import (
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
)

// books tells what the database says of logs that contradicts itself: references
// that are not counted, or counted and not there, extents that nothing drops.
func (w *world) books() {
	w.t.Helper()
	bad, err := w.Store.Inconsistencies(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range bad {
		if strings.HasPrefix(s, "log ") {
			w.t.Error(s)
		}
	}
}

// noise is text that does not get shorter.
func noise(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

// ended makes logs of attempts that have ended, and no node has sealed them: small
// and large ones, some of very many pieces, one without a byte.
func (w *world) ended(texts []string, pieces int) (refs []ci.LeaseRef, keys []store.AttemptKey) {
	w.t.Helper()
	for i, text := range texts {
		ref := w.job()
		var wr writer
		n := 1
		if i == 0 {
			n = pieces
		}
		var chunks []protocol.Chunk
		for j := range n { // each of them an extent
			if part := text[len(text)*j/n : len(text)*(j+1)/n]; part != "" {
				chunks = append(chunks, wr.chunk(0, protocol.Stdout+protocol.Stream(j%2), part))
			}
		}
		if len(chunks) > 0 {
			w.append(ref, chunks...)
		}
		w.end(ref)
		refs, keys = append(refs, ref), append(keys, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	}
	return refs, keys
}

// sealAll lets nodes seal at the same time, until nothing is left to be sealed.
func (w *world) sealAll(nodes ...*logs.Service) {
	w.t.Helper()
	w.Advance(time.Minute) // behind the grace
	var all sync.WaitGroup
	for _, svc := range nodes {
		all.Go(func() {
			for n := 1; n > 0; {
				var err error
				if n, err = svc.SealEnded(w.t.Context()); err != nil {
					w.t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// collectAll lets nodes collect at the same time.
func (w *world) collectAll(nodes ...*logs.Service) {
	w.t.Helper()
	var all sync.WaitGroup
	for _, svc := range nodes {
		all.Go(func() {
			if err := svc.Collect(w.t.Context()); err != nil {
				w.t.Error(err)
			}
		})
	}
	all.Wait()
}

// kept are the objects that the database knows.
func (w *world) kept(objects []string) (known []string) {
	w.t.Helper()
	err := w.Store.Read(w.t.Context(), func(tx *store.Tx) error {
		set, err := tx.KnownLogObjects(w.t.Context(), objects)
		for k := range set {
			known = append(known, k)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return slices.Sorted(slices.Values(known))
}

// Wherever a node ends while it seals, other nodes finish: each log is whole, what
// refers to an object is counted, and in the end nothing is left of any of them.
func TestACrashAnywhereInSealingCostsNothing(t *testing.T) {
	t.Parallel()
	away := ci.Errorf(ci.ErrUnavailable, "gone")
	once := func() func(string) error {
		done := false
		return func(key string) error {
			if done || !strings.HasPrefix(key, "logs/archives/") {
				return nil
			}
			done = true
			return away
		}
	}
	for name, crash := range map[string]func(w *world){
		"nowhere":              func(*world) {},
		"before a put":         func(w *world) { w.blob.on(once(), nil) },
		"behind a put":         func(w *world) { w.blob.after(away) },
		"before it is read":    func(w *world) { w.blob.on(nil, once()) },
		"before it is sealed":  func(w *world) { w.FailOnce(store.PointBegin) },
		"before the commit":    func(w *world) { w.FailOnce(store.PointCommit) },
		"behind the commit":    func(w *world) { w.FailOnce(store.PointCommitted) },
		"while it is released": func(w *world) { w.failSecond(store.PointCommit) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, w *world) {
				w.stop()
				first, second, third := logs.New(w.cfg), logs.New(w.cfg), logs.New(w.cfg)
				w.svc = first
				texts := []string{strings.Repeat("many pieces\n", 100), "small\n", noise(1, 200_000), "", noise(2, 65_000), "small, too\n"}
				refs, keys := w.ended(texts, 230)
				w.books()
				first.Ended(keys...)
				crash(w)
				if _, err := first.SealEnded(t.Context()); (err == nil) != (name == "nowhere") {
					t.Fatalf("the round that is interrupted: %v", err)
				}
				w.blob.on(nil, nil)
				w.blob.after(nil)
				w.Fail(func(store.Point) error { return nil })
				w.books()
				w.sealAll(second, third)
				w.collectAll(second, third)
				w.svc = third
				check := func() {
					t.Helper()
					w.books()
					for i, ref := range refs {
						if l := w.row(ref); l.State != store.LogSealed || l.Extents != 0 {
							t.Errorf("log %d is %s with %d extents", i, l.State, l.Extents)
						}
						if got := w.raw(query(ref)); got != texts[i] {
							t.Errorf("log %d has %d bytes that are not its own", i, len(got))
						}
					}
				}
				check()
				w.Advance(48 * time.Hour)
				for range 2 {
					w.collectAll(second, third)
				}
				check()
				objects := w.objects("logs/")
				if known := w.kept(objects); !slices.Equal(known, objects) {
					t.Errorf("%d objects, of which the database knows %d", len(objects), len(known))
				}
				w.Advance(100 * 24 * time.Hour)
				for range 2 {
					w.collectAll(second, third)
				}
				w.books()
				if left := w.objects("logs/"); len(left) != 0 {
					t.Errorf("%d objects are left when all has expired", len(left))
				}
				if left := w.kept(objects); len(left) != 0 {
					t.Errorf("%d rows are left when all has expired", len(left))
				}
				if _, err := third.Raw(t.Context(), w.viewer, query(refs[1])); !errors.Is(err, ci.ErrGone) {
					t.Errorf("an expired log: %v", err)
				}
			})
		})
	}
}

// failSecond makes the second transaction that comes to a point fail there.
func (w *world) failSecond(at store.Point) {
	n := 0
	w.Fail(func(p store.Point) error {
		if p == at {
			n++
		}
		if p == at && n == 2 {
			return ci.Errorf(ci.ErrUnavailable, "the database is away")
		}
		return nil
	})
}

// Nodes that seal the same logs at once share them: each is whole, each object is
// counted by what is in it, and objects that nobody came to name are gone.
func TestNodesThatSealTheSameLogsAtOnceCountThem(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.stop()
		nodes := []*logs.Service{logs.New(w.cfg), logs.New(w.cfg), logs.New(w.cfg)}
		w.svc = nodes[0]
		var texts []string
		for i := range 60 {
			texts = append(texts, fmt.Sprintf("log %d\n", i)+noise(uint64(i), 1000*(i%7)))
		}
		refs, _ := w.ended(texts, 3)
		w.sealAll(nodes...)
		w.books()
		for i, ref := range refs {
			if got := w.raw(query(ref)); got != texts[i] {
				t.Errorf("log %d has %d bytes that are not its own", i, len(got))
			}
		}
		objects := w.objects("logs/")
		if known := w.kept(objects); !slices.Equal(known, objects) {
			t.Errorf("%d objects, of which the database knows %d", len(objects), len(known))
		}
	})
}

// An archive of just the size up to which objects are shared, and packs that end
// anywhere: what is read is what was written.
func TestPacksOfAnySizeHoldWhatWasWritten(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.stop()
		w.svc = logs.New(w.cfg)
		var texts []string
		for i := range 30 {
			texts = append(texts, noise(uint64(i), 65_300+10*i)) // 64 KiB among them, with index and frame
		}
		refs, _ := w.ended(texts, 1)
		w.sealAll(w.svc)
		w.books()
		held, sizes := map[string]int64{}, map[int64]bool{}
		w.svc = logs.New(w.cfg)
		for i, ref := range refs {
			l := w.row(ref)
			held[l.ArchiveKey] += l.ArchiveSize
			sizes[min(l.ArchiveSize, 64<<10+1)] = true
			if got := w.raw(query(ref)); got != texts[i] {
				t.Errorf("log %d has %d bytes that are not its own", i, len(got))
			}
		}
		if len(sizes) < 3 || !sizes[64<<10+1] {
			t.Fatalf("sizes %v are not on both sides of the limit", sizes)
		}
		if n := len(w.objects("logs/archives/")); n != len(held) || n == len(refs) {
			t.Errorf("%d objects for %d archives", n, len(refs))
		}
		for key, size := range held {
			if size > 1<<20+64<<10 {
				t.Errorf("object %s has %d bytes", key, size)
			}
		}
	})
}

// A log of which all was dropped under limits has extents and no bytes: it is sealed
// with its mark, among others, and what never had an object is collected, too.
func TestALogThatWasDroppedWholeIsSealedAndGoes(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.stop()
		w.svc = logs.New(w.cfg)
		ref := w.job()
		var wr writer
		w.append(ref, wr.dropped(0, protocol.Stdout, 1000), wr.dropped(0, protocol.Stderr, 10))
		w.end(ref)
		w.ended([]string{"another\n"}, 1)
		w.sealAll(w.svc)
		w.books()
		r, err := w.svc.Raw(t.Context(), w.viewer, query(ref))
		if err != nil {
			t.Fatal(err)
		}
		if got := w.raw(query(ref)); got != "" || !r.Truncated || !r.Sealed {
			t.Errorf("log %q, truncated %t, sealed %t", got, r.Truncated, r.Sealed)
		}
		r.Close()
		if n := len(w.objects("logs/archives/")); n != 1 {
			t.Errorf("%d objects", n)
		}
		w.Advance(100 * 24 * time.Hour)
		w.collectAll(w.svc)
		w.books()
		if left := w.objects("logs/"); len(left) != 0 {
			t.Errorf("%d objects are left when all has expired", len(left))
		}
	})
}

// A round that has much to rewrite records what it has done on the way: a log does
// not wait for all others, and the end of the node does not cost all of it.
func TestARoundOfLargeLogsIsRecordedInParts(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.stop()
		w.svc = logs.New(w.cfg)
		var refs []ci.LeaseRef
		for range 4 {
			ref := w.job()
			var wr writer
			for range 10 {
				w.append(ref, wr.chunk(0, protocol.Stdout, strings.Repeat("0123456789abcde\n", 1<<16)))
			}
			w.append(ref, wr.chunk(0, protocol.Stdout, noise(1, 100_000)))
			w.end(ref)
			refs = append(refs, ref)
			w.Advance(time.Second)
		}
		puts := 0
		w.blob.on(func(key string) error {
			if strings.HasPrefix(key, "logs/archives/") {
				puts++
			}
			if puts == len(refs) && w.row(refs[0]).State != store.LogSealed {
				t.Errorf("the first of %d large logs is %s when the last one is written", len(refs), w.row(refs[0]).State)
			}
			return nil
		}, nil)
		w.sealAll(w.svc)
		w.books()
		for _, ref := range refs {
			if l := w.row(ref); l.State != store.LogSealed || l.Lines == 0 {
				t.Errorf("log %+v", l)
			}
		}
	})
}

// Logs whose bytes the store does not give back, however many, keep no other waiting.
func TestManyLogsThatAreNotGivenBackKeepNoOtherWaiting(t *testing.T) {
	t.Parallel()
	w := newWorld(t, storetest.SQLite(t), logs.Config{})
	w.stop()
	w.svc = logs.New(w.cfg)
	w.ended(slices.Repeat([]string{"lost\n"}, 258), 1)
	lost := map[string]bool{}
	for _, key := range w.objects("logs/segments/") {
		lost[key] = true
	}
	w.blob.on(nil, func(key string) error {
		if lost[key] {
			return ci.Errorf(ci.ErrNotFound, "no object %s", key)
		}
		return nil
	})
	w.Advance(time.Minute)
	refs, _ := w.ended([]string{"kept\n"}, 1)
	w.Advance(time.Minute)
	w.svc = logs.New(w.cfg) // nothing is in its memory
	for range 2 {
		if _, err := w.svc.SealEnded(t.Context()); err == nil {
			t.Fatal("what is lost was sealed")
		}
	}
	if l := w.row(refs[0]); l.State != store.LogSealed {
		t.Errorf("the log that can be sealed is %s", l.State)
	}
}

// A log whose rows are not as they should be is not sealed, and not forgotten; it
// keeps no other log from either, not even one that would share its object.
func TestADamagedLogKeepsNoOtherWaiting(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "forgeci.db")
	w := newWorld(t, storetest.New(t, "sqlite:"+file), logs.Config{})
	w.stop()
	w.svc = logs.New(w.cfg)
	db, err := sql.Open("sqlite", "file:"+file)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	forget := func(key string) {
		if _, err := db.ExecContext(t.Context(), "DELETE FROM log_object WHERE key = ?", key); err != nil {
			t.Fatal(err)
		}
	}
	damaged, _ := w.ended([]string{"damaged\n"}, 1)
	for _, key := range w.objects("logs/segments/") {
		forget(key)
	}
	w.Advance(time.Minute)
	kept, _ := w.ended([]string{"kept\n", "kept\n"}, 1)
	w.Advance(time.Minute)
	for range 3 {
		if n, err := w.svc.SealEnded(t.Context()); err == nil || n == 3 {
			t.Fatalf("the damaged log was sealed: %d, %v", n, err)
		}
	}
	for _, ref := range kept {
		if l := w.row(ref); l.State != store.LogSealed {
			t.Errorf("a log that can be sealed is %s", l.State)
		}
		if got := w.raw(query(ref)); got != "kept\n" {
			t.Errorf("its text is %q", got)
		}
	}
	if l := w.row(damaged[0]); l.State != store.LogEnded {
		t.Errorf("the damaged log is %s", l.State)
	}

	// The same when their time is over: the object of one of two is not known.
	w.Advance(time.Minute)
	other, _ := w.ended([]string{"other\n"}, 1)
	w.Advance(time.Minute)
	_, _ = w.svc.SealEnded(t.Context())
	forget(w.row(kept[0]).ArchiveKey)
	w.Advance(1000 * 24 * time.Hour)
	if err := w.svc.Collect(t.Context()); err == nil {
		t.Error("nobody is told of the log whose object is not known")
	}
	if l := w.row(other[0]); l.State != store.LogExpired || l.ArchiveKey != "" {
		t.Errorf("the log whose time is over is %s with archive %q", l.State, l.ArchiveKey)
	}
}
