package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/snapshot"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// world is two nodes' snapshot services over one database and one directory.
type world struct {
	*storetest.World
	t     testing.TB
	blob  *fs.Store
	cfg   snapshot.Config
	nodes []*snapshot.Service
	ids   ci.IDSource
	// before runs before an object is stored, after when it has been.
	before, after func()
}

// suspending is the store with the test's hooks.
type suspending struct {
	*fs.Store
	w *world
}

func (s suspending) PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error {
	before, after := s.w.before, s.w.after
	s.w.before, s.w.after = nil, nil
	if before != nil {
		before()
	}
	err := s.Store.PutNew(ctx, key, r, size, sum)
	if after != nil {
		after()
	}
	return err
}

func each(t *testing.T, run func(*testing.T, *world)) {
	t.Helper()
	storetest.Each(t, testkit.Postgres, func(t *testing.T, sw *storetest.World) {
		dir, err := fs.Open(t.TempDir(), fs.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = dir.Close() })
		w := &world{World: sw, t: t, blob: dir}
		w.cfg = snapshot.Config{Store: sw.Store, Blob: suspending{dir, w}, Log: sw.Log}
		w.nodes = []*snapshot.Service{snapshot.New(w.cfg), snapshot.New(w.cfg)}
		run(t, w)
	})
}

func digestOf(n int) string {
	sum := sha256.Sum256(fmt.Append(nil, "manifest ", n))
	return "sha256:" + hex.EncodeToString(sum[:])
}

func content(n int) []byte { return fmt.Append(nil, "snapshot ", n) }

func (w *world) publish(node *snapshot.Service, n int) (store.Source, error) {
	b := content(n)
	return node.Publish(w.t.Context(), w.Org, store.Source{
		Digest: digestOf(n), BlobDigest: "sha256:x", Size: int64(len(b)), Files: 1, Bytes: 1,
	}, bytes.NewReader(b), sha256.Sum256(b))
}

