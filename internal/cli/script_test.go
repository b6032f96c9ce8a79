package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/cli"
	"forgeci/internal/protocol"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"forgeci": func() { os.Exit(cli.Main(context.Background(), cli.System())) },
	})
}

type fakeKey struct{}

func TestScripts(t *testing.T) {
	t.Parallel()
	scripts(t, filepath.Join("testdata", "script", "*.txtar"))
}

// What a waiting command does in every state of a run, and through outages.
func TestCase_CLI_01(t *testing.T) {
	t.Parallel()
	scripts(t, filepath.Join("testdata", "case", "cli_01*.txtar"))
}

// Odd bytes of a log.
func TestCase_CLI_02(t *testing.T) {
	t.Parallel()
	scripts(t, filepath.Join("testdata", "case", "cli_02*.txtar"))
}

// Parts of a log, and how a part says that it is one.
func TestCase_CLI_03(t *testing.T) {
	t.Parallel()
	scripts(t, filepath.Join("testdata", "case", "cli_03*.txtar"))
}

// Output for machines.
func TestCase_CLI_04(t *testing.T) {
	t.Parallel()
	scripts(t, filepath.Join("testdata", "case", "cli_04*.txtar"))
}

// scripts drives the command line as processes against a fake server that
// speaks the real protocol. Each script has a server of its own.
func scripts(t *testing.T, pattern string) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts %s: %v", pattern, err)
	}
	testscript.Run(t, testscript.Params{
		Files:               files,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Setup: func(e *testscript.Env) error {
			f := newFake(t)
			f.change(func() { furnish(t, f) })
			e.Values[fakeKey{}] = f
			e.Defer(f.down)
			e.Setenv("FORGECI_SERVER", "http://"+f.addr)
			e.Setenv("FORGECI_TOKEN", fakeToken)
			e.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"ends":     cmdEnds,
			"server":   cmdServer,
			"run":      cmdRun,
			"requests": cmdRequests,
			"signal":   cmdSignal,
			"code":     cmdCode,
			"same":     cmdSame,
		},
	})
}

func fakeOf(ts *testscript.TestScript) *fake { return ts.Value(fakeKey{}).(*fake) }

// cmdEnds: ends CODE PROGRAM ARGS… demands the exit code.
func cmdEnds(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("%s: exit code %d, want %d\n[stdout]\n%s\n[stderr]\n%s", strings.Join(args[1:], " "), got, want,
			ts.ReadFile("stdout"), ts.ReadFile("stderr"))
	}
}

// cmdServer: server down|up, at once or after a pause; server forgets: the
// snapshots that it has are gone when the next run is made; server refuses FILE:
// no run is made of that workflow file.
func cmdServer(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	if args[0] == "refuses" {
		f.change(func() { f.refuses = args[1] })
		return
	}
	act := map[string]func(){
		"down": f.down, "up": func() { f.up(nil) }, "forgets": func() { f.change(func() { f.forgets = true }) },
	}[args[0]]
	later(ts, args[1:], act)
}

// later does something now; after the pause that args give; or, with a plus
// before the pause, so long after a command has begun to wait for events.
func later(ts *testscript.TestScript, args []string, act func()) {
	if len(args) == 0 {
		act()
		return
	}
	pause, waits := strings.CutPrefix(args[0], "+")
	d, err := time.ParseDuration(pause)
	ts.Check(err)
	f := fakeOf(ts)
	count := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.waits
	}
	before := count()
	ended := make(chan struct{})
	ts.Defer(func() { close(ended) })
	go func() {
		if waits && !until(func() bool { return count() > before }) {
			return
		}
		select {
		case <-time.After(d):
			act()
		case <-ended:
		}
	}()
}

// cmdRun: run ID STATE [CONCLUSION [REASON [PAUSE]]] changes a run.
func cmdRun(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	args = append(args, "", "", "")[:max(len(args), 4)]
	later(ts, args[4:], func() {
		f.change(func() { f.set(ci.RunID(args[0]), ci.State(args[1]), ci.Conclusion(args[2]), ci.Reason(args[3])) })
	})
}

