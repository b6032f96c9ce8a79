package engine_test

import (
	"errors"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

func TestALostClaimReplyGivesTheSameJobAgain(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("one"), job("two"))
		a := w.agent("a", 4)
		req := protocol.Claim{Session: a.session, RequestID: "once"}
		first, err := w.e.Claim(w.ctx, a.who, req)
		if err != nil {
			w.t.Fatal(err)
		}
		again, err := w.e.Claim(w.ctx, a.who, req)
		if err != nil || again.Lease != first.Lease {
			w.t.Fatalf("the repeat got %+v %v, want the same lease", again, err)
		}
		// On another node too.
		other, err := w.engine(slog.New(slog.DiscardHandler)).Claim(w.ctx, a.who, req)
		if err != nil || other.Lease != first.Lease {
			w.t.Fatalf("another node gave %+v %v", other, err)
		}
		a.complete(first.Lease, success())
		if _, err := w.e.Claim(w.ctx, a.who, req); !errors.Is(err, ci.ErrLeaseLost) {
			w.t.Errorf("after the end: %v, want lease_lost and no second job", err)
		}
		w.wantJob(id, map[string]string{"one": "two", "two": "one"}[first.Job.Name], ci.StateReady, "", "")
		w.check()
	})
}

// A registration that comes again is the same registration; one that was replaced
// meanwhile does not take the runner's credential away.
func TestARepeatedRegistrationChangesNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 1)
		register := func(hash string) (ci.RunnerID, error) {
			key := make([]byte, 32)
			copy(key, "a")
			return w.e.Register(w.ctx, w.org, "tester", []string{"*"}, protocol.Register{Name: "a", PublicKey: key}, hash)
		}
		for _, hash := range []string{"first", "second", "second"} {
			if id, err := register(hash); err != nil || id != a.who.Runner {
				w.t.Fatalf("register %s: %s %v", hash, id, err)
			}
		}
		if _, err := register("first"); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("a replaced registration that comes late: %v, want conflict", err)
		}
		for hash, good := range map[string]bool{"first": false, "second": true} {
			var had store.Credential
			if err := w.store.Read(w.ctx, func(tx *store.Tx) (err error) {
				had, _, err = tx.CredentialByHash(w.ctx, hash)
				return err
			}); err != nil || (had.RevokedUS == 0) != good {
				w.t.Errorf("credential %s: %+v %v, want it good: %v", hash, had, err, good)
			}
		}
		w.check()
	})
}

func TestALostCompletionReplyGivesTheSameAnswer(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		ref := a.mustClaim().Lease
		held := a.hold(ref)
		first := a.complete(ref, failure(3))
		if again, err := w.e.Complete(w.ctx, held, failure(3)); err != nil || again != first {
			w.t.Errorf("the repeat got %+v %v, want %+v", again, err, first)
		}
		if got, ok, err := w.e.StoredAnswer(w.ctx, a.who, ref, "done", engine.Digest(failure(3))); err != nil || !ok || got != first {
			w.t.Errorf("stored answer: %+v %t %v", got, ok, err)
		}
		if _, err := w.e.Complete(w.ctx, held, success()); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("the same request ID with another result: %v, want conflict", err)
		}
		other := success()
		other.RequestID = "second"
		if _, err := w.e.Complete(w.ctx, held, other); !errors.Is(err, ci.ErrRunEnded) {
			w.t.Errorf("another request after the end: %v, want run_ended", err)
		}
		w.wantJob(id, "j", ci.StateFinished, ci.ConclusionFailed, ci.ReasonExit)
		w.check()
	})
}

// A connection breaks while its poll waits and the server does not notice: the
// poll that asks again waits beside it. Whichever of them takes the job, the other
// gets it too, on the same node at once, on another before it ends.
func TestARepeatThatWaitsBesideItsClaimGetsTheJobToo(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 2)
		req := protocol.Claim{Session: a.session, RequestID: "once", Wait: ci.Duration(3 * time.Second)}
		nodes := []*engine.Engine{w.e, w.e, w.engine(slog.New(slog.DiscardHandler))}
		tickets := make([]*protocol.Ticket, len(nodes))
		var polls sync.WaitGroup
		for i, node := range nodes {
			polls.Go(func() {
				ticket, err := node.Claim(w.ctx, a.who, req)
				if err != nil {
					w.t.Errorf("poll %d: %v", i, err)
				}
				tickets[i] = ticket
			})
		}
		for w.e.Polls() < 2 || nodes[2].Polls() < 1 {
			runtime.Gosched()
		}
		w.submit(job("j"))
		polls.Wait()
		for i, got := range tickets {
			if got == nil || got.Lease != tickets[0].Lease {
				w.t.Errorf("poll %d got %+v, want the lease of the others", i, got)
			}
		}
		w.check()
	})
}

