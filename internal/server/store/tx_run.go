package store

import (
	"context"
	"fmt"
	"strconv"

	"forgeci/internal/ci"
)

func itoa(i int) string { return strconv.Itoa(i) }

// InsertRuns stores new runs in state waiting, made now.
func (t *Tx) InsertRuns(ctx context.Context, runs []Run, now int64) error {
	m := make(map[string]any, len(runs))
	for _, r := range runs {
		m[string(r.ID)] = map[string]any{
			"org": r.Org, "repo": r.Repo, "number": r.Number, "parent": r.Parent, "workflow": r.Workflow, "path": r.Path,
			"digest": r.WorkflowDigest, "source": r.SourceDigest, "plan": r.Plan, "event": r.Event, "commit": r.CommitSHA,
			"ref": r.Ref, "message": r.Message, "author": r.Author, "dirty": r.Dirty, "actor": r.Actor, "trust": r.Trust,
			"retry": r.RetryDefault, "priority": r.Priority, "jobs_left": r.JobsLeft,
		}
	}
	return t.later(ctx, "RunsInsert", len(runs), "runs", object(m), now)
}

// Run returns a run.
func (t *Tx) Run(ctx context.Context, id ci.RunID) (Run, bool, error) {
	return one(ctx, t, "RunGet", scanRun, id)
}

// Ticket is what a runner is told of its job and its run.
type Ticket struct {
	Run         Run // without what changes
	RepoName    string
	Source      Source // without the key
	OperationID string
	Spec        string // ci.JobSpec, JSON
}

// Tickets returns what the runners of jobs are told.
func (t *Tx) Tickets(ctx context.Context, jobs []ci.JobID) (map[ci.JobID]Ticket, error) {
	type row struct {
		job ci.JobID
		Ticket
	}
	rows, err := query(ctx, t, "TicketsGet", func(r scanner, v *row) error {
		return r.Scan(&v.job, &v.Run.Org, &v.Run.Number, &v.Run.Parent, &v.Run.Workflow, &v.Run.Path, &v.Run.Plan, &v.Run.Event, &v.Run.CommitSHA,
			&v.Run.Ref, &v.Run.Message, &v.Run.Author, &v.Run.Trust, &v.RepoName, &v.Source.Digest, &v.Source.BlobDigest,
			&v.Source.Size, &v.OperationID, &v.Spec)
	}, keys(jobs))
	out := make(map[ci.JobID]Ticket, len(rows))
	for _, r := range rows {
		out[r.job] = r.Ticket
	}
	return out, err
}

// Runs returns runs without locking them.
func (t *Tx) Runs(ctx context.Context, ids []ci.RunID) ([]Run, error) {
	return query(ctx, t, "RunsGet", scanRun, keys(ids))
}

// LockRuns locks and returns runs, in order.
func (t *Tx) LockRuns(ctx context.Context, ids []ci.RunID) ([]Run, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	return query(ctx, t, "RunsLock", scanRun, keys(ids))
}

// UpdateRuns writes back runs that this transaction has locked.
func (t *Tx) UpdateRuns(ctx context.Context, runs []*Run) error {
	m := make(map[string]any, len(runs))
	for _, r := range runs {
		if !ci.Legal(ci.RunTransitions(), r.wasState, r.State) {
			return fmt.Errorf("store: run %s does not go from %s to %s", r.ID, r.wasState, r.State)
		}
		m[string(r.ID)] = map[string]any{
			"state": r.State, "conclusion": r.Conclusion, "reason": r.Reason,
			"cancel_version": r.CancelVersion, "jobs_left": r.JobsLeft, "n_failed": r.Failed, "n_timed_out": r.TimedOut,
			"n_infra": r.Infra, "n_warn": r.Warn, "started_us": r.StartedUS, "finished_us": r.FinishedUS,
			"was_state": r.wasState, "was_cancel": r.wasCancel,
		}
	}
	if err := t.later(ctx, "RunsUpdate", len(runs), "runs", object(m)); err != nil {
		return err
	}
	for _, r := range runs {
		r.wasState, r.wasCancel = r.State, r.CancelVersion
	}
	return nil
}

// changed turns a guarded update that missed rows into an error: the rows were
// locked, so it is a defect and the transaction must not commit.
func changed(n int64, want int, what string, err error) error {
	if err == nil && n != int64(want) {
		return fmt.Errorf("store: %d of %d %s were as they had been read", n, want, what)
	}
	return err
}