// cmdRequests writes what the server was asked so far, and forgets it.
func cmdRequests(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	f.mu.Lock()
	defer f.mu.Unlock()
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.Join(f.requests, "\n")+"\n"), 0o600))
	f.requests = nil
}

// cmdSignal: signal NAME interrupts a background command once it waits.
func cmdSignal(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	waits := until(func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return strings.Contains(strings.Join(f.requests, "\n"), "/events")
	})
	if !waits {
		ts.Fatalf("the command does not wait: %v", args)
	}
	for _, c := range ts.BackgroundCmds() {
		sig := map[string]os.Signal{"INT": os.Interrupt, "TERM": syscall.SIGTERM}[args[0]]
		ts.Check(c.Process.Signal(sig))
		f.mu.Lock()
		f.signalled = c
		f.mu.Unlock()
	}
}

// until waits for something outside of this process, for 30 seconds at most.
func until(ok func() bool) bool {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range 1500 {
		if ok() {
			return true
		}
		<-tick.C
	}
	return false
}

// cmdCode: code CODE demands the exit code of the signalled command, after wait.
func cmdCode(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := strconv.Itoa(f.signalled.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// cmdSame: same FILE JOB… demands that a file holds exactly the bytes of logs.
func cmdSame(ts *testscript.TestScript, _ bool, args []string) {
	f := fakeOf(ts)
	var want []byte
	f.mu.Lock()
	for _, e := range f.logs[ci.JobID(args[1])] {
		if len(args) == 2 || strconv.Itoa(e.Step+1) == args[2] {
			want = append(want, e.Data...)
		}
	}
	f.mu.Unlock()
	if got := ts.ReadFile(args[0]); got != string(want) {
		ts.Fatalf("%d bytes %s, want %d bytes %s", len(got), digest([]byte(got)), len(want), digest(want))
	}
}

// furnish puts a run of every end into the server, and logs.
func furnish(t testing.TB, f *fake) {
	t.Helper()
	f.add("run_success", ci.StateFinished, ci.ConclusionSuccess, "", "build")
	f.add("run_failed", ci.StateFinished, ci.ConclusionFailed, ci.ReasonJobFailed, "build", "test")
	f.add("run_timedout", ci.StateFinished, ci.ConclusionTimedOut, ci.ReasonTimeout, "build")
	f.add("run_cancelled", ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser, "build")
	f.add("run_skipped", ci.StateFinished, ci.ConclusionSkipped, ci.ReasonCondition, "build")
	f.add("run_infra", ci.StateFinished, ci.ConclusionFailed, ci.ReasonInfrastructure, "build")
	f.add("run_aborted", ci.StateFinished, ci.ConclusionAborted, ci.ReasonRunnerLost, "build")
	f.add("run_live", ci.StateRunning, "", "", "build")
	f.add("run_waiting", ci.StateWaiting, "", "", "build").JobList[0].Attempts = 0
	f.jobs["job_waiting_build"].Attempts = 0
	f.jobs["job_waiting_build"].Waiting = &protocol.WaitReason{Code: "no_runner_online", Detail: "no runner is online"}
	f.jobs["job_skipped_build"].Attempts = 0

	f.add("run_steps", ci.StateFinished, ci.ConclusionFailed, ci.ReasonJobFailed, "build")
	f.steps("job_steps_build", []string{"prepare", "compile", "check", "report", "publish"}, []int{100, 5000, 10, 0, 0},
		[]ci.Conclusion{ci.ConclusionSuccess, ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionSkipped, ""})

	f.add("run_again", ci.StateFinished, ci.ConclusionSuccess, "", "build")
	f.steps("job_again_build", []string{"prepare", "compile"}, []int{1, 1}, []ci.Conclusion{ci.ConclusionSuccess, ci.ConclusionSuccess})
	again := f.jobs["job_again_build"]
	again.Attempts = 2
	again.Attempt = []protocol.Attempt{{Epoch: 1, StepList: []protocol.Step{{Index: 0, Name: "prepare", State: ci.StateFinished, Conclusion: ci.ConclusionAborted}}}, {Epoch: 2}}

	f.add("run_odd", ci.StateFinished, ci.ConclusionSuccess, "", "build")
	odd := [][]byte{
		{0xff, 0xfe, 0x00, '\n'},
		[]byte("caf\xc3"), // cut here
		[]byte("\xa9\n"),
		append(bytes.Repeat([]byte("x"), 300<<10), '\n'),
		[]byte("\x1b[31mred\x1b[0m\n10%\r20%\r100%\n\x1b]0;title\x07\x1b[2J\x9bm\u202eevil\n"),
	}
	var offset int64
	for _, data := range odd {
		f.logs["job_odd_build"] = append(f.logs["job_odd_build"], protocol.LogEvent{Epoch: 1, Stream: "stdout", Offset: offset, Data: data})
		offset += int64(len(data))
	}
	f.add("run_expired", ci.StateFinished, ci.ConclusionSuccess, "", "build")
	f.expired["job_expired_build"] = true

	f.artifact(t, f.add("run_artifacts", ci.StateFinished, ci.ConclusionSuccess, "", "build", "docs"))
	f.cancelling()
	seen := time.Date(2025, 1, 2, 12, 0, 0, 0, time.UTC)
	short, long := ci.Duration(12*time.Second), ci.Duration(90*time.Second)
	f.runners = []protocol.Runner{
		{ID: "rnr_5", Name: "quiet", Status: "online", Slots: 1, Silent: &short},
		{ID: "rnr_6", Name: "leaving", Status: "draining", Slots: 1, Silent: &long},
		{ID: "rnr_1", Name: "runner-1", Status: "online", Slots: 4, LastSeen: &seen, Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}, Labels: []string{"gpu", "zone=a"}}},
		{ID: "rnr_2", Name: "evil\x1b[2J", Status: "offline", Slots: 1},
		{ID: "rnr_3", Name: "twin", Status: "offline"},
		{ID: "rnr_4", Name: "twin", Status: "offline"},
	}
	f.letters = []protocol.DeadLetter{{Job: "job_infra_build", Name: "build", Run: "run_infra", Repo: "local/hello", Attempts: 3, Reason: ci.ReasonRunnerLost, Detail: "three runners were lost", At: seen}}
}

