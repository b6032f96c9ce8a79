package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// TestJobs runs one job each and looks at how it ends.
func TestJobs(t *testing.T) {
	t.Parallel()
	type step = ci.StepSpec
	sleep := func(d time.Duration) func(context.Context, executor.Step) executor.Result {
		return func(ctx context.Context, _ executor.Step) executor.Result {
			if pause(ctx, d) != nil {
				time.Sleep(executor.Grace(ctx, time.Second))
				return executor.Result{ExitCode: 137, Signal: "SIGKILL"}
			}
			return executor.Result{}
		}
	}
	for name, c := range map[string]struct {
		steps      []step
		change     func(*protocol.Ticket)
		conclusion ci.Conclusion
		reason     ci.Reason
		exit       int // of the job; -1 for none
		each       []ci.Conclusion
		detail     string
		within     time.Duration
	}{
		"success": {
			steps: []step{{Run: "echo a"}, {Run: "echo b"}}, conclusion: ci.ConclusionSuccess, exit: -1,
			each: []ci.Conclusion{ci.ConclusionSuccess, ci.ConclusionSuccess},
		},
		"no steps": {conclusion: ci.ConclusionSuccess, exit: -1},
		"failing step": {
			steps: []step{{Run: "exit 3"}, {Run: "echo never"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonExit, exit: 3,
			each: []ci.Conclusion{ci.ConclusionFailed, ci.ConclusionSkipped}, detail: "exit code 3",
		},
		"conditions after a failure": {
			steps: []step{
				{Run: "echo never", If: "failure()"},
				{Run: "exit 3"},
				{Run: "echo on failure", If: "failure()"},
				{Run: "echo always", If: "always()"},
				{Run: "exit 4", If: "always()"},
				{Run: "echo never", If: "success()"},
			},
			conclusion: ci.ConclusionFailed, reason: ci.ReasonExit, exit: 3,
			each: []ci.Conclusion{
				ci.ConclusionSkipped, ci.ConclusionFailed, ci.ConclusionSuccess, ci.ConclusionSuccess,
				ci.ConclusionFailed, ci.ConclusionSkipped,
			},
		},
		"continue on error": {
			steps: []step{{Run: "exit 3", ContinueOnError: true}, {Run: "echo b"}}, conclusion: ci.ConclusionSuccess, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed, ci.ConclusionSuccess},
		},
		"condition that cannot be evaluated": {
			steps: []step{{Run: "echo never", If: "nonsense("}, {Run: "echo never"}}, conclusion: ci.ConclusionFailed,
			reason: ci.ReasonConditionError, exit: -1, each: []ci.Conclusion{ci.ConclusionFailed, ci.ConclusionSkipped}, detail: "nonsense",
		},
		"step timeout": {
			steps:      []step{{Run: "sleep", Timeout: ci.Duration(5 * time.Second)}, {Run: "echo cleanup", If: "always()"}},
			conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, exit: 137,
			each: []ci.Conclusion{ci.ConclusionTimedOut, ci.ConclusionSuccess}, within: 7 * time.Second,
			detail: "step 1 (step 1): the step's time limit of 5s is reached",
		},
		"step timeout that may be": {
			steps:      []step{{Run: "sleep", Timeout: ci.Duration(5 * time.Second), ContinueOnError: true}, {Run: "echo b"}},
			conclusion: ci.ConclusionSuccess, exit: -1, each: []ci.Conclusion{ci.ConclusionTimedOut, ci.ConclusionSuccess},
		},
		"CAN-04 job timeout, always steps within their own bound": {
			steps: []step{{Run: "sleep"}, {Run: "echo cleanup", If: "always()"}, {Run: "sleep", If: "always()"}, {Run: "echo never"}},
			change: func(t *protocol.Ticket) {
				t.Job.Timeout = ci.Duration(5 * time.Second)
			},
			conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, exit: 137, within: 5*time.Second + time.Minute,
			detail: "step 1 (step 1): the job's time limit of 5s is reached",
			each:   []ci.Conclusion{ci.ConclusionTimedOut, ci.ConclusionSuccess, ci.ConclusionTimedOut, ci.ConclusionSkipped},
		},
		"the limit of steps after the job's limit": {
			steps: []step{ // the job's limit comes within the grace of the first
				{Run: "sleep", Timeout: ci.Duration(4500 * time.Millisecond), ContinueOnError: true},
				{Run: "sleep", If: "always()"},
			},
			change:     func(t *protocol.Ticket) { t.Job.Timeout = ci.Duration(5 * time.Second) },
			conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, exit: 137,
			each:   []ci.Conclusion{ci.ConclusionTimedOut, ci.ConclusionTimedOut},
			detail: "step 2 (step 2): the limit for steps after the job's time limit of ",
		},
		"CAN-04 job timeout in a step that may fail": {
			steps:      []step{{Run: "echo a"}, {Run: "sleep", ContinueOnError: true}},
			change:     func(t *protocol.Ticket) { t.Job.Timeout = ci.Duration(5 * time.Second) },
			conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, exit: 137, within: 7 * time.Second,
			detail: "step 2 (step 2): the job's time limit of 5s is reached",
			each:   []ci.Conclusion{ci.ConclusionSuccess, ci.ConclusionTimedOut},
		},
		"CAN-04 job timeout ends in time": {
			steps:      []step{{Run: "sleep"}},
			change:     func(t *protocol.Ticket) { t.Job.Timeout = ci.Duration(5 * time.Second) },
			conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, exit: 137, within: 7 * time.Second,
			each: []ci.Conclusion{ci.ConclusionTimedOut},
		},
		"working directory": {
			steps: []step{{Run: "pwd", WorkingDirectory: "sub"}}, conclusion: ci.ConclusionSuccess, exit: -1,
			each: []ci.Conclusion{ci.ConclusionSuccess},
		},
		"working directory that is not there": {
			steps: []step{{Run: "pwd", WorkingDirectory: "nope"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonExit, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed}, detail: `"nope" is not a directory`,
		},
		"working directory outside": {
			steps: []step{{Run: "pwd", WorkingDirectory: "../x"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonExit, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed}, detail: "leaves the workspace",
		},
		"sandbox fails": {
			steps: []step{{Run: "unknown script"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonInternal, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed}, detail: "the sandbox failed",
		},
		"defect of the runner": {
			steps: []step{{Run: "panic"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonInternal, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed}, detail: "a defect of the runner",
		},
		"outputs": {
			steps: []step{{Run: "output"}}, conclusion: ci.ConclusionSuccess, exit: -1, each: []ci.Conclusion{ci.ConclusionSuccess},
		},
		"YAML-10 reserved output": {
			steps: []step{{Run: "reserved output"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonOutputInvalid, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed}, detail: "FORGECI_OUTPUT:2:1: LD_PRELOAD is a reserved name",
		},
		"output file replaced": {
			steps: []step{{Run: "link output"}}, conclusion: ci.ConclusionFailed, reason: ci.ReasonOutputInvalid, exit: -1,
			each: []ci.Conclusion{ci.ConclusionFailed},
		},
		"SR-3 source with another digest": {
			steps:      []step{{Run: "echo never"}},
			change:     func(t *protocol.Ticket) { t.Source.Digest = "sha256:" + strings.Repeat("0", 64) },
			conclusion: ci.ConclusionFailed, reason: ci.ReasonPrepare, exit: -1, each: []ci.Conclusion{ci.ConclusionSkipped},
			detail: "holds the tree",
		},
		"SR-3 source with another size": {
			steps:      []step{{Run: "echo never"}},
			change:     func(t *protocol.Ticket) { t.Source.Size-- },
			conclusion: ci.ConclusionFailed, reason: ci.ReasonPrepare, exit: -1, each: []ci.Conclusion{ci.ConclusionSkipped},
			detail: "fetch the source",
		},
		"AR-4 artifact to restore is gone": {
			steps: []step{{Run: "echo never"}},
			change: func(t *protocol.Ticket) {
				t.Restore = []protocol.RestoreArtifact{{ID: "sha256:none", Name: "app", Path: "inputs/app.jar", Size: 1}}
			},
			conclusion: ci.ConclusionFailed, reason: ci.ReasonArtifactMissing, exit: -1, each: []ci.Conclusion{ci.ConclusionSkipped},
			detail: "restore artifact app to inputs/app.jar",
		},
		"AR-4 artifact to restore was never published": {
			steps: []step{{Run: "echo never"}},
			change: func(t *protocol.Ticket) {
				t.Job.Restore = []ci.ArtifactRestore{{FromJob: "compile", Name: "app", Path: "inputs/app.jar"}}
			},
			conclusion: ci.ConclusionFailed, reason: ci.ReasonArtifactMissing, exit: -1, each: []ci.Conclusion{ci.ConclusionSkipped},
			detail: "restore artifact app to inputs/app.jar: job compile published none in this run",
		},
		"AR-1 declared output is missing": {
			steps: []step{{Run: "echo a"}},
			change: func(t *protocol.Ticket) {
				t.Job.Publish = []ci.ArtifactPublish{{Name: "app", Paths: []string{"target/*.jar"}}}
			},
			conclusion: ci.ConclusionFailed, reason: ci.ReasonOutputMissing, exit: -1, each: []ci.Conclusion{ci.ConclusionSuccess},
			detail: "artifact app: nothing matches target/*.jar",
		},
		"AR-1 optional output is missing": {
			steps: []step{{Run: "echo a"}},
			change: func(t *protocol.Ticket) {
				t.Job.Publish = []ci.ArtifactPublish{{Name: "app", Paths: []string{"target/*.jar"}, Optional: true}}
			},
			conclusion: ci.ConclusionSuccess, exit: -1, each: []ci.Conclusion{ci.ConclusionSuccess},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				r.exec.steps["exit 3"], r.exec.steps["exit 4"] = exit(3), exit(4)
				r.exec.steps["sleep"] = sleep(time.Hour)
				r.exec.steps["pwd"] = func(_ context.Context, step executor.Step) executor.Result {
					if filepath.Base(step.Dir) != "sub" {
						return executor.Result{ExitCode: 1}
					}
					return executor.Result{}
				}
				r.exec.steps["panic"] = func(context.Context, executor.Step) executor.Result { panic("injected") }
				r.exec.steps["output"] = writesOutput("version=1.2\nundeclared=x\n")
				r.exec.steps["reserved output"] = writesOutput("version=1.2\nLD_PRELOAD=/x\n")
				r.exec.steps["link output"] = func(_ context.Context, step executor.Step) executor.Result {
					path := env(step)["FORGECI_OUTPUT"]
					_ = os.Remove(path)
					_ = os.Symlink("/etc/hostname", path)
					return executor.Result{}
				}
				j := s.add(ci.JobSpec{Steps: slices.Clone(c.steps), Outputs: []string{"version"}}, map[string]string{"sub/file": "x"}, func(t *protocol.Ticket) {
					if c.change != nil {
						c.change(t)
					}
				})
				start := time.Now()
				r.start().finish(j)
				took := time.Since(start)
				r.drain()
				got := j.complete
				if got == nil {
					t.Fatalf("no completion; hand-over %+v", j.handOver)
				}
				if got.Conclusion != c.conclusion || got.Reason != c.reason || !strings.Contains(got.Detail, c.detail) {
					t.Errorf("ended %s, %q: %s", got.Conclusion, got.Reason, got.Detail)
				}
				if exit := codeOf(got.ExitCode); exit != c.exit {
					t.Errorf("exit code %d, want %d", exit, c.exit)
				}
				var each []ci.Conclusion
				for i := range c.steps {
					each = append(each, j.steps[i].Conclusion)
					if j.steps[i].State != ci.StateFinished {
						t.Errorf("step %d is %s", i, j.steps[i].State)
					}
				}
				if diff := cmp.Diff(c.each, each); diff != "" {
					t.Errorf("steps (-want +got):\n%s", diff)
				}
				if !got.Evidence.Terminated {
					t.Error("no evidence of termination")
				}
				if c.within > 0 && took > c.within {
					t.Errorf("took %s", took)
				}
				if name == "outputs" {
					if diff := cmp.Diff(map[string]string{"version": "1.2"}, got.Outputs); diff != "" {
						t.Errorf("outputs (-want +got):\n%s", diff)
					}
					if note := j.text(0, protocol.System); !strings.Contains(note, "undeclared") {
						t.Errorf("the drop of an undeclared output is not said: %q", note)
					}
				}
			})
		})
	}
}

func codeOf(code *int) int {
	if code == nil {
		return -1
	}
	return *code
}

func env(step executor.Step) map[string]string {
	m := map[string]string{}
	for _, kv := range step.Env {
		m[kv.Key] = kv.Value
	}
	return m
}

func writesOutput(text string) func(context.Context, executor.Step) executor.Result {
	return func(_ context.Context, step executor.Step) executor.Result {
		if err := os.WriteFile(env(step)["FORGECI_OUTPUT"], []byte(text), 0o600); err != nil {
			return executor.Result{ExitCode: 99}
		}
		return executor.Result{}
	}
}

// Decision 1: the phase is on the server before the runner goes there.
func TestPhasesAreCommittedBeforeTheyBegin(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		var before []ci.Phase
		var j *fakeJob
		r.exec.steps["look"] = func(context.Context, executor.Step) executor.Result {
			s.mu.Lock()
			defer s.mu.Unlock()
			before = slices.Clone(j.phases)
			return executor.Result{}
		}
		j = s.add(job("look", "echo b"), nil, func(t *protocol.Ticket) {
			t.Job.Publish = []ci.ArtifactPublish{{Name: "all", Paths: []string{"."}, Optional: true}}
		})
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteFetchSource && !slices.Contains(j.phases, ci.PhasePreparing) {
				t.Error("source is fetched before the phase preparing")
			}
			if route == protocol.RouteNewArtifact && !slices.Contains(j.phases, ci.PhaseFinalising) {
				t.Error("an upload begins before the phase finalising")
			}
			return ""
		}
		r.start().finish(j)
		r.drain()
		if want := []ci.Phase{ci.PhaseClaimed, ci.PhasePreparing, ci.PhaseExecuting}; !slices.Equal(before, want) {
			t.Errorf("phases at the first step: %v", before)
		}
	})
}

