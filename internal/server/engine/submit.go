package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/dag"
	"forgeci/internal/server/store"
)

// Submission is a run to make: a frozen plan over a published source.
type Submission struct {
	Org    ci.OrgID
	Repo   ci.RepoID
	Actor  string // who asks, from the credential
	Plan   ci.Plan
	Source string // manifest digest; published in Org
	Trust  ci.Trust
	Event  string

	CommitSHA, Ref, Message, Author string
	Dirty                           bool

	// IdempotencyKey, when set, binds the run to the caller, the repository and
	// RequestDigest: a repeat returns the same run, another digest is ErrConflict.
	IdempotencyKey, RequestDigest string
}

// submitOp is one submission in a batch.
type submitOp struct {
	s   Submission
	id  ci.RunID // the answer
	err *error
}

// Submit makes a run and its jobs, and the ready ones claimable, in one
// transaction. The plan has been validated: it has no cycle.
func (e *Engine) Submit(ctx context.Context, s Submission) (ci.RunID, error) {
	if len(s.Plan.Jobs) == 0 {
		return "", ci.Errorf(ci.ErrInvalid, "the workflow has no job to run")
	}
	op := &submitOp{s: s}
	err := e.writer.do(ctx, &request{submit: op, done: make(chan struct{})})
	return op.id, err
}

// submitBatch answers submissions: repeats first, then it makes the runs.
func (t *txn) submitBatch(ctx context.Context, ops []*submitOp) error {
	if len(ops) == 0 {
		return nil
	}
	var ids []ci.RepoID
	var sources []store.SourceKey
	for _, op := range ops {
		op.id = ci.RunID(t.e.IDs.New(ci.PrefixRun)) // anew at each try of the transaction
		ids = append(ids, op.s.Repo)
		sources = append(sources, store.SourceKey{Org: op.s.Org, Digest: op.s.Source})
	}
	repos, err := t.Repos(ctx, ids)
	if err != nil {
		return err
	}
	published, err := t.ShareSources(ctx, sources)
	if err != nil {
		return err
	}
	var good []*submitOp
	for i, op := range ops {
		switch {
		case repos[op.s.Repo].Org != op.s.Org:
			*op.err = ci.Errorf(ci.ErrNotFound, "no repository %s", clip(string(op.s.Repo), 60))
		case !published[sources[i]]:
			*op.err = ci.Errorf(ci.ErrNotFound, "no source %s: upload the snapshot first", op.s.Source)
		default:
			good = append(good, op)
		}
	}
	if good, err = t.bindKeys(ctx, good); err != nil || len(good) == 0 {
		return err
	}
	runs := make([]newRun, len(good))
	for i, op := range good {
		runs[i] = newRun{Submission: op.s, id: op.id, retryDefault: repos[op.s.Repo].RetryDefault}
	}
	return t.insertRuns(ctx, runs)
}

// bindKeys binds the callers' idempotency keys and returns those submissions that
// make a run; the others are answered with the run that their key means.
func (t *txn) bindKeys(ctx context.Context, ops []*submitOp) ([]*submitOp, error) {
	var wanted []store.Idempotency
	for _, op := range ops {
		if op.s.IdempotencyKey != "" {
			wanted = append(wanted, store.Idempotency{CallKey: op.s.callKey(), Digest: op.s.RequestDigest, Run: op.id})
		}
	}
	if len(wanted) == 0 {
		return ops, nil
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return nil, err
	}
	bound, err := t.ClaimIdempotency(ctx, wanted, now)
	if err != nil {
		return nil, err
	}
	var fresh []*submitOp
	for _, op := range ops {
		b, ok := bound[op.s.callKey()]
		switch {
		case !ok || b.Run == op.id:
			fresh = append(fresh, op)
		case b.Digest != op.s.RequestDigest:
			op.id = ""
			*op.err = ci.Errorf(ci.ErrConflict, "the idempotency key was used for another request (run %s)", b.Run)
		default:
			op.id = b.Run
		}
	}
	return fresh, nil
}

func (s Submission) callKey() store.CallKey {
	return store.CallKey{Org: s.Org, Caller: s.Actor, Scope: string(s.Repo), Key: s.IdempotencyKey}
}

