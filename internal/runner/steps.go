package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/workflow"
)

// execute runs the steps. The phase is committed before the first of them.
func (w *worker) execute(job context.Context) result {
	t := w.ticket
	needsFile, err := w.needsFile(t.Needs)
	if err != nil {
		return because(job, ci.ReasonPrepare, err)
	}
	w.changeable, w.fixed = jobEnvironment(t, w.dir.Work(), needsFile)
	news := &transitions{w: w}
	if err := w.setPhase(job, protocol.SetPhase{
		Phase: ci.PhaseExecuting, SourceDigest: w.verified, Steps: w.firstStep(),
	}); err != nil {
		return because(job, ci.ReasonPrepare, err)
	}
	defer news.end()

	timed, cancel := w.limited(job)
	defer cancel()
	parting, endParting := w.afterCancel(job)
	defer endParting()
	ctx := timed
	res := result{conclusion: ci.ConclusionSuccess}
	sofar := w.conditions()
	for i := range t.Job.Steps {
		if ctx.Err() != nil && ctx == timed && errors.Is(context.Cause(ctx), causeTimeout) {
			// What must run in any case gets its own, short time.
			d := w.afterTimeout()
			after, cancel := context.WithTimeoutCause(job, d, limit{cause: causeTimeout, whose: "the limit for steps after the job's time limit", after: d})
			defer cancel()
			ctx = after
			sofar.Failed = true
		}
		if errors.Is(context.Cause(job), causeCancelled) {
			ctx = parting
			sofar.Cancelled = true
		}
		up := &w.steps[i]
		runs, err := false, error(nil)
		if ctx.Err() == nil {
			runs, err = workflow.EvalStepIf(t.Job.Steps[i].If, sofar)
		}
		switch {
		case err != nil:
			up.State, up.Conclusion, up.Reason = ci.StateFinished, ci.ConclusionFailed, ci.ReasonConditionError
			w.noteStep(i, fmt.Sprintf("condition: %v", err))
		case !runs:
			up.State, up.Conclusion = ci.StateFinished, ci.ConclusionSkipped
			if ctx.Err() == nil && !sofar.Cancelled {
				up.Reason = ci.ReasonCondition
			}
		default:
			up.State = ci.StateRunning
			news.add(job, w.steps[:i+1])
			err = w.step(ctx, i, up, sofar.Cancelled)
		}
		// A step that may fail may fail by itself; the end of the job's time is not its own.
		mayFail := t.Job.Steps[i].ContinueOnError && !errors.Is(err, causeTimeout)
		if up.Conclusion.Succeeded() || up.Conclusion == ci.ConclusionSkipped || mayFail {
			continue
		}
		sofar.Failed = sofar.Failed || up.Conclusion != ci.ConclusionCancelled
		if res.conclusion.Succeeded() {
			res = w.decided(i, err)
		}
	}
	if job.Err() != nil {
		return ended(context.Cause(job))
	}
	if timed.Err() != nil && res.conclusion.Succeeded() && ctx != timed {
		return ended(context.Cause(timed))
	}
	return res
}

// conditions returns what the steps' conditions may depend on, before the first.
func (w *worker) conditions() workflow.IfContext {
	c := workflow.IfContext{Needs: map[string]workflow.Need{}, Inputs: w.ticket.Run.Inputs, Matrix: w.ticket.Job.Matrix}
	for key, need := range w.ticket.Needs {
		c.Needs[key] = workflow.Need{Conclusion: need.Conclusion, Outputs: need.Outputs}
	}
	return c
}

// firstStep reports the first step as running along with the phase when nothing
// can keep it from running, which saves a call.
func (w *worker) firstStep() []protocol.StepUpdate {
	if len(w.steps) == 0 || w.ticket.Job.Steps[0].If != "" {
		return nil
	}
	w.steps[0].State = ci.StateRunning
	return w.steps[:1:1]
}

// afterTimeout is how long steps that run in any case get after the job's time
// limit: the server waits for the grace and a TTL before it ends the lease.
func (w *worker) afterTimeout() time.Duration {
	return max((w.held.ttl-w.grace())/2, w.held.ttl/4)
}

