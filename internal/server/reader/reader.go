// Package reader answers what people ask: it turns rows into the documents of
// the REST API, which the pages show too. Every method takes the viewer, and
// visibility is a condition of the query.
package reader

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Reader reads. It is safe for concurrent use.
type Reader struct {
	store     *store.Store
	engine    *engine.Engine
	artifacts *artifact.Service
}

// New returns a reader over the store; the engine tells which runners were heard
// of, the artifact service what a run has made.
func New(s *store.Store, e *engine.Engine, a *artifact.Service) *Reader {
	return &Reader{store: s, engine: e, artifacts: a}
}

// Bounds of pages.
const (
	DefaultPage = 50
	MaxPage     = 200
)

func pageSize(n int) int {
	if n <= 0 {
		return DefaultPage
	}
	return min(n, MaxPage)
}

func at(us int64) time.Time { return time.UnixMicro(us).UTC() }

func maybe(us int64) *time.Time {
	if us == 0 {
		return nil
	}
	t := at(us)
	return &t
}

func notFound(what string, id any) error { return ci.Errorf(ci.ErrNotFound, "no %s %v", what, id) }

// RunFilter selects runs; zero fields do not select.
type RunFilter struct {
	Repo       string
	State      ci.State
	Conclusion ci.Conclusion
	Commit     string
	After      string
	Limit      int
}

// Runs returns a page of runs, newest first.
func (r *Reader) Runs(ctx context.Context, v auth.Viewer, f RunFilter) (protocol.Page[protocol.RunSummary], error) {
	page := protocol.Page[protocol.RunSummary]{Items: []protocol.RunSummary{}}
	n := pageSize(f.Limit)
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		rows, err := tx.ReadRuns(ctx, v.Org, store.RunFilter{
			Repo: f.Repo, State: f.State, Conclusion: f.Conclusion,
			Commit: f.Commit, Before: ci.RunID(f.After), Limit: n + 1,
		})
		if err != nil {
			return err
		}
		if len(rows) > n {
			rows = rows[:n]
			page.Next = string(rows[n-1].ID)
		}
		page.Items, err = summaries(ctx, tx, rows)
		return err
	})
	return page, err
}

// summaries renders runs with the counts of their jobs.
func summaries(ctx context.Context, tx *store.Tx, rows []store.RunView) ([]protocol.RunSummary, error) {
	out := make([]protocol.RunSummary, len(rows))
	if len(rows) == 0 {
		return out, nil
	}
	ids := make([]ci.RunID, len(rows))
	for i, row := range rows {
		ids[i] = row.ID
	}
	counts, err := tx.ReadJobCounts(ctx, ids)
	if err != nil {
		return nil, err
	}
	jobs := map[ci.RunID]map[string]int{}
	for _, c := range counts {
		if jobs[c.Run] == nil {
			jobs[c.Run] = map[string]int{}
		}
		word := string(c.State)
		if c.State == ci.StateFinished {
			word = string(c.Conclusion)
		}
		jobs[c.Run][word] += int(c.N)
	}
	for i, row := range rows {
		out[i] = summary(row, jobs[row.ID])
	}
	return out, nil
}

func summary(row store.RunView, jobs map[string]int) protocol.RunSummary {
	return protocol.RunSummary{
		ID: row.ID, Number: row.Number, Repo: protocol.Repo{ID: row.Repo, Name: row.RepoName}, Workflow: row.Workflow,
		Path: row.Path, Event: row.Event, State: row.State, Conclusion: row.Conclusion, Reason: row.Reason,
		Warnings: row.Warn > 0, CommitSHA: row.CommitSHA, Ref: row.Ref, Message: row.Message, Author: row.Author,
		Dirty: row.Dirty != 0, Actor: row.Actor, Trust: row.Trust, ParentRun: row.Parent, CreatedAt: at(row.CreatedUS),
		StartedAt: maybe(row.StartedUS), FinishedAt: maybe(row.FinishedUS), Jobs: jobs,
	}
}

