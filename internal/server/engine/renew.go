package engine

import (
	"context"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// renewOp is one heartbeat: all leases of one session.
type renewOp struct {
	who     Identity
	session ci.SessionID
	refs    []ci.LeaseRef
	answers []protocol.HeartbeatLease
	err     error
	done    chan struct{}
}

// renewals merges the heartbeats of many runners into one statement, on a
// connection of their own: they never wait for the writer.
type renewals struct {
	e       *Engine
	in      chan *renewOp
	running atomic.Bool
	stopped chan struct{}
}

const (
	renewMost  = 1000                  // leases in one statement
	renewPause = 20 * time.Millisecond // how long a heartbeat waits for others
)

func newRenewals(e *Engine) *renewals {
	return &renewals{e: e, in: make(chan *renewOp, 1024), stopped: make(chan struct{})}
}

// MaxHeartbeat is the most leases that one heartbeat may carry.
const MaxHeartbeat = 1000

// Renew answers a heartbeat: each lease by itself, renewed, cancel or lost; all
// of it is committed before the answer. It also says whether the runner shall
// drain. A session of another runner keeps nothing alive: each lease is then
// refused with its own word, and no sign of life is taken from it. Whatever is
// refused is counted and audited, lease by lease.
func (e *Engine) Renew(ctx context.Context, who Identity, session ci.SessionID, refs []ci.LeaseRef) (protocol.HeartbeatReply, error) {
	if len(refs) > MaxHeartbeat {
		return protocol.HeartbeatReply{}, ci.Errorf(ci.ErrTooLarge, "a heartbeat carries at most %d leases", MaxHeartbeat)
	}
	if err := validRefs(refs); err != nil {
		return protocol.HeartbeatReply{}, err
	}
	s, ok, err := e.sessionIn(ctx, who.Org, session)
	if err != nil {
		return protocol.HeartbeatReply{}, err
	}
	own := ok && s.Runner == who.Runner
	if !ok || !own && len(refs) == 0 {
		for _, ref := range refs {
			e.noteReject(who, ref, "heartbeat", errNoSession())
		}
		return protocol.HeartbeatReply{}, errNoSession()
	}
	op := &renewOp{who: who, session: session, refs: refs, done: make(chan struct{})}
	if err := e.renewals.do(ctx, op); err != nil {
		return protocol.HeartbeatReply{}, err
	}
	for i, a := range op.answers {
		if a.Answer == protocol.LeaseGone {
			e.noteReject(who, refs[i], "heartbeat", ci.Rejected(a.Reject))
		}
	}
	if !own {
		return protocol.HeartbeatReply{Leases: op.answers}, nil
	}
	if !e.fleet.seen(session, true) {
		if err := e.sessionBack(ctx, s); err != nil {
			return protocol.HeartbeatReply{}, err
		}
		e.fleet.seen(session, true)
	}
	return protocol.HeartbeatReply{Leases: op.answers, Drain: drains(s)}, nil
}

// drains reports whether a session's runner was asked to take nothing new. The end
// of a session asks for nothing: the runner has opened another, and goes on in it
// with the jobs of this one. Nor does a fence: what it held is over, and the runner
// may come back with a new session.
func drains(s store.Session) bool { return s.State == "draining" || s.Status == "draining" }

// ownSession requires a session of the caller.
func (e *Engine) ownSession(ctx context.Context, who Identity, id ci.SessionID) error {
	s, ok, err := e.sessionIn(ctx, who.Org, id)
	if err == nil && (!ok || s.Runner != who.Runner) {
		return errNoSession()
	}
	return err
}

// sessionIn returns a session of a tenant.
func (e *Engine) sessionIn(ctx context.Context, org ci.OrgID, id ci.SessionID) (s store.Session, ok bool, err error) {
	err = e.Store.Read(ctx, func(tx *store.Tx) (err error) {
		s, ok, err = tx.Session(ctx, id)
		return err
	})
	return s, ok && s.Org == org, err
}

func errNoSession() *ci.Error { return ci.Errorf(ci.ErrNotFound, "no such session of this runner") }

func (r *renewals) do(ctx context.Context, op *renewOp) error {
	if len(op.refs) == 0 {
		return nil
	}
	if !r.running.Load() {
		r.apply(ctx, []*renewOp{op})
		return op.err
	}
	select {
	case r.in <- op:
	case <-ctx.Done():
		return ctx.Err()
	case <-r.stopped:
		return errStopping()
	}
	select {
	case <-op.done:
		return op.err
	case <-ctx.Done():
		return ctx.Err()
	case <-r.stopped:
		select {
		case <-op.done:
			return op.err
		default:
			return errStopping()
		}
	}
}

func (r *renewals) run(ctx context.Context) {
	r.running.Store(true)
	defer close(r.stopped)
	work := context.WithoutCancel(ctx)
	for {
		var batch []*renewOp
		select {
		case op := <-r.in:
			batch = append(batch, op)
		case <-ctx.Done():
			return
		}
		pause(ctx, renewPause)
		n := len(batch[0].refs)
	gather:
		for n < renewMost {
			select {
			case op := <-r.in:
				batch = append(batch, op)
				n += len(op.refs)
			default:
				break gather
			}
		}
		r.apply(work, batch)
	}
}

// apply renews in one transaction: locks the leases, reads the time, extends the
// current ones, and words each refusal.
func (r *renewals) apply(ctx context.Context, batch []*renewOp) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err := r.e.commit(ctx, func(t *txn) error {
		var jobs []ci.JobID
		for _, op := range batch {
			op.answers = make([]protocol.HeartbeatLease, len(op.refs))
			for _, ref := range op.refs {
				jobs = append(jobs, ref.Job)
			}
		}
		rows, err := t.LockLeases(ctx, jobs)
		if err != nil {
			return err
		}
		leases := make(map[ci.JobID]*store.Lease, len(rows))
		for i := range rows {
			leases[rows[i].Job] = &rows[i]
		}
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		if err := r.e.unseen(ctx, t.Tx, rows, now); err != nil {
			return err
		}
		var good []ci.LeaseRef
		named := map[ci.LeaseRef]bool{}
		for _, op := range batch {
			for i, ref := range op.refs {
				a := &op.answers[i]
				reject := judge(op.who, ref, leases[ref.Job], now, WhileCancelling)
				if reject == ci.RejectNone && ref.Session != op.session {
					reject = ci.RejectSession
				}
				if reject == ci.RejectNone {
					if !named[ref] { // one that is named twice is answered below all the same
						named[ref] = true
						good = append(good, ref)
					}
					continue
				}
				a.Answer = protocol.LeaseGone
				if a.Reject, err = classify(ctx, t.Tx, op.who, ref, leases[ref.Job], reject); err != nil {
					if ci.KindOf(err) != ci.ErrNotFound {
						return err
					}
					a.Reject = ci.RejectNotFound
				}
			}
		}
		if len(good) == 0 {
			return nil
		}
		renewed, err := t.RenewLeases(ctx, good, now, now+r.e.ttlUS())
		if err != nil {
			return err
		}
		for _, op := range batch {
			for i, ref := range op.refs {
				if op.answers[i].Answer != "" {
					continue
				}
				switch cancel, ok := renewed[ref.Job]; {
				case !ok:
					op.answers[i] = protocol.HeartbeatLease{Answer: protocol.LeaseGone, Reject: ci.RejectEnded}
				case cancel:
					op.answers[i].Answer = protocol.LeaseCancel
				default:
					op.answers[i].Answer = protocol.LeaseRenewed
				}
			}
		}
		return nil
	})
	err = outOfTime(ctx, err)
	for _, op := range batch {
		op.err = err
		close(op.done)
	}
}
