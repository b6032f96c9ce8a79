package runner

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

func sleeper(d time.Duration, started chan struct{}) func(context.Context, executor.Step) executor.Result {
	return func(ctx context.Context, _ executor.Step) executor.Result {
		close(started)
		if pause(ctx, d) != nil {
			time.Sleep(executor.Grace(ctx, time.Second))
			return executor.Result{ExitCode: 143, Signal: "SIGTERM"}
		}
		return executor.Result{}
	}
}

func TestCase_RUN_05_one_signal_finishes_the_job_and_takes_no_other(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(5*time.Minute, started)
		j := s.add(job("sleep", "echo end"), nil)
		r.start()
		<-started
		synctest.Wait()
		r.runner.Drain()
		synctest.Wait()
		var queued []*fakeJob
		for range 3 {
			queued = append(queued, s.add(job("echo other"), nil))
		}
		r.wait2(6 * time.Minute)
		if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess {
			t.Fatalf("%+v", j.complete)
		}
		for _, q := range queued {
			if q.leased || q.complete != nil || q.handOver != nil {
				t.Errorf("job %s was claimed after the signal", q.lease.Job)
			}
		}
		if !s.drained || !s.gone {
			t.Errorf("the server was told: drain %v, gone %v", s.drained, s.gone)
		}
	})
}

func TestCase_RUN_05_second_signal_hands_over(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(20*time.Second, started)
		j := s.add(job("sleep", "echo never"), nil)
		r.start()
		<-started
		r.runner.Drain()
		time.Sleep(2 * time.Second)
		r.runner.Stop()
		at := time.Now()
		r.wait()
		if d := time.Since(at); d > 3*time.Second {
			t.Errorf("the process ended %s after the second signal", d)
		}
		if j.handOver == nil || j.handOver.Reason != ci.ReasonRunnerShutdown || !j.handOver.Evidence.Terminated {
			t.Fatalf("hand-over %+v, completion %+v", j.handOver, j.complete)
		}
		if len(r.exec.scripts()) != 1 {
			t.Errorf("steps %q", r.exec.scripts())
		}
	})
}

// A long poll that was open before the signal brings a job: it is handed back
// before any of its code runs.
func TestCase_RUN_05_open_poll_yields_no_job(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.start()
		synctest.Wait()
		j := s.addHidden(job("echo never"))
		s.mu.Lock()
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteDrain && !j.leased {
				// The server gave the job just before it heard of the drain; the reply
				// is lost with the poll that the runner gives up.
				s.lend(s.hidden, s.polling)
			}
			return ""
		}
		s.mu.Unlock()
		r.drain()
		if len(r.exec.scripts()) != 0 {
			t.Errorf("steps %q", r.exec.scripts())
		}
		if j.handOver == nil || j.handOver.Reason != ci.ReasonRunnerShutdown || j.handOver.Evidence.How != "nothing started" {
			t.Errorf("hand-over %+v", j.handOver)
		}
	})
}

func TestEndOfContextIsStop(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(time.Hour, started)
		j := s.add(job("sleep"), nil)
		var err error
		if r.runner, err = New(r.config); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		r.ended = make(chan error, 1)
		go func() { r.ended <- r.runner.Run(ctx) }()
		<-started
		cancel()
		r.wait()
		if j.handOver == nil {
			t.Errorf("no hand-over, completion %+v", j.complete)
		}
	})
}

// The server is away when the runner is told to end: it ends all the same, and
// the next process of the runner tells what became of the job.
func TestStopEndsWithoutAServer(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(time.Hour, started)
		j := s.add(job("sleep"), nil)
		r.start()
		<-started
		p.cut(true)
		r.runner.Stop()
		at := time.Now()
		r.untold = 1
		r.wait()
		if d := time.Since(at); d > 45*time.Second {
			t.Errorf("ended after %s", d)
		}
		p.cut(false)
		r.untold = 0
		r.start()
		time.Sleep(time.Second)
		r.drain()
		if got := s.hello[1].Terminated; len(got) != 1 || got[0].Job != j.lease.Job {
			t.Errorf("the next session reports %v", got)
		}
	})
}

func TestDrainAskedForByTheServer(t *testing.T) {
	t.Parallel()
	inBubble(t, 15*time.Second, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(time.Minute, started)
		j := s.add(job("sleep"), nil)
		r.start()
		<-started
		s.mu.Lock()
		s.askDrain = true
		s.mu.Unlock()
		r.wait2(2 * time.Minute)
		if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess {
			t.Errorf("%+v", j.complete)
		}
	})
}

// A drain means the same to a runner without a job: it hears of it at once, and
// ends.
func TestDrainAskedForByTheServerReachesAnIdleRunner(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.start()
		time.Sleep(time.Minute)
		s.mu.Lock()
		s.askDrain = true
		close(s.wake)
		s.wake = make(chan struct{})
		s.mu.Unlock()
		r.wait2(time.Second)
		if s.sessions != 1 {
			t.Errorf("%d sessions", s.sessions)
		}
	})
}

func TestCase_RUN_04_crash_loop_is_one_runner(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		for range 20 {
			r.start()
			synctest.Wait()
			r.drain()
		}
		if s.register != 1 || s.sessions != 20 {
			t.Errorf("%d registrations, %d sessions", s.register, s.sessions)
		}
	})
}

func TestCase_RUN_04_runner_whose_executor_cannot_work_never_asks(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.add(job("echo hi"), nil)
		r.config.Executors = []executor.Executor{broken{r.exec}}
		var err error
		if r.runner, err = New(r.config); err != nil {
			t.Fatal(err)
		}
		if err := r.runner.Run(t.Context()); !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("Run returned %v", err)
		}
		if len(s.calls) != 0 {
			t.Errorf("calls %v", s.calls)
		}
	})
}

type broken struct{ *scripted }

func (broken) Check(context.Context) error { return errors.New("socket answers 403") }

func TestRunnerWithoutTokenOrCredentialSaysWhatToDo(t *testing.T) {
	t.Parallel()
	for _, token := range []string{"", "fcr_wrong"} {
		inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			r.config.RegistrationToken = token
			var err error
			if r.runner, err = New(r.config); err != nil {
				t.Fatal(err)
			}
			if err := r.runner.Run(t.Context()); !errors.Is(err, ci.ErrUnauthorized) {
				t.Errorf("token %q: Run returned %v", token, err)
			}
		})
	}
}
