package reader_test

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/reader"
)

// Runners that have come and gone do not hide those that are there: all are counted,
// and listed behind them.
func TestAllRunnersAreCountedAndThosePresentComeFirst(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		for i := range reader.MaxPage {
			key := make([]byte, 32)
			binary.BigEndian.PutUint64(key, uint64(i+1))
			name := fmt.Sprintf("gone-%d", i)
			if _, err := w.e.Register(w.ctx, w.Org, "tester", []string{"*"}, protocol.Register{Name: name, PublicKey: key}, name); err != nil {
				w.t.Fatal(err)
			}
		}
		a := w.agent("here", 3)
		w.submit(job("j"))
		a.start()
		all := must(w, func() ([]protocol.Runner, error) { return w.r.AllRunners(w.ctx, w.Viewer) })
		if len(all) != reader.MaxPage+1 || all[0].Name != "here" || len(all[0].Running) != 1 {
			w.t.Errorf("%d runners, the first is %+v", len(all), all[0])
		}
		if got := w.overview().Runners; got != (reader.Fleet{Online: 1, Offline: reader.MaxPage, Slots: 3, Busy: 1}) {
			w.t.Errorf("counted: %+v", got)
		}
		if err := w.e.DrainRunner(w.ctx, w.Org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		if got := w.overview().Runners; got != (reader.Fleet{Draining: 1, Offline: reader.MaxPage}) {
			w.t.Errorf("counted while it drains: %+v", got)
		}
		if err := w.e.FenceRunner(w.ctx, w.Org, "operator", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		if got := w.overview().Runners; got != (reader.Fleet{Fenced: 1, Offline: reader.MaxPage}) {
			w.t.Errorf("counted when it is fenced: %+v", got)
		}
	})
}

// A runner's status is what it is good for now; how long it has been silent is
// said as soon as it is worth a doubt.
func TestARunnerShowsItsStatusAndItsSilence(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		a := w.agent("a", 2)
		want := func(status string, silent, seen time.Duration) {
			w.t.Helper()
			got := w.runner(a)
			ago := time.Duration(w.now.Load()-got.LastSeen.UnixMicro()) * time.Microsecond
			var shown time.Duration
			if got.Silent != nil {
				shown = got.Silent.Std()
			}
			if got.Status != status || shown != silent || ago != seen {
				w.t.Errorf("%s, silent for %v, seen %v ago; want %s, %v, %v", got.Status, shown, ago, status, silent, seen)
			}
		}
		if got := w.runner(a); got.Slots != 2 || got.Version != "0.1.0" || got.Offer.OS != "linux" || got.Name != "a" || len(got.Running) != 0 {
			w.t.Errorf("%+v", got)
		}
		want("online", 0, 0)
		w.pass(ttl/2 - time.Second)
		want("online", 0, ttl/2-time.Second)
		w.pass(3 * time.Second)
		want("online", ttl/2+2*time.Second, ttl/2+2*time.Second)
		a.renew()
		want("online", 0, 0)
		if err := w.e.DrainRunner(w.ctx, w.Org, "tester", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		want("draining", 0, 0)
		w.pass(40 * time.Second)
		want("draining", 40*time.Second, 40*time.Second)
		for range 30 { // a sweep doubts, a later one is sure
			w.pass(ci.SweepEvery(ttl))
			w.sweep()
		}
		if got := w.runner(a); got.Status != "offline" || got.Silent != nil {
			w.t.Errorf("after the TTL it is %s, silent for %v", got.Status, got.Silent)
		}
		if err := w.e.FenceRunner(w.ctx, w.Org, "operator", a.who.Runner); err != nil {
			w.t.Fatal(err)
		}
		if got := w.runner(a); got.Status != "fenced" || got.Silent != nil {
			w.t.Errorf("a fenced one is %s, silent for %v", got.Status, got.Silent)
		}
	})
}

// Another node has not heard of the runner itself: it says that a runner is
// silent when a lease was not renewed, and says nothing on a guess.
func TestAnotherNodeDoesNotTakeItsOwnIgnoranceForSilence(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.submit(job("j"))
		busy, idle := w.agent("busy", 1), w.agent("idle", 1)
		ref := busy.start()
		_, other := w.node()
		w.pass(40 * time.Second)
		read := func(a *agent) protocol.Runner {
			return must(w, func() (protocol.Runner, error) { return other.Runner(w.ctx, w.Viewer, a.who.Runner) })
		}
		if got := read(idle); got.Silent != nil {
			w.t.Errorf("a runner that another node serves is silent for %v", got.Silent)
		}
		if got := read(busy); got.Silent == nil || got.Silent.Std() != 40*time.Second {
			w.t.Errorf("the runner whose lease was not renewed for 40 s is silent for %v", got.Silent)
		}
		busy.renew(ref) // at the first node
		if got := read(busy); got.Silent != nil {
			w.t.Errorf("the lease was renewed, and its runner is silent for %v", got.Silent)
		}
	})
}

