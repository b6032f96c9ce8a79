package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// How many expired leases one transaction takes.
const expireMost = 100

// sweepLoop looks for expired leases, silent sessions and due backoffs at every
// SweepEvery, and at once when something asks for it.
func (e *Engine) sweepLoop(ctx context.Context) {
	every := time.NewTicker(ci.SweepEvery(e.LeaseTTL))
	defer every.Stop()
	for {
		full := true
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		case <-e.kick:
			full = false
		}
		if err := e.Sweep(ctx, full); err != nil && ctx.Err() == nil {
			e.Log.ErrorContext(ctx, "sweep failed; it is tried again", "error", err)
		}
	}
}

// poke makes the sweep look for due jobs and unwritten rejections now.
func (e *Engine) poke() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// dueAt pokes when a backoff of afterUS microseconds is over.
func (e *Engine) dueAt(afterUS int64) {
	time.AfterFunc(time.Duration(afterUS)*time.Microsecond+time.Millisecond, e.poke)
}

// Sweep does what time demands: writes counted rejections and opens jobs whose
// backoff is over; a full sweep also ends expired leases, ends the presence of
// silent sessions and gives back what no live session can serve. It may run on
// several nodes at once.
func (e *Engine) Sweep(ctx context.Context, full bool) error {
	// What fails by itself keeps nothing else from being done.
	var failed error
	do := func(f func(context.Context) error) { failed = errors.Join(failed, f(ctx)) }
	if full {
		do(e.Expire)
	}
	do(e.FlushRejections)
	if full {
		do(e.silentSessions)
		do(e.wakeOpen)
	}
	do(e.openDue)
	return failed
}

// wakeOpen wakes polls for whatever is open: a wake-up that was lost, or that
// another node would have had to send, costs a sweep's interval. What is open and
// served by nobody any more gives its admission back.
func (e *Engine) wakeOpen(ctx context.Context) error {
	var open []store.OpenCount
	err := e.Store.Read(ctx, func(tx *store.Tx) (err error) {
		open, err = tx.OpenCounts(ctx)
		return err
	})
	unserved := false
	for _, o := range open {
		e.hub.wake(claimable{o.Org, o.Shape}, e.fleet.offersOf(o.Shape), int(o.N))
		unserved = unserved || !e.fleet.serves(o.Org, o.Shape)
	}
	if err != nil || !unserved {
		return err
	}
	return e.transact(ctx, func(ctx context.Context, t *txn) error { return t.closeUnserved(ctx) })
}

// Expire ends leases that have run out in database time, and those past the
// server's own limit, before any replacement is authorised; what becomes of each
// job is policy's decision by phase. The slot stays taken until the runner
// reports termination or an operator fences it.
func (e *Engine) Expire(ctx context.Context) error {
	if err := e.shortenLeases(ctx); err != nil {
		return err
	}
	for {
		var expired []store.Lease
		err := e.read(ctx, func(tx *store.Tx, now int64) (err error) {
			expired, err = tx.ExpiredLeases(ctx, now, expireMost)
			return err
		})
		if err != nil || len(expired) == 0 {
			return err
		}
		err = e.transact(ctx, func(ctx context.Context, t *txn) error {
			return t.endAgainst(ctx, expired, "", func(l store.Lease, now int64) (ci.Reason, bool) {
				switch {
				case l.DeadlineUS > 0 && l.DeadlineUS <= now:
					return ci.ReasonOverdue, true
				case l.ExpiresUS > now:
					return "", false // renewed in the meantime
				case e.fleet.beatWithin(l.Session, e.LeaseTTL):
					return ci.ReasonLeaseOmitted, true
				default:
					return ci.ReasonRunnerLost, true
				}
			}, actorServer)
		})
		if err != nil || len(expired) < expireMost {
			return err
		}
	}
}

// shortenLeases gives a TTL from now to leases that would live for more than two:
// the database's clock was set back while no server looked, and none was promised.
func (e *Engine) shortenLeases(ctx context.Context) error {
	var longest, limit int64
	err := e.read(ctx, func(tx *store.Tx, now int64) (err error) {
		longest, err = tx.LongestLease(ctx)
		limit = now + 2*e.ttlUS()
		return err
	})
	if err != nil || longest <= limit {
		return err
	}
	return e.transact(ctx, func(ctx context.Context, t *txn) error {
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		n, err := t.ShortenLeases(ctx, now+2*e.ttlUS(), now+e.ttlUS())
		if err == nil && n > 0 {
			t.say("leases shortened: the database's clock was set back", "leases", n)
		}
		return err
	})
}

