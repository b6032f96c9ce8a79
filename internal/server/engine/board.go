package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/server/dag"
	"forgeci/internal/server/store"
)

// board holds the runs and jobs that a transaction has locked and changes.
type board struct {
	t    *txn
	now  int64
	runs map[ci.RunID]*store.Run
	jobs map[ci.JobID]*store.Job
}

// lockBoard locks runs, then the live leases of jobs, then the jobs, and reads
// the time. Jobs of runs that are not named must not be named.
func (t *txn) lockBoard(ctx context.Context, runs []ci.RunID, jobs []ci.JobID) (*board, map[ci.JobID]*store.Lease, error) {
	b := &board{t: t, runs: map[ci.RunID]*store.Run{}, jobs: map[ci.JobID]*store.Job{}}
	rs, err := t.LockRuns(ctx, runs)
	if err != nil {
		return nil, nil, err
	}
	for i := range rs {
		b.runs[rs[i].ID] = &rs[i]
	}
	ls, err := t.LockLeases(ctx, jobs)
	if err != nil {
		return nil, nil, err
	}
	leases := make(map[ci.JobID]*store.Lease, len(ls))
	for i := range ls {
		leases[ls[i].Job] = &ls[i]
	}
	if err := b.lockJobs(ctx, jobs); err != nil {
		return nil, nil, err
	}
	if b.now, err = t.lockedNow(ctx); err != nil {
		return nil, nil, err
	}
	return b, leases, t.e.unseen(ctx, t.Tx, ls, b.now)
}

func (b *board) lockJobs(ctx context.Context, ids []ci.JobID) error {
	if len(ids) == 0 {
		return nil
	}
	js, err := b.t.LockJobs(ctx, ids)
	for i := range js {
		b.jobs[js[i].ID] = &js[i]
	}
	return err
}

// conclude finishes a job in memory; advance writes it.
func (b *board) conclude(j *store.Job, c ci.Conclusion, r ci.Reason, detail string) {
	j.State, j.Conclusion, j.Reason, j.Detail = ci.StateFinished, c, r, clip(detail, 4096)
	j.FinishedUS = b.now
}

// clip cuts text to at most n bytes on a character border.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n]
}

// advance writes the changed jobs and follows from those that finished to what
// becomes ready or skipped behind them, and to runs that end. The runs are
// locked, so that two siblings that finish together do not each see the other
// as running. A cancelled run whose jobs have all finished ends when nothing of it
// may still run.
func (b *board) advance(ctx context.Context, changed []*store.Job) error {
	touched := map[ci.RunID]*store.Run{}
	for id, run := range b.runs {
		if run.State == ci.StateCancelling && run.JobsLeft == 0 {
			touched[id] = run // it waits for proof that nothing of it runs
		}
	}
	for len(changed) > 0 {
		if err := b.t.UpdateJobs(ctx, changed); err != nil {
			return err
		}
		var finished []ci.JobID
		for _, j := range changed {
			b.t.changedRun(j.Org, j.Run)
			if j.State != ci.StateFinished {
				continue
			}
			run := b.runs[j.Run]
			if run == nil {
				return fmt.Errorf("engine: run %s of job %s is not locked", j.Run, j.ID)
			}
			touched[run.ID] = run
			count(run, j)
			finished = append(finished, j.ID)
		}
		var err error
		if changed, err = b.successors(ctx, finished); err != nil {
			return err
		}
	}
	var runs []*store.Run
	for _, id := range slices.Sorted(maps.Keys(touched)) {
		run := touched[id]
		if run.State == ci.StateWaiting {
			run.State = ci.StateRunning
		}
		if run.StartedUS == 0 {
			run.StartedUS = b.now
		}
		over, err := b.over(ctx, run)
		if err != nil {
			return err
		}
		if over {
			run.Conclusion, run.Reason = dag.Conclude(dag.Tally{
				Failed: run.Failed, TimedOut: run.TimedOut, Infra: run.Infra,
				Cancelled: run.State == ci.StateCancelling,
			})
			run.State, run.FinishedUS = ci.StateFinished, b.now
			b.t.record(store.Audit{
				Org: run.Org, Actor: actorServer, Action: "run_finished", Run: run.ID,
				Detail: string(run.Conclusion) + " " + string(run.Reason),
			})
			b.t.say("run finished", "run", run.ID, "conclusion", run.Conclusion, "reason", run.Reason)
		}
		runs = append(runs, run)
	}
	if len(runs) == 0 {
		return nil
	}
	return b.t.UpdateRuns(ctx, runs)
}

