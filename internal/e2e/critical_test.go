package e2e_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// asks says whether a request through a proxy is a call of the route.
func asks(route string) func(*http.Request) bool {
	method, pattern, _ := strings.Cut(route, " ")
	return func(r *http.Request) bool {
		if r.Method != method {
			return false
		}
		want, got := strings.Split(pattern, "/"), strings.Split(r.URL.Path, "/")
		return slices.EqualFunc(want, got, func(w, g string) bool { return w == g || strings.HasPrefix(w, "{") })
	}
}

// through puts a proxy between a machine and the server.
func (m *machine) through() *testkit.Proxy {
	m.w.t.Helper()
	p := testkit.NewProxy(m.w.t, m.w.addr)
	m.server = p.URL()
	return p
}

// freezes pauses the machine's runner at the moment when it has made a call of
// the route: the server gets the call, the runner does not learn the answer.
func (m *machine) freezes(p *testkit.Proxy, route string) <-chan struct{} {
	frozen := make(chan struct{})
	made := false
	p.CutReply(-1, func(r *http.Request) bool { // an order that is never due
		if !made && asks(route)(r) {
			made = true
			_ = syscall.Kill(m.proc.PID(), syscall.SIGSTOP)
			close(frozen)
		}
		return false
	})
	return frozen
}

// The test that matters: every job runs on a fresh machine and works on exactly
// the bytes that its predecessor's winning attempt made. Of three attempts to
// compile, the first is paused, the second is killed after its artifact was
// sealed, and the first comes back while the third works; only what the third
// made is published.
func TestVE5_OnlyTheWinnersBytesReachTheNextMachine(t *testing.T) {
	t.Parallel()
	for name, conf := range map[string]func(*testing.T) config{
		"sqlite and files": func(*testing.T) config { return config{} },
		"postgres and s3": func(t *testing.T) config {
			bucket := testkit.S3(t)
			return config{database: testkit.Postgres(t), blob: &bucket}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			critical(t, conf(t))
		})
	}
}

const criticalJobs = `
  - name: compile
    runs_on: [compile]
    retry: {max: 2, on: [runner_lost]}
    steps:
      - ci/fresh.sh ./.forgeci.yaml ./ci/compile.sh ./ci/fresh.sh ./src/input
      - ci/compile.sh
    artifacts:
      publish: [{name: app, path: target/app}]
  - name: test
    runs_on: [test]
    artifacts:
      restore: [{from_job: compile, name: app, path: inputs/app}]
    steps:
      - ci/fresh.sh ./.forgeci.yaml ./ci/compile.sh ./ci/fresh.sh ./inputs/app ./src/input
      - sha256sum inputs/app
      - run: 'head -n 2 inputs/app; touch "$SIGNS/tested"'
`

func criticalFiles() map[string]string {
	return map[string]string{
		"src/input": "source\n",
		// Nobody has been here before: what the job finds is its source and what
		// it asked for.
		"ci/fresh.sh": `#!/bin/sh
set -eu
for dir in "$HOME" "$TMPDIR"; do
	[ -z "$(ls -A "$dir")" ] || { echo "$dir is not empty:"; ls -A "$dir"; exit 1; }
done
found=$(find . -type f | LC_ALL=C sort | tr '\n' ' ')
[ "$found" = "$* " ] || { echo "found $found"; exit 1; }
echo fresh
`,
		// Every attempt makes other bytes.
		"ci/compile.sh": `#!/bin/sh
set -eu
mkdir target
{ cat src/input; echo "built by attempt $CI_ATTEMPT"; head -c 300000 /dev/urandom; } >target/app
sha256sum target/app
touch "$SIGNS/compile.$CI_ATTEMPT"
while [ ! -e "$SIGNS/go.$CI_ATTEMPT" ]; do sleep 0.05; done
`,
	}
}

