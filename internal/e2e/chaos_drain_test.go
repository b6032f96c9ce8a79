package e2e_test

import (
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

// A server that is told to stop, in the middle of jobs, ends well; its successor
// takes over, and nobody notices: no call fails that is repeated once.
func TestChaos_R22_ServerDrains(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R22-server")
	for round := range setting[int]("rounds") {
		for name, database := range some("R22", map[string]func(*testing.T) string{
			"sqlite":   func(*testing.T) string { return "" },
			"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
		}) {
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, config{ttl: calm, database: database(t)})
				throughIt(t, w, func(during func()) {
					for range 3 {
						began := time.Now()
						w.server.Signal(t, syscall.SIGTERM)
						if code := w.server.Wait(t, patience); code != 0 {
							t.Errorf("the server ended with %d", code)
						}
						if has(w.server.Stderr(), "cut off") {
							t.Error("somebody's call kept the server from ending, and was cut off")
						}
						sum.most("ms of a drain", int(time.Since(began).Milliseconds()))
						w.serve()
						sum.add("drains", 1)
					}
					during()
				})
			})
		}
	}
}

// Runners are told to stop at any moment of a stream of jobs, and started again:
// each finishes what it has, takes nothing new, and ends well; no job fails and
// none is run twice.
func TestChaos_R22_RunnersDrain(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R22-runner")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 22))
	w := newWorld(t, config{ttl: calm})
	machines := []*machine{w.machine("a").start(), w.machine("b").start(), w.machine("c").start()}
	id := w.submit(`
  short:
    matrix: {n: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]}
    steps: ['echo "$FORGECI_MATRIX_N" >>"$SIGNS/ran"; sleep 0.2; seq 1 20']
`, nil)
	for range 4 * setting[int]("rounds") {
		pass(time.Duration(random.Int64N(int64(700 * time.Millisecond))))
		m := machines[random.IntN(len(machines))]
		m.signal(syscall.SIGTERM)
		if code := m.proc.Wait(t, patience); code != 0 {
			t.Errorf("the runner of %s ended with %d", m.name, code)
		}
		m.start()
		sum.add("drains", 1)
	}
	run := w.finished(id)
	want := map[string]string{}
	for _, j := range run.JobList {
		want[j.Name] = "success"
		job := w.job(id, j.Name)
		w.attempts(job, "success *")
		if got := w.log(job.ID, 1, "stdout"); got != numbers(1, 20) {
			t.Errorf("the log of %s: %q", j.Name, got)
		}
	}
	w.outcome(run, "success", want)
	if got := strings.Count(w.read("ran"), "\n"); got != 20 || len(want) != 20 {
		t.Errorf("%d jobs; steps ran %d times", len(want), got)
	}
	sum.add("jobs", len(want))
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
}
