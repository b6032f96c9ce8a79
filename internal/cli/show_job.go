package cli

import (
	"context"
	"errors"
	"fmt"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// showJob shows a job, or waits for its end first.
func (a *app) showJob(ctx context.Context, c *protocol.Client, cfg *showConfig, _ ci.RunID, id ci.JobID) error {
	read := func() (protocol.Job, error) { return c.Job(ctx, id) }
	if !cfg.wait {
		job, err := read()
		if err != nil {
			return err
		}
		return a.printJobAs(cfg.output, job)
	}
	job, err := patiently(ctx, a, read)
	if err != nil {
		return a.unseen(err, cfg.output)
	}
	job, err = a.awaitJob(ctx, c, job, func(j protocol.JobSummary) error {
		if cfg.form == outputLines {
			return a.printJSONLine(j)
		}
		a.err.line(a.jobLine(j))
		return nil
	})
	if err != nil {
		a.leaving(err, job.Run.ID)
		switch cfg.form {
		case outputLines:
			return a.unseen(err, cfg.output)
		case outputJSON:
			return errors.Join(err, a.printJSON(a.lastLook(ctx, c, job)))
		default:
			return err
		}
	}
	if cfg.form == outputLines {
		err = a.printJSONLine(awaited{Result: string(job.Conclusion), Code: codeOfResult(job.Conclusion, job.Reason)})
	} else {
		err = a.printJobAs(cfg.output, job)
	}
	if err != nil {
		return err
	}
	return ended(codeOfResult(job.Conclusion, job.Reason))
}

// awaitJob waits until the job is finished. changed is told what becomes of it.
func (a *app) awaitJob(
	ctx context.Context, c *protocol.Client, job protocol.Job, changed func(protocol.JobSummary) error,
) (protocol.Job, error) {
	last := ""
	finished := fmt.Errorf("job %s: %w", job.ID, context.Canceled) // only compared
	see := func(run protocol.Run) error {
		for _, j := range run.JobList {
			if j.ID != job.ID {
				continue
			}
			if line := a.jobLine(j); line != "" && line != last {
				last = line
				if err := changed(j); err != nil {
					return err
				}
			}
			if j.State == ci.StateFinished {
				return finished
			}
		}
		return nil
	}
	if _, err := a.awaitRun(ctx, c, job.Run.ID, waiting{}, see); err != nil && err != finished { //nolint:errorlint // this very value
		return job, err
	}
	return patiently(ctx, a, func() (protocol.Job, error) { return c.Job(ctx, job.ID) })
}

// lastLook reads a job for a command that does not wait any more. When no server
// answers at once, it is the job as it was read before.
func (a *app) lastLook(ctx context.Context, c *protocol.Client, job protocol.Job) protocol.Job {
	ctx, cancel := parting(ctx)
	defer cancel()
	if now, err := c.Job(ctx, job.ID); err == nil {
		return now
	}
	return job
}

func (a *app) printJobAs(o output, job protocol.Job) error {
	if o.json() {
		return a.printJSON(job)
	}
	a.printJob(job)
	return nil
}

// printJob writes a job for a person.
func (a *app) printJob(j protocol.Job) {
	s := a.out
	st := status(j.State, j.Conclusion, false)
	s.line(fmt.Sprintf("%s  %s  %s", s.paint(bold, string(j.ID)), clean(j.Name), s.paint(st.style, st.text)))
	facts := table{}
	facts.add(dimmed("  run"), textf("%s (%s #%d)", j.Run.ID, j.Run.Repo.Name, j.Run.Number))
	if d := jobDetail(j.JobSummary); d != "" {
		facts.add(dimmed("  detail"), cell{text: d})
	}
	for _, need := range j.Needs {
		facts.add(dimmed("  needs"), text(need))
	}
	if j.StartedAt != nil {
		facts.add(dimmed("  took"), text(a.took(j.StartedAt, j.FinishedAt)))
	}
	for _, name := range sortedKeys(j.Outputs) {
		facts.add(dimmed("  output"), textf("%s=%s", name, j.Outputs[name]))
	}
	facts.write(s)
	if len(j.StepList) > 0 {
		s.line("")
		steps := table{head: []string{"STEP", "NAME", "STATE", "TOOK", "DETAIL"}}
		for _, st := range j.StepList {
			took, detail := "", ""
			if st.Duration != nil {
				took = span(st.Duration.Std())
			}
			switch {
			case st.Signal != "":
				detail = "signal " + st.Signal
			case st.ExitCode != nil && *st.ExitCode != 0:
				detail = fmt.Sprintf("exit code %d", *st.ExitCode)
			case !st.Conclusion.Succeeded():
				detail = string(st.Reason)
			}
			steps.add(textf("%d", st.Index+1), text(st.Name), status(st.State, st.Conclusion, false), text(took), text(detail))
		}
		steps.write(s)
	}
	if len(j.Attempt) > 0 {
		s.line("")
		attempts := table{head: []string{"ATTEMPT", "RUNNER", "PHASE", "STATE", "CLAIMED", "TOOK", "DETAIL"}}
		for _, at := range j.Attempt {
			detail := at.Detail
			if detail == "" && !at.Conclusion.Succeeded() {
				detail = string(at.Reason)
			}
			if at.Winner {
				detail = "result of the job"
			}
			attempts.add(textf("%d", at.Epoch), text(at.RunnerName), text(string(at.Phase)),
				status(at.State, at.Conclusion, false), text(a.ago(at.ClaimedAt)), text(a.took(at.ExecutedAt, at.EndedAt)), text(detail))
		}
		attempts.write(s)
	}
}
