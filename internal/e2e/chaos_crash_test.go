package e2e_test

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// chain is a run of two jobs with everything that a run can have: several steps,
// output on both streams, an artifact that the second job needs. Each step notes
// that it ran in a file of the run.
const chain = `
  - name: compile
    steps:
      - 'echo "compile.1" >>"$SIGNS/ran.$CI_RUN_ID"; seq 1 400; seq 401 500 >&2'
      - 'echo "compile.2" >>"$SIGNS/ran.$CI_RUN_ID"; cat text >made; echo more >>made'
    artifacts: {publish: [{name: made, path: made}]}
  - name: test
    needs: [compile]
    artifacts: {restore: [{from_job: compile, name: made, path: got}]}
    steps:
      - 'echo "test.1" >>"$SIGNS/ran.$CI_RUN_ID"; cat got'
`

// numbers is what `seq from to` prints.
func numbers(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}

// between puts proxies between the server and its database and object store.
func between(t *testing.T, database string) (c config, commits, objects *testkit.Proxy) {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	commits = testkit.NewPostgresProxy(t, u.Host)
	u.Host = commits.Addr()
	bucket := testkit.S3(t)
	objects = testkit.NewProxy(t, bucket.Endpoint)
	bucket.Endpoint = objects.Addr()
	return config{ttl: calm, database: u.String(), blob: &bucket}, commits, objects
}

// chained demands that a run of chain ended as if nothing had happened: one
// attempt of each job, each step once, every byte of the logs, and the artifact.
func (w *world) chained(id ci.RunID, text string) {
	w.t.Helper()
	run := w.finished(id)
	all := map[string]string{"compile": "success", "test": "success"}
	for _, j := range run.JobList {
		if j.Name == "hold" { // keeps test waiting in some tests
			all[j.Name] = "success"
		}
	}
	w.outcome(run, "success", all)
	compile, test := w.job(id, "compile"), w.job(id, "test")
	w.attempts(compile, "success *")
	w.attempts(test, "success *")
	for _, want := range []struct {
		job          ci.JobID
		stream, text string
	}{
		{compile.ID, "stdout", numbers(1, 400)},
		{compile.ID, "stderr", numbers(401, 500)},
		{test.ID, "stdout", text + "more\n"},
	} {
		if got := w.log(want.job, 1, want.stream); got != want.text {
			w.t.Errorf("run %s: %s of %s has SHA-256 %x and %d bytes, want %x and %d", id, want.stream, want.job,
				sha256.Sum256([]byte(got)), len(got), sha256.Sum256([]byte(want.text)), len(want.text))
		}
	}
	if got := w.read("ran." + string(id)); got != "compile.1\ncompile.2\ntest.1\n" {
		w.t.Errorf("run %s: steps that ran: %q", id, got)
	}
	bound := slices.DeleteFunc(run.Artifacts, func(a protocol.Artifact) bool { return !a.Bound })
	if len(bound) != 1 || len(run.Artifacts) != 1 || bound[0].Name != "made" {
		w.t.Errorf("run %s: artifacts: %+v", id, run.Artifacts)
	}
}

// throughChain submits a run of chain and waits for its end. At the nth commit, or
// call of the object store, do is called, then the connection is reset; recover
// makes the installation whole. It returns false when the run had fewer.
func (w *world) throughChain(p *testkit.Proxy, n int, at testkit.Moment, do, recover func()) bool {
	w.t.Helper()
	happened := make(<-chan struct{})
	if n > 0 {
		happened = p.Break(n, at, nil, do)
	}
	did := false
	look := func() bool {
		select {
		case <-happened:
			if !did {
				did = true
				recover()
			}
		default:
		}
		return did
	}
	text := rand.Text() + "\n"
	dir := w.checkout(chain, map[string]string{"text": text})
	var id ci.RunID
	for try := 1; id == ""; try++ {
		submit := testkit.Start(w.t, testkit.Command{Args: []string{"submit", dir}, Env: []string{
			w.house, "FORGECI_SERVER=" + w.url(), "FORGECI_TOKEN=" + w.token("admin.token"),
		}})
		w.until(patience, "the submission", func() bool {
			look()
			select {
			case <-submit.Exited():
				return true
			default:
				return false
			}
		})
		if code := submit.Wait(w.t, patience); code == 0 {
			id = ci.RunID(strings.TrimSpace(submit.Stdout()))
		} else if try > 1 || n == 0 {
			w.t.Fatalf("submit ended with %d", code)
		} else {
			// It may see the server go before do has returned.
			w.until(patience, fmt.Sprintf("the reason why submit ended with %d", code), look)
		}
	}
	w.until(patience, "the end of run "+string(id), func() bool {
		look()
		run, ok := w.run(id)
		return ok && run.State == ci.StateFinished && !slices.ContainsFunc(run.JobList, func(j protocol.JobSummary) bool {
			job, err := w.people.Job(w.t.Context(), j.ID)
			return err != nil || slices.ContainsFunc(job.Attempt, func(a protocol.Attempt) bool { return !a.LogSealed })
		})
	})
	if n > 0 && p.Forget() == 0 { // it came, if only just now
		<-happened
		look()
	}
	w.chained(id, text)
	return did
}

// The server is killed at every transaction and at every call of the object
// store of a whole run, once before and once after: started again, it brings the
// run to the end that it has without a crash.
func TestChaos_R05_KilledAtEveryCommitPoint(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R05")
	type point struct {
		at    testkit.Moment
		kind  string
		least int // of them in a run
	}
	for name, x := range some("R05", map[string]point{
		"before commit": {testkit.Before, "commit", 12}, "before object call": {testkit.Before, "object call", 8},
		"after commit": {testkit.After, "commit", 12}, "after object call": {testkit.After, "object call", 8},
	}) {
		at, kind := x.at, x.kind
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, commits, objects := between(t, testkit.StartPostgres(t, true).Database(t))
			p := map[string]*testkit.Proxy{"commit": commits, "object call": objects}[kind]
			w := newWorld(t, c)
			w.machine("m").start()
			before := p.Passed()
			w.throughChain(p, 0, at, nil, nil)
			points := p.Passed() - before
			sum.most(kind+"s of a run", points)
			due, did := spread(points, setting[int]("points")), 0
			for _, n := range due {
				server := w.server
				kill := func() {
					_ = syscall.Kill(server.PID(), syscall.SIGKILL)
					<-server.Exited()
				}
				if !w.throughChain(p, n, at, kill, w.serve) {
					continue // renewals make one run longer than another
				}
				did++
				sum.add("points", 1)
				if t.Failed() {
					t.Fatalf("at %s %d", kind, n)
				}
				sum.add("ok", 1)
			}
			broken(t, kind, points, x.least, len(due), did)
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
}
