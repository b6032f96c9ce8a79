package store

import (
	"context"
	"errors"
	"math"
	"time"

	"forgeci/internal/ci"
)

// LockLeases locks and returns the live leases of jobs, in order.
func (t *Tx) LockLeases(ctx context.Context, jobs []ci.JobID) ([]Lease, error) {
	if len(jobs) == 0 {
		return nil, nil
	}
	return query(ctx, t, "LeasesLock", scanLease, keys(jobs))
}

// Lease returns the live lease of a job.
func (t *Tx) Lease(ctx context.Context, job ci.JobID) (Lease, bool, error) {
	return one(ctx, t, "LeaseGet", scanLease, job)
}

// LeasesNow returns the live leases of jobs with the database's time as it was
// when the last of them was read; without a lease the time may be 0.
func (t *Tx) LeasesNow(ctx context.Context, jobs []ci.JobID) (ls []Lease, now int64, err error) {
	ls, err = query(ctx, t, "LeasesNow", func(r scanner, v *Lease) error {
		return scanLease(scanFunc(func(dest ...any) error { return r.Scan(append(dest, &now)...) }), v)
	}, keys(jobs))
	if own, has := t.s.ownNow(); has {
		now = own
	}
	return ls, now, err
}

type scanFunc func(dest ...any) error

func (f scanFunc) Scan(dest ...any) error { return f(dest...) }

// RenewLeases extends current leases to expiresUS and returns, by job, whether
// cancellation is asked for; what is not returned was not current.
func (t *Tx) RenewLeases(ctx context.Context, rs []ci.LeaseRef, now, expiresUS int64) (map[ci.JobID]bool, error) {
	type row struct {
		job    ci.JobID
		cancel int64
	}
	rows, err := query(ctx, t, "LeasesRenew", func(r scanner, v *row) error { return r.Scan(&v.job, &v.cancel) },
		refs(rs, nil), now, expiresUS)
	out := make(map[ci.JobID]bool, len(rows))
	for _, r := range rows {
		out[r.job] = r.cancel != 0
	}
	return out, err
}

// FenceLeases ends leases for their holders: it is the fence of a completion. One
// that is not current fails the transaction.
func (t *Tx) FenceLeases(ctx context.Context, rs []ci.LeaseRef, now int64) error {
	return t.later(ctx, "LeasesFence", len(rs), "leases", refs(rs, nil), now)
}

// EndLeases ends leases against their holders (expiry, fencing).
func (t *Tx) EndLeases(ctx context.Context, ls []Lease) error {
	m := make(map[string]any, len(ls))
	for _, l := range ls {
		m[string(l.Job)] = map[string]any{"l": l.ID, "e": l.Epoch}
	}
	rows, err := query(ctx, t, "LeasesEnd", scanString, object(m))
	return changed(int64(len(rows)), len(ls), "leases", err)
}

// NewAttempt is an attempt to insert with its lease and occupancy.
type NewAttempt struct {
	Ref          ci.LeaseRef
	Org          ci.OrgID
	ClaimRequest string
	DeadlineUS   int64 // the server's own limit on its first phase
}

// InsertAttempts inserts attempts, their leases and their occupancy.
func (t *Tx) InsertAttempts(ctx context.Context, as []NewAttempt, now, expiresUS int64) error {
	m := make(map[string]any, len(as))
	for _, a := range as {
		m[string(a.Ref.Job)] = map[string]any{
			"r": a.Ref.Run, "o": a.Org, "l": a.Ref.Lease, "n": a.Ref.Runner,
			"s": a.Ref.Session, "e": a.Ref.Epoch, "q": a.ClaimRequest, "d": a.DeadlineUS,
		}
	}
	set := object(m)
	return errors.Join(
		t.later(ctx, "AttemptsInsert", len(as), "attempts", set, now),
		t.later(ctx, "LeasesInsert", len(as), "leases", set, expiresUS),
		t.later(ctx, "OccupancyInsert", len(as), "slots", set, now),
	)
}

