package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// claimOp is one claim in a batch.
type claimOp struct {
	who     Identity
	session ci.SessionID
	request string

	lease   *ci.LeaseRef // the answer; nil = nothing to do
	blocked bool         // the session cannot take a job now
	drains  bool         // it takes none any more
	looked  bool         // for a job: it was not blocked, nor answered before
	err     *error
}

// blockedPause is how long a poll whose session cannot take a job is left out of
// the wake-ups.
const blockedPause = time.Second

// MaxPoll bounds how long a claim may wait.
const MaxPoll = 60 * time.Second

// Most polls that one session may have open. A runner needs one, and some more
// while the server has not noticed that earlier ones have lost their caller; each
// costs about 36 KiB.
const pollsMost = 100

// Claim gives the session the best job it can serve, waiting up to wait for one;
// nil means there was none. In one transaction it checks that the run is active,
// the job ready in its current generation and the runner has a free slot, makes
// the attempt with the next epoch, its lease and its occupancy. The same session
// asking again with the same request ID gets the same lease while it is current
// and ErrLeaseLost afterwards, never a second job.
func (e *Engine) Claim(ctx context.Context, who Identity, req protocol.Claim) (*protocol.Ticket, error) {
	if req.RequestID == "" || len(req.RequestID) > 128 {
		return nil, ci.Errorf(ci.ErrInvalid, "request_id: 1 to 128 characters are needed")
	}
	deadline := time.NewTimer(min(max(req.Wait.Std(), 0), MaxPoll))
	defer deadline.Stop()
	session, err := e.claimer(ctx, who, req.Session)
	if err != nil {
		return nil, err
	}
	defer e.fleet.polling(session.ID, -1)
	if e.fleet.polling(session.ID, 1) > pollsMost {
		return nil, &ci.Error{
			Kind: ci.ErrRateLimited, RetryAfter: time.Second,
			Detail: fmt.Sprintf("the session has more than %d open polls: wait for their answers", pollsMost),
		}
	}
	key := store.ClaimKey{Session: req.Session, Request: req.RequestID}
	p, stop := e.hub.listen(who.Org, session.Offer, key)
	var hint claimable // that woke the poll, until it has looked
	defer func() {
		e.passOn(stop())
		e.passOn(hint)
	}()
	// Behind the listening: what is opened from now on is heard of.
	work, err := e.look(ctx, session, key)
	if err != nil {
		return nil, err
	}
	var again <-chan time.Time // a blocked session looks again
	for {
		if work {
			op := &claimOp{who: who, session: req.Session, request: req.RequestID}
			if err := e.writer.do(ctx, &request{claim: op, done: make(chan struct{})}); err != nil {
				return nil, err
			}
			if op.blocked {
				e.hub.deafen(p)
				again = time.After(blockedPause)
			}
			if !op.looked {
				e.passOn(hint)
			}
			hint = claimable{}
			if op.lease != nil {
				e.passOn(stop())                        // a hint that comes from now on is for another poll
				if e.fleet.polling(session.ID, 0) > 1 { // only the session itself repeats its claims
					e.hub.granted(key)
				}
				return e.ticket(ctx, *op.lease)
			}
			if op.drains {
				return nil, nil
			}
		}
		if req.Wait.Std() <= 0 || drains(session) {
			return nil, nil // a claim that does not wait looks once
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-deadline.C:
			// A repeat of this claim may have taken a job, here or on another node, and
			// its caller may be gone: the caller who is still there gets that job.
			if work, err = e.wasGranted(ctx, key); err != nil || !work {
				return nil, err
			}
			req.Wait = 0
		case <-again:
			again = nil
			e.hub.hear(p)
			if session, err = e.claimer(ctx, who, req.Session); err != nil {
				return nil, err
			}
			if work, err = e.look(ctx, session, key); err != nil {
				return nil, err
			}
		case hint = <-p.woken:
			work = true
			if e.hub.isClosed() {
				return nil, nil
			}
		}
	}
}

// wasGranted says whether a claim has taken a job.
func (e *Engine) wasGranted(ctx context.Context, key store.ClaimKey) (bool, error) {
	var old []store.Attempt
	err := e.Store.Read(ctx, func(tx *store.Tx) (err error) {
		old, err = tx.AttemptsByClaim(ctx, []store.ClaimKey{key})
		return err
	})
	return len(old) > 0, err
}

// claimer returns the session of a claim and notes that it was heard of.
func (e *Engine) claimer(ctx context.Context, who Identity, id ci.SessionID) (s store.Session, err error) {
	s, ok, err := e.sessions.Get(ctx, id)
	if err == nil {
		err = mayClaim(s, ok, who)
	}
	if err == nil && !e.fleet.seen(s.ID, false) {
		err = e.sessionBack(ctx, s)
	}
	return s, err
}

