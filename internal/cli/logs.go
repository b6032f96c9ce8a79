package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// logsConfig are the settings of forgeci logs.
type logsConfig struct {
	connection
	output
	follow    bool
	failed    bool
	step      string
	stream    string
	attempt   int64
	tail      int64
	sinceLine int64
	limit     int
}

func (a *app) logsCommand() *cobra.Command {
	var cfg logsConfig
	cmd := &cobra.Command{
		Use:   "logs JOB",
		Short: "Print a job's log, or follow it",
		Long: `Print the log of a job, byte for byte as the job wrote it. A terminal gets a safe
form of it: colours stay, other control characters are made visible.

A job is named by its ID or as RUN/NAME; the ID of a run will do when it has
only one job. When less is printed than there is, a note on standard error says
how much.

With --follow the log is printed as it grows, through restarts of the server and
further attempts, until the job is finished. Standard error then says how it
ended, and the command exits with its result, as show --wait does: 0 success or
skipped, 1 failed or timed out, 3 cancelled, 5 infrastructure. With --attempt it
ends with the log of that attempt, and with 0.`,
		Example: `  forgeci logs run_01kb7z5v8c6q9d3m2e4r5t6y7u/test
  forgeci logs -f job_01kb7z5v8d1x0c2v3b4n5m6a7s
  forgeci logs --step 2 job_01kb7z5v8d1x0c2v3b4n5m6a7s | grep FAIL`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.logs(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, true)
	f := cmd.Flags()
	f.BoolVarP(&cfg.follow, "follow", "f", false, "print the log as it grows, until the job is finished")
	f.StringVar(&cfg.step, "step", "", "only this step: its name, or its number from 1")
	f.BoolVar(&cfg.failed, "failed", false, "only steps that failed")
	f.VarP(&choice{&cfg.stream, []string{"stdout", "stderr", "system"}}, "stream", "", "only this stream: stdout, stderr or system")
	f.Int64Var(&cfg.attempt, "attempt", 0, "the log of this attempt; the default is the latest")
	f.Int64Var(&cfg.tail, "tail", 0, "only the last lines")
	f.Int64Var(&cfg.sinceLine, "since-line", 0, "begin at this line, from 1")
	f.IntVar(&cfg.limit, "limit", 1000, "with --output json: how many lines at most")
	registerChoices(cmd, "stream", []string{"stdout", "stderr", "system"})
	return cmd
}

func (c *logsConfig) check() error {
	switch {
	case c.tail < 0 || c.sinceLine < 0 || c.attempt < 0 || c.limit < 1:
		return usage("--tail, --since-line and --attempt count from 1, --limit too")
	case c.tail > 0 && c.sinceLine > 0:
		return usage("--tail and --since-line exclude each other")
	case c.failed && (c.step != "" || c.follow):
		return usage("--failed excludes --step and --follow")
	case c.follow && c.sinceLine > 0:
		return usage("--follow excludes --since-line")
	case c.form == outputLines && !c.follow:
		return usage("--output jsonl needs --follow")
	case c.form == outputJSON && (c.follow || c.failed):
		return usage("--output json excludes --follow and --failed; a followed log has --output jsonl")
	default:
		return nil
	}
}

func (a *app) logs(ctx context.Context, cfg *logsConfig, name string) error {
	if err := cfg.check(); err != nil {
		return err
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	id, err := a.jobTarget(ctx, c, name, cfg.follow)
	if err != nil {
		return err
	}
	read := func() (protocol.Job, error) { return c.Job(ctx, id) }
	if cfg.follow {
		once := read
		read = func() (protocol.Job, error) { return patiently(ctx, a, once) }
	}
	job, err := read()
	if err != nil {
		return err
	}
	q := protocol.LogQuery{Attempt: cfg.attempt, Stream: cfg.stream, Tail: cfg.tail}
	if cfg.step != "" {
		index, err := stepIndex(job, cfg.step)
		if err != nil {
			return err
		}
		q.Step = &index
	}
	switch {
	case cfg.json():
		return a.logsJSON(ctx, c, job, q, cfg)
	case cfg.follow:
		return a.followLog(ctx, c, job, q, cfg)
	case !started(job):
		a.err.line(notStarted(job.JobSummary))
		return nil
	case cfg.failed:
		return a.logsFailed(ctx, c, job, q)
	default:
		if note := stepNote(job.StepsOf(q.Attempt), q.Step); note != "" {
			a.err.line(note)
		}
		return a.logBytes(ctx, c, job, q, cfg.sinceLine)
	}
}

func started(job protocol.Job) bool { return job.Attempts > 0 }

// notStarted says why a job has no log.
func notStarted(j protocol.JobSummary) string {
	switch {
	case j.State == ci.StateFinished:
		text := fmt.Sprintf("job %s did not run: %s", clean(j.Name), clean(string(j.Conclusion)))
		if w := jobDetail(j); w != "" {
			text += " (" + w + ")"
		}
		return text
	case j.Waiting != nil:
		return fmt.Sprintf("job %s has not started: %s", clean(j.Name), clean(j.Waiting.Detail))
	default:
		return fmt.Sprintf("job %s has not started", clean(j.Name))
	}
}

// stepIndex finds a step by its name, or by its number from 1.
func stepIndex(job protocol.Job, name string) (int, error) {
	names := make([]string, 0, len(job.Spec.Steps))
	for i, s := range job.Spec.Steps {
		if s.Name == name {
			return i, nil
		}
		names = append(names, s.Name)
	}
	if n, err := strconv.Atoi(name); err == nil && n >= 1 && n <= len(names) {
		return n - 1, nil
	}
	return 0, usage("job %s has no step %q; it has %s", clean(job.Name), clean(name), nameList(names))
}

// stepNote says why a step has no output of its own.
func stepNote(steps []protocol.Step, index *int) string {
	if index == nil {
		return ""
	}
	for _, s := range steps {
		if s.Index != *index {
			continue
		}
		if s.Conclusion == ci.ConclusionSkipped {
			return fmt.Sprintf("step %d was skipped", s.Index+1)
		}
		return ""
	}
	return fmt.Sprintf("step %d has not started", *index+1)
}

// logsFailed prints each failed step under its name.
func (a *app) logsFailed(ctx context.Context, c *protocol.Client, job protocol.Job, q protocol.LogQuery) error {
	found := false
	for _, s := range job.StepsOf(q.Attempt) {
		switch s.Conclusion {
		case ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted:
		default:
			continue
		}
		found = true
		a.err.linef("step %d: %s", s.Index+1, s.Name)
		q.Step = &s.Index
		if err := a.logBytes(ctx, c, job, q, 0); err != nil {
			return err
		}
	}
	if !found {
		a.err.line("no step failed")
	}
	return nil
}

// logBytes prints the log's bytes and notes what they do not hold.
func (a *app) logBytes(ctx context.Context, c *protocol.Client, job protocol.Job, q protocol.LogQuery, from int64) error {
	l, err := c.JobLog(ctx, job.ID, q)
	if err != nil {
		return err
	}
	defer l.Close()
	var in io.Reader = l
	if from > 1 {
		if in, err = skipLines(l, from-1); err != nil {
			return err
		}
	}
	out := a.logWriter(a.out)
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	switch {
	case l.Lines >= 0 && l.Total > l.Lines:
		a.err.linef("note: these are the last %d of %d lines", l.Lines, l.Total)
	case l.Truncated:
		a.err.line("note: the log is not complete: it went over the limit of an attempt, or a part of it never arrived")
	}
	if !l.Sealed && job.State != ci.StateFinished {
		a.err.line("note: the job is still running; -f follows its log")
	}
	return nil
}

// skipLines reads n lines and returns what follows.
func skipLines(r io.Reader, n int64) (io.Reader, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	for n > 0 {
		switch _, err := br.ReadSlice('\n'); {
		case err == nil:
			n--
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			return br, nil
		default:
			return nil, err
		}
	}
	return br, nil
}

// logWriter prepares a stream for log bytes: as they are, or filtered for a terminal.
func (a *app) logWriter(s *screen) io.WriteCloser {
	if !s.terminal {
		return nopCloser{s}
	}
	return &logFilter{w: s, color: s.color}
}

type nopCloser struct{ io.Writer }

// Close does nothing.
func (nopCloser) Close() error { return nil }

// lines is what forgeci logs --output json prints.
type lines struct {
	protocol.LogSlice
	Job      ci.JobID `json:"job"`
	Returned int      `json:"returned"`
}

func (a *app) logsJSON(ctx context.Context, c *protocol.Client, job protocol.Job, q protocol.LogQuery, cfg *logsConfig) error {
	out := lines{Job: job.ID, LogSlice: protocol.LogSlice{Lines: []protocol.LogLine{}}}
	if started(job) {
		q.From, q.Limit = cfg.sinceLine, cfg.limit
		slice, err := c.LogLines(ctx, job.ID, q)
		if err != nil {
			return err
		}
		out.LogSlice = slice
		if out.Lines == nil {
			out.Lines = []protocol.LogLine{}
		}
	}
	out.Returned = len(out.Lines)
	if err := a.printJSON(out); err != nil {
		return err
	}
	if out.Truncated {
		a.err.linef("note: %d of %d lines", out.Returned, out.Total)
	}
	return nil
}