func (w *world) collect() {
	w.t.Helper()
	for _, node := range w.nodes {
		if err := node.Collect(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
}

// submit makes a run of a snapshot, as the engine does.
func (w *world) submit(n int) error { return w.submitWhile(n, func() {}) }

// submitWhile is submit, whose transaction is not committed before meanwhile returns.
func (w *world) submitWhile(n int, meanwhile func()) error {
	return w.Store.Write(w.t.Context(), func(tx *store.Tx) error {
		ctx := w.t.Context()
		defer meanwhile()
		key := store.SourceKey{Org: w.Org, Digest: digestOf(n)}
		there, err := tx.ShareSources(ctx, []store.SourceKey{key})
		if err != nil {
			return err
		}
		if !there[key] {
			return ci.Errorf(ci.ErrNotFound, "no source")
		}
		numbers, err := tx.NextRunNumbers(ctx, map[ci.RepoID]int64{w.Repo: 1})
		if err != nil {
			return err
		}
		return tx.InsertRuns(ctx, []store.Run{{
			ID: ci.RunID(w.ids.New(ci.PrefixRun)), Org: w.Org, Repo: w.Repo, Number: numbers[w.Repo], Workflow: "w", Path: "p",
			WorkflowDigest: "d", SourceDigest: key.Digest, Plan: "{}", Event: "manual", Actor: "tester", Trust: ci.TrustTrusted,
			JobsLeft: 1, CreatedUS: w.Now(),
		}}, w.Now())
	})
}

// has reads a snapshot by its row, without asking for it.
func (w *world) has(n int) (found, whole bool) {
	w.t.Helper()
	ctx := w.t.Context()
	key := store.SourceKey{Org: w.Org, Digest: digestOf(n)}
	var objects map[store.SourceKey]string
	err := w.Store.Read(ctx, func(tx *store.Tx) (err error) {
		objects, err = tx.SourceObjects(ctx, []store.SourceKey{key})
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	at, found := objects[key]
	if !found {
		return false, false
	}
	r, err := w.blob.Open(ctx, at, 0, -1)
	if err != nil {
		return true, false
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return true, err == nil && bytes.Equal(b, content(n))
}

func (w *world) objects() int {
	w.t.Helper()
	infos, err := w.blob.List(w.t.Context(), "", "", 10_000)
	if err != nil {
		w.t.Fatal(err)
	}
	return len(infos)
}

// A snapshot without a run goes a day after somebody asked for it last; one with a
// run stays.
func TestASnapshotIsKeptForItsRunOrForADay(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		const used, asked, forgotten = 1, 2, 3
		for _, n := range []int{used, asked, forgotten} {
			if _, err := w.publish(w.nodes[0], n); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.submit(used); err != nil {
			t.Fatal(err)
		}
		w.Advance(23 * time.Hour)
		w.collect()
		if n := w.objects(); n != 3 {
			t.Fatalf("%d objects after 23 hours", n)
		}
		if _, err := w.nodes[0].Find(t.Context(), w.Org, digestOf(asked)); err != nil {
			t.Fatal(err)
		}
		w.Advance(2 * time.Hour)
		w.collect()
		if _, err := w.nodes[1].Find(t.Context(), w.Org, digestOf(forgotten)); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("after 25 hours nobody has asked in: %v", err)
		}
		for _, n := range []int{used, asked} {
			if found, whole := w.has(n); !found || !whole {
				t.Errorf("snapshot %d: found %v, whole %v", n, found, whole)
			}
		}
		w.Advance(1000 * time.Hour)
		w.collect()
		if found, whole := w.has(used); !found || !whole || w.objects() != 1 {
			t.Errorf("the run's snapshot: found %v, whole %v, with %d objects", found, whole, w.objects())
		}
		// What was collected can be published again.
		if _, err := w.publish(w.nodes[0], forgotten); err != nil {
			t.Fatal(err)
		}
		if err := w.submit(forgotten); err != nil {
			t.Fatal(err)
		}
		w.collect()
		if found, whole := w.has(forgotten); !found || !whole {
			t.Errorf("published again: found %v, whole %v", found, whole)
		}
	})
}

// stubborn is a store that cannot delete its first object.
type stubborn struct {
	*fs.Store
	key string
}

func (s stubborn) Delete(ctx context.Context, key string) error {
	if key == s.key {
		return ci.Errorf(ci.ErrUnavailable, "stubborn")
	}
	return s.Store.Delete(ctx, key)
}

// A snapshot that cannot be deleted is reported and keeps nothing else, neither
// while it has its row nor when it is an orphan.
func TestOneFailureStopsNoCollection(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		for n := range 3 {
			if _, err := w.publish(w.nodes[0], n); err != nil {
				t.Fatal(err)
			}
		}
		infos, err := w.blob.List(t.Context(), "", "", 1)
		if err != nil {
			t.Fatal(err)
		}
		cfg := w.cfg
		cfg.Blob = stubborn{w.blob, infos[0].Key}
		node := snapshot.New(cfg)
		w.Advance(25 * time.Hour)
		if err := node.Collect(t.Context()); !errors.Is(err, ci.ErrUnavailable) || w.objects() != 1 {
			t.Errorf("%d objects, error %v", w.objects(), err)
		}
		at := strings.LastIndexByte(infos[0].Key, '/') + 1
		orphan := infos[0].Key[:at] + strings.Repeat("f", 64) + infos[0].Key[at+64:] // sorts behind the other
		if err := w.blob.PutNew(t.Context(), orphan, bytes.NewReader(nil), 0, sha256.Sum256(nil)); err != nil {
			t.Fatal(err)
		}
		w.Advance(25 * time.Hour)
		if err := node.Collect(t.Context()); !errors.Is(err, ci.ErrUnavailable) || w.objects() != 1 {
			t.Errorf("%d objects, error %v", w.objects(), err)
		}
		w.collect()
		if n := w.objects(); n != 0 {
			t.Errorf("%d objects when they can be deleted", n)
		}
	})
}

// Asking for a snapshot that is in use writes nothing.
func TestAskingAgainWritesNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		if _, err := w.publish(w.nodes[0], 1); err != nil {
			t.Fatal(err)
		}
		written := w.FailOnce(store.PointBegin)
		for range 3 {
			w.Advance(19 * time.Minute)
			if _, err := w.nodes[0].Find(t.Context(), w.Org, digestOf(1)); err != nil || written() {
				t.Fatalf("%v, written: %v", err, written())
			}
		}
	})
}

// Content that comes twice is stored once.
func TestTheSameContentIsStoredOnce(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		var second store.Source
		w.after = func() { // another node is faster
			var err error
			if second, err = w.publish(w.nodes[1], 1); err != nil {
				t.Error(err)
			}
		}
		first, err := w.publish(w.nodes[0], 1)
		if err != nil || first != second || w.objects() != 1 {
			t.Errorf("%v: %+v and %+v in %d objects", err, first, second, w.objects())
		}
	})
}

// CACHE-08: publishers and submitters that are suspended anywhere, clocks that go
// on, and two collectors, in drawn order. After every step each row has its bytes
// and each run its source; in the end nothing is left that no run names.
func TestCase_CACHE_08_ACollectedSnapshotIsRefusedNotMissing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		first := 0
		rapid.Check(t, func(rt *rapid.T) {
			first += publishers
			w.interleave(rt, first)
		})
	})
}

// publishers is how many snapshots are published in one drawing.
const publishers = 3

