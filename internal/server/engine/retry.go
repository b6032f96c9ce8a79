package engine

import (
	"context"
	"encoding/json"
	"errors"

	"forgeci/internal/ci"
	"forgeci/internal/server/dag"
	"forgeci/internal/server/store"
)

// Retry makes a new run with the same pinned definition and source and a parent
// reference. With failed, jobs that succeeded are pinned with their outputs and
// artifacts, all others and everything that depends on them are recreated; a
// successful job whose artifact has expired runs again. The retried run must
// have finished.
func (e *Engine) Retry(ctx context.Context, req RetryRequest) (ci.RunID, error) {
	var fresh ci.RunID
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		runs, err := t.LockRuns(ctx, []ci.RunID{req.Run})
		if err != nil {
			return err
		}
		if len(runs) == 0 || runs[0].Org != req.Org {
			return ci.Errorf(ci.ErrNotFound, "no run %s", req.Run)
		}
		fresh = ci.RunID(e.IDs.New(ci.PrefixRun)) // anew at each try: a try may have bound another
		if req.IdempotencyKey != "" {
			var refused error
			op := &submitOp{id: fresh, err: &refused, s: Submission{
				Org: req.Org, Repo: runs[0].Repo, Actor: req.Actor,
				IdempotencyKey: req.IdempotencyKey, RequestDigest: req.RequestDigest,
			}}
			unbound, err := t.bindKeys(ctx, []*submitOp{op})
			if fresh = op.id; err != nil || len(unbound) == 0 {
				return errors.Join(err, refused)
			}
		}
		return t.retry(ctx, runs[0], fresh, req.Actor, req.Failed, "")
	})
	return fresh, err
}

// RetryRequest asks for a retry of a finished run.
type RetryRequest struct {
	Org   ci.OrgID
	Actor string
	Run   ci.RunID
	// Failed pins what succeeded.
	Failed bool
	// IdempotencyKey makes a repeat return the same run, as in Submission.
	IdempotencyKey, RequestDigest string
}

// Requeue makes a retry run of a dead letter's run from its failed jobs and notes
// it on the dead letter; a dead letter that has one returns it.
func (e *Engine) Requeue(ctx context.Context, org ci.OrgID, actor string, id ci.JobID) (ci.RunID, error) {
	var fresh ci.RunID
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		j, ok, err := t.Job(ctx, id)
		if err != nil {
			return err
		}
		if !ok || j.Org != org || j.DeadUS == 0 {
			return ci.Errorf(ci.ErrNotFound, "no dead letter %s", id)
		}
		runs, err := t.LockRuns(ctx, []ci.RunID{j.Run})
		if err != nil {
			return err
		}
		if j, _, err = t.Job(ctx, id); err != nil {
			return err
		}
		if j.RequeuedRun != "" {
			fresh = j.RequeuedRun
			return nil
		}
		fresh = ci.RunID(e.IDs.New(ci.PrefixRun))
		return t.retry(ctx, runs[0], fresh, actor, true, id)
	})
	return fresh, err
}

// retry makes the run fresh out of a locked one; dead names the dead letter that
// it is made of, if any.
func (t *txn) retry(ctx context.Context, old store.Run, fresh ci.RunID, actor string, failed bool, dead ci.JobID) error {
	if old.State != ci.StateFinished {
		return ci.Errorf(ci.ErrConflict, "the run has not finished (%s): cancel it first or wait", old.State)
	}
	jobs, err := t.JobsOfRun(ctx, old.ID)
	if err != nil {
		return err
	}
	n, err := t.retryOf(ctx, old, jobs, actor)
	if err != nil {
		return err
	}
	n.id = fresh
	if failed {
		if n.pins, err = t.pins(ctx, old, jobs, n.Plan.Jobs); err != nil {
			return err
		}
		if len(n.pins) == len(jobs) {
			return ci.Errorf(ci.ErrConflict, "every job of the run succeeded: there is nothing to retry")
		}
	}
	if err := t.insertRuns(ctx, []newRun{n}); err != nil {
		return err
	}
	t.record(store.Audit{Org: old.Org, Actor: actor, Action: "retry", Run: old.ID, Object: string(fresh)})
	if dead == "" {
		return nil
	}
	locked, err := t.LockJobs(ctx, []ci.JobID{dead})
	if err != nil {
		return err
	}
	locked[0].RequeuedRun = fresh
	return t.UpdateJobs(ctx, []*store.Job{&locked[0]})
}

// retryOf renders the retried run as a new one.
func (t *txn) retryOf(ctx context.Context, old store.Run, jobs []store.Job, actor string) (newRun, error) {
	var plan ci.Plan
	if err := json.Unmarshal([]byte(old.Plan), &plan); err != nil {
		return newRun{}, err
	}
	ids := make([]ci.JobID, len(jobs))
	for i, j := range jobs {
		ids[i] = j.ID
	}
	specs, err := t.Specs(ctx, ids)
	if err != nil {
		return newRun{}, err
	}
	operations := map[string]string{}
	for _, j := range jobs {
		spec, err := decodeSpec(specs[j.ID])
		if err != nil {
			return newRun{}, err
		}
		plan.Jobs = append(plan.Jobs, spec)
		if j.Conclusion == ci.ConclusionAborted {
			operations[j.Name] = j.OperationID
		}
	}
	return newRun{
		Submission: Submission{
			Org: old.Org, Repo: old.Repo, Actor: actor, Plan: plan, Source: old.SourceDigest, Trust: old.Trust,
			Event: "retry", CommitSHA: old.CommitSHA, Ref: old.Ref, Message: old.Message, Author: old.Author, Dirty: old.Dirty != 0,
		},
		parent: old.ID, retryDefault: old.RetryDefault, operations: operations,
	}, nil
}

// pins selects the jobs whose results a retry from failed takes over: those that
// succeeded, with all their artifacts still there, and whose needs are pinned too.
func (t *txn) pins(ctx context.Context, old store.Run, jobs []store.Job, specs []ci.JobSpec) (map[string]pin, error) {
	bindings, err := t.BindingsOfRun(ctx, old.ID)
	if err != nil {
		return nil, err
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return nil, err
	}
	own := map[ci.JobID][]store.Binding{}
	expired := map[ci.JobID]bool{}
	for _, b := range bindings {
		own[b.Job] = append(own[b.Job], b)
		if b.Artifact.State != "sealed" || b.Artifact.ExpiresUS > 0 && b.Artifact.ExpiresUS <= now {
			expired[b.Job] = true
		}
	}
	keep := make([]bool, len(jobs))
	for i, j := range jobs {
		keep[i] = j.Conclusion.Succeeded() && !expired[j.ID]
	}
	edges := dag.Edges(specs)
	for changed := true; changed; {
		changed = false
		for _, edge := range edges {
			if keep[edge[1]] && !keep[edge[0]] {
				keep[edge[1]], changed = false, true
			}
		}
	}
	out := map[string]pin{}
	for i, j := range jobs {
		if keep[i] {
			out[j.Name] = pin{job: j, bindings: own[j.ID]}
		}
	}
	return out, nil
}