// Summary returns one run without its jobs.
func (r *Reader) Summary(ctx context.Context, v auth.Viewer, id ci.RunID) (protocol.RunSummary, error) {
	var out protocol.RunSummary
	err := r.store.Read(ctx, func(tx *store.Tx) (err error) {
		out, err = readSummary(ctx, tx, v, id)
		return err
	})
	return out, err
}

func readSummary(ctx context.Context, tx *store.Tx, v auth.Viewer, id ci.RunID) (protocol.RunSummary, error) {
	row, ok, err := tx.ReadRun(ctx, v.Org, id)
	if err != nil {
		return protocol.RunSummary{}, err
	}
	if !ok {
		return protocol.RunSummary{}, notFound("run", id)
	}
	s, err := summaries(ctx, tx, []store.RunView{row})
	if err != nil {
		return protocol.RunSummary{}, err
	}
	return s[0], nil
}

// Run returns a run with its jobs and artifacts.
func (r *Reader) Run(ctx context.Context, v auth.Viewer, id ci.RunID) (protocol.Run, error) {
	var out protocol.Run
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		row, ok, err := tx.ReadRun(ctx, v.Org, id)
		if err != nil {
			return err
		}
		if !ok {
			return notFound("run", id)
		}
		s, err := summaries(ctx, tx, []store.RunView{row})
		if err != nil {
			return err
		}
		var plan ci.Plan
		if err := json.Unmarshal([]byte(row.Plan), &plan); err != nil {
			return err
		}
		out = protocol.Run{RunSummary: s[0], SourceDigest: row.SourceDigest, WorkflowDigest: row.WorkflowDigest, Inputs: plan.Inputs}
		jobs, err := tx.ReadJobs(ctx, v.Org, id)
		if err != nil {
			return err
		}
		w := newWaits(tx, v.Org, jobs)
		out.JobList = make([]protocol.JobSummary, len(jobs))
		for i, j := range jobs {
			if out.JobList[i], err = jobSummary(ctx, j, w); err != nil {
				return err
			}
		}
		if row.State != ci.StateCancelling {
			return nil
		}
		pending, err := tx.ReadUnproven(ctx, v.Org, id)
		for _, p := range pending {
			out.Unproven = append(out.Unproven, unproven(p))
		}
		return err
	})
	if err != nil {
		return out, err
	}
	out.Artifacts, err = r.artifacts.OfRun(ctx, v, id)
	return out, err
}

func jobSummary(ctx context.Context, j store.JobView, w *waits) (protocol.JobSummary, error) {
	var spec ci.JobSpec
	if err := json.Unmarshal([]byte(j.Spec), &spec); err != nil {
		return protocol.JobSummary{}, err
	}
	out := protocol.JobSummary{
		ID: j.ID, Index: int(j.Index), Name: j.Name, Key: j.Key, Needs: spec.Needs, State: j.State, Conclusion: j.Conclusion,
		Reason: j.Reason, Detail: j.Detail, AllowFailure: j.AllowFailure != 0, Uncertain: j.Conclusion == ci.ConclusionAborted,
		Attempts: j.Epoch, Runner: j.RunnerName, ReadyAt: maybe(j.ReadyUS), StartedAt: maybe(j.StartedUS),
		FinishedAt: maybe(j.FinishedUS), PinnedFrom: j.PinnedFrom,
	}
	if j.State == ci.StateRunning || j.State == ci.StateCancelling {
		out.Phase = j.Phase
	}
	if j.ExitCode != nil {
		n := int(*j.ExitCode)
		out.ExitCode = &n
	}
	var err error
	out.Waiting, err = w.reason(ctx, j, spec)
	return out, err
}

