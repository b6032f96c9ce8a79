package engine_test

import (
	"log/slog"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// lostThrice is a run of which runner a has lost three attempts, none of them
// proven to have ended: early and again are back in the queue, late is aborted.
func (w *world) lostThrice() (id ci.RunID, a *agent, lost map[string]protocol.AttemptRef) {
	again := job("again")
	again.Retry = &ci.RetryPolicy{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}}
	id = w.submit(job("early"), job("late"), again)
	a = w.agent("a", 3)
	lost = map[string]protocol.AttemptRef{}
	for range 3 {
		got := a.mustClaim()
		lost[got.Job.Name] = protocol.AttemptRef{Job: got.Lease.Job, Epoch: 1}
		if got.Job.Name == "early" {
			a.phase(got.Lease, ci.PhasePreparing)
		} else {
			a.phase(got.Lease, ci.PhaseExecuting)
		}
	}
	w.pass(ttl + time.Second)
	w.sweep()
	w.wantJob(id, "early", ci.StateReady, "", "")
	w.wantJob(id, "again", ci.StateReady, "", "")
	w.wantJob(id, "late", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerLost)
	w.pass(2 * time.Second) // the backoff
	return id, a, lost
}

func (w *world) sweep() {
	w.t.Helper()
	if err := w.e.Sweep(w.ctx, true); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) cancel(id ci.RunID) {
	w.t.Helper()
	if err := w.e.Cancel(w.ctx, w.org, "tester", id); err != nil {
		w.t.Fatal(err)
	}
}

func (a *agent) report(ended ...protocol.AttemptRef) {
	a.w.t.Helper()
	if err := a.w.e.Occupancy(a.w.ctx, a.who, protocol.Occupancy{Session: a.session, Terminated: ended}); err != nil {
		a.w.t.Fatal(err)
	}
}

// A timeout alone never says cancelled (LP-7), not even of an attempt whose job was
// given to another runner, or has its conclusion.
func TestACancelledRunWaitsForEveryAttemptOfIt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id, a, lost := w.lostThrice()
		b := w.agent("b", 1)
		w.sweep()
		next := b.mustClaim()
		b.phase(next.Lease, ci.PhaseExecuting)
		w.cancel(id)
		w.wantJob(id, "early", ci.StateCancelling, "", "")
		w.wantJob(id, "again", ci.StateCancelling, "", "")
		stop := success()
		stop.Conclusion = ci.ConclusionCancelled
		if got := b.complete(next.Lease, stop); got.State != ci.StateCancelling || got.Conclusion != "" {
			w.t.Errorf("the second attempt's end is answered %+v", got)
		}
		w.wantJob(id, next.Job.Name, ci.StateCancelling, "", "")
		w.check()

		a.open(3)
		a.report(lost["early"])
		w.wantJob(id, "early", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantJob(id, "again", ci.StateCancelling, "", "")
		a.report(lost["again"])
		w.wantJob(id, "again", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantRun(id, ci.StateCancelling, "", ci.ReasonUser) // late may still run
		w.check()
		a.report(lost["late"])
		w.wantRun(id, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantJob(id, "late", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerLost)
		w.check()
	})
}

func TestAFencedHostProvesTheEndOfEveryAttempt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id, a, _ := w.lostThrice()
		w.cancel(id)
		w.wantRun(id, ci.StateCancelling, "", ci.ReasonUser)
		if err := w.e.FenceRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(id, "early", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantJob(id, "again", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantRun(id, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.check()
	})
}

// A run that is not cancelled does not wait for what was given up as lost.
func TestALostAttemptHoldsNoRunThatIsNotCancelled(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id, _, _ := w.lostThrice()
		b := w.agent("b", 2)
		w.sweep()
		for range 2 {
			b.complete(b.mustClaim().Lease, success())
		}
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonInfrastructure)
		w.check()
	})
}

// A request of an earlier process life that was long on its way ends nothing of a
// later one, whatever it says of its host.
func TestALateOpeningOfAnEarlierLifeEndsNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		late := protocol.OpenSession{RequestID: "late", Protocol: protocol.Version, Slots: 1, Swept: true, After: a.session}
		a.open(1)
		got := a.mustClaim()
		a.phase(got.Lease, ci.PhaseExecuting)
		answer, err := w.e.OpenSession(w.ctx, a.who, late)
		if err != nil || answer.Session != "" || answer.Latest != a.session {
			w.t.Errorf("the late request is answered %+v, %v", answer, err)
		}
		w.wantJob(id, "j", ci.StateRunning, "", "")
		late.After = answer.Latest // only who has heard the answer can say this
		late.Alive = []protocol.AttemptRef{{Job: got.Lease.Job, Epoch: got.Lease.Epoch}}
		again, err := w.e.OpenSession(w.ctx, a.who, late)
		if err != nil || again.Session == "" {
			w.t.Fatalf("%+v, %v", again, err)
		}
		late.After = "" // a repeat is a repeat
		repeat, err := w.e.OpenSession(w.ctx, a.who, late)
		if err != nil || repeat.Session != again.Session {
			w.t.Errorf("the repeat is answered %+v, %v", repeat, err)
		}
		a.complete(got.Lease, success())
		w.check()
	})
}

func TestUploadsHaveTimeOfTheirOwn(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		short := job("short")
		short.Timeout = ci.Duration(time.Minute)
		w.submit(short)
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		a.phase(ref, ci.PhaseExecuting)
		deadline := func() time.Duration {
			var l store.Lease
			w.write(func(tx *store.Tx) (err error) {
				l, _, err = tx.Lease(w.ctx, ref.Job)
				return err
			})
			return time.Duration(l.DeadlineUS-w.now.Load()) * time.Microsecond
		}
		rest := ci.DefaultGrace + ttl
		if got := deadline(); got != time.Minute+rest {
			w.t.Errorf("limit while executing: %v", got)
		}
		a.phase(ref, ci.PhaseFinalising)
		if got := deadline(); got != time.Hour+rest {
			w.t.Errorf("limit while finalising: %v", got)
		}
	})
}

// A clock that was set back while no server looked leaves neither the lease nor
// the server's limit further off than they were.
func TestASetbackNobodySawShortensTheLimitToo(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		short := job("short")
		short.Timeout = ci.Duration(time.Minute)
		w.submit(short)
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		a.phase(ref, ci.PhaseExecuting)
		w.now.Add(-3 * time.Hour.Microseconds())
		if err := w.engine(slog.New(slog.DiscardHandler)).Expire(w.ctx); err != nil { // a server that starts then
			w.t.Fatal(err)
		}
		var l store.Lease
		w.write(func(tx *store.Tx) (err error) {
			l, _, err = tx.Lease(w.ctx, ref.Job)
			return err
		})
		now := w.now.Load()
		if got, want := l.ExpiresUS-now, ttl.Microseconds(); got != want {
			w.t.Errorf("the lease ends in %d µs, want %d", got, want)
		}
		if got, want := l.DeadlineUS-now, (time.Minute + ci.DefaultGrace + ttl).Microseconds(); got != want {
			w.t.Errorf("the limit is %d µs off, want %d", got, want)
		}
	})
}