// StartRuns moves waiting runs to running.
func (t *Tx) StartRuns(ctx context.Context, ids []ci.RunID, now int64) error {
	return t.later(ctx, "RunsStarted", -1, "runs", keys(ids), now)
}

// NewJob is a job to insert with its spec.
type NewJob struct {
	Job
	Spec string
}

// InsertJobs stores the jobs of new runs and what they need (pairs of need, job).
func (t *Tx) InsertJobs(ctx context.Context, jobs []NewJob, needs [][2]ci.JobID) error {
	m := make(map[string]any, len(jobs))
	for _, j := range jobs {
		m[string(j.ID)] = map[string]any{
			"run": j.Run, "org": j.Org, "idx": j.Index, "name": j.Name, "key": j.Key, "spec": j.Spec, "timeout": j.TimeoutUS, "shape": j.Shape,
			"prio": j.Prio, "chain": j.Chain, "allow": j.AllowFailure, "op": j.OperationID, "needs": j.NeedsLeft,
			"state": j.State, "conclusion": j.Conclusion, "reason": j.Reason, "outputs": j.Outputs, "pinned": j.PinnedFrom,
			"finished": j.FinishedUS, "generation": j.Generation, "ready": j.ReadyUS,
		}
	}
	if err := t.later(ctx, "JobsInsert", len(jobs), "jobs", object(m)); err != nil {
		return err
	}
	if len(needs) == 0 {
		return nil
	}
	n := make(map[string]any, len(needs))
	for i, p := range needs {
		n[itoa(i)] = map[string]any{"n": p[0], "j": p[1]}
	}
	return t.later(ctx, "NeedsInsert", len(needs), "needs", object(n))
}

// Job returns a job.
func (t *Tx) Job(ctx context.Context, id ci.JobID) (Job, bool, error) {
	return one(ctx, t, "JobGet", scanJob, id)
}

// Jobs returns jobs without locking them.
func (t *Tx) Jobs(ctx context.Context, ids []ci.JobID) ([]Job, error) {
	return query(ctx, t, "JobsGet", scanJob, keys(ids))
}

// LockJobs locks and returns jobs, in order.
func (t *Tx) LockJobs(ctx context.Context, ids []ci.JobID) ([]Job, error) {
	return query(ctx, t, "JobsLock", scanJob, keys(ids))
}

// JobsOfRun returns a run's jobs by index.
func (t *Tx) JobsOfRun(ctx context.Context, id ci.RunID) ([]Job, error) {
	return query(ctx, t, "JobsOfRun", scanJob, id)
}

// LockUnfinishedJobs locks and returns the jobs of a run that are not finished.
func (t *Tx) LockUnfinishedJobs(ctx context.Context, id ci.RunID) ([]Job, error) {
	return query(ctx, t, "JobsOfRunLock", scanJob, id)
}

// Specs returns the specs (ci.JobSpec, JSON) of jobs.
func (t *Tx) Specs(ctx context.Context, ids []ci.JobID) (map[ci.JobID]string, error) {
	type row struct{ id, spec string }
	rows, err := query(ctx, t, "JobSpecs", func(r scanner, v *row) error { return r.Scan(&v.id, &v.spec) }, keys(ids))
	out := make(map[ci.JobID]string, len(rows))
	for _, r := range rows {
		out[ci.JobID(r.id)] = r.spec
	}
	return out, err
}

// UpdateJobs writes back jobs that this transaction has locked.
func (t *Tx) UpdateJobs(ctx context.Context, jobs []*Job) error {
	m := make(map[string]any, len(jobs))
	for _, j := range jobs {
		if !ci.Legal(ci.JobTransitions(), j.wasState, j.State) {
			return fmt.Errorf("store: job %s does not go from %s to %s", j.ID, j.wasState, j.State)
		}
		m[string(j.ID)] = map[string]any{
			"state": j.State, "conclusion": j.Conclusion, "reason": j.Reason, "detail": j.Detail,
			"generation": j.Generation, "epoch": j.Epoch, "phase": j.Phase, "infra_used": j.InfraUsed,
			"granted_used": j.GrantedUsed, "exit_code": j.ExitCode, "outputs": j.Outputs, "dead_us": j.DeadUS,
			"requeued_run": j.RequeuedRun, "ready_us": j.ReadyUS, "started_us": j.StartedUS, "finished_us": j.FinishedUS,
			"was_state": j.wasState, "was_epoch": j.wasEpoch,
		}
	}
	if err := t.later(ctx, "JobsUpdate", len(jobs), "jobs", object(m)); err != nil {
		return err
	}
	for _, j := range jobs {
		j.wasState, j.wasEpoch = j.State, j.Epoch
	}
	return nil
}

