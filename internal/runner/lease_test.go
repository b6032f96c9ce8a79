package runner

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

func TestCase_QUE_05_lost_claim_reply_gives_the_same_job_once(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		lost := false
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteClaim && len(s.queue) > 0 && !lost {
				lost = true
				return "lost"
			}
			return ""
		}
		j := s.add(job("echo once"), nil)
		start := time.Now()
		r.start().finish(j)
		if d := time.Since(start); d > 15*time.Second {
			t.Errorf("the job ended after %s", d)
		}
		r.drain()
		if !lost || j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess {
			t.Fatalf("lost %v, completion %+v", lost, j.complete)
		}
		if ran := r.exec.scripts(); len(ran) != 1 {
			t.Errorf("steps run: %q", ran)
		}
	})
}

// A claim whose replies are lost until its lease is over leaves a slot that the
// server counts as taken: the runner opens a session that says that nothing of it
// is here, while its other job goes on under its own lease.
func TestTicketThatNeverArrivedIsRuledOut(t *testing.T) {
	t.Parallel()
	inBubble(t, 10*time.Second, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.config.Slots = 2
		r.exec.steps["work"] = func(context.Context, executor.Step) executor.Result {
			time.Sleep(time.Minute)
			return executor.Result{}
		}
		began := time.Now()
		s.fault = func(route string, nth int) string {
			if route == protocol.RouteClaim && nth > 1 && time.Since(began) < 30*time.Second {
				return "lost"
			}
			return ""
		}
		first := s.add(job("work"), nil)
		r.start()
		time.Sleep(time.Second)
		second := s.add(job("echo never"), nil)
		time.Sleep(40 * time.Second)
		s.mu.Lock()
		hello := s.hello[len(s.hello)-1]
		s.mu.Unlock()
		alive := []protocol.AttemptRef{{Job: first.lease.Job, Epoch: first.lease.Epoch}}
		if !hello.Swept || !slices.Equal(hello.Alive, alive) || len(s.hello) != 2 {
			t.Errorf("the latest of %d sessions says %+v, want alive %v", len(s.hello), hello, alive)
		}
		r.finish(first)
		r.drain()
		if first.complete == nil || first.complete.Conclusion != ci.ConclusionSuccess {
			t.Errorf("the other job ended with %+v", first.complete)
		}
		if second.complete != nil {
			t.Errorf("a job whose ticket was lost ended with %+v", second.complete)
		}
	})
}

// A call that vanishes in a dead connection is made again after seconds, on a
// connection of its own; each further try has more patience with a slow server.
func TestCallIntoTheVoidIsMadeAgainSoon(t *testing.T) {
	t.Parallel()
	for _, route := range []string{protocol.RouteComplete, protocol.RouteAppendLog, protocol.RoutePhase} {
		t.Run(route, func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				var at []time.Time
				s.held, s.release = map[string]bool{route: true}, make(chan struct{})
				defer close(s.release)
				s.fault = func(called string, nth int) string {
					if called == route {
						at = append(at, time.Now())
						s.held[route] = nth < 3
					}
					return ""
				}
				j := s.add(job("echo hi"), nil)
				r.start().finish(j)
				r.drain()
				if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess {
					t.Fatalf("completion %+v", j.complete)
				}
				if first, second := at[1].Sub(at[0]), at[2].Sub(at[1]); first > firstLimit+time.Second || second > 2*firstLimit+2*time.Second {
					t.Errorf("made again after %v, then after %v", first, second)
				}
			})
		})
	}
}

func TestLostCompletionReplyIsAskedForAgain(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.fault = func(route string, nth int) string {
			if route == protocol.RouteComplete && nth <= 2 {
				return "lost"
			}
			return ""
		}
		j := s.add(job("echo hi"), nil)
		r.start().finish(j)
		r.drain()
		if j.completed != 3 || j.refusals != 0 || len(s.reported) != 0 {
			t.Errorf("%d completions, %d refusals, %d reported as lost", j.completed, j.refusals, len(s.reported))
		}
	})
}

