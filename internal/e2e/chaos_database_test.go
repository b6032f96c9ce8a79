package e2e_test

import (
	mathrand "math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

// many is a run whose results arrive all the time: short jobs, and one that goes
// on through everything.
const many = `
  through:
    runs_on: [through]
    steps: ['` + shSay + "; " + shCount + `']
  short:
    runs_on: [short]
    matrix: {n: [1, 2, 3, 4, 5, 6, 7, 8]}
    steps: ['echo "$FORGECI_MATRIX_N" >>"$SIGNS/ran.$CI_RUN_ID"; seq 1 50']
`

// The primary is stopped at any moment while results arrive, and its synchronous
// standby is promoted. Nothing that was answered is lost and no job is run again:
// the outage is shorter than the leases.
func TestChaos_R10_DatabaseFailover(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R10")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 10))
	primary := testkit.StartPostgres(t, true)
	database := primary.Database(t)
	standby := primary.Standby(t)
	w := newWorld(t, config{ttl: calm, database: testkit.Pair(t, database, standby)})
	w.machine("through", "through").start()
	for _, name := range []string{"a", "b"} {
		w.machine(name, "short").start()
	}
	for round := range 2 * setting[int]("rounds") {
		if round > 0 {
			primary.Follow(t, standby)
			primary, standby = standby, primary
			w.unsign("go")
			w.unsign("through.1")
		}
		id := w.submit(many, nil)
		w.came("through", 1)
		pass(time.Duration(random.Int64N(int64(1500 * time.Millisecond))))
		primary.StopImmediate(t)
		standby.Promote(t)
		back := w.until(10*time.Second, "the server to write again", func() bool {
			r := w.forgeci("submit", w.checkout("\n  - name: after\n    runs_on: [short]\n    steps: ['true']\n", nil))
			return r.Code == 0
		})
		sum.most("ms until written again", int(back.Milliseconds()))
		w.sign("go")
		run := w.finished(id)
		want := map[string]string{"through": "success"}
		for _, j := range run.JobList {
			job := w.job(id, j.Name)
			w.attempts(job, "success *")
			if j.Name == "through" {
				w.counted(w.log(job.ID, 1, "stdout"), 1)
				continue
			}
			want[j.Name] = "success"
			if got := w.log(job.ID, 1, "stdout"); got != numbers(1, 50) {
				t.Errorf("the log of %s has %d bytes", j.Name, len(got))
			}
		}
		w.outcome(run, "success", want)
		if got := len(w.read("ran." + string(id))); got != 2*(len(want)-1) || len(want) != 9 {
			t.Errorf("%d jobs; %d bytes of what ran", len(want), got)
		}
		sum.add("failovers", 1)
		sum.add("results", len(want))
		if t.Failed() {
			t.FailNow()
		}
	}
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
}

// The connection to the database breaks inside every COMMIT of a whole run, before
// the database has it and after: the run ends as it does without.
func TestChaos_R11_ResetInsideEveryCommit(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R11")
	for name, at := range some("R11", map[string]testkit.Moment{"before": testkit.Before, "after": testkit.After}) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, commits, _ := between(t, testkit.StartPostgres(t, true).Database(t))
			w := newWorld(t, c)
			w.machine("m").start()
			before := commits.Passed()
			w.throughChain(commits, 0, at, nil, nil)
			points := commits.Passed() - before
			due, did := spread(points, setting[int]("points")), 0
			for _, n := range due {
				if !w.throughChain(commits, n, at, nil, func() {}) {
					continue // renewals make one run longer than another
				}
				did++
				sum.add("points", 1)
				if t.Failed() {
					t.Fatalf("at commit %d", n)
				}
				sum.add("ok", 1)
			}
			broken(t, "commit", points, 12, len(due), did)
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
	t.Run("no connection left", func(t *testing.T) {
		t.Parallel()
		pg := testkit.StartPostgres(t, true)
		database := pg.Database(t)
		u, err := url.Parse(database)
		if err != nil {
			t.Fatal(err)
		}
		p := testkit.NewPostgresProxy(t, u.Host)
		u.Host = p.Addr()
		w := newWorld(t, config{ttl: calm, database: u.String()})
		throughIt(t, w, func(during func()) {
			p.Reset()
			release := pg.Exhaust(t)
			during()
			pass(2 * time.Second)
			release()
		})
		sum.add("exhausted", 1)
	})
}

// unsign takes a sign away.
func (w *world) unsign(name string) {
	w.t.Helper()
	if err := os.Remove(filepath.Join(w.signs, name)); err != nil {
		w.t.Fatal(err)
	}
}
