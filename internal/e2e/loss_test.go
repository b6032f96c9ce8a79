package e2e_test

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// counting is a job that says that it has come so far and then writes numbered
// lines until it is told to end; policy is its retry line.
func counting(policy string) string {
	if policy != "" {
		policy = "    retry: " + policy + "\n"
	}
	return "\n  - name: build\n" + policy + "    steps: ['" + shSay + "; " + shCount + "']\n"
}

const onLoss = "{max: 1, on: [runner_lost]}"

// A runner that is killed in the middle of a step leaves nothing behind. Without
// a policy nobody guesses whether the step had effects: the job is aborted, what
// needs it is skipped.
func TestCase_RUN_02_KilledRunnerWithoutPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting("")+"  - name: after\n    steps: ['true']\n", nil)
	w.came("build", 1)
	a.kill()
	w.gone(5 * time.Second)
	run := w.finished(id)
	w.outcome(run, "failed infrastructure", map[string]string{"build": "aborted runner_lost", "after": "skipped needs"})
	if r := w.forgeci("show", string(id), "--wait"); r.Code != 5 {
		t.Errorf("forgeci show --wait ended with %d, want 5", r.Code)
	}
	job := w.job(id, "build")
	w.attempts(job, "aborted runner_lost")
	w.begun(w.log(job.ID, 1, "stdout"), 1)
	if !job.Uncertain || !strings.Contains(job.Detail, "retry: {max: 1, on: [runner_lost]}") {
		t.Errorf("the job is not shown as uncertain with the line that would have helped: %q", job.Detail)
	}
	// Its slot stays taken until the runner comes back and reports the end.
	page, err := w.people.Runners(t.Context(), "")
	if err != nil || len(page.Items) != 1 || page.Items[0].Quarantined != 1 {
		t.Errorf("the slot of the lost attempt is not quarantined: %+v, %v", page.Items, err)
	}
	a.start()
	w.close()
}

// With a policy another runner takes over with the next epoch.
func TestCase_RUN_02_KilledRunnerWithPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting(onLoss), nil)
	w.came("build", 1)
	a.kill()
	b := w.machine("b").start()
	w.came("build", 2)
	w.sign("go")
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job := w.job(id, "build")
	w.attempts(job, "aborted runner_lost", "success *")
	if got := job.Attempt[1].RunnerName; got != b.name {
		t.Errorf("attempt 2 was made by %s", got)
	}
	w.begun(w.log(job.ID, 1, "stdout"), 1)
	w.counted(w.log(job.ID, 2, "stdout"), 2)
	made := a.impostor(job, 1).refusals()
	a.start()
	if got := w.close().total(); got < made {
		t.Errorf("%d refusals are counted, %d were made", got, made)
	}
}

// Before any user code could run, a lost attempt is repeated without a policy.
func TestCase_RUN_02_KilledRunnerBeforeUserCode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a")
	fetching := a.freezes(a.through(), protocol.RouteFetchSource)
	a.start()
	id := w.submit("\n  - name: build\n    steps: ['echo \"$CI_ATTEMPT\" >>\"$SIGNS/ran\"']\n", nil)
	select {
	case <-fetching:
	case <-time.After(patience):
		t.Fatal("the source was not asked for")
	}
	a.kill()
	w.machine("b").start()
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job := w.job(id, "build")
	w.attempts(job, "aborted runner_lost", "success *")
	if phase := job.Attempt[0].Phase; phase != ci.PhasePreparing {
		t.Errorf("attempt 1 was lost in phase %s", phase)
	}
	if got := w.read("ran"); got != "2\n" {
		t.Errorf("attempts that ran: %q", got)
	}
	a.start()
	w.close()
}