// The reply of the completion is lost and no server answers until the lease is
// over; the runner still learns that its result was taken.
func TestLostCompletionReplyIsAskedForOnceMoreAfterTheLease(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.fault = func(route string, nth int) string {
			if route == protocol.RouteComplete && nth == 1 {
				go p.cut(true)
				return "lost"
			}
			return ""
		}
		j := s.add(job("echo hi"), nil)
		r.start().finish(j)
		time.Sleep(54 * time.Second)
		p.cut(false)
		time.Sleep(5 * time.Second)
		r.drain()
		if j.completed < 2 || len(s.reported) != 0 {
			t.Errorf("%d completions, %d reported as lost", j.completed, len(s.reported))
		}
	})
}

// LP-10: an outage shorter than TTL − margin loses nothing, in any phase.
func TestServerAwayShorterThanTheLeaseLosesNothing(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		tick := func(ctx context.Context, step executor.Step) executor.Result {
			for i := range 120 {
				fmt.Fprintf(step.Stdout, "line %d\n", i)
				if pause(ctx, time.Second) != nil {
					return executor.Result{ExitCode: 137, Signal: "SIGKILL"}
				}
			}
			return executor.Result{}
		}
		r.exec.steps["tick"] = tick
		j := s.add(job("tick", "echo after"), nil)
		r.start()
		time.Sleep(20*time.Second - time.Millisecond) // just before the first renewal: the worst moment
		p.cut(true)
		time.Sleep(34 * time.Second) // TTL − margin is 55 s, 20 of them have passed
		p.cut(false)
		r.finish(j)
		r.drain()
		if j.complete.Conclusion != ci.ConclusionSuccess || j.refusals != 0 {
			t.Fatalf("%+v, %d refusals", j.complete, j.refusals)
		}
		if got := j.text(0, protocol.Stdout); strings.Count(got, "\n") != 120 || !strings.HasSuffix(got, "line 119\n") {
			t.Errorf("log has %d lines", strings.Count(got, "\n"))
		}
	})
}

// An outage longer than TTL − margin: the runner ends the job by itself before
// the server can give it to another (EX-9, RELIABILITY R08), and reports so.
func TestServerAwayLongerThanTheLeaseEndsTheJobBeforeItsTTL(t *testing.T) {
	t.Parallel()
	for _, ttl := range []time.Duration{2 * time.Second, 15 * time.Second, time.Minute} {
		inBubble(t, ttl, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			started := make(chan struct{})
			var told, gone time.Time
			r.exec.steps["sleep"] = func(ctx context.Context, _ executor.Step) executor.Result {
				close(started)
				<-ctx.Done()
				at := time.Now()
				time.Sleep(min(executor.Grace(ctx, 10*time.Second), ttl/12))
				s.mu.Lock()
				defer s.mu.Unlock()
				told, gone = at, time.Now()
				return executor.Result{ExitCode: 137, Signal: "SIGKILL"}
			}
			j := s.add(job("sleep", "echo never"), nil)
			r.start()
			<-started
			time.Sleep(ttl)
			p.cut(true)
			cut := time.Now()
			time.Sleep(2 * ttl)
			s.mu.Lock()
			expires := j.expires
			if told.IsZero() {
				t.Errorf("ttl %s: the job runs on without a lease", ttl)
			}
			if gone.After(expires) {
				t.Errorf("ttl %s: the job ended %s after its lease", ttl, gone.Sub(expires))
			}
			if told.Sub(cut) < ttl-ttl/3-ci.LeaseMargin(ttl)-time.Second {
				t.Errorf("ttl %s: the job was ended %s after the cut, with a good lease", ttl, told.Sub(cut))
			}
			s.mu.Unlock()
			p.cut(false)
			time.Sleep(20 * time.Second)
			s.mu.Lock()
			if want := (protocol.AttemptRef{Job: j.lease.Job, Epoch: 1}); len(s.reported) != 1 || s.reported[0] != want {
				t.Errorf("ttl %s: reported as ended: %v", ttl, s.reported)
			}
			if j.complete != nil || len(r.exec.scripts()) != 1 {
				t.Errorf("ttl %s: completion %v, steps %q", ttl, j.complete, r.exec.scripts())
			}
			// It works on for the same server afterwards.
			s.mu.Unlock()
			next := s.add(job("echo next"), nil)
			r.finish(next)
			r.drain()
		})
	}
}

