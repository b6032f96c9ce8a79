package reader_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// A job that has not started says exactly why, and one that has says nothing.
func TestAJobSaysWhyItWaits(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		want := func(run ci.RunID, name, code, detail string) {
			w.t.Helper()
			summary := w.run(run).JobList[slices.IndexFunc(w.run(run).JobList, func(j protocol.JobSummary) bool { return j.Name == name })]
			for where, got := range map[string]*protocol.WaitReason{"run": summary.Waiting, "job": w.job(run, name).Waiting, "explain": w.explain(run, name).Job.Waiting} {
				switch {
				case code == "" && got != nil:
					w.t.Errorf("%s (%s) waits for %+v, want nothing", name, where, got)
				case code != "" && (got == nil || got.Code != code || !strings.Contains(got.Detail, detail)):
					w.t.Errorf("%s (%s) waits for %+v, want %s: %s", name, where, got, code, detail)
				}
			}
		}
		gpu := job("gpu")
		gpu.RunsOn.Labels = []string{"gpu"}
		id := w.submit(job("build"), job("test", "build"), gpu)

		want(id, "build", "no_runner_online", "no runner is online (needs any runner)")
		want(id, "gpu", "no_runner_online", "label gpu")
		want(id, "test", "needs", "waits for build")

		a := w.agent("a", 1)
		want(id, "build", "runners_busy", "position 1")
		want(id, "gpu", "no_matching_runner", "no runner that is online offers label gpu")

		build := a.start()
		want(id, "build", "", "")
		second := w.submit(job("one"), job("two"))
		want(second, "one", "runners_busy", "position 1")
		want(second, "two", "runners_busy", "position 2")
		if got := w.job(second, "two").Waiting; got.Position != 2 {
			w.t.Errorf("position %d, want 2", got.Position)
		}
		a.end(build)
		want(id, "test", "runners_busy", "position")

		// A lost job waits for its backoff first, and says until when.
		c := w.agent("c", 1)
		lost := c.claim()
		name := nameOf(w, lost)
		w.lose()
		w.agent("d", 1)
		back := w.job(lost.Run, name)
		if back.Waiting == nil || back.Waiting.Code != "backoff" || back.Waiting.Until == nil || !back.Waiting.Until.After(time.UnixMicro(w.now.Load())) {
			w.t.Errorf("a lost job waits for %+v", back.Waiting)
		}
		want(lost.Run, name, "backoff", "runner_lost in phase claimed, before any user code")
		w.pass(time.Second)
		want(lost.Run, name, "runners_busy", "")
	})
}

// A runner that drains takes no more jobs: who waits for it alone is told so, and
// not that it is busy.
func TestAJobSaysThatItsRunnersAreDraining(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		waits := func(run ci.RunID, code string) {
			w.t.Helper()
			got := w.run(run).JobList[0].Waiting
			if got == nil || got.Code != code || (got.Position > 0) != (code == "runners_busy") {
				w.t.Errorf("it waits for %+v, want %s", got, code)
			}
		}
		gpu := job("train")
		gpu.RunsOn.Labels = []string{"gpu"}
		small, large := w.agent("small", 1), w.agent("large", 1, "gpu")
		id, other := w.submit(gpu), w.submit(job("build"))
		waits(id, "runners_busy")

		// By the operator: the runner is, and with it its session.
		if err := w.e.DrainRunner(w.ctx, w.Org, "tester", large.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		waits(id, "runners_draining")
		waits(other, "runners_busy")

		// By itself, as it is asked to end.
		if err := w.e.DrainSession(w.ctx, small.who, protocol.Drain{Session: small.session}); err != nil {
			w.t.Fatal(err)
		}
		waits(other, "runners_draining")
		w.agent("another", 1)
		waits(other, "runners_busy")
		waits(id, "runners_draining")
	})
}

// A tenant at its limit of running jobs is told so.
func TestAJobSaysThatTheQuotaIsReached(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.write(func(tx *store.Tx) error { return tx.SetOrgLimits(w.ctx, w.Org, 1, 1) })
		a := w.agent("a", 4)
		id := w.submit(job("first"), job("second"))
		a.start()
		waiting := 0
		for _, j := range w.run(id).JobList {
			if j.Waiting != nil {
				waiting++
				if j.Waiting.Code != "quota" || !strings.Contains(j.Waiting.Detail, "(1)") {
					w.t.Errorf("%s waits for %+v", j.Name, j.Waiting)
				}
			}
		}
		if waiting != 1 {
			w.t.Errorf("%d jobs wait, want 1", waiting)
		}
	})
}

// A need on a matrix is met when all of its legs have finished, and is named once.
func TestANeedOnAMatrixIsNamedUntilItsLastLegHasFinished(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		legs := []ci.JobSpec{job("test (1)"), job("test (2)"), job("lint")}
		legs[0].Key, legs[1].Key = "test", "test"
		id := w.submit(append(legs, job("publish", "test", "lint"))...)
		a := w.agent("a", 1)
		for _, want := range [][]string{{"test", "lint"}, nil, nil} {
			if got := w.job(id, "publish").Waiting; want != nil && (got == nil || !slices.Equal(got.Needs, want) || got.Detail != "waits for test, lint") {
				w.t.Errorf("waits for %+v, want %v", got, want)
			}
			ref := a.start()
			done := nameOf(w, ref)
			a.end(ref)
			got := w.job(id, "publish").Waiting
			if done == "lint" && got != nil && slices.Contains(got.Needs, "lint") {
				w.t.Errorf("lint has finished, and publish waits for %v", got.Needs)
			}
		}
		if got := w.job(id, "publish").Waiting; got == nil || got.Code == "needs" {
			w.t.Errorf("all needs have finished, and it waits for %+v", got)
		}
	})
}

// nameOf returns the name of the job that a lease is for.
func nameOf(w *world, ref ci.LeaseRef) string {
	w.t.Helper()
	for _, j := range w.run(ref.Run).JobList {
		if j.ID == ref.Job {
			return j.Name
		}
	}
	w.t.Fatalf("no job %s", ref.Job)
	return ""
}