// Runner and server stop in the middle of a job and come back: the job does not
// stay "running".
func TestCase_RUN_02_RunnerAndServerStop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting(""), nil)
	w.came("build", 1)
	a.kill()
	w.gone(5 * time.Second)
	w.crash()
	w.serve()
	w.until(w.config.ttl+ci.SweepEvery(w.config.ttl)+2*time.Second, "the job not to be running", func() bool {
		return w.job(id, "build").State == ci.StateFinished
	})
	w.outcome(w.finished(id), "failed infrastructure", map[string]string{"build": "aborted runner_lost"})
	a.start()
	w.close()
}

// The same with a runner that is asked to stop, once or twice, while the server is
// being stopped, too: once, it ends its job well when the server is back; twice, it
// leaves nothing, and what it could not say is known when it starts again.
func TestCase_RUN_02_RunnerIsToldToStopAndTheServerStops(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		signals  int
		run, job string
		attempts string
	}{
		"once":  {1, "success", "success", "success *"},
		"twice": {2, "failed infrastructure", "aborted runner_restarted", "aborted runner_restarted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: calm})
			a := w.machine("a").start()
			id := w.submit(counting(""), nil)
			w.came("build", 1)
			a.signal(syscall.SIGTERM)
			w.until(patience, "the runner to drain", func() bool { return has(a.proc.Stderr(), "draining") })
			w.server.Signal(t, syscall.SIGTERM)
			if code := w.server.Wait(t, patience); code != 0 {
				t.Errorf("the server ended with %d", code)
			}
			if c.signals == 2 {
				a.signal(syscall.SIGTERM)
				w.gone(ci.DefaultGrace + 5*time.Second)
			}
			pass(2 * time.Second)
			if c.signals == 2 {
				a.proc.Wait(t, patience)
			}
			w.serve()
			w.sign("go")
			if c.signals == 2 {
				a.start()
				w.gone(0)
				w.until(w.config.ttl+ci.SweepEvery(w.config.ttl)+2*time.Second, "the job not to be running", func() bool {
					return w.job(id, "build").State == ci.StateFinished
				})
			} else if code := a.proc.Wait(t, patience); code != 0 {
				t.Errorf("the runner ended with %d", code)
			}
			w.outcome(w.finished(id), c.run, map[string]string{"build": c.job})
			job := w.job(id, "build")
			w.attempts(job, c.attempts)
			if c.signals == 1 {
				w.counted(w.log(job.ID, 1, "stdout"), 1)
			} else {
				w.begun(w.log(job.ID, 1, "stdout"), 1)
			}
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
}

// A runner that starts again reports at once what has ended, long before the
// lease would have: by policy the job goes on, on the same machine.
func TestRestartedRunnerReportsTermination(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy, run, job string
		attempts         []string
	}{
		"with policy":    {onLoss, "success", "success", []string{"aborted runner_restarted", "success *"}},
		"without policy": {"", "failed infrastructure", "aborted runner_restarted", []string{"aborted runner_restarted"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: 5 * time.Minute})
			a := w.machine("a").start()
			id := w.submit(counting(c.policy), nil)
			w.came("build", 1)
			before := w.job(id, "build")
			a.kill()
			a.start()
			w.gone(time.Second)
			w.sign("go")
			w.outcome(w.finished(id), c.run, map[string]string{"build": c.job})
			job := w.job(id, "build")
			w.attempts(job, c.attempts...)
			w.begun(w.log(job.ID, 1, "stdout"), 1)
			if len(c.attempts) == 2 {
				w.counted(w.log(job.ID, 2, "stdout"), 2)
				if job.Attempt[0].Runner != job.Attempt[1].Runner || job.Attempt[0].Session == job.Attempt[1].Session {
					t.Errorf("want the same runner in a new session: %+v", job.Attempt)
				}
			}
			made := a.impostor(before, 1).refusals()
			if got := w.close().total(); got < made {
				t.Errorf("%d refusals are counted, %d were made", got, made)
			}
		})
	}
}

