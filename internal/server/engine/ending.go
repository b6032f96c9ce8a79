package engine

import (
	"context"
	"encoding/json"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// ending is the end of one attempt, whoever reports it: its runner, the sweep,
// a new session, an operator.
type ending struct {
	op    *endOp // nil when the runner did not ask
	lease store.Lease
	job   *store.Job
	actor string

	// What is written into the attempt.
	conclusion ci.Conclusion
	reason     ci.Reason
	detail     string
	evidence   string // empty: termination is not proven, the slot stays taken
	exit       *int64
	winner     bool
	request    string
	digest     string
	steps      []protocol.StepUpdate
	streams    []protocol.StreamEnd

	// What becomes of the job.
	outcome policy.Outcome
	outputs string
	bind    []store.Artifact
}

// applyEndings ends attempts and lets their jobs follow: fence, occupancy,
// attempt, bindings, job, successors, run.
func (t *txn) applyEndings(ctx context.Context, b *board, endings []*ending) error {
	if err := t.fence(ctx, b, endings); err != nil {
		return err
	}
	occupied, err := t.occupiedCancelling(ctx, endings)
	if err != nil {
		return err
	}
	var changed []*store.Job
	var bindings []store.NewBinding
	var logs []store.LogEnd
	for _, en := range endings {
		t.releaseAdmission(en.lease.Org, 1)
		// The history tells it in this order: the attempt has ended, therefore …
		t.record(store.Audit{
			Org: en.lease.Org, Actor: en.actor, Action: "attempt_ended", Run: en.lease.Run, Job: en.lease.Job,
			Epoch: en.lease.Epoch, Object: string(en.lease.ID), Detail: explainOutcome(en),
		})
		t.concludeJob(b, en, occupied[en.job.ID])
		changed = append(changed, en.job)
		for _, a := range en.bind {
			bindings = append(bindings, store.NewBinding{Run: en.job.Run, Job: en.job.ID, Name: a.Name, Artifact: a.ID, Org: en.job.Org})
		}
		logs = append(logs, store.LogEnd{Job: en.lease.Job, Epoch: en.lease.Epoch, Org: en.lease.Org, Streams: en.streams})
		t.say("attempt ended", "job", en.lease.Job, "run", en.lease.Run, "epoch", en.lease.Epoch, "runner", en.lease.Runner,
			"conclusion", en.conclusion, "reason", en.reason, "state", en.job.State)
	}
	if len(bindings) > 0 {
		if err := t.InsertBindings(ctx, bindings, b.now); err != nil {
			return err
		}
	}
	if err := t.EndLogs(ctx, logs, b.now); err != nil {
		return err
	}
	attempts, err := endedAttempts(b, endings)
	if err != nil {
		return err
	}
	if err := t.EndAttempts(ctx, attempts); err != nil {
		return err
	}
	return b.advance(ctx, changed)
}

// fence ends the leases: for their holders by the whole tuple, against them by
// job, lease and epoch. A lease that was judged current under its lock and is not
// found is a defect, and nothing is committed.
func (t *txn) fence(ctx context.Context, b *board, endings []*ending) error {
	var own []ci.LeaseRef
	var steps []store.StepOf
	var against []store.Lease
	var released, quarantined []store.AttemptKey
	for _, en := range endings {
		key := store.AttemptKey{Job: en.lease.Job, Epoch: en.lease.Epoch}
		if en.op != nil {
			own = append(own, en.lease.Ref())
			steps = append(steps, stepRows(en.lease.Ref(), en.steps)...)
		} else {
			against = append(against, en.lease)
		}
		if en.evidence != "" {
			released = append(released, key)
		} else {
			quarantined = append(quarantined, key)
		}
	}
	if err := t.UpsertSteps(ctx, steps, b.now); err != nil {
		return err
	}
	if len(own) > 0 {
		if err := t.FenceLeases(ctx, own, b.now); err != nil {
			return err
		}
	}
	if len(against) > 0 {
		if err := t.EndLeases(ctx, against); err != nil {
			return err
		}
	}
	if len(released) > 0 {
		if err := t.ReleaseOccupancy(ctx, released); err != nil {
			return err
		}
	}
	if len(quarantined) > 0 {
		return t.Quarantine(ctx, quarantined)
	}
	return nil
}

// occupiedCancelling returns the jobs of cancelling runs of which an attempt,
// this one or an earlier one, is not proven to have ended.
func (t *txn) occupiedCancelling(ctx context.Context, endings []*ending) (map[ci.JobID]bool, error) {
	var ids []ci.JobID
	for _, en := range endings {
		if en.job.State == ci.StateCancelling {
			ids = append(ids, en.job.ID)
		}
	}
	return t.OccupiedJobs(ctx, ids)
}

// concludeJob says what the job is now; occupied, which counts only while
// cancelling, that one of its attempts may still run.
func (t *txn) concludeJob(b *board, en *ending, occupied bool) {
	j := en.job
	j.InfraUsed, j.GrantedUsed = int64(en.outcome.Used.Infra), int64(en.outcome.Used.Granted)
	j.ExitCode = en.exit
	if j.State == ci.StateCancelling {
		if !occupied {
			b.conclude(j, ci.ConclusionCancelled, ci.ReasonUser, en.detail)
		}
		return // else: unresolved until termination is proven
	}
	switch en.outcome.Verdict {
	case policy.Keep:
		j.Outputs = en.outputs
		b.conclude(j, en.conclusion, en.reason, en.detail)
	case policy.Requeue:
		due := b.now + policy.Backoff(int(j.Epoch), t.e.Jitter()).Microseconds()
		j.Detail = en.outcome.Detail
		t.makeReady(j, due)
		t.record(store.Audit{
			Org: j.Org, Actor: actorServer, Action: "requeued", Run: j.Run, Job: j.ID, Epoch: j.Epoch,
			Detail: en.outcome.Detail + "; next attempt in " + time.Duration((due-b.now)*1000).Round(time.Millisecond).String(),
		})
	case policy.Abort:
		b.conclude(j, ci.ConclusionAborted, en.outcome.Reason, en.outcome.Detail)
	case policy.DeadLetter:
		j.DeadUS = b.now
		b.conclude(j, ci.ConclusionFailed, en.outcome.Reason, en.outcome.Detail)
		t.record(store.Audit{
			Org: j.Org, Actor: actorServer, Action: "dead_letter", Run: j.Run, Job: j.ID, Epoch: j.Epoch,
			Detail: en.outcome.Detail,
		})
	}
}

// endedAttempts renders the attempts as they are written and the answers.
func endedAttempts(b *board, endings []*ending) ([]store.Attempt, error) {
	out := make([]store.Attempt, 0, len(endings))
	for _, en := range endings {
		a := store.Attempt{
			Job: en.lease.Job, Epoch: en.lease.Epoch, State: ci.StateFinished, Conclusion: en.conclusion,
			Reason: en.reason, Detail: clip(en.detail, 4096), Evidence: en.evidence, ExitCode: en.exit, EndedUS: b.now,
			EndRequest: en.request, EndDigest: en.digest,
		}
		if en.winner {
			a.Winner = 1
		}
		if en.evidence == "" && en.job.State == ci.StateCancelling { // the sandbox may still run
			a.State, a.EndedUS = ci.StateCancelling, 0
		}
		if en.op != nil {
			en.op.answer = protocol.Completed{State: en.job.State, Conclusion: en.job.Conclusion}
			text, err := json.Marshal(en.op.answer)
			if err != nil {
				return nil, err
			}
			a.EndAnswer = string(text)
		}
		out = append(out, a)
	}
	return out, nil
}

func stepRows(ref ci.LeaseRef, steps []protocol.StepUpdate) []store.StepOf {
	out := make([]store.StepOf, 0, len(steps))
	for _, s := range steps {
		row := store.StepOf{Ref: ref, Step: store.Step{
			Index: int64(s.Index), Name: clip(s.Name, 512), State: s.State,
			Conclusion: s.Conclusion, Reason: s.Reason, Signal: clip(s.Signal, 32), DurationUS: max(s.Duration.Std().Microseconds(), 0),
		}}
		if s.ExitCode != nil {
			n := int64(*s.ExitCode)
			row.ExitCode = &n
		}
		out = append(out, row)
	}
	return out
}
