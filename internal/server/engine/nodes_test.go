package engine_test

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// halted is a second server node whose next commit waits until the test lets it.
type halted struct {
	e     *engine.Engine
	tries atomic.Int64 // of transactions that write
	armed atomic.Bool
	there chan struct{} // closed when the commit waits
	on    chan struct{} // close it to let the commit go on
}

func (w *world) halted(url string) *halted {
	w.t.Helper()
	h := &halted{there: make(chan struct{}), on: make(chan struct{})}
	s, err := store.Open(w.ctx, store.Options{
		URL: url, Now: w.now.Load, Log: slog.New(slog.DiscardHandler), MaxConns: 4,
		Fault: func(p store.Point) error {
			if p == store.PointBegin {
				h.tries.Add(1)
			}
			if p == store.PointCommit && h.armed.CompareAndSwap(true, false) {
				close(h.there)
				<-h.on
			}
			return nil
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	own := w.store
	w.store = s
	h.e = w.engine(slog.New(slog.DiscardHandler))
	w.store = own
	return h
}

// An operator fences a runner while another node is committing a claim of it:
// that attempt is settled with the others.
func TestAFenceTakesInAClaimThatIsUnderWay(t *testing.T) {
	t.Parallel()
	for name, at := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := at(t)
			w := newWorld(t, url)
			a := w.agent("a", 1)
			id := w.submit(job("j"))
			other := w.halted(url)
			var both sync.WaitGroup
			other.armed.Store(true)
			both.Go(func() {
				got, err := other.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "c"})
				if err != nil || got == nil {
					t.Errorf("claim: %v, %v", got, err)
				}
			})
			<-other.there
			both.Go(func() {
				if err := w.e.FenceRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
					t.Error(err)
				}
			})
			time.Sleep(300 * time.Millisecond) // it comes as far as it can
			close(other.on)
			both.Wait()
			w.wantJob(id, "j", ci.StateReady, "", "")
			if got := w.occupied(a.who.Runner); len(got) != 0 {
				t.Errorf("taken slots: %v", got)
			}
			w.check()
		})
	}
}

// Cancelling locks leases before jobs, as a report of a phase does: on two nodes
// neither is the other's deadlock. (SQLite has one writer: nobody waits with
// locks held.)
func TestACancelDoesNotHoldJobsWhileItWaitsForLeases(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := newWorld(t, url)
	id := w.submit(job("j"))
	a := w.agent("a", 1)
	lease := a.mustClaim().Lease
	other := w.halted(url)
	other.tries.Store(0)
	tries := 0
	var cancelled sync.WaitGroup
	w.write(func(tx *store.Tx) error {
		tries++
		if _, err := tx.LockLeases(w.ctx, []ci.JobID{lease.Job}); err != nil {
			return err
		}
		if tries == 1 {
			cancelled.Go(func() {
				if err := other.e.Cancel(w.ctx, w.org, "tester", id); err != nil {
					t.Error(err)
				}
			})
			time.Sleep(300 * time.Millisecond) // it comes as far as it can
		}
		_, err := tx.LockJobs(w.ctx, []ci.JobID{lease.Job})
		return err
	})
	cancelled.Wait()
	if n := other.tries.Load(); tries != 1 || n != 1 {
		t.Errorf("%d and %d tries: one was a deadlock's victim", tries, n)
	}
	w.wantJob(id, "j", ci.StateCancelling, "", "")
}

