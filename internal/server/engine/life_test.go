package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

func TestAJobRunsOnceAndItsSuccessorFollows(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("compile"), job("test", "compile"))
		w.wantRun(id, ci.StateWaiting, "", "")
		a := w.agent("a", 2)
		got := a.mustClaim()
		if got.Job.Name != "compile" || got.Lease.Epoch != 1 {
			w.t.Fatalf("claimed %+v", got.Lease)
		}
		w.wantRun(id, ci.StateRunning, "", "")
		if again := a.claim(); again != nil {
			w.t.Fatalf("the successor was given out before its need finished: %s", again.Job.Name)
		}
		a.phase(got.Lease, ci.PhasePreparing)
		a.phase(got.Lease, ci.PhaseExecuting)
		a.complete(got.Lease, success())
		next := a.mustClaim()
		if next.Job.Name != "test" || next.Needs["compile"].Conclusion != ci.ConclusionSuccess {
			w.t.Fatalf("claimed %s with needs %v", next.Job.Name, next.Needs)
		}
		a.complete(next.Lease, success())
		w.wantRun(id, ci.StateFinished, ci.ConclusionSuccess, "")
		w.check()
	})
}

// The three-way test of the lease protocol's document.
func TestOnlyTheExactCurrentTupleCompletes(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		wrongLease := ref
		wrongLease.Lease = "lse_1_00000000000000000000000000"
		wrongEpoch := ref
		wrongEpoch.Epoch = 999
		for _, bad := range []ci.LeaseRef{wrongLease, wrongEpoch} {
			if _, err := w.e.Hold(w.ctx, a.who, bad, "complete", engine.ActiveOnly); !errors.Is(err, ci.ErrLeaseLost) {
				w.t.Errorf("%v: %v, want lease_lost", bad, err)
			}
			w.wantJob(id, "j", ci.StateRunning, "", "")
		}
		a.complete(ref, success())
		w.wantJob(id, "j", ci.StateFinished, ci.ConclusionSuccess, "")
		w.check()
	})
}

func TestALostRunnerIsDecidedByPhaseAndPolicy(t *testing.T) {
	t.Parallel()
	policyJob := job("covered")
	policyJob.Retry = &ci.RetryPolicy{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}}
	onBoth(t, func(w *world) {
		id := w.submit(job("early"), job("late"), policyJob)
		a := w.agent("a", 3)
		refs := map[string]ci.LeaseRef{}
		for range 3 {
			got := a.mustClaim()
			refs[got.Job.Name] = got.Lease
			if got.Job.Name != "early" {
				a.phase(got.Lease, ci.PhaseExecuting)
			}
		}
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "early", ci.StateReady, "", "")
		w.wantJob(id, "late", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerLost)
		w.wantJob(id, "covered", ci.StateReady, "", "")
		for name, ref := range refs {
			if _, err := w.e.Hold(w.ctx, a.who, ref, "complete", engine.ActiveOnly); !errors.Is(err, ci.ErrLeaseLost) {
				w.t.Errorf("%s: the old lease is still taken: %v", name, err)
			}
		}
		// The old runner's slots are quarantined, so another one takes over.
		w.pass(2 * time.Second)
		b := w.agent("b", 3)
		if err := w.e.Sweep(w.ctx, false); err != nil {
			w.t.Fatal(err)
		}
		for range 2 {
			got := b.mustClaim()
			if got.Lease.Epoch != 2 {
				w.t.Errorf("%s: epoch %d, want 2", got.Job.Name, got.Lease.Epoch)
			}
			b.complete(got.Lease, success())
		}
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonInfrastructure)
		w.check()
	})
}