func TestManyClaimersNeverShareAJob(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		const jobs, runners = 120, 50
		specs := make([]ci.JobSpec, jobs)
		for i := range specs {
			specs[i] = job(itoa(i))
		}
		id := w.submit(specs...)
		// Two nodes, their loops running, as in production.
		nodes := []*engine.Engine{w.e, w.engine(slog.New(slog.DiscardHandler))}
		for _, e := range nodes {
			go e.Run(w.ctx)
		}
		var agents []*agent
		for range runners {
			w.n++
			agents = append(agents, w.agent(itoa(w.n), 3))
		}
		var mu sync.Mutex
		got := map[ci.JobID]int{}
		var wg sync.WaitGroup
		for i, a := range agents {
			wg.Go(func() {
				for k := range 4 {
					ticket, err := nodes[(i+k)%2].Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: itoa(i*10 + k)})
					if err != nil {
						t.Error(err)
						return
					}
					if ticket != nil {
						mu.Lock()
						got[ticket.Lease.Job]++
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		for id, n := range got {
			if n != 1 {
				w.t.Errorf("job %s was given out %d times", id, n)
			}
		}
		if len(got) != jobs { // 50 runners × 3 slots are enough for all
			w.t.Errorf("%d of %d jobs were claimed", len(got), jobs)
		}
		if r := w.run(id); r.State != ci.StateRunning {
			w.t.Errorf("run is %s", r.State)
		}
		w.check()
	})
}

func TestARunnerGetsNoMoreThanItsSlots(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.submit(job("a"), job("b"), job("c"))
		a := w.agent("a", 2)
		first, second := a.mustClaim(), a.mustClaim()
		a.phase(first.Lease, ci.PhasePreparing)
		a.phase(second.Lease, ci.PhasePreparing)
		if got := a.claim(); got != nil {
			w.t.Errorf("a third job for two slots: %s", got.Job.Name)
		}
		// A lost attempt keeps its slot until termination is proven.
		w.pass(ttl + time.Second)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		w.pass(2 * time.Second)
		if got := a.claim(); got != nil {
			w.t.Errorf("a quarantined slot was given out: %s", got.Job.Name)
		}
		err := w.e.Occupancy(w.ctx, a.who, protocol.Occupancy{Session: a.session, Terminated: []protocol.AttemptRef{{Job: first.Lease.Job, Epoch: 1}}})
		if err != nil {
			w.t.Fatal(err)
		}
		if err := w.e.Sweep(w.ctx, false); err != nil {
			w.t.Fatal(err)
		}
		a.mustClaim()
		w.check()
	})
}

func TestATenantNeverRunsMoreThanItsLimit(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.write(func(tx *store.Tx) error { return tx.SetOrgLimits(w.ctx, w.org, 1, 2) })
		a := w.agent("a", 10)
		id := w.submit(job("a"), job("b"), job("c"), job("d"))
		one, two := a.mustClaim(), a.mustClaim()
		if got := a.claim(); got != nil {
			w.t.Errorf("a third job over the limit of two: %s", got.Job.Name)
		}
		a.complete(one.Lease, success())
		three := a.mustClaim()
		a.complete(two.Lease, failure(1))
		four := a.mustClaim()
		a.complete(three.Lease, success())
		a.complete(four.Lease, success())
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonJobFailed)
		w.check()
	})
}

func TestHandOverBeforeUserCodeIsNoLoss(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("early"), job("late"))
		a := w.agent("a", 2)
		for range 2 {
			got := a.mustClaim()
			if got.Job.Name == "late" {
				a.phase(got.Lease, ci.PhaseExecuting)
			}
			req := protocol.HandOver{RequestID: "h", Reason: ci.ReasonRunnerShutdown, Evidence: protocol.Evidence{Terminated: true, How: "cgroup"}}
			held := a.hold(got.Lease)
			if _, err := w.e.HandOver(w.ctx, held, req); err != nil {
				w.t.Fatal(err)
			}
			if _, err := w.e.HandOver(w.ctx, held, req); err != nil {
				w.t.Errorf("the repeat: %v", err)
			}
		}
		w.wantJob(id, "early", ci.StateReady, "", "")
		w.wantJob(id, "late", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerShutdown)
		if _, err := w.e.HandOver(w.ctx, a.hold(w.backoff(a).Lease), protocol.HandOver{RequestID: "x", Reason: ci.ReasonRunnerRefused}); !errors.Is(err, ci.ErrInvalid) {
			w.t.Errorf("a hand-over without evidence: %v", err)
		}
		w.check()
	})
}

