package store

import (
	"context"

	"forgeci/internal/ci"
)

// What people read. Each method takes the viewer's organisation, so that what
// another tenant has is not found.

// RunView is a run with its repository's name.
type RunView struct {
	Run
	RepoName string
}

type extraScan struct {
	scanner
	extra []any
}

// Scan scans the leading columns and the extra ones behind them.
func (s extraScan) Scan(dest ...any) error { return s.scanner.Scan(append(dest, s.extra...)...) }

func scanRunView(r scanner, v *RunView) error {
	return scanRun(extraScan{r, []any{&v.RepoName}}, &v.Run)
}

// RunFilter selects runs; zero fields do not select.
type RunFilter struct {
	Repo       string
	State      ci.State
	Conclusion ci.Conclusion
	Commit     string
	Before     ci.RunID
	Limit      int
}

// ReadRuns returns runs, newest first.
func (t *Tx) ReadRuns(ctx context.Context, org ci.OrgID, f RunFilter) ([]RunView, error) {
	return query(ctx, t, "ReadRuns", scanRunView, org, f.Before, f.Repo, f.State, f.Conclusion, f.Commit, f.Limit)
}

// ReadRun returns one run.
func (t *Tx) ReadRun(ctx context.Context, org ci.OrgID, id ci.RunID) (RunView, bool, error) {
	return one(ctx, t, "ReadRun", scanRunView, org, id)
}

// ReadActiveRuns returns running and cancelling runs, oldest first.
func (t *Tx) ReadActiveRuns(ctx context.Context, org ci.OrgID, limit int) ([]RunView, int64, error) {
	rows, err := query(ctx, t, "ReadActiveRuns", scanRunView, org, limit)
	if err != nil {
		return nil, 0, err
	}
	n, _, err := one(ctx, t, "ReadActiveCount", scanInt, org)
	return rows, n, err
}

// JobCount counts a run's jobs of one state and conclusion.
type JobCount struct {
	Run        ci.RunID
	State      ci.State
	Conclusion ci.Conclusion
	N          int64
}

// ReadJobCounts counts the jobs of runs.
func (t *Tx) ReadJobCounts(ctx context.Context, ids []ci.RunID) ([]JobCount, error) {
	return query(ctx, t, "ReadJobCounts", func(r scanner, v *JobCount) error {
		return r.Scan(&v.Run, &v.State, &v.Conclusion, &v.N)
	}, keys(ids))
}

// JobView is a job with its spec, its runner's name and its place in the queue.
type JobView struct {
	Job
	Spec       string
	RunnerName string
	Open       int64 // 1 claimable, 0 held, -1 not in the queue
	DueUS      int64
	QueuePrio  int64
	QueueVFT   int64
}

func scanJobView(r scanner, v *JobView) error {
	return scanJob(extraScan{r, []any{&v.Spec, &v.RunnerName, &v.Open, &v.DueUS, &v.QueuePrio, &v.QueueVFT}}, &v.Job)
}

// ReadJobs returns a run's jobs by index.
func (t *Tx) ReadJobs(ctx context.Context, org ci.OrgID, run ci.RunID) ([]JobView, error) {
	return query(ctx, t, "ReadJobs", scanJobView, org, run)
}

// ReadJob returns one job.
func (t *Tx) ReadJob(ctx context.Context, org ci.OrgID, id ci.JobID) (JobView, bool, error) {
	return one(ctx, t, "ReadJob", scanJobView, org, id)
}

// ReadReadyJobs returns jobs in the queue, longest wait first, and how many there are.
func (t *Tx) ReadReadyJobs(ctx context.Context, org ci.OrgID, limit int) ([]JobView, int64, error) {
	rows, err := query(ctx, t, "ReadReadyJobs", scanJobView, org, limit)
	if err != nil {
		return nil, 0, err
	}
	n, _, err := one(ctx, t, "ReadReadyCount", scanInt, org)
	return rows, n, err
}

// ReadPosition returns how many open jobs of the tenant and shape come before a job.
func (t *Tx) ReadPosition(ctx context.Context, j JobView) (int64, error) {
	n, _, err := one(ctx, t, "ReadPosition", scanInt, j.Shape, j.QueuePrio, j.QueueVFT, j.ID, j.Org)
	return n, err
}

// Served is how many sessions there are for a shape.
type Served struct {
	Serving int64 // present sessions that serve it
	Open    int64 // of these, those that take jobs: they and their runners do not drain
	Present int64 // present sessions, whatever they serve
}

func scanServed(r scanner, v *Served) error { return r.Scan(&v.Serving, &v.Open) }

// ReadServed returns how many of the tenant's sessions there are for a shape.
func (t *Tx) ReadServed(ctx context.Context, org ci.OrgID, shape string) (Served, error) {
	served, _, err := one(ctx, t, "ReadShapeServed", scanServed, shape, org)
	if err != nil {
		return Served{}, err
	}
	served.Present, _, err = one(ctx, t, "ReadSessionsPresent", scanInt, org)
	return served, err
}