// newRun is a run to insert; pins takes over results of the run it retries.
type newRun struct {
	Submission
	id           ci.RunID
	parent       ci.RunID
	retryDefault string
	pins         map[string]pin    // by job name
	operations   map[string]string // by job name: operation IDs of aborted jobs
}

// pin is a result taken over from the retried run.
type pin struct {
	job      store.Job
	bindings []store.Binding
}

// insertRuns inserts runs with their jobs: pinned ones finished, those that need
// nothing ready, others without unfinished needs decided, the rest waiting.
func (t *txn) insertRuns(ctx context.Context, news []newRun) error {
	count := map[ci.RepoID]int64{}
	for _, n := range news {
		count[n.Repo]++
	}
	numbers, err := t.NextRunNumbers(ctx, count)
	if err != nil {
		return err
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return err
	}
	var runs []store.Run
	var rows []store.NewJob
	var needs [][2]ci.JobID
	specs := map[ci.JobID]ci.JobSpec{}
	for _, n := range news {
		count[n.Repo]--
		run, err := runRow(n, numbers[n.Repo]-count[n.Repo], now)
		if err != nil {
			return err
		}
		own, edges, err := t.jobRows(ctx, n, run, now)
		if err != nil {
			return err
		}
		for i := range own {
			j, spec := &own[i].Job, n.Plan.Jobs[i]
			specs[j.ID] = spec
			if j.State != ci.StateFinished {
				run.JobsLeft++
			}
			if j.State == ci.StateWaiting && len(spec.Needs) == 0 && spec.If == "" {
				j.ReadyUS = now
				t.makeReady(j, 0)
			}
		}
		runs = append(runs, run)
		rows = append(rows, own...)
		needs = append(needs, edges...)
	}
	if err := t.InsertRuns(ctx, runs, now); err != nil {
		return err
	}
	if err := t.InsertJobs(ctx, rows, needs); err != nil {
		return err
	}
	for _, n := range news {
		t.record(store.Audit{Org: n.Org, Actor: n.Actor, Action: "run_created", Run: n.id, Detail: n.Event})
		t.say("run created", "run", n.id, "repo", n.Repo, "workflow", n.Plan.Workflow, "jobs", len(n.Plan.Jobs), "actor", n.Actor)
		t.changedRun(n.Org, n.id)
		if err := t.pinBindings(ctx, n, rows, now); err != nil {
			return err
		}
	}
	return t.startRuns(ctx, runs, rows, specs)
}

// startRuns decides about the waiting jobs of new runs that have no unfinished need.
func (t *txn) startRuns(ctx context.Context, runs []store.Run, rows []store.NewJob, specs map[ci.JobID]ci.JobSpec) error {
	var start []ci.JobID
	for _, r := range rows {
		if r.State == ci.StateWaiting && r.NeedsLeft == 0 {
			start = append(start, r.ID)
		}
	}
	if len(start) == 0 {
		return nil
	}
	ids := make([]ci.RunID, len(runs))
	for i, r := range runs {
		ids[i] = r.ID
	}
	// The runs are new, so their locks are ours.
	b, _, err := t.lockBoard(ctx, ids, nil)
	if err != nil {
		return err
	}
	if err := b.lockJobs(ctx, start); err != nil {
		return err
	}
	done, err := t.NeedsOf(ctx, start)
	if err != nil {
		return err
	}
	var changed []*store.Job
	for _, id := range start {
		j := b.jobs[id]
		b.decide(j, specs[id], done[id])
		changed = append(changed, j)
	}
	return b.advance(ctx, changed)
}

// runRow renders a run.
func runRow(n newRun, number, now int64) (store.Run, error) {
	frozen := n.Plan
	frozen.Jobs = nil
	plan, err := json.Marshal(frozen)
	run := store.Run{
		ID: n.id, Org: n.Org, Repo: n.Repo, Number: number, Parent: n.parent, Workflow: n.Plan.Workflow,
		Path: n.Plan.Path, WorkflowDigest: n.Plan.Digest, SourceDigest: n.Source, Plan: string(plan), Event: n.Event,
		CommitSHA: clip(n.CommitSHA, 64), Ref: clip(n.Ref, 1024), Message: clip(n.Message, 64<<10), Author: clip(n.Author, 512), Actor: n.Actor,
		Trust: n.Trust, RetryDefault: n.retryDefault, Priority: int64(n.Plan.Priority), CreatedUS: now,
	}
	if n.Dirty {
		run.Dirty = 1
	}
	return run, err
}

