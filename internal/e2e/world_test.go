// Package e2e_test breaks whole installations on purpose: servers, runners and
// databases are real processes, and each test kills, pauses, cuts off or
// restarts some of them in the middle of a job. Whatever was done to them, the
// books must balance in the end: one winner for each job, nothing of a loser in
// what the winner left, no process and no slot left over, every refused call
// counted, and an audit trail without a hole.
package e2e_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/blob/s3"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// TestMain lets more tests run at once than there are processors: they wait for
// leases and signals most of the time.
func TestMain(m *testing.M) {
	chaosFlags()
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "6"); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if dir := setting[string]("summary"); dir != "" {
		failed, err := chaosSummary(dir, setting[string]("test.run"))
		if err != nil {
			panic(err)
		}
		if failed > 0 && code == 0 {
			fmt.Fprintln(os.Stderr, "FAIL: checks of chaos have failed or are missing: see the summary")
			code = 1
		}
	}
	os.Exit(code)
}

const (
	// ttl is the leases' length: long enough that a busy machine loses none by
	// itself, short enough to wait for its end.
	ttl = 4 * time.Second
	// calm is the same for tests that wait for no lease's end: a machine whose disk
	// stands still for seconds changes nothing there.
	calm = 20 * time.Second
	// patience is how long anything may take that has no limit of its own.
	patience = 60 * time.Second
)

// config says what an installation stands on.
type config struct {
	ttl      time.Duration // ttl if not set
	database string        // SQLite if not set
	blob     *s3.Config    // the data directory if not set
	data     string        // a temporary directory if not set
	// second starts another server on the database and the object store, and a
	// balancer before both.
	second bool
}

// world is one installation: a server, or two, runners' machines, and a place
// where jobs and the test leave signs for each other.
type world struct {
	t        *testing.T
	config   config
	data     string
	addr     string
	other    *node             // the second server; nil if there is none
	front    *testkit.Balancer // before both; nil if there is one
	mark     string            // variable in the environment of every process of every job
	house    string            // the same for the server, the runners and all commands
	signs    string
	server   *testkit.Process
	people   *protocol.Client
	machines []*machine
	// abandoned is how many uploads of attempts that were lost may be open in the
	// end; they are collected within a day.
	abandoned int
	ended     func() // called when all processes have ended, before the books are read
}

// newWorld starts a server. What is left of its jobs when the test ends is
// killed, and so are the server and the runners.
func newWorld(t *testing.T, c config) *world {
	t.Helper()
	if c.ttl == 0 {
		c.ttl = ttl
	}
	id := rand.Text()
	if c.data == "" {
		c.data = filepath.Join(t.TempDir(), "server")
	}
	w := &world{
		t: t, config: c, data: c.data, addr: testkit.FreeAddr(t),
		mark: "E2E_JOB=" + id, house: "E2E_HOUSE=" + id, signs: t.TempDir(),
	}
	t.Cleanup(func() {
		for _, pid := range testkit.ProcessesWith(t, w.mark) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may just have ended
		}
	})
	w.serve()
	if c.second {
		w.join()
	}
	client, err := protocol.NewClient(protocol.ClientConfig{BaseURL: w.url(), Token: w.token("admin.token")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.CloseIdle)
	w.people = client
	return w
}

// url is where runners and people reach the installation.
func (w *world) url() string {
	if w.front != nil {
		return w.front.URL()
	}
	return "http://" + w.addr
}

// serve starts the server, again on the same data and address after its end.
func (w *world) serve() {
	w.t.Helper()
	w.server = w.start(w.data, w.addr)
}

// start starts a server process and returns when it is ready.
func (w *world) start(data, addr string) *testkit.Process {
	w.t.Helper()
	args := []string{"server", "--data", data, "--listen", addr, "--lease-ttl", w.config.ttl.String()}
	if w.config.database != "" {
		args = append(args, "--database", w.config.database)
	}
	if b := w.config.blob; b != nil {
		args = append(args, "--blob", fmt.Sprintf("s3://%s:%s@%s/%s?insecure=true", b.AccessKey, b.SecretKey, b.Endpoint, b.Bucket))
	}
	p := testkit.Start(w.t, testkit.Command{Args: args, Env: []string{w.house}})
	p.WaitReady(w.t, "http://"+addr+"/readyz")
	return p
}

// node is a server beside the first one.
type node struct {
	data, addr string
	proc       *testkit.Process // the latest
}

