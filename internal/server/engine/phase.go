package engine

import (
	"context"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// phaseOp is one phase or step report in a batch.
type phaseOp struct {
	held Held
	req  protocol.SetPhase
	err  *error
}

// SetPhase records how far an attempt has come, before the runner acts on it, and
// the transitions of its steps. A phase never goes back; repeating the current
// one changes nothing. Refused while the run is cancelling. In each phase the server
// holds a limit of its own, too: job timeout + grace + TTL.
func (e *Engine) SetPhase(ctx context.Context, held Held, req protocol.SetPhase) error {
	if req.Phase != "" && req.Phase.Order() < 0 {
		return invalid("/phase", "%q is not a phase", clip(string(req.Phase), 64))
	}
	if err := validSteps(req.Steps); err != nil {
		return err
	}
	err := e.writer.do(ctx, &request{phase: &phaseOp{held: held, req: req}, done: make(chan struct{})})
	if err != nil {
		e.noteReject(Identity{Runner: held.ref.Runner, Org: held.org}, held.ref, "phase", err)
	}
	return err
}

// phaseBatch applies phase reports under the locks of the leases.
func (t *txn) phaseBatch(ctx context.Context, b *board, leases map[ci.JobID]*store.Lease, ops []*phaseOp) error {
	if len(ops) == 0 {
		return nil
	}
	var refs []ci.LeaseRef
	var phases []ci.Phase
	var steps []store.StepOf
	latest := map[ci.JobID]int{} // position in refs
	for _, op := range ops {
		ref := op.held.ref
		who := Identity{Runner: ref.Runner, Org: op.held.org}
		if reject := judge(who, ref, leases[ref.Job], b.now, ActiveOnly); reject != ci.RejectNone {
			reject, err := classify(ctx, t.Tx, who, ref, leases[ref.Job], reject)
			if err != nil {
				*op.err = err
				continue
			}
			*op.err = ci.Rejected(reject)
			continue
		}
		j := b.jobs[ref.Job]
		steps = append(steps, stepRows(ref, op.req.Steps)...)
		t.changedRun(j.Org, j.Run)
		if op.req.Phase == "" || op.req.Phase == j.Phase {
			continue
		}
		if op.req.Phase.Order() < j.Phase.Order() {
			*op.err = ci.Errorf(ci.ErrConflict, "phase %s: the attempt is in phase %s and does not go back", op.req.Phase, j.Phase)
			continue
		}
		j.Phase = op.req.Phase
		if at, again := latest[ref.Job]; again {
			phases[at] = op.req.Phase
		} else {
			latest[ref.Job] = len(refs)
			refs = append(refs, ref)
			phases = append(phases, op.req.Phase)
		}
		t.record(store.Audit{
			Org: j.Org, Actor: string(ref.Runner), Action: "phase", Run: j.Run, Job: j.ID, Epoch: j.Epoch,
			Detail: string(op.req.Phase),
		})
	}
	if len(refs) > 0 {
		deadlines := make([]int64, len(refs))
		for i, ref := range refs {
			deadlines[i] = t.e.deadline(b.jobs[ref.Job], b.now)
		}
		if err := t.SetPhases(ctx, refs, phases, deadlines, b.now); err != nil {
			return err
		}
	}
	return t.UpsertSteps(ctx, steps, b.now)
}

// finaliseLeast is the least time that an attempt has for its uploads, which do
// not count towards its job's timeout.
const finaliseLeast = time.Hour

// overdueAfter is how long an attempt may be in a phase before the server ends its
// lease: the runner has let the limit of its own and the grace pass, or waits for
// something that no limit of its own ends. It counts from the claim, and anew from
// each phase: none is shorter than the runner's own.
func (e *Engine) overdueAfter(j *store.Job) time.Duration {
	limit := time.Duration(j.TimeoutUS) * time.Microsecond
	if j.Phase == ci.PhaseFinalising {
		limit = max(limit, finaliseLeast)
	}
	return limit + e.Grace + e.LeaseTTL
}

func (e *Engine) deadline(j *store.Job, now int64) int64 {
	return now + e.overdueAfter(j).Microseconds()
}
