package process

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/executortest"
)

const testDrain = 500 * time.Millisecond

func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

func newExecutor(t testing.TB, opts Options) *Executor {
	t.Helper()
	if opts.Dir == "" {
		opts.Dir = t.TempDir()
	}
	opts.DrainGrace = testDrain
	e, err := New(opts, logger(t))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// trackings are the means that work for the user of this test.
func trackings() []Tracking {
	if os.Geteuid() != 0 {
		return []Tracking{TrackSubreaper}
	}
	return []Tracking{TrackCgroup2, TrackCgroup1, TrackSubreaper}
}

func contract(opts Options) executortest.Config {
	return executortest.Config{
		New:  func(t *testing.T) executor.Executor { return newExecutor(t, opts) },
		User: opts.User, DrainGrace: testDrain,
	}
}

func TestContract(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			executortest.Run(t, contract(Options{Tracking: tracking}))
		})
	}
}

// The cases by their names, once more with the means that a runner finds itself.

func TestCase_CAN_01_ProcessTree(t *testing.T) {
	executortest.RunCase(t, contract(Options{}), "CAN_01")
}

func TestCase_CAN_03_BackgroundChild(t *testing.T) {
	executortest.RunCase(t, contract(Options{}), "CAN_03")
}

func TestCase_CAN_04_StepIgnoresSIGTERM(t *testing.T) {
	executortest.RunCase(t, contract(Options{}), "CAN_04")
}

func TestCase_YAML_11_WhichFailureCounts(t *testing.T) {
	executortest.RunCase(t, contract(Options{}), "YAML_11")
}

// jobUser is a user that need not exist: numbers are enough.
func jobUser() *executor.User {
	return &executor.User{Name: "forgeci-job", UID: 64321, GID: 64322, Groups: []uint32{64323, 64324}}
}

func TestContractWithJobUser(t *testing.T) {
	if os.Geteuid() != 0 {
		_, err := New(Options{Dir: t.TempDir(), User: jobUser()}, logger(t))
		wantKind(t, err, ci.ErrForbidden)
		return
	}
	executortest.Run(t, contract(Options{User: jobUser()}))
}

// The tests run again as a user who can write no cgroup, which is how most
// runners run.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		return // this is that run, or root is not at hand and it was all along
	}
	dir, err := os.MkdirTemp("", "forgeci-user-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const nobody = 65534
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	// The test binary lies in a private directory; the link leads to the file itself.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.v", "-test.run=^Test[^C]|^TestC[^a]", "-test.timeout=120s")
	cmd.Dir = "/"
	cmd.Env = []string{"TMPDIR=" + dir, "PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"--- PASS: TestContract/subreaper/CloseProves", "--- PASS: TestHelperKilled/subreaper", "--- PASS: TestRunnerKilled/subreaper"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in the output of the run as an ordinary user", want)
		}
	}
}

// box is an open sandbox for the tests below.
type box struct {
	executor.Sandbox
	e    *Executor
	job  executor.Job
	mark string
}

func open(t testing.TB, e *Executor) *box {
	t.Helper()
	dir := t.TempDir()
	b := &box{e: e, mark: executortest.Mark(), job: executor.Job{
		Lease:     ci.LeaseRef{Job: "job_1", Epoch: 7},
		Workspace: dir, Home: dir, Tmp: t.TempDir(), Grace: 300 * time.Millisecond,
	}}
	var err error
	if b.Sandbox, err = e.Open(t.Context(), b.job); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *box) run(t testing.TB, script string) (executor.Result, string, error) {
	t.Helper()
	var out, errs strings.Builder
	res, err := b.Run(t.Context(), executor.Step{
		Script: strings.ReplaceAll(script, "{}", "sleep "+b.mark), Dir: b.job.Workspace, Stdout: &out, Stderr: &errs,
	})
	return res, out.String() + errs.String(), err
}

func wantKind(t testing.TB, err error, kind ci.Kind) {
	t.Helper()
	if err == nil || ci.KindOf(err) != kind {
		t.Errorf("error %v, want kind %s", err, kind)
	}
}

func wantNone(t testing.TB, mark string) {
	t.Helper()
	if left := executortest.Marked(mark); len(left) > 0 {
		t.Errorf("processes left: %v", left)
	}
}

func eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !cond(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// leftovers is a script that leaves every kind of process behind.
const leftovers = `(setsid sh -c 'trap "" TERM HUP; {}; {}' >/dev/null 2>&1 &)
(setsid sh -c '(setsid {} &)' >/dev/null 2>&1 &)
(env -i setsid {} >/dev/null 2>&1 &)
{} >/dev/null 2>&1 &
sleep 0.1
`

func TestEvidenceNamesTheProof(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		b := open(t, newExecutor(t, Options{Tracking: tracking}))
		if _, out, err := b.run(t, leftovers); err != nil {
			t.Fatal(err, out)
		}
		want := howSubreaper
		group := b.Sandbox.(*sandbox).rec.group()
		if tracking != TrackSubreaper {
			want = howCgroup
			if n := len(group.Procs()); n < 4 {
				t.Errorf("%s: %d processes in the job's cgroup", tracking, n)
			}
		}
		ev, err := b.Close(t.Context())
		if err != nil || !ev.Terminated || ev.How != want || ev.Killed < 4 {
			t.Errorf("%s: %+v, %v", tracking, ev, err)
		}
		wantNone(t, b.mark)
		if group != nil && group.Exists() {
			t.Errorf("%s: the cgroup is left", tracking)
		}
		b.e.Close()
		if names, _ := os.ReadDir(b.e.opts.Dir); len(names) > 0 {
			t.Errorf("%s: records left: %v", tracking, names)
		}
	}
}