// join starts the second server, with the key and the tokens of the first, and
// the balancer.
func (w *world) join() {
	w.t.Helper()
	w.other = &node{data: filepath.Join(w.t.TempDir(), "server"), addr: testkit.FreeAddr(w.t)}
	if err := os.Mkdir(w.other.data, 0o700); err != nil {
		w.t.Fatal(err)
	}
	for _, name := range []string{"server.key", "admin.token", "registration.token"} {
		b, err := os.ReadFile(filepath.Join(w.data, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(w.other.data, name), b, 0o600)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	w.other.proc = w.start(w.other.data, w.other.addr)
	w.front = testkit.NewBalancer(w.t, w.addr, w.other.addr)
	w.front.WaitReady(w.t)
}

// token reads a token that the server made.
func (w *world) token(name string) string {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.data, name))
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// forgeci runs a command of the command line to its end.
func (w *world) forgeci(args ...string) testkit.Result {
	w.t.Helper()
	return testkit.Run(w.t, testkit.Command{Args: args, Env: []string{
		w.house, "FORGECI_SERVER=" + w.url(), "FORGECI_TOKEN=" + w.token("admin.token"),
	}})
}

// submit submits a checkout: a workflow of the given jobs, indented as they
// stand below `jobs:`, and other files. Every step finds the mark and the
// directory of signs in its environment.
func (w *world) submit(jobs string, files map[string]string) ci.RunID {
	w.t.Helper()
	r := w.forgeci("submit", w.checkout(jobs, files))
	if r.Code != 0 {
		w.t.Fatalf("submit ended with %d", r.Code)
	}
	return ci.RunID(strings.TrimSpace(r.Stdout))
}

// checkout makes what submit submits.
func (w *world) checkout(jobs string, files map[string]string) string {
	w.t.Helper()
	dir := filepath.Join(w.t.TempDir(), "checkout")
	name, value, _ := strings.Cut(w.mark, "=")
	all := map[string]string{
		".forgeci.yaml": fmt.Sprintf("version: 1\nenv:\n  %s: %s\n  SIGNS: %s\njobs:\n%s", name, value, w.signs, jobs),
	}
	maps.Copy(all, files)
	for name, text := range all {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			w.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
	return dir
}

// Shell lines for steps: a step says that it has come so far, and waits for the
// test's word.
const (
	shSay   = `touch "$SIGNS/$CI_JOB_NAME.$CI_ATTEMPT"`
	shAwait = `while [ ! -e "$SIGNS/go" ]; do sleep 0.05; done`
)

// came waits until an attempt of a job has left its sign.
func (w *world) came(job string, attempt int) {
	w.t.Helper()
	name := filepath.Join(w.signs, fmt.Sprintf("%s.%d", job, attempt))
	w.until(patience, "attempt of "+filepath.Base(name)+" to come so far", func() bool {
		_, err := os.Stat(name)
		return err == nil
	})
}

// sign leaves a sign for the jobs: "go" ends what waits by shAwait.
func (w *world) sign(name string) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.signs, name), nil, 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// until waits for something to become true.
func (w *world) until(limit time.Duration, what string, is func() bool) time.Duration {
	w.t.Helper()
	began := time.Now()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		if time.Since(began) > limit {
			w.t.Fatalf("waited %v for %s", limit, what)
		}
		<-tick.C
	}
	return time.Since(began)
}

// pass lets time pass while something is broken: the one place where a test
// waits for nothing but time.
func pass(d time.Duration) { <-time.After(d) }

// run reads a run; ok is false while the server does not answer.
func (w *world) run(id ci.RunID) (run protocol.Run, ok bool) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
	defer cancel()
	run, err := w.people.Run(ctx, id)
	return run, err == nil
}

// job reads a job of a run by its name.
func (w *world) job(run ci.RunID, name string) protocol.Job {
	w.t.Helper()
	var found protocol.Job
	w.until(patience, "job "+name, func() bool {
		r, ok := w.run(run)
		if !ok {
			return false
		}
		i := slices.IndexFunc(r.JobList, func(j protocol.JobSummary) bool { return j.Name == name })
		if i < 0 {
			w.t.Fatalf("run %s has no job %s", run, name)
		}
		job, err := w.people.Job(w.t.Context(), r.JobList[i].ID)
		found = job
		return err == nil
	})
	return found
}

// finished waits for the end of a run and for the logs of all its attempts to be
// sealed.
func (w *world) finished(id ci.RunID) protocol.Run {
	w.t.Helper()
	var run protocol.Run
	w.until(patience, "the end of run "+string(id), func() bool {
		r, ok := w.run(id)
		run = r
		return ok && r.State == ci.StateFinished
	})
	for _, j := range run.JobList {
		if j.PinnedFrom != "" {
			continue
		}
		w.until(patience, "the logs of job "+j.Name+" to be sealed", func() bool {
			job, err := w.people.Job(w.t.Context(), j.ID)
			return err == nil && !slices.ContainsFunc(job.Attempt, func(a protocol.Attempt) bool { return !a.LogSealed })
		})
	}
	return run
}

