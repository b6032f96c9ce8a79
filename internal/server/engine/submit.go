package engine

import (
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

// Submit makes a run and its jobs, and the ready ones claimable, in one
// transaction. The plan has been validated: it has no cycle.
func (e *Engine) Submit(ctx context.Context, s Submission) (ci.RunID, error) {
	if len(s.Plan.Jobs) == 0 {
		return "", ci.Errorf(ci.ErrInvalid, "the workflow has no job to run")
	}
	var id ci.RunID
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		repo, ok, err := t.Repo(ctx, s.Org, s.Repo)
		if err != nil {
			return err
		}
		if !ok {
			return ci.Errorf(ci.ErrNotFound, "no repository %s", s.Repo)
		}
		if _, ok, err = t.Source(ctx, s.Org, s.Source); err != nil {
			return err
		} else if !ok {
			return ci.Errorf(ci.ErrNotFound, "no source %s: upload the snapshot first", s.Source)
		}
		id = ci.RunID(e.IDs.New(ci.PrefixRun))
		if s.IdempotencyKey != "" {
			bound, err := t.bindKey(ctx, s, id)
			if err != nil || bound != id {
				id = bound
				return err
			}
		}
		return t.insertRun(ctx, newRun{Submission: s, id: id, retryDefault: repo.RetryDefault})
	})
	return id, err
}

// bindKey binds the caller's idempotency key and returns the run it means.
func (t *txn) bindKey(ctx context.Context, s Submission, id ci.RunID) (ci.RunID, error) {
	now, err := t.lockedNow(ctx)
	if err != nil {
		return "", err
	}
	got, err := t.ClaimIdempotency(ctx, s.Org, s.Actor, string(s.Repo), s.IdempotencyKey, s.RequestDigest, id, now)
	if err != nil {
		return "", err
	}
	if got.Digest != s.RequestDigest {
		return "", ci.Errorf(ci.ErrConflict, "the idempotency key was used for another request (run %s)", got.Run)
	}
	return got.Run, nil
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

// insertRun inserts a run with its jobs: pinned ones finished, those without
// unfinished needs decided, the others waiting.
func (t *txn) insertRun(ctx context.Context, n newRun) error {
	number, err := t.NextRunNumber(ctx, n.Repo)
	if err != nil {
		return err
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return err
	}
	jobs := n.Plan.Jobs
	frozen := n.Plan
	frozen.Jobs = nil
	plan, err := json.Marshal(frozen)
	if err != nil {
		return err
	}
	run := store.Run{
		ID: n.id, Org: n.Org, Repo: n.Repo, Number: number, Parent: n.parent, Workflow: n.Plan.Workflow,
		Path: n.Plan.Path, WorkflowDigest: n.Plan.Digest, SourceDigest: n.Source, Plan: string(plan), Event: n.Event,
		CommitSHA: clip(n.CommitSHA, 64), Ref: clip(n.Ref, 1024), Message: clip(n.Message, 64<<10), Author: clip(n.Author, 512), Actor: n.Actor,
		Trust: n.Trust, RetryDefault: n.retryDefault, Priority: int64(n.Plan.Priority), CreatedUS: now,
	}
	if n.Dirty {
		run.Dirty = 1
	}
	rows, needs, err := t.jobRows(ctx, n, run, jobs, now)
	if err != nil {
		return err
	}
	for _, r := range rows {
		if r.State != ci.StateFinished {
			run.JobsLeft++
		}
	}
	if err := t.InsertRun(ctx, run); err != nil {
		return err
	}
	if err := t.InsertJobs(ctx, run, rows, needs); err != nil {
		return err
	}
	t.record(store.Audit{Org: n.Org, Actor: n.Actor, Action: "run_created", Run: n.id, Detail: n.Event})
	t.say("run created", "run", n.id, "repo", n.Repo, "workflow", n.Plan.Workflow, "jobs", len(jobs), "actor", n.Actor)
	t.changedRun(n.Org, n.id)
	if err := t.pinBindings(ctx, n, rows, now); err != nil {
		return err
	}
	// The run is new, so its lock is ours; jobs without unfinished needs start.
	b, _, err := t.lockBoard(ctx, []ci.RunID{n.id}, nil)
	if err != nil {
		return err
	}
	var start []ci.JobID
	for _, r := range rows {
		if r.State == ci.StateWaiting && r.NeedsLeft == 0 {
			start = append(start, r.ID)
		}
	}
	if err := b.lockJobs(ctx, start); err != nil {
		return err
	}
	byID := make(map[ci.JobID]ci.JobSpec, len(rows))
	for i, r := range rows {
		byID[r.ID] = jobs[i]
	}
	done, err := t.NeedsOf(ctx, start)
	if err != nil {
		return err
	}
	var changed []*store.Job
	for _, id := range start {
		j := b.jobs[id]
		b.decide(j, byID[id], done[id])
		changed = append(changed, j)
	}
	return b.advance(ctx, changed)
}

// jobRows renders the jobs of a plan and the pairs of need and job.
func (t *txn) jobRows(ctx context.Context, n newRun, run store.Run, jobs []ci.JobSpec, now int64) ([]store.NewJob, [][2]ci.JobID, error) {
	e := t.e
	edges := dag.Edges(jobs)
	chains := dag.Chains(len(jobs), edges)
	rows := make([]store.NewJob, len(jobs))
	shapes := map[string]string{}
	for i, spec := range jobs {
		text, err := json.Marshal(spec)
		if err != nil {
			return nil, nil, err
		}
		_, key := intern("shp", spec.RunsOn)
		if shapes[key] == "" {
			if shapes[key], err = t.internShape(ctx, spec.RunsOn, now); err != nil {
				return nil, nil, err
			}
		}
		id := ci.JobID(e.IDs.New(ci.PrefixJob))
		rows[i] = store.NewJob{Spec: string(text), Job: store.Job{
			ID: id, Run: run.ID, Org: run.Org, Index: int64(i), Name: spec.Name,
			Key: spec.Key, Shape: shapes[key], Prio: -(int64(n.Plan.Priority)*1_000_000 + int64(spec.Priority)), Chain: int64(chains[i]),
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
	var bs []store.NewBinding
	for _, r := range rows {
		p, ok := n.pins[r.Name]
		if !ok {
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