// A process that is in the cgroup from its first instruction cannot leave the
// proof by moving to another one, as root can.
func TestProcessThatLeavesItsCgroup(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		b := open(t, newExecutor(t, Options{Tracking: tracking}))
		group := b.Sandbox.(*sandbox).rec.group()
		if group == nil {
			_, _ = b.Close(t.Context())
			continue
		}
		home := filepath.Dir(filepath.Dir(group.Dir))
		res, out, err := b.run(t, fmt.Sprintf("(setsid sh -c 'echo $$ >%s/cgroup.procs; {}; {}' >/dev/null 2>&1 &); sleep 0.2", home))
		if err != nil || res.ExitCode != 0 {
			t.Fatal(res, out, err)
		}
		if n := len(executortest.Marked(b.mark)); n == 0 || !group.Empty() {
			t.Errorf("%s: %d processes, cgroup empty: %v", tracking, n, group.Empty())
		}
		if ev, err := b.Close(t.Context()); err != nil || !ev.Terminated {
			t.Errorf("%s: %+v, %v", tracking, ev, err)
		}
		wantNone(t, b.mark)
	}
}

// A step that kills its helper kills itself: nothing of it, and nothing that it
// left, goes on.
func TestHelperKilled(t *testing.T) {
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			before, err := procsOf(os.Getpid())
			if err != nil {
				t.Fatal(err)
			}
			e := newExecutor(t, Options{Tracking: tracking})
			other := open(t, e)
			if _, _, err := other.run(t, "{} >/dev/null 2>&1 &"); err != nil {
				t.Fatal(err)
			}
			bystander := exec.CommandContext(t.Context(), "sleep", executortest.Mark())
			if err := bystander.Start(); err != nil {
				t.Fatal(err)
			}
			b := open(t, e)
			begun := time.Now()
			_, out, err := b.run(t, leftovers+"echo begin\nkill -9 $PPID; {}; echo after")
			wantKind(t, err, ci.ErrUnavailable)
			if took := time.Since(begun); took > 3*time.Second || strings.Contains(out, "after") {
				t.Errorf("after %v: %q", took, out)
			}
			wantNone(t, b.mark)
			_, _, err = b.run(t, "echo no")
			wantKind(t, err, ci.ErrUnavailable)
			ev, err := b.Close(t.Context())
			if err != nil || !ev.Terminated {
				t.Errorf("%+v, %v", ev, err)
			}
			// Between two steps, found only by Close.
			b = open(t, e)
			if _, _, err := b.run(t, leftovers); err != nil {
				t.Fatal(err)
			}
			if err := b.Sandbox.(*sandbox).help.proc.Kill(); err != nil {
				t.Fatal(err)
			}
			ev, err = b.Close(t.Context())
			if err != nil || !ev.Terminated || ev.Killed < 4 {
				t.Errorf("%+v, %v", ev, err)
			}
			wantNone(t, b.mark)

			// Nobody else was hurt, and everybody is reaped by its own parent.
			if n := len(executortest.Marked(other.mark)); n != 1 {
				t.Errorf("%d processes of another job, want 1", n)
			}
			if err := bystander.Process.Kill(); err != nil {
				t.Errorf("the runner's own child: %v", err)
			}
			if err := bystander.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Errorf("the runner's own child ended with %v", err)
			}
			if ev, err := other.Close(t.Context()); err != nil || ev.Killed != 1 {
				t.Errorf("%+v, %v", ev, err)
			}
			wantNone(t, other.mark)
			after, err := procsOf(os.Getpid())
			if err != nil || len(after) > len(before) {
				t.Errorf("children of the runner left: %v, %v, before %v", after, err, before)
			}
		})
	}
}