// FinishNeeds counts the finished jobs down in those that need them and returns
// the waiting jobs that have no unfinished need left.
func (t *Tx) FinishNeeds(ctx context.Context, finished []ci.JobID) ([]ci.JobID, error) {
	type row struct {
		id   ci.JobID
		left int64
	}
	rows, err := query(ctx, t, "NeedsDone", func(r scanner, v *row) error { return r.Scan(&v.id, &v.left) }, keys(finished))
	var out []ci.JobID
	for _, r := range rows {
		if r.left == 0 {
			out = append(out, r.id)
		}
	}
	return out, err
}

// NeedsOf returns the needs of jobs, by job.
func (t *Tx) NeedsOf(ctx context.Context, ids []ci.JobID) (map[ci.JobID][]Need, error) {
	rows, err := query(ctx, t, "NeedsOf", scanNeed, keys(ids))
	out := map[ci.JobID][]Need{}
	for _, r := range rows {
		out[r.Of] = append(out[r.Of], r)
	}
	return out, err
}

// InsertShape interns a job's requirements; fresh says that they are new.
func (t *Tx) InsertShape(ctx context.Context, id, requirements string, now int64) (fresh bool, err error) {
	n, err := t.exec(ctx, "ShapeInsert", id, requirements, now)
	return n == 1, err
}

// Interned is a shape or an offer with its JSON.
type Interned struct{ ID, JSON string }

func scanInterned(r scanner, v *Interned) error { return r.Scan(&v.ID, &v.JSON) }

// Shapes returns all shapes.
func (t *Tx) Shapes(ctx context.Context) ([]Interned, error) {
	return query(ctx, t, "ShapesAll", scanInterned)
}

// ServedShapes returns what the offers of present sessions serve: pairs of offer
// and shape.
func (t *Tx) ServedShapes(ctx context.Context) ([][2]string, error) {
	return query(ctx, t, "ShapesServed", func(r scanner, v *[2]string) error { return r.Scan(&v[0], &v[1]) })
}

// InsertOffer interns what a session offers; fresh says that it is new.
func (t *Tx) InsertOffer(ctx context.Context, id, offer string, now int64) (fresh bool, err error) {
	n, err := t.exec(ctx, "OfferInsert", id, offer, now)
	return n == 1, err
}

// Offers returns all offers.
func (t *Tx) Offers(ctx context.Context) ([]Interned, error) {
	return query(ctx, t, "OffersAll", scanInterned)
}

// JoinOffersShapes records which offers serve which shapes (pairs of offer, shape).
func (t *Tx) JoinOffersShapes(ctx context.Context, pairs [][2]string) error {
	if len(pairs) == 0 {
		return nil
	}
	m := make(map[string]any, len(pairs))
	for i, p := range pairs {
		m[itoa(i)] = map[string]any{"o": p[0], "s": p[1]}
	}
	_, err := t.exec(ctx, "OfferShapeInsert", object(m))
	return err
}

// NewQueued is a ready job to queue.
type NewQueued struct {
	Queued
	Shape string
	Open  bool
	DueUS int64
}

// Enqueue inserts ready jobs.
func (t *Tx) Enqueue(ctx context.Context, qs []NewQueued) error {
	m := make(map[string]any, len(qs))
	for _, q := range qs {
		open := 0
		if q.Open {
			open = 1
		}
		m[string(q.Job)] = map[string]any{
			"run": q.Run, "shape": q.Shape, "org": q.Org, "prio": q.Prio, "vft": q.VFT,
			"generation": q.Generation, "open": open, "due": q.DueUS,
		}
	}
	return t.later(ctx, "QueueInsert", len(qs), "queue rows", object(m))
}

// QueuePlace is the first place in the queue of a run's jobs of one shape, priority
// and chain.
type QueuePlace struct {
	Run   ci.RunID
	Shape string
	Prio  int64
	Chain int64
	VFT   int64
}