// RUN-01, R07: the runner learns by its first refused call, whichever it is,
// that the job is another's, and the job is gone within seconds.
func TestCase_RUN_01_first_refusal_kills_the_job(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"heartbeat", "log"} {
		inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			started := make(chan struct{})
			var gone time.Time
			r.exec.steps["noisy"] = func(ctx context.Context, step executor.Step) executor.Result {
				close(started)
				for ctx.Err() == nil {
					if by == "log" {
						fmt.Fprintln(step.Stdout, "A")
					}
					_ = pause(ctx, 300*time.Millisecond)
				}
				time.Sleep(executor.Grace(ctx, 10*time.Second))
				s.mu.Lock()
				defer s.mu.Unlock()
				gone = time.Now()
				return executor.Result{ExitCode: 137, Signal: "SIGKILL"}
			}
			j := s.add(job("noisy", "echo never"), nil)
			r.start()
			<-started
			time.Sleep(500 * time.Millisecond)
			s.mu.Lock()
			j.leased = false // given to another
			chunks := len(j.chunks)
			ended := time.Now()
			s.mu.Unlock()
			time.Sleep(30 * time.Second)
			limit := 5 * time.Second
			if by == "heartbeat" {
				limit += ci.RenewEvery(time.Minute)
			}
			s.mu.Lock()
			if gone.IsZero() || gone.Sub(ended) > limit {
				t.Errorf("by %s: the job was gone after %s", by, gone.Sub(ended))
			}
			if len(j.chunks) != chunks {
				t.Errorf("by %s: log grew from %d to %d chunks", by, chunks, len(j.chunks))
			}
			if j.refusals > 3 {
				t.Errorf("by %s: %d refused requests (LOG-10 allows 3)", by, j.refusals)
			}
			if len(s.reported) != 1 || j.complete != nil {
				t.Errorf("by %s: reported %v, completion %v", by, s.reported, j.complete)
			}
			s.mu.Unlock()
			r.drain()
		})
	}
}

func TestCase_CAN_01_cancelled_job_ends_within_its_grace(t *testing.T) {
	t.Parallel()
	const grace = time.Second
	for name, c := range map[string]struct {
		watch string // the fault of the route
		most  time.Duration
	}{
		"":                              {"", grace},
		"the server knows no watch":     {"404", ci.RenewEvery(5*time.Minute) + grace},
		"the answer of a watch is lost": {"lost", ci.RenewEvery(5*time.Minute) + grace},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, 5*time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				s.fault = func(route string, _ int) string {
					if route == protocol.RouteWatch {
						return c.watch
					}
					return ""
				}
				started := make(chan struct{})
				r.exec.steps["hang"] = hang(started)
				spec := job("hang", "echo never")
				spec.Steps[1].If = "always()"
				j := s.add(spec, nil)
				r.start()
				<-started
				time.Sleep(10 * time.Second)
				s.cancel(j)
				at := time.Now()
				r.finish(j)
				if d := time.Since(at); d > c.most+100*time.Millisecond {
					t.Errorf("ended after %s", d)
				}
				if j.complete.Conclusion != ci.ConclusionCancelled || !j.complete.Evidence.Terminated {
					t.Errorf("completion %+v", j.complete)
				}
				if len(r.exec.scripts()) != 1 || j.steps[1].Conclusion != ci.ConclusionSkipped {
					t.Errorf("steps %q, second %s", r.exec.scripts(), j.steps[1].Conclusion)
				}
				next := s.add(job("echo next"), nil)
				r.finish(next)
				r.drain()
			})
		})
	}
}

