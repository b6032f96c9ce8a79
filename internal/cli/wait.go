package cli

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// giveUp is how long a waiting command bears that no server answers: longer
// than a restart, an upgrade or a failover of the database takes.
const giveUp = 5 * time.Minute

// waiting are the settings of commands that wait for runs.
type waiting struct {
	wait     bool
	timeout  time.Duration
	failFast bool
}

func (w *waiting) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&w.wait, "wait", false, "wait until it is finished and exit with its result")
	f.DurationVar(&w.timeout, "timeout", 0, "with --wait: exit with 124 after so long; the run goes on")
	f.BoolVar(&w.failFast, "fail-fast", false, "with --wait: exit with 1 at the first failed job; the run goes on")
}

func (w *waiting) check() error {
	switch {
	case w.timeout < 0:
		return usage("--timeout %s is negative", w.timeout)
	case w.wait:
		return nil
	case w.timeout > 0:
		return usage("--timeout needs --wait")
	case w.failFast:
		return usage("--fail-fast needs --wait")
	default:
		return nil
	}
}

// follow says what a wait does with a lost connection.
func (a *app) follow() protocol.Follow {
	return protocol.Follow{GiveUp: giveUp, Lost: func(err error, pause time.Duration) {
		if pause >= time.Second {
			a.tellLost(err)
		}
	}}
}

// tellLost says once that no server answers.
func (a *app) tellLost(err error) {
	if !a.lost.Swap(true) {
		a.err.line("the server does not answer, still trying: " + describe(err))
	}
}

// awaitRun waits until the run is finished and returns it as it then is; with an
// error, as it was read last, and with its ID alone when it was not read at all.
// changed is told of the run with its jobs after every change, also the last.
func (a *app) awaitRun(
	ctx context.Context, c *protocol.Client, id ci.RunID, w waiting, changed func(protocol.Run) error,
) (protocol.Run, error) {
	ctx, cancel := within(ctx, w.timeout)
	defer cancel()
	last := protocol.Run{RunSummary: protocol.RunSummary{ID: id}}
	look := func() error {
		run, err := patiently(ctx, a, func() (protocol.Run, error) { return c.Run(ctx, id) })
		if err != nil {
			return err
		}
		last = run
		if err := changed(run); err != nil {
			return err
		}
		if j := failing(run); j != nil && w.failFast && run.State != ci.StateFinished {
			return stopped{exitFailed, "job " + clean(j.Name) + ": " + status(ci.StateFinished, j.Conclusion, false).text}
		}
		return nil
	}
	for {
		err := c.RunEvents(ctx, id, a.follow(), func(s protocol.RunSummary) error {
			if s.State == ci.StateFinished {
				return nil // looked at below
			}
			return look()
		})
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		if err == nil {
			err = look()
		}
		if err != nil || last.State == ci.StateFinished {
			return last, err
		}
	}
}

// failing returns a job that makes the end of the run a failure, or nil when that
// is not known.
func failing(run protocol.Run) *protocol.JobSummary {
	for i := range run.JobList {
		j := &run.JobList[i]
		switch j.Conclusion {
		case ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted:
			if !j.AllowFailure {
				return j
			}
		default:
		}
	}
	return nil
}

// patiently repeats a read while no server answers, up to giveUp.
func patiently[T any](ctx context.Context, a *app, read func() (T, error)) (T, error) {
	begun := time.Now()
	for {
		v, err := read()
		if cause := context.Cause(ctx); cause != nil {
			return v, cause
		}
		if err == nil || !errors.Is(err, ci.ErrUnavailable) || time.Since(begun) > giveUp {
			return v, err
		}
		if time.Since(begun) > patience {
			a.tellLost(err)
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return v, err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// progress tells on standard error what becomes of a run's jobs, one line for
// each change.
type progress struct {
	a *app
	// label stands before each line when several runs are watched.
	label string

	mu    sync.Mutex
	seen  map[ci.JobID]string      // guarded by mu
	later map[ci.JobID]*time.Timer // guarded by mu; a job that waits
}

func (a *app) newProgress(label string) *progress {
	return &progress{a: a, seen: map[ci.JobID]string{}, later: map[ci.JobID]*time.Timer{}, label: label}
}

// patience is how long a job may wait, or a server be silent, before that is
// worth a line.
const patience = 2 * time.Second

func (p *progress) changed(run protocol.Run) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, j := range run.JobList {
		line := p.a.jobLine(j)
		if line == "" || p.seen[j.ID] == line {
			continue
		}
		p.seen[j.ID] = line
		if t := p.later[j.ID]; t != nil {
			t.Stop()
		}
		if j.State != ci.StateReady {
			p.a.err.line(p.label + line)
			continue
		}
		p.later[j.ID] = time.AfterFunc(patience, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.seen[j.ID] == line {
				p.a.err.line(p.label + line)
			}
		})
	}
	return nil
}

// close forgets what would have been told later.
func (p *progress) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.later {
		t.Stop()
	}
}

// jobLine says where a job is, without anything that changes by the clock.
func (a *app) jobLine(j protocol.JobSummary) string {
	name, st := a.err.paint(bold, clean(j.Name)), status(j.State, j.Conclusion, false)
	word := a.err.paint(st.style, st.text)
	switch j.State {
	case ci.StateWaiting:
		return ""
	case ci.StateReady:
		if j.Waiting == nil || j.Waiting.Detail == "" {
			return ""
		}
		return fmt.Sprintf("%s: waiting: %s", name, clean(j.Waiting.Detail))
	case ci.StateRunning, ci.StateCancelling:
		if j.Runner == "" {
			return fmt.Sprintf("%s: %s", name, word)
		}
		again := ""
		if j.Attempts > 1 {
			again = fmt.Sprintf(", attempt %d", j.Attempts)
		}
		return fmt.Sprintf("%s: %s on %s%s", name, word, clean(j.Runner), again)
	case ci.StateFinished:
		line := fmt.Sprintf("%s: %s", name, word)
		if j.StartedAt != nil && j.FinishedAt != nil {
			line += " in " + a.took(j.StartedAt, j.FinishedAt)
		}
		if why := why(j); why != "" {
			line += ": " + why
		}
		return line
	default:
		return fmt.Sprintf("%s: %s", name, word)
	}
}

// why says in a few words why a finished job ended as it did.
func why(j protocol.JobSummary) string {
	if j.Conclusion.Succeeded() {
		return ""
	}
	text := clean(j.Detail)
	if text == "" {
		text = clean(string(j.Reason))
	}
	if j.ExitCode != nil && *j.ExitCode != 0 && j.Detail == "" {
		text = fmt.Sprintf("exit code %d", *j.ExitCode)
	}
	if j.AllowFailure && j.Conclusion != ci.ConclusionSkipped {
		text += " (allowed)"
	}
	return text
}

// finish ends a command that waited for runs: the highest exit code decides.
func finish(runs []protocol.Run) error {
	code := exitSuccess
	for _, r := range runs {
		code = max(code, codeOfResult(r.Conclusion, r.Reason))
	}
	return ended(code)
}

// leaving tells what to do about runs that go on when the command stops waiting.
func (a *app) leaving(err error, ids ...ci.RunID) {
	if _, ok := errors.AsType[stopped](err); !ok {
		return
	}
	for _, id := range ids {
		a.err.linef("The run goes on. Stop it with: forgeci cancel %s", string(id))
	}
}
