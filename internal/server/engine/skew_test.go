package engine_test

import (
	"fmt"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// What a runner's clock shows is told to it when it is far off, and decides
// nothing: its lease lives a TTL of the database's clock, no shorter and no
// longer, and every instant that is kept is the database's.
func TestCase_DB_05_ARunnersClockDecidesNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		for i, off := range []time.Duration{
			17 * time.Minute, -17 * time.Minute, 24 * time.Hour, -24 * time.Hour, -30 * 365 * 24 * time.Hour,
			4 * time.Minute, -4 * time.Minute, 0,
		} {
			a := w.agent(fmt.Sprint("runner ", i), 1)
			opened, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
				RequestID: fmt.Sprint("skewed ", i), Protocol: 1, Slots: 1, After: a.session, Swept: true,
				Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
				At:    time.UnixMicro(w.now.Load()).Add(off),
			})
			if err != nil {
				w.t.Fatalf("a clock that is off by %s: %v", off, err)
			}
			a.session = opened.Session
			told := off
			if max(off, -off) < 5*time.Minute {
				told = 0
			}
			if opened.ClockDiffers.Std() != told {
				w.t.Errorf("a clock that is off by %s is said to be off by %s", off, opened.ClockDiffers)
			}

			lost, kept := w.submit(job("lost")), w.submit(job("kept"))
			first := a.mustClaim()
			claimed := w.now.Load()
			w.pass(ttl - time.Second)
			w.sweepAt("a second before the end of the lease", lost, ci.StateRunning)
			w.pass(2 * time.Second)
			w.sweepAt("a second after it", lost, ci.StateReady)
			ended := w.now.Load()
			a.report(protocol.AttemptRef{Job: first.Lease.Job, Epoch: first.Lease.Epoch})

			w.pass(time.Minute) // past the backoff
			w.sweepAt("after the backoff", lost, ci.StateReady)
			for range 2 {
				next := a.mustClaim()
				a.phase(next.Lease, ci.PhaseExecuting)
				w.pass(time.Second)
				a.complete(next.Lease, success())
			}
			w.wantRun(lost, ci.StateFinished, ci.ConclusionSuccess, "")
			w.wantRun(kept, ci.StateFinished, ci.ConclusionSuccess, "")
			w.write(func(tx *store.Tx) error {
				attempts, err := tx.AttemptsOfJob(w.ctx, first.Lease.Job)
				if len(attempts) != 2 || attempts[0].ClaimedUS != claimed || attempts[0].EndedUS != ended {
					w.t.Errorf("off by %s: attempts %+v", off, attempts)
				}
				for _, at := range attempts {
					if at.EndedUS < at.ClaimedUS || at.ExecutingUS > at.EndedUS {
						w.t.Errorf("off by %s: an attempt ends before it begins: %+v", off, at)
					}
				}
				return err
			})
		}
		w.check()
	})
}

// sweepAt sweeps and tells what became of a run's one job.
func (w *world) sweepAt(when string, run ci.RunID, want ci.State) {
	w.t.Helper()
	if err := w.e.Sweep(w.ctx, true); err != nil {
		w.t.Fatal(err)
	}
	if got := w.jobs(run)[0].State; got != want {
		w.t.Errorf("%s the job is %s, want %s", when, got, want)
	}
}