// over reports whether a run has ended: all its jobs have, and when it is
// cancelled nothing of it may still run, not even an attempt that was given up as
// lost.
func (b *board) over(ctx context.Context, run *store.Run) (bool, error) {
	if run.JobsLeft > 0 || run.State != ci.StateCancelling {
		return run.JobsLeft == 0, nil
	}
	occupied, err := b.t.RunOccupied(ctx, run.ID)
	return !occupied, err
}

// actorServer is the actor of what the server decides by itself.
const actorServer = "server"

// count takes a finished job into its run's counters.
func count(run *store.Run, j *store.Job) {
	run.JobsLeft--
	switch {
	case j.Conclusion == ci.ConclusionAborted || j.DeadUS > 0:
		run.Infra++
	case j.Conclusion == ci.ConclusionFailed && j.AllowFailure != 0, j.Conclusion == ci.ConclusionTimedOut && j.AllowFailure != 0:
		run.Warn++
	case j.Conclusion == ci.ConclusionFailed:
		run.Failed++
	case j.Conclusion == ci.ConclusionTimedOut:
		run.TimedOut++
	}
}

// successors decides about the jobs whose last need has finished.
func (b *board) successors(ctx context.Context, finished []ci.JobID) ([]*store.Job, error) {
	if len(finished) == 0 {
		return nil, nil
	}
	ids, err := b.t.FinishNeeds(ctx, finished)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	if err := b.lockJobs(ctx, ids); err != nil {
		return nil, err
	}
	needs, err := b.t.NeedsOf(ctx, ids)
	if err != nil {
		return nil, err
	}
	specs, err := b.t.Specs(ctx, ids)
	if err != nil {
		return nil, err
	}
	var changed []*store.Job
	for _, id := range ids {
		j := b.jobs[id]
		var spec ci.JobSpec
		if err := json.Unmarshal([]byte(specs[id]), &spec); err != nil {
			return nil, err
		}
		b.decide(j, spec, needs[id])
		changed = append(changed, j)
	}
	return changed, nil
}

// decide makes a job whose needs have finished ready or skipped.
func (b *board) decide(j *store.Job, spec ci.JobSpec, needs []store.Need) {
	d := dag.Decide(spec.If, dagNeeds(needs), func(expr string, results map[string]dag.Result) (bool, error) {
		c := Condition{Needs: results, Matrix: spec.Matrix}
		var plan ci.Plan
		if err := json.Unmarshal([]byte(b.runs[j.Run].Plan), &plan); err != nil {
			return false, err
		}
		c.Inputs = plan.Inputs
		return b.t.e.EvalIf(expr, c)
	})
	if !d.Ready {
		b.conclude(j, ci.ConclusionSkipped, d.Reason, d.Detail)
		b.t.record(store.Audit{Org: j.Org, Actor: actorServer, Action: "skipped", Run: j.Run, Job: j.ID, Detail: d.Detail})
		return
	}
	j.ReadyUS = b.now
	b.t.makeReady(j, 0)
}

func dagNeeds(needs []store.Need) []dag.Need {
	out := make([]dag.Need, len(needs))
	for i, n := range needs {
		out[i] = dag.Need{Key: n.Key, Name: n.Name, Conclusion: n.Conclusion, AllowFailure: n.AllowFailure != 0, Outputs: decodeOutputs(n.Outputs)}
	}
	return out
}

func decodeOutputs(text string) map[string]string {
	if text == "" {
		return nil
	}
	var m map[string]string
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		return nil // written by encodeOutputs only
	}
	return m
}

func encodeOutputs(m map[string]string) string {
	if len(m) == 0 {
		return ""
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic("engine: " + err.Error())
	}
	return string(b)
}

func decodeRetry(text string) *ci.RetryPolicy {
	if text == "" {
		return nil
	}
	var p ci.RetryPolicy
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return nil // validated when it was set
	}
	return &p
}
