package e2e_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
)

// Retrying the failed jobs of a run uses the artifacts of those that succeeded;
// retrying the whole run sees nothing of any earlier run.
func TestCase_RERUN_01_RetryOfFailedJobsUsesWhatSucceeded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	w.machine("a").start()
	first := w.submit(`
  - name: build
    steps:
      - 'echo ran >>"$SIGNS/builds"; [ -e "$SIGNS/nothing" ] || head -c 100000 /dev/urandom >bin'
      - 'if [ -e bin ]; then sha256sum bin; fi'
    artifacts: {publish: [{name: bin, path: bin, optional: true}]}
  - name: publish
    artifacts: {restore: [{from_job: build, name: bin, path: bin}]}
    steps:
      - sha256sum bin
      - '[ -e "$SIGNS/mended" ]'
  - name: after
    steps: ['true']
`, nil)
	w.outcome(w.finished(first), "failed job_failed", map[string]string{"build": "success", "publish": "failed exit", "after": "skipped needs"})
	build := w.job(first, "build")
	made := w.log(build.ID, 1, "stdout")

	w.sign("mended")
	second := w.retry(first, "--failed")
	run := w.finished(second)
	w.outcome(run, "success", map[string]string{"build": "success pinned", "publish": "success", "after": "success"})
	if run.ParentRun != first {
		t.Errorf("parent of the retry is %q", run.ParentRun)
	}
	if j := w.job(second, "build"); j.PinnedFrom != build.ID || j.Attempts != 0 {
		t.Errorf("build of the retry is pinned from %q and has %d attempts", j.PinnedFrom, j.Attempts)
	}
	if got := w.log(w.job(second, "publish").ID, 1, "stdout"); got != made {
		t.Errorf("publish got %q, build made %q", got, made)
	}
	if got := w.read("builds"); got != "ran\n" {
		t.Errorf("build ran again: %q", got)
	}

	w.sign("nothing")
	third := w.retry(second)
	w.outcome(w.finished(third), "failed job_failed", map[string]string{
		"build": "success", "publish": "failed artifact_missing", "after": "skipped needs",
	})
	w.close()
}

// retry retries a run by the command line.
func (w *world) retry(id ci.RunID, args ...string) ci.RunID {
	w.t.Helper()
	r := w.forgeci(append([]string{"retry", string(id)}, args...)...)
	if r.Code != 0 {
		w.t.Fatalf("forgeci retry ended with %d", r.Code)
	}
	return ci.RunID(strings.TrimSpace(r.Stdout))
}

// A retry runs what was submitted, whatever has become of the checkout since:
// files and workflow changed, or nothing left of it.
func TestCase_RERUN_02_RetryUsesWhatWasSubmitted(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(dir string) error{
		"changed": func(dir string) error {
			return errors.Join(
				os.WriteFile(filepath.Join(dir, ".forgeci.yaml"), []byte("version: 1\njobs:\n  other: {steps: [exit 9]}\n"), 0o644),
				os.WriteFile(filepath.Join(dir, "input"), []byte("new\n"), 0o644),
				os.WriteFile(filepath.Join(dir, "more"), []byte("new\n"), 0o644),
			)
		},
		"not a workflow any more": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, ".forgeci.yaml"), []byte("jobs: [:"), 0o644)
		},
		"workflow deleted": func(dir string) error { return os.Remove(filepath.Join(dir, ".forgeci.yaml")) },
		"all deleted":      os.RemoveAll,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: calm})
			w.machine("a").start()
			dir := w.checkout("\n  - name: build\n    steps: ['cat input; ls', '[ -e \"$SIGNS/mended\" ]']\n", map[string]string{"input": "old\n"})
			r := w.forgeci("submit", dir)
			first := ci.RunID(strings.TrimSpace(r.Stdout))
			was := w.finished(first)
			w.outcome(was, "failed job_failed", map[string]string{"build": "failed exit"})
			if err := change(dir); err != nil {
				t.Fatal(err)
			}
			w.sign("mended") // what it failed for was outside
			for _, args := range [][]string{nil, {"--failed"}} {
				again := w.finished(w.retry(first, args...))
				w.outcome(again, "success", map[string]string{"build": "success"})
				if again.ParentRun != first || again.SourceDigest != was.SourceDigest {
					t.Errorf("the retry is of %q, its source is %s; it was %s", again.ParentRun, again.SourceDigest, was.SourceDigest)
				}
				if got := w.log(w.job(again.ID, "build").ID, 1, "stdout"); got != "old\ninput\n" {
					t.Errorf("the retry saw %q", got)
				}
			}
			w.close()
		})
	}
}

