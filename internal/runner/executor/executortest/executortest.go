//go:build linux

// Package executortest is the contract between an executor and a job: what a
// step finds when it starts, how its end is told, and that nothing of it is left.
// Every executor passes it, whatever its class.
//
// # The environment of a step
//
//	working directory   Step.Dir, resolved; refused outside of the workspace
//	variables           PATH, HOME, TMPDIR, USER, LOGNAME, SHELL, LANG=C.UTF-8,
//	                    TERM=dumb, then Step.Env, later entries winning; one mark
//	                    of the executor; what the shell adds (PWD, SHLVL, _)
//	user                the job's user with exactly its groups, else the runner's
//	standard input      empty
//	descriptors         0, 1 and 2, no other
//	terminal            none; a session and a process group of its own
//	signals             none ignored, none blocked
//	umask               022
//	limits              those the runner was started with; no core dumps
//	arguments           the shell, its options and a file's name, nothing secret
package executortest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// Grace is the grace of the suite's jobs unless a test says otherwise.
const Grace = 700 * time.Millisecond

// Config is what the suite must know of an executor.
type Config struct {
	// New makes the executor. Its records go to a directory of the test.
	New func(t *testing.T) executor.Executor
	// User is who its steps run as; nil is the user that the test runs as.
	User *executor.User
	// DrainGrace is how long its output may stay open after a step's end.
	DrainGrace time.Duration
}

// Run runs the suite.
func Run(t *testing.T, config Config) {
	run(t, config, "")
}

// RunCase runs the part of the suite that proves one case, by its ID as it
// stands in names of tests ("CAN_03"), so that the list of cases finds it.
func RunCase(t *testing.T, config Config, id string) {
	run(t, config, "TestCase_"+id)
}

func run(t *testing.T, config Config, part string) {
	s := suite{new: config.New, user: config.User, drain: config.DrainGrace}
	ran := false
	// These change or count what the test process has and come first, one at a time.
	for _, c := range s.alone() {
		if strings.Contains(c.name, part) {
			ran = true
			t.Run(c.name, c.test)
		}
	}
	for _, c := range s.together() {
		if strings.Contains(c.name, part) {
			ran = true
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.test(t)
			})
		}
	}
	if !ran {
		t.Fatalf("the suite has no part %s", part)
	}
}

type contractTest struct {
	name string
	test func(*testing.T)
}

func (s suite) alone() []contractTest {
	return []contractTest{
		{"Environment", s.environment},
		{"Descriptors", s.descriptors},
		{"Signals", s.signals},
		{"TestCase_CAN_03_LeaksNothing", s.leaksNothing},
	}
}

func (s suite) together() []contractTest {
	return []contractTest{
		{"WorkingDirectory", s.workingDirectory},
		{"Directories", s.directories},
		{"User", s.userAndGroups},
		{"Session", s.session},
		{"Limits", s.limits},
		{"Arguments", s.arguments},
		{"EnvironmentRefused", s.environmentRefused},
		{"ExitCodes", s.exitCodes},
		{"TestCase_YAML_11_Shells", s.shells},
		{"TestCase_YAML_11_FailingLine", s.failingLine},
		{"Script", s.script},
		{"OutputExact", s.outputExact},
		{"OutputLongLine", s.outputLongLine},
		{"OutputBeforeExitIsNeverLost", s.outputBeforeExit},
		{"OutputWriterFails", s.outputWriterFails},
		{"OutputBackPressure", s.backPressure},
		{"CancelWhileOutputBlocks", s.cancelWhileBlocked},
		{"TestCase_CAN_01_CancelGrandchildren", s.cancelGrandchildren},
		{"TestCase_CAN_03_BackgroundHoldsOutput", s.backgroundHoldsOutput},
		{"TestCase_CAN_04_TimeoutIgnoringSIGTERM", s.timeoutIgnored},
		{"CancelIsGraceful", s.cancelIsGraceful},
		{"CancelBeforeStart", s.cancelBeforeStart},
		{"CancelledStepSparesEarlierBackground", s.cancelSpares},
		{"GraceOfTheCause", s.graceOfTheCause},
		{"LostInTheGrace", s.lostInTheGrace},
		{"LostInClose", s.lostInClose},
		{"BackgroundLivesUntilClose", s.backgroundLives},
		{"Zombies", s.zombies},
		{"CloseProves", s.closeProves},
		{"CloseTwice", s.closeTwice},
		{"CloseIsGraceful", s.closeIsGraceful},
		{"CloseHurried", s.closeHurried},
		{"NothingStarted", s.nothingStarted},
		{"JobsApart", s.jobsApart},
		{"TestAttack_S27_NothingForTheNextJob", s.nothingForTheNextJob},
		{"ForkingTreeIsKilled", s.forkingTree},
		{"NothingLeftOnDisk", s.nothingOnDisk},
	}
}

type suite struct {
	new   func(t *testing.T) executor.Executor
	user  *executor.User
	drain time.Duration
}