// log returns what an attempt of a job wrote to a stream, of all steps.
func (w *world) log(job ci.JobID, attempt int64, stream string) string {
	w.t.Helper()
	l, err := w.people.JobLog(w.t.Context(), job, protocol.LogQuery{Attempt: attempt, Stream: stream})
	if err != nil {
		w.t.Fatalf("log of %s, attempt %d: %v", job, attempt, err)
	}
	defer l.Close()
	var b bytes.Buffer
	if _, err := io.Copy(&b, l); err != nil {
		w.t.Fatalf("log of %s, attempt %d: %v", job, attempt, err)
	}
	return b.String()
}

// logged waits until the log of an attempt, as people can read it, ends with the
// text.
func (w *world) logged(run ci.RunID, name string, attempt int64, text string) {
	w.t.Helper()
	id := w.job(run, name).ID
	w.until(patience, "the log of attempt "+strconv.FormatInt(attempt, 10), func() bool {
		return strings.HasSuffix(w.log(id, attempt, "stdout"), text)
	})
}

// machine is a host with one runner: a data directory of its own that no other
// machine knows.
type machine struct {
	w      *world
	name   string
	data   string
	server string // the address under which it reaches the server
	args   []string
	proc   *testkit.Process // the latest; nil before the first start
}

// machine makes a host whose runner offers one slot and the labels.
func (w *world) machine(name string, labels ...string) *machine {
	m := &machine{w: w, name: name, data: filepath.Join(w.t.TempDir(), "runner"), server: w.url()}
	for _, l := range labels {
		m.args = append(m.args, "--label", l)
	}
	w.machines = append(w.machines, m)
	return m
}

// start starts the machine's runner and returns when it has a session.
func (m *machine) start() *machine {
	m.w.t.Helper()
	m.boot()
	m.w.until(patience, "a session of "+m.name, func() bool { return strings.Contains(m.proc.Stderr(), "session opened") })
	return m
}

// boot starts the machine's runner.
func (m *machine) boot() {
	m.w.t.Helper()
	m.proc = testkit.Start(m.w.t, testkit.Command{
		Args: append([]string{"runner", "--server", m.server, "--data", m.data, "--name", m.name, "--slots", "1"}, m.args...),
		Env:  []string{m.w.house, "FORGECI_TOKEN=" + m.w.token("registration.token")},
	})
}

func (m *machine) signal(sig syscall.Signal) { m.w.t.Helper(); m.proc.Signal(m.w.t, sig) }

// kill ends the runner as a crash would.
func (m *machine) kill() {
	m.w.t.Helper()
	m.signal(syscall.SIGKILL)
	m.proc.Wait(m.w.t, patience)
}

// running says whether the runner's process has not ended.
func (m *machine) running() bool {
	if m.proc == nil {
		return false
	}
	select {
	case <-m.proc.Exited():
		return false
	default:
		return true
	}
}

// impostor is what comes back to life: it has the machine's own credential and
// the exact lease of an earlier attempt.
type impostor struct {
	w      *world
	client *protocol.Client
	lease  ci.LeaseRef
}

// impostor takes over the identity of the machine for an attempt that it had.
func (m *machine) impostor(job protocol.Job, attempt int) impostor {
	m.w.t.Helper()
	text, err := os.ReadFile(filepath.Join(m.data, "credential.json"))
	if err != nil {
		m.w.t.Fatal(err)
	}
	var have struct{ Credential string }
	if err := json.Unmarshal(text, &have); err != nil {
		m.w.t.Fatal(err)
	}
	client, err := protocol.NewClient(protocol.ClientConfig{BaseURL: m.w.url(), Token: have.Credential})
	if err != nil {
		m.w.t.Fatal(err)
	}
	m.w.t.Cleanup(client.CloseIdle)
	a := job.Attempt[slices.IndexFunc(job.Attempt, func(a protocol.Attempt) bool { return a.Epoch == int64(attempt) })]
	return impostor{m.w, client, ci.LeaseRef{
		Run: job.Run.ID, Job: job.ID, Runner: a.Runner, Session: a.Session, Lease: a.Lease, Epoch: a.Epoch,
	}}
}

// read reads a sign that a job has left.
func (w *world) read(name string) string {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.signs, name))
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

// there says whether a sign was left.
func (w *world) there(name string) bool {
	_, err := os.Stat(filepath.Join(w.signs, name))
	return err == nil
}

func has(text, part string) bool { return strings.Contains(text, part) }

// childrenOf lists the processes that a process has started and that have not
// ended.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for field := range strings.FieldsSeq(string(b)) {
			n, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, n)
		}
	}
	return all
}

// after says whether a job's log has grown since now.
func after(w *world, job ci.JobID) func() bool {
	read := func() int {
		slice, err := w.people.LogLines(w.t.Context(), job, protocol.LogQuery{Tail: 1})
		if err != nil {
			return -1
		}
		return int(slice.Total)
	}
	first := -1
	return func() bool {
		n := read()
		if first < 0 {
			first = n
		}
		return n > first && first >= 0
	}
}
