package sim

import (
	"fmt"

	"forgeci/internal/ci"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

const actor = "person"

// operate lets a person do something.
func (w *world) operate() {
	r := w.rng
	o := w.orgs[0]
	if r.IntN(8) == 0 {
		o = w.orgs[1]
	}
	runs := w.mirror.runsOf(o.id)
	pick := func(f func(store.Run) bool) (store.Run, bool) {
		var some []store.Run
		for _, run := range runs {
			if f(run) {
				some = append(some, run)
			}
		}
		if len(some) == 0 {
			return store.Run{}, false
		}
		return some[r.IntN(len(some))], true
	}
	active := func(run store.Run) bool { return run.State != ci.StateFinished }
	ended := func(run store.Run) bool { return run.State == ci.StateFinished }
	every := func(store.Run) bool { return true }
	switch r.IntN(20) {
	default:
		if n := w.mirror.activeRuns(); n < 5 {
			w.submit(o)
		}
	case 0, 1, 2, 3, 4:
		if run, ok := pick(active); ok {
			w.cancel(o, run.ID)
		}
	case 5:
		if run, ok := pick(every); ok {
			w.cancel(o, run.ID)
		}
	case 6, 7:
		if run, ok := pick(ended); ok {
			w.retry(o, run.ID, r.IntN(3) > 0)
		}
	case 8:
		if run, ok := pick(every); ok {
			w.retry(o, run.ID, true)
		}
	case 9, 10:
		if dead := w.mirror.deadLetters(o.id); len(dead) > 0 {
			w.requeue(o, dead[r.IntN(len(dead))])
		}
	case 11:
		rn := w.runners[r.IntN(len(w.runners))]
		if rn.registered {
			w.fence(rn)
		}
	case 12:
		rn := w.runners[r.IntN(len(w.runners))]
		if rn.registered {
			w.send(&call{route: "drain-runner", text: rn.name, may: []ci.Kind{ci.ErrConflict}, exec: func(n *node) (any, error) {
				defer rn.ask()()
				return nil, n.e.DrainRunner(w.ctx, rn.org.id, actor, rn.who.Runner)
			}})
		}
	}
}

func (w *world) submit(o *org) {
	plan := randomPlan(w.rng)
	if w.step == 0 && w.seed%4 == 0 {
		plan = handOnPlan()
	}
	key := ""
	if w.rng.IntN(2) == 0 {
		key = w.newID(ci.PrefixRequest)
	}
	s := engine.Submission{
		Org: o.id, Repo: o.repo, Actor: actor, Plan: plan, Source: sourceDigest, Trust: ci.TrustTrusted, Event: "manual",
		IdempotencyKey: key, RequestDigest: engine.Digest(plan),
	}
	c := &call{route: "submit", text: fmt.Sprintf("%d jobs", len(plan.Jobs)), stored: key != "", merges: true, exec: func(n *node) (any, error) {
		return n.e.Submit(w.ctx, s)
	}}
	c.truth = func(rep any) { w.runIs(rep.(ci.RunID), "submit") }
	w.send(c)
}

// runIs requires a run that its maker was told of.
func (w *world) runIs(id ci.RunID, route string) {
	w.read(func(tx *store.Tx) error {
		_, ok, err := tx.Run(w.ctx, id)
		if err == nil && !ok {
			w.bad("what is answered is stored", "%s: no run %s", route, id)
		}
		return err
	})
}

func (w *world) cancel(o *org, id ci.RunID) {
	w.send(&call{route: "cancel", text: short(id), may: []ci.Kind{ci.ErrConflict}, exec: func(n *node) (any, error) {
		if w.mirror.runs[id].State == ci.StateCancelling {
			w.saw(evCancelTwice)
		}
		return nil, n.e.Cancel(w.ctx, o.id, actor, id)
	}, done: func(_ any, err error) {
		if ci.KindOf(err) == ci.ErrConflict {
			w.saw(evCompletionFirst)
		}
	}, truth: func(any) {
		w.read(func(tx *store.Tx) error {
			run, _, err := tx.Run(w.ctx, id)
			if err == nil && run.State != ci.StateCancelling && run.Conclusion != ci.ConclusionCancelled {
				w.bad("what is answered is stored", "cancel: run %s is %s %s", id, run.State, run.Conclusion)
			}
			return err
		})
	}})
}

func (w *world) retry(o *org, id ci.RunID, failed bool) {
	key := ""
	if w.rng.IntN(2) == 0 {
		key = w.newID(ci.PrefixRequest)
	}
	req := engine.RetryRequest{Org: o.id, Actor: actor, Run: id, Failed: failed, IdempotencyKey: key, RequestDigest: "d"}
	w.send(&call{
		route: "retry", text: fmt.Sprintf("%s failed=%v", short(id), failed), stored: key != "", may: []ci.Kind{ci.ErrConflict, ci.ErrGone},
		exec: func(n *node) (any, error) { return n.e.Retry(w.ctx, req) }, truth: func(rep any) { w.runIs(rep.(ci.RunID), "retry") },
	})
}

func (w *world) requeue(o *org, id ci.JobID) {
	w.send(&call{
		route: "requeue", text: short(id), stored: true, may: []ci.Kind{ci.ErrConflict, ci.ErrGone},
		exec: func(n *node) (any, error) { return n.e.Requeue(w.ctx, o.id, actor, id) }, truth: func(rep any) {
			w.saw(evRequeue)
			w.runIs(rep.(ci.RunID), "requeue")
		},
	})
}

func (w *world) fence(rn *runner) {
	w.send(&call{route: "fence", text: rn.name, exec: func(n *node) (any, error) {
		// The operator says that the host is dead; here it is not always true.
		for _, b := range w.mirror.boxes {
			if b.runner == rn {
				b.excused = true
			}
		}
		return nil, n.e.FenceRunner(w.ctx, rn.org.id, actor, rn.who.Runner)
	}, truth: func(any) {
		w.read(func(tx *store.Tx) error {
			ls, err := tx.LeasesOfRunner(w.ctx, rn.who.Runner)
			if err == nil && len(ls) > 0 {
				w.bad("what is answered is stored", "fence: runner %s holds %d leases", rn.name, len(ls))
			}
			return err
		})
	}})
}