func TestCancelWaitsForProofOfTermination(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("running"), job("lost"), job("behind", "running"))
		a := w.agent("a", 2)
		refs := map[string]ci.LeaseRef{}
		for range 2 {
			got := a.mustClaim()
			a.phase(got.Lease, ci.PhaseExecuting)
			refs[got.Job.Name] = got.Lease
		}
		if err := w.e.Cancel(w.ctx, w.org, "tester", id); err != nil {
			w.t.Fatal(err)
		}
		w.wantRun(id, ci.StateCancelling, "", ci.ReasonUser)
		w.wantJob(id, "behind", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{refs["running"]})
		if err != nil || reply.Leases[0].Answer != protocol.LeaseCancel {
			w.t.Fatalf("heartbeat: %v %v, want cancel", reply, err)
		}
		if _, err := w.e.Complete(w.ctx, a.hold(refs["running"]), success()); ci.RejectOf(err) != ci.RejectCancelling {
			w.t.Errorf("a late success: %v, want run_cancelling", err)
		}
		stop := success()
		stop.Conclusion = ci.ConclusionCancelled
		a.complete(refs["running"], stop)
		w.wantJob(id, "running", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		// A timeout alone never says cancelled.
		w.wantJob(id, "lost", ci.StateCancelling, "", "")
		w.wantRun(id, ci.StateCancelling, "", ci.ReasonUser)
		a.open(2, protocol.AttemptRef{Job: refs["lost"].Job, Epoch: 1})
		w.wantJob(id, "lost", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantRun(id, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.check()
	})
}

// The labels that a runner declares count as far as its registration allows, and
// the one registration token of an installation allows all (SPEC decision 13).
func TestDeclaredLabelsBringTheirJobs(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		needs := job("gpu")
		needs.RunsOn.Labels = []string{"gpu", "zone=a"}
		w.submit(needs)
		without := w.agent("without", 1)
		if got := without.claim(); got != nil {
			t.Errorf("a runner without the labels got %s", got.Job.Name)
		}
		with := w.agentWith("with", 1, "zone=a", "other", "gpu")
		if got := with.mustClaim(); got.Job.Name != "gpu" {
			t.Errorf("got %s", got.Job.Name)
		}
	})
}

// A new session of a swept host frees every slot that its runner is thought to
// use, also that of an attempt whose ticket never arrived; what is alive there
// keeps its lease.
func TestASweptHostFreesSlotsOfTicketsThatNeverArrived(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("alive"), job("lost"), job("unknown"))
		a := w.agent("a", 3)
		refs := map[string]ci.LeaseRef{}
		for range 3 {
			got := a.mustClaim()
			refs[got.Job.Name] = got.Lease
		}
		a.phase(refs["alive"], ci.PhaseExecuting)
		a.phase(refs["lost"], ci.PhaseExecuting)
		of := func(name string) protocol.AttemptRef {
			return protocol.AttemptRef{Job: refs[name].Job, Epoch: refs[name].Epoch}
		}
		if _, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
			RequestID: "swept", Protocol: 1, Slots: 3, After: a.session,
			Terminated: []protocol.AttemptRef{of("lost")}, Swept: true, Alive: []protocol.AttemptRef{of("alive")},
		}); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "alive", ci.StateRunning, "", "")
		w.wantJob(id, "lost", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerRestarted)
		w.wantJob(id, "unknown", ci.StateReady, "", "")
		if got := w.occupied(a.who.Runner); len(got) != 1 || got[0].Job != refs["alive"].Job {
			w.t.Errorf("taken slots: %v", got)
		}
		a.complete(refs["alive"], success())
		w.wantJob(id, "alive", ci.StateFinished, ci.ConclusionSuccess, "")
		w.check()
	})
}

// occupied returns the attempts that take slots of a runner.
func (w *world) occupied(id ci.RunnerID) (ks []store.AttemptKey) {
	w.t.Helper()
	err := w.store.Read(w.ctx, func(tx *store.Tx) (err error) {
		ks, err = tx.OccupancyOfRunner(w.ctx, id)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return ks
}

// A runner stops an attempt whose lease it cannot trust any more some seconds
// before the server gives it up, and says so once.
func TestAReportBeforeTheLeaseRunsOutFreesTheSlot(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"), job("k"))
		a := w.agent("a", 2)
		j, k := a.mustClaim(), a.mustClaim()
		for _, got := range []*protocol.Ticket{j, k} {
			a.phase(got.Lease, ci.PhaseExecuting)
		}
		if err := w.e.Cancel(w.ctx, w.org, "tester", id); err != nil {
			w.t.Fatal(err)
		}
		for range 2 { // repeated after a lost reply
			err := w.e.Occupancy(w.ctx, a.who, protocol.Occupancy{Session: a.session, Terminated: []protocol.AttemptRef{{Job: j.Lease.Job, Epoch: 1}}})
			if err != nil {
				w.t.Fatal(err)
			}
		}
		w.wantJob(id, j.Job.Name, ci.StateCancelling, "", "")
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, j.Job.Name, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantJob(id, k.Job.Name, ci.StateCancelling, "", "")
		if got := w.occupied(a.who.Runner); len(got) != 1 || got[0].Job != k.Lease.Job {
			w.t.Errorf("taken slots: %v", got)
		}
		w.check()
	})
}