// A phase that the server does not commit is not entered.
func TestNoStepRunsWhileThePhaseIsNotCommitted(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		j := s.add(job("echo hi"), nil)
		s.fault = func(route string, nth int) string {
			if route == protocol.RoutePhase && nth >= 2 {
				return "503"
			}
			return ""
		}
		r.start()
		time.Sleep(30 * time.Second)
		if ran := r.exec.scripts(); len(ran) != 0 {
			t.Errorf("steps %q", ran)
		}
		s.mu.Lock()
		s.fault = nil
		s.mu.Unlock()
		r.finish(j)
		r.drain()
	})
}

// EX-9: the runner admits for itself, and a refusal comes before user code.
func TestRunnerRefusesWhatItMustNotRun(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*protocol.Ticket){
		"untrusted run":   func(t *protocol.Ticket) { t.Run.Trust = ci.TrustUntrusted },
		"no trust at all": func(t *protocol.Ticket) { t.Run.Trust = "" },
		"another class":   func(t *protocol.Ticket) { t.Job.RunsOn.Isolation = ci.IsolationVM },
		"another system":  func(t *protocol.Ticket) { t.Job.RunsOn.OS = "plan9" },
		"a feature":       func(t *protocol.Ticket) { t.Job.RunsOn.Features = []string{ci.FeatureSecrets} },
		"an image":        func(t *protocol.Ticket) { t.Job.Image = &ci.Image{Ref: "x"} },
	} {
		inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
			j := s.add(job("echo never"), nil, change)
			r.start().finish(j)
			r.drain()
			if j.handOver == nil || j.handOver.Reason != ci.ReasonRunnerRefused || j.handOver.Detail == "" {
				t.Errorf("%s: hand-over %+v, completion %+v", name, j.handOver, j.complete)
			}
			if len(r.exec.scripts()) != 0 || r.exec.opened != 0 || len(j.phases) != 1 {
				t.Errorf("%s: steps %q, phases %v", name, r.exec.scripts(), j.phases)
			}
		})
	}
}

