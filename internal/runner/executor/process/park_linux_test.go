package process

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// helperOf is the box's helper; ended runs a step and closes the box.
func helperOf(b *box) process { return b.Sandbox.(*sandbox).help.id }

func ended(t *testing.T, b *box, script string) {
	t.Helper()
	if _, _, err := b.run(t, script); err != nil {
		t.Fatal(err)
	}
	if proof, err := b.Close(t.Context()); err != nil || !proof.Terminated {
		t.Fatalf("%+v, %v", proof, err)
	}
}

func gone(t *testing.T, p process) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); p.alive(); time.Sleep(5 * time.Millisecond) { // a real process
		if time.Now().After(end) {
			t.Fatalf("process %d lives", p.PID)
		}
	}
}

func TestAHelperServesTheNextJobAndHoldsNothingOfTheLast(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			e := newExecutor(t, Options{Tracking: tracking})
			var first process
			seen := map[string]bool{}
			for i := range 4 {
				b := open(t, e)
				rec := b.Sandbox.(*sandbox).rec
				if i == 0 {
					first = helperOf(b)
				} else if helperOf(b) != first {
					t.Errorf("job %d has the helper %+v, not %+v", i, helperOf(b), first)
				}
				onDisk, err := readRecord(rec.path)
				if err != nil || onDisk.ID != rec.ID || onDisk.helper != first || onDisk.ended || onDisk.CgroupDir != rec.CgroupDir || seen[rec.ID] {
					t.Errorf("record of job %d: %+v, %v", i, onDisk, err)
				}
				seen[rec.ID] = true
				_, out, err := b.run(t, "echo $"+MarkVariable+"; ls /proc/self/fd | tr '\\n' ' '; exit 3")
				if err != nil || !strings.HasPrefix(out, rec.ID+"\n0 1 2 3 ") || strings.Contains(out, " 4") {
					t.Errorf("output of job %d: %q, %v", i, out, err)
				}
				if _, err := b.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				if i == 1 {
					// A second one at the same time has a helper of its own.
					b, c := open(t, e), open(t, e)
					if helperOf(b) != first || helperOf(c) == first {
						t.Errorf("helpers %+v and %+v", helperOf(b), helperOf(c))
					}
					ended(t, c, "true")
					gone(t, helperOf(c))
					ended(t, b, "true")
				}
			}
		})
	}
}

func TestJobsInQuickSuccessionDoNotTouchEachOther(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			e := newExecutor(t, Options{Tracking: tracking})
			var all sync.WaitGroup
			for range 4 {
				dir := t.TempDir()
				all.Go(func() {
					for range 20 {
						box, err := e.Open(t.Context(), executor.Job{Workspace: dir, Home: dir, Tmp: dir, Grace: time.Minute})
						if err != nil {
							t.Error(err)
							return
						}
						// Longer than a helper waits before it asks what is left of a job to end.
						res, err := box.Run(t.Context(), executor.Step{Script: "sleep 0.02", Dir: dir, Stdout: io.Discard, Stderr: io.Discard})
						proof, closeErr := box.Close(t.Context())
						if err != nil || res.ExitCode != 0 || closeErr != nil || proof.Killed != 0 {
							t.Errorf("%+v, %v; %+v, %v", res, err, proof, closeErr)
						}
					}
				})
			}
			all.Wait()
		})
	}
}

func TestAHelperThatNobodyNeedsEndsAndLeavesNothing(t *testing.T) {
	t.Parallel()
	e := newExecutor(t, Options{})
	b := open(t, e)
	ended(t, b, "true")
	gone(t, helperOf(b))
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) { // a real process
		left, err := os.ReadDir(e.opts.Dir)
		// The prelude serves all jobs of the runner.
		if err == nil && len(left) == 1 && left[0].Name() == preludeName {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("left in the executor's directory: %v, %v", left, err)
		}
	}
}

func TestAHelperOfAJobThatLeftProcessesServesNoOther(t *testing.T) {
	t.Parallel()
	for _, tracking := range trackings() {
		t.Run(string(tracking), func(t *testing.T) {
			t.Parallel()
			e := newExecutor(t, Options{Tracking: tracking})
			b := open(t, e)
			ended(t, b, "setsid sleep 1000 >/dev/null 2>&1 &")
			gone(t, helperOf(b))
			next := open(t, e)
			if helperOf(next) == helperOf(b) {
				t.Error("the helper serves another job")
			}
			ended(t, next, "true")
		})
	}
}

func TestAWaitingHelperThatDoesNotAnswerIsReplaced(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newExecutor(t, Options{})
			b := open(t, e)
			ended(t, b, "true")
			old := helperOf(b)
			if err := jobhelper.Signal(jobhelper.Proc{PID: old.PID, Start: old.Start}, sig); err != nil {
				t.Fatal(err)
			}
			next := open(t, e)
			if helperOf(next) == old {
				t.Error("the helper was not replaced")
			}
			gone(t, old)
			_, out, err := next.run(t, "echo fine")
			if err != nil || out != "fine\n" {
				t.Errorf("%q, %v", out, err)
			}
			if proof, err := next.Close(t.Context()); err != nil || !proof.Terminated {
				t.Errorf("%+v, %v", proof, err)
			}
		})
	}
}

func TestSweepLeavesNoRecordOfAWaitingHelper(t *testing.T) {
	t.Parallel()
	e := newExecutor(t, Options{})
	left := filepath.Join(e.opts.Dir, newID()+parkedSuffix)
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b := open(t, e)
	ended(t, b, "true")
	if attempts, err := e.Sweep(t.Context()); err != nil || len(attempts) > 0 {
		t.Errorf("%v, %v", attempts, err)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("what a runner left that is gone is still there")
	}
	next := open(t, e)
	if helperOf(next) != helperOf(b) {
		t.Error("the helper that waited does not serve after a sweep")
	}
	ended(t, next, "true")
}

func TestTheSharedPreludeIsRepaired(t *testing.T) {
	t.Parallel()
	e := newExecutor(t, Options{})
	path := filepath.Join(e.opts.Dir, preludeName)
	for _, harm := range []func() error{
		func() error { return nil },
		func() error { return os.Remove(path) },
		func() error {
			return errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte("echo harm\n"), 0o600))
		},
	} {
		if err := harm(); err != nil {
			t.Fatal(err)
		}
		b := open(t, e)
		res, out, err := b.run(t, "true\necho $BASH_ENV\nfalse\n")
		if err != nil || res.ExitCode != 1 || res.Line != 3 || out != "\n" {
			t.Errorf("%+v, %q, %v", res, out, err)
		}
		if _, err := b.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAClosedExecutorLeavesNoHelper(t *testing.T) {
	t.Parallel()
	e := newExecutor(t, Options{})
	var all []process
	boxes := []*box{open(t, e), open(t, e), open(t, e)}
	for _, b := range boxes {
		all = append(all, helperOf(b))
		ended(t, b, "true")
	}
	e.Close()
	for _, p := range all {
		if p.alive() {
			t.Errorf("helper %d outlived Close", p.PID)
		}
	}
	if left, err := os.ReadDir(e.opts.Dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
