package engine_test

import (
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// hang lets time pass in which a runner does nothing but renew, whatever the answer,
// and ends with a sweep.
func (w *world) hang(a *agent, ref ci.LeaseRef, d time.Duration) {
	w.t.Helper()
	for d > 0 {
		step := min(d, ttl/2)
		d -= step
		w.pass(step)
		if _, err := w.e.Renew(w.ctx, a.who, ref.Session, []ci.LeaseRef{ref}); err != nil {
			w.t.Fatal(err)
		}
		w.sweep()
	}
}

// A worker that hangs, whose runner renews all the same, does not hold its job for
// ever, in whatever phase it hangs: the server ends the lease by itself. What that
// means for the job goes by the phase; the slot stays taken until the end of what
// hangs is proven.
func TestCase_CAN_04_AHangIsEndedInEveryPhase(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		phases    []ci.Phase
		state     ci.State
		conclude  ci.Conclusion
		reason    ci.Reason
		free      bool // nothing was begun
		finishing bool
	}{
		"claimed":    {nil, ci.StateReady, "", "", true, false},
		"preparing":  {[]ci.Phase{ci.PhasePreparing}, ci.StateReady, "", "", false, false},
		"building":   {[]ci.Phase{ci.PhasePreparing, ci.PhaseBuilding}, ci.StateFinished, ci.ConclusionAborted, ci.ReasonOverdue, false, false},
		"executing":  {[]ci.Phase{ci.PhasePreparing, ci.PhaseExecuting}, ci.StateFinished, ci.ConclusionAborted, ci.ReasonOverdue, false, false},
		"finalising": {[]ci.Phase{ci.PhaseExecuting, ci.PhaseFinalising}, ci.StateFinished, ci.ConclusionAborted, ci.ReasonOverdue, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBoth(t, func(w *world) {
				short := job("short")
				short.Timeout = ci.Duration(5 * time.Minute)
				limit := 5*time.Minute + ci.DefaultGrace + ttl
				id := w.submit(short)
				a := w.agent("a", 1)
				ref := a.mustClaim().Lease
				for _, p := range c.phases { // each has a limit of its own
					w.hang(a, ref, limit-time.Second)
					a.phase(ref, p)
				}
				if c.finishing { // uploads have an hour
					limit = time.Hour + ci.DefaultGrace + ttl
				}
				w.hang(a, ref, limit-time.Second)
				w.wantJob(id, "short", ci.StateRunning, "", "")
				w.hang(a, ref, time.Second)
				w.wantJob(id, "short", c.state, c.conclude, c.reason)
				if got := w.occupied(a.who.Runner); (len(got) == 0) != c.free {
					w.t.Errorf("taken slots: %v", got)
				}
				w.check()
			})
		})
	}
}

// Nor does one hang for ever that does not hear a cancel. That its lease has ended
// says nothing about its processes: cancelling lasts until their end is proven.
func TestCase_CAN_04_ACancelledHangIsEndedToo(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		short := job("short")
		short.Timeout = ci.Duration(5 * time.Minute)
		id := w.submit(short)
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		a.phase(ref, ci.PhasePreparing)
		w.cancel(id)
		w.hang(a, ref, 5*time.Minute+ci.DefaultGrace+ttl)
		reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref})
		if err != nil || reply.Leases[0].Answer != protocol.LeaseGone {
			w.t.Errorf("heartbeat: %+v %v, want lost", reply, err)
		}
		w.wantJob(id, "short", ci.StateCancelling, "", "")
		if got := w.occupied(a.who.Runner); len(got) != 1 {
			w.t.Errorf("taken slots: %v", got)
		}
		err = w.e.Occupancy(w.ctx, a.who, protocol.Occupancy{Session: a.session, Terminated: []protocol.AttemptRef{{Job: ref.Job, Epoch: 1}}})
		if err != nil {
			w.t.Fatal(err)
		}
		w.wantRun(id, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.check()
	})
}