// CancelLeases asks the holders to stop and returns their sessions.
func (t *Tx) CancelLeases(ctx context.Context, jobs []ci.JobID) ([]ci.SessionID, error) {
	return query(ctx, t, "LeasesCancel", func(r scanner, v *ci.SessionID) error { return r.Scan(v) }, keys(jobs))
}

// ExpiredLeases returns leases that have run out, or are past the server's limit.
func (t *Tx) ExpiredLeases(ctx context.Context, now int64, limit int) ([]Lease, error) {
	return query(ctx, t, "LeasesExpired", scanLease, now, limit)
}

// LeasesOfSession returns the live leases of a session.
func (t *Tx) LeasesOfSession(ctx context.Context, id ci.SessionID) ([]Lease, error) {
	return query(ctx, t, "LeasesOfSession", scanLease, id)
}

// LeasesOfRunner returns the live leases of all sessions of a runner.
func (t *Tx) LeasesOfRunner(ctx context.Context, id ci.RunnerID) ([]Lease, error) {
	return query(ctx, t, "LeasesOfRunner", scanLease, id)
}

// ShiftLeases lets live leases run out later by forwardUS, a jump of the database's
// clock (0: it was set back), and all at the latest a TTL from now: what would run
// out later was set before the clock was set back. No lease ends before it would
// have, or a TTL from now if that is sooner. The limits of phases move as their
// leases do, but for those that were set behind a jump of a TTL or more.
func (t *Tx) ShiftLeases(ctx context.Context, forwardUS, now, ttlUS int64) (int64, error) {
	set := int64(math.MaxInt64)
	if from, to := behind(forwardUS, now, ttlUS); to > 0 {
		set = from
	}
	return t.exec(ctx, "LeasesShift", forwardUS, now+ttlUS, set)
}

// LongestLease returns when the last lease runs out, 0 when there is none.
func (t *Tx) LongestLease(ctx context.Context) (int64, error) {
	v, _, err := one(ctx, t, "LeasesLongest", scanInt)
	return v, err
}

// ShortenLeases lets leases that run out behind afterUS run out at expiresUS.
func (t *Tx) ShortenLeases(ctx context.Context, afterUS, expiresUS int64) (int64, error) {
	return t.exec(ctx, "LeasesShorten", afterUS, expiresUS)
}

// behind is the span in which deadlines of at most length from now lie that were
// set behind a jump; it is empty when those set before it may lie there, too.
func behind(deltaUS, now, lengthUS int64) (from, to int64) {
	if max(deltaUS, -deltaUS) < lengthUS {
		return 0, 0
	}
	return now, now + lengthUS
}

// Attempt returns one attempt.
func (t *Tx) Attempt(ctx context.Context, job ci.JobID, epoch int64) (Attempt, bool, error) {
	return one(ctx, t, "AttemptGet", scanAttempt, job, epoch)
}

// AttemptByLease returns the attempt that a lease was issued for.
func (t *Tx) AttemptByLease(ctx context.Context, id ci.LeaseID) (Attempt, bool, error) {
	return one(ctx, t, "AttemptByLease", scanAttempt, id)
}

// ClaimKey names a claim request of a session.
type ClaimKey struct {
	Session ci.SessionID
	Request string
}

// AttemptsByClaim returns the attempts that were made for claim requests.
func (t *Tx) AttemptsByClaim(ctx context.Context, ks []ClaimKey) ([]Attempt, error) {
	m := make(map[string]any, len(ks))
	for i, k := range ks {
		m[itoa(i)] = map[string]any{"s": k.Session, "q": k.Request}
	}
	return query(ctx, t, "AttemptsByClaim", scanAttempt, object(m))
}

// AttemptKey names an attempt.
type AttemptKey struct {
	Job   ci.JobID
	Epoch int64
}

