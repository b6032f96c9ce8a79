package engine

import (
	"context"
	"maps"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Cancel asks for the end of a run. It takes the run's lock, raises the cancel
// version, concludes what has not started and asks the holders of leases to
// stop. When nothing may still run the run is cancelled at once; otherwise it
// stays cancelling until every sandbox of it, those of lost attempts too, is
// reported terminated or its host is fenced. A run that had finished is
// ErrConflict; repeating changes nothing.
func (e *Engine) Cancel(ctx context.Context, org ci.OrgID, actor string, id ci.RunID) error {
	return e.transact(ctx, func(ctx context.Context, t *txn) error {
		b, _, err := t.lockBoard(ctx, []ci.RunID{id}, nil)
		if err != nil {
			return err
		}
		run := b.runs[id]
		switch {
		case run == nil || run.Org != org:
			return ci.Errorf(ci.ErrNotFound, "no run %s", id)
		case run.State == ci.StateFinished:
			return ci.Errorf(ci.ErrConflict, "the run has finished: %s", run.Conclusion)
		case run.State == ci.StateCancelling:
			return nil
		}
		run.State, run.Reason = ci.StateCancelling, ci.ReasonUser
		run.CancelVersion++
		if err := t.UpdateRuns(ctx, []*store.Run{run}); err != nil {
			return err
		}
		t.changedRun(org, id)
		t.record(store.Audit{Org: org, Actor: actor, Action: "cancel", Run: id})
		t.say("run cancelling", "run", id, "actor", actor)
		open, err := t.TakeQueuedRun(ctx, id)
		if err != nil {
			return err
		}
		t.releaseAdmission(org, open)
		return t.cancelJobs(ctx, b, run)
	})
}

// cancelJobs concludes jobs that no runner holds and marks the others.
func (t *txn) cancelJobs(ctx context.Context, b *board, run *store.Run) error {
	// With the run locked and its queue empty no lease is made any more: leases are
	// locked before jobs, as everywhere.
	all, err := t.JobsOfRun(ctx, run.ID)
	if err != nil {
		return err
	}
	var running []ci.JobID
	for _, j := range all {
		if j.State == ci.StateRunning {
			running = append(running, j.ID)
		}
	}
	if _, err := t.LockLeases(ctx, running); err != nil {
		return err
	}
	rows, err := t.LockUnfinishedJobs(ctx, run.ID)
	if err != nil {
		return err
	}
	unfinished := make([]ci.JobID, len(rows))
	for i, j := range rows {
		unfinished[i] = j.ID
	}
	occupied, err := t.OccupiedJobs(ctx, unfinished)
	if err != nil {
		return err
	}
	var held []ci.JobID
	var attempts []store.AttemptKey
	var changed []*store.Job
	for i := range rows {
		j := &rows[i]
		b.jobs[j.ID] = j
		switch {
		case j.State == ci.StateRunning:
			j.State = ci.StateCancelling
			held = append(held, j.ID)
			attempts = append(attempts, store.AttemptKey{Job: j.ID, Epoch: j.Epoch})
		case occupied[j.ID]: // requeued, and an attempt that was lost may still run
			j.State = ci.StateCancelling
		default:
			b.conclude(j, ci.ConclusionCancelled, ci.ReasonUser, "cancelled before it started")
		}
		changed = append(changed, j)
	}
	if len(held) > 0 {
		holders, err := t.CancelLeases(ctx, held)
		if err != nil {
			return err
		}
		t.signal(holders...)
		if err := t.CancelAttempts(ctx, attempts); err != nil {
			return err
		}
	}
	return b.advance(ctx, changed)
}

// lockAttempts locks the runs, leases and jobs of a runner's attempts that are not
// proven to have ended, so that no other transaction decides about them between
// what is read and what is written.
func (t *txn) lockAttempts(ctx context.Context, runner ci.RunnerID, keys []store.AttemptKey) error {
	rows, err := t.Attempts(ctx, keys)
	if err != nil {
		return err
	}
	var runs []ci.RunID
	var jobs []ci.JobID
	for _, a := range rows {
		if a.Runner == runner && (a.State != ci.StateFinished || a.Evidence == "") {
			runs = append(runs, a.Run)
			jobs = append(jobs, a.Job)
		}
	}
	if len(jobs) == 0 {
		return nil
	}
	_, _, err = t.lockBoard(ctx, runs, jobs)
	return err
}

// settleTerminated records that attempts without a lease are proven to have ended,
// and concludes what of cancelling runs waited for that: a job when none of its
// attempts may still run, and the run behind its last job likewise. Their runs are
// locked (lockAttempts).
func (t *txn) settleTerminated(ctx context.Context, keys []store.AttemptKey, evidence, actor string) error {
	if len(keys) == 0 {
		return nil
	}
	rows, err := t.Attempts(ctx, keys)
	if err != nil {
		return err
	}
	var runs []ci.RunID
	var jobs []ci.JobID
	for _, a := range rows {
		if err := t.SetEvidence(ctx, store.AttemptKey{Job: a.Job, Epoch: a.Epoch}, evidence); err != nil {
			return err
		}
		t.record(store.Audit{
			Org: a.Org, Actor: actor, Action: "terminated", Run: a.Run, Job: a.Job, Epoch: a.Epoch,
			Object: string(a.Lease), Detail: evidence,
		})
		runs = append(runs, a.Run)
		jobs = append(jobs, a.Job)
	}
	b, leases, err := t.lockBoard(ctx, runs, jobs)
	if err != nil {
		return err
	}
	occupied, err := t.OccupiedJobs(ctx, jobs)
	if err != nil {
		return err
	}
	var ended []store.Attempt
	for _, a := range rows {
		if l := leases[a.Job]; a.State == ci.StateCancelling && (l == nil || l.Epoch != a.Epoch) {
			a.State, a.Conclusion, a.Evidence, a.EndedUS = ci.StateFinished, ci.ConclusionCancelled, evidence, b.now
			ended = append(ended, a)
		}
	}
	if len(ended) > 0 {
		if err := t.EndAttempts(ctx, ended); err != nil {
			return err
		}
	}
	var changed []*store.Job
	for _, id := range slices.Sorted(maps.Keys(b.jobs)) {
		if j := b.jobs[id]; j.State == ci.StateCancelling && leases[id] == nil && !occupied[id] {
			b.conclude(j, ci.ConclusionCancelled, ci.ReasonUser, "")
			changed = append(changed, j)
		}
	}
	return b.advance(ctx, changed)
}