// The cancel arrives while the job prepares or reports: calls are refused as
// cancelling, and only a cancelled completion is sent.
func TestCancelIsLearnedFromAnyRefusedCall(t *testing.T) {
	t.Parallel()
	for _, route := range []string{protocol.RoutePhase, protocol.RouteFetchSource, protocol.RouteComplete} {
		inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			j := s.add(job("echo hi"), nil)
			s.fault = func(at string, _ int) string {
				if at == route {
					j.cancel = true
				}
				return ""
			}
			r.start().finish(j)
			r.drain()
			if j.complete.Conclusion != ci.ConclusionCancelled {
				t.Errorf("%s: completion %+v", route, j.complete)
			}
		})
	}
}

// A claim answered after a long poll leaves little of the lease; it is renewed
// before it can run out.
func TestLeaseOfALongPollIsRenewedInTime(t *testing.T) {
	t.Parallel()
	inBubble(t, 2*time.Second, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.exec.steps["sleep"] = func(ctx context.Context, _ executor.Step) executor.Result {
			if pause(ctx, 20*time.Second) != nil {
				return executor.Result{ExitCode: 137}
			}
			return executor.Result{}
		}
		r.start()
		time.Sleep(990 * time.Millisecond) // polls are held for half a TTL
		j := s.add(job("sleep"), nil)
		r.finish(j)
		r.drain()
		if j.complete.Conclusion != ci.ConclusionSuccess {
			t.Errorf("%+v", j.complete)
		}
	})
}

// DB-05, R23: a runner tells the server what its clock shows, says in its log how
// far that is off, and goes on as if it were not; durations are never negative.
func TestCase_DB_05_clock_difference_is_told_and_changes_nothing(t *testing.T) {
	t.Parallel()
	const line = "this host's clock differs from the server's"
	for _, differs := range []time.Duration{0, 17 * time.Minute, -17 * time.Minute, 24 * time.Hour} {
		t.Run(differs.String(), func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				var said said
				r.config.Log = slog.New(slog.NewTextHandler(&said, nil))
				s.differs = differs
				r.exec.steps["work"] = func(context.Context, executor.Step) executor.Result {
					time.Sleep(time.Minute)
					return executor.Result{}
				}
				j := s.add(job("work"), nil)
				began := time.Now()
				r.start().finish(j)
				r.drain()
				if j.complete.Conclusion != ci.ConclusionSuccess || len(s.byClaim) != 1 || j.refusals != 0 {
					t.Errorf("%d attempts, %d refusals: %+v", len(s.byClaim), j.refusals, j.complete)
				}
				if job, step := j.complete.Duration.Std(), j.complete.Steps[0].Duration.Std(); job < time.Minute || step != time.Minute {
					t.Errorf("the job took %v, its step %v", job, step)
				}
				if at := s.hello[0].At; at.Before(began) || at.After(began.Add(time.Second)) {
					t.Errorf("the session says that the runner's clock shows %v, it was %v", at, began)
				}
				text := said.String()
				if told := strings.Contains(text, line) && strings.Contains(text, "level=WARN") && strings.Contains(text, "by="+differs.String()); told != (differs != 0) {
					t.Errorf("said of a clock that is off by %v:\n%s", differs, text)
				}
			})
		})
	}
}

// said is a log that is read while it is written.
type said struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

// String returns what has been written.
func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func TestRunnerIsBackWithinASecondOfTheServer(t *testing.T) {
	t.Parallel()
	for _, away := range []time.Duration{time.Second, 10 * time.Second, time.Minute} {
		inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			r.start()
			time.Sleep(time.Second)
			p.cut(true)
			time.Sleep(away)
			p.cut(false)
			back := time.Now()
			j := s.add(job("echo hi"), nil)
			r.finish(j)
			limit := max(1100*time.Millisecond, away/backoffShare+100*time.Millisecond)
			if d := time.Since(back); d > limit {
				t.Errorf("away %s: the job ended %s after the server was back", away, d)
			}
			r.drain()
		})
	}
}

