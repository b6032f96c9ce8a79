package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// These tests run the real binary against its real server and runner.

// mark is in the environment of everything that a test starts, jobs included.
func mark(t *testing.T) (name, variable string) {
	t.Helper()
	value := strings.ToLower(strings.NewReplacer("/", "_", " ", "_").Replace(t.Name())) + filepath.Base(t.TempDir())
	return value, "CLI_TEST_MARK=" + value
}

// nothingLeft demands that nothing of the test is alive.
func nothingLeft(t *testing.T, variable string) {
	t.Helper()
	var left []int
	gone := until(func() bool {
		left = testkit.ProcessesWith(t, variable)
		return len(left) == 0
	})
	if gone {
		return
	}
	for _, pid := range left {
		line, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline"))
		t.Errorf("process %d is left: %q %v", pid, line, err)
	}
}

func itoa(n int) string { return strings.TrimSpace(string(must(json.Marshal(n)))) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// tree writes files into a fresh directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// workflow adds the mark to a workflow's environment.
func workflow(value, jobs string) map[string]string {
	return map[string]string{".forgeci.yaml": "version: 1\nname: ci\nenv: {CLI_TEST_MARK: " + value + "}\njobs:\n" + jobs}
}

// `forgeci run` needs no server, ends with the run's code, prints what jobs write
// behind their names, and leaves neither a process nor a file.
func TestRunWithoutServer(t *testing.T) {
	t.Parallel()
	value, variable := mark(t)
	temp := t.TempDir()
	dir := tree(t, workflow(value, `
  build:
    steps: ["echo made >out.txt; echo building; echo to stderr >&2"]
    artifacts: {publish: [{name: out, path: out.txt}]}
  test:
    needs: build
    steps: ["cat in.txt; exit $CODE"]
    env: {CODE: "0"}
    artifacts: {restore: [{from_job: build, name: out, path: in.txt}]}
  other:
    reports: {kind: junit, path: out.xml}
    steps: ["exit 7"]
`))
	run := func(args ...string) testkit.Result {
		r := testkit.Run(t, testkit.Command{Args: append([]string{"run"}, args...), Dir: dir, Env: []string{variable, "TMPDIR=" + temp}})
		nothingLeft(t, variable)
		if left := must(os.ReadDir(temp)); len(left) > 0 {
			t.Errorf("%v is left in the temporary directory", left)
		}
		return r
	}
	save := filepath.Join(t.TempDir(), "saved")
	r := run("--job", "test", "--artifacts", save)
	if r.Code != 0 {
		t.Fatalf("code %d, want 0", r.Code)
	}
	for _, line := range []string{"build | building\n", "build | to stderr\n", "test  | made\n"} {
		if !strings.Contains(r.Stdout, line) {
			t.Errorf("stdout lacks %q:\n%s", line, r.Stdout)
		}
	}
	if strings.Contains(r.Stdout+r.Stderr, "\x1b") || strings.Contains(r.Stdout+r.Stderr, "other") {
		t.Errorf("control codes, or a job that was not asked for:\n%s%s", r.Stdout, r.Stderr)
	}
	if !strings.Contains(r.Stderr, "ci: success in ") {
		t.Errorf("stderr lacks the summary:\n%s", r.Stderr)
	}
	if got := must(os.ReadFile(filepath.Join(save, "out", "out.txt"))); string(got) != "made\n" {
		t.Errorf("saved artifact: %q", got)
	}
	r = run()
	if r.Code != 1 || !strings.Contains(r.Stderr, "other: failed") {
		t.Errorf("a failing job: code %d, want 1\n%s", r.Code, r.Stderr)
	}
	if strings.Count(r.Stderr, "warning: `reports` has no effect yet") != 1 {
		t.Errorf("what has no effect is told once:\n%s", r.Stderr)
	}
	r = run("--job", "build", "--output", "json")
	var doc protocol.Run
	if err := json.Unmarshal([]byte(r.Stdout), &doc); err != nil || doc.State != "finished" || doc.Conclusion != "success" {
		t.Errorf("one document was promised: %v\n%s", err, r.Stdout)
	}
	if !strings.Contains(r.Stderr, "build | building\n") {
		t.Errorf("with a document on stdout, the log belongs on stderr:\n%s", r.Stderr)
	}
	if r := run("--job", "nothing"); r.Code != 2 {
		t.Errorf("an unknown job: code %d, want 2", r.Code)
	}
}

// Artifacts of one name, of the legs of a matrix and of other jobs, are saved
// beside each other, and the command says where each is.
func TestRunSavesArtifactsOfOneName(t *testing.T) {
	t.Parallel()
	value, variable := mark(t)
	dir := tree(t, workflow(value, `
  test:
    matrix: {n: ["1", "2"]}
    env: {N: "${{ matrix.n }}"}
    steps: ["echo leg $N >coverage.txt"]
    artifacts: {publish: [{name: coverage, path: coverage.txt}]}
  lint:
    steps: ["echo lint >coverage.txt; echo report >report.txt"]
    artifacts: {publish: [{name: coverage, path: coverage.txt}, {name: report, path: report.txt}]}
`))
	save := filepath.Join(t.TempDir(), "saved")
	r := testkit.Run(t, testkit.Command{Args: []string{"run", "--artifacts", save}, Dir: dir, Env: []string{variable}})
	if r.Code != 0 {
		t.Fatalf("code %d, want 0", r.Code)
	}
	for place, of := range map[string]struct{ job, file, text string }{
		"coverage/test-1": {"test (1)", "coverage.txt", "leg 1\n"},
		"coverage/test-2": {"test (2)", "coverage.txt", "leg 2\n"},
		"coverage/lint":   {"lint", "coverage.txt", "lint\n"},
		"report":          {"lint", "report.txt", "report\n"},
	} {
		where := filepath.Join(save, filepath.FromSlash(place))
		if got, err := os.ReadFile(filepath.Join(where, of.file)); err != nil || string(got) != of.text {
			t.Errorf("%s: %q, %v", place, got, err)
		}
		if want := "saved " + where + " of " + of.job + ": "; !strings.Contains(r.Stderr, want) {
			t.Errorf("stderr lacks %q:\n%s", want, r.Stderr)
		}
	}
}

// Interrupting, a time limit and the first failure end a local run with
// everything that it started, also what ignores SIGTERM and has left its session.
func TestRunWithoutServerStops(t *testing.T) {
	t.Parallel()
	const stubborn = `"trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 300' & echo started; sleep 300"`
	const slow = `"echo started; sleep 300"`
	for name, tc := range map[string]struct {
		jobs string
		args []string
		sig  syscall.Signal
		code int
	}{
		"interrupted": {"  slow: {steps: [" + stubborn + "]}\n", nil, syscall.SIGINT, 130},
		"terminated":  {"  slow: {steps: [" + slow + "]}\n", nil, syscall.SIGTERM, 143},
		"time limit":  {"  slow: {steps: [" + slow + "]}\n", []string{"--timeout", "2s", "--output", "json"}, 0, 124},
		"fail fast": {
			"  slow: {steps: [" + slow + "]}\n  quick: {steps: [\"sleep 1; false\"]}\n",
			[]string{"--fail-fast", "--slots", "2", "--output", "json"},
			0, 1,
		},
		// Server, runner and jobs notice that the command is gone.
		"killed": {"  slow: {steps: [" + stubborn + "]}\n", nil, syscall.SIGKILL, 137},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			value, variable := mark(t)
			p := testkit.Start(t, testkit.Command{
				Args: append([]string{"run"}, tc.args...), Dir: tree(t, workflow(value, tc.jobs)), Env: []string{variable},
			})
			if tc.sig != 0 {
				until(func() bool { return strings.Contains(p.Stdout(), "| started") })
				p.Signal(t, tc.sig)
			}
			if code := p.Wait(t, time.Minute); code != tc.code {
				t.Errorf("code %d, want %d", code, tc.code)
			}
			nothingLeft(t, variable)
			if tc.sig != 0 {
				return
			}
			var doc protocol.Run // the run as it was read last
			if err := json.Unmarshal([]byte(p.Stdout()), &doc); err != nil || doc.ID == "" || doc.State != "cancelling" {
				t.Errorf("%v: %q", err, p.Stdout())
			}
			if name == "fail fast" && !strings.Contains(p.Stderr(), "\ncancelling: job quick: failed\n") {
				t.Errorf("it does not say why it cancels: %s", p.Stderr())
			}
		})
	}
}