// A slot is shown as taken until the end of what took it is proven.
func TestARunnerShowsWhatTakesItsSlots(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.submit(job("one"), job("two"))
		a := w.agent("a", 2)
		first, second := a.start(), a.start()
		if got := w.runner(a); len(got.Running) != 2 || got.Quarantined != 0 {
			w.t.Errorf("%+v", got)
		}
		a.end(first)
		w.lose()
		got := w.runner(a)
		if len(got.Running) != 1 || got.Running[0].Job != second.Job || !got.Running[0].Quarantined || got.Running[0].Epoch != 1 || got.Quarantined != 1 {
			w.t.Errorf("%+v", got)
		}
		a.open(2, protocol.AttemptRef{Job: second.Job, Epoch: second.Epoch})
		if got := w.runner(a); len(got.Running) != 0 || got.Quarantined != 0 {
			w.t.Errorf("its end is reported, and it shows %+v", got)
		}
	})
}

// A dead letter says what died of what, newest first, and what it was requeued as.
func TestADeadLetterSaysWhatBecameOfIt(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		older, newer := w.deadLetter("older"), w.deadLetter("newer")
		read := func() []protocol.DeadLetter {
			return must(w, func() (protocol.Page[protocol.DeadLetter], error) { return w.r.DeadLetters(w.ctx, w.Viewer, "", 0) }).Items
		}
		got := read()
		if len(got) != 2 || got[0].Run != newer || got[1].Run != older || got[0].Name != "newer" || got[0].Attempts != 1 ||
			got[0].Reason != ci.ReasonAttemptsExhausted || got[0].Repo != "local/default" || got[0].Requeued != "" || got[0].Detail == "" {
			w.t.Fatalf("%+v", got)
		}
		fresh := must(w, func() (ci.RunID, error) { return w.e.Requeue(w.ctx, w.Org, "tester", got[0].Job) })
		if got := read(); len(got) != 2 || got[0].Requeued != fresh {
			w.t.Errorf("requeued as %s, shown %+v", fresh, got)
		}
		if n := w.overview().DeadLetters; n != 1 {
			w.t.Errorf("the overview counts %d dead letters, want the one that nobody has requeued", n)
		}
	})
}

func (w *world) overview() reader.Overview {
	w.t.Helper()
	return must(w, func() (reader.Overview, error) { return w.r.Overview(w.ctx, w.Viewer) })
}

// The overview shows what is going on: what runs, what waits and why, and which
// workflows are broken since when.
func TestTheOverviewShowsWhatIsGoingOn(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		if got := w.overview(); !got.Empty {
			w.t.Errorf("nothing has run, and the overview is not empty: %+v", got)
		}
		a := w.agent("a", 1)
		good := w.submit(job("j"))
		a.end(a.start())
		if got := w.overview(); got.Empty || len(got.Broken) != 0 || len(got.Recent) != 1 {
			w.t.Errorf("after a good run: %+v", got)
		}
		w.submit(job("j"))
		a.end(a.start(), failed)
		bad := w.submit(job("j"))
		a.end(a.start(), failed)
		got := w.overview()
		if len(got.Broken) != 1 || got.Broken[0].Run.ID != bad || got.Broken[0].LastGood == nil || got.Broken[0].LastGood.ID != good {
			w.t.Errorf("broken: %+v", got.Broken)
		}
		other := w.newRepo("other")
		w.submitAs(other, "", job("j"))
		a.end(a.start(), failed)
		if got := w.overview().Broken; len(got) != 2 || got[0].LastGood != nil {
			w.t.Errorf("a workflow that never succeeded: %+v", got)
		}
		// A cancelled run says nothing of the workflow; a good one repairs it.
		cancelledRun := w.submit(job("j"))
		if err := w.e.Cancel(w.ctx, w.Org, "tester", cancelledRun); err != nil {
			w.t.Fatal(err)
		}
		if got := w.overview().Broken; len(got) != 2 {
			w.t.Errorf("after a cancelled run: %+v", got)
		}
		w.submit(job("j"))
		a.end(a.start())
		if got := w.overview().Broken; len(got) != 1 || got[0].Run.Repo.Name != "local/other" {
			w.t.Errorf("after a good run: %+v", got)
		}

		long := w.submit(job("long"))
		a.start()
		var queued []ci.RunID
		for range 12 {
			queued = append(queued, w.submit(job("next")))
		}
		got = w.overview()
		if got.RunningCount != 1 || len(got.Running) != 1 || got.Running[0].ID != long {
			w.t.Errorf("running: %d %+v", got.RunningCount, got.Running)
		}
		if got.WaitingCount != 12 || len(got.Waiting) != 10 || got.Waiting[0].Run.ID != queued[0] || got.Waiting[9].Job.Waiting.Position != 10 {
			w.t.Errorf("waiting: %d %+v", got.WaitingCount, got.Waiting)
		}
		if got.Runners != (reader.Fleet{Online: 1, Slots: 1, Busy: 1}) {
			w.t.Errorf("runners: %+v", got.Runners)
		}
	})
}