func (w *world) interleave(rt *rapid.T, first int) {
	ctx := w.t.Context()
	before := w.runsOf(first)
	runs := map[int]bool{}
	found := map[int]bool{} // by the submitter: it was told that the snapshot is there
	node := func() *snapshot.Service { return w.nodes[rapid.IntRange(0, 1).Draw(rt, "node")] }
	meanwhile := func() {
		w.Advance(time.Duration(rapid.SampledFrom([]int{0, 1, 7, 26, 60}).Draw(rt, "hours meanwhile")) * time.Hour)
		if rapid.Bool().Draw(rt, "collector runs meanwhile") {
			w.collect()
		}
	}
	for range rapid.IntRange(5, 25).Draw(rt, "steps") {
		n := first + rapid.IntRange(0, publishers-1).Draw(rt, "which")
		switch rapid.SampledFrom([]string{"find", "publish", "submit", "submit", "collect", "time"}).Draw(rt, "what") {
		case "find":
			switch _, err := node().Find(ctx, w.Org, digestOf(n)); {
			case err == nil:
				found[n] = true
			case !errors.Is(err, ci.ErrNotFound):
				rt.Fatal(err)
			}
		case "publish":
			w.before, w.after = meanwhile, meanwhile
			_, err := w.publish(node(), n)
			w.before, w.after = nil, nil
			if err != nil && !errors.Is(err, ci.ErrUnavailable) {
				rt.Fatal(err)
			}
			found[n] = found[n] || err == nil
		case "submit": // also of what was found long ago
			switch err := w.submit(n); {
			case err == nil && !found[n]:
				rt.Fatalf("a run of snapshot %d, which nobody published", n)
			case err == nil:
				runs[n] = true
			case !errors.Is(err, ci.ErrNotFound) || runs[n]:
				rt.Fatal(err)
			}
		case "collect":
			w.collect()
		case "time":
			w.Advance(time.Duration(rapid.SampledFrom([]int{1, 13, 30, 800}).Draw(rt, "hours")) * time.Hour)
		}
		for n := first; n < first+publishers; n++ {
			if found, whole := w.has(n); found && !whole || runs[n] && !found {
				rt.Fatalf("snapshot %d with a run %v: found %v, whole %v", n, runs[n], found, whole)
			}
		}
	}
	for range 2 {
		w.Advance(40 * 24 * time.Hour)
		w.collect()
	}
	if got := w.objects(); got != before+len(runs) {
		rt.Fatalf("%d objects are left for %d runs and %d earlier", got, len(runs), before)
	}
}

// runsOf counts the snapshots of earlier drawings that are left when the others
// have been collected.
func (w *world) runsOf(first int) (n int) {
	w.t.Helper()
	w.Advance(40 * 24 * time.Hour)
	w.collect()
	for i := range first {
		if found, _ := w.has(i); found {
			n++
		}
	}
	return n
}

// A run is committed after the collector has looked for runs, and before it deletes
// what has none.
func TestCase_CACHE_08_ASnapshotStaysUnderARunThatIsBeingMade(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		if _, err := w.publish(w.nodes[0], 1); err != nil {
			t.Fatal(err)
		}
		w.Advance(25 * time.Hour)
		collected := make(chan error, 1)
		err := w.submitWhile(1, func() {
			go func() { collected <- w.nodes[0].Collect(t.Context()) }()
			select { // an embedded database has one writer: it waits
			case err := <-collected:
				collected <- err
			case <-time.After(300 * time.Millisecond):
			}
		})
		if err := errors.Join(err, <-collected); err != nil {
			t.Fatal(err)
		}
		if found, whole := w.has(1); !found || !whole {
			t.Errorf("the source of the run: found %v, whole %v", found, whole)
		}
	})
}

// Runs are made of snapshots just while these are collected: each run has its
// source, however the two fall together.
func TestCase_CACHE_08_RunsAreMadeWhileSnapshotsAreCollected(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		e, err := engine.New(t.Context(), engine.Config{
			Store: w.Store, Log: w.Log, Monotonic: func() time.Duration { return time.Duration(w.Now()) * time.Microsecond },
		})
		if err != nil {
			t.Fatal(err)
		}
		cfg := w.cfg
		cfg.Blob, cfg.Keep = w.blob, time.Microsecond
		nodes := []*snapshot.Service{snapshot.New(cfg), snapshot.New(cfg)}
		stop := make(chan struct{})
		var collecting, submitting sync.WaitGroup
		for _, node := range nodes {
			collecting.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					w.Advance(time.Millisecond)
					if err := node.Collect(t.Context()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		const rounds = 15
		var again atomic.Int64
		for who := range 4 {
			submitting.Go(func() {
				for n := range rounds {
					for {
						if _, err := w.publish(nodes[who%2], n); err != nil {
							t.Error(err)
							return
						}
						_, err := e.Submit(t.Context(), engine.Submission{
							Org: w.Org, Repo: w.Repo, Actor: "tester", Source: digestOf(n), Trust: ci.TrustTrusted, Event: "manual",
							Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{{Name: "j", Key: "j", Steps: []ci.StepSpec{{Run: "true"}}}}},
						})
						if err == nil {
							break
						}
						if !errors.Is(err, ci.ErrNotFound) {
							t.Error(err)
							return
						}
						again.Add(1)
					}
				}
			})
		}
		submitting.Wait()
		close(stop)
		collecting.Wait()
		for n := range rounds {
			if found, whole := w.has(n); !found || !whole {
				t.Errorf("the source of four runs: found %v, whole %v", found, whole)
			}
		}
		t.Logf("%d times the snapshot had been collected before the run was made", again.Load())
		w.Advance(time.Hour)
		w.collect()
		if n := w.objects(); n != rounds {
			t.Errorf("%d objects for %d snapshots", n, rounds)
		}
	})
}