// A swept host rules out an attempt also when its end was reported before: nobody
// waits until its lease runs out.
func TestASweptHostEndsTheLeaseOfAReportedAttempt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		got := a.mustClaim()
		a.phase(got.Lease, ci.PhasePreparing)
		err := w.e.Occupancy(w.ctx, a.who, protocol.Occupancy{Session: a.session, Terminated: []protocol.AttemptRef{{Job: got.Lease.Job, Epoch: 1}}})
		if err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "j", ci.StateRunning, "", "")
		if _, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{RequestID: "swept", Protocol: 1, Slots: 1, After: a.session, Swept: true}); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "j", ci.StateReady, "", "")
		w.check()
	})
}

// A late duplicate of a claim takes a job for a ticket that nobody waits for.
func TestAnAttemptThatNeverBeganLeavesNoSlotTaken(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		a.mustClaim()
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "j", ci.StateReady, "", "")
		if got := w.occupied(a.who.Runner); len(got) != 0 {
			w.t.Errorf("taken slots: %v", got)
		}
		w.check()
	})
}

// forgeci explain shows the trail of a job as it is: each entry says what the
// ones before it do not.
func TestTheTrailTellsTheEndOfAnAttemptBeforeWhatFollowsFromIt(t *testing.T) {
	t.Parallel()
	granted := job("granted")
	granted.Retry = &ci.RetryPolicy{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}, Line: 7}
	overdue := job("overdue")
	overdue.Timeout = ci.Duration(time.Second)
	onBoth(t, func(w *world) {
		id := w.submit(granted, job("aborted"))
		a := w.agent("a", 2)
		for range 2 {
			a.phase(a.mustClaim().Lease, ci.PhaseExecuting)
		}
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		w.wantTrail(id, "granted", "attempt_ended: aborted (runner_lost)", "requeued: runner_lost; granted by retry.on (line 7); next attempt in ")
		w.wantTrail(id, "aborted", "attempt_ended: aborted (runner_lost): runner_lost in phase executing; `retry: {max: 1, on: [runner_lost]}` in the job would have allowed another attempt")

		id = w.submit(overdue, job("failed"))
		b := w.agent("b", 2)
		for range 2 {
			got := b.mustClaim()
			b.phase(got.Lease, ci.PhaseExecuting)
			if got.Job.Name == "failed" {
				end := failure(3)
				end.Detail = "step 1 (x) ended with exit code 3"
				b.complete(got.Lease, end)
			}
		}
		w.wantTrail(id, "failed", "attempt_ended: failed (exit): step 1 (x) ended with exit code 3")
		limit := ttl + time.Second + ci.DefaultGrace
		w.pass(limit + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		want := fmt.Sprintf("attempt_ended: aborted (overdue): the server's limit of %s is reached (1s for the phase, %s grace, a lease TTL of %s): overdue in phase executing; ",
			ci.Duration(limit), ci.Duration(ci.DefaultGrace), ci.Duration(ttl))
		w.wantTrail(id, "overdue", want)
		w.check()
	})
}

// wantTrail compares the last entries of a job's trail by their beginnings.
func (w *world) wantTrail(run ci.RunID, name string, want ...string) {
	w.t.Helper()
	var got []string
	id := w.job(run, name).ID
	err := w.store.Read(w.ctx, func(tx *store.Tx) error {
		entries, err := tx.AuditOfJob(w.ctx, w.org, id)
		got = nil
		for _, e := range entries {
			got = append(got, e.Action+": "+e.Detail)
		}
		return err
	})
	if err != nil || len(got) < len(want) {
		w.t.Fatalf("%s: %q, %v", name, got, err)
	}
	for i, entry := range got[len(got)-len(want):] {
		if !strings.HasPrefix(entry, want[i]) || want[i] == "attempt_ended: aborted (runner_lost)" && entry != want[i] {
			w.t.Errorf("%s: entry %q, want %q…", name, entry, want[i])
		}
	}
}