// afterCancel returns the context of the steps that run although the job is
// cancelled. What they may take is part of the grace: when three quarters of it
// have passed since the cancel they are asked to end, and have the rest to do so.
// It ends at once with the lease and with the runner.
func (w *worker) afterCancel(job context.Context) (context.Context, func()) {
	ctx, end := context.WithCancelCause(w.owned)
	stopped := context.AfterFunc(w.working, func() { end(context.Cause(w.working)) })
	d := w.grace() - w.grace()/4
	cancelled := context.AfterFunc(job, func() {
		timer := time.AfterFunc(d, func() {
			end(limit{cause: causeTimeout, whose: "the limit for steps after the cancel", after: d, grace: w.grace() / 4})
		})
		context.AfterFunc(ctx, func() { timer.Stop() })
	})
	return ctx, func() {
		cancelled()
		stopped()
		end(nil)
	}
}

// decided makes the job's result of the step that decided it.
func (w *worker) decided(i int, err error) result {
	up := w.steps[i]
	res := result{conclusion: up.Conclusion, reason: up.Reason}
	if up.Reason == ci.ReasonExit || up.Reason == ci.ReasonTimeout {
		res.exitCode = up.ExitCode
	}
	switch {
	case err != nil:
		res.detail = fmt.Sprintf("step %d (%s): %v", i+1, up.Name, err)
	case up.Signal != "":
		res.detail = fmt.Sprintf("step %d (%s) was ended by %s", i+1, up.Name, up.Signal)
	case up.ExitCode != nil:
		res.detail = fmt.Sprintf("step %d (%s) ended with exit code %d", i+1, up.Name, *up.ExitCode)
	}
	return res
}

// step runs one step and fills in how it ended. The error explains an end that
// is not the command's own. cancelled: the job was, before the step.
func (w *worker) step(ctx context.Context, i int, up *protocol.StepUpdate, cancelled bool) error {
	spec := w.ticket.Job.Steps[i]
	begin := time.Now()
	stdout, stderr := w.ship.stream(i, protocol.Stdout), w.ship.stream(i, protocol.Stderr)
	finish := func(c ci.Conclusion, reason ci.Reason) {
		up.State, up.Conclusion, up.Reason = ci.StateFinished, c, reason
		up.Duration = ci.Duration(max(time.Since(begin), 0))
		_, _ = stdout.Close(), stderr.Close()
	}
	explain := func(c ci.Conclusion, reason ci.Reason, err error) error {
		w.noteStep(i, err.Error())
		finish(c, reason)
		return err
	}
	dir := filepath.Join(w.dir.Work(), filepath.FromSlash(spec.WorkingDirectory))
	if spec.WorkingDirectory != "" {
		if !filepath.IsLocal(filepath.FromSlash(spec.WorkingDirectory)) {
			return explain(ci.ConclusionFailed, ci.ReasonExit, fmt.Errorf("working_directory %q leaves the workspace", spec.WorkingDirectory))
		}
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			return explain(ci.ConclusionFailed, ci.ReasonExit, fmt.Errorf("working_directory %q is not a directory", spec.WorkingDirectory))
		}
	}
	output, err := w.dir.NewOutput(i)
	if err != nil {
		return explain(ci.ConclusionFailed, ci.ReasonInternal, err)
	}
	if d := spec.Timeout.Std(); d > 0 {
		var cancel context.CancelFunc
		reached := limit{cause: causeStep, whose: "the step's time limit", after: d}
		if cancelled {
			reached.grace = w.grace() / 4
		}
		ctx, cancel = context.WithTimeoutCause(ctx, d, reached)
		defer cancel()
	}
	got, err := w.box.Run(ctx, executor.Step{
		Index: i, Script: spec.Run, Shell: spec.Shell, Dir: dir, Stdout: stdout, Stderr: stderr,
		Env: stepEnvironment(w.changeable, w.fixed, w.ticket, i, output),
	})
	why := context.Cause(ctx)
	switch kind := ci.KindOf(err); {
	case err == nil || why != nil:
	case kind == ci.ErrInvalid || kind == ci.ErrTooLarge || kind == ci.ErrUnsafe:
		return explain(ci.ConclusionFailed, ci.ReasonExit, err)
	default:
		return explain(ci.ConclusionFailed, ci.ReasonInternal, fmt.Errorf("the sandbox failed: %w", err))
	}
	if err == nil {
		up.ExitCode, up.Signal = &got.ExitCode, got.Signal
	}
	if got.Leaked {
		w.noteStep(i, "a background process still holds the output; it is ended with the job")
	}
	values, outputErr := w.readOutput(i)
	switch {
	case errors.Is(why, causeStep), errors.Is(why, causeTimeout):
		return explain(ci.ConclusionTimedOut, ci.ReasonTimeout, why)
	case errors.Is(why, causeCancelled):
		finish(ci.ConclusionCancelled, ci.ReasonCancelled)
	case why != nil:
		finish(ci.ConclusionCancelled, ci.ReasonRunnerShutdown)
	case got.ExitCode != 0:
		if outputErr != nil {
			w.noteStep(i, outputErr.Error())
		}
		if got.Line > 0 && strings.Contains(strings.TrimRight(spec.Run, "\n"), "\n") {
			w.noteStep(i, fmt.Sprintf("line %d of the script failed with exit code %d", got.Line, got.ExitCode))
		}
		finish(ci.ConclusionFailed, ci.ReasonExit)
	case outputErr != nil:
		return explain(ci.ConclusionFailed, ci.ReasonOutputInvalid, outputErr)
	default:
		finish(ci.ConclusionSuccess, ci.ReasonNone)
	}
	for _, name := range sortedKeys(values) {
		w.outputs[name] = values[name]
	}
	return nil
}

