package e2e_test

import (
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
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

// Two servers on one database and one bucket, behind a balancer, are restarted one
// after the other, again and again, while jobs go on, end and arrive: each is
// served whichever node is away, and a caller that repeats a failed call once
// never sees one fail.
func TestChaos_R22_RollingRestart(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R22-rolling")
	bucket := testkit.S3(t)
	w := newWorld(t, config{ttl: calm, database: testkit.Postgres(t), blob: &bucket, second: true})
	throughIt(t, w, func(during func()) {
		stop := w.askAllTheTime(sum)
		restart := func(p *testkit.Process, again func() *testkit.Process, away func()) *testkit.Process {
			began := time.Now()
			p.Signal(t, syscall.SIGTERM)
			away() // from the first moment on
			if code := p.Wait(t, patience); code != 0 {
				t.Errorf("a server ended with %d", code)
			}
			sum.most("ms of a drain", int(time.Since(began).Milliseconds()))
			if has(p.Stderr(), "cut off") {
				t.Error("somebody's call kept a server from ending, and was cut off")
			}
			p = again()
			w.front.WaitReady(t)
			sum.add("restarts", 1)
			return p
		}
		served := func() {
			id := w.submit("\n  - name: arrives\n    runs_on: [b]\n    steps: ['seq 1 20']\n", nil)
			w.outcome(w.finished(id), "success", map[string]string{"arrives": "success"})
			job := w.job(id, "arrives")
			w.attempts(job, "success *")
			if got := w.log(job.ID, 1, "stdout"); got != numbers(1, 20) {
				t.Errorf("the log of a job that arrived while a server was away: %q", got)
			}
		}
		one := func() *testkit.Process { return w.start(w.data, w.addr) }
		two := func() *testkit.Process { return w.start(w.other.data, w.other.addr) }
		w.server = restart(w.server, one, during)
		w.other.proc = restart(w.other.proc, two, served)
		for range 2 * setting[int]("rounds") {
			w.server = restart(w.server, one, served)
			w.other.proc = restart(w.other.proc, two, served)
		}
		stop()
	})
	sum.add("calls that met a node that had gone", w.front.Lost())
}

// askAllTheTime reads through the balancer until stop is called, and repeats each
// call that fails once.
func (w *world) askAllTheTime(sum *tally) (stop func()) {
	w.t.Helper()
	token := w.token("admin.token")
	ask := func() error {
		req, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, w.url()+strings.TrimPrefix(protocol.RouteListRuns, "GET "), nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	end := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
			}
			err := ask()
			if err != nil {
				sum.add("calls repeated", 1)
				err = ask()
			}
			if w.t.Context().Err() != nil {
				return // the test has failed
			}
			if err != nil {
				w.t.Errorf("a call and its repeat failed: %v", err)
				return
			}
			sum.add("calls", 1)
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		asking.Wait()
	})
	w.t.Cleanup(stop)
	return stop
}

// Runners are told to stop at any moment of a stream of jobs, and started again:
// each finishes what it has, hands over what it was given at that very moment and
// has not begun (SPEC decision 9), and ends well; no job fails and none is run
// twice.
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
		handed := max(0, len(job.Attempt)-1)
		w.attempts(job, append(slices.Repeat([]string{"aborted runner_shutdown"}, handed), "success *")...)
		for _, a := range job.Attempt[:handed] {
			if a.Phase != ci.PhaseClaimed || a.LogBytes != 0 {
				t.Errorf("attempt %d of %s was handed over in phase %s with %d bytes of log", a.Epoch, j.Name, a.Phase, a.LogBytes)
			}
		}
		sum.add("handed over", handed)
		if got := w.log(job.ID, int64(handed+1), "stdout"); got != numbers(1, 20) {
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
