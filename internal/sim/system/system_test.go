package system

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
	"forgeci/internal/source"
	"forgeci/internal/testkit"
)

func TestMain(m *testing.M) {
	flag.Int("seeds", 10, "how many seeds TestSeeds runs; one in five on PostgreSQL")
	flag.Duration("storm", 3*time.Minute, "for how long things go wrong, in virtual time")
	flag.Uint64("seed", 1, "the first seed")
	flag.Bool("history", false, "print the history of every seed")
	flag.Parse()
	os.Exit(m.Run())
}

func setting[T any](name string) T {
	v, _ := flag.Lookup(name).Value.(flag.Getter).Get().(T)
	return v
}

// patience is how long it may take, in virtual time, until everything has ended
// once nothing goes wrong any more.
const patience = time.Hour

// workflows are what runs: the scripts of executor scripts.
func workflows() map[string]string {
	return map[string]string{
		"chain.yaml": `
version: 1
name: chain
defaults: {retry: {max: 2, on: [runner_lost, runner_shutdown, prepare]}}
jobs:
  - name: make
    steps: ["out 3000\nsleep 16s\nerr 500\nfile app.bin 30000", "sleep 2s\nout 10"]
    artifacts: {publish: [{name: app, path: app.bin}]}
  - name: test
    artifacts: {restore: [{from_job: make, name: app, path: got.bin}]}
    steps: ["find got.bin\nsleep 20s\nout 20000"]
  - name: report
    steps: ["out 100"]
`,
		"siblings.yaml": `
version: 1
name: siblings
jobs:
  quick: {steps: ["out 100"]}
  slow: {steps: ["out 1000\nsleep 25s\nout 1000\nsleep 10s\nerr 2000"]}
  flaky:
    retry: {max: 2, on: [runner_lost]}
    steps: ["sleep 25s\nout 4000\nexit 3"]
    allow_failure: true
  last: {needs: [quick, flaky], steps: ["sleep 3s\nout 7"]}
  always: {needs: [slow], if: always(), steps: ["err 70"]}
`,
		"late.yaml": `
version: 1
name: late
jobs:
  short: {timeout: 20s, retry: {max: 1, on: [timeout, runner_lost]}, steps: ["out 500\nsleep 40s\nout 500"]}
  other: {steps: ["sleep 1s\nout 300", "sleep 1s\nexit 1", "out 9"]}
`,
	}
}

// world is one seed's installation.
type world struct {
	t        *testing.T
	rng      *rand.Rand
	root     string
	database string // empty: SQLite
	snap     *source.Snapshot
	net      *network
	scripts  *scripts
	hosts    []*host
	people   *protocol.Client // nothing goes wrong on its way
	far      *protocol.Client // as far away as the runners

	tokens       struct{ admin, registration string } // files
	registration string
	stopServer   func()
	transports   []*http.Transport
	runs         []ci.RunID
	began        time.Time
	later        sync.WaitGroup // repairs that are to come

	mu    sync.Mutex
	lines []string
	bad   []string
}

// Whatever befalls the network, the server and the runners: every job ends, with
// the result of one attempt, whose log and files are what that attempt wrote.
func TestSeeds(t *testing.T) {
	t.Parallel()
	snap := capture(t)
	first := setting[uint64]("seed")
	for i := range setting[int]("seeds") {
		seed := first + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), root: t.TempDir(), snap: snap}
			if i%5 == 4 {
				w.database = testkit.Postgres(t)
			}
			synctest.Test(t, func(*testing.T) { w.play() })
			w.rows()
			if len(w.bad) > 0 || setting[bool]("history") {
				t.Logf("seed %d, start it again with -args -seed %d -seeds 1 (goroutines run in another order each time)\n%s",
					seed, seed, strings.Join(w.lines, "\n"))
			}
			for _, b := range w.bad {
				t.Error(b)
			}
		})
	}
}