// install is a real server with a runner beside it.
type install struct {
	t        *testing.T
	dir, url string
	variable string
	env      []string // of the server, beside the variable
	server   *testkit.Process
}

func startServer(t *testing.T, args ...string) *install {
	t.Helper()
	_, variable := mark(t)
	in := &install{t: t, dir: t.TempDir(), variable: variable}
	in.start(append([]string{"--listen", "127.0.0.1:0"}, args...)...)
	return in
}

func (in *install) start(args ...string) {
	in.t.Helper()
	address := filepath.Join(in.dir, "address")
	_ = os.Remove(address)
	in.server = testkit.Start(in.t, testkit.Command{
		Args: append([]string{"server", "--address-file", address}, args...), Dir: in.dir, Env: append(in.env, in.variable),
	})
	started := until(func() bool {
		b, err := os.ReadFile(address)
		in.url = strings.TrimSpace(string(b))
		return err == nil
	})
	if !started {
		in.t.Fatalf("the server did not start:\n%s", in.server.Stderr())
	}
	in.server.WaitReady(in.t, in.url+"/healthz")
}

// forgeci runs a command in the directory with the data directory, so that it
// finds the token there.
func (in *install) forgeci(args ...string) testkit.Result {
	in.t.Helper()
	return testkit.Run(in.t, in.command(args...))
}

