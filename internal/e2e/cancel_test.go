package e2e_test

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// stubborn is a step whose whole family ignores SIGTERM and hides in sessions
// and process groups of its own, with a parent that is gone.
const stubborn = `#!/bin/bash
trap '' TERM HUP INT
sleep 600 &
bash -c 'sleep 600 & bash -c "sleep 600 & wait" & wait' &
setsid sh -c 'trap "" TERM; sleep 600 & wait' &
(setsid sh -c 'setsid sleep 600 & exec setsid sleep 600' &)
touch "$SIGNS/$CI_JOB_NAME.$CI_ATTEMPT"
while :; do echo "$CI_ATTEMPT $((i=i+1))"; sleep 0.05; done
`

const stubbornJob = `
  - name: build
    steps: [./stubborn.sh]
`

// Cancel ends the whole tree of a step that ignores SIGTERM, within the grace
// and a second, also when the runner misses the first message of it; the slot is
// free for the next job.
func TestCase_CAN_01_CancelEndsTheWholeTree(t *testing.T) {
	t.Parallel()
	for name, dropped := range map[string]bool{"": false, "message dropped": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cancelStubborn(t, dropped)
		})
	}
}

// The message of the cancellation is lost once: the step is stopped all the
// same, what it wrote before is kept, and the runner does not go on with calls
// that are refused.
func TestCase_LOG_10_CancelMessageIsDroppedOnce(t *testing.T) {
	t.Parallel()
	cancelStubborn(t, true)
}

func cancelStubborn(t *testing.T, dropped bool) {
	t.Helper()
	// A lease so long that the next renewal comes much later than the cancel.
	length, most := 5*time.Minute, ci.DefaultGrace+10*time.Second
	if dropped {
		length = calm
		most = length/3 + ci.DefaultGrace + 2*time.Second
	}
	w := newWorld(t, config{ttl: length})
	a := w.machine("a")
	p := a.through()
	a.start()
	id := w.submit(stubbornJob, map[string]string{"stubborn.sh": stubborn})
	w.came("build", 1)
	next := w.submit("\n  - name: next\n    steps: ['true']\n", nil)
	job := w.job(id, "build")
	var lost <-chan struct{}
	if dropped {
		lost = p.CutReply(1, asks(protocol.RouteHeartbeat))
	}
	if r := w.forgeci("cancel", string(id)); r.Code != 0 {
		t.Errorf("forgeci cancel ended with %d", r.Code)
	}
	before := w.log(job.ID, 1, "stdout")
	began := time.Now()
	if lost != nil {
		<-lost
	}
	// The runner hears of it at once, or with its next renewal when that message is
	// lost; then the grace begins.
	w.gone(most)
	t.Logf("the tree was gone after %v", time.Since(began))
	w.outcome(w.finished(id), "cancelled user", map[string]string{"build": "cancelled user"})
	if r := w.forgeci("show", string(id), "--wait"); r.Code != 3 {
		t.Errorf("forgeci show --wait ended with %d, want 3", r.Code)
	}
	job = w.job(id, "build")
	w.attempts(job, "cancelled cancelled *")
	if !job.FinishedAt.After(began) {
		t.Errorf("the job ended at %v, before it was cancelled at %v", job.FinishedAt, began)
	}
	if job.Attempt[0].Evidence == "" {
		t.Error("nothing proves that the sandbox has ended")
	}
	log := w.log(job.ID, 1, "stdout")
	w.begun(log, 1)
	if !strings.HasPrefix(log, before) {
		t.Error("lines that were readable before the end are not kept")
	}
	w.outcome(w.finished(next), "success", map[string]string{"next": "success"})
	if b := w.close(); b.total() > 3 {
		t.Errorf("the runner went on with refused calls: %v", b.rejections)
	}
}

// A background child that holds the output open does not hold the step; at the
// end of the job it is dead.
func TestCase_CAN_03_BackgroundChildDoesNotHoldTheStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	a := w.machine("a").start()
	id := w.submit(`
  - name: build
    steps:
      - run: sleep 300 & echo started
      - run: nohup sh -c 'sleep 2; echo late; sleep 300' & exit 3
        continue_on_error: true
      - 'true'
`, nil)
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	w.gone(0)
	job := w.job(id, "build")
	w.attempts(job, "success *")
	var codes []int
	for _, s := range job.StepList {
		codes = append(codes, *s.ExitCode)
		if s.Duration == nil || s.Duration.Std() > patience {
			t.Errorf("step %d took %v", s.Index+1, s.Duration)
		}
	}
	if !slices.Equal(codes, []int{0, 3, 0}) {
		t.Errorf("exit codes: %v", codes)
	}
	if got := w.log(job.ID, 1, "stdout"); !strings.HasPrefix(got, "started\n") {
		t.Errorf("log: %q", got)
	}
	if notes := w.log(job.ID, 1, "system"); !strings.Contains(notes, "background") {
		t.Errorf("no note says that a background process holds the output: %q", notes)
	}
	if !a.running() {
		t.Error("the runner has ended")
	}
	w.close()
}