// cancelling adds a run that waits for attempts whose end is not proven.
func (f *fake) cancelling() {
	run := f.add("run_cancelling", ci.StateCancelling, "", ci.ReasonUser, "build", "test")
	run.CommitSHA = "fedcba9876543210fedcba9876543210fedcba98"
	for i, j := range run.JobList {
		run.Unproven = append(run.Unproven, protocol.Unproven{
			Job: j.ID, Name: j.Name, Epoch: int64(i + 1), Runner: "rnr_1", RunnerName: "runner-1", Lost: i == 1, Since: run.CreatedAt,
		})
	}
	run.Unproven[1].Name = "evil\x1b[2J"
	for range 5 {
		run.Unproven = append(run.Unproven, run.Unproven[0])
	}
}

// artifact publishes two artifacts, one of them with bytes that do not match.
func (f *fake) artifact(t testing.TB, run *protocol.Run) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"bin/app": "#!/bin/sh\necho hi\n", "README": "read me\n"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	scanned, err := archive.Walk(t.Context(), root, "", func(string, bool) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := archive.Pack(t.Context(), &b, root, scanned.Entries, archive.ArtifactLimits(), 1); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"app", "damaged", "docs", "docs"} {
		a := protocol.Artifact{
			ID: fmt.Sprint("art_", i+1), Run: run.ID, Job: run.JobList[i/3].ID, JobName: run.JobList[i/3].Name, Epoch: 1, Name: name,
			Size: int64(b.Len()), Digest: digest(b.Bytes()), Files: 2, Bytes: 26, Bound: true, CreatedAt: run.CreatedAt,
		}
		content := bytes.Clone(b.Bytes())
		if name == "damaged" {
			content[len(content)/2] ^= 1
		}
		f.artifacts[a.ID] = content
		run.Artifacts = append(run.Artifacts, a)
	}
}
