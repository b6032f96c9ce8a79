package engine_test

import (
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
		draining, idle := w.agent("draining", 1), w.agent("idle", 1)
		if err := w.e.DrainSession(w.ctx, draining.who, protocol.Drain{Session: draining.session}); err != nil {
			w.t.Fatal(err)
		}
		poll := func(a *agent, out chan<- *protocol.Ticket) {
			got, err := w.e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "poll", Wait: ci.Duration(30 * time.Second)})
			if err != nil {
				w.t.Error(err)
			}
			out <- got
		}
		none, some := make(chan *protocol.Ticket, 1), make(chan *protocol.Ticket, 1)
		go poll(draining, none)
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
			w.t.Errorf("the draining runner got %v", got)
		case <-time.After(4 * time.Second):
			w.t.Error("the job waits although a runner is idle")
		}
		w.e.StopPolls()
	})
}