// readOutput reads what the step wrote to its output file, as far as the job
// declares it.
func (w *worker) readOutput(i int) (map[string]string, error) {
	file, err := w.dir.ReadOutput(i, maxOutputFile)
	if err != nil {
		return nil, err
	}
	values, err := parseOutput(file)
	if err != nil {
		return nil, err
	}
	declared := map[string]bool{}
	for _, name := range w.ticket.Job.Outputs {
		declared[name] = true
	}
	for _, name := range sortedKeys(values) {
		if !declared[name] {
			delete(values, name)
			w.noteStep(i, fmt.Sprintf("output %s is not declared in the job's outputs: dropped", name))
		}
	}
	return values, nil
}

// noteStep writes a line of the runner's own into the step's log.
func (w *worker) noteStep(i int, text string) {
	w.mention(i).line("forgeci: " + text)
}

// mention returns the stream of the runner's lines about a step.
func (w *worker) mention(i int) *logStream {
	for len(w.notes) <= i {
		w.notes = append(w.notes, nil)
	}
	if w.notes[i] == nil {
		w.notes[i] = w.ship.stream(i, protocol.System)
	}
	return w.notes[i]
}

// transitions reports steps while the next is running already; what it does not
// get across goes with the completion.
type transitions struct {
	w    *worker
	next chan []protocol.StepUpdate
	stop context.CancelFunc
	done sync.WaitGroup
	from int // steps before it are reported as finished
}

// add reports the state of the steps up to the one that begins.
func (n *transitions) add(ctx context.Context, steps []protocol.StepUpdate) {
	if len(steps) == 1 && n.w.ticket.Job.Steps[0].If == "" {
		return // went with the phase
	}
	if n.next == nil {
		n.next = make(chan []protocol.StepUpdate, 1)
		ctx, n.stop = context.WithCancel(ctx)
		n.done.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case batch := <-n.next:
					_ = n.w.setPhase(ctx, protocol.SetPhase{Steps: batch})
				}
			}
		})
	}
	batch := append([]protocol.StepUpdate(nil), steps[n.from:]...)
	n.from = len(steps) - 1
	select {
	case waiting := <-n.next:
		batch = append(waiting[:len(waiting)-1:len(waiting)-1], batch...)
	default:
	}
	n.next <- batch
}

// end stops reporting.
func (n *transitions) end() {
	if n.next != nil {
		n.stop()
		n.done.Wait()
	}
}