// backoff lets the next backoff pass and claims.
func (w *world) backoff(a *agent) *protocol.Ticket {
	w.t.Helper()
	w.pass(10 * time.Second)
	if err := w.e.Sweep(w.ctx, false); err != nil {
		w.t.Fatal(err)
	}
	return a.mustClaim()
}

func TestRetryNamesItsCauses(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		flaky := job("flaky")
		flaky.Retry = &ci.RetryPolicy{Max: 1, Exit: []int{75}}
		id := w.submit(flaky, job("behind", "flaky"))
		a := w.agent("a", 1)
		first := a.mustClaim()
		a.phase(first.Lease, ci.PhaseExecuting)
		a.complete(first.Lease, failure(75))
		w.wantJob(id, "flaky", ci.StateReady, "", "")
		if got := a.claim(); got != nil {
			w.t.Error("the backoff was not kept")
		}
		second := w.backoff(a)
		if second.Lease.Epoch != 2 || second.OperationID != first.OperationID {
			w.t.Errorf("epoch %d, operation %s, want 2 and %s", second.Lease.Epoch, second.OperationID, first.OperationID)
		}
		a.complete(second.Lease, failure(75)) // max is used up: the job keeps its own conclusion
		w.wantJob(id, "flaky", ci.StateFinished, ci.ConclusionFailed, ci.ReasonExit)
		w.wantJob(id, "behind", ci.StateFinished, ci.ConclusionSkipped, ci.ReasonNeeds)
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonJobFailed)
		w.check()
	})
}

func TestInfrastructureUsesUpABudget(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 9)
		for epoch := int64(1); epoch <= ci.DefaultInfraBudget; epoch++ {
			if got := w.backoff(a); got.Lease.Epoch != epoch {
				w.t.Fatalf("epoch %d, want %d", got.Lease.Epoch, epoch)
			}
			w.pass(ttl + time.Second)
			if err := w.e.Sweep(w.ctx, true); err != nil {
				w.t.Fatal(err)
			}
		}
		w.wantJob(id, "j", ci.StateFinished, ci.ConclusionFailed, ci.ReasonAttemptsExhausted)
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonInfrastructure)
		dead := w.job(id, "j")
		retry, err := w.e.Requeue(w.ctx, w.org, "tester", dead.ID)
		if err != nil {
			w.t.Fatal(err)
		}
		if again, err := w.e.Requeue(w.ctx, w.org, "tester", dead.ID); err != nil || again != retry {
			w.t.Errorf("requeued twice: %s %v, want %s", again, err, retry)
		}
		if r := w.run(retry); r.Parent != id || r.Event != "retry" {
			w.t.Errorf("retry run: parent %s, event %s", r.Parent, r.Event)
		}
		w.check()
	})
}

func TestCase_RERUN_01_RetryFailedPinsWhatSucceeded(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		build := job("build")
		build.Outputs = []string{"version"}
		id := w.submit(build, job("publish", "build"), job("after", "publish"))
		a := w.agent("a", 1)
		done := success()
		done.Outputs = map[string]string{"version": "1.10"}
		a.complete(a.mustClaim().Lease, done)
		a.complete(a.mustClaim().Lease, failure(1))
		w.wantRun(id, ci.StateFinished, ci.ConclusionFailed, ci.ReasonJobFailed)

		retry, err := w.e.Retry(w.ctx, engine.RetryRequest{Org: w.org, Actor: "tester", Run: id, Failed: true, IdempotencyKey: "k", RequestDigest: "d"})
		if err != nil {
			w.t.Fatal(err)
		}
		if again, err := w.e.Retry(w.ctx, engine.RetryRequest{Org: w.org, Actor: "tester", Run: id, Failed: true, IdempotencyKey: "k", RequestDigest: "d"}); err != nil || again != retry {
			w.t.Errorf("the repeat made %s %v, want %s", again, err, retry)
		}
		w.wantJob(retry, "build", ci.StateFinished, ci.ConclusionSuccess, ci.ReasonPinned)
		got := a.mustClaim()
		if got.Job.Name != "publish" || got.Needs["build"].Outputs["version"] != "1.10" {
			w.t.Errorf("claimed %s with needs %v", got.Job.Name, got.Needs)
		}
		a.complete(got.Lease, success())
		a.complete(a.mustClaim().Lease, success())
		w.wantRun(retry, ci.StateFinished, ci.ConclusionSuccess, "")

		full, err := w.e.Retry(w.ctx, engine.RetryRequest{Org: w.org, Actor: "tester", Run: id})
		if err != nil {
			w.t.Fatal(err)
		}
		w.wantJob(full, "build", ci.StateReady, "", "")
		if _, err := w.e.Retry(w.ctx, engine.RetryRequest{Org: w.org, Actor: "tester", Run: full}); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("retry of an unfinished run: %v", err)
		}
		if _, err := w.e.Retry(w.ctx, engine.RetryRequest{Org: w.org, Actor: "tester", Run: retry, Failed: true}); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("retry failed of a run without failure: %v", err)
		}
		w.check()
	})
}