// Two nodes notice one jump of the database's clock: the leases move with it
// once, and the trail says so once.
func TestAJumpIsRepairedOnceByTwoNodes(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.submit(job("j"))
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		other := w.engine(slog.New(slog.DiscardHandler))
		sweep := func() {
			w.t.Helper()
			for _, e := range []*engine.Engine{w.e, other} {
				if err := e.Sweep(w.ctx, true); err != nil {
					w.t.Fatal(err)
				}
			}
		}
		sweep()
		for _, jump := range []time.Duration{time.Hour, -3 * time.Hour} {
			w.now.Add(jump.Microseconds())
			sweep()
			var l store.Lease
			w.write(func(tx *store.Tx) (err error) {
				l, _, err = tx.Lease(w.ctx, ref.Job)
				return err
			})
			if left := time.Duration(l.ExpiresUS-w.now.Load()) * time.Microsecond; left != ttl {
				w.t.Errorf("after a jump by %s the lease runs out in %s, want %s", jump, left, ttl)
			}
		}
		shifts := 0
		w.write(func(tx *store.Tx) error {
			entries, err := tx.AuditAfter(w.ctx, w.org, 0, 1000)
			for _, e := range entries {
				if e.Action == "clock_shifted" {
					shifts++
				}
			}
			return err
		})
		if shifts != 2 {
			w.t.Errorf("two jumps were repaired %d times", shifts)
		}
		w.check()
	})
}

// A node that has not looked at the database's clock for long cannot tell a jump
// from a clock that goes slow or fast, nor which leases were renewed behind it. Its
// repair ends no lease early all the same, and gives none more than a TTL.
func TestARepairEndsNoLeaseEarly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rate float64       // of the database's clock, while only the other node looks
		jump time.Duration // then
	}{
		"slow":                     {0.5, 0},
		"fast":                     {1.9, 0},
		"slow and a jump forward":  {0.5, 90 * time.Second},
		"fast and a jump forward":  {1.9, 40 * time.Second},
		"slow and a jump back":     {0.5, -40 * time.Second},
		"fast and a jump back":     {1.9, -2 * time.Hour},
		"right and a jump back":    {1, -20 * time.Second},
		"right and a jump forward": {1, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBoth(t, func(w *world) {
				w.submit(job("j"))
				a := w.agent("a", 1)
				ref := a.mustClaim().Lease
				absent := w.engine(slog.New(slog.DiscardHandler))
				sweep := func(e *engine.Engine) {
					w.t.Helper()
					if err := e.Sweep(w.ctx, true); err != nil {
						w.t.Fatal(err)
					}
				}
				sweep(absent)
				for range 20 {
					w.mono.Add((5 * time.Second).Microseconds())
					w.now.Add(int64(c.rate * float64((5 * time.Second).Microseconds())))
					sweep(w.e)
					reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref})
					if err != nil || reply.Leases[0].Answer != protocol.LeaseRenewed {
						w.t.Fatalf("heartbeat: %+v %v", reply, err)
					}
				}
				w.pass(10 * time.Second)
				w.now.Add(c.jump.Microseconds())
				sweep(absent)
				var l store.Lease
				w.write(func(tx *store.Tx) (err error) {
					l, _, err = tx.Lease(w.ctx, ref.Job)
					return err
				})
				if left := time.Duration(l.ExpiresUS-w.now.Load()) * time.Microsecond; left < ttl-10*time.Second || left > ttl {
					w.t.Errorf("a lease renewed 10 s ago runs out in %s", left)
				}
				w.check()
			})
		})
	}
}

// The clock is set back and forward again. A node that saw none of it learns of it
// from what the one that did has moved, before it calls a lease expired.
func TestAJumpThatWasUndoneUnseenExpiresNothing(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(*world, *agent, ci.LeaseRef) error{
		"guard": func(w *world, a *agent, ref ci.LeaseRef) error {
			_, err := w.e.Hold(w.ctx, a.who, ref, "test", engine.ActiveOnly)
			return err
		},
		"heartbeat": func(w *world, a *agent, ref ci.LeaseRef) error {
			reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref})
			if err == nil && reply.Leases[0].Answer != protocol.LeaseRenewed {
				err = ci.Rejected(reply.Leases[0].Reject)
			}
			return err
		},
		"sweep": func(w *world, _ *agent, _ ci.LeaseRef) error { return w.e.Sweep(w.ctx, true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBoth(t, func(w *world) {
				id := w.submit(job("j"))
				a := w.agent("a", 1)
				ref := a.mustClaim().Lease
				a.phase(ref, ci.PhaseExecuting)
				other := w.engine(slog.New(slog.DiscardHandler))
				w.now.Add(-(2 * time.Minute).Microseconds())
				if err := other.Sweep(w.ctx, true); err != nil {
					w.t.Fatal(err)
				}
				w.now.Add((2 * time.Minute).Microseconds())
				w.pass(10 * time.Second)
				if err := ask(w, a, ref); err != nil {
					w.t.Errorf("a lease of 10 s: %v", err)
				}
				w.wantJob(id, "j", ci.StateRunning, "", "")
				w.check()
			})
		})
	}
}

