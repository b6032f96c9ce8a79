package e2e_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// publishing is a job whose attempts wait for a sign of their own and publish
// what they made.
const publishing = `
  - name: build
    retry: {max: 1, on: [runner_lost]}
    steps:
      - 'echo "attempt $CI_ATTEMPT" >made; seq 1 200; touch "$SIGNS/$CI_JOB_NAME.$CI_ATTEMPT"; while [ ! -e "$SIGNS/go.$CI_ATTEMPT" ]; do sleep 0.05; done; echo end'
    artifacts: {publish: [{name: made, path: made}]}
`

// A runner is paused in the middle of any call for longer than its lease, and
// comes back when another has taken over.
func TestChaos_R07_PausedAtEveryCall(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R07")
	for round := range setting[int]("rounds") {
		for name, route := range some("R07", map[string]string{
			"source": protocol.RouteFetchSource, "phase": protocol.RoutePhase, "logs": protocol.RouteAppendLog,
			"heartbeat": protocol.RouteHeartbeat, "new artifact": protocol.RouteNewArtifact, "parts": protocol.RouteSignParts,
			"seal": protocol.RouteSealArtifact, "complete": protocol.RouteComplete,
		}) {
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				pausedAt(t, route)
				sum.add("pauses", 1)
				if !t.Failed() {
					sum.add("ok", 1)
				}
			})
		}
	}
}

func pausedAt(t *testing.T, route string) {
	t.Helper()
	w := newWorld(t, config{})
	w.abandoned = 1
	a := w.machine("a")
	frozen := a.freezes(a.through(), route)
	a.start()
	id := w.submit(publishing, nil)
	if !slices.Contains([]string{protocol.RouteFetchSource, protocol.RoutePhase, protocol.RouteAppendLog, protocol.RouteHeartbeat}, route) {
		w.sign("go.1") // it comes as far as the call
	}
	select {
	case <-frozen:
	case <-time.After(patience):
		t.Fatal("the call was not made")
	}
	w.machine("b").start()
	if route == protocol.RouteComplete {
		// It was completed: the runner only does not know.
		w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
		a.signal(syscall.SIGCONT)
		job := w.job(id, "build")
		w.attempts(job, "success *")
		if got := w.log(job.ID, 1, "stdout"); got != numbers(1, 200)+"end\n" {
			t.Errorf("the log has %d bytes", len(got))
		}
		w.close()
		return
	}
	w.came("build", 2)
	job := w.job(id, "build")
	before := w.log(job.ID, 1, "stdout")
	made := a.impostor(job, 1).refusals()
	a.signal(syscall.SIGCONT)
	w.sign("go.1") // should it still be able to, it would publish now
	w.until(5*time.Second, "the stale runner's job to be killed", func() bool { return len(w.processes(1)) == 0 })
	if len(w.processes(2)) == 0 {
		t.Error("the current attempt was killed, too")
	}
	w.sign("go.2")
	run := w.finished(id)
	w.outcome(run, "success", map[string]string{"build": "success"})
	job = w.job(id, "build")
	w.attempts(job, "aborted runner_lost", "success *")
	if got := w.log(job.ID, 2, "stdout"); got != numbers(1, 200)+"end\n" {
		t.Errorf("the log of the winner has %d bytes", len(got))
	}
	w.unchanged(job.ID, 1, before)
	if !strings.HasPrefix(numbers(1, 200)+"end\n", before) {
		t.Errorf("the log of the loser is no beginning of what it wrote: %q", before)
	}
	for _, made := range run.Artifacts {
		if made.Bound != (made.Epoch == 2) {
			t.Errorf("artifact of attempt %d, bound: %v", made.Epoch, made.Bound)
		}
	}
	if got := w.close().total(); got < made {
		t.Errorf("%d refusals are counted, %d were made", got, made)
	}
}

// A runner is cut off from the control plane, in both directions or in one. For
// less than the lease that costs nothing; for longer there is exactly one other
// attempt, and the first has ended by itself before.
func TestChaos_R08_Partitions(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R08")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 8))
	for round := range setting[int]("rounds") {
		for name, stall := range some("R08", map[string]func(*testkit.Proxy){
			"two-way": (*testkit.Proxy).Stall, "to the server": (*testkit.Proxy).StallToServer, "to the runner": (*testkit.Proxy).StallToClient,
		}) {
			for _, long := range []bool{false, true} {
				after := time.Duration(random.Int64N(int64(time.Second)))
				t.Run(fmt.Sprintf("%d %s long=%v", round, name, long), func(t *testing.T) {
					t.Parallel()
					partitioned(t, stall, long, after)
					sum.add("partitions", 1)
					if !t.Failed() {
						sum.add("ok", 1)
					}
				})
			}
		}
	}
}