func TestRefusedCredentialIsReplacedWhileJobsRun(t *testing.T) {
	t.Parallel()
	for _, slots := range []int{1, 2} { // with a slot free the runner polls meanwhile
		inBubble(t, 15*time.Second, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			started := make(chan struct{})
			r.config.Slots = slots
			r.exec.steps["sleep"] = func(ctx context.Context, _ executor.Step) executor.Result {
				close(started)
				if pause(ctx, time.Minute) != nil {
					return executor.Result{ExitCode: 137}
				}
				return executor.Result{}
			}
			j := s.add(job("sleep"), nil)
			r.start()
			<-started
			s.mu.Lock()
			clear(s.tokens) // rotated
			s.mu.Unlock()
			r.finish(j)
			r.finish(s.add(job("echo next"), nil)) // it is still there
			r.drain()
			if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess || s.register != 2 {
				t.Errorf("%d slots: %+v after %d registrations", slots, j.complete, s.register)
			}
		})
	}
}

// A poll is refused for good while a job runs: the runner opens another session,
// keeps the job under the one that it was given in, and takes jobs in both.
func TestAJobGoesOnWhenItsSessionIsFollowedByAnother(t *testing.T) {
	t.Parallel()
	inBubble(t, 15*time.Second, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		started := make(chan struct{})
		r.exec.steps["sleep"] = sleeper(2*time.Minute, started)
		refuse := false
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteClaim && refuse {
				refuse = false
				return "409"
			}
			return ""
		}
		j := s.add(job("sleep"), nil)
		r.start()
		<-started
		s.mu.Lock()
		refuse = true
		s.mu.Unlock()
		time.Sleep(time.Minute)
		beside := s.add(job("echo beside"), nil)
		r.finish(beside)
		r.finish(j)
		r.finish(s.add(job("echo behind"), nil))
		r.drain()
		if s.sessions != 2 || j.lease.Session == beside.lease.Session || !slices.Contains(s.hello[1].Alive, protocol.AttemptRef{Job: j.lease.Job, Epoch: 1}) {
			t.Errorf("%d sessions, jobs of %s and %s, the last said %+v", s.sessions, j.lease.Session, beside.lease.Session, s.hello)
		}
		if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess {
			t.Errorf("%+v", j.complete)
		}
	})
}

func TestEndedSessionIsOpenedAgain(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.start()
		synctest.Wait()
		s.mu.Lock()
		s.current = "ses_other"
		s.mu.Unlock()
		time.Sleep(time.Minute)
		j := s.add(job("echo hi"), nil)
		r.finish(j)
		r.drain()
		if s.sessions != 2 {
			t.Errorf("%d sessions", s.sessions)
		}
	})
}

// A server that refuses every claim is not hammered.
func TestRefusedClaimsAreNotRepeatedInATightLoop(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteClaim {
				return "400"
			}
			return ""
		}
		r.start()
		time.Sleep(10 * time.Minute)
		if n := s.count(protocol.RouteClaim); n > 200 {
			t.Errorf("%d claims in ten minutes", n)
		}
		r.drain()
	})
}

// Idle, the runner holds one poll and says nothing else.
func TestIdleRunnerHoldsOnePoll(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.config.Slots = 8
		r.start()
		time.Sleep(10*time.Minute + time.Second)
		if n := s.count(protocol.RouteClaim); n != 21 {
			t.Errorf("%d polls in ten minutes", n)
		}
		if n := s.count(protocol.RouteHeartbeat); n != 0 {
			t.Errorf("%d heartbeats without a lease", n)
		}
		if n := s.count(protocol.RouteWatch); n != 0 {
			t.Errorf("%d watches without a lease", n)
		}
		r.drain()
	})
}
