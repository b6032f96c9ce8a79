package engine

import (
	"context"
	"errors"
	"sync"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Identity is the runner that a credential proves; it comes from auth only.
type Identity struct {
	Runner ci.RunnerID
	Org    ci.OrgID
}

// Held is a lease that the guard has found current for the caller. It cannot be
// made outside this package, so whatever takes a Held cannot be called without
// the guard. It is no promise about later: the transaction that commits an
// effect checks the whole tuple again.
type Held struct {
	ref        ci.LeaseRef
	org        ci.OrgID
	cancelling bool
}

// Ref returns the ownership tuple.
func (h Held) Ref() ci.LeaseRef { return h.ref }

// Org returns the tenant whose job this is.
func (h Held) Org() ci.OrgID { return h.org }

// Cancelling reports whether cancellation had been asked for.
func (h Held) Cancelling() bool { return h.cancelling }

// Access says what a lease route may do while its run is cancelling.
type Access bool

// Access modes.
const (
	// ActiveOnly: refused while cancelling.
	ActiveOnly Access = false
	// WhileCancelling: heartbeat, log append and the end of the attempt.
	WhileCancelling Access = true
)

// Hold is the guard: it proves that the caller holds the lease now. route names
// the call for the count of rejections.
func (e *Engine) Hold(ctx context.Context, who Identity, ref ci.LeaseRef, route string, access Access) (Held, error) {
	h, _, err := e.HoldOr(ctx, who, ref, route, access, func() (bool, error) { return false, nil })
	return h, err
}

// HoldOr is Hold for a call whose answer outlives the lease. When the lease is
// not current, repeated says whether the same request was answered before: then
// HoldOr reports true, and nothing was refused, so that nothing is counted.
func (e *Engine) HoldOr(ctx context.Context, who Identity, ref ci.LeaseRef, route string, access Access,
	repeated func() (bool, error),
) (Held, bool, error) {
	h, err := e.hold(ctx, who, ref, access)
	if err == nil {
		return h, false, nil
	}
	if ci.RejectOf(err) != ci.RejectNone {
		done, failed := repeated()
		if done {
			return Held{}, true, nil
		}
		if failed != nil {
			e.noteReject(who, ref, route, err)
			return Held{}, false, failed
		}
	}
	e.noteReject(who, ref, route, err)
	return Held{}, false, err
}

func (e *Engine) hold(ctx context.Context, who Identity, ref ci.LeaseRef, access Access) (Held, error) {
	lease, ok, err := e.leases.Get(ctx, ref.Job)
	if err != nil {
		return Held{}, err
	}
	var l *store.Lease
	if ok {
		l = &lease.Lease
	}
	reject := judge(who, ref, l, lease.now, access)
	if reject == ci.RejectNone {
		return Held{ref: ref, org: who.Org, cancelling: lease.Cancel != 0}, nil
	}
	err = e.Store.Read(ctx, func(tx *store.Tx) (err error) {
		reject, err = classify(ctx, tx, who, ref, l, reject)
		return err
	})
	if err != nil {
		return Held{}, err
	}
	return Held{}, ci.Rejected(reject)
}

// leaseAt is a live lease at the database's time now.
type leaseAt struct {
	store.Lease
	now int64
}

// leasesNow reads live leases with the time, for the guard.
func (e *Engine) leasesNow(ctx context.Context, jobs []ci.JobID) (map[ci.JobID]leaseAt, error) {
	out := make(map[ci.JobID]leaseAt, len(jobs))
	err := e.repairing(ctx, func(tx *store.Tx) error {
		clear(out)
		var leases []store.Lease
		now, err := e.clock.taken(func() (now int64, err error) {
			leases, now, err = tx.LeasesNow(ctx, jobs)
			return now, err
		})
		if err == nil {
			err = e.unseen(ctx, tx, leases, now)
		}
		for _, l := range leases {
			out[l.Job] = leaseAt{l, now}
		}
		return err
	})
	return out, err
}

// read runs fn on a connection that reads with the database's time; a jump of
// that clock is repaired first and fn runs again.
func (e *Engine) read(ctx context.Context, fn func(*store.Tx, int64) error) error {
	return e.repairing(ctx, func(tx *store.Tx) error {
		now, err := e.clock.read(ctx, tx)
		if err != nil {
			return err
		}
		return fn(tx, now)
	})
}

func (e *Engine) repairing(ctx context.Context, fn func(*store.Tx) error) error {
	for {
		err := e.Store.Read(ctx, fn)
		jump, ok := asClockJump(err)
		if !ok {
			return err
		}
		if err := e.shiftClock(ctx, jump); err != nil {
			return err
		}
	}
}

// judge compares the tuple with the current lease at the time now. It is the one
// place where Go says what the fragment lease_is_current says in SQL.
func judge(who Identity, ref ci.LeaseRef, l *store.Lease, now int64, access Access) ci.Reject {
	switch {
	case ref.Runner != who.Runner:
		return ci.RejectRunner
	case l == nil || l.Org != who.Org:
		return ci.RejectEnded
	case l.Run != ref.Run:
		return ci.RejectRun
	case l.Runner != ref.Runner:
		return ci.RejectRunner
	case l.Session != ref.Session:
		return ci.RejectSession
	case l.Epoch != ref.Epoch:
		return ci.RejectEpoch
	case l.ID != ref.Lease:
		return ci.RejectLease
	case l.ExpiresUS <= now:
		return ci.RejectExpired
	case l.Cancel != 0 && access == ActiveOnly:
		return ci.RejectCancelling
	default:
		return ci.RejectNone
	}
}

// classify finds the truest word for a lease that judge refused: it looks at the
// job and at the attempt that the lease ID was issued for. Another tenant's
// runner learns only that there is no such job.
func classify(ctx context.Context, tx *store.Tx, who Identity, ref ci.LeaseRef, l *store.Lease, found ci.Reject) (ci.Reject, error) {
	job, ok, err := tx.Job(ctx, ref.Job)
	if err != nil {
		return "", err
	}
	if !ok || job.Org != who.Org {
		return "", ci.Errorf(ci.ErrNotFound, "no job %s", ref.Job)
	}
	issued, ok, err := tx.AttemptByLease(ctx, ref.Lease)
	if err != nil {
		return "", err
	}
	if ok && issued.Org == who.Org && issued.Job != ref.Job {
		return ci.RejectJob, nil
	}
	if l != nil && l.Org == who.Org {
		return found, nil
	}
	// No live lease: say what differs from the attempt the tuple means.
	switch {
	case ref.Runner != who.Runner:
		return ci.RejectRunner, nil
	case job.Run != ref.Run:
		return ci.RejectRun, nil
	case !ok:
		return ci.RejectLease, nil
	case issued.Epoch != ref.Epoch:
		return ci.RejectEpoch, nil
	case issued.Runner != ref.Runner:
		return ci.RejectRunner, nil
	case issued.Session != ref.Session:
		return ci.RejectSession, nil
	}
	run, _, err := tx.Run(ctx, ref.Run)
	if err != nil {
		return "", err
	}
	if run.State == ci.StateFinished {
		return ci.RejectRunEnded, nil
	}
	return ci.RejectEnded, nil
}

// rejects gathers refused calls until the next transaction writes them.
type rejects struct {
	mu     sync.Mutex
	counts map[store.Rejection]int64 // N is 0 in the keys
	audits []store.Audit
}

func newRejects() *rejects { return &rejects{counts: map[store.Rejection]int64{}} }

// Most audit entries of refused calls kept between two writes; more are counted only.
const rejectAuditsMost = 1000

// Refused counts and audits a call that passed the guard, and that the store then
// refused as one of a lease that is not current any more. Another error is no refusal.
func (e *Engine) Refused(held Held, route string, err error) {
	if ci.RejectOf(err) != ci.RejectNone {
		e.noteReject(Identity{Runner: held.ref.Runner, Org: held.org}, held.ref, route, err)
	}
}

// noteReject counts and audits a refused lease call; it is written by the next
// sweep at the latest.
func (e *Engine) noteReject(who Identity, ref ci.LeaseRef, route string, err error) {
	reason := ci.RejectOf(err)
	if reason == ci.RejectNone {
		if !errors.Is(err, ci.ErrNotFound) {
			return
		}
		reason = ci.RejectNotFound
	}
	e.rejects.mu.Lock()
	e.rejects.counts[store.Rejection{Org: who.Org, Route: route, Reason: reason}]++
	a := store.Audit{
		Org: who.Org, Actor: string(who.Runner), Action: "rejected", Epoch: ref.Epoch,
		Object: string(ref.Lease), Detail: route + ": " + string(reason),
	}
	if reason != ci.RejectNotFound {
		a.Run, a.Job = ref.Run, ref.Job
	}
	if len(e.rejects.audits) < rejectAuditsMost {
		e.rejects.audits = append(e.rejects.audits, a)
	}
	e.rejects.mu.Unlock()
	e.Log.Warn("lease call refused", "route", route, "reason", reason, "runner", who.Runner, "job", ref.Job, "epoch", ref.Epoch)
	e.poke()
}

// FlushRejections writes the counts and audit entries of refused calls.
func (e *Engine) FlushRejections(ctx context.Context) error {
	e.rejects.mu.Lock()
	counts, audits := e.rejects.counts, e.rejects.audits
	e.rejects.counts, e.rejects.audits = map[store.Rejection]int64{}, nil
	e.rejects.mu.Unlock()
	if len(counts) == 0 {
		return nil
	}
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		rs := make([]store.Rejection, 0, len(counts))
		for k, n := range counts {
			k.N = n
			rs = append(rs, k)
		}
		t.audits = append(t.audits, audits...)
		return t.AddRejections(ctx, rs)
	})
	if err != nil {
		e.rejects.mu.Lock()
		for k, n := range counts {
			e.rejects.counts[k] += n
		}
		e.rejects.audits = append(audits, e.rejects.audits...)
		e.rejects.mu.Unlock()
	}
	return err
}
