package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// endOp is one end of an attempt that its runner reports.
type endOp struct {
	held     Held
	complete *protocol.Complete
	handOver *protocol.HandOver
	digest   string

	answer protocol.Completed
	err    *error
}

func (op *endOp) request() string {
	if op.complete != nil {
		return op.complete.RequestID
	}
	return op.handOver.RequestID
}

// Digest is the digest of a request body by which a repeat is recognised.
func Digest(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("engine: " + err.Error()) // decoded from JSON before
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Complete decides what the job's result is. In one transaction it locks the run
// and the job; requires an active run, the exact current lease, evidence that
// the sandbox has ended, the leased source digest and every required artifact
// SEALED by this attempt; binds the artifacts; writes the result; releases the
// reservation once; and makes successors ready or finishes the run. While the
// run is cancelling only the conclusion cancelled is accepted. A repeat of the
// same request gets the same answer, also after the lease has ended.
func (e *Engine) Complete(ctx context.Context, held Held, req protocol.Complete) (protocol.Completed, error) {
	if err := validComplete(req); err != nil {
		return protocol.Completed{}, err
	}
	return e.end(ctx, &endOp{held: held, complete: &req, digest: Digest(req)}, "complete")
}

// HandOver gives a job back: to the queue when no user code was started, else as
// policy decides (SPEC decision 9). It needs evidence of termination.
func (e *Engine) HandOver(ctx context.Context, held Held, req protocol.HandOver) (protocol.Completed, error) {
	switch {
	case req.RequestID == "" || len(req.RequestID) > 128:
		return protocol.Completed{}, ci.Errorf(ci.ErrInvalid, "request_id: 1 to 128 characters are needed")
	case req.Reason != ci.ReasonRunnerShutdown && req.Reason != ci.ReasonRunnerRefused:
		return protocol.Completed{}, invalid("/reason", "%q: runner_shutdown or runner_refused is expected", clip(string(req.Reason), 64))
	}
	if err := errors.Join(validSteps(req.Steps), validStreams(req.Streams), validEvidence(req.Evidence)); err != nil {
		return protocol.Completed{}, err
	}
	return e.end(ctx, &endOp{held: held, handOver: &req, digest: Digest(req)}, "hand-over")
}

func (e *Engine) end(ctx context.Context, op *endOp, route string) (protocol.Completed, error) {
	err := e.writer.do(ctx, &request{end: op, done: make(chan struct{})})
	if err != nil {
		e.noteReject(Identity{Runner: op.held.ref.Runner, Org: op.held.org}, op.held.ref, route, err)
	}
	return op.answer, err
}

func validComplete(req protocol.Complete) error {
	ok := []ci.Conclusion{ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionCancelled}
	switch {
	case req.RequestID == "" || len(req.RequestID) > 128:
		return ci.Errorf(ci.ErrInvalid, "request_id: 1 to 128 characters are needed")
	case !slices.Contains(ok, req.Conclusion):
		return invalid("/conclusion", "%q: success, failed, timed_out or cancelled is expected", clip(string(req.Conclusion), 64))
	case len(req.Artifacts) > 1000:
		return ci.Errorf(ci.ErrTooLarge, "at most 1000 artifacts in one result")
	case !isWord(string(req.Reason)):
		return invalid("/reason", "a word of at most %d letters, digits and _ is expected", wordMost)
	}
	return errors.Join(validSteps(req.Steps), validStreams(req.Streams), validEvidence(req.Evidence))
}

// StoredAnswer returns the answer that an ended attempt was given for the same
// request and body; ok is false when there is none. The guard asks it before it
// refuses a repeat after the lease has ended.
func (e *Engine) StoredAnswer(ctx context.Context, who Identity, ref ci.LeaseRef, request, digest string) (answer protocol.Completed, ok bool, err error) {
	err = e.Store.Read(ctx, func(tx *store.Tx) error {
		a, found, err := tx.Attempt(ctx, ref.Job, ref.Epoch)
		if err != nil || !found || a.Org != who.Org || a.Runner != who.Runner || a.Ref() != ref {
			return err
		}
		answer, ok, err = sameEnd(a, request, digest)
		return err
	})
	return answer, ok, err
}

func sameEnd(a store.Attempt, request, digest string) (answer protocol.Completed, ok bool, err error) {
	if a.EndRequest == "" || a.EndRequest != request {
		return answer, false, nil
	}
	if a.EndDigest != digest {
		return answer, false, ci.Errorf(ci.ErrConflict, "request ID %s was used for another result", request)
	}
	return answer, true, json.Unmarshal([]byte(a.EndAnswer), &answer)
}

// endBatch applies ends and phases of one merged transaction: it locks runs,
// leases and jobs of all of them, then judges each by itself.
func (t *txn) endBatch(ctx context.Context, ends []*endOp, phases []*phaseOp) error {
	if len(ends)+len(phases) == 0 {
		return nil
	}
	var runs []ci.RunID
	var jobs []ci.JobID
	for _, op := range ends {
		runs = append(runs, op.held.ref.Run)
		jobs = append(jobs, op.held.ref.Job)
	}
	for _, op := range phases {
		jobs = append(jobs, op.held.ref.Job)
	}
	b, leases, err := t.lockBoard(ctx, runs, jobs)
	if err != nil {
		return err
	}
	if err := t.phaseBatch(ctx, b, leases, phases); err != nil {
		return err
	}
	current, err := t.judgeEnds(ctx, b, leases, ends)
	if err != nil || len(current) == 0 {
		return err
	}
	endings, err := t.prepareEnds(ctx, b, leases, current)
	if err != nil || len(endings) == 0 {
		return err
	}
	return t.applyEndings(ctx, b, endings)
}

// judgeEnds answers repeats and refuses what is not current.
func (t *txn) judgeEnds(ctx context.Context, b *board, leases map[ci.JobID]*store.Lease, ends []*endOp) ([]*endOp, error) {
	var current []*endOp
	taken := map[ci.JobID]bool{}
	for _, op := range ends {
		ref := op.held.ref
		who := Identity{Runner: ref.Runner, Org: op.held.org}
		access := ActiveOnly
		if op.complete != nil && op.complete.Conclusion == ci.ConclusionCancelled {
			access = WhileCancelling
		}
		reject := judge(who, ref, leases[ref.Job], b.now, access)
		if reject == ci.RejectNone && !taken[ref.Job] {
			taken[ref.Job] = true
			current = append(current, op)
			continue
		}
		a, found, err := t.Attempt(ctx, ref.Job, ref.Epoch)
		if err != nil {
			return nil, err
		}
		if taken[ref.Job] && reject == ci.RejectNone {
			*op.err = &ci.Error{Kind: ci.ErrUnavailable, Detail: "the same result is being decided; ask again"}
			continue
		}
		if found && a.Ref() == ref && a.Org == who.Org {
			answer, same, err := sameEnd(a, op.request(), op.digest)
			if same || err != nil {
				op.answer, *op.err = answer, err
				continue
			}
		}
		if reject, err = classify(ctx, t.Tx, who, ref, leases[ref.Job], reject); err != nil {
			*op.err = err
			continue
		}
		*op.err = ci.Rejected(reject)
	}
	return current, nil
}

// prepareEnds checks each result against the job's spec and asks policy what
// becomes of the job.
func (t *txn) prepareEnds(ctx context.Context, b *board, leases map[ci.JobID]*store.Lease, ops []*endOp) ([]*ending, error) {
	ids := make([]ci.JobID, len(ops))
	var wanted []store.AttemptKey
	for i, op := range ops {
		ids[i] = op.held.ref.Job
		if op.complete != nil && len(op.complete.Artifacts) > 0 {
			wanted = append(wanted, store.AttemptKey{Job: op.held.ref.Job, Epoch: op.held.ref.Epoch})
		}
	}
	specs, err := t.Specs(ctx, ids)
	if err != nil {
		return nil, err
	}
	sealed := map[ci.JobID]map[string]store.Artifact{}
	if len(wanted) > 0 {
		rows, err := t.SealedArtifacts(ctx, wanted)
		if err != nil {
			return nil, err
		}
		for _, a := range rows {
			if sealed[a.Job] == nil {
				sealed[a.Job] = map[string]store.Artifact{}
			}
			sealed[a.Job][a.Name] = a
		}
	}
	var out []*ending
	for _, op := range ops {
		ref := op.held.ref
		j, run := b.jobs[ref.Job], b.runs[ref.Run]
		var spec ci.JobSpec
		if err := json.Unmarshal([]byte(specs[ref.Job]), &spec); err != nil {
			return nil, err
		}
		en := &ending{op: op, lease: *leases[ref.Job], job: j, actor: string(ref.Runner), request: op.request(), digest: op.digest}
		if op.handOver != nil {
			t.prepareHandOver(en, spec, *run, *op.handOver)
		} else if err := t.prepareComplete(en, spec, *run, *op.complete, sealed[ref.Job]); err != nil {
			*op.err = err
			continue
		}
		out = append(out, en)
	}
	return out, nil
}

func (t *txn) prepareHandOver(en *ending, spec ci.JobSpec, run store.Run, req protocol.HandOver) {
	en.conclusion, en.reason, en.detail = ci.ConclusionAborted, req.Reason, req.Detail
	en.evidence, en.steps, en.streams = req.Evidence.How, req.Steps, req.Streams
	en.outcome = policy.Lost(req.Reason, en.job.Phase, t.e.retryPolicy(spec, run), used(en.job), t.e.InfraBudget)
}

func (t *txn) prepareComplete(en *ending, spec ci.JobSpec, run store.Run, req protocol.Complete, sealed map[string]store.Artifact) error {
	if req.Conclusion == ci.ConclusionCancelled && en.lease.Cancel == 0 {
		return ci.Errorf(ci.ErrInvalid, "conclusion cancelled: nobody asked for cancellation")
	}
	en.conclusion, en.reason, en.detail = req.Conclusion, req.Reason, req.Detail
	en.evidence, en.steps, en.streams = req.Evidence.How, req.Steps, req.Streams
	if req.ExitCode != nil {
		n := int64(*req.ExitCode)
		en.exit = &n
	}
	retry := t.e.retryPolicy(spec, run)
	switch {
	case req.Conclusion == ci.ConclusionSuccess:
		if err := checkSuccess(spec, run, req, sealed); err != nil {
			return err
		}
		en.winner = true
		en.outputs = encodeOutputs(req.Outputs)
		for name := range req.Artifacts {
			en.bind = append(en.bind, sealed[name])
		}
	case req.Conclusion == ci.ConclusionFailed && (req.Reason == ci.ReasonPrepare || req.Reason == ci.ReasonInternal):
		en.outcome = policy.Lost(req.Reason, en.job.Phase, retry, used(en.job), t.e.InfraBudget)
	case req.Conclusion == ci.ConclusionCancelled:
		en.outcome.Used = used(en.job)
		en.winner = true
	default:
		en.outcome = policy.Failed(req.Conclusion, req.ExitCode, retry, used(en.job))
		en.winner = en.outcome.Verdict == policy.Keep
	}
	if en.outcome.Verdict == policy.Keep {
		en.outcome.Used = used(en.job)
	}
	return nil
}

// Most bytes of a job's outputs together.
const outputsMost = 1 << 20

// checkSuccess requires what a success must bring.
func checkSuccess(spec ci.JobSpec, run store.Run, req protocol.Complete, sealed map[string]store.Artifact) error {
	if req.SourceDigest != run.SourceDigest {
		return ci.Errorf(ci.ErrDigest, "source_digest: the runner verified %q, the lease is for %q", req.SourceDigest, run.SourceDigest)
	}
	size := 0
	for name, value := range req.Outputs {
		if !slices.Contains(spec.Outputs, name) {
			return ci.Errorf(ci.ErrInvalid, "outputs: %q is not declared by the job", name)
		}
		size += len(name) + len(value)
	}
	if size > outputsMost {
		return ci.Errorf(ci.ErrTooLarge, "outputs: %d bytes are over the limit of %d", size, outputsMost)
	}
	declared := map[string]bool{}
	for _, p := range spec.Publish {
		declared[p.Name] = true
		id, given := req.Artifacts[p.Name]
		switch {
		case !given && p.Optional:
		case !given:
			return ci.Errorf(ci.ErrConflict, "artifact %q is required and was not uploaded", p.Name)
		case sealed[p.Name].ID != id:
			return ci.Errorf(ci.ErrConflict, "artifact %q: generation %s is not sealed by this attempt", p.Name, id)
		}
	}
	for name := range req.Artifacts {
		if !declared[name] {
			return ci.Errorf(ci.ErrInvalid, "artifacts: %q is not declared by the job", name)
		}
	}
	return nil
}

// explainOutcome says how an attempt ended. What follows from it for the job has
// an entry of its own, unless it is the end of it.
func explainOutcome(en *ending) string {
	s := string(en.conclusion)
	if en.reason != "" {
		s += " (" + string(en.reason) + ")"
	}
	detail := en.detail
	if en.outcome.Verdict == policy.Abort {
		detail = en.outcome.Detail
	}
	switch {
	case detail != "":
		s += ": " + clip(detail, 4096)
	case en.exit != nil && *en.exit != 0:
		s += fmt.Sprintf(": exit code %d", *en.exit)
	}
	return s
}