// AttemptView is an attempt with its runner's name and its log's row.
type AttemptView struct {
	Attempt
	RunnerName string
	LogState   string
	LogBytes   int64
	LogGap     int64
	LogCut     int64
}

// ReadAttempts returns a job's attempts by epoch.
func (t *Tx) ReadAttempts(ctx context.Context, org ci.OrgID, id ci.JobID) ([]AttemptView, error) {
	return query(ctx, t, "ReadAttempts", func(r scanner, v *AttemptView) error {
		return scanAttempt(extraScan{r, []any{&v.RunnerName, &v.LogState, &v.LogBytes, &v.LogGap, &v.LogCut}}, &v.Attempt)
	}, org, id)
}

// RunnerView is a runner with its latest session.
type RunnerView struct {
	ID        ci.RunnerID
	Name      string
	Status    string
	CreatedUS int64
	Slots     int64
	Version   string
	Present   int64
	State     string // of the session
	OpenedUS  int64
	GoneUS    int64
	Offer     string // policy.Offer, JSON
}

// ReadRunners returns runners by ID.
func (t *Tx) ReadRunners(ctx context.Context, org ci.OrgID, after ci.RunnerID, limit int) ([]RunnerView, error) {
	return query(ctx, t, "ReadRunners", func(r scanner, v *RunnerView) error {
		return r.Scan(&v.ID, &v.Name, &v.Status, &v.CreatedUS, &v.Slots, &v.Version, &v.Present, &v.State, &v.OpenedUS,
			&v.GoneUS, &v.Offer)
	}, org, after, limit)
}

// FleetView counts the runners of one status, their slots and what is in these.
type FleetView struct {
	Status               string // as protocol.Runner has it
	Runners, Slots, Busy int64
}

// ReadFleet counts an organisation's runners.
func (t *Tx) ReadFleet(ctx context.Context, org ci.OrgID) ([]FleetView, error) {
	return query(ctx, t, "ReadFleet", func(r scanner, v *FleetView) error {
		return r.Scan(&v.Status, &v.Runners, &v.Slots, &v.Busy)
	}, org)
}

// Occupant is an attempt that takes a slot.
type Occupant struct {
	Runner      ci.RunnerID
	Job         ci.JobID
	Epoch       int64
	Quarantined int64
	Name        string
	ExpiresUS   int64 // of its lease, 0 when it has none
}

// ReadOccupancy returns what occupies the runners of an organisation.
func (t *Tx) ReadOccupancy(ctx context.Context, org ci.OrgID) ([]Occupant, error) {
	return query(ctx, t, "ReadOccupancy", func(r scanner, v *Occupant) error {
		return r.Scan(&v.Runner, &v.Job, &v.Epoch, &v.Quarantined, &v.Name, &v.ExpiresUS)
	}, org)
}

// Unproven is an attempt of a run whose end is not proven.
type Unproven struct {
	Job        ci.JobID
	Name       string
	Epoch      int64
	Runner     ci.RunnerID
	RunnerName string
	Lost       int64
	SinceUS    int64 // when it was lost or, while it is not, claimed
	ExpiresUS  int64 // of its lease, 0 when it has none
}

// ReadUnproven returns what of a run may still run, oldest first.
func (t *Tx) ReadUnproven(ctx context.Context, org ci.OrgID, run ci.RunID) ([]Unproven, error) {
	return query(ctx, t, "ReadUnproven", func(r scanner, v *Unproven) error {
		return r.Scan(&v.Job, &v.Name, &v.Epoch, &v.Runner, &v.RunnerName, &v.Lost, &v.SinceUS, &v.ExpiresUS)
	}, org, run)
}

// DeadLetter is a job that infrastructure made fail.
type DeadLetter struct {
	Job      ci.JobID
	Name     string
	Run      ci.RunID
	Repo     string
	Epoch    int64
	Reason   ci.Reason
	Detail   string
	DeadUS   int64
	Requeued ci.RunID
}

// ReadDeadLetters returns dead letters, newest first.
func (t *Tx) ReadDeadLetters(ctx context.Context, org ci.OrgID, before ci.JobID, limit int) ([]DeadLetter, error) {
	return query(ctx, t, "ReadDeadLetters", func(r scanner, v *DeadLetter) error {
		return r.Scan(&v.Job, &v.Name, &v.Run, &v.Repo, &v.Epoch, &v.Reason, &v.Detail, &v.DeadUS, &v.Requeued)
	}, org, before, limit)
}

// ReadDeadCount counts dead letters that have not been requeued.
func (t *Tx) ReadDeadCount(ctx context.Context, org ci.OrgID) (int64, error) {
	n, _, err := one(ctx, t, "ReadDeadCount", scanInt, org)
	return n, err
}

// JobsByState counts unfinished jobs of all organisations, for metrics.
func (t *Tx) JobsByState(ctx context.Context) (map[ci.State]int64, error) {
	type row struct {
		state ci.State
		n     int64
	}
	rows, err := query(ctx, t, "ReadQueueByState", func(r scanner, v *row) error { return r.Scan(&v.state, &v.n) })
	out := map[ci.State]int64{}
	for _, r := range rows {
		out[r.state] = r.n
	}
	return out, err
}