func (e *Engine) sessionsNow(ctx context.Context, ids []ci.SessionID) (map[ci.SessionID]store.Session, error) {
	out := make(map[ci.SessionID]store.Session, len(ids))
	err := e.Store.Read(ctx, func(tx *store.Tx) error {
		ss, err := tx.Sessions(ctx, ids)
		for _, s := range ss {
			out[s.ID] = s
		}
		return err
	})
	return out, err
}

// look is the question whether a claim is worth a transaction.
type look struct {
	claim store.ClaimKey
	org   ci.OrgID
	offer string
}

func (e *Engine) look(ctx context.Context, s store.Session, key store.ClaimKey) (bool, error) {
	work, _, err := e.looks.Get(ctx, look{key, s.Org, s.Offer})
	return work, err
}

// claimable looks, without locks, which claims are worth a transaction: an idle
// poll writes nothing.
func (e *Engine) claimable(ctx context.Context, ls []look) (map[look]bool, error) {
	type served struct {
		org   ci.OrgID
		offer string
	}
	out := make(map[look]bool, len(ls))
	err := e.Store.Read(ctx, func(tx *store.Tx) error {
		keys := make([]store.ClaimKey, len(ls))
		for i, l := range ls {
			keys[i] = l.claim
		}
		old, err := tx.AttemptsByClaim(ctx, keys)
		if err != nil {
			return err
		}
		made := make(map[store.ClaimKey]bool, len(old))
		for _, a := range old {
			made[store.ClaimKey{Session: a.Session, Request: a.ClaimRequest}] = true
		}
		open := map[served]bool{}
		for _, l := range ls {
			of := served{l.org, l.offer}
			if _, known := open[of]; !known && !made[l.claim] {
				shapes, err := tx.OpenShapes(ctx, l.org, l.offer)
				if err != nil {
					return err
				}
				open[of] = len(shapes) > 0
			}
			out[l] = made[l.claim] || open[of]
		}
		return nil
	})
	return out, err
}

func mayClaim(s store.Session, ok bool, who Identity) error {
	switch {
	case !ok || s.Org != who.Org || s.Runner != who.Runner:
		return ci.Errorf(ci.ErrNotFound, "no such session of this runner")
	case s.State == "ended":
		return ci.Errorf(ci.ErrConflict, "the session has ended: open a new one")
	case s.Status == "fenced":
		return ci.Errorf(ci.ErrConflict, "the runner was fenced by an operator: open a new session")
	}
	return nil
}

func (h *hub) isClosed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closed
}

// lockClaimers locks the claimers' sessions, the first in the order of locks.
func (t *txn) lockClaimers(ctx context.Context, ops []*claimOp) (map[ci.SessionID]*store.Session, error) {
	if len(ops) == 0 {
		return nil, nil
	}
	ids := make([]ci.SessionID, len(ops))
	for i, op := range ops {
		op.lease, op.blocked, op.drains, op.looked = nil, false, false, false
		ids[i] = op.session
	}
	rows, err := t.LockSessions(ctx, ids)
	out := make(map[ci.SessionID]*store.Session, len(rows))
	for i := range rows {
		out[rows[i].ID] = &rows[i]
	}
	return out, err
}

// claimBatch answers claims: repeats first, then by offer the best open jobs.
func (t *txn) claimBatch(ctx context.Context, ops []*claimOp, sessions map[ci.SessionID]*store.Session) error {
	if len(ops) == 0 {
		return nil
	}
	fresh, err := t.repeatClaims(ctx, ops)
	if err != nil {
		return err
	}
	// Slots are counted per runner: its sessions share them.
	free := map[ci.RunnerID]int64{}
	// Offers are interned across tenants: a runner is given its own tenant's jobs.
	type group struct {
		org   ci.OrgID
		offer string
	}
	groups := map[group][]*claimOp{}
	for _, op := range fresh {
		s := sessions[op.session]
		if s == nil {
			*op.err = ci.Errorf(ci.ErrNotFound, "no such session of this runner")
			continue
		}
		if err := mayClaim(*s, true, op.who); err != nil {
			*op.err = err
			continue
		}
		if _, ok := free[s.Runner]; !ok {
			free[s.Runner] = s.Slots - s.Occupied
		}
		if s.State != "open" || s.Status != "active" || free[s.Runner] <= 0 {
			op.blocked, op.drains = true, drains(*s)
			continue
		}
		free[s.Runner]--
		op.looked = true
		g := group{s.Org, s.Offer}
		groups[g] = append(groups[g], op)
	}
	order := make([]group, 0, len(groups))
	for g := range groups {
		order = append(order, g)
	}
	slices.SortFunc(order, func(a, b group) int { return cmp.Or(cmp.Compare(a.org, b.org), cmp.Compare(a.offer, b.offer)) })
	for _, g := range order {
		if err := t.claimOffer(ctx, g.org, g.offer, groups[g], sessions); err != nil {
			return err
		}
	}
	return nil
}

