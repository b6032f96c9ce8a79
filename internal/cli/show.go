package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// showConfig are the settings of forgeci show.
type showConfig struct {
	connection
	output
	waiting
	commit string
	grace  time.Duration
}

func (a *app) showCommand() *cobra.Command {
	var cfg showConfig
	cmd := &cobra.Command{
		Use:   "show RUN|JOB",
		Short: "Show a run or a job, or wait for its end",
		Long: `Show a run with its jobs, or a job with its steps and attempts.

A job is named by its ID or as RUN/NAME. With --wait the command blocks until
the run or job is finished, through restarts of the server, and exits with its
result: 0 success or skipped, 1 failed or timed out, 3 cancelled, 5
infrastructure. Interrupting it (130) or --timeout (124) leaves the run alone.

With --commit it takes all runs of a commit instead; with --wait also, it waits
up to --grace for the first of them to appear and exits with 4 if there is none.`,
		Example: `  forgeci show run_01kb7z5v8c6q9d3m2e4r5t6y7u
  forgeci show --wait --timeout 20m run_01kb7z5v8c6q9d3m2e4r5t6y7u
  forgeci show --wait --commit "$(git rev-parse HEAD)" --output jsonl`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.show(cmd.Context(), &cfg, args) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, true)
	cfg.waiting.bind(cmd)
	f := cmd.Flags()
	f.StringVar(&cfg.commit, "commit", "", "show the runs of this commit")
	f.DurationVar(&cfg.grace, "grace", 30*time.Second, "with --commit and --wait: how long the first run may take to appear")
	return cmd
}

func (a *app) show(ctx context.Context, cfg *showConfig, args []string) error {
	if err := cfg.check(); err != nil {
		return err
	}
	if (len(args) == 1) == (cfg.commit != "") {
		return usage("name one run or job, or a commit with --commit")
	}
	if cfg.form == outputLines && !cfg.wait {
		return usage("--output jsonl needs --wait")
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	ctx, cancel := within(ctx, cfg.timeout) // also what is looked for before the wait
	defer cancel()
	if cfg.commit != "" {
		return a.showCommit(ctx, c, cfg)
	}
	run, job, err := a.target(ctx, c, args[0], cfg.wait)
	if err != nil {
		return a.unseen(err, cfg.output)
	}
	if job != "" {
		return a.showJob(ctx, c, cfg, run, job)
	}
	if !cfg.wait {
		r, err := c.Run(ctx, run)
		if err != nil {
			return err
		}
		if cfg.json() {
			return a.printJSON(r)
		}
		a.printRun(r)
		return nil
	}
	runs, err := a.awaitRuns(ctx, c, []ci.RunID{run}, waiting{failFast: cfg.failFast}, cfg.output)
	if err != nil && runs[0].State == "" {
		return err // nothing is known but the name that was given
	}
	if err != nil {
		return a.cutShort(err, cfg.output, runs, true)
	}
	if err := a.printAwaited(cfg.output, runs, true); err != nil {
		return err
	}
	return finish(runs)
}

// showCommit shows or awaits all runs of a commit.
func (a *app) showCommit(ctx context.Context, c *protocol.Client, cfg *showConfig) error {
	q := protocol.RunsQuery{Commit: cfg.commit}
	begun := time.Now()
	var found []protocol.RunSummary
	for {
		runs, err := patiently(ctx, a, func() ([]protocol.RunSummary, error) {
			runs, _, err := listRuns(ctx, c, q, 0)
			return runs, err
		})
		if err != nil {
			return a.unseen(err, cfg.output)
		}
		found = runs
		if len(found) > 0 || !cfg.wait || time.Since(begun) > cfg.grace {
			break
		}
		if err := pause(ctx, time.Second); err != nil {
			return a.unseen(err, cfg.output)
		}
	}
	if len(found) == 0 {
		return a.unseen(ci.Errorf(ci.ErrNotFound, "there is no run of commit %s", cfg.commit), cfg.output)
	}
	ids := make([]ci.RunID, len(found))
	for i, r := range found {
		ids[i] = r.ID
	}
	if cfg.wait {
		runs, err := a.awaitRuns(ctx, c, ids, waiting{failFast: cfg.failFast}, cfg.output)
		if err != nil {
			return a.cutShort(err, cfg.output, runs, false)
		}
		if err := a.printAwaited(cfg.output, runs, false); err != nil {
			return err
		}
		return finish(runs)
	}
	runs := make([]protocol.Run, len(ids))
	for i, id := range ids {
		r, err := c.Run(ctx, id)
		if err != nil {
			return err
		}
		runs[i] = r
	}
	return a.printAwaited(cfg.output, runs, false)
}

// target resolves what a person names: the ID of a run, the ID of a job, or
// RUN/NAME. One of the results is empty.
func (a *app) target(ctx context.Context, c *protocol.Client, name string, patient bool) (ci.RunID, ci.JobID, error) {
	runName, jobName, named := strings.Cut(name, "/")
	switch {
	case named && ci.HasPrefix(runName, ci.PrefixRun):
		run, err := a.readRun(ctx, c, ci.RunID(runName), patient)
		if err != nil {
			return "", "", err
		}
		job, err := jobNamed(run, jobName)
		return "", job.ID, err
	case ci.HasPrefix(name, ci.PrefixRun):
		return ci.RunID(name), "", nil
	case ci.HasPrefix(name, ci.PrefixJob):
		return "", ci.JobID(name), nil
	default:
		return "", "", ci.Errorf(ci.ErrNotFound, "%q is neither a run (run_…) nor a job (job_… or RUN/NAME); `forgeci runs` lists runs", name)
	}
}

// readRun reads a run; patiently, when a lost server is to be waited for.
func (a *app) readRun(ctx context.Context, c *protocol.Client, id ci.RunID, patient bool) (protocol.Run, error) {
	read := func() (protocol.Run, error) { return c.Run(ctx, id) }
	if patient {
		return patiently(ctx, a, read)
	}
	return read()
}

// jobNamed finds a job of a run by its name, or by its key when that is enough.
func jobNamed(run protocol.Run, name string) (protocol.JobSummary, error) {
	var byKey []protocol.JobSummary
	names := make([]string, len(run.JobList))
	for i, j := range run.JobList {
		if j.Name == name || string(j.ID) == name {
			return j, nil
		}
		if j.Key == name {
			byKey = append(byKey, j)
		}
		names[i] = j.Name
	}
	if len(byKey) == 1 {
		return byKey[0], nil
	}
	if len(byKey) > 1 {
		for i, j := range byKey {
			names[i] = j.Name
		}
		return protocol.JobSummary{}, usage("%q stands for several jobs: %s", clean(name), nameList(names[:len(byKey)]))
	}
	return protocol.JobSummary{}, ci.Errorf(ci.ErrNotFound, "run %s has no job %q; it has %s", run.ID, name, nameList(names))
}

func nameList(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = `"` + clean(n) + `"`
	}
	return strings.Join(quoted, ", ")
}

