package e2e_test

import (
	"strings"
	"syscall"
	"testing"

	"forgeci/internal/testkit"
)

// Lines of any length arrive whole with what stands around them, live, stored and
// after a restart of the server, and the step's exit code is kept.
func TestCase_LOG_01_LongLinesAndTheExitCodeAreKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	w.machine("a").start()
	id := w.submit(`
  long:
    matrix: {n: [66000, 1100000, 20000000]}
    steps:
      - >-
        echo p1; echo p2; echo p3; head -c "$FORGECI_MATRIX_N" /dev/zero | tr '\0' x; echo;
        echo p4; echo p5; echo p6; exit 41
`, nil)
	whole := map[string]string{}
	for name, n := range map[string]int{"long (66000)": 66_000, "long (1100000)": 1_100_000, "long (20000000)": 20_000_000} {
		whole[name] = "p1\np2\np3\n" + strings.Repeat("x", n) + "\np4\np5\np6\n"
	}
	job := w.job(id, "long (20000000)").ID
	follows := testkit.Start(t, testkit.Command{Args: []string{"logs", "-f", string(job)}, Env: []string{
		w.house, "FORGECI_SERVER=" + w.url(), "FORGECI_TOKEN=" + w.token("admin.token"),
	}})
	failed := map[string]string{}
	for name := range whole {
		failed[name] = "failed exit"
	}
	w.outcome(w.finished(id), "failed job_failed", failed)
	follows.Wait(t, patience)
	if got := follows.Stdout(); got != whole["long (20000000)"] {
		t.Errorf("who follows the log got %d bytes, want %d", len(got), len(whole["long (20000000)"]))
	}
	kept := func(when string) {
		t.Helper()
		for name, want := range whole {
			job := w.job(id, name)
			if got := w.log(job.ID, 1, "stdout"); got != want {
				t.Errorf("%s: the log of %s has %d bytes, want %d", when, name, len(got), len(want))
			}
			for what, code := range map[string]*int{"attempt": job.Attempt[0].ExitCode, "step": job.StepList[0].ExitCode} {
				if code == nil {
					t.Errorf("%s: the %s of %s has no exit code", when, what, name)
				} else if *code != 41 {
					t.Errorf("%s: the %s of %s ended with %d", when, what, name, *code)
				}
			}
			w.attempts(job, "failed exit *")
		}
	}
	kept("stored")
	w.server.Signal(t, syscall.SIGTERM)
	w.server.Wait(t, patience)
	w.serve()
	kept("after a restart")
	w.close()
}