// repeatClaims answers requests that were answered before and returns the others.
func (t *txn) repeatClaims(ctx context.Context, ops []*claimOp) ([]*claimOp, error) {
	ks := make([]store.ClaimKey, len(ops))
	for i, op := range ops {
		ks[i] = store.ClaimKey{Session: op.session, Request: op.request}
	}
	old, err := t.AttemptsByClaim(ctx, ks)
	if err != nil {
		return nil, err
	}
	if len(old) == 0 {
		return firstOfEach(ops), nil
	}
	made := map[store.ClaimKey]store.Attempt{}
	jobs := make([]ci.JobID, 0, len(old))
	for _, a := range old {
		made[store.ClaimKey{Session: a.Session, Request: a.ClaimRequest}] = a
		jobs = append(jobs, a.Job)
	}
	leases, err := t.LockLeases(ctx, jobs)
	if err != nil {
		return nil, err
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.e.unseen(ctx, t.Tx, leases, now); err != nil {
		return nil, err
	}
	var fresh []*claimOp
	for i, op := range ops {
		a, ok := made[ks[i]]
		if !ok {
			fresh = append(fresh, op)
			continue
		}
		*op.err = ci.Rejected(ci.RejectEnded)
		for _, l := range leases {
			if judge(op.who, a.Ref(), &l, now, WhileCancelling) == ci.RejectNone {
				ref := a.Ref()
				op.lease, *op.err = &ref, nil
			}
		}
	}
	return firstOfEach(fresh), nil
}

// firstOfEach drops simultaneous repeats of one request: the later ones are told
// to ask again and then get the first one's answer.
func firstOfEach(ops []*claimOp) []*claimOp {
	seen := map[store.ClaimKey]bool{}
	var out []*claimOp
	for _, op := range ops {
		k := store.ClaimKey{Session: op.session, Request: op.request}
		if seen[k] {
			*op.err = &ci.Error{Kind: ci.ErrUnavailable, Detail: "the same claim is being answered; ask again"}
			continue
		}
		seen[k] = true
		out = append(out, op)
	}
	return out
}

// claimOffer gives a tenant's best open jobs of an offer's shapes to its claimers.
func (t *txn) claimOffer(ctx context.Context, org ci.OrgID, offer string, ops []*claimOp, sessions map[ci.SessionID]*store.Session) error {
	shapes, err := t.OpenShapes(ctx, org, offer)
	if err != nil || len(shapes) == 0 {
		return err
	}
	type head struct {
		store.Queued
		shape string
	}
	var heads []head
	for _, s := range shapes {
		best, err := t.LockHeads(ctx, s, org, len(ops))
		if err != nil {
			return err
		}
		for _, h := range best {
			heads = append(heads, head{h, s})
		}
	}
	slices.SortFunc(heads, func(a, b head) int {
		return cmp.Or(cmp.Compare(a.Prio, b.Prio), cmp.Compare(a.VFT, b.VFT), cmp.Compare(a.Job, b.Job))
	})
	for len(heads) > len(ops) {
		// Until the commit it is locked: another node passes over it, and its hint is
		// spent. So is the one that made this claim, if it was for this job.
		t.wake(org, heads[len(heads)-1].shape)
		heads = heads[:len(heads)-1]
	}
	if len(heads) == 0 {
		return nil
	}
	ids := make([]ci.JobID, len(heads))
	for i, h := range heads {
		ids[i] = h.Job
	}
	if err := t.TakeQueued(ctx, ids); err != nil {
		return err
	}
	locked, err := t.LockJobs(ctx, ids)
	if err != nil {
		return err
	}
	jobs := make(map[ci.JobID]*store.Job, len(locked))
	for i := range locked {
		jobs[locked[i].ID] = &locked[i]
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return err
	}
	var attempts []store.NewAttempt
	var changed []*store.Job
	runs := map[ci.RunID]bool{}
	for i, h := range heads {
		j, op := jobs[h.Job], ops[i]
		if j == nil || j.State != ci.StateReady || j.Generation != h.Generation {
			t.releaseAdmission(h.Org, 1) // a row that says nothing true any more
			continue
		}
		s := sessions[op.session]
		j.State, j.Phase = ci.StateRunning, ci.PhaseClaimed
		j.Epoch++
		ref := ci.LeaseRef{Run: j.Run, Job: j.ID, Runner: s.Runner, Session: s.ID, Lease: t.e.newLeaseID(), Epoch: j.Epoch}
		attempts = append(attempts, store.NewAttempt{Ref: ref, Org: j.Org, ClaimRequest: op.request, DeadlineUS: t.e.deadline(j, now)})
		changed = append(changed, j)
		runs[j.Run] = true
		op.lease = &ref
		t.e.fleet.claimed(h.VFT)
		t.changedRun(j.Org, j.Run)
		t.record(store.Audit{
			Org: j.Org, Actor: string(s.Runner), Action: "claimed", Run: j.Run, Job: j.ID, Epoch: j.Epoch,
			Object: string(ref.Lease), Detail: "by " + s.RunnerName,
		})
		t.say("job claimed", "job", j.ID, "run", j.Run, "epoch", j.Epoch, "runner", s.Runner)
	}
	if len(attempts) == 0 {
		return nil
	}
	if err := t.UpdateJobs(ctx, changed); err != nil {
		return err
	}
	if err := t.InsertAttempts(ctx, attempts, now, now+t.e.ttlUS()); err != nil {
		return err
	}
	ids2 := make([]ci.RunID, 0, len(runs))
	for id := range runs {
		ids2 = append(ids2, id)
	}
	return t.StartRuns(ctx, ids2, now)
}

// ticket renders what the runner needs to know; all of it is frozen by now.
func (e *Engine) ticket(ctx context.Context, ref ci.LeaseRef) (*protocol.Ticket, error) {
	t := &protocol.Ticket{Lease: ref, LeaseTTL: ci.Duration(e.LeaseTTL), Grace: ci.Duration(e.Grace)}
	row, ok, err := e.tickets.Get(ctx, ref.Job)
	if err != nil || !ok {
		return nil, errors.Join(err, noRow(ok))
	}
	if err := json.Unmarshal([]byte(row.Spec), &t.Job); err != nil {
		return nil, err
	}
	var plan ci.Plan
	if err := json.Unmarshal([]byte(row.Run.Plan), &plan); err != nil {
		return nil, err
	}
	t.OperationID = row.OperationID
	t.Source = protocol.Source{Digest: row.Source.Digest, Blob: row.Source.BlobDigest, Size: row.Source.Size}
	t.Run = protocol.RunInfo{
		Number: row.Run.Number, Repo: row.RepoName, Workflow: row.Run.Workflow, Path: row.Run.Path, Event: row.Run.Event,
		CommitSHA: row.Run.CommitSHA, Ref: row.Run.Ref, Message: row.Run.Message, Author: row.Run.Author, ParentRun: row.Run.Parent,
		Trust: row.Run.Trust, Inputs: plan.Inputs, URL: e.RunURL(ref.Run),
	}
	if len(t.Job.Needs)+len(t.Job.Restore) == 0 {
		return t, nil
	}
	err = e.Store.Read(ctx, func(tx *store.Tx) (err error) {
		if len(t.Job.Needs) > 0 {
			needs, err := tx.NeedsOf(ctx, []ci.JobID{ref.Job})
			if err != nil {
				return err
			}
			t.Needs = needResults(needs[ref.Job])
		}
		t.Restore, err = restores(ctx, tx, ref.Run, t.Job)
		return err
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// ticketRows reads what tickets of jobs say.
func (e *Engine) ticketRows(ctx context.Context, jobs []ci.JobID) (out map[ci.JobID]store.Ticket, err error) {
	err = e.Store.Read(ctx, func(tx *store.Tx) error {
		out, err = tx.Tickets(ctx, jobs)
		return err
	})
	return out, err
}

func noRow(ok bool) error {
	if ok {
		return nil
	}
	return errors.New("engine: the job, run, repository or source of a lease is missing")
}

// RunURL is where people look at a run.
func (e *Engine) RunURL(id ci.RunID) string {
	if e.URL == "" {
		return ""
	}
	return e.URL + "/runs/" + string(id)
}

// restores resolves what the job restores to the bindings of its producers. One
// that is missing is left out: the runner says so and fails explicitly.
func restores(ctx context.Context, tx *store.Tx, run ci.RunID, spec ci.JobSpec) ([]protocol.RestoreArtifact, error) {
	if len(spec.Restore) == 0 {
		return nil, nil
	}
	bindings, err := tx.BindingsOfRun(ctx, run)
	if err != nil {
		return nil, err
	}
	jobs, err := tx.JobsOfRun(ctx, run)
	if err != nil {
		return nil, err
	}
	var out []protocol.RestoreArtifact
	for _, want := range spec.Restore {
		for _, j := range jobs {
			if j.Key != want.FromJob && j.Name != want.FromJob {
				continue
			}
			for _, b := range bindings {
				if b.Job == j.ID && b.Name == want.Name {
					out = append(out, protocol.RestoreArtifact{
						ID: b.Artifact.ID, Name: want.Name, Path: want.Path,
						Digest: b.Artifact.Digest, Size: b.Artifact.Size,
					})
				}
			}
		}
	}
	return out, nil
}