// printRun writes a run for a person.
func (a *app) printRun(r protocol.Run) {
	s := a.out
	st := status(r.State, r.Conclusion, r.Warnings)
	head := fmt.Sprintf("%s  %s #%d  %s", s.paint(bold, string(r.ID)), clean(r.Repo.Name), r.Number, s.paint(st.style, st.text))
	if r.Reason != "" && !r.Conclusion.Succeeded() {
		head += " (" + clean(string(r.Reason)) + ")"
	}
	s.line(head)
	facts := table{}
	fact := func(name, value string) {
		if value != "" {
			facts.add(dimmed("  "+name), text(value))
		}
	}
	fact("workflow", r.Workflow+" ("+r.Path+")")
	fact("source", strings.TrimSpace(sourceName(r.RunSummary)+" "+firstLine(r.Message)))
	fact("event", r.Event+" by "+r.Actor)
	fact("retry of", string(r.ParentRun))
	fact("created", a.ago(r.CreatedAt))
	if r.StartedAt != nil {
		fact("took", a.took(r.StartedAt, r.FinishedAt))
	}
	for _, u := range r.Unproven[:min(len(r.Unproven), mostUnproven)] {
		fact("waits for", a.unproven(u))
	}
	if n := len(r.Unproven) - mostUnproven; n > 0 {
		fact("", "and "+ci.Count(n, "attempt")+" more")
	}
	facts.write(s)
	s.line("")
	jobs := table{head: []string{"JOB", "STATE", "TOOK", "ID", "DETAIL"}}
	for _, j := range r.JobList {
		jobs.add(text(j.Name), status(j.State, j.Conclusion, false), text(a.took(j.StartedAt, j.FinishedAt)),
			dimmed(string(j.ID)), cell{text: jobDetail(j)})
	}
	jobs.write(s)
	if len(r.Artifacts) > 0 {
		s.line("")
		a.artifactTable(r.Artifacts).write(s)
	}
}

// mostUnproven bounds how many attempts are listed that a cancelled run waits for.
const mostUnproven = 5

// unproven says what a run that is being cancelled waits for, and the way out.
func (a *app) unproven(u protocol.Unproven) string {
	text := fmt.Sprintf("%s, attempt %d on %s, ", u.Name, u.Epoch, u.RunnerName)
	if u.Lost {
		text += "lost " + a.ago(u.Since) + " and not proven to have ended"
	} else {
		text += "started " + a.ago(u.Since) + " and asked to stop"
	}
	return text + "; if its host is dead: forgeci runner fence " + u.RunnerName
}

// jobDetail says why a job waits or ended as it did; the text is clean.
func jobDetail(j protocol.JobSummary) string {
	switch {
	case j.PinnedFrom != "":
		return "result of " + clean(string(j.PinnedFrom))
	case j.State == ci.StateFinished:
		detail := why(j)
		if j.Uncertain && !strings.Contains(detail, "may have had effects") {
			detail += "; it may have had effects outside"
		}
		return strings.TrimPrefix(detail, "; ")
	case j.Waiting != nil:
		return clean(j.Waiting.Detail)
	case j.State == ci.StateRunning && j.Runner != "":
		return clean(string(j.Phase)) + " on " + clean(j.Runner)
	default:
		return ""
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	if r := []rune(line); len(r) > 72 {
		return string(r[:71]) + "…"
	}
	return line
}