func critical(t *testing.T, c config) {
	t.Helper()
	w := newWorld(t, c)
	first := w.machine("first", "compile").start()
	id := w.submit(criticalJobs, criticalFiles())

	w.came("compile", 1)
	w.logged(id, "compile", 1, "target/app\n") // what the server does not have dies with the runner
	first.signal(syscall.SIGSTOP)

	second := w.machine("second", "compile")
	sealed := second.freezes(second.through(), protocol.RouteSealArtifact)
	second.start()
	w.came("compile", 2)
	w.logged(id, "compile", 2, "target/app\n")
	w.sign("go.2")
	select {
	case <-sealed:
	case <-time.After(patience):
		t.Fatal("attempt 2 published nothing")
	}
	w.until(patience, "the artifact of attempt 2 to be sealed", func() bool {
		run, ok := w.run(id)
		return ok && slices.ContainsFunc(run.Artifacts, func(a protocol.Artifact) bool { return a.Epoch == 2 && !a.Bound })
	})
	second.kill()

	third := w.machine("third", "compile").start()
	w.machine("fourth", "test").start()
	w.came("compile", 3)
	compile := w.job(id, "compile").ID
	before := map[int64]string{1: w.log(compile, 1, "stdout"), 2: w.log(compile, 2, "stdout")}
	first.signal(syscall.SIGCONT)
	w.sign("go.1") // should it still be able to, it would publish now
	w.until(5*time.Second, "the sandbox of the attempt that came back to end", func() bool { return len(w.processes(1)) == 0 })
	job := w.job(id, "compile")
	made := first.impostor(job, 1).refusals() + second.impostor(job, 2).refusals()
	w.sign("go.3")

	run := w.finished(id)
	w.outcome(run, "success", map[string]string{"compile": "success", "test": "success"})
	job = w.job(id, "compile")
	w.attempts(job, "aborted runner_lost", "aborted runner_lost", "success *")
	if got := job.Attempt[2].RunnerName; got != third.name {
		t.Errorf("attempt 3 was made by %s", got)
	}
	for attempt, log := range before {
		w.unchanged(compile, attempt, log)
	}
	test := w.job(id, "test")
	w.attempts(test, "success *")
	if got := test.Attempt[0].RunnerName; got != "fourth" {
		t.Errorf("the test was made by %s", got)
	}

	// The bytes: each attempt's digest is in its log, and the next machine saw
	// that of the winner.
	digests := map[string]int{}
	for attempt := 1; attempt <= 3; attempt++ {
		log := w.log(job.ID, int64(attempt), "stdout")
		digest, _, ok := strings.Cut(strings.TrimPrefix(log, "fresh\n"), "  target/app\n")
		if !ok || len(digest) != 64 {
			t.Fatalf("log of attempt %d: %q", attempt, log)
		}
		digests[digest] = attempt
	}
	digest, text, _ := strings.Cut(strings.TrimPrefix(w.log(test.ID, 1, "stdout"), "fresh\n"), "  inputs/app\n")
	if digests[digest] != 3 || text != "source\nbuilt by attempt 3\n" {
		t.Errorf("the test worked on the bytes of attempt %d: %q", digests[digest], text)
	}
	var bound []string
	for _, a := range run.Artifacts {
		if a.Bound {
			bound = append(bound, fmt.Sprint(a.Name, " of attempt ", a.Epoch))
		}
	}
	if !slices.Equal(bound, []string{"app of attempt 3"}) {
		t.Errorf("bound: %q", bound)
	}
	to := filepath.Join(t.TempDir(), "got")
	if r := w.forgeci("artifacts", "get", string(id), "app", "--to", to); r.Code != 0 {
		t.Fatalf("forgeci artifacts get ended with %d", r.Code)
	}
	bytes, err := os.ReadFile(filepath.Join(to, "app"))
	if sum := sha256.Sum256(bytes); err != nil || digests[hex.EncodeToString(sum[:])] != 3 {
		t.Errorf("people get the bytes of attempt %d (%v)", digests[hex.EncodeToString(sum[:])], err)
	}

	second.start() // reports that its attempt has ended
	b := w.close()
	if got := b.total(); got < made {
		t.Errorf("%d refusals are counted, %d were made", got, made)
	}
	if n := b.count("artifact_binding"); n != 1 {
		t.Errorf("%d bindings", n)
	}
}

// processes lists the processes of an attempt of any job.
func (w *world) processes(attempt int) []int {
	w.t.Helper()
	of := testkit.ProcessesWith(w.t, fmt.Sprintf("CI_ATTEMPT=%d", attempt))
	return slices.DeleteFunc(testkit.ProcessesWith(w.t, w.mark), func(pid int) bool { return !slices.Contains(of, pid) })
}

// A reply that is lost costs nothing: the runner asks again and gets the same
// answer.
func TestLostRepliesAreAskedForAgain(t *testing.T) {
	t.Parallel()
	every := []string{
		protocol.RouteRegister, protocol.RouteOpenSession, protocol.RouteClaim, protocol.RoutePhase, protocol.RouteHeartbeat,
		protocol.RouteAppendLog, protocol.RouteFetchSource, protocol.RouteNewArtifact, protocol.RouteSignParts,
		protocol.RouteSealArtifact, protocol.RouteRestoreArtifact, protocol.RouteComplete,
	}
	for name, routes := range map[string][]string{
		"claim": {protocol.RouteClaim}, "complete": {protocol.RouteComplete}, "every route once": every,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: 2 * ttl})
			id := w.submit(`
  - name: compile
    steps: ['echo ran >>"$SIGNS/runs"; sleep 3; echo made >made']
    artifacts: {publish: [{name: made, path: made}]}
  - name: test
    artifacts: {restore: [{from_job: compile, name: made, path: got}]}
    steps: [cat got]
`, nil)
			m := w.machine("m")
			p := m.through()
			lost := map[string]<-chan struct{}{}
			for _, route := range routes {
				lost[route] = p.CutReply(1, asks(route))
			}
			m.start()
			w.outcome(w.finished(id), "success", map[string]string{"compile": "success", "test": "success"})
			for route, done := range lost {
				select {
				case <-done:
				default:
					t.Errorf("no reply of %s was lost", route)
				}
			}
			w.attempts(w.job(id, "compile"), "success *")
			test := w.job(id, "test")
			w.attempts(test, "success *")
			if got := w.log(test.ID, 1, "stdout"); got != "made\n" {
				t.Errorf("the second job got %q", got)
			}
			if got := w.read("runs"); got != "ran\n" {
				t.Errorf("the step ran more than once: %q", got)
			}
			if b := w.close(); b.total() != 0 {
				t.Errorf("calls were refused: %v", b.rejections)
			}
		})
	}
}

// A reply to a claim that is lost leaves no job behind.
func TestCase_QUE_05_LostClaimReplyCostsNoTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t, config{ttl: calm})
	id := w.submit("\n  - name: build\n    steps: ['true']\n", nil)
	m := w.machine("m")
	lost := m.through().CutReply(1, asks(protocol.RouteClaim))
	m.start()
	began := time.Now()
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("it took %v", took)
	}
	<-lost
	w.attempts(w.job(id, "build"), "success *")
	w.close()
}