// A runner may poll one node only: the others, which hear nothing of it, do not
// take it for gone. When no node hears of it any more it is.
func TestARunnerIsPresentThatOneNodeHears(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 1)
		deaf := w.engine(slog.New(slog.DiscardHandler))
		present := func() bool {
			var all []store.Session
			w.write(func(tx *store.Tx) (err error) {
				all, err = tx.PresentSessions(w.ctx)
				return err
			})
			return len(all) > 0
		}
		sweep := func() {
			w.pass(ci.SweepEvery(ttl))
			for _, e := range []*engine.Engine{deaf, w.e} {
				if err := e.Sweep(w.ctx, true); err != nil {
					w.t.Fatal(err)
				}
			}
		}
		for i := range 60 { // five TTLs
			if i%4 == 0 {
				a.claim()
			}
			sweep()
			if !present() {
				w.t.Fatalf("gone in sweep %d", i)
			}
		}
		a.claim()
		n := 0
		for ; present(); n++ {
			if n > 100 {
				w.t.Fatal("present for ever")
			}
			sweep()
		}
		if silent := time.Duration(n) * ci.SweepEvery(ttl); silent < ttl || silent > ttl+4*ci.SweepEvery(ttl) {
			w.t.Errorf("gone after %s", silent)
		}
		w.submit(job("j"))
		if a.claim() == nil { // it comes back
			w.t.Error("nothing for a runner that is heard of again")
		}
		w.check()
	})
}

// While one node had no sweep, the database being away for it, another took a session
// for gone that polls there. The first one's next sweep brings it back: no poll has to
// end before its runner is given jobs. One that has ended stays so.
func TestARunnerThatPollsIsBroughtBack(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 1)
		got := make(chan *protocol.Ticket, 1)
		go func() {
			ticket, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "poll", Wait: ci.Duration(30 * time.Second)})
			if err != nil {
				w.t.Error(err)
			}
			got <- ticket
		}()
		w.eventually(func() bool { return w.e.Polls() == 1 })
		present := func() (ids []ci.SessionID) {
			w.write(func(tx *store.Tx) error {
				all, err := tx.PresentSessions(w.ctx)
				ids = nil
				for _, s := range all {
					ids = append(ids, s.ID)
				}
				return err
			})
			return ids
		}
		deaf := w.engine(slog.New(slog.DiscardHandler))
		goes := func() {
			w.t.Helper()
			for n := 0; len(present()) > 0; n++ {
				if n > 100 {
					w.t.Fatal("present for ever")
				}
				w.pass(ci.SweepEvery(ttl))
				if err := deaf.Sweep(w.ctx, true); err != nil {
					w.t.Fatal(err)
				}
			}
		}
		goes()
		w.sweep()
		if ids := present(); len(ids) != 1 || ids[0] != a.session {
			w.t.Fatalf("present: %v", ids)
		}
		w.sweep() // the poll still counts
		w.submit(job("j"))
		if <-got == nil {
			w.t.Error("the poll got nothing")
		}
		before := a.session
		open := make(chan error, 1)
		go func() {
			_, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: before, RequestID: "another", Wait: ci.Duration(30 * time.Second)})
			open <- err
		}()
		w.eventually(func() bool { return w.e.Polls() == 1 })
		own := w.e
		w.e = deaf // there the runner opens its next session
		a.open(1)
		w.e = own
		w.sweep()
		if ids := present(); len(ids) != 1 || ids[0] != a.session {
			w.t.Errorf("present: %v, and %s has ended", ids, before)
		}
		w.e.StopPolls()
		<-open //nolint:errcheck // a poll that was asked to end
		w.check()
	})
}
