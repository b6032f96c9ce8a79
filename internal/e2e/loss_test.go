package e2e_test

import (
	"strings"
	"testing"
	"time"
)

const oneStep = `
  - name: build
    timeout: 5m
`

// A runner that is killed in the middle of a step leaves nothing behind. Without
// a policy nobody guesses whether the step had effects: the job is aborted, what
// needs it is skipped.
func TestCase_RUN_02_KilledRunnerWithoutPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit(oneStep+"    steps: ['"+shSay+"; "+shCount+"']\n  - name: after\n    steps: ['true']\n", nil)
	w.came("build", 1)
	a.kill()
	w.gone(5 * time.Second)
	run := w.finished(id)
	w.outcome(run, "failed infrastructure", map[string]string{"build": "aborted runner_lost", "after": "skipped needs"})
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
	id := w.submit(oneStep+"    retry: {max: 1, on: [runner_lost]}\n    steps: ['"+shSay+"; "+shCount+"']\n", nil)
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