func attemptKeys(ks []AttemptKey) string {
	m := make(map[string]any, len(ks))
	for i, k := range ks {
		m[itoa(i)] = map[string]any{"j": k.Job, "e": k.Epoch}
	}
	return object(m)
}

// Attempts returns attempts.
func (t *Tx) Attempts(ctx context.Context, ks []AttemptKey) ([]Attempt, error) {
	return query(ctx, t, "AttemptsGet", scanAttempt, attemptKeys(ks))
}

// AttemptsOfJob returns a job's attempts by epoch.
func (t *Tx) AttemptsOfJob(ctx context.Context, job ci.JobID) ([]Attempt, error) {
	return query(ctx, t, "AttemptsOfJob", scanAttempt, job)
}

// SetPhases records phases of attempts whose lease is current, and the server's own
// limits on them.
func (t *Tx) SetPhases(ctx context.Context, rs []ci.LeaseRef, phases []ci.Phase, deadlineUS []int64, now int64) error {
	set := refs(rs, func(i int, f map[string]any) { f["p"], f["d"] = phases[i], deadlineUS[i] })
	if err := t.later(ctx, "AttemptsPhase", len(rs), "attempts", set, now); err != nil {
		return err
	}
	if err := t.later(ctx, "LeasesDeadline", len(rs), "leases", set, now); err != nil {
		return err
	}
	return t.later(ctx, "JobsPhase", len(rs), "jobs", set, now)
}

// EndAttempts writes how attempts ended; one that is finished is not touched.
func (t *Tx) EndAttempts(ctx context.Context, as []Attempt) error {
	m := make(map[string]any, len(as))
	for _, a := range as {
		m[string(a.Job)] = map[string]any{
			"e": a.Epoch, "state": a.State, "conclusion": a.Conclusion, "reason": a.Reason,
			"detail": a.Detail, "winner": a.Winner, "evidence": a.Evidence, "exit_code": a.ExitCode,
			"end_request": a.EndRequest, "end_digest": a.EndDigest, "end_answer": a.EndAnswer, "ended_us": a.EndedUS,
		}
	}
	return t.later(ctx, "AttemptsEnd", len(as), "attempts", object(m))
}

// SetEvidence records how termination of an ended attempt was proven.
func (t *Tx) SetEvidence(ctx context.Context, k AttemptKey, evidence string) error {
	_, err := t.exec(ctx, "AttemptEvidence", k.Job, k.Epoch, evidence)
	return err
}

// CancelAttempts marks running attempts as cancelling.
func (t *Tx) CancelAttempts(ctx context.Context, ks []AttemptKey) error {
	m := make(map[string]any, len(ks))
	for _, k := range ks {
		m[string(k.Job)] = map[string]any{"e": k.Epoch}
	}
	_, err := t.exec(ctx, "AttemptsCancelling", object(m))
	return err
}

// StepOf is a step record of an attempt.
type StepOf struct {
	Ref ci.LeaseRef
	Step
}

// UpsertSteps writes step records of attempts whose lease is current. Of several
// records of one step the last counts, and none behind a finished one: a quick
// step begins and ends in one batch, and PostgreSQL writes no row twice.
func (t *Tx) UpsertSteps(ctx context.Context, steps []StepOf, now int64) error {
	if len(steps) == 0 {
		return nil
	}
	type key struct {
		job        ci.JobID
		epoch, idx int64
	}
	at := map[key]int{}
	var last []StepOf
	for _, s := range steps {
		k := key{s.Ref.Job, s.Ref.Epoch, s.Index}
		switch i, again := at[k]; {
		case !again:
			at[k] = len(last)
			last = append(last, s)
		case last[i].State != ci.StateFinished:
			last[i] = s
		}
	}
	rs := make([]ci.LeaseRef, len(last))
	m := make(map[string]any, len(last))
	for i, s := range last {
		rs[i] = s.Ref
		m[itoa(i)] = map[string]any{
			"j": s.Ref.Job, "e": s.Ref.Epoch, "i": s.Index, "n": s.Name, "st": s.State,
			"c": s.Conclusion, "r": s.Reason, "x": s.ExitCode, "sg": s.Signal, "d": s.DurationUS,
		}
	}
	return t.later(ctx, "StepsUpsert", -1, "steps", refs(rs, nil), now, object(m))
}