// jobRows renders the jobs of a plan and the pairs of need and job.
func (t *txn) jobRows(ctx context.Context, n newRun, run store.Run, now int64) ([]store.NewJob, [][2]ci.JobID, error) {
	e, jobs := t.e, n.Plan.Jobs
	edges := dag.Edges(jobs)
	chains := dag.Chains(len(jobs), edges)
	rows := make([]store.NewJob, len(jobs))
	for i, spec := range jobs {
		text, err := json.Marshal(spec)
		if err != nil {
			return nil, nil, err
		}
		shape, err := t.internShape(ctx, spec.RunsOn, now)
		if err != nil {
			return nil, nil, err
		}
		id := ci.JobID(e.IDs.New(ci.PrefixJob))
		rows[i] = store.NewJob{Spec: string(text), Job: store.Job{
			ID: id, Run: run.ID, Org: run.Org, Index: int64(i), Name: spec.Name,
			Key: spec.Key, TimeoutUS: cmp.Or(spec.Timeout, ci.DefaultJobTimeout).Std().Microseconds(), Shape: shape, Prio: -(int64(n.Plan.Priority)*1_000_000 + int64(spec.Priority)), Chain: int64(chains[i]),
			State: ci.StateWaiting, OperationID: operationID(id),
		}}
		if spec.AllowFailure {
			rows[i].AllowFailure = 1
		}
		if op := n.operations[spec.Name]; op != "" {
			rows[i].OperationID = op
		}
		if p, ok := n.pins[spec.Name]; ok {
			r := &rows[i].Job
			r.State, r.Conclusion, r.Reason, r.Outputs, r.PinnedFrom = ci.StateFinished, p.job.Conclusion, ci.ReasonPinned, p.job.Outputs, p.job.ID
			r.FinishedUS = now
		}
	}
	needs := make([][2]ci.JobID, 0, len(edges))
	for _, edge := range edges {
		needs = append(needs, [2]ci.JobID{rows[edge[0]].ID, rows[edge[1]].ID})
		if rows[edge[0]].State != ci.StateFinished {
			rows[edge[1]].NeedsLeft++
		}
	}
	return rows, needs, nil
}

// operationID is FORGECI_OPERATION_ID of a job: equal in all its attempts.
func operationID(id ci.JobID) string {
	sum := sha256.Sum256([]byte("operation " + string(id)))
	return "op_" + hex.EncodeToString(sum[:16])
}

// pinBindings binds the artifacts of pinned jobs in the new run too.
func (t *txn) pinBindings(ctx context.Context, n newRun, rows []store.NewJob, now int64) error {
	if len(n.pins) == 0 {
		return nil
	}
	var bs []store.NewBinding
	for _, r := range rows {
		p, ok := n.pins[r.Name]
		if !ok || r.Run != n.id {
			continue
		}
		for _, b := range p.bindings {
			bs = append(bs, store.NewBinding{Run: n.id, Job: r.ID, Name: b.Name, Artifact: b.Artifact.ID, Org: n.Org})
		}
	}
	if len(bs) == 0 {
		return nil
	}
	return t.InsertBindings(ctx, bs, now)
}

func decodeSpec(text string) (ci.JobSpec, error) {
	var spec ci.JobSpec
	err := json.Unmarshal([]byte(text), &spec)
	return spec, err
}

// needResults is what a job knows of the jobs it needs.
func needResults(needs []store.Need) map[string]protocol.NeedResult {
	if len(needs) == 0 {
		return nil
	}
	out := map[string]protocol.NeedResult{}
	for key, r := range dag.Results(dagNeeds(needs)) {
		out[key] = protocol.NeedResult{Conclusion: r.Conclusion, Outputs: r.Outputs}
	}
	return out
}