// A paused runner comes back after its job was given to another: everything that
// it says is refused, and its own copy of the job is dead within 5 s.
func TestCase_RUN_01_PausedRunnerComesBackTooLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting(onLoss), nil)
	w.came("build", 1)
	a.signal(syscall.SIGSTOP)
	b := w.machine("b").start()
	w.came("build", 2)
	if len(w.processes(1)) == 0 {
		t.Error("the paused runner's job has ended by itself: the test proves nothing")
	}
	job := w.job(id, "build")
	before := w.log(job.ID, 1, "stdout")
	made := a.impostor(job, 1).refusals()
	a.signal(syscall.SIGCONT)
	took := w.until(5*time.Second, "the stale runner's job to be killed", func() bool { return len(w.processes(1)) == 0 })
	t.Logf("the stale job was dead %v after the runner came back", took)
	if len(w.processes(2)) == 0 {
		t.Error("the current attempt was killed too")
	}
	w.sign("go")
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job = w.job(id, "build")
	w.attempts(job, "aborted runner_lost", "success *")
	if got := job.Attempt[1].RunnerName; got != b.name {
		t.Errorf("attempt 2 was made by %s", got)
	}
	w.unchanged(job.ID, 1, before)
	w.begun(before, 1)
	w.counted(w.log(job.ID, 2, "stdout"), 2)
	books := w.close()
	got := books.total()
	if got < made {
		t.Errorf("%d refusals are counted, %d were made", got, made)
	}
	if own := got - made; own > 3 {
		t.Errorf("the stale runner went on for %d refused calls: %v", own, books.rejections)
	}
}

// A cancel while both copies of a job are alive ends both.
func TestCase_RUN_01_CancelEndsBothCopies(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting(onLoss), nil)
	w.came("build", 1)
	a.signal(syscall.SIGSTOP)
	w.machine("b").start()
	w.came("build", 2)
	if r := w.forgeci("cancel", string(id)); r.Code != 0 {
		t.Errorf("forgeci cancel ended with %d", r.Code)
	}
	a.signal(syscall.SIGCONT)
	w.gone(5 * time.Second)
	w.outcome(w.finished(id), "cancelled user", map[string]string{"build": "cancelled user"})
	w.attempts(w.job(id, "build"), "aborted runner_lost", "cancelled cancelled *")
	w.close()
}

// A runner that is cut off for longer than the lease ends its job before
// the server can give it to another.
func TestCase_RUN_01_PartitionedRunnerStopsItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a")
	p := a.through()
	a.start()
	id := w.submit(counting(onLoss), nil)
	w.came("build", 1)
	p.Stall()
	w.machine("b").start()
	w.until(patience, "the lease to be over", func() bool {
		return w.job(id, "build").Attempt[0].State == ci.StateFinished
	})
	if left := w.processes(1); len(left) > 0 {
		t.Errorf("the server has ended the lease and %d processes of the attempt run", len(left))
	}
	w.came("build", 2)
	before := w.log(w.job(id, "build").ID, 1, "stdout")
	p.Heal()
	pass(w.config.ttl / 3) // what it could not send comes now
	w.sign("go")
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job := w.job(id, "build")
	w.attempts(job, "aborted runner_lost", "success *")
	w.unchanged(job.ID, 1, before)
	w.begun(before, 1)
	w.counted(w.log(job.ID, 2, "stdout"), 2)
	if own := w.close(); own.total() > 3 {
		t.Errorf("the runner went on after its lease was over: %v", own.rejections)
	}
}

