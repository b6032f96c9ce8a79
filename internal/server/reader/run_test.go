package reader_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// A run has its jobs in the order of the workflow and counts them by where they
// are; the same counts stand in lists.
func TestARunShowsItsJobsAndCountsThem(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		optional := job("c")
		optional.AllowFailure = true
		id := w.submitAs(w.tenant, "aaaa", job("b"), optional, job("a", "b"), job("z", "a"))
		a := w.agent("a", 1)
		first := a.start()
		if diff := cmp.Diff(map[string]int{"running": 1, "ready": 1, "waiting": 2}, w.run(id).Jobs); diff != "" {
			w.t.Errorf("counts (-want +got):\n%s", diff)
		}
		w.pass(3 * time.Second)
		for ref := first; ; ref = a.start() {
			if nameOf(w, ref) == "c" {
				a.end(ref, failed)
			} else {
				a.end(ref)
			}
			if w.run(id).State == ci.StateFinished {
				break
			}
			w.pass(time.Second)
		}
		run := w.run(id)
		var names []string
		for _, j := range run.JobList {
			names = append(names, j.Name)
		}
		if diff := cmp.Diff([]string{"b", "c", "a", "z"}, names); diff != "" {
			w.t.Errorf("jobs (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(map[string]int{"success": 3, "failed": 1}, run.Jobs); diff != "" {
			w.t.Errorf("counts (-want +got):\n%s", diff)
		}
		if run.Conclusion != ci.ConclusionSuccess || !run.Warnings || run.Inputs["suite"] != "full" || run.SourceDigest != digest ||
			run.CommitSHA != "aaaa" || run.Actor != "tester" || run.Repo.Name != "local/default" || run.StartedAt == nil || run.FinishedAt == nil {
			w.t.Errorf("the run is %+v", run.RunSummary)
		}
		summary := must(w, func() (protocol.RunSummary, error) { return w.r.Summary(w.ctx, w.Viewer, id) })
		if diff := cmp.Diff(run.RunSummary, summary); diff != "" {
			w.t.Errorf("alone and with its jobs a run differs:\n%s", diff)
		}
	})
}

// A job has all its attempts and the steps of each; what belonged to an
// earlier attempt is not shown as what it is now.
func TestAJobShowsEveryAttemptAndItsSteps(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		spec := job("j")
		spec.Retry = &ci.RetryPolicy{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}}
		spec.Steps = []ci.StepSpec{{Name: "one", Run: "true"}, {Name: "two", Run: "true"}}
		id := w.submit(spec)
		a := w.agent("a", 1)
		ref := a.start()
		a.phase(ref, protocol.SetPhase{Steps: []protocol.StepUpdate{
			{Index: 0, Name: "one", State: ci.StateFinished, Conclusion: ci.ConclusionSuccess, Duration: ci.Duration(2 * time.Second)},
			{Index: 1, Name: "two", State: ci.StateRunning},
		}})
		if got := w.job(id, "j"); len(got.StepList) != 2 || got.StepList[0].Duration.Std() != 2*time.Second || got.StepList[1].Duration != nil || got.Phase != ci.PhaseExecuting {
			w.t.Errorf("while it runs: %+v", got)
		}
		w.lose()
		if got := w.job(id, "j"); got.Attempts != 1 || got.StepList[1].State != ci.StateFinished || got.StepList[1].Conclusion != ci.ConclusionAborted || got.Phase != "" {
			w.t.Errorf("a step goes on without its attempt: %+v", got.StepList)
		}
		w.pass(10 * time.Second)
		b := w.agent("b", 1)
		w.sweep()
		again := b.start()
		if got := w.job(id, "j"); len(got.StepList) != 0 || got.Attempts != 2 || got.Runner != "b" {
			w.t.Errorf("the second attempt has steps of the first: %+v", got)
		}
		b.end(again, func(c *protocol.Complete) {
			exit := 0
			c.Steps = []protocol.StepUpdate{
				{Index: 0, Name: "one", State: ci.StateFinished, Conclusion: ci.ConclusionSuccess},
				{Index: 1, Name: "two", State: ci.StateFinished, Conclusion: ci.ConclusionSuccess, ExitCode: &exit},
			}
		})
		got := w.job(id, "j")
		if len(got.Attempt) != 2 || got.Attempt[0].Winner || !got.Attempt[1].Winner || got.Attempt[0].RunnerName != "a" ||
			got.Attempt[0].Evidence != "" || got.Attempt[1].Evidence == "" || got.Attempt[0].Reason != ci.ReasonRunnerLost {
			w.t.Errorf("attempts %+v", got.Attempt)
		}
		if len(got.StepList) != 2 || got.StepList[1].ExitCode == nil || got.Run.ID != id || len(got.Spec.Steps) != 2 {
			w.t.Errorf("the job %+v", got)
		}
		first, last := got.StepsOf(1), got.StepsOf(2)
		if len(first) != 2 || first[1].Conclusion != ci.ConclusionAborted || !reflect.DeepEqual(last, got.StepList) || !reflect.DeepEqual(got.StepsOf(0), last) ||
			len(got.StepsOf(3)) != 0 {
			w.t.Errorf("the first attempt has steps %+v, the second %+v", first, last)
		}
	})
}