// Job returns a job with its attempts and the steps of each.
func (r *Reader) Job(ctx context.Context, v auth.Viewer, id ci.JobID) (protocol.Job, error) {
	var out protocol.Job
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		j, w, err := readJob(ctx, tx, v, id)
		if err != nil {
			return err
		}
		if out.JobSummary, err = jobSummary(ctx, j, w); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(j.Spec), &out.Spec); err != nil {
			return err
		}
		if j.Outputs != "" {
			if err := json.Unmarshal([]byte(j.Outputs), &out.Outputs); err != nil {
				return err
			}
		}
		if out.Run, err = readSummary(ctx, tx, v, j.Run); err != nil {
			return err
		}
		attempts, err := tx.ReadAttempts(ctx, v.Org, id)
		if err != nil {
			return err
		}
		out.Attempt, out.StepList = make([]protocol.Attempt, len(attempts)), []protocol.Step{}
		for i, a := range attempts {
			doc := attempt(a)
			if doc.StepList, err = steps(ctx, tx, store.AttemptKey{Job: id, Epoch: a.Epoch}); err != nil {
				return err
			}
			endSteps(doc.StepList, doc)
			if a.Epoch == j.Epoch {
				out.StepList = doc.StepList
			}
			out.Attempt[i] = doc
		}
		return nil
	})
	return out, err
}

func readJob(ctx context.Context, tx *store.Tx, v auth.Viewer, id ci.JobID) (store.JobView, *waits, error) {
	j, ok, err := tx.ReadJob(ctx, v.Org, id)
	if err != nil {
		return j, nil, err
	}
	if !ok {
		return j, nil, notFound("job", id)
	}
	siblings := []store.JobView{j}
	if j.State == ci.StateWaiting {
		if siblings, err = tx.ReadJobs(ctx, v.Org, j.Run); err != nil {
			return j, nil, err
		}
	}
	return j, newWaits(tx, v.Org, siblings), nil
}

func attempt(a store.AttemptView) protocol.Attempt {
	out := protocol.Attempt{
		Epoch: a.Epoch, Lease: a.Lease, Runner: a.Runner, RunnerName: a.RunnerName, Session: a.Session, Phase: a.Phase,
		State: a.State, Conclusion: a.Conclusion, Reason: a.Reason, Detail: a.Detail, Winner: a.Winner != 0,
		Evidence: a.Evidence, ClaimedAt: at(a.ClaimedUS), ExecutedAt: maybe(a.ExecutingUS), EndedAt: maybe(a.EndedUS),
		LogSealed: a.LogState == store.LogSealed || a.LogState == store.LogExpired, LogBytes: a.LogBytes,
		LogGap: a.LogGap > 0, LogCut: a.LogCut > 0,
	}
	if a.ExitCode != nil {
		n := int(*a.ExitCode)
		out.ExitCode = &n
	}
	return out
}

// endSteps lets steps end with their attempt that nobody reported the end of: a
// runner that is lost says nothing more.
func endSteps(steps []protocol.Step, a protocol.Attempt) {
	for i := range steps {
		if a.State == ci.StateFinished && steps[i].State == ci.StateRunning {
			steps[i].State, steps[i].Conclusion, steps[i].Reason = a.State, a.Conclusion, a.Reason
		}
	}
}

func steps(ctx context.Context, tx *store.Tx, k store.AttemptKey) ([]protocol.Step, error) {
	rows, err := tx.Steps(ctx, k)
	out := make([]protocol.Step, len(rows))
	for i, s := range rows {
		d := ci.Duration(time.Duration(s.DurationUS) * time.Microsecond)
		out[i] = protocol.Step{Index: int(s.Index), Name: s.Name, State: s.State, Conclusion: s.Conclusion, Reason: s.Reason, Signal: s.Signal}
		if s.State == ci.StateFinished {
			out[i].Duration = &d
		}
		if s.ExitCode != nil {
			n := int(*s.ExitCode)
			out[i].ExitCode = &n
		}
	}
	return out, err
}