// A partition shorter than the lease costs nothing, however the connections
// break: no restart, no byte of the log.
func TestShortPartitionCostsNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ begin, end func(*testkit.Proxy) }{
		"nothing arrives":             {(*testkit.Proxy).Stall, (*testkit.Proxy).Heal},
		"connections are refused":     {func(p *testkit.Proxy) { p.Refuse(); p.Reset() }, (*testkit.Proxy).Heal},
		"connections are dead":        {(*testkit.Proxy).HalfOpen, (*testkit.Proxy).Heal},
		"connections are dead before": {func(p *testkit.Proxy) { p.Stall() }, func(p *testkit.Proxy) { p.HalfOpen(); p.Heal() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: 2 * ttl})
			a := w.machine("a")
			p := a.through()
			a.start()
			id := w.submit(counting(onLoss), nil)
			w.came("build", 1)
			c.begin(p)
			pass(w.config.ttl / 2)
			c.end(p)
			pass(w.config.ttl / 3)
			w.sign("go")
			began := time.Now()
			w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("finished %v after its last line", took)
			}
			job := w.job(id, "build")
			w.attempts(job, "success *")
			w.counted(w.log(job.ID, 1, "stdout"), 1)
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
}

// The runner lives and renews, its job's supervisor is dead: the job does not
// stay "running".
func TestCase_RUN_03_SupervisorOfTheJobIsKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	a := w.machine("a").start()
	id := w.submit(counting(""), nil)
	w.came("build", 1)
	helpers := childrenOf(t, a.proc.PID())
	if len(helpers) == 0 {
		t.Fatal("the runner has no process that looks after the job")
	}
	for _, pid := range helpers {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	w.until(2*ttl, "the job not to be running", func() bool { return w.job(id, "build").State == ci.StateFinished })
	w.gone(5 * time.Second)
	w.outcome(w.finished(id), "failed infrastructure", map[string]string{"build": "aborted internal"})
	w.attempts(w.job(id, "build"), "failed internal")
	after := w.submit("\n  - name: next\n    steps: ['true']\n", nil)
	w.outcome(w.finished(after), "success", map[string]string{"next": "success"})
	w.close()
}

// Heartbeats that leave a lease out for a full TTL end it, although the runner
// is heard of.
func TestCase_RUN_03_HeartbeatsThatOmitTheLease(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(counting(""), nil)
	w.came("build", 1)
	a.signal(syscall.SIGSTOP)
	it := a.impostor(w.job(id, "build"), 1)
	ended := w.beating(it, nil)
	took := w.until(2*w.config.ttl+time.Second, "the job not to be running", func() bool {
		return w.job(id, "build").State == ci.StateFinished
	})
	t.Logf("ended after %v", took)
	ended()
	w.outcome(w.finished(id), "failed infrastructure", map[string]string{"build": "aborted lease_omitted"})
	w.attempts(w.job(id, "build"), "aborted lease_omitted")
	a.signal(syscall.SIGCONT)
	w.gone(5 * time.Second)
	w.close()
}

// beating sends heartbeats for a session in place of its runner, until it is
// told to end.
func (w *world) beating(it impostor, leases []ci.LeaseRef) (end func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(w.config.ttl / 6)
		defer tick.Stop()
		for {
			_, _ = it.client.Heartbeat(ctx, protocol.Heartbeat{Session: it.lease.Session, Leases: leases})
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return func() { cancel(); <-done }
}

// A runner that crashes and is started again and again is one runner.
func TestCase_RUN_04_CrashLoopIsOneRecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	a := w.machine("a")
	for i := range 20 {
		if i%4 == 0 {
			a.start()
		} else {
			a.boot()
			pass(time.Duration(i) * 5 * time.Millisecond) // anywhere in its start
		}
		a.kill()
	}
	a.start()
	page, err := w.people.Runners(t.Context(), "")
	if err != nil || len(page.Items) != 1 || page.Items[0].Status != "online" {
		t.Errorf("runners: %+v, %v", page.Items, err)
	}
	id := w.submit("\n  - name: build\n    steps: ['true']\n", nil)
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	b := w.close()
	if n := b.count("runner"); n != 1 {
		t.Errorf("%d runners are recorded", n)
	}
	if n := b.count("session", "state=open"); n != 0 {
		t.Errorf("%d sessions are open", n)
	}
}
