package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/executortest"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// crashJob tells the child below what to do.
type crashJob struct {
	Dir, Workspace, Mark string
	Tracking             Tracking
}

const crashVariable = "FORGECI_TEST_CRASH"

// TestMain is also the runner that the crash tests kill: a process of its own
// that opens a sandbox, leaves processes in it, says so and waits.
func TestMain(m *testing.M) {
	text := os.Getenv(crashVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	if err := crashingRunner(text); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func crashingRunner(text string) error {
	var j crashJob
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	e, err := New(Options{Dir: j.Dir, Tracking: j.Tracking, DrainGrace: testDrain}, discard())
	if err != nil {
		return err
	}
	ctx := testContext()
	box, err := e.Open(ctx, executor.Job{
		Lease:     ci.LeaseRef{Job: "job_crash", Epoch: 3},
		Workspace: j.Workspace, Home: j.Workspace, Tmp: j.Workspace, Grace: time.Second,
	})
	if err != nil {
		return err
	}
	script := strings.ReplaceAll(leftovers+"echo helper $PPID\n{}", "{}", "sleep "+j.Mark)
	_, err = box.Run(ctx, executor.Step{Script: script, Dir: j.Workspace, Stdout: os.Stdout, Stderr: io.Discard})
	return err
}

// crash is a runner that was started for a test, and its helper's process ID.
type crash struct {
	job    crashJob
	cmd    *exec.Cmd
	helper int
}

func startCrash(t *testing.T, tracking Tracking) *crash {
	t.Helper()
	c := &crash{job: crashJob{Dir: t.TempDir(), Workspace: t.TempDir(), Mark: executortest.Mark(), Tracking: tracking}}
	text, err := json.Marshal(c.job)
	if err != nil {
		t.Fatal(err)
	}
	c.cmd = exec.CommandContext(t.Context(), "/proc/self/exe")
	c.cmd.Env = append(os.Environ(), crashVariable+"="+string(text))
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Kill(); _ = c.cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	if _, err := fmt.Sscanf(line, "helper %d", &c.helper); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	eventually(t, 5*time.Second, "the job's processes run", func() bool { return len(executortest.Marked(c.job.Mark)) >= 5 })
	return c
}

// sweeper is the next runner with the same directory.
func (c *crash) sweeper(t *testing.T) *Executor {
	return newExecutor(t, Options{Dir: c.job.Dir, Tracking: c.job.Tracking})
}

func (c *crash) wantSwept(t *testing.T) {
	t.Helper()
	ended, err := c.sweeper(t).Sweep(t.Context())
	if err != nil || len(ended) != 1 || ended[0] != (protocol.AttemptRef{Job: "job_crash", Epoch: 3}) {
		t.Errorf("Sweep: %v, %v", ended, err)
	}
	wantNone(t, c.job.Mark)
	names, _ := filepath.Glob(filepath.Join(c.job.Dir, "*"))
	// The prelude is of no job.
	if names = slices.DeleteFunc(names, func(p string) bool { return filepath.Base(p) == preludeName }); len(names) > 0 {
		t.Errorf("left: %v", names)
	}
	if ended, err := c.sweeper(t).Sweep(t.Context()); err != nil || len(ended) != 0 {
		t.Errorf("a second Sweep: %v, %v", ended, err)
	}
}

// group is the cgroup of the one record.
func (c *crash) record(t *testing.T) *record {
	t.Helper()
	paths, _ := filepath.Glob(filepath.Join(c.job.Dir, "*"+recordSuffix))
	if len(paths) != 1 {
		t.Fatalf("records %v", paths)
	}
	rec, err := readRecord(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func TestRunnerKilled(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			c := startCrash(t, tracking)
			group := c.record(t).group()
			if err := c.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			eventually(t, 3*time.Second, "nothing survives the runner", func() bool {
				return len(executortest.Marked(c.job.Mark)) == 0
			})
			eventually(t, 3*time.Second, "the helper ends", func() bool {
				p, err := jobhelper.ReadProc(c.helper)
				return err != nil || p.Dead()
			})
			if group != nil && group.Exists() {
				t.Error("the cgroup is left")
			}
			if !c.record(t).ended {
				t.Error("the helper did not record its proof")
			}
			_ = c.cmd.Wait()
			c.wantSwept(t)
		})
	}
}

// Sweep right after the kill waits for the helper, which is at work.
func TestRunnerKilledAndRestartedAtOnce(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			c := startCrash(t, tracking)
			_ = c.cmd.Process.Kill()
			_ = c.cmd.Wait()
			c.wantSwept(t)
		})
	}
}

