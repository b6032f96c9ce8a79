package artifact_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"pgregory.net/rapid"

	"forgeci/internal/ci"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// TestCase_CACHE_08_CollectionNeverTakesWhatIsNeededAndLeavesNothing runs
// uploaders that are suspended anywhere, leases that end, retries that bind,
// clocks that go on, and two collectors, in drawn order. After every step each
// sealed artifact that may be read has its bytes; in the end nothing is left.
func TestCase_CACHE_08_CollectionNeverTakesWhatIsNeededAndLeavesNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		rapid.Check(t, func(rt *rapid.T) { w.interleave(rt) })
	})
}

// uploader is one attempt's way to a sealed artifact, step by step.
type uploader struct {
	ref     ci.LeaseRef
	held    engine.Held
	id      string
	content []byte
	step    int // done: 1 begun, 2 sent, 3 sealed, 4 completed
	ended   bool
	done    bool // its run is finished
}

func (w *world) interleave(rt *rapid.T) {
	ctx := w.t.Context()
	nodes := []*artifact.Service{w.svc, artifact.New(w.cfg)}
	var ups []*uploader
	for i := range rapid.IntRange(1, 3).Draw(rt, "uploaders") {
		ref := w.job("app")
		w.Renew(ref, 100_000*time.Hour)
		ups = append(ups, &uploader{ref: ref, held: w.held(ref), content: fmt.Appendf(nil, "content %d of %s", i, ref.Job)})
	}
	refused := func(u *uploader, err error) {
		if err != nil && !(u.ended && (errors.Is(err, ci.ErrLeaseLost) || errors.Is(err, ci.ErrNotFound))) {
			rt.Fatalf("step %d (ended: %v): %v", u.step, u.ended, err)
		}
		if err == nil && u.ended && u.step < 3 {
			rt.Fatalf("step %d of an attempt that has ended was accepted", u.step)
		}
	}
	for range rapid.IntRange(5, 30).Draw(rt, "steps") {
		u := ups[rapid.IntRange(0, len(ups)-1).Draw(rt, "who")]
		node := nodes[rapid.IntRange(0, 1).Draw(rt, "node")]
		switch rapid.SampledFrom([]string{"go on", "go on", "go on", "end", "collect", "time", "retry"}).Draw(rt, "what") {
		case "go on":
			w.goOn(ctx, rt, node, u, refused)
		case "end":
			if !u.ended {
				w.End(u.ref, func(context.Context, *store.Tx) error { return nil })
				u.ended = true
			}
		case "collect":
			if err := node.Collect(ctx); err != nil {
				rt.Fatal(err)
			}
		case "time":
			w.Advance(time.Duration(rapid.SampledFrom([]int{1, 13, 200, 800}).Draw(rt, "hours")) * time.Hour)
		case "retry":
			w.retry(rt, u)
		}
		w.fsck(rt, ups)
	}
	for _, u := range ups {
		if !u.ended {
			w.End(u.ref, func(context.Context, *store.Tx) error { return nil })
		}
		if !u.done {
			w.FinishRun(u.ref.Run)
		}
	}
	for range 2 {
		w.Advance(40 * 24 * time.Hour)
		if err := nodes[0].Collect(ctx); err != nil {
			rt.Fatal(err)
		}
	}
	if objects, uploads := w.objects(), w.uploads(); len(objects) != 0 || uploads != 0 {
		rt.Fatalf("left: objects %q, %d uploads", objects, uploads)
	}
}

func (w *world) goOn(ctx context.Context, rt *rapid.T, node *artifact.Service, u *uploader, check func(*uploader, error)) {
	switch u.step {
	case 0:
		in, body := describe("app", "r", u.content)
		s, err := node.Begin(ctx, u.held, in, body)
		check(u, err)
		if err == nil {
			u.id, u.step = s.ID, 1
		}
	case 1:
		signed, err := node.Sign(ctx, u.held, u.id, one(u.content))
		check(u, err)
		if err == nil {
			w.put(signed.URLs[0], u.content)
			u.step = 2
		}
	case 2:
		// The world does not wait for a seal that is under way.
		meanwhile := func() {
			if !u.ended && rapid.Bool().Draw(rt, "lease ends") {
				w.End(u.ref, func(context.Context, *store.Tx) error { return nil })
				u.ended = true
			}
			if rapid.Bool().Draw(rt, "collector runs") {
				if err := node.Collect(ctx); err != nil {
					rt.Fatal(err)
				}
			}
		}
		w.during, w.after = meanwhile, meanwhile
		err := node.Seal(ctx, u.held, u.id, one(u.content))
		w.during, w.after = nil, nil
		check(u, err)
		if err == nil {
			u.step = 3
		}
	case 3:
		if !u.ended {
			w.complete(u.ref, "app", u.id)
			u.ended, u.step = true, 4
		}
	case 4:
		if !u.done {
			w.FinishRun(u.ref.Run)
			u.done = true
		}
	}
}

// retry binds a completed artifact in a run of its own, which ends at once or in
// the end of the test by its age.
func (w *world) retry(rt *rapid.T, u *uploader) {
	if u.step < 4 {
		return
	}
	run, jobs := w.Run(publish("app"))
	err := w.Store.Write(w.t.Context(), func(tx *store.Tx) error {
		return tx.InsertBindings(w.t.Context(), []store.NewBinding{{Run: run.ID, Job: jobs[0], Name: "app", Artifact: u.id, Org: w.Org}}, w.Now())
	})
	if err != nil && !errors.Is(err, ci.ErrGone) {
		rt.Fatal(err)
	}
	if err == nil {
		r, err := w.blob.Open(w.t.Context(), w.key(u), 0, -1)
		if err != nil {
			rt.Fatalf("bound without its bytes: %v", err)
		}
		_ = r.Close()
	}
	w.FinishRun(run.ID)
}

func (w *world) key(u *uploader) string { return "artifacts/" + string(w.Org) + "/0/" + u.id }

// fsck reads every artifact that may be read.
func (w *world) fsck(rt *rapid.T, ups []*uploader) {
	for _, u := range ups {
		if u.step < 3 {
			continue
		}
		if !u.done { // held by the run that made it
			if _, err := w.blob.Stat(w.t.Context(), w.key(u)); err != nil {
				rt.Fatalf("the bytes of an unfinished run are gone: %v", err)
			}
		}
		r, err := w.svc.Open(w.t.Context(), w.viewer, u.id)
		if errors.Is(err, ci.ErrGone) {
			continue
		}
		if err != nil {
			rt.Fatalf("artifact of step %d: %v", u.step, err)
		}
		b, err := io.ReadAll(r)
		_ = r.Close()
		if err != nil || string(b) != string(u.content) {
			rt.Fatalf("artifact of step %d holds %q, %v", u.step, b, err)
		}
	}
}