// A retry names its run, and what it took over is marked as taken over.
func TestARetryShowsWhatItTookOver(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("good"), job("bad"))
		a := w.agent("a", 1)
		for range 2 {
			ref := a.start()
			if nameOf(w, ref) == "bad" {
				a.end(ref, failed)
			} else {
				a.end(ref)
			}
		}
		again := w.retry(id)
		run := w.run(again)
		if run.ParentRun != id || run.Event != "retry" {
			w.t.Errorf("the retry is %+v", run.RunSummary)
		}
		if got := w.job(again, "good"); got.PinnedFrom != w.jobID(id, "good") || got.Conclusion != ci.ConclusionSuccess {
			w.t.Errorf("what succeeded is %+v", got.JobSummary)
		}
		if got := w.explain(again, "good").Summary; got != "good was not run again: its result was taken over from job "+string(w.jobID(id, "good"))+"." {
			w.t.Error(got)
		}
		if got := w.job(again, "bad"); got.PinnedFrom != "" || got.State != ci.StateReady {
			w.t.Errorf("what failed is %+v", got.JobSummary)
		}
	})
}

// A run that is being cancelled names each attempt whose end is not proven, with
// its runner and since when; it names nothing any more once all are.
func TestACancellingRunSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("held"), job("lost"), job("done"), job("behind", "held"))
		holder, loser := w.agent("holder", 2), w.agent("loser", 1)
		refs := map[string]ci.LeaseRef{}
		for _, a := range []*agent{loser, holder, holder} {
			ref := a.start()
			refs[nameOf(w, ref)] = ref
		}
		lost := refs[w.held(loser)]
		delete(refs, nameOf(w, lost))
		var kept []ci.LeaseRef
		for _, ref := range refs {
			kept = append(kept, ref)
		}
		ended, alive := kept[0], kept[1]
		if got := w.run(id).Unproven; len(got) != 0 {
			w.t.Errorf("a run that is not cancelled waits for %+v", got)
		}
		if err := w.e.Cancel(w.ctx, w.Org, "tester", id); err != nil {
			w.t.Fatal(err)
		}
		if got := w.run(id); len(got.Unproven) != 3 || got.State != ci.StateCancelling {
			w.t.Errorf("%s: waits for %+v, want three attempts", got.State, got.Unproven)
		}
		holder.end(ended, cancelled)
		w.pass(ttl / 2)
		holder.renew(alive)
		w.pass(ttl/2 + time.Second)
		w.sweep()
		lostAt := time.UnixMicro(w.now.Load()).UTC()
		w.pass(20 * time.Second)
		holder.renew(alive)
		w.pass(20 * time.Second)

		got := map[ci.JobID]protocol.Unproven{}
		for _, u := range w.run(id).Unproven {
			got[u.Job] = u
		}
		want := map[ci.JobID]protocol.Unproven{
			lost.Job:  {Job: lost.Job, Name: nameOf(w, lost), Epoch: 1, Runner: loser.who.Runner, RunnerName: "loser", Lost: true, Since: lostAt},
			alive.Job: {Job: alive.Job, Name: nameOf(w, alive), Epoch: 1, Runner: holder.who.Runner, RunnerName: "holder", Since: got[alive.Job].Since},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			w.t.Errorf("waits for (-want +got):\n%s", diff)
		}
		e := w.explain(id, nameOf(w, lost))
		if len(e.Unproven) != 1 || e.Unproven[0] != want[lost.Job] {
			w.t.Errorf("the lost job waits for %+v", e.Unproven)
		}
		contains(w, e.Summary, "Attempt 1 was lost 40s ago and is not proven to have ended", "`forgeci runner fence loser`")
		contains(w, w.explain(id, nameOf(w, alive)).Summary, "is being cancelled: it ends when holder reports that nothing of it is left there", "`forgeci runner fence holder`")

		holder.end(alive, cancelled)
		if got := w.run(id); got.State != ci.StateCancelling || len(got.Unproven) != 1 {
			w.t.Errorf("%s: waits for %+v, want the lost attempt alone", got.State, got.Unproven)
		}
		if err := w.e.FenceRunner(w.ctx, w.Org, "operator", loser.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		if got := w.run(id); got.State != ci.StateFinished || got.Conclusion != ci.ConclusionCancelled || len(got.Unproven) != 0 {
			w.t.Errorf("%s %s: waits for %+v", got.State, got.Conclusion, got.Unproven)
		}
		if e := w.explain(id, nameOf(w, lost)); len(e.Unproven) != 0 {
			w.t.Errorf("the fenced attempt is still %+v", e.Unproven)
		}
	})
}

func cancelled(c *protocol.Complete) {
	c.Conclusion, c.Reason = ci.ConclusionCancelled, ci.ReasonCancelled
}