// endAgainst ends leases without their holders. why is asked under the locks. With
// an empty evidence the slots stay quarantined of attempts whose end is not
// proven otherwise.
func (t *txn) endAgainst(ctx context.Context, found []store.Lease, evidence string, why func(store.Lease, int64) (ci.Reason, bool), actor string) error {
	var runs []ci.RunID
	var jobs []ci.JobID
	for _, l := range found {
		runs = append(runs, l.Run)
		jobs = append(jobs, l.Job)
	}
	b, leases, err := t.lockBoard(ctx, runs, jobs)
	if err != nil {
		return err
	}
	specs, err := t.Specs(ctx, jobs)
	if err != nil {
		return err
	}
	proven, err := t.proven(ctx, leases)
	if err != nil {
		return err
	}
	var endings []*ending
	for _, f := range found {
		l := leases[f.Job]
		if l == nil || l.Ref() != f.Ref() {
			continue
		}
		cause, ok := why(*l, b.now)
		if !ok {
			continue
		}
		j := b.jobs[l.Job]
		spec, err := decodeSpec(specs[l.Job])
		if err != nil {
			return err
		}
		outcome := policy.Lost(cause, j.Phase, t.e.retryPolicy(spec, *b.runs[l.Run]), used(j), t.e.InfraBudget)
		if cause == ci.ReasonOverdue {
			limit := t.e.overdueAfter(j)
			outcome.Detail = fmt.Sprintf("the server's limit of %s is reached (%s for the phase, %s grace, a lease TTL of %s): %s", ci.Duration(limit),
				ci.Duration(limit-t.e.Grace-t.e.LeaseTTL), ci.Duration(t.e.Grace), ci.Duration(t.e.LeaseTTL), outcome.Detail)
		}
		endings = append(endings, &ending{
			lease: *l, job: j, actor: actor, conclusion: ci.ConclusionAborted, reason: cause,
			evidence: cmp.Or(evidence, proven[l.Job]), outcome: outcome,
		})
	}
	if len(endings) == 0 {
		return nil
	}
	return t.applyEndings(ctx, b, endings)
}

// proven returns why nothing runs any more of attempts whose leases end without
// their holders: the runner has reported it, or no phase was recorded, so nothing
// was begun, and under the fence nothing will be. So it is with a ticket that
// never arrived, or that a late duplicate of an answered claim took.
func (t *txn) proven(ctx context.Context, leases map[ci.JobID]*store.Lease) (map[ci.JobID]string, error) {
	keys := make([]store.AttemptKey, 0, len(leases))
	for _, l := range leases {
		keys = append(keys, store.AttemptKey{Job: l.Job, Epoch: l.Epoch})
	}
	attempts, err := t.Attempts(ctx, keys)
	out := make(map[ci.JobID]string, len(attempts))
	for _, a := range attempts {
		out[a.Job] = a.Evidence
		if a.Evidence == "" && a.Phase == ci.PhaseClaimed {
			out[a.Job] = evidenceUnstarted
		}
	}
	return out, err
}

// silentSessions ends the presence of sessions that have neither polled nor
// renewed for a TTL, at any node, and closes what only they could serve. A node
// knows what it heard itself: two sweeps before the end of the TTL it doubts a
// silent session, in its row; a node that hears of it takes the doubt back at its
// own next sweep; what stays doubted for two sweeps is gone.
func (e *Engine) silentSessions(ctx context.Context) error {
	err := e.repairing(ctx, func(tx *store.Tx) error { return e.refreshFleet(ctx, tx) })
	if err != nil {
		return err
	}
	if err := e.bringBack(ctx); err != nil {
		return err
	}
	e.hub.keepUnheard(e.fleet.present)
	sweeps := 2 * ci.SweepEvery(e.LeaseTTL)
	heard, fresh, doubted := e.fleet.doubts(e.heardWithin())
	if len(heard)+len(fresh)+len(doubted) == 0 {
		return nil
	}
	var gone []ci.SessionID
	err = e.transact(ctx, func(ctx context.Context, t *txn) error {
		gone = nil
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		if len(heard) > 0 {
			if err := t.HeardSessions(ctx, heard); err != nil {
				return err
			}
		}
		if len(fresh) > 0 {
			if err := t.DoubtSessions(ctx, fresh, now); err != nil {
				return err
			}
		}
		if len(doubted) == 0 {
			return nil
		}
		gone, err = t.GoneSessions(ctx, doubted, now-sweeps.Microseconds(), e.heardWithin())
		if err != nil || len(gone) == 0 {
			return err
		}
		for _, id := range gone {
			t.say("session gone: its runner has neither polled nor renewed", "session", id)
		}
		return t.closeUnserved(ctx)
	})
	if err != nil {
		return err
	}
	for _, id := range gone {
		e.fleet.remove(id)
	}
	return nil
}

// bringBack makes sessions present again that this node hears of and that another has
// taken for gone: the doubt stood for two sweeps of the other's, and this node may have
// had none, since the database was away. Those that have ended are forgotten.
func (e *Engine) bringBack(ctx context.Context) error {
	strays := e.fleet.strays()
	if len(strays) == 0 {
		return nil
	}
	found, err := e.sessionsNow(ctx, strays)
	if err != nil {
		return err
	}
	for _, id := range strays {
		if s, ok := found[id]; ok && s.State != "ended" {
			if err := e.sessionBack(ctx, s); err != nil {
				return err
			}
			continue
		}
		e.fleet.remove(id)
	}
	return nil
}

// closeUnserved gives admissions back for open jobs that nobody can claim.
func (t *txn) closeUnserved(ctx context.Context) error {
	closed, err := t.CloseUnserved(ctx)
	if err != nil {
		return err
	}
	for org, n := range closed {
		t.releaseAdmission(org, n)
	}
	return nil
}

// openDue opens held jobs that may be claimed now.
func (e *Engine) openDue(ctx context.Context) error {
	var orgs []ci.OrgID
	err := e.read(ctx, func(tx *store.Tx, now int64) (err error) {
		orgs, err = tx.HeldOrgs(ctx, now, now+policy.MaxBackoff.Microseconds())
		return err
	})
	if err != nil || len(orgs) == 0 {
		return err
	}
	return e.transact(ctx, func(_ context.Context, t *txn) error {
		for _, o := range orgs {
			t.reopenFor(o)
		}
		return nil
	})
}
