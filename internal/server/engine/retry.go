package engine

import (
	"context"
	"encoding/json"

	"forgeci/internal/ci"
	"forgeci/internal/server/dag"
	"forgeci/internal/server/store"
)

// Retry makes a new run with the same pinned definition and source and a parent
// reference. With failed, jobs that succeeded are pinned with their outputs and
// artifacts, all others and everything that depends on them are recreated; a
// successful job whose artifact has expired runs again. The retried run must
// have finished.
func (e *Engine) Retry(ctx context.Context, org ci.OrgID, actor string, id ci.RunID, failed bool) (ci.RunID, error) {
	var fresh ci.RunID
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		var err error
		fresh, err = t.retry(ctx, org, actor, id, failed, "")
		return err
	})
	return fresh, err
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
		fresh, err = t.retry(ctx, org, actor, j.Run, true, id)
		return err
	})
	return fresh, err
}

func (t *txn) retry(ctx context.Context, org ci.OrgID, actor string, id ci.RunID, failed bool, dead ci.JobID) (ci.RunID, error) {
	e := t.e
	runs, err := t.LockRuns(ctx, []ci.RunID{id})
	if err != nil {
		return "", err
	}
	if len(runs) == 0 || runs[0].Org != org {
		return "", ci.Errorf(ci.ErrNotFound, "no run %s", id)
	}
	old := runs[0]
	if old.State != ci.StateFinished {
		return "", ci.Errorf(ci.ErrConflict, "the run has not finished (%s): cancel it first or wait", old.State)
	}
	jobs, err := t.JobsOfRun(ctx, id)
	if err != nil {
		return "", err
	}
	if dead != "" {
		for i := range jobs {
			if jobs[i].ID == dead && jobs[i].RequeuedRun != "" {
				return jobs[i].RequeuedRun, nil
			}
		}
	}
	n, err := t.retryOf(ctx, old, jobs, actor)
	if err != nil {
		return "", err
	}
	if failed {
		if n.pins, err = t.pins(ctx, old, jobs, n.Plan.Jobs); err != nil {
			return "", err
		}
		if len(n.pins) == len(jobs) {
			return "", ci.Errorf(ci.ErrConflict, "every job of the run succeeded: there is nothing to retry")
		}
	}
	if err := t.insertRun(ctx, n); err != nil {
		return "", err
	}
	t.record(store.Audit{Org: org, Actor: actor, Action: "retry", Run: id, Object: string(n.id)})
	if dead == "" {
		return n.id, nil
	}
	locked, err := t.LockJobs(ctx, []ci.JobID{dead})
	if err != nil {
		return "", err
	}
	locked[0].RequeuedRun = n.id
	e.Log.Debug("dead letter requeued", "job", dead, "run", n.id)
	return n.id, t.UpdateJobs(ctx, []*store.Job{&locked[0]})
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
		Submission: Submission{Org: old.Org, Repo: old.Repo, Actor: actor, Plan: plan, Source: old.SourceDigest, Trust: old.Trust,
			Event: "retry", CommitSHA: old.CommitSHA, Ref: old.Ref, Message: old.Message, Author: old.Author, Dirty: old.Dirty != 0},
		id: ci.RunID(t.e.IDs.New(ci.PrefixRun)), parent: old.ID, retryDefault: old.RetryDefault, operations: operations,
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
