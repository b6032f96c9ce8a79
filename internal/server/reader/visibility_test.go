package reader_test

import (
	"errors"
	"reflect"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/reader"
)

// Whatever a tenant has is not found by another one, in every way to read: there
// is no answer from which to learn that it exists. The table has a row for every
// method of the reader.
func TestNobodySeesWhatIsOfAnotherTenant(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		other := w.newTenant("other")
		stranger := other.Viewer
		// The tenant has one of everything that can be seen.
		dead := w.deadLetter("dead")
		done := w.submit(job("done"))
		b := w.agent("b", 1)
		b.end(b.start())
		running := w.submitAs(w.tenant, "0123456789abcdef0123456789abcdef01234567", job("held"), job("queued"))
		a := w.agent("a", 1)
		a.start()
		runner := a.who.Runner
		queued := w.jobID(running, "queued")
		// The stranger has the same, so that an answer is not empty by itself.
		theirs := w.submitAs(other, "0123456789abcdef0123456789abcdef01234567", job("theirs"))
		theirRunner := w.agentOf(other, "theirs", 1).who.Runner

		hidden := func(v any, err error) {
			w.t.Helper()
			if !errors.Is(err, ci.ErrNotFound) {
				w.t.Errorf("%v is shown: %+v", err, v)
			}
		}
		type check = func(v auth.Viewer)
		checks := map[string]check{
			"Run": func(v auth.Viewer) {
				for _, id := range []ci.RunID{running, dead, done} {
					hidden(w.r.Run(w.ctx, v, id))
				}
			},
			"Summary": func(v auth.Viewer) {
				for _, id := range []ci.RunID{running, dead, done} {
					hidden(w.r.Summary(w.ctx, v, id))
				}
			},
			"Job":     func(v auth.Viewer) { hidden(w.r.Job(w.ctx, v, queued)) },
			"Explain": func(v auth.Viewer) { hidden(w.r.Explain(w.ctx, v, queued)) },
			"Runner":  func(v auth.Viewer) { hidden(w.r.Runner(w.ctx, v, runner)) },
			"Runs": func(v auth.Viewer) {
				for _, f := range []reader.RunFilter{
					{},
					{Repo: string(w.repo)},
					{Repo: "local/default"},
					{Commit: "0123456789abcdef0123456789abcdef01234567"},
					{State: ci.StateRunning},
					{State: ci.StateFinished},
					{After: string(theirs)},
				} {
					page, err := w.r.Runs(w.ctx, v, f)
					if err != nil {
						w.t.Error(err)
					}
					for _, r := range page.Items {
						if r.ID != theirs {
							w.t.Errorf("%+v lists run %s of another tenant", f, r.ID)
						}
					}
				}
			},
			"Runners": func(v auth.Viewer) {
				page, err := w.r.Runners(w.ctx, v, "", 0)
				if err != nil || len(page.Items) != 1 || page.Items[0].ID != theirRunner || len(page.Items[0].Running) != 0 {
					w.t.Errorf("the stranger's runners: %+v, %v", page, err)
				}
			},
			"AllRunners": func(v auth.Viewer) {
				all, err := w.r.AllRunners(w.ctx, v)
				if err != nil || len(all) != 1 || all[0].ID != theirRunner || len(all[0].Running) != 0 {
					w.t.Errorf("the stranger's runners: %+v, %v", all, err)
				}
			},
			"DeadLetters": func(v auth.Viewer) {
				page, err := w.r.DeadLetters(w.ctx, v, "", 0)
				if err != nil || len(page.Items) != 0 {
					w.t.Errorf("the stranger's dead letters: %+v, %v", page, err)
				}
			},
			"Overview": func(v auth.Viewer) {
				o, err := w.r.Overview(w.ctx, v)
				if err != nil || o.RunningCount+len(o.Running)+len(o.Broken)+len(o.Recent)+o.DeadLetters != 0 {
					w.t.Errorf("the stranger's overview: %+v, %v", o, err)
				}
				if o.WaitingCount != 1 || len(o.Waiting) != 1 || o.Waiting[0].Run.ID != theirs || o.Runners.Online != 1 || o.Runners.Busy != 0 {
					w.t.Errorf("the stranger's overview: %+v", o)
				}
			},
		}
		methods := reflect.TypeFor[*reader.Reader]()
		for method := range methods.Methods() {
			name := method.Name
			if checks[name] == nil {
				w.t.Errorf("no check for the method %s", name)
				continue
			}
			checks[name](stranger)
		}
		// Nobody is no tenant either.
		for _, name := range []string{"Run", "Summary", "Job", "Explain", "Runner"} {
			checks[name](auth.Viewer{})
		}
		// The owner sees it all.
		if got := w.run(running); got.ID != running {
			w.t.Errorf("the owner sees %+v", got)
		}
		page := must(w, func() (protocol.Page[protocol.RunSummary], error) {
			return w.r.Runs(w.ctx, w.Viewer, reader.RunFilter{})
		})
		if len(page.Items) != 3 {
			w.t.Errorf("the owner sees %d runs, want 3", len(page.Items))
		}
	})
}

// What a job waits for says nothing about other tenants' runners and jobs.
func TestAWaitingJobLearnsNothingOfOtherTenants(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		other := w.newTenant("other")
		w.agentOf(other, "theirs", 1, "gpu")
		for range 3 {
			w.submitAs(other, "", job("before"))
		}
		gpu := job("gpu")
		gpu.RunsOn.Labels = []string{"gpu"}
		id := w.submit(job("mine"), gpu)
		if got := w.job(id, "mine").Waiting; got == nil || got.Code != "no_runner_online" {
			w.t.Errorf("waits for %+v, although the only runner is another tenant's", got)
		}
		a := w.agent("mine", 1)
		if got := w.job(id, "mine").Waiting; got == nil || got.Code != "runners_busy" || got.Position != 1 {
			w.t.Errorf("waits for %+v: other tenants' jobs are counted", got)
		}
		if got := w.job(id, "gpu").Waiting; got == nil || got.Code != "no_matching_runner" {
			w.t.Errorf("waits for %+v, although the only runner with the label is another tenant's", got)
		}
		a.end(a.start())
	})
}

// deadLetter makes a run whose job was lost and may not be tried again. It lets
// a TTL pass.
func (w *world) deadLetter(name string) ci.RunID {
	w.t.Helper()
	spec := job(name)
	spec.Retry = &ci.RetryPolicy{On: []ci.Reason{ci.ReasonRunnerLost}}
	id := w.submit(spec)
	w.agent("doomed "+name, 1).start()
	w.lose()
	if got := w.job(id, name); got.Reason != ci.ReasonAttemptsExhausted {
		w.t.Fatalf("no dead letter: %s %s %s %s", got.State, got.Conclusion, got.Reason, got.Detail)
	}
	return id
}