// box is an open sandbox with a workspace of its own.
type box struct {
	executor.Sandbox
	t    *testing.T
	job  executor.Job
	mark string // in the command line of every process that a test expects to find or to miss
}

// open makes directories that the job's user can reach, and a sandbox.
func (s suite) open(t *testing.T) *box {
	t.Helper()
	return s.openIn(t, s.new(t), Grace)
}

func (s suite) openIn(t *testing.T, e executor.Executor, grace time.Duration) *box {
	t.Helper()
	return s.openJob(t, e, func(job *executor.Job) { job.Grace = grace })
}

func (s suite) openJob(t *testing.T, e executor.Executor, change func(*executor.Job)) *box {
	t.Helper()
	job := Job(t, s.user)
	change(&job)
	sandbox, err := e.Open(t.Context(), job)
	if err != nil {
		t.Fatalf("open sandbox: %v", err)
	}
	b := &box{Sandbox: sandbox, t: t, job: job, mark: Mark()}
	t.Cleanup(func() {
		ev, err := b.Close(context.Background())
		if err != nil || !ev.Terminated {
			t.Errorf("close sandbox: %+v, %v", ev, err)
		}
		if left := Marked(b.mark); len(left) > 0 {
			t.Errorf("processes left after Close: %v", left)
		}
	})
	return b
}

// Job makes the directories of a job that runs as user.
func Job(t *testing.T, user *executor.User) executor.Job {
	t.Helper()
	dir, err := os.MkdirTemp("", "forgeci-contract-")
	if err != nil {
		t.Fatal(err)
	}
	dir, err = filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	job := executor.Job{
		Lease:     ci.LeaseRef{Run: "run_1", Job: "job_1", Runner: "rnr_1", Session: "ses_1", Lease: "lse_1", Epoch: 1},
		Workspace: filepath.Join(dir, "work"), Home: filepath.Join(dir, "home"),
		Tmp: filepath.Join(dir, "tmp"), Steps: filepath.Join(dir, "steps"), Grace: Grace,
	}
	for _, d := range []string{job.Workspace, job.Home, job.Tmp, job.Steps} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if user != nil && d != job.Steps {
			if err := os.Chown(d, int(user.UID), int(user.GID)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return job
}

// outcome is a finished step with its output.
type outcome struct {
	executor.Result
	out, err string
	took     time.Duration
}

// run runs a script that must be runnable; {} in it stands for a sleep that
// outlives every test and that Marked finds.
func (b *box) run(script string, change ...func(*executor.Step)) outcome {
	b.t.Helper()
	o, err := b.try(b.t.Context(), script, change...)
	if err != nil {
		b.t.Fatalf("run step: %v", err)
	}
	return o
}

func (b *box) try(ctx context.Context, script string, change ...func(*executor.Step)) (outcome, error) {
	var out, errs bytes.Buffer
	step := executor.Step{
		Script: strings.ReplaceAll(script, "{}", "sleep "+b.mark), Dir: b.job.Workspace,
		Stdout: &out, Stderr: &errs,
	}
	for _, c := range change {
		c(&step)
	}
	begun := time.Now()
	res, err := b.Run(ctx, step)
	return outcome{Result: res, out: out.String(), err: errs.String(), took: time.Since(begun)}, err
}

// want fails the test unless the step ended with the exit code and the output.
func (o outcome) want(t *testing.T, code int, out string) {
	t.Helper()
	if o.ExitCode != code || o.out != out {
		t.Errorf("exit code %d, output %q, want %d, %q\nstderr: %s", o.ExitCode, o.out, code, out, o.err)
	}
}

func wantKind(t *testing.T, err error, kind ci.Kind) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("error %v, want kind %s", err, kind)
	}
}

// Mark returns an argument for sleep that no other process of the machine has.
func Mark() string {
	return fmt.Sprintf("30%d.%d", os.Getpid(), rand.Uint64())
}

// Marked lists the living processes that have mark in their command line.
func Marked(mark string) []int {
	var found []int
	for pid, args := range commandLines() {
		if slices.Contains(args, mark) {
			found = append(found, pid)
		}
	}
	return found
}

// commandLines returns the arguments of every process that has any: neither
// kernel threads nor zombies.
func commandLines() map[int][]string {
	all := map[int][]string{}
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil || len(b) == 0 {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil {
			all[pid] = strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
		}
	}
	return all
}

// eventually waits until cond holds.
func eventually(t *testing.T, within time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(within); ; {
		if cond() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
		pause(5 * time.Millisecond)
	}
}

// pause waits for real processes, which know no other clock.
func pause(d time.Duration) { <-time.After(d) }

func evidence(t *testing.T, b *box, ctx context.Context) protocol.Evidence { //nolint:revive // t first, as helpers have it
	t.Helper()
	ev, err := b.Close(ctx)
	if err != nil {
		t.Fatalf("close sandbox: %v", err)
	}
	if !ev.Terminated {
		t.Fatalf("evidence %+v without an error", ev)
	}
	return ev
}