// Steps returns the step records of an attempt.
func (t *Tx) Steps(ctx context.Context, k AttemptKey) ([]Step, error) {
	return query(ctx, t, "StepsOf", scanStep, k.Job, k.Epoch)
}

func scanAttemptKey(r scanner, v *AttemptKey) error { return r.Scan(&v.Job, &v.Epoch) }

// ReleaseOccupancy frees the slots of attempts that are proven to have ended.
func (t *Tx) ReleaseOccupancy(ctx context.Context, ks []AttemptKey) error {
	return t.later(ctx, "OccupancyRelease", -1, "slots", attemptKeys(ks))
}

// ReleaseOwnOccupancy is ReleaseOccupancy for attempts of one runner only.
func (t *Tx) ReleaseOwnOccupancy(ctx context.Context, id ci.RunnerID, ks []AttemptKey) ([]AttemptKey, error) {
	return query(ctx, t, "OccupancyReleaseOwn", scanAttemptKey, attemptKeys(ks), id)
}

// OccupancyOfRunner returns the attempts that take a slot of the runner, those
// that hold a lease included.
func (t *Tx) OccupancyOfRunner(ctx context.Context, id ci.RunnerID) ([]AttemptKey, error) {
	return query(ctx, t, "OccupancyOfRunner", scanAttemptKey, id)
}

// ReleaseRunnerOccupancy frees all slots of a fenced runner.
func (t *Tx) ReleaseRunnerOccupancy(ctx context.Context, id ci.RunnerID) ([]AttemptKey, error) {
	return query(ctx, t, "OccupancyReleaseRunner", scanAttemptKey, id)
}

// OccupiedJobs returns those of the jobs of which an attempt takes a slot: it runs,
// or is not proven to have ended.
func (t *Tx) OccupiedJobs(ctx context.Context, ids []ci.JobID) (map[ci.JobID]bool, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := query(ctx, t, "OccupiedJobs", func(r scanner, v *ci.JobID) error { return r.Scan(v) }, keys(ids))
	out := make(map[ci.JobID]bool, len(rows))
	for _, id := range rows {
		out[id] = true
	}
	return out, err
}

// RunOccupied reports whether an attempt of the run takes a slot.
func (t *Tx) RunOccupied(ctx context.Context, id ci.RunID) (bool, error) {
	n, _, err := one(ctx, t, "RunOccupied", func(r scanner, v *int64) error { return r.Scan(v) }, id)
	return n > 0, err
}

// Quarantine keeps the slots of attempts whose termination is not proven.
func (t *Tx) Quarantine(ctx context.Context, ks []AttemptKey) error {
	_, err := t.exec(ctx, "OccupancyQuarantine", attemptKeys(ks))
	return err
}

// EnsureRunner makes the runner with the public key, or renames it and replaces
// what it is granted.
func (t *Tx) EnsureRunner(ctx context.Context, r Runner, now int64) (Runner, error) {
	if _, err := t.exec(ctx, "RunnerInsert", r.ID, r.Org, r.Name, r.PublicKey, r.Granted, now); err != nil {
		return Runner{}, err
	}
	got, _, err := one(ctx, t, "RunnerByKey", scanRunner, r.Org, r.PublicKey)
	return got, err
}

// LockRunner locks and returns a runner.
func (t *Tx) LockRunner(ctx context.Context, id ci.RunnerID) (Runner, bool, error) {
	return one(ctx, t, "RunnerLock", scanRunner, id)
}