func (in *install) command(args ...string) testkit.Command {
	return testkit.Command{Args: args, Dir: in.dir, Env: []string{"FORGECI_SERVER=" + in.url, in.variable}}
}

// want demands a code and returns standard output.
func (in *install) want(code int, args ...string) string {
	in.t.Helper()
	r := in.forgeci(args...)
	if r.Code != code {
		in.t.Fatalf("forgeci %s: code %d, want %d\n%s%s", strings.Join(args, " "), r.Code, code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// A whole day's work with the real server: submit, show, logs, artifacts,
// explain, retry, cancel, runners, and the end of it.
func TestServerWithRunnerBeside(t *testing.T) {
	t.Parallel()
	in := startServer(t, "--runner", "--lease-ttl", "6s")
	value := strings.TrimPrefix(in.variable, "CLI_TEST_MARK=")
	good := tree(t, workflow(value, "  hi: {steps: [\"printf 'one\\\\ntwo\\\\377\\\\n'; echo err >&2\"]}\n"))
	run := strings.TrimSpace(in.want(0, "submit", "--wait", good))
	if !strings.HasPrefix(run, "run_") || strings.ContainsAny(run, " \n") {
		t.Fatalf("stdout %q: the ID of the run alone was promised", run)
	}
	if out := in.want(0, "show", run); !strings.Contains(out, "success") || !strings.Contains(out, "hi") {
		t.Errorf("show: %s", out)
	}
	for _, args := range [][]string{{"logs", run}, {"logs", run + "/hi"}, {"logs", "-f", run}, {"logs", "--step", "1", run}} {
		if out := in.want(0, args...); len(out) != len("one\ntwo\xff\nerr\n") || !strings.Contains(out, "two\xff\n") || !strings.Contains(out, "err\n") {
			t.Errorf("%v: %q", args, out)
		}
	}
	if out := in.want(0, "logs", "--step", "1", "--stream", "stdout", run); out != "one\ntwo\xff\n" {
		t.Errorf("one stream: %q", out)
	}
	if out := in.want(0, "logs", "--tail", "1", "--stream", "stdout", run); out != "two\xff\n" {
		t.Errorf("tail: %q", out)
	}
	in.want(2, "logs", "--step", "nothing", run)
	if out := in.want(0, "explain", run); !strings.Contains(out, "claimed") {
		t.Errorf("explain: %s", out)
	}
	if out := in.want(0, "runner", "list"); !strings.Contains(out, "online") {
		t.Errorf("runner list: %s", out)
	}
	in.want(0, "deadletters")
	in.want(4, "show", "run_00000000000000000000000000")
	in.want(4, "cancel", run)
	in.want(0, "cancel", "--wait", run)
	bad := tree(t, workflow(value, "  no: {steps: [\"exit 3\"]}\n"))
	in.want(1, "submit", "--wait", bad)
	late := tree(t, workflow(value, "  late: {timeout: 1s, steps: [\"sleep 60\"]}\n"))
	in.want(1, "submit", "--wait", late)
	in.want(2, "submit", tree(t, map[string]string{".forgeci.yaml": "version: 2\n"}))

	long := tree(t, workflow(value, "  long: {steps: [\"seq 3000\"]}\n"))
	run = strings.TrimSpace(in.want(0, "submit", "--wait", long))
	if out := in.want(0, "logs", "-f", "--tail", "2500", run); len(out) != 499*4+2001*5 || !strings.HasPrefix(out, "501\n") || !strings.HasSuffix(out, "\n3000\n") {
		t.Errorf("the last 2500 of 3000 lines, followed, are %d bytes: %.20q", len(out), out)
	}

	slow := tree(t, workflow(value, "  slow: {steps: [\"echo begun; exec sleep 300\"]}\n"))
	run = strings.TrimSpace(in.want(0, "submit", slow))
	follower := testkit.Start(t, in.command("logs", "-f", run))
	until(func() bool { return strings.Contains(follower.Stdout(), "begun\n") })
	in.want(124, "show", "--wait", "--timeout", "100ms", run)
	in.want(3, "cancel", "--wait", run)
	in.want(3, "show", "--wait", run)
	if code := follower.Wait(t, 20*time.Second); code != 3 || follower.Stdout() != "begun\n" {
		t.Errorf("the follower of a cancelled job: code %d, %q", code, follower.Stdout())
	}
	var runs []protocol.RunSummary
	if err := json.Unmarshal([]byte(in.want(0, "runs", "--output", "json")), &runs); err != nil || len(runs) != 5 {
		t.Errorf("%d runs, %v", len(runs), err)
	}

	in.server.Signal(t, syscall.SIGTERM)
	if code := in.server.Wait(t, 30*time.Second); code != 0 {
		t.Errorf("the server ended with %d", code)
	}
	nothingLeft(t, in.variable)
}

// Running what failed again, by the command line: the job that runs again gets
// exactly the artifact of the one that does not; a full retry makes it anew.
func TestCase_RERUN_01_command_line(t *testing.T) {
	t.Parallel()
	in := startServer(t, "--runner")
	value := strings.TrimPrefix(in.variable, "CLI_TEST_MARK=")
	gate := filepath.Join(t.TempDir(), "gate")
	dir := tree(t, workflow(value, `
  build:
    steps: ["date +%N >bin"]
    artifacts: {publish: [{name: bin, path: bin}]}
  publish:
    needs: build
    artifacts: {restore: [{from_job: build, name: bin, path: got}]}
    steps: ["sha256sum got; test -e `+gate+`"]
`))
	first := strings.Fields(in.forgeci("submit", "--wait", dir).Stdout)[0]
	sum := in.want(0, "logs", "--step", "1", first+"/publish")
	in.want(1, "show", "--wait", first)
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	second := strings.TrimSpace(in.want(0, "retry", "--failed", "--wait", first))
	if again := in.want(0, "logs", "--step", "1", second+"/publish"); again != sum {
		t.Errorf("the retried job got %q, the first one %q", again, sum)
	}
	third := strings.TrimSpace(in.want(0, "retry", "--wait", second))
	if again := in.want(0, "logs", "--step", "1", third+"/publish"); again == sum {
		t.Error("a full retry took the artifact of the older run")
	}
	if out := in.want(0, "show", second); !strings.Contains(out, "retry of  "+first) {
		t.Errorf("the retry does not name its run:\n%s", out)
	}
}

// The server is killed while a command waits and a job runs elsewhere. It starts
// again, and the command ends with the run's result; the follower of the log has
// every byte once.
func TestCase_CLI_01_restart_of_the_server(t *testing.T) {
	t.Parallel()
	in := startServer(t)
	value := strings.TrimPrefix(in.variable, "CLI_TEST_MARK=")
	registration := filepath.Join(in.dir, "data", "registration.token")
	testkit.Start(t, testkit.Command{
		Args: []string{"runner", "--server", in.url, "--token-file", registration, "--slots", "1"}, Env: []string{in.variable},
	})
	dir := tree(t, workflow(value, "  count: {steps: [\"for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.5; done; exit 9\"]}\n"))
	waiter := testkit.Start(t, in.command("submit", "--wait", dir))
	until(func() bool { return strings.HasSuffix(waiter.Stdout(), "\n") })
	run := strings.TrimSpace(waiter.Stdout())
	follower := testkit.Start(t, in.command("logs", "-f", run))
	until(func() bool { return strings.Contains(follower.Stdout(), "line 2\n") })
	listen := strings.TrimPrefix(in.url, "http://")
	in.server.Signal(t, syscall.SIGKILL)
	in.server.Wait(t, 10*time.Second)
	<-time.After(time.Second) // both have lost it
	in.start("--listen", listen)
	if code := waiter.Wait(t, time.Minute); code != 1 {
		t.Errorf("the waiting command: code %d, want 1", code)
	}
	if code := follower.Wait(t, time.Minute); code != 1 {
		t.Errorf("the follower: code %d, want 1", code)
	}
	want := "line 1\nline 2\nline 3\nline 4\nline 5\nline 6\nline 7\nline 8\n"
	if got := follower.Stdout(); got != want {
		t.Errorf("the follower has %q, want %q", got, want)
	}
}

// The runner beside a server ends with it, also when the server is killed, and
// is started again when it dies alone.
func TestRunnerBesideTheServerEndsWithIt(t *testing.T) {
	t.Parallel()
	in := startServer(t, "--runner")
	beside := func() []int {
		var found []int
		for _, pid := range testkit.ProcessesWith(t, in.variable) {
			if pid != in.server.PID() {
				found = append(found, pid)
			}
		}
		return found
	}
	wait := func(what string, ok func([]int) bool) []int {
		t.Helper()
		if !until(func() bool { return ok(beside()) }) {
			t.Fatalf("%s: %v", what, beside())
		}
		return beside()
	}
	first := wait("no runner was started", func(p []int) bool { return len(p) == 1 })[0]
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait("the runner was not started again", func(p []int) bool { return len(p) == 1 && p[0] != first })
	in.server.Signal(t, syscall.SIGKILL)
	in.server.Wait(t, 10*time.Second)
	nothingLeft(t, in.variable)
}

// A drain of the runner beside a server lasts, whether it is idle or at work: it
// ends what it holds and stays away until the server starts again.
func TestADrainOfTheRunnerBesideTheServerLasts(t *testing.T) {
	t.Parallel()
	in := startServer(t, "--runner", "--lease-ttl", "2s")
	online := func() bool { return strings.Contains(in.want(0, "runner", "list"), " online ") }
	drained := func() bool {
		return strings.Contains(in.server.Stderr(), "has drained; it starts again with the server") &&
			len(testkit.ProcessesWith(t, in.variable)) == 1
	}
	value := strings.TrimPrefix(in.variable, "CLI_TEST_MARK=")
	for _, busy := range []bool{true, false} {
		if !until(online) {
			t.Fatalf("the runner is not online:\n%s", in.server.Stderr())
		}
		var runners []protocol.Runner
		if err := json.Unmarshal([]byte(in.want(0, "runner", "list", "--output", "json")), &runners); err != nil || len(runners) != 1 {
			t.Fatalf("%d runners: %v", len(runners), err)
		}
		release, run := filepath.Join(t.TempDir(), "release"), ""
		if busy {
			run = strings.TrimSpace(in.want(0, "submit", tree(t, workflow(value,
				"  slow: {steps: [\"echo begun; until test -e "+release+"; do sleep 0.1; done\"]}\n"))))
			if !until(func() bool { return strings.Contains(in.forgeci("logs", run).Stdout, "begun") }) {
				t.Fatal("the job does not begin")
			}
		}
		in.want(0, "runner", "drain", string(runners[0].ID))
		if busy {
			if err := os.WriteFile(release, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			in.want(0, "show", "--wait", run)
		}
		if !until(drained) {
			t.Errorf("busy %t: the runner does not stay away: %v\n%s", busy, testkit.ProcessesWith(t, in.variable), in.server.Stderr())
		}
		in.server.Signal(t, syscall.SIGTERM)
		if code := in.server.Wait(t, 30*time.Second); code != 0 {
			t.Errorf("the server ended with %d", code)
		}
		nothingLeft(t, in.variable)
		in.start("--listen", "127.0.0.1:0", "--runner", "--lease-ttl", "2s")
	}
	if !until(online) {
		t.Errorf("the runner did not start again with the server:\n%s", in.server.Stderr())
	}
}

// The command by which the README adds a runner works where the README says, at
// the place of a server with a runner beside it.
func TestTheReadmesSecondRunnerStarts(t *testing.T) {
	t.Parallel()
	readme := must(os.ReadFile(filepath.Join("..", "..", "README.md")))
	line := regexp.MustCompile(`(?m)^\./forgeci (runner --server URL .*)$`).FindSubmatch(readme)
	if line == nil {
		t.Fatal("the README does not say how to add a runner")
	}
	in := startServer(t, "--runner")
	online := func(n int) bool {
		var runners []protocol.Runner
		if err := json.Unmarshal([]byte(in.want(0, "runner", "list", "--output", "json")), &runners); err != nil {
			t.Fatal(err)
		}
		return len(runners) == n && !slices.ContainsFunc(runners, func(r protocol.Runner) bool { return r.Status != "online" })
	}
	if !until(func() bool { return online(1) }) {
		t.Fatalf("the runner beside the server is not online:\n%s", in.server.Stderr())
	}
	second := testkit.Start(t, in.command(strings.Fields(strings.Replace(string(line[1]), "URL", in.url, 1))...))
	if !until(func() bool { return online(2) }) {
		t.Errorf("the second runner is not online:\n%s", second.Stderr())
	}
}

// Beside a server, jobs run as the user that they are given, with a data directory
// that was closed before; a runner that could not give them that user refuses to
// start and says why, and the server does not hear of it.
func TestJobsHaveAUserOfTheirOwn(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // only root can give jobs another user
	}
	_, variable := mark(t)
	in := &install{t: t, dir: must(os.MkdirTemp("", "forgeci-cli-")), variable: variable, env: []string{"TMPDIR=" + os.TempDir()}}
	t.Cleanup(func() { _ = os.RemoveAll(in.dir) })
	if err := os.Chmod(in.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	in.start("--listen", "127.0.0.1:0", "--runner")
	online := func() bool { return strings.Contains(in.want(0, "runner", "list"), "online") }
	if !until(online) {
		t.Fatalf("the runner is not online:\n%s", in.server.Stderr())
	}
	in.server.Signal(t, syscall.SIGTERM)
	in.server.Wait(t, 30*time.Second)

	in.start("--listen", "127.0.0.1:0")
	r := in.forgeci("runner", "--job-user", "nobody")
	if want := filepath.Join(in.dir, "data"); r.Code != 2 || !strings.Contains(r.Stderr, want+" is closed to it") || !strings.Contains(r.Stderr, "chmod a+x "+want) {
		t.Errorf("a runner whose jobs could not begin: code %d, want 2\n%s", r.Code, r.Stderr)
	}
	if online() {
		t.Error("the server has heard of that runner")
	}
	in.server.Signal(t, syscall.SIGTERM)
	in.server.Wait(t, 30*time.Second)

	in.start("--listen", "127.0.0.1:0", "--runner", "--runner-job-user", "nobody")
	value := strings.TrimPrefix(in.variable, "CLI_TEST_MARK=")
	run := strings.TrimSpace(in.want(0, "submit", "--wait", tree(t, workflow(value, `
  own:
    steps: ["id -un; echo x >new; cat `+filepath.Join(in.dir, "data")+`/*.token `+filepath.Join(in.dir, "data")+`/server.key && exit 9; exit 0"]
`))))
	if out := in.want(0, "logs", "--stream", "stdout", run); out != "nobody\n" {
		t.Errorf("the job's output: %q", out)
	}
}

// What keeps a runner from starting, and where its token comes from.
func TestRunnerStarts(t *testing.T) {
	t.Parallel()
	in := startServer(t)
	data := filepath.Join(in.dir, "data")
	runner := func(env []string, args ...string) testkit.Command {
		return testkit.Command{
			Args: append([]string{"runner", "--server", in.url, "--data", filepath.Join(t.TempDir(), "r")}, args...), Env: append(env, in.variable),
		}
	}
	for name, c := range map[string]testkit.Command{
		"a wrong token":            runner(nil, "--token", "fcr_wrong"),
		"a token of another kind":  runner(nil, "--token-file", filepath.Join(data, "admin.token")),
		"no token":                 runner(nil),
		"a token file that is not": runner(nil, "--token-file", filepath.Join(data, "nothing")),
	} {
		if r := testkit.Run(t, c); r.Code != 4 {
			t.Errorf("%s: code %d, want 4\n%s", name, r.Code, r.Stderr)
		}
	}
	for name, c := range map[string]testkit.Command{
		"slots":              runner(nil, "--slots", "-1"),
		"an unknown user":    runner(nil, "--job-user", "nobody-of-that-name"),
		"root far from home": runner(nil, "--server", "http://192.0.2.1:1"),
	} {
		if r := testkit.Run(t, c); r.Code != 2 {
			t.Errorf("%s: code %d, want 2\n%s", name, r.Code, r.Stderr)
		}
	}
	// The flag wins over the environment, and the runner is the same after a restart
	// without any token.
	good := runner([]string{"FORGECI_TOKEN=fcr_wrong"}, "--token-file", filepath.Join(data, "registration.token"), "--name", "one", "--label", "gpu")
	for range 2 {
		p := testkit.Start(t, good)
		online := func(want string) bool { return strings.Contains(in.want(0, "runner", "list"), want) }
		if !until(func() bool { return online("one   online") }) {
			t.Fatalf("the runner is not online:\n%s", p.Stderr())
		}
		second := testkit.Run(t, good)
		if second.Code != 5 || !strings.Contains(second.Stderr, "in use by another runner") {
			t.Errorf("a second runner in the same directory: code %d, want 5\n%s", second.Code, second.Stderr)
		}
		p.Signal(t, syscall.SIGTERM)
		if code := p.Wait(t, 20*time.Second); code != 0 {
			t.Errorf("drained: code %d, want 0", code)
		}
		good.Args = append(good.Args[:5:5], "--label", "gpu")
		good.Env = []string{in.variable}
	}
	var runners []protocol.Runner
	if err := json.Unmarshal([]byte(in.want(0, "runner", "list", "--output", "json")), &runners); err != nil || len(runners) != 1 {
		t.Errorf("%d runners are known, want 1: %v", len(runners), err)
	}
	if r := testkit.Run(t, testkit.Command{Args: []string{"server", "--listen", strings.TrimPrefix(in.url, "http://")}}); r.Code != 5 {
		t.Errorf("an address in use: code %d, want 5\n%s", r.Code, r.Stderr)
	}
}

// Settings that a server refuses, and the ones that it shows without secrets.
func TestServerSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte("KEY:topsecret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := func(env []string, args ...string) testkit.Result {
		return testkit.Run(t, testkit.Command{Args: append([]string{"server"}, args...), Dir: dir, Env: env})
	}
	for _, args := range [][]string{
		{"--lease-ttl", "1s"},
		{"--listen", "0.0.0.0:0"},
		{"--listen", "nonsense"},
		{"--tls-cert", "x"},
		{"--blob", "http://h/b"},
		{"--blob", "s3://h"},
		{"--blob", "s3://h/b"},
		{"--blob", "s3://a:b@h/b?nonsense=1"},
		{"--blob", "s3://a:b@h/b?insecure=maybe"},
		{"--database", "x", "--database-file", file},
		{"--runner-slots", "-1"},
		{"extra"},
	} {
		if r := server(nil, args...); r.Code != 2 || strings.Contains(r.Stderr, "topsecret") {
			t.Errorf("%v: code %d, want 2\n%s", args, r.Code, r.Stderr)
		}
	}
	r := server([]string{"FORGECI_LISTEN=127.0.0.1:9999", "FORGECI_LEASE_TTL=30s"}, "--check", "--lease-ttl", "10s",
		"--database", "postgres://u:topsecret@db/x?password=topsecret", "--blob", "s3://h:9/bucket/prefix?insecure=true", "--blob-credentials-file", file)
	if r.Code != 0 || strings.Contains(r.Stdout+r.Stderr, "topsecret") {
		t.Errorf("code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	for _, want := range []string{"127.0.0.1:9999", "10s", "s3://h:9/bucket/prefix", "postgres://u:"} {
		if !strings.Contains(r.Stdout, want) {
			t.Errorf("lacks %q:\n%s", want, r.Stdout)
		}
	}
}