func partitioned(t *testing.T, stall func(*testkit.Proxy), long bool, after time.Duration) {
	t.Helper()
	length := ttl
	if !long {
		length = calm
	}
	w := newWorld(t, config{ttl: length})
	a := w.machine("a")
	p := a.through()
	a.start()
	id := w.submit(counting(onLoss), nil)
	w.came("build", 1)
	pass(after)
	stall(p)
	if long {
		w.machine("b").start()
		w.until(patience, "the lease to be over", func() bool { return w.job(id, "build").Attempt[0].State == ci.StateFinished })
		if left := w.processes(1); len(left) > 0 {
			t.Errorf("the server has ended the lease and %d processes of the attempt run", len(left))
		}
		w.came("build", 2)
	} else {
		pass(length / 4)
	}
	p.Heal()
	w.sign("go")
	w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
	job := w.job(id, "build")
	if long {
		if n := len(job.Attempt); n != 2 || job.Attempt[0].Conclusion != ci.ConclusionAborted || !job.Attempt[1].Winner {
			t.Errorf("attempts: %+v", job.Attempt)
		}
		w.begun(w.log(job.ID, 1, "stdout"), 1)
		w.counted(w.log(job.ID, 2, "stdout"), 2)
	} else {
		w.attempts(job, "success *")
		w.counted(w.log(job.ID, 1, "stdout"), 1)
	}
	if b := w.close(); !long && b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
}

// Every call of a runner arrives late, overtakes others and comes again, soon and
// when all is over: nothing is different from a network that delivers once.
func TestChaos_R09_DuplicatesAndDelays(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R09")
	for round := range setting[int]("rounds") {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			repeated(t, sum, setting[uint64]("seed")+uint64(round))
		})
	}
}

func repeated(t *testing.T, sum *tally, seed uint64) {
	t.Helper()
	w := newWorld(t, config{ttl: 2 * ttl})
	network := testkit.NewRepeater(t, w.addr, seed, 50*time.Millisecond, 3*time.Second)
	a := w.machine("a")
	a.server = network.URL()
	a.start()

	text := rand.Text() + "\n"
	w.chained(w.submit(chain, map[string]string{"text": text}), text)

	// A job is handed over and goes on with the next session.
	handed := w.submit(counting("{max: 1, on: [runner_shutdown]}"), nil)
	w.came("build", 1)
	a.signal(syscall.SIGQUIT)
	a.proc.Wait(t, patience)
	a.start()
	w.came("build", 2)
	w.sign("go")
	w.outcome(w.finished(handed), "success", map[string]string{"build": "success"})
	job := w.job(handed, "build")
	w.attempts(job, "aborted runner_shutdown", "success *")
	w.counted(w.log(job.ID, 2, "stdout"), 2)

	// A runner comes back too late and reports that its attempt has ended.
	late := w.submit(strings.ReplaceAll(publishing, "build", "late"), nil)
	w.came("late", 1)
	a.signal(syscall.SIGSTOP)
	b := w.machine("b")
	b.server = network.URL()
	b.start()
	w.came("late", 2)
	a.signal(syscall.SIGCONT)
	pass(w.config.ttl / 2) // a heartbeat is due
	w.sign("go.2")
	w.outcome(w.finished(late), "success", map[string]string{"late": "success"})
	w.attempts(w.job(late, "late"), "aborted runner_lost", "success *")
	for _, m := range w.machines { // drains its session
		m.signal(syscall.SIGTERM)
		m.proc.Wait(t, patience)
	}

	// Now all of it once more.
	before := w.ledger()
	sum.add("replayed", network.Replay(t.Context(), func(path string) bool {
		return strings.HasSuffix(path, "/claim") || strings.HasSuffix(path, "/watch")
	}))
	if after := w.ledger(); !slices.Equal(before, after) {
		t.Errorf("what came again changed what was recorded:\n%s", difference(before, after))
	}
	seen := network.Repeated()
	for _, n := range seen {
		sum.add("repeated", n)
	}
	routes := w.runnerRoutes()
	sum.most("routes", len(routes))
	for _, route := range routes {
		match := asks(route)
		found := false
		for call := range seen {
			method, path, _ := strings.Cut(call, " ")
			r, err := http.NewRequestWithContext(t.Context(), method, "http://x"+path, nil)
			found = found || err == nil && match(r)
		}
		if !found {
			t.Errorf("no call of %s came twice", route)
		}
	}
	w.close()
}

// ledger is what the database holds of runs, without what every call moves:
// clocks, counters and the trail.
func (w *world) ledger() []string {
	w.t.Helper()
	return w.dump("session", "audit", "audit_head", "rejection", "runner", "org.audit_seq", "org.audit_hash")
}

// difference lists the lines that only one of two lists has.
func difference(before, after []string) string {
	var b strings.Builder
	for _, line := range before {
		if !slices.Contains(after, line) {
			fmt.Fprintln(&b, "-", line)
		}
	}
	for _, line := range after {
		if !slices.Contains(before, line) {
			fmt.Fprintln(&b, "+", line)
		}
	}
	return b.String()
}

// runnerRoutes lists the routes of runners, from what the server says of itself.
func (w *world) runnerRoutes() []string {
	w.t.Helper()
	resp, err := http.Get(w.url() + "/openapi.json")
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		w.t.Fatal(err)
	}
	var routes []string
	for path, methods := range doc.Paths {
		for method := range methods {
			if strings.HasPrefix(path, "/v1/runner/") {
				routes = append(routes, strings.ToUpper(method)+" "+path)
			}
		}
	}
	if len(routes) < 15 {
		w.t.Fatalf("routes of runners: %q", routes)
	}
	return routes
}
