package runner

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process"
)

// realRig is a runner with the process executor in front of the fake control
// plane, over loopback connections.
func realRig(t testing.TB, s *controlPlane, slots int) *rig {
	t.Helper()
	r := newRig(t, s, listen(t, s))
	e, err := process.New(process.Options{Dir: filepath.Join(t.TempDir(), "executor")}, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	r.config.Executors = []executor.Executor{e}
	r.config.Slots = slots
	return r
}

func TestRealProcessesFromClaimToCompletion(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	spec := job(
		"echo hi; echo oops >&2; cat README",
		"echo version=1.2 >> $FORGECI_OUTPUT; mkdir -p target; echo jar > target/app.jar",
		"sh -c 'sleep 300 & sleep 300' & exit 0",
	)
	spec.Outputs = []string{"version"}
	spec.Publish = []ci.ArtifactPublish{{Name: "app", Paths: []string{"target/app.jar"}}}
	j := s.add(spec, map[string]string{"README": "from the source\n"})
	r := realRig(t, s, 2).start()
	r.finish(j)
	r.drain()
	c := j.complete
	if c.Conclusion != ci.ConclusionSuccess || c.Outputs["version"] != "1.2" || len(c.Artifacts) != 1 || !c.Evidence.Terminated {
		t.Fatalf("%+v", c)
	}
	if c.Evidence.Killed < 2 {
		t.Errorf("%d background processes were ended", c.Evidence.Killed)
	}
	if got := j.text(0, protocol.Stdout); got != "hi\nfrom the source\n" {
		t.Errorf("stdout %q", got)
	}
	if got := j.text(0, protocol.Stderr); got != "oops\n" {
		t.Errorf("stderr %q", got)
	}
}

// What a step is given is on the page that says so, and nothing else is.
func TestAStepHasTheVariablesOfThePageAndNoOthers(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "environment.md"))
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, m := range regexp.MustCompile("`([A-Z_]+)`").FindAllSubmatch(page, -1) {
		told[string(m[1])] = true
	}
	s := newControlPlane(t, time.Minute)
	j := s.add(job("tr '\\0' '\\n' </proc/$$/environ"), nil)
	r := realRig(t, s, 1).start()
	r.finish(j)
	r.drain()
	given := 0
	for line := range strings.Lines(j.text(0, protocol.Stdout)) {
		name, _, _ := strings.Cut(line, "=")
		if given++; !told[name] {
			t.Errorf("docs/environment.md does not have %s", name)
		}
	}
	if given < 20 {
		t.Errorf("%d variables were given", given)
	}
}

func TestRealProcessesAreEndedWhenTheLeaseIsLost(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, 3*time.Second)
	j := s.add(job("trap '' TERM; echo up; setsid sleep 300 & while :; do sleep 0.1; done"), nil)
	r := realRig(t, s, 1).start()
	waitFor(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return j.text(0, protocol.Stdout) == "up\n"
	})
	s.mu.Lock()
	j.leased = false
	lost := time.Now()
	s.mu.Unlock()
	waitFor(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.reported) == 1
	})
	if d := time.Since(lost); d > 6*time.Second {
		t.Errorf("the job was gone %s after its lease", d)
	}
	r.drain()
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
		<-tick.C
	}
}

