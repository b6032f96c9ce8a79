package engine_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// A poll of a runner that cannot take anything does not swallow the hint that
// another runner waits for.
func TestABlockedPollPassesTheWakeUpOn(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		go w.e.Run(w.ctx)
		busy := w.agent("busy", 1)
		w.submit(job("before"))
		busy.mustClaim()
		idle := w.agent("idle", 1)
		poll := func(a *agent, out chan<- *protocol.Ticket) {
			got, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "poll", Wait: ci.Duration(30 * time.Second)})
			if err != nil {
				w.t.Error(err)
			}
			out <- got
		}
		none, some := make(chan *protocol.Ticket, 1), make(chan *protocol.Ticket, 1)
		go poll(busy, none)
		go poll(idle, some)
		for range 200 { // both polls wait
			if w.e.Polls() == 2 {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		w.submit(job("j"))
		select {
		case got := <-some:
			if got == nil {
				w.t.Error("the idle runner got nothing")
			}
		case got := <-none:
			w.t.Errorf("the busy runner got %v", got)
		case <-time.After(4 * time.Second):
			w.t.Error("the job waits although a runner is idle")
		}
		w.e.StopPolls()
		select {
		case <-none:
		case <-time.After(20 * time.Second):
			w.t.Error("a stopped server keeps its polls")
		}
	})
}

// It passes it on by what the hint is for: not only to runners that offer the same as
// it does, but to all that serve that job.
func TestAWakeUpIsPassedOnToOtherOffers(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		const busy = 8 // whom the hint comes to first is open
		poll := func(a *agent, out chan<- *protocol.Ticket) {
			got, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "poll", Wait: ci.Duration(30 * time.Second)})
			if err != nil {
				w.t.Error(err)
			}
			out <- got
		}
		none, some := make(chan *protocol.Ticket, busy), make(chan *protocol.Ticket, 1)
		for i := range busy {
			a := w.agentWith(fmt.Sprint("busy ", i), 1, "gpu")
			w.submit(job("before"))
			a.mustClaim()
			go poll(a, none)
		}
		go poll(w.agent("idle", 1), some)
		w.eventually(func() bool { return w.e.Polls() == busy+1 })
		w.submit(job("j"))
		if <-some == nil { // there is no sweep that would wake it
			w.t.Error("the job waits although a runner is idle")
		}
		w.e.StopPolls()
		for range busy {
			if got := <-none; got != nil {
				w.t.Errorf("a busy runner got %v", got)
			}
		}
	})
}

// A cancel does not wait for the next heartbeat: the session that holds the job
// is told that one should come at once, also when it was not listening just then.
func TestACancelIsHintedAtOnce(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 2)
		first, second := w.submit(job("one")), w.submit(job("two"))
		a.mustClaim()
		a.mustClaim()
		watch := func(d time.Duration) bool {
			renew, err := w.e.Watch(w.ctx, a.who, protocol.Watch{Session: a.session, Wait: ci.Duration(d)})
			if err != nil {
				w.t.Error(err)
			}
			return renew
		}
		if watch(10 * time.Millisecond) {
			w.t.Error("a hint without a reason")
		}
		if err := w.e.Cancel(w.ctx, w.org, "tester", first); err != nil {
			w.t.Fatal(err)
		}
		if !watch(10 * time.Millisecond) {
			w.t.Error("the hint that nobody waited for was lost")
		}
		heard := make(chan bool, 1)
		go func() { heard <- watch(20 * time.Second) }()
		time.Sleep(50 * time.Millisecond)
		if err := w.e.Cancel(w.ctx, w.org, "tester", second); err != nil {
			w.t.Fatal(err)
		}
		select {
		case renew := <-heard:
			if !renew {
				w.t.Error("the poll ended without the hint")
			}
		case <-time.After(10 * time.Second):
			w.t.Error("the cancel was not hinted")
		}
		b := w.agent("b", 1)
		if _, err := w.e.Watch(w.ctx, b.who, protocol.Watch{Session: a.session}); ci.KindOf(err) != ci.ErrNotFound {
			w.t.Errorf("another runner's session: %v", err)
		}
	})
}

// A claim takes the best job of several shapes and leaves the others. Whoever waits
// for one of them hears of it then: the claim may have been made for its hint.
func TestAClaimPassesOnWhatItLeaves(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		any, plain := w.agentWith("any", 1, "gpu"), w.agent("plain", 1)
		got := make(chan *protocol.Ticket, 1)
		go func() {
			ticket, err := w.e.Claim(w.ctx, plain.who, protocol.Claim{Session: plain.session, RequestID: "poll", Wait: ci.Duration(30 * time.Second)})
			if err != nil {
				w.t.Error(err)
			}
			got <- ticket
		}()
		w.eventually(func() bool { return w.e.Polls() == 1 })
		best, other := job("best"), job("other")
		best.RunsOn.Labels = []string{"gpu"}
		best.Priority = 1
		own := w.e
		w.e = w.engine(slog.New(slog.DiscardHandler)) // a node that tells nothing
		w.submit(best, other)
		w.e = own
		if a := any.mustClaim(); a.Job.Name != "best" {
			w.t.Fatalf("the claim took %s", a.Job.Name)
		}
		if ticket := <-got; ticket == nil {
			w.t.Error("the job waits although a runner is idle")
		}
		w.check()
	})
}