// Runner and helper are killed while neither can act for the other: only the
// next runner is left to clean up.
func TestRunnerAndHelperKilled(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			c := startCrash(t, tracking)
			for _, pid := range []int{c.cmd.Process.Pid, c.helper} {
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			}
			for _, pid := range []int{c.helper, c.cmd.Process.Pid} {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			_ = c.cmd.Wait()
			if tracking == TrackSubreaper {
				// What has changed its environment cannot be found without a cgroup; the
				// documentation of the class says so. This test ends it itself.
				for _, pid := range executortest.Marked(c.job.Mark) {
					if !hasVariable(pid, []byte(MarkVariable+"="+c.record(t).ID)) {
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
			if n := len(executortest.Marked(c.job.Mark)); n < 3 {
				t.Fatalf("%d processes outlived both", n)
			}
			c.wantSwept(t)
		})
	}
}

// A helper that hangs after its runner's death is killed by Sweep.
func TestRunnerKilledHelperStopped(t *testing.T) {
	t.Parallel()
	c := startCrash(t, TrackBest)
	if err := syscall.Kill(c.helper, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	if os.Geteuid() != 0 { // without a cgroup, see TestRunnerAndHelperKilled
		for _, pid := range executortest.Marked(c.job.Mark) {
			if !hasVariable(pid, []byte(MarkVariable+"="+c.record(t).ID)) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	c.wantSwept(t)
}

// A live runner's sandboxes are not swept, whoever asks.
func TestSweepLeavesTheLivingAlone(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			c := startCrash(t, tracking)
			before := len(executortest.Marked(c.job.Mark))
			ended, err := c.sweeper(t).Sweep(t.Context())
			if err != nil || len(ended) != 0 {
				t.Errorf("Sweep of a live runner's directory: %v, %v", ended, err)
			}
			ended, err = newExecutor(t, Options{Tracking: tracking}).Sweep(t.Context())
			if err != nil || len(ended) != 0 {
				t.Errorf("Sweep of another directory: %v, %v", ended, err)
			}
			if after := len(executortest.Marked(c.job.Mark)); after != before {
				t.Errorf("%d processes, %d before", after, before)
			}
		})
	}
}

// Records that were cut off at any byte by a crash are no obstacle.
func TestSweepOfCutRecords(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	e := newExecutor(t, Options{Dir: dir, Tracking: TrackSubreaper})
	rec := &record{ID: newID(), Attempt: protocol.AttemptRef{Job: "job_cut", Epoch: 2}, Runner: process{PID: 1 << 30}}
	f, err := createRecord(dir, rec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(f, "{\"pid\":%d,\"start\":1}\n%s", 1<<30, jobhelper.EndedMark); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	whole, err := os.ReadFile(rec.path)
	if err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(rec.path)
	for n := range len(whole) + 1 {
		if err := os.WriteFile(rec.path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		ended, err := e.Sweep(t.Context())
		complete := strings.Contains(string(whole[:n]), "\n")
		if err != nil || (len(ended) == 1) != complete {
			t.Errorf("cut at %d: %v, %v", n, ended, err)
		}
		if _, err := os.Stat(rec.path); err == nil {
			t.Fatalf("cut at %d: the record is left", n)
		}
	}
}

// A runner that crashed while it checked itself leaves no attempt to report, and
// no directory for ever.
func TestSweepAfterACrashDuringCheck(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	e := newExecutor(t, Options{Dir: dir, Tracking: TrackSubreaper})
	rec := &record{ID: newID(), Runner: process{PID: 1 << 30}}
	f, err := createRecord(dir, rec)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	left, err := os.MkdirTemp("", e.checkPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Check(t.Context()); err != nil {
		t.Error(err)
	}
	ended, err := e.Sweep(t.Context())
	if err != nil || len(ended) != 0 {
		t.Errorf("reported as ended: %v, %v", ended, err)
	}
	for _, path := range []string{rec.path, left} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
}

func TestRecordTellsEndOfHelper(t *testing.T) {
	t.Parallel()
	e := newExecutor(t, Options{})
	b := open(t, e)
	path := b.Sandbox.(*sandbox).rec.path
	rec, err := readRecord(path)
	if err != nil || rec.ended || rec.helper.PID != b.Sandbox.(*sandbox).help.id.PID || rec.Attempt.Epoch != 7 {
		t.Errorf("%+v, %v", rec, err)
	}
	if !rec.Runner.alive() || !rec.helper.alive() {
		t.Error("runner and helper are alive")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); err != syscall.EWOULDBLOCK {
		t.Errorf("lock of a live helper's record: %v", err)
	}
	if _, err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record outlived Close: %v", err)
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func testContext() context.Context { return context.Background() }