// Explain returns a job's ownership history and what it comes to.
func (r *Reader) Explain(ctx context.Context, v auth.Viewer, id ci.JobID) (protocol.Explanation, error) {
	out := protocol.Explanation{History: []protocol.HistoryEvent{}}
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		j, w, err := readJob(ctx, tx, v, id)
		if err != nil {
			return err
		}
		if out.Job, err = jobSummary(ctx, j, w); err != nil {
			return err
		}
		out.Summary, out.Unproven, out.History = explain(out.Job), nil, []protocol.HistoryEvent{}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		pending, err := tx.ReadUnproven(ctx, v.Org, j.Run)
		if err != nil {
			return err
		}
		for _, p := range pending {
			if p.Job == id {
				out.Summary += r.pendingText(p, now)
			}
			if p.Job == id && (p.Lost != 0 || j.State == ci.StateCancelling) {
				out.Unproven = append(out.Unproven, unproven(p))
			}
		}
		names := map[string]string{}
		attempts, err := tx.ReadAttempts(ctx, v.Org, id)
		if err != nil {
			return err
		}
		for _, a := range attempts {
			names[string(a.Runner)] = a.RunnerName
		}
		entries, err := tx.AuditOfJob(ctx, v.Org, id)
		for _, a := range entries {
			out.History = append(out.History, protocol.HistoryEvent{
				At: at(a.AtUS), Actor: a.Actor, ActorName: names[a.Actor], Action: a.Action, Epoch: a.Epoch, Detail: a.Detail,
			})
		}
		return err
	})
	return out, err
}

func unproven(p store.Unproven) protocol.Unproven {
	return protocol.Unproven{
		Job: p.Job, Name: p.Name, Epoch: p.Epoch, Runner: p.Runner, RunnerName: p.RunnerName,
		Lost: p.Lost != 0, Since: at(p.SinceUS),
	}
}

// pendingText says what is to be known of an attempt that may still run: that it
// was lost and nobody has said that it ended, or that its runner is silent.
func (r *Reader) pendingText(p store.Unproven, now int64) string {
	if p.Lost != 0 {
		return fmt.Sprintf(" Attempt %d was lost %s ago and is not proven to have ended: its slot stays taken until %s reports the end, or `forgeci runner fence %s` says that its host is dead.",
			p.Epoch, ci.Duration(since(p.SinceUS, now)), p.RunnerName, p.RunnerName)
	}
	ago, sure, ok := r.silence(p.Runner, p.ExpiresUS, now)
	if !ok || !sure || ago < r.engine.LeaseTTL/2 {
		return ""
	}
	return fmt.Sprintf(" %s was last heard of %s ago; after %s of silence it is taken for lost.",
		p.RunnerName, ci.Duration(ago.Round(time.Second)), ci.Duration(r.engine.LeaseTTL))
}

func since(us, now int64) time.Duration {
	return max(time.Duration(now-us)*time.Microsecond, 0).Round(time.Second)
}

// explain says in a sentence what state a job is in and why.
func explain(j protocol.JobSummary) string {
	switch {
	case j.Waiting != nil:
		return fmt.Sprintf("%s has not started: %s.", j.Name, j.Waiting.Detail)
	case j.State == ci.StateCancelling:
		return fmt.Sprintf("%s is being cancelled: it ends when %s reports that nothing of it is left there, or `forgeci runner fence %s` says that its host is dead.", j.Name, j.Runner, j.Runner)
	case j.State != ci.StateFinished:
		return fmt.Sprintf("%s is running (attempt %d, phase %s) on %s.", j.Name, j.Attempts, j.Phase, j.Runner)
	case j.PinnedFrom != "":
		return fmt.Sprintf("%s was not run again: its result was taken over from job %s.", j.Name, j.PinnedFrom)
	case j.Conclusion == ci.ConclusionAborted:
		return fmt.Sprintf("%s was aborted and what it did outside is uncertain: %s.", j.Name, j.Detail)
	case j.Detail != "":
		return fmt.Sprintf("%s ended: %s%s: %s.", j.Name, j.Conclusion, afterAttempts(j.Attempts), j.Detail)
	default:
		return fmt.Sprintf("%s ended: %s%s.", j.Name, j.Conclusion, afterAttempts(j.Attempts))
	}
}

func afterAttempts(n int64) string {
	switch n {
	case 0:
		return ""
	case 1:
		return " in its first attempt"
	default:
		return fmt.Sprintf(" after %d attempts", n)
	}
}
