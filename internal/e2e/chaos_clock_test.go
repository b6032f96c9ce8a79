package e2e_test

import (
	"fmt"
	mathrand "math/rand/v2"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/testkit"
)

// skew is what happens to a clock.
type skew struct {
	jump time.Duration
	rate float64
}

// The clock that decides about leases jumps, or runs at another rate, while jobs
// run: none is lost by it, and a runner that is really lost is found out as soon
// as ever.
func TestChaos_R23_ClockJumps(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R23")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 23))
	length := calm
	for round := range setting[int]("rounds") {
		for name, c := range some("R23", map[string]skew{
			"an hour on":      {time.Hour, 1},
			"an hour back":    {-time.Hour, 1},
			"a day on":        {24 * time.Hour, 1},
			"a day back":      {-24 * time.Hour, 1},
			"a leap second":   {-time.Second, 1},
			"less than noted": {length / 5, 1},
			"nearly a TTL":    {length - length/8, 1},
			"nearly twice":    {0, 1.9},
			"half":            {0, 0.5},
		}) {
			after := time.Duration(random.Int64N(int64(length / 2)))
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				database := testkit.Postgres(t)
				w := newWorld(t, config{ttl: length, database: database})
				w.machine("a").start()
				w.machine("b").start()
				keeps := w.submit(counting(onLoss), nil)
				w.came("build", 1)
				dies := w.submit("\n  - name: dies\n    steps: ['"+shSay+"; sleep 600']\n", nil)
				w.came("dies", 1)
				pass(after)
				testkit.SetClock(t, database, c.jump, c.rate)
				pass(length / 2)
				killed := w.machineOf(dies, "dies")
				killed.kill()
				w.until(2*patience, "the loss of a runner to be found out", func() bool { // not an hour
					return w.job(dies, "dies").State == ci.StateFinished
				})
				// A clock that runs fast finds out while the last heartbeat is still fresh.
				if a := w.job(dies, "dies").Attempt; len(a) != 1 || a[0].Conclusion != ci.ConclusionAborted ||
					a[0].Reason != ci.ReasonRunnerLost && (c.rate <= 1 || a[0].Reason != ci.ReasonLeaseOmitted) {
					t.Errorf("attempts of what was lost: %+v", a)
				}
				w.sign("go")
				w.outcome(w.finished(keeps), "success", map[string]string{"build": "success"})
				job := w.job(keeps, "build")
				w.attempts(job, "success *")
				w.counted(w.log(job.ID, 1, "stdout"), 1)
				killed.start()
				if books := w.close(); books.total() != 0 {
					t.Errorf("calls were refused: %v", books.rejections)
				}
				sum.add("jumps", 1)
				if !t.Failed() {
					sum.add("ok", 1)
				}
			})
		}
	}
}

// machineOf returns the machine that has a job's latest attempt.
func (w *world) machineOf(run ci.RunID, name string) *machine {
	w.t.Helper()
	job := w.job(run, name)
	for _, m := range w.machines {
		if m.name == job.Attempt[len(job.Attempt)-1].RunnerName {
			return m
		}
	}
	w.t.Fatalf("nobody has job %s", name)
	return nil
}