// LP-6: no result without evidence; a process that cannot be ended keeps job and
// slot until it has ended.
func TestResultWaitsForTermination(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.exec.stuck = 8
		j := s.add(job("echo hi"), nil)
		r.start()
		time.Sleep(time.Second)
		if j.complete != nil {
			t.Error("completed although processes are left")
		}
		r.finish(j)
		r.drain()
		if !j.complete.Evidence.Terminated || j.complete.Conclusion != ci.ConclusionSuccess {
			t.Errorf("%+v", j.complete)
		}
	})
}

// What a crashed runner left is reported with the first session.
func TestFilesOfACrashedRunnerAreRemoved(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		if err := os.MkdirAll(r.config.DataDir, 0o700); err != nil {
			t.Fatal(err)
		}
		names := []string{"fetch-1", "artifact-22", "log-lse_1.spool", "log-lse_1.spool.1", ".new-333"}
		for _, name := range names {
			if err := os.WriteFile(filepath.Join(r.config.DataDir, name), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r.start()
		time.Sleep(time.Second)
		r.drain()
		for _, name := range names {
			if _, err := os.Stat(filepath.Join(r.config.DataDir, name)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left: %v", name, err)
			}
		}
	})
}

func TestAttemptsOfACrashedRunnerAreReportedAsEnded(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.exec.sweep = []protocol.AttemptRef{{Job: "job_7", Epoch: 2}}
		r.start()
		time.Sleep(time.Second)
		r.drain()
		if diff := cmp.Diff(r.exec.sweep, s.hello[0].Terminated); diff != "" {
			t.Errorf("reported (-want +got):\n%s", diff)
		}
	})
}