func TestAnIdempotencyKeyIsBoundToItsRequest(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		s := engine.Submission{
			Org: w.org, Repo: w.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted, Event: "manual",
			Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("j")}}, IdempotencyKey: "k", RequestDigest: "one",
		}
		first, err := w.e.Submit(w.ctx, s)
		if err != nil {
			w.t.Fatal(err)
		}
		if again, err := w.e.Submit(w.ctx, s); err != nil || again != first {
			w.t.Errorf("the repeat: %s %v, want %s", again, err, first)
		}
		s.RequestDigest = "two"
		if _, err := w.e.Submit(w.ctx, s); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("another body: %v, want conflict", err)
		}
		s.Actor = "somebody else"
		if other, err := w.e.Submit(w.ctx, s); err != nil || other == first {
			w.t.Errorf("another caller's key: %s %v", other, err)
		}
		w.check()
	})
}

func TestAJumpOfTheDatabaseClockExpiresNothing(t *testing.T) {
	t.Parallel()
	for name, jump := range map[string]time.Duration{"an hour ahead": time.Hour, "a day back": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, databases()["sqlite"](t))
			id := w.submit(job("j"))
			a := w.agent("a", 1)
			ref := a.mustClaim().Lease
			a.phase(ref, ci.PhaseExecuting)
			w.pass(10 * time.Second)
			w.now.Add(jump.Microseconds())
			reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref})
			if err != nil || reply.Leases[0].Answer != protocol.LeaseRenewed {
				t.Fatalf("heartbeat after the jump: %+v %v", reply, err)
			}
			if err := w.e.Sweep(w.ctx, true); err != nil {
				t.Fatal(err)
			}
			w.wantJob(id, "j", ci.StateRunning, "", "")
			// And a lease still ends a TTL after its last renewal.
			w.pass(ttl + time.Second)
			if err := w.e.Sweep(w.ctx, true); err != nil {
				t.Fatal(err)
			}
			w.wantJob(id, "j", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerLost)
			w.check()
		})
	}
}

func TestASlowClockReadingIsNoJump(t *testing.T) {
	t.Parallel()
	w := newWorld(t, databases()["sqlite"](t))
	id := w.submit(job("j"))
	a := w.agent("a", 1)
	ref := a.mustClaim().Lease
	w.pass(ttl / 2) // the process was stopped; both clocks went on
	reply, err := w.e.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref})
	if err != nil || reply.Leases[0].Answer != protocol.LeaseRenewed {
		t.Fatalf("%+v %v", reply, err)
	}
	w.wantJob(id, "j", ci.StateRunning, "", "")
}

func TestFencingARunnerSettlesWhatItHeld(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		cancelled := w.submit(job("c"))
		running := w.submit(job("r"))
		a := w.agent("a", 2)
		first, second := a.mustClaim(), a.mustClaim()
		a.phase(second.Lease, ci.PhaseExecuting)
		if err := w.e.Cancel(w.ctx, w.org, "tester", cancelled); err != nil {
			w.t.Fatal(err)
		}
		_ = first
		if err := w.e.FenceRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		w.wantRun(cancelled, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
		w.wantJob(running, "r", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerFenced)
		if _, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "late"}); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("a fenced runner's claim: %v", err)
		}
		w.check()
	})
}