// BenchmarkDrain drains trivial jobs over 32 slots.
func BenchmarkDrain(b *testing.B) {
	for _, kind := range []string{"scripted", "process"} {
		b.Run(kind, func(b *testing.B) {
			s := newControlPlane(b, time.Minute)
			r := realRig(b, s, 32)
			if kind == "scripted" {
				r.config.Executors = []executor.Executor{r.exec}
			}
			var all []*fakeJob
			for range b.N {
				all = append(all, s.add(job("echo hi"), map[string]string{"README": "x"}))
			}
			b.ResetTimer()
			r.start()
			for _, j := range all {
				r.finish(j)
			}
			b.StopTimer()
			r.drain()
			for _, j := range all {
				if j.complete == nil || j.complete.Conclusion != ci.ConclusionSuccess || j.text(0, protocol.Stdout) != "hi\n" {
					b.Fatalf("%+v", j.complete)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
			calls := 0
			for _, n := range s.calls {
				calls += n
			}
			b.ReportMetric(float64(calls)/float64(b.N), "calls/job")
		})
	}
}

func TestCase_YAML_11_TheFailingLineStandsInTheLog(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	j := s.add(job("echo one\nfalse\necho never"), nil)
	r := realRig(t, s, 1).start()
	r.finish(j)
	r.drain()
	if got := j.text(0, protocol.Stdout); got != "one\n" {
		t.Errorf("stdout %q", got)
	}
	if got := j.text(0, protocol.System); got != "forgeci: line 2 of the script failed with exit code 1\n" {
		t.Errorf("the runner's own words: %q", got)
	}
}

// A job is cancelled while its source is on the way, and another's download is
// cut: the next job on the runner meets a whole tree and nothing of them.
func TestCase_CAN_02_AnInterruptedCheckoutLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	files := map[string]string{"README": "whole\n", "src/a": "a", "src/b": "b"}
	cancelled, cut := s.add(job("true"), files), s.add(job("true"), files)
	nth := 0
	s.fault = func(route string, _ int) string {
		if route != protocol.RouteFetchSource {
			return ""
		}
		nth++
		switch nth {
		case 1: // cancelled in the middle
			cancelled.cancel = true
			return ""
		case 2: // the answer never arrives
			return "lost"
		default:
			return ""
		}
	}
	r := realRig(t, s, 1).start()
	r.finish(cancelled)
	r.finish(cut)
	next := s.add(job("find . -type f | sort; cat README; ls -A ..; test -z \"$(ls -A $HOME)\""), files)
	r.finish(next)
	r.drain()
	if cancelled.complete.Conclusion != ci.ConclusionCancelled {
		t.Errorf("the cancelled job: %+v", cancelled.complete)
	}
	if c := next.complete; c.Conclusion != ci.ConclusionSuccess {
		t.Errorf("the next job: %+v", c)
	}
	if got := next.text(0, protocol.Stdout); !strings.HasPrefix(got, "./README\n./src/a\n./src/b\nwhole\n") {
		t.Errorf("the next job sees %q", got)
	}
}

// CAN-01: steps with always() or cancelled() clean up after a cancel, with real
// processes, and one that does not end is ended.
func TestRealProcessesCleanUpAfterACancel(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	file := filepath.Join(t.TempDir(), "resource")
	spec := job(
		"echo made > "+file+"; echo up; sleep 300",
		"echo never",
		"cat "+file+"; rm "+file,
		"trap '' TERM; echo stays; setsid sleep 300 & while :; do sleep 0.1; done",
	)
	spec.Steps[2].If, spec.Steps[3].If = "cancelled()", "always()"
	spec.Steps[3].Timeout = ci.Duration(time.Second)
	j := s.add(spec, nil, func(t *protocol.Ticket) { t.Grace = ci.Duration(12 * time.Second) })
	r := realRig(t, s, 1).start()
	waitFor(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return j.text(0, protocol.Stdout) == "up\n"
	})
	s.cancel(j)
	r.finish(j)
	r.drain()
	if c := j.complete; c.Conclusion != ci.ConclusionCancelled || !c.Evidence.Terminated {
		t.Fatalf("%+v", c)
	}
	for i, want := range []ci.Conclusion{ci.ConclusionCancelled, ci.ConclusionSkipped, ci.ConclusionSuccess, ci.ConclusionTimedOut} {
		if got := j.steps[i].Conclusion; got != want {
			t.Errorf("step %d is %s, not %s", i+1, got, want)
		}
	}
	if got := j.text(2, protocol.Stdout); got != "made\n" {
		t.Errorf("the step that cleans up wrote %q", got)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("what it was to remove is there: %v", err)
	}
}