// QueuePlaces returns the places that runs have in the queue.
func (t *Tx) QueuePlaces(ctx context.Context, runs []ci.RunID) ([]QueuePlace, error) {
	return query(ctx, t, "QueuePlaces", func(r scanner, v *QueuePlace) error {
		return r.Scan(&v.Run, &v.Shape, &v.Prio, &v.Chain, &v.VFT)
	}, keys(runs))
}

// OpenShapes returns the shapes of an offer that have a job of the tenant to claim.
func (t *Tx) OpenShapes(ctx context.Context, org ci.OrgID, offer string) ([]string, error) {
	return query(ctx, t, "QueueShapes", scanString, offer, org)
}

// LockHeads locks and returns up to limit open jobs of a shape, best first;
// rows that another transaction holds are passed over.
func (t *Tx) LockHeads(ctx context.Context, shape string, org ci.OrgID, limit int) ([]Queued, error) {
	return query(ctx, t, "QueueHeads", scanQueued, shape, org, limit)
}

// TakeQueued removes jobs from the queue that this transaction has locked.
func (t *Tx) TakeQueued(ctx context.Context, ids []ci.JobID) error {
	return t.later(ctx, "QueueTake", len(ids), "queue rows", keys(ids))
}

// TakeQueuedRun empties a run's part of the queue; it returns how many of its
// jobs were open.
func (t *Tx) TakeQueuedRun(ctx context.Context, id ci.RunID) (open int64, err error) {
	type row struct {
		id   string
		open int64
	}
	rows, err := query(ctx, t, "QueueTakeRun", func(r scanner, v *row) error { return r.Scan(&v.id, &v.open) }, id)
	for _, r := range rows {
		open += r.open
	}
	return open, err
}

// LockHeld locks and returns up to limit held jobs that may be opened: due, with
// a live session that serves their shape. Values are job and shape.
// No backoff ends behind latestUS: one that does is over.
func (t *Tx) LockHeld(ctx context.Context, org ci.OrgID, now, latestUS int64, limit int) ([][2]string, error) {
	return query(ctx, t, "QueueHeld", func(r scanner, v *[2]string) error { return r.Scan(&v[0], &v[1]) }, org, now, limit, latestUS)
}

// HeldOrgs returns organisations with due held jobs, as LockHeld sees them, and
// quota for one.
func (t *Tx) HeldOrgs(ctx context.Context, now, latestUS int64) ([]ci.OrgID, error) {
	return query(ctx, t, "QueueHeldOrgs", func(r scanner, v *ci.OrgID) error { return r.Scan(v) }, now, latestUS)
}

// NextDue returns when the next backoff ends, 0 when there is none.
func (t *Tx) NextDue(ctx context.Context, now int64) (int64, error) {
	v, _, err := one(ctx, t, "QueueNextDue", scanInt, now)
	return v, err
}

// OpenQueued opens held jobs for claiming.
func (t *Tx) OpenQueued(ctx context.Context, ids []ci.JobID) error {
	return t.later(ctx, "QueueOpen", len(ids), "queue rows", keys(ids))
}

// CloseUnserved holds open jobs whose shape no live session serves; it returns
// how many per organisation.
func (t *Tx) CloseUnserved(ctx context.Context) (map[ci.OrgID]int64, error) {
	rows, err := query(ctx, t, "QueueClose", func(r scanner, v *ci.OrgID) error { return r.Scan(v) })
	out := map[ci.OrgID]int64{}
	for _, o := range rows {
		out[o]++
	}
	return out, err
}

// ShiftDue moves the ends of backoffs, of mostUS at most, as ShiftLeases does.
func (t *Tx) ShiftDue(ctx context.Context, deltaUS, now, mostUS int64) error {
	from, to := behind(deltaUS, now, mostUS)
	_, err := t.exec(ctx, "QueueShift", deltaUS, from, to)
	return err
}

// OpenCount is how many jobs of a tenant and shape may be claimed.
type OpenCount struct {
	Org   ci.OrgID
	Shape string
	N     int64
}

// OpenCounts counts the open jobs of the queue.
func (t *Tx) OpenCounts(ctx context.Context) ([]OpenCount, error) {
	return query(ctx, t, "QueueOpenCounts", func(r scanner, v *OpenCount) error { return r.Scan(&v.Org, &v.Shape, &v.N) })
}