// The job's time limit holds although the runner renews the lease: the step gets
// its signals at the limit and is dead after the grace; what must run in any
// case still runs.
func TestCase_CAN_04_TimeLimitOfTheJob(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	w.machine("a").start()
	id := w.submit(`
  - name: build
    timeout: 2s
    steps:
      - run: 'touch "$SIGNS/build.1"; trap "touch \"$SIGNS/term\"" TERM; while :; do sleep 0.1; done'
        shell: bash
      - run: echo cleaned up
        if: always()
      - echo never
`, nil)
	w.came("build", 1)
	asked := w.until(patience, "SIGTERM", func() bool { return w.there("term") })
	if asked < time.Second {
		t.Errorf("the step got SIGTERM after %v of 2 s", asked)
	}
	w.outcome(w.finished(id), "timed_out timeout", map[string]string{"build": "timed_out timeout"})
	w.gone(0)
	if r := w.forgeci("show", string(id), "--wait"); r.Code != 1 {
		t.Errorf("forgeci show --wait ended with %d, want 1", r.Code)
	}
	job := w.job(id, "build")
	w.attempts(job, "timed_out timeout *")
	if took := job.FinishedAt.Sub(*job.StartedAt); took < 2*time.Second || took > 2*time.Second+ci.DefaultGrace+3*time.Second {
		t.Errorf("the job took %v", took)
	}
	if got := w.log(job.ID, 1, "stdout"); got != "cleaned up\n" {
		t.Errorf("log: %q", got)
	}
	w.close()
}

// A runner that renews and ignores the limit: the server ends the lease by
// itself after the limit, the grace and a TTL.
func TestCase_CAN_04_RunnerIgnoresTheLimit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{})
	a := w.machine("a").start()
	id := w.submit("\n  - name: build\n    timeout: 1s\n    steps: ['"+shSay+"; "+shAwait+"']\n", nil)
	w.came("build", 1)
	began := time.Now()
	a.signal(syscall.SIGSTOP)
	it := a.impostor(w.job(id, "build"), 1)
	end := w.beating(it, []ci.LeaseRef{it.lease})
	w.until(patience, "the end of the job", func() bool { return w.job(id, "build").State == ci.StateFinished })
	limit := time.Second + ci.DefaultGrace + w.config.ttl
	if took := time.Since(began); took < limit-time.Second || took > limit+ci.SweepEvery(w.config.ttl)+2*time.Second {
		t.Errorf("the lease was ended after %v, want about %v", took, limit)
	}
	end()
	w.outcome(w.finished(id), "failed infrastructure", map[string]string{"build": "aborted overdue"})
	w.attempts(w.job(id, "build"), "aborted overdue")
	made := it.refusals()
	a.signal(syscall.SIGCONT)
	w.gone(5 * time.Second)
	if got := w.close().total(); got < made {
		t.Errorf("%d refusals are counted, %d were made", got, made)
	}
}

// A job that is cancelled while its source is on the way leaves nothing that the
// next job could stumble over.
func TestCase_CAN_02_CancelDuringTheFetchLeavesNothingBroken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: 12 * time.Second})
	a := w.machine("a")
	p := a.through()
	a.start()
	p.Delay(time.Second)
	files := criticalFiles()
	files["big"] = strings.Repeat("source\n", 1<<18)
	first := w.submit("\n  - name: build\n    steps: ['touch \"$SIGNS/ran\"']\n", files)
	w.until(patience, "the job to be prepared", func() bool { return w.job(first, "build").Phase == ci.PhasePreparing })
	pass(1500 * time.Millisecond) // the answer is back, the source is asked for
	if r := w.forgeci("cancel", string(first)); r.Code != 0 {
		t.Errorf("forgeci cancel ended with %d", r.Code)
	}
	p.Heal()
	w.outcome(w.finished(first), "cancelled user", map[string]string{"build": "cancelled user"})
	if w.there("ran") {
		t.Error("a step ran")
	}
	second := w.submit("\n  - name: build\n    steps: [ci/fresh.sh ./.forgeci.yaml ./ci/compile.sh ./ci/fresh.sh ./src/input]\n", criticalFiles())
	w.outcome(w.finished(second), "success", map[string]string{"build": "success"})
	w.attempts(w.job(second, "build"), "success *")
	w.close()
}
