package e2e_test

import (
	"syscall"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

// crash ends the server as a crash would.
func (w *world) crash() {
	w.t.Helper()
	w.server.Signal(w.t, syscall.SIGKILL)
	w.server.Wait(w.t, patience)
}

// twoJobs is a job that goes on through whatever happens and one that ends
// meanwhile, on two machines.
const twoJobs = `
  build:
    runs_on: [a]
    steps: ['` + shSay + "; " + shCount + `']
  short:
    runs_on: [b]
    steps:
      - '` + shSay + `; while [ ! -e "$SIGNS/short" ]; do sleep 0.05; done; echo done'
      - 'echo more; touch "$SIGNS/ended"'
    artifacts: {publish: [{name: made, path: made, optional: true}]}
`

// through an event in the middle of two jobs nothing may be lost: each has one
// attempt, the logs are whole, and commands that wait go on.
func throughIt(t *testing.T, w *world, event func(during func())) {
	t.Helper()
	w.machine("a", "a").start()
	w.machine("b", "b").start()
	id := w.submit(twoJobs, nil)
	w.came("build", 1)
	w.came("short", 1)
	env := []string{w.house, "FORGECI_SERVER=" + w.url(), "FORGECI_TOKEN=" + w.token("admin.token")}
	build := w.job(id, "build")
	waits := testkit.Start(t, testkit.Command{Args: []string{"show", string(id), "--wait"}, Env: env})
	follows := testkit.Start(t, testkit.Command{Args: []string{"logs", "-f", string(build.ID)}, Env: env})
	w.until(patience, "the first lines", func() bool { return follows.Stdout() != "" })

	event(func() {
		w.sign("short") // ends while something is away
		w.until(patience, "the short job's last step", func() bool { return w.there("ended") })
	})

	w.until(patience, "another line", after(w, build.ID))
	w.sign("go")
	w.outcome(w.finished(id), "success", map[string]string{"build": "success", "short": "success"})
	if code := waits.Wait(t, patience); code != 0 {
		t.Errorf("forgeci show --wait ended with %d", code)
	}
	if code := follows.Wait(t, patience); code != 0 {
		t.Errorf("forgeci logs -f ended with %d", code)
	}
	build = w.job(id, "build")
	w.attempts(build, "success *")
	w.counted(w.log(build.ID, 1, "stdout"), 1)
	w.counted(follows.Stdout(), 1)
	short := w.job(id, "short")
	w.attempts(short, "success *")
	if got := w.log(short.ID, 1, "stdout"); got != "done\nmore\n" {
		t.Errorf("log of the short job: %q", got)
	}
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
}

// The server is killed in the middle of a job and started again: the job goes
// on, nothing is lost.
func TestServerIsKilledInTheMiddleOfAJob(t *testing.T) {
	t.Parallel()
	for name, database := range map[string]func(*testing.T) string{
		"sqlite":   func(*testing.T) string { return "" },
		"postgres": func(t *testing.T) string { return testkit.StartPostgres(t, true).Database(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: calm, database: database(t)})
			throughIt(t, w, func(during func()) {
				w.crash()
				during()
				pass(time.Second)
				w.serve()
			})
		})
	}
}

// The database crashes, or stands still, in the middle of a job.
func TestDatabaseIsAwayInTheMiddleOfAJob(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(t *testing.T, pg *testkit.PostgresServer, during func()){
		"killed": func(t *testing.T, pg *testkit.PostgresServer, during func()) {
			pg.Kill(t)
			during()
			pass(time.Second)
			pg.Start(t)
		},
		"paused": func(t *testing.T, pg *testkit.PostgresServer, during func()) {
			pg.Pause(t)
			during()
			pass(2 * time.Second)
			pg.Resume(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testkit.StartPostgres(t, true)
			w := newWorld(t, config{ttl: calm, database: pg.Database(t)})
			throughIt(t, w, func(during func()) { fault(t, pg, during) })
		})
	}
}

// The object store is away in the middle of a job, and while another publishes.
func TestObjectStoreIsAwayInTheMiddleOfAJob(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*testkit.Proxy){
		"refused":         func(p *testkit.Proxy) { p.Refuse(); p.Reset() },
		"nothing arrives": (*testkit.Proxy).Stall,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bucket := testkit.S3(t)
			p := testkit.NewProxy(t, bucket.Endpoint)
			bucket.Endpoint = p.Addr()
			w := newWorld(t, config{ttl: calm, blob: &bucket})
			throughIt(t, w, func(during func()) {
				fault(p)
				during()
				pass(2 * time.Second)
				p.Heal()
			})
		})
	}
}