func TestStepsAreReportedWhileTheNextRuns(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		var seen []protocol.StepUpdate
		var j *fakeJob
		r.exec.steps["look"] = func(ctx context.Context, _ executor.Step) executor.Result {
			_ = pause(ctx, time.Second)
			s.mu.Lock()
			defer s.mu.Unlock()
			seen = append(seen, j.steps[0], j.steps[1], j.steps[2])
			return executor.Result{}
		}
		spec := job("echo a", "echo never", "look")
		spec.Steps[1].If = "failure()"
		j = s.add(spec, nil)
		r.start().finish(j)
		r.drain()
		if seen[0].Conclusion != ci.ConclusionSuccess || seen[1].Conclusion != ci.ConclusionSkipped || seen[2].State != ci.StateRunning {
			t.Errorf("seen by the server during the last step: %+v", seen)
		}
	})
}

// The environment contract of docs/environment.md.
func TestStepEnvironment(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		var got []map[string]string
		var needs []byte
		look := func(_ context.Context, step executor.Step) executor.Result {
			e := env(step)
			got = append(got, e)
			needs, _ = os.ReadFile(e["FORGECI_NEEDS"])
			return executor.Result{}
		}
		r.exec.steps["look"] = look
		spec := job("look", "look")
		spec.Name, spec.Key = "test (linux, 3.10)", "test"
		spec.Matrix = []ci.KeyValue{{Key: "py-version", Value: "3.10"}}
		spec.Env = []ci.KeyValue{{Key: "A", Value: "job"}, {Key: "B", Value: "job"}, {Key: "CI_RUN_ID", Value: "forged"}}
		spec.Steps[1].Env = []ci.KeyValue{{Key: "B", Value: "step"}, {Key: "CI", Value: "false"}, {Key: "FORGECI_OUTPUT", Value: "/etc/passwd"}}
		j := s.add(spec, nil, func(t *protocol.Ticket) {
			t.Run = protocol.RunInfo{
				Number: 42, Repo: "acme/site", Workflow: "ci", Path: ".forgeci.yaml", Event: "manual", CommitSHA: "abc",
				Ref: "refs/heads/main", Message: "fix\x00 it\n\nlong", Author: "A <a@example.com>", URL: "http://server/runs/1",
				Trust: ci.TrustTrusted, Inputs: map[string]string{"test-suite": "all"},
			}
			t.Needs = map[string]protocol.NeedResult{
				"build":   {Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"version": "1.2", "notes": strings.Repeat("x", maxNeedValue+1)}},
				"build-x": {Conclusion: ci.ConclusionFailed},
				"a-b":     {Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"c": "1"}},
				"a":       {Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"b-c": "2"}},
			}
		})
		r.start().finish(j)
		r.drain()
		want := map[string]string{
			"CI": "true", "FORGECI": "true", "A": "job", "B": "job", "CI_REPO": "acme/site", "CI_REPO_OWNER": "acme",
			"CI_REPO_NAME": "site", "CI_COMMIT_SHA": "abc", "CI_COMMIT_REF": "refs/heads/main", "CI_COMMIT_BRANCH": "main",
			"CI_COMMIT_MESSAGE": "fix it\n\nlong", "CI_COMMIT_AUTHOR": "A <a@example.com>", "CI_RUN_ID": "run_1", "CI_RUN_NUMBER": "42",
			"CI_RUN_EVENT": "manual", "CI_RUN_URL": "http://server/runs/1", "CI_WORKFLOW_NAME": "ci", "CI_WORKFLOW_PATH": ".forgeci.yaml",
			"CI_JOB_ID": "job_1", "CI_JOB_NAME": "test (linux, 3.10)", "CI_JOB_KEY": "test", "CI_ATTEMPT": "1",
			"CI_STEP_NAME": "step 1", "CI_STEP_NUMBER": "1", "FORGECI_OPERATION_ID": "op1-0", "FORGECI_MATRIX_PY_VERSION": "3.10",
			"FORGECI_INPUT_TEST_SUITE": "all", "FORGECI_NEEDS_BUILD": "success", "FORGECI_NEEDS_BUILD_VERSION": "1.2",
			"FORGECI_NEEDS_BUILD_X": "failed", "FORGECI_NEEDS_A_B": "success", "FORGECI_NEEDS_A": "success",
		}
		first, second := got[0], got[1]
		workspace := first["CI_WORKSPACE"]
		for _, local := range []string{"CI_WORKSPACE", "FORGECI_OUTPUT", "FORGECI_NEEDS"} {
			if !filepath.IsAbs(first[local]) {
				t.Errorf("%s is %q", local, first[local])
			}
			delete(first, local)
		}
		if diff := cmp.Diff(want, first); diff != "" {
			t.Errorf("first step (-want +got):\n%s", diff)
		}
		if second["B"] != "step" || second["CI"] != "false" || second["CI_RUN_ID"] != "run_1" || second["FORGECI_OPERATION_ID"] != "op1-1" {
			t.Errorf("second step: B=%s CI=%s CI_RUN_ID=%s FORGECI_OPERATION_ID=%s", second["B"], second["CI"], second["CI_RUN_ID"], second["FORGECI_OPERATION_ID"])
		}
		if out := second["FORGECI_OUTPUT"]; out == "/etc/passwd" || strings.HasPrefix(out, workspace+"/") {
			t.Errorf("output file of the second step: %s", out)
		}
		var doc map[string]protocol.NeedResult
		if err := json.Unmarshal(needs, &doc); err != nil {
			t.Fatal(err)
		}
		if len(doc) != 4 || len(doc["build"].Outputs["notes"]) != maxNeedValue+1 || doc["a"].Outputs["b-c"] != "2" {
			t.Errorf("FORGECI_NEEDS holds %d needs", len(doc))
		}
	})
}

// LP-12: equal in all attempts of a job, different for every other step.
func TestOperationIDIsStableAcrossAttempts(t *testing.T) {
	t.Parallel()
	a := &protocol.Ticket{OperationID: "op", Lease: ci.LeaseRef{Lease: "lse_1", Epoch: 1}}
	b := &protocol.Ticket{OperationID: "op", Lease: ci.LeaseRef{Lease: "lse_2", Epoch: 2}}
	if operationID(a, 0) != operationID(b, 0) || operationID(a, 0) == operationID(a, 1) {
		t.Errorf("%s, %s, %s", operationID(a, 0), operationID(b, 0), operationID(a, 1))
	}
}

// EX-4: neither credential nor lease reach the job.
func TestNoCredentialInTheEnvironment(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		var all string
		r.exec.steps["look"] = func(_ context.Context, step executor.Step) executor.Result {
			all = fmt.Sprint(step)
			return executor.Result{}
		}
		j := s.add(job("look"), nil)
		r.start().finish(j)
		r.drain()
		for _, secret := range []string{registrationToken, "fcn_1", j.lease.String(), string(j.lease.Session)} {
			if strings.Contains(all, secret) {
				t.Errorf("the step is given %s", secret)
			}
		}
	})
}
