package engine_test

import (
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/policy"
)

// A runner hears that it shall drain when somebody asked for it, and not because a
// session of it has ended: it opened the next one itself, and has jobs in both.
func TestOnlyWhoIsAskedToDrainIsToldSo(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 2)
		beat := func(s ci.SessionID, refs ...ci.LeaseRef) protocol.HeartbeatReply {
			w.t.Helper()
			got, err := w.e.Renew(w.ctx, a.who, s, refs)
			if err != nil {
				w.t.Fatal(err)
			}
			return got
		}
		want := func(when string, drain bool, answer protocol.LeaseAnswer, refs ...ci.LeaseRef) {
			w.t.Helper()
			for _, ref := range refs {
				if got := beat(ref.Session, ref); got.Drain != drain || got.Leases[0].Answer != answer {
					w.t.Errorf("%s: %+v, want drain %t and %s", when, got, drain, answer)
				}
			}
		}
		w.submit(job("one"), job("two"))
		first := a.mustClaim().Lease
		reopen := func(alive ...ci.LeaseRef) {
			w.t.Helper()
			req := protocol.OpenSession{
				RequestID: "again after " + string(a.session), Protocol: 1, Slots: 2, Swept: true, After: a.session,
				Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
			}
			for _, ref := range alive {
				req.Alive = append(req.Alive, protocol.AttemptRef{Job: ref.Job, Epoch: ref.Epoch})
			}
			got, err := w.e.OpenSession(w.ctx, a.who, req)
			if err != nil || got.Session == "" {
				w.t.Fatal(got, err)
			}
			a.session = got.Session
		}
		reopen(first)
		second := a.mustClaim().Lease
		if first.Session == second.Session {
			w.t.Fatal("one session")
		}
		want("two sessions", false, protocol.LeaseRenewed, first, second)
		if err := w.e.DrainRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		want("drained by an operator", true, protocol.LeaseRenewed, first, second)
		reopen(first, second)
		want("a new session", false, protocol.LeaseRenewed, first, second)
		if err := w.e.DrainSession(w.ctx, a.who, protocol.Drain{Session: a.session}); err != nil {
			w.t.Fatal(err)
		}
		if !beat(a.session).Drain {
			w.t.Error("a session that drains is not told so")
		}
		if err := w.e.FenceRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		// The host was not dead: what it had is over, and it may come back.
		want("fenced", false, protocol.LeaseGone, first, second)
		reopen()
		w.pass(2 * policy.Backoff(1, 0))
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		if a.claim() == nil {
			w.t.Error("nothing for a runner that came back")
		}
		w.check()
	})
}

// An idle runner hears of its drain at once: its poll is answered with nothing, on
// whatever node it waits, and its next heartbeat says why.
func TestADrainAnswersThePollsOfAnIdleRunner(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 1)
		poll := func() <-chan time.Duration {
			took, began := make(chan time.Duration, 1), time.Now()
			go func() {
				ticket, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: w.e.IDs.New(ci.PrefixRequest), Wait: ci.Duration(time.Minute)})
				if ticket != nil || err != nil {
					w.t.Errorf("%v %v", ticket, err)
				}
				took <- time.Since(began)
			}()
			return took
		}
		waiting := poll()
		for w.e.Polls() == 0 {
			time.Sleep(time.Millisecond)
		}
		if err := w.e.DrainRunner(w.ctx, w.org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		for _, took := range []<-chan time.Duration{waiting, poll()} {
			if d := <-took; d > 30*time.Second {
				w.t.Errorf("the poll was answered after %s", d)
			}
		}
		reply, err := w.e.Renew(w.ctx, a.who, a.session, nil)
		if err != nil || !reply.Drain {
			w.t.Errorf("%+v %v", reply, err)
		}
	})
}