// capture makes the snapshot that all runs have.
func capture(t *testing.T) *source.Snapshot {
	t.Helper()
	dir := t.TempDir()
	for name, text := range workflows() {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	snap, err := source.Capture(t.Context(), dir, source.CaptureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	return snap
}

func (w *world) dir(name string) string { return filepath.Join(w.root, name) }

// tell adds a line to the history.
func (w *world) tell(format string, a ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, fmt.Sprintf("%8.3f ", time.Since(w.began).Seconds())+fmt.Sprintf(format, a...))
}

// broken notes a promise that was not kept.
func (w *world) broken(format string, a ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bad = append(w.bad, fmt.Sprintf(format, a...))
}

// must ends the test when it cannot go on.
func (w *world) must(err error) {
	if err != nil {
		panic(err)
	}
}

// log is a machine's log; warnings are part of the history.
func (w *world) log(machine string) *slog.Logger {
	return slog.New(slog.NewTextHandler(lines{w, machine}, &slog.HandlerOptions{Level: slog.LevelInfo, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

type lines struct {
	w       *world
	machine string
}

func (l lines) Write(b []byte) (int, error) {
	l.w.tell("%s: %s", l.machine, strings.TrimSpace(string(b)))
	return len(b), nil
}

// play is a seed in its bubble.
func (w *world) play() {
	w.began = time.Now()
	w.net = newNetwork(rand.New(rand.NewPCG(w.rng.Uint64(), 2)), w.tell)
	w.scripts = &scripts{tell: w.tell, attempts: map[protocol.AttemptRef]*attempt{}, busy: map[ci.JobID]int64{}}
	w.serve()
	admin := w.token(w.tokens.admin)
	w.registration = w.token(w.tokens.registration)
	w.people, w.far = w.client(people, admin), w.client("far", admin)
	for i := range 2 + w.rng.IntN(2) {
		h := &host{w: w, name: fmt.Sprintf("host%d", i), slots: 1 + w.rng.IntN(2)}
		w.hosts = append(w.hosts, h)
		h.start()
	}
	w.submit("chain.yaml")
	w.submit("siblings.yaml")
	for time.Since(w.began) < setting[time.Duration]("storm") {
		pass(time.Duration(w.rng.Int64N(int64(9 * time.Second))))
		w.disturb()
	}
	w.later.Wait()
	w.tell("everything is repaired")
	w.net.heal()
	if w.settle() {
		w.judge()
	}
	for _, h := range w.hosts {
		h.stop(true)
	}
	w.halt(false)
	for _, t := range w.transports {
		t.CloseIdleConnections()
	}
	w.net.down()
	w.bad = append(w.bad, w.scripts.broken...)
}

func (w *world) token(file string) string {
	b, err := os.ReadFile(file)
	w.must(err)
	return strings.TrimSpace(string(b))
}

// submit makes a run, from afar, with one key until there is an answer.
func (w *world) submit(file string) {
	key := fmt.Sprintf("run%d", len(w.runs))
	var id ci.RunID
	w.insist(func(ctx context.Context) error {
		repo, err := w.far.EnsureLocalRepo(ctx, protocol.EnsureLocalRepo{Name: "hello", Key: sum("hello")})
		if err != nil {
			return err
		}
		if _, found, err := w.far.FindSnapshot(ctx, repo.ID, w.snap.Digest); err != nil {
			return err
		} else if !found {
			if _, err := w.far.PutSnapshot(ctx, repo.ID, w.snap.Digest, w.snap.Open(), w.snap.Size); err != nil {
				return err
			}
		}
		got, err := w.far.CreateRun(ctx, repo.ID, key, protocol.CreateRun{WorkflowPath: file, Snapshot: w.snap.Digest})
		id = got.RunID
		return err
	})
	w.runs = append(w.runs, id)
	w.tell("submitted %s: %s", file, id)
}

// pass lets virtual time pass.
func pass(d time.Duration) { <-time.After(d) }

// insist makes a call of people again until it is answered.
func (w *world) insist(call func(context.Context) error) {
	for {
		err := call(context.Background())
		switch ci.KindOf(err) {
		case ci.ErrUnavailable, ci.ErrRateLimited:
			pass(2 * time.Second)
			continue
		case ci.ErrConflict: // it has finished, or not yet
		default:
			w.must(err)
		}
		return
	}
}

// disturb lets one thing happen.
func (w *world) disturb() {
	r := w.rng
	h := w.hosts[r.IntN(len(w.hosts))]
	machine := h.name
	if r.IntN(6) == 0 {
		machine = "far"
	}
	switch k := r.IntN(20); {
	case k < 6:
		how := refused + fate(r.IntN(2))
		long := []time.Duration{3 * time.Second, 8 * time.Second, 15 * time.Second, 30 * time.Second, 70 * time.Second}[r.IntN(5)]
		w.net.fault("machine cut off")
		w.tell("%s is cut off for %s, how: %d", machine, long, how)
		w.net.cutOff(machine, how)
		if r.IntN(3) > 0 {
			pass(long)
			w.tell("%s is joined again", machine)
			w.net.cutOff(machine, 0)
			return
		}
		w.later.Go(func() {
			pass(long)
			w.tell("%s is joined again", machine)
			w.net.cutOff(machine, 0)
		})
	case k < 9:
		w.net.fault("server restarted")
		w.halt(r.IntN(2) == 0)
		pass([]time.Duration{0, time.Second, 5 * time.Second, 12 * time.Second, 45 * time.Second}[r.IntN(5)])
		w.serve()
	case k < 12:
		w.net.fault("runner restarted")
		h.stop(r.IntN(2) == 0)
		pass([]time.Duration{0, time.Second, 10 * time.Second, 30 * time.Second}[r.IntN(4)])
		h.start()
	case k < 15 && len(w.runs) < 7:
		files := []string{"chain.yaml", "siblings.yaml", "late.yaml"}
		w.submit(files[r.IntN(len(files))])
	case k < 16 && len(w.runs) > 2:
		id := w.runs[2+r.IntN(len(w.runs)-2)]
		w.tell("cancel %s", id)
		w.insist(func(ctx context.Context) error {
			_, err := w.far.Cancel(ctx, id)
			return err
		})
	case k < 17 && len(w.runs) < 7:
		id, key := w.runs[r.IntN(len(w.runs))], fmt.Sprintf("retry%d", len(w.runs))
		w.tell("retry %s", id)
		w.insist(func(ctx context.Context) error {
			got, err := w.far.Retry(ctx, id, key, protocol.RetryRun{Failed: r.IntN(2) == 0})
			if err == nil {
				w.runs = append(w.runs, got.RunID)
			}
			return err
		})
	}
}

// settle waits until every run has ended and no slot is taken.
func (w *world) settle() bool {
	for range int(patience / (5 * time.Second)) {
		pass(5 * time.Second)
		over := true
		for _, id := range w.runs {
			run, err := w.people.Run(context.Background(), id)
			w.must(err)
			over = over && run.State == ci.StateFinished
		}
		runners, err := w.people.Runners(context.Background(), "")
		w.must(err)
		for _, r := range runners.Items {
			over = over && len(r.Running) == 0
		}
		if over {
			w.tell("everything has ended")
			return true
		}
	}
	for _, id := range w.runs {
		run, err := w.people.Run(context.Background(), id)
		w.must(err)
		w.broken("stuck: run %s is %s, its jobs %+v", id, run.State, run.JobList)
	}
	return false
}

// judge compares what the server says with what the scripts did.
func (w *world) judge() {
	for _, id := range w.runs {
		run, err := w.people.Run(context.Background(), id)
		w.must(err)
		for _, summary := range run.JobList {
			job, err := w.people.Job(context.Background(), summary.ID)
			w.must(err)
			w.tell("%s %s: %s %s %s, %d attempts", id, job.Name, job.State, job.Conclusion, job.Reason, len(job.Attempt))
			w.judgeJob(job)
		}
	}
}

func (w *world) judgeJob(job protocol.Job) {
	if job.State != ci.StateFinished {
		w.broken("job %s %s is %s in a run that has finished", job.ID, job.Name, job.State)
	}
	winners, lost := 0, 0
	for _, a := range job.Attempt {
		switch a.Reason {
		case ci.ReasonNone, ci.ReasonExit, ci.ReasonTimeout, ci.ReasonCancelled, ci.ReasonUser:
		default:
			lost++
		}
		if a.Winner {
			winners++
			w.judgeWinner(job, a)
		}
	}
	if lost > infraMost || len(job.Attempt) > infraMost+retriesMax {
		w.broken("job %s %s: %d attempts, %d of them ended by infrastructure", job.ID, job.Name, len(job.Attempt), lost)
	}
	ran := job.Conclusion == ci.ConclusionSuccess && job.Reason != ci.ReasonPinned
	if winners > 1 || ran && winners != 1 {
		w.broken("job %s %s is %s with %d winners", job.ID, job.Name, job.Conclusion, winners)
	}
}

// judgeWinner compares a winning attempt with what its script did.
func (w *world) judgeWinner(job protocol.Job, a protocol.Attempt) {
	what := fmt.Sprintf("job %s %s attempt %d (%s %s)", job.ID, job.Name, a.Epoch, a.Conclusion, a.Reason)
	w.scripts.mu.Lock()
	did := w.scripts.attempts[protocol.AttemptRef{Job: job.ID, Epoch: a.Epoch}]
	w.scripts.mu.Unlock()
	ended := a.Conclusion == ci.ConclusionSuccess || a.Reason == ci.ReasonExit
	switch {
	case did == nil && !ended:
		return // cancelled before it began
	case did == nil:
		w.broken("%s: nothing ran", what)
		return
	case ended && a.Conclusion == ci.ConclusionSuccess && len(did.exits) != len(job.Spec.Steps):
		w.broken("%s: %d of %d steps ran to their end", what, len(did.exits), len(job.Spec.Steps))
	}
	worst := 0
	for _, code := range did.exits {
		worst = max(worst, code)
	}
	if ended && (a.Conclusion == ci.ConclusionSuccess) != (worst == 0) {
		w.broken("%s: the script ended with exit code %d", what, worst)
	}
	if !ended {
		return
	}
	for s, wrote := range did.wrote {
		got := w.readLog(job.ID, a.Epoch, s)
		if sum(got) == sum(wrote.String()) {
			continue
		}
		// A runner that is told to stop does not wait for its log: what is missing
		// then is a marked end.
		if h := w.hostOf(did.host); a.LogGap && h.gaveUp(did.began, *a.EndedAt) && strings.HasPrefix(wrote.String(), got) {
			w.tell("%s: the end of its log is marked as lost", what)
			continue
		}
		w.broken("%s: %s of step %d has %d bytes, the script wrote %d; gap: %t", what, s.name, s.step, len(got), wrote.Len(), a.LogGap)
	}
	for name, text := range did.files {
		if name == "got.bin" {
			w.judgeFile(job, what, "app.bin", text)
		}
	}
}

// judgeFile compares a file that a job found with what the winning attempt before
// it made.
func (w *world) judgeFile(job protocol.Job, what, name, text string) {
	run, err := w.people.Run(context.Background(), job.Run.ID)
	w.must(err)
	for _, other := range run.JobList {
		if other.Name != "make" || other.Reason == ci.ReasonPinned {
			continue
		}
		maker, err := w.people.Job(context.Background(), other.ID)
		w.must(err)
		for _, a := range maker.Attempt {
			if !a.Winner {
				continue
			}
			w.scripts.mu.Lock()
			made := w.scripts.attempts[protocol.AttemptRef{Job: maker.ID, Epoch: a.Epoch}].files[name]
			w.scripts.mu.Unlock()
			if made != text {
				w.broken("%s found a %s that attempt %d of %s did not make", what, name, a.Epoch, maker.ID)
			}
		}
	}
}

func (w *world) hostOf(name string) *host {
	for _, h := range w.hosts {
		if h.name == name {
			return h
		}
	}
	panic("no host " + name)
}

func (w *world) readLog(id ci.JobID, epoch int64, s stream) string {
	l, err := w.people.JobLog(context.Background(), id, protocol.LogQuery{Attempt: epoch, Step: &s.step, Stream: s.name})
	w.must(err)
	defer func() { _ = l.Close() }()
	b, err := io.ReadAll(l)
	w.must(err)
	return string(b)
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// rows looks at what is left in the database.
func (w *world) rows() {
	url := w.database
	if url == "" {
		url = "sqlite:" + filepath.Join(w.dir("server"), "forgeci.db")
	}
	s, err := store.Open(w.t.Context(), store.Options{URL: url, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	bad, err := s.Inconsistencies(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, b := range bad {
		w.broken("inconsistent: %s", b)
	}
}
