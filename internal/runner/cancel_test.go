package runner

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// partingSteps is a job whose first step is cancelled, with conditions of all kinds
// behind it.
func partingSteps() ci.JobSpec {
	spec := job("work", "echo never", "echo always", "echo cancelled", "echo failure", "echo success", "clean up", "echo late")
	for i, condition := range []string{"", "", "always()", "cancelled()", "failure()", "success()", "always()", "always()"} {
		spec.Steps[i].If = condition
	}
	return spec
}

// obedient ends when it is told to, after a while.
func obedient(started chan<- struct{}, takes time.Duration) func(context.Context, executor.Step) executor.Result {
	return func(ctx context.Context, _ executor.Step) executor.Result {
		close(started)
		<-ctx.Done()
		time.Sleep(takes)
		return executor.Result{ExitCode: 143, Signal: "SIGTERM"}
	}
}

// CAN-01: what steps do after a cancel is part of the grace.
func TestStepsThatSayThatTheyRunAfterACancelDoSoWithinTheGrace(t *testing.T) {
	t.Parallel()
	const (
		grace = time.Second // the fake server's
		done  = ci.ConclusionSuccess
		no    = ci.ConclusionSkipped
	)
	ends := func(context.Context, executor.Step) executor.Result { return executor.Result{} }
	for name, c := range map[string]struct {
		takes   time.Duration // the cancelled step, to end
		cleanUp func(context.Context, executor.Step) executor.Result
		limit   time.Duration // of the step that cleans up
		each    []ci.Conclusion
	}{
		"they end":              {0, ends, 0, []ci.Conclusion{no, done, done, no, no, done, done}},
		"one hangs":             {0, hang(nil), 0, []ci.Conclusion{no, done, done, no, no, ci.ConclusionTimedOut, no}},
		"one has its own limit": {0, hang(nil), grace * 5 / 8, []ci.Conclusion{no, done, done, no, no, ci.ConclusionTimedOut, no}},
		"no time is left":       {grace - grace/8, ends, 0, []ci.Conclusion{no, no, no, no, no, no, no}},
	} {
		inBubble(t, 5*time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			started := make(chan struct{})
			r.exec.steps["work"], r.exec.steps["clean up"] = obedient(started, c.takes), c.cleanUp
			spec := partingSteps()
			spec.Steps[6].Timeout = ci.Duration(c.limit)
			j := s.add(spec, nil)
			r.start()
			<-started
			s.cancel(j)
			at := time.Now()
			r.finish(j)
			if d := time.Since(at); d > grace+100*time.Millisecond {
				t.Errorf("%s: ended after %s", name, d)
			}
			r.drain()
			if j.complete.Conclusion != ci.ConclusionCancelled || !j.complete.Evidence.Terminated {
				t.Errorf("%s: completion %+v", name, j.complete)
			}
			var each []ci.Conclusion
			for i := range spec.Steps {
				each = append(each, j.steps[i].Conclusion)
			}
			if diff := cmp.Diff(slices.Concat([]ci.Conclusion{ci.ConclusionCancelled}, c.each), each); diff != "" {
				t.Errorf("%s: steps (-want +got):\n%s", name, diff)
			}
			if c.limit == 0 && c.each[5] == ci.ConclusionTimedOut && !strings.Contains(j.text(6, protocol.System), "the limit for steps after the cancel of 750ms is reached") {
				t.Errorf("%s: the log does not say why: %q", name, j.text(6, protocol.System))
			}
		})
	}
}

// A job that was failing when it was cancelled still says so to its conditions.
func TestAFailureBeforeACancelIsOneAfterIt(t *testing.T) {
	t.Parallel()
	inBubble(t, 5*time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["exit 3"], r.exec.steps["work"] = exit(3), obedient(started, 0)
		spec := job("exit 3", "work", "echo on failure")
		spec.Steps[1].If, spec.Steps[2].If = "always()", "failure() && cancelled()"
		j := s.add(spec, nil)
		r.start()
		<-started
		s.cancel(j)
		r.finish(j)
		r.drain()
		if j.complete.Conclusion != ci.ConclusionCancelled || j.steps[2].Conclusion != ci.ConclusionSuccess {
			t.Errorf("%s, the last step %s", j.complete.Conclusion, j.steps[2].Conclusion)
		}
	})
}

// A job that is another's, or a runner that must stop, has no time for more steps.
func TestNoStepBeginsWhenTheLeaseIsLostOrTheRunnerIsStopped(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*controlPlane, *rig, *fakeJob){
		"the lease is lost": func(s *controlPlane, _ *rig, j *fakeJob) {
			s.mu.Lock()
			defer s.mu.Unlock()
			j.leased = false
		},
		"the runner is stopped": func(_ *controlPlane, r *rig, _ *fakeJob) { r.runner.Stop() },
	} {
		for _, first := range []bool{true, false} { // before the cancel, or after it
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				started, cleaning := make(chan struct{}), make(chan struct{})
				r.exec.steps["work"], r.exec.steps["clean up"] = obedient(started, 0), obedient(cleaning, 0)
				spec := job("work", "clean up", "echo never")
				spec.Steps[1].If, spec.Steps[2].If = "always()", "always()"
				j := s.add(spec, nil, func(t *protocol.Ticket) { t.Grace = ci.Duration(10 * time.Minute) })
				r.start()
				<-started
				want := []string{"work"}
				if !first {
					s.cancel(j)
					<-cleaning
					want = append(want, "clean up")
				}
				end(s, r, j)
				time.Sleep(time.Minute)
				if diff := cmp.Diff(want, r.exec.scripts()); diff != "" {
					t.Errorf("%s, first %v: steps (-want +got):\n%s", name, first, diff)
				}
				r.runner.Stop()
				r.wait()
			})
		}
	}
}
