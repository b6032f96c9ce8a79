package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// followLog prints a log as it grows until the job is finished, says how, and
// ends with its result. Of a named attempt it prints the log alone.
func (a *app) followLog(ctx context.Context, c *protocol.Client, job protocol.Job, q protocol.LogQuery, cfg *logsConfig) error {
	out := a.logWriter(a.out)
	defer out.Close()
	epoch, told := int64(0), ""
	for {
		if job.Attempts > epoch {
			if epoch > 0 {
				a.err.linef("attempt %d", job.Attempts)
			}
			epoch = job.Attempts
			if cfg.attempt > 0 {
				epoch = cfg.attempt
			}
			q.Attempt, q.After = epoch, ""
			if err := a.followAttempt(ctx, c, job.ID, q, cfg, out); err != nil {
				a.leaving(err, job.Run.ID)
				return err
			}
			q.Tail = 0
			if cfg.attempt > 0 {
				return out.Close()
			}
		} else if told == "" && epoch == 0 {
			told = notStarted(job.JobSummary)
			a.err.line(told)
		}
		var err error
		if job, err = patiently(ctx, a, func() (protocol.Job, error) { return c.Job(ctx, job.ID) }); err != nil {
			return err
		}
		if job.Attempts > epoch {
			continue
		}
		if job.State == ci.StateFinished {
			if err := out.Close(); err != nil {
				return err
			}
			line := a.jobLine(job.JobSummary)
			if job.Attempts == 0 {
				line = notStarted(job.JobSummary)
			}
			if line != told {
				a.err.line(line)
			}
			return ended(codeOfResult(job.Conclusion, job.Reason))
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return err
		}
	}
}

// followAttempt prints one attempt's log until it is sealed.
func (a *app) followAttempt(
	ctx context.Context, c *protocol.Client, id ci.JobID, q protocol.LogQuery, cfg *logsConfig, out io.Writer,
) error {
	return c.LogEvents(ctx, id, q, a.follow(), func(it protocol.LogItem) error {
		if cfg.form == outputLines {
			switch {
			case it.Log != nil:
				return a.printJSONLine(it.Log)
			case it.Sealed != nil:
				return a.printJSONLine(it.Sealed)
			default:
				return nil
			}
		}
		switch {
		case it.Log != nil:
			if cfg.stream != "" && it.Log.Stream != cfg.stream {
				return nil
			}
			if note := lossNote(*it.Log); note != "" {
				a.err.line(note)
			}
			_, err := out.Write(it.Log.Data)
			return err
		case it.Sealed != nil && (it.Sealed.Gap || it.Sealed.Truncated):
			a.err.line("note: the log is not complete: it went over the limit of an attempt, or a part of it never arrived")
		}
		return nil
	})
}

// lossNote marks bytes that are not there.
func lossNote(e protocol.LogEvent) string {
	switch {
	case e.Lost > 0:
		return fmt.Sprintf("note: %s of %s never arrived", ci.Count(e.Lost, "byte"), clean(e.Stream))
	case e.Discarded > 0:
		return fmt.Sprintf("note: %s of %s discarded over the limit of an attempt", ci.Count(e.Discarded, "byte"), clean(e.Stream))
	default:
		return ""
	}
}

// jobFollower prints the logs of all jobs of one run, as they come, with the
// job's name before each line.
type jobFollower struct {
	a     *app
	c     *protocol.Client
	out   *screen
	ended chan error // one for each log that was followed

	// owned by the caller of changed and wait
	seen  map[string]bool // by job and attempt
	width int
	count int // logs that are being followed
}

func (a *app) newJobFollower(c *protocol.Client, out *screen) *jobFollower {
	return &jobFollower{a: a, c: c, out: out, seen: map[string]bool{}, ended: make(chan error, 1)}
}

// changed begins to follow attempts that are new in the run.
func (f *jobFollower) changed(ctx context.Context, run protocol.Run) {
	for _, j := range run.JobList {
		f.width = max(f.width, utf8.RuneCountInString(clean(j.Name)))
	}
	for _, j := range run.JobList {
		key := fmt.Sprint(j.ID, "/", j.Attempts)
		if j.Attempts == 0 || j.PinnedFrom != "" || f.seen[key] {
			continue
		}
		f.seen[key] = true
		f.count++
		width := f.width
		go func() {
			err := f.follow(ctx, j, width)
			select {
			case f.ended <- err:
			case <-ctx.Done():
			}
		}()
	}
}

// wait waits until every followed log is sealed, or for a bound after which the
// rest is given up.
func (f *jobFollower) wait(ctx context.Context, bound time.Duration) error {
	timer := time.NewTimer(bound)
	defer timer.Stop()
	var first error
	for f.count > 0 {
		select {
		case err := <-f.ended:
			f.count--
			if first == nil && err != nil && !errors.Is(err, context.Canceled) {
				first = err
			}
		case <-timer.C:
			return ci.Errorf(ci.ErrUnavailable, "the end of the log did not come within %s", bound)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return first
}

// palette are the colours of job names.
func palette() []style {
	return []style{cyan, green, yellow, blue, "35", "36;1", "32;1", "33;1", "34;1", "35;1"}
}

func (f *jobFollower) follow(ctx context.Context, j protocol.JobSummary, width int) error {
	out := f.out
	colors := palette()
	prefix := out.paint(colors[j.Index%len(colors)], fmt.Sprintf("%-*s |", width, clean(j.Name))) + " "
	lines := map[string]io.WriteCloser{}
	writer := func(stream string) io.WriteCloser {
		w := lines[stream]
		if w == nil {
			p := &prefixer{w: out, prefix: prefix}
			w = p
			if out.terminal {
				w = &logFilter{w: p, color: out.color, resetLines: true}
			}
			lines[stream] = w
		}
		return w
	}
	err := f.c.LogEvents(ctx, j.ID, protocol.LogQuery{Attempt: j.Attempts}, f.a.follow(), func(it protocol.LogItem) error {
		if it.Log == nil {
			return nil
		}
		if note := lossNote(*it.Log); note != "" {
			f.a.err.line(prefix + note)
		}
		_, err := writer(it.Log.Stream).Write(it.Log.Data)
		return err
	})
	for _, w := range lines {
		if e := w.Close(); err == nil {
			err = e
		}
	}
	return err
}
