package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// rows counts the rows of a table.
func (w *world) rows(table string) (n int) {
	w.t.Helper()
	lines, err := w.store.Dump(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, l := range lines {
		if strings.HasPrefix(l, table+":") {
			n++
		}
	}
	return n
}

func (w *world) tidy() {
	w.t.Helper()
	if err := w.e.Tidy(w.ctx); err != nil {
		w.t.Fatal(err)
	}
}

// Within its time a key gives the run that it gave; when it has been collected it
// is a new one, which is bound to its request again.
func TestAnIdempotencyKeyIsKeptForItsTime(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		s := engine.Submission{
			Org: w.org, Repo: w.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted, Event: "manual",
			Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("j")}}, IdempotencyKey: "k", RequestDigest: "one",
		}
		submit := func() ci.RunID {
			w.t.Helper()
			id, err := w.e.Submit(w.ctx, s)
			if err != nil {
				w.t.Fatal(err)
			}
			return id
		}
		first := submit()
		w.pass(engine.DefaultKeep)
		w.tidy()
		if again := submit(); again != first {
			w.t.Errorf("within its time the key gives %s, want %s", again, first)
		}
		other := s
		other.RequestDigest = "two"
		if _, err := w.e.Submit(w.ctx, other); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("within its time the key takes another request: %v", err)
		}
		w.pass(time.Second)
		w.tidy()
		late := submit()
		if late == first {
			w.t.Error("the key was not collected")
		}
		if again := submit(); again != late {
			w.t.Errorf("the key used again gives %s, then %s", late, again)
		}
		if _, err := w.e.Submit(w.ctx, other); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("the key used again takes another request: %v", err)
		}
		w.check()
	})
}

// However many have come of age, one call takes them all, and leaves the others.
func TestTidyingGoesOnUntilNothingIsLeft(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		bind := func(n int, prefix string) {
			keys := make([]store.Idempotency, n)
			for i := range keys {
				keys[i] = store.Idempotency{CallKey: store.CallKey{Org: w.org, Caller: "c", Scope: "s", Key: fmt.Sprint(prefix, i)}}
			}
			w.write(func(tx *store.Tx) error {
				_, err := tx.ClaimIdempotency(w.ctx, keys, w.now.Load())
				return err
			})
		}
		bind(1234, "old")
		w.pass(engine.DefaultKeep)
		bind(56, "new")
		w.pass(time.Second)
		var both sync.WaitGroup
		for range 2 { // two nodes at once
			both.Go(func() {
				if err := w.e.Tidy(w.ctx); err != nil {
					w.t.Error(err)
				}
			})
		}
		both.Wait()
		w.tidy()
		if n := w.rows("idempotency"); n != 56 {
			w.t.Errorf("%d keys are left, want 56", n)
		}
	})
}

// A session that has ended is kept while a lease of it lives, and while it is its
// runner's latest. The others go, and whoever comes late with one of them is told
// what is true: its opening the latest session, its claims that there is none.
func TestAnEndedSessionIsKeptWhileSomethingGoesByIt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 2)
		w.submit(job("j"))
		first := a.session
		ref := a.mustClaim().Lease
		open := func(request string, after ci.SessionID) protocol.SessionOpened {
			w.t.Helper()
			got, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
				RequestID: request, Protocol: 1, Slots: 2, After: after,
				Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
			})
			if err != nil {
				w.t.Fatal(err)
			}
			return got
		}
		second := open("second", first).Session
		third := open("third", second).Session
		if err := w.e.DrainSession(w.ctx, a.who, protocol.Drain{Session: third, Gone: true}); err != nil {
			w.t.Fatal(err)
		}
		w.tidy()
		if n := w.rows("session"); n != 3 {
			w.t.Errorf("%d sessions are left at once, want all 3", n)
		}
		w.pass(engine.DefaultKeep + time.Second)
		w.tidy()
		if n := w.rows("session"); n != 2 {
			w.t.Errorf("%d sessions are left, want the one with a lease and the latest", n)
		}
		if late := open("second", first); late.Session != "" || late.Latest != third {
			w.t.Errorf("a late opening of a collected session: %+v, want that %s is the latest", late, third)
		}
		_, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: second, RequestID: "late"})
		if !errors.Is(err, ci.ErrNotFound) {
			w.t.Errorf("a late claim of a collected session: %v", err)
		}
		w.expireAndFree(a, ref, third)
		w.pass(engine.DefaultKeep + time.Second)
		w.tidy()
		if n := w.rows("session"); n != 1 {
			w.t.Errorf("%d sessions are left, want the latest", n)
		}
		w.check()
	})
}

// expireAndFree lets a lease run out whose session has ended, and has its end
// reported by a later one.
func (w *world) expireAndFree(a *agent, ref ci.LeaseRef, latest ci.SessionID) {
	w.t.Helper()
	if err := w.e.Sweep(w.ctx, true); err != nil {
		w.t.Fatal(err)
	}
	w.n++
	got, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
		RequestID: itoa(w.n), Protocol: 1, Slots: 2, After: latest, Swept: true,
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	a.session = got.Session
	if left := w.occupied(a.who.Runner); len(left) != 0 {
		w.t.Errorf("taken slots: %v, of %v", left, ref)
	}
}

// An offer goes with the last session that makes it, and comes back with the next.
func TestAnOfferIsKeptWhileASessionMakesIt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agentWith("a", 1, "gpu")
		spec := job("j")
		spec.RunsOn.Labels = []string{"gpu"}
		w.submit(spec)
		if n := w.rows("offer"); n != 2 {
			w.t.Fatalf("%d offers, want one without the label and one with it", n)
		}
		a.labels = nil
		a.open(1)
		w.pass(engine.DefaultKeep + time.Second)
		w.tidy()
		if offers, pairs := w.rows("offer"), w.rows("offer_shape"); offers != 1 || pairs != 0 {
			w.t.Errorf("%d offers that serve %d shapes are left, want one that serves none", offers, pairs)
		}
		a.labels = []string{"gpu"}
		a.open(1)
		if got := a.mustClaim(); got.Job.Name != "j" {
			w.t.Errorf("claimed %s", got.Job.Name)
		}
		w.check()
	})
}

// Offers are collected while runners come back with just these.
func TestOffersAreCollectedWhileTheyAreMadeAgain(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.e.Keep = time.Microsecond
		spec := job("j")
		spec.RunsOn.Labels = []string{"gpu"}
		w.submit(spec)
		agents := make([]*agent, 4)
		for i := range agents {
			agents[i] = w.agent(fmt.Sprint("runner ", i), 1)
		}
		stop := make(chan struct{})
		var tidying, all sync.WaitGroup
		tidying.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				w.pass(time.Millisecond)
				if err := w.e.Tidy(w.ctx); err != nil {
					t.Error(err)
					return
				}
			}
		})
		for i, a := range agents {
			all.Go(func() {
				for n := range 40 {
					got, err := w.e.OpenSession(w.ctx, a.who, protocol.OpenSession{
						RequestID: fmt.Sprint(i, "-", n), Protocol: 1, Slots: 1, After: a.session, Swept: true,
						Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}, Labels: []string{"gpu", fmt.Sprint("l", n%2)}},
					})
					if err != nil {
						t.Errorf("a session whose offer may have just been collected: %v", err)
						return
					}
					a.session = got.Session
				}
			})
		}
		all.Wait()
		close(stop)
		tidying.Wait()
		agents[0].mustClaim()
		w.check()
	})
}
