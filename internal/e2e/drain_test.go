package e2e_test

import (
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
)

// One signal: the running job ends well, nothing new is taken, also not by a
// poll that was open, and the runner exits with 0.
func TestCase_RUN_05_OneSignalDrains(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	a := w.machine("a")
	a.args = append(a.args, "--slots", "2") // a job and an open poll
	a.start()
	id := w.submit(counting(""), nil)
	w.came("build", 1)
	a.signal(syscall.SIGTERM)
	w.until(patience, "the runner to drain", func() bool { return has(a.proc.Stderr(), "draining") })
	var queued []ci.RunID
	for range 3 {
		queued = append(queued, w.submit("\n  - name: queued\n    steps: ['true']\n", nil))
	}
	pass(time.Second)
	for _, q := range queued {
		if j := w.job(q, "queued"); j.State != ci.StateReady || j.Attempts != 0 {
			t.Errorf("a job was given to a draining runner: %s, %d attempts", j.State, j.Attempts)
		}
	}
	w.sign("go")
	if code := a.proc.Wait(t, patience); code != 0 {
		t.Errorf("the runner ended with %d", code)
	}
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job := w.job(id, "build")
	w.attempts(job, "success *")
	w.counted(w.log(job.ID, 1, "stdout"), 1)
	w.machine("b").start()
	for _, q := range queued {
		w.outcome(w.finished(q), "success", map[string]string{"queued": "success"})
		w.attempts(w.job(q, "queued"), "success *")
	}
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
}

// The second signal, or SIGQUIT, ends the job within its grace and hands it
// over; its policy decides about another attempt. It does not count as a failure
// of the job.
func TestCase_RUN_05_SecondSignalHandsOver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy   string
		signals  []syscall.Signal
		run, job string
		attempts []string
	}{
		"SIGTERM twice, with policy": {
			"{max: 1, on: [runner_shutdown]}",
			[]syscall.Signal{syscall.SIGTERM, syscall.SIGTERM},
			"success", "success",
			[]string{"aborted runner_shutdown", "success *"},
		},
		"SIGQUIT, without policy": {
			"",
			[]syscall.Signal{syscall.SIGQUIT},
			"failed infrastructure", "aborted runner_shutdown",
			[]string{"aborted runner_shutdown"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: 5 * time.Minute})
			a := w.machine("a").start()
			id := w.submit(counting(c.policy), nil)
			w.came("build", 1)
			for i, s := range c.signals {
				if i > 0 {
					w.until(patience, "the runner to drain", func() bool { return has(a.proc.Stderr(), "draining") })
				}
				a.signal(s)
			}
			if code := a.proc.Wait(t, ci.DefaultGrace); code != 0 {
				t.Errorf("the runner ended with %d", code)
			}
			w.gone(0)
			w.sign("go")
			w.machine("b").start()
			w.outcome(w.finished(id), c.run, map[string]string{"build": c.job})
			job := w.job(id, "build")
			w.attempts(job, c.attempts...)
			w.begun(w.log(job.ID, 1, "stdout"), 1)
			if len(c.attempts) == 2 {
				w.counted(w.log(job.ID, 2, "stdout"), 2)
			}
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
}
