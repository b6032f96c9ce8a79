package engine_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// These tests are about what two server nodes do at once: on PostgreSQL only,
// since SQLite has one writer and nobody waits with locks held.

// Two needs of a job finish together, on two nodes: the second counts after the
// first, and the job behind both starts.
func TestSiblingsThatFinishTogetherAreBothCounted(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := newWorld(t, url)
	id := w.submit(job("one"), job("two"), job("behind", "one", "two"))
	a := w.agent("a", 2)
	one, two := a.hold(a.mustClaim().Lease), a.hold(a.mustClaim().Lease)
	other := w.halted(url)
	other.armed.Store(true)
	var both sync.WaitGroup
	end := func(e *engine.Engine, held engine.Held) {
		if _, err := e.Complete(w.ctx, held, success()); err != nil {
			t.Errorf("%s: %v", held.Ref().Job, err)
		}
	}
	both.Go(func() { end(other.e, one) })
	<-other.there // decided, and not committed
	second := make(chan struct{})
	both.Go(func() { defer close(second); end(w.e, two) })
	testkit.AwaitLockWait(t, url, second)
	close(other.on)
	both.Wait()
	if r := w.run(id); r.JobsLeft != 1 {
		t.Errorf("%d jobs are left, want 1: a sibling was not counted", r.JobsLeft)
	}
	last := a.mustClaim()
	a.complete(last.Lease, success())
	w.wantRun(id, ci.StateFinished, ci.ConclusionSuccess, "")
	w.check()
}

// The time counts at which a transaction holds its locks: a lease that runs out
// while a result, a phase or a heartbeat waits for them is not current any more.
func TestALeaseThatRunsOutInAWaitForLocksIsStale(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]func(*engine.Engine, *agent, engine.Held) error{
		"result": func(e *engine.Engine, a *agent, held engine.Held) error {
			_, err := e.Complete(a.w.ctx, held, success())
			return err
		},
		"phase": func(e *engine.Engine, a *agent, held engine.Held) error {
			return e.SetPhase(a.w.ctx, held, protocol.SetPhase{RequestID: "p", Phase: ci.PhaseExecuting})
		},
		"heartbeat": func(e *engine.Engine, a *agent, held engine.Held) error {
			got, err := e.Renew(a.w.ctx, a.who, a.session, []ci.LeaseRef{held.Ref()})
			if err == nil && got.Leases[0].Answer == protocol.LeaseGone {
				return ci.Rejected(got.Leases[0].Reject)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := testkit.Postgres(t)
			w := newWorld(t, url)
			id := w.submit(job("j"))
			a := w.agent("a", 1)
			ref := a.mustClaim().Lease
			held := a.hold(ref)
			other := w.halted(url)
			var err error
			done := make(chan struct{})
			w.write(func(tx *store.Tx) error {
				if _, err := tx.LockLeases(w.ctx, []ci.JobID{ref.Job}); err != nil {
					return err
				}
				go func() { defer close(done); err = act(other.e, a, held) }()
				testkit.AwaitLockWait(t, url, done)
				w.pass(ttl + time.Second)
				return nil
			})
			<-done
			if ci.RejectOf(err) != ci.RejectExpired {
				t.Errorf("a lease that ran out in the wait: %v, want %s", err, ci.RejectExpired)
			}
			w.wantJob(id, "j", ci.StateRunning, "", "")
			if phase := w.job(id, "j").Phase; phase != ci.PhaseClaimed {
				t.Errorf("phase %s was recorded", phase)
			}
			w.check()
		})
	}
}

// A sweep that waits while the holder renews the lease, on another node, asks
// again under the lock: the lease is not ended.
func TestALeaseThatIsRenewedWhileTheSweepWaitsLives(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := newWorld(t, url)
	id := w.submit(job("j"))
	a := w.agent("a", 1)
	ref := a.mustClaim().Lease
	a.phase(ref, ci.PhaseExecuting)
	other := w.halted(url)
	w.pass(ttl - time.Second)
	var err error
	done := make(chan struct{})
	w.write(func(tx *store.Tx) error {
		// The heartbeat holds the lease and is not committed yet.
		if _, err := tx.RenewLeases(w.ctx, []ci.LeaseRef{ref}, w.now.Load(), w.now.Load()+ttl.Microseconds()); err != nil {
			return err
		}
		w.pass(2 * time.Second) // what is committed has run out
		go func() { defer close(done); err = other.e.Sweep(context.WithoutCancel(w.ctx), true) }()
		testkit.AwaitLockWait(t, url, done)
		return nil
	})
	<-done
	if err != nil {
		t.Error(err)
	}
	w.wantJob(id, "j", ci.StateRunning, "", "")
	if _, err := w.e.Hold(w.ctx, a.who, ref, "test", engine.ActiveOnly); err != nil {
		t.Errorf("the renewed lease: %v", err)
	}
	w.check()
}

// A new session of a runner ends what it reports at the time at which it holds the
// locks of that: what happened while it waited for them lies before.
func TestASessionThatWaitsForLocksEndsAttemptsBehindTheWait(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := newWorld(t, url)
	w.submit(job("j"))
	a := w.agent("a", 1)
	ref := a.mustClaim().Lease
	other := w.halted(url)
	var err error
	done := make(chan struct{})
	w.write(func(tx *store.Tx) error {
		if _, err := tx.LockLeases(w.ctx, []ci.JobID{ref.Job}); err != nil {
			return err
		}
		go func() {
			defer close(done)
			_, err = other.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
				RequestID: "again", Protocol: 1, Slots: 1, Swept: true, After: a.session,
				Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
			})
		}()
		testkit.AwaitLockWait(t, url, done)
		w.pass(10 * time.Second)
		return nil
	})
	<-done
	if err != nil {
		t.Fatal(err)
	}
	w.write(func(tx *store.Tx) error {
		attempt, ok, err := tx.Attempt(w.ctx, ref.Job, ref.Epoch)
		if err != nil || !ok || attempt.Reason != ci.ReasonRunnerRestarted || attempt.EndedUS != w.now.Load() {
			t.Errorf("%+v %t %v, want its end at %d", attempt, ok, err, w.now.Load())
		}
		return nil
	})
	w.check()
}