// A helper that a step stopped does not hold the job for ever.
func TestHelperStopped(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		e := newExecutor(t, Options{Tracking: tracking})
		e.killWait, e.helperWait = 500*time.Millisecond, 500*time.Millisecond
		b := open(t, e)
		_, _, err := b.run(t, leftovers+"(sleep 0.3; kill -STOP $PPID) >/dev/null 2>&1 &")
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(400 * time.Millisecond)
		_, _, err = b.run(t, "echo no")
		wantKind(t, err, ci.ErrUnavailable)
		ev, err := b.Close(t.Context())
		if err != nil || !ev.Terminated {
			t.Errorf("%s: %+v, %v", tracking, ev, err)
		}
		wantNone(t, b.mark)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := New(Options{Dir: "relative"}, logger(t))
	wantKind(t, err, ci.ErrInvalid)
	_, err = New(Options{Dir: t.TempDir(), Tracking: "magic"}, logger(t))
	wantKind(t, err, ci.ErrUnavailable)
	if os.Geteuid() != 0 {
		_, err = New(Options{Dir: t.TempDir(), Tracking: TrackCgroup2}, logger(t))
		wantKind(t, err, ci.ErrUnavailable)
	}
	e := newExecutor(t, Options{Path: t.TempDir()})
	wantKind(t, e.Check(t.Context()), ci.ErrInvalid) // no shell there
}

func TestCheck(t *testing.T) {
	t.Parallel()
	if err := newExecutor(t, Options{}).Check(t.Context()); err != nil {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		if err := newExecutor(t, Options{User: jobUser()}).Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// A step of another user cannot touch what runs it (EX-4, as far as a job user
// makes it possible).
func TestJobUserCannotReachTheRunner(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // covered by the run as root
	}
	e := newExecutor(t, Options{User: jobUser()})
	job := executortest.Job(t, jobUser())
	box, err := e.Open(t.Context(), job)
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "credential")
	if err := os.WriteFile(secret, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	res, err := box.Run(t.Context(), executor.Step{
		Dir: job.Workspace, Stdout: &out, Stderr: os.Stderr,
		Script: fmt.Sprintf(`exec 2>/dev/null; set +e
kill -9 $PPID && echo killed helper
kill -9 %[1]d && echo killed runner
cat /proc/$PPID/environ && echo read helper
cat /proc/%[1]d/environ && echo read runner
ls /proc/$PPID/fd && echo listed helper
cat %[2]s && echo read credential
ls %[3]s && echo read records
echo x >"$0" && echo wrote script
rm -f "$0" && echo removed script
ln -s /etc/passwd "$(dirname "$0")/planted" && echo planted
echo end`, os.Getpid(), secret, e.opts.Dir),
	})
	if err != nil || res.ExitCode != 0 || out.String() != "end\n" {
		t.Errorf("%+v %v %q", res, err, out.String())
	}
	if _, err := box.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// procsOf lists the children of a process, zombies included, that are in a
// session of their own.
func procsOf(pid int) ([]string, error) {
	out, err := exec.Command("ps", "-o", "pid=,sess=,stat=,args=", "--ppid", strconv.Itoa(pid)).Output()
	if err != nil {
		return nil, err
	}
	own, err := unix.Getsid(0)
	if err != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 2 && f[1] != strconv.Itoa(own) {
			found = append(found, line)
		}
	}
	return found, nil
}

// The whole cost of the smallest job.
func BenchmarkSandbox(b *testing.B) {
	for _, tracking := range trackings() {
		b.Run(string(tracking), func(b *testing.B) {
			e := newExecutor(b, Options{Tracking: tracking})
			dir := b.TempDir()
			var opened, ran, closed time.Duration
			for b.Loop() {
				t0 := time.Now()
				box, err := e.Open(b.Context(), executor.Job{Workspace: dir, Home: dir, Tmp: dir})
				if err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				var out strings.Builder
				if _, err := box.Run(b.Context(), executor.Step{Script: "true", Dir: dir, Stdout: &out, Stderr: &out}); err != nil {
					b.Fatal(err)
				}
				t2 := time.Now()
				if _, err := box.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
				opened, ran, closed = opened+t1.Sub(t0), ran+t2.Sub(t1), closed+time.Since(t2)
			}
			ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
			b.ReportMetric(ms(opened), "open-ms")
			b.ReportMetric(ms(ran), "run-ms")
			b.ReportMetric(ms(closed), "close-ms")
		})
	}
}

// A further step of an open job, and the same by os/exec alone.
func BenchmarkStep(b *testing.B) {
	dir := b.TempDir()
	for _, tracking := range trackings() {
		b.Run(string(tracking), func(b *testing.B) {
			e := newExecutor(b, Options{Tracking: tracking})
			box, err := e.Open(b.Context(), executor.Job{Workspace: dir, Home: dir, Tmp: dir})
			if err != nil {
				b.Fatal(err)
			}
			var out strings.Builder
			for b.Loop() {
				if _, err := box.Run(b.Context(), executor.Step{Script: "true", Dir: dir, Stdout: &out, Stderr: &out}); err != nil {
					b.Fatal(err)
				}
			}
			if _, err := box.Close(b.Context()); err != nil {
				b.Fatal(err)
			}
		})
	}
	b.Run("os-exec", func(b *testing.B) {
		script := filepath.Join(dir, "script")
		if err := os.WriteFile(script, []byte("true"), 0o600); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			cmd := exec.CommandContext(b.Context(), "bash", "--noprofile", "--norc", "-e", "-o", "pipefail", script)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &strings.Builder{}
			if err := cmd.Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