// SetRunnerStatus sets active, draining or fenced.
func (t *Tx) SetRunnerStatus(ctx context.Context, id ci.RunnerID, status string) error {
	_, err := t.exec(ctx, "RunnerStatus", id, status)
	return err
}

// InsertSession stores a new session, present, and makes it its runner's latest.
func (t *Tx) InsertSession(ctx context.Context, s Session) error {
	_, err := t.exec(ctx, "SessionInsert", s.ID, s.Org, s.Runner, s.RequestID, s.Offer, s.Slots, s.Protocol, s.Version, s.OpenedUS)
	if err == nil {
		_, err = t.exec(ctx, "RunnerSession", s.Runner, s.ID)
	}
	return err
}

// SessionByRequest returns the session that a request of the runner opened.
func (t *Tx) SessionByRequest(ctx context.Context, id ci.RunnerID, request string) (Session, bool, error) {
	return one(ctx, t, "SessionByRequest", scanSession, id, request)
}

// SessionsOfRunner returns the sessions of a runner that have not ended.
func (t *Tx) SessionsOfRunner(ctx context.Context, id ci.RunnerID) ([]Session, error) {
	return query(ctx, t, "SessionsOfRunner", scanSession, id)
}

// Session returns a session with its runner's status and occupancy.
func (t *Tx) Session(ctx context.Context, id ci.SessionID) (Session, bool, error) {
	return one(ctx, t, "SessionGet", scanSession, id)
}

// PresentSessions returns all present sessions.
func (t *Tx) PresentSessions(ctx context.Context) ([]Session, error) {
	return query(ctx, t, "SessionsPresent", scanSession)
}

// LockSessions locks sessions in order and returns them with their runners'
// status and occupancy as of now, so that slots are given out once.
func (t *Tx) LockSessions(ctx context.Context, ids []ci.SessionID) ([]Session, error) {
	set := keys(ids)
	if _, err := query(ctx, t, "SessionsLock", scanString, set); err != nil {
		return nil, err
	}
	return query(ctx, t, "SessionsGet", scanSession, set)
}

// Sessions returns sessions without locking them.
func (t *Tx) Sessions(ctx context.Context, ids []ci.SessionID) ([]Session, error) {
	return query(ctx, t, "SessionsGet", scanSession, keys(ids))
}

// DoubtSessions records that a node has not heard of present sessions for long.
func (t *Tx) DoubtSessions(ctx context.Context, ids []ci.SessionID, now int64) error {
	_, err := t.exec(ctx, "SessionsDoubt", keys(ids), now)
	return err
}

// HeardSessions takes doubts back.
func (t *Tx) HeardSessions(ctx context.Context, ids []ci.SessionID) error {
	_, err := t.exec(ctx, "SessionsHeard", keys(ids))
	return err
}

// GoneSessions records that sessions are not present any more that were doubted
// up to doubtedUS, silent for that long then, and that no node has heard of since.
// It returns which.
func (t *Tx) GoneSessions(ctx context.Context, ids []ci.SessionID, doubtedUS int64, silent time.Duration) ([]ci.SessionID, error) {
	return query(ctx, t, "SessionsGone", func(r scanner, v *ci.SessionID) error { return r.Scan(v) }, keys(ids), silent.Microseconds(), doubtedUS)
}

// SessionBack records that a session is present again.
func (t *Tx) SessionBack(ctx context.Context, id ci.SessionID) (bool, error) {
	n, err := t.exec(ctx, "SessionBack", id)
	return n == 1, err
}

// DrainSession marks a session as taking nothing new.
func (t *Tx) DrainSession(ctx context.Context, id ci.SessionID) error {
	_, err := t.exec(ctx, "SessionDrain", id)
	return err
}

// EndSession ends a session for good.
func (t *Tx) EndSession(ctx context.Context, id ci.SessionID, now int64) error {
	_, err := t.exec(ctx, "SessionEnd", id, now)
	return err
}