// A runner that is lost again and again: attempts until the policy's or the
// installation's budget is used up, then a dead letter; each attempt has its own
// log, and what needs the job waits for the last attempt.
func TestCase_RERUN_04_RunnerLostUntilTheBudgetIsUsedUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: 5 * time.Minute})
	a := w.machine("a").start()
	id := w.submit(counting("{max: 2, on: [runner_lost]}")+"  - name: after\n    steps: ['true']\n", nil)
	for attempt := range 3 {
		w.came("build", attempt+1)
		if j := w.job(id, "after"); j.State != ci.StateWaiting {
			t.Errorf("after is %s while build is tried again", j.State)
		}
		a.kill()
		a.start()
	}
	w.outcome(w.finished(id), "failed infrastructure", map[string]string{"build": "failed attempts_exhausted", "after": "skipped needs"})
	job := w.job(id, "build")
	w.attempts(job, "aborted runner_restarted", "aborted runner_restarted", "aborted runner_restarted")
	for _, at := range job.Attempt {
		w.begun(w.log(job.ID, at.Epoch, "stdout"), int(at.Epoch))
	}
	if r := w.forgeci("deadletters"); r.Code != 0 || !strings.Contains(r.Stdout, string(job.ID)) {
		t.Errorf("forgeci deadletters (%d): %s", r.Code, r.Stdout)
	}
	w.close()
}

// A failing command is a result, whatever its exit code, unless the policy names
// the code; a timeout has a cause of its own; a cancel during the pause before
// the next attempt prevents it.
func TestCase_RERUN_04_ResultsAreNotRetried(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: 5 * time.Minute})
	w.machine("a").start()
	id := w.submit(`
  one: {retry: {max: 2, on: [runner_lost]}, steps: [exit 1]}
  killed: {retry: {max: 2, on: [runner_lost]}, steps: [kill -KILL $$]}
  terminated: {retry: {max: 2, on: [runner_lost]}, steps: [exit 143]}
  last: {retry: {max: 2, on: [runner_lost]}, steps: [exit 255]}
  named: {retry: {max: 1, on: [{exit: [75]}]}, steps: [exit 75]}
  mended: {retry: {max: 1, on: [{exit: [75]}]}, steps: ['[ "$CI_ATTEMPT" = 2 ] || exit 75']}
  slow: {timeout: 1s, retry: {max: 2, on: [runner_lost]}, steps: [sleep 60]}
`, nil)
	w.outcome(w.finished(id), "failed job_failed", map[string]string{
		"one": "failed exit", "killed": "failed exit", "terminated": "failed exit", "last": "failed exit",
		"named": "failed exit", "mended": "success", "slow": "timed_out timeout",
	})
	for _, name := range []string{"one", "killed", "terminated", "last"} {
		w.attempts(w.job(id, name), "failed exit *")
	}
	w.attempts(w.job(id, "slow"), "timed_out timeout *")
	w.attempts(w.job(id, "named"), "failed exit", "failed exit *")
	w.attempts(w.job(id, "mended"), "failed exit", "success *")
	w.close()
}

// No attempt begins after a cancel that came during the pause before it.
func TestCase_RERUN_04_CancelInThePauseBeforeTheNextAttempt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: 5 * time.Minute})
	a := w.machine("a").start()
	id := w.submit(counting("{max: 2, on: [runner_lost]}"), nil)
	for attempt := range 2 { // the second pause is at least a second long
		w.came("build", attempt+1)
		a.kill()
		a.boot()
	}
	w.until(patience, "the end of attempt 2", func() bool { return w.job(id, "build").State == ci.StateReady })
	if _, err := w.people.Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	w.outcome(w.finished(id), "cancelled user", map[string]string{"build": "cancelled user"})
	pass(2500 * time.Millisecond) // the pause would be over
	w.attempts(w.job(id, "build"), "aborted runner_restarted", "aborted runner_restarted")
	w.close()
}
