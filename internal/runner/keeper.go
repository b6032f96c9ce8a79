package runner

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// keeper keeps the leases of all jobs alive with one heartbeat, and ends those
// that it cannot keep. It trusts a lease only until request start + TTL −
// margin on the monotonic clock (SPEC EX-9, decision 5): the wall clock plays no
// part.
type keeper struct {
	server  *link
	id      *identity
	log     *slog.Logger
	drained func() // called when the server asks to drain; may be called often
	wake    chan struct{}
	some    chan struct{} // something is held: listen

	mu   sync.Mutex
	held map[ci.LeaseID]*held // guarded by mu
	soon bool                 // guarded by mu: beat at once
}

// held is one lease in the keeper's hands.
type held struct {
	lease ci.LeaseRef
	ttl   time.Duration
	// deadline is when the lease is no longer trusted; guarded by keeper.mu.
	deadline time.Time
	// lose ends everything about the attempt; stop ends the job's processes only,
	// so that the rest can still be reported.
	lose, stop context.CancelCauseFunc
}

func newKeeper(server *link, id *identity, log *slog.Logger, drained func()) *keeper {
	return &keeper{
		server: server, id: id, log: log, drained: drained,
		wake: make(chan struct{}, 1), some: make(chan struct{}, 1), held: map[ci.LeaseID]*held{},
	}
}

// hold takes a lease that was granted at the earliest when granted says. When
// that is so long ago that the lease could be nearly over, it renews first. An
// error means that the lease is not ours.
func (k *keeper) hold(ctx context.Context, h *held, granted time.Time) error {
	trust := h.ttl - ci.LeaseMargin(h.ttl)
	h.deadline = granted.Add(trust)
	age := time.Since(granted)
	if age > trust-h.ttl/3 {
		if err := k.confirm(ctx, h); err != nil {
			return err
		}
		age = 0
	}
	k.mu.Lock()
	k.held[h.lease.Lease] = h
	k.soon = k.soon || age > h.ttl/6
	k.mu.Unlock()
	k.nudge()
	select {
	case k.some <- struct{}{}:
	default:
	}
	return nil
}

// confirm renews one lease before anything is done under it.
func (k *keeper) confirm(ctx context.Context, h *held) error {
	ctx, cancel := context.WithTimeoutCause(ctx, h.ttl, causeDeadline)
	defer cancel()
	return insist(ctx, always(tryLimit(h.ttl)), func(ctx context.Context) error {
		start := time.Now()
		reply, err := k.server.call().Heartbeat(ctx, protocol.Heartbeat{
			Session: h.lease.Session, Leases: []ci.LeaseRef{h.lease},
		})
		if err != nil {
			return err
		}
		if len(reply.Leases) != 1 || reply.Leases[0].Answer == protocol.LeaseGone {
			return ci.Rejected(ci.RejectExpired)
		}
		h.deadline = start.Add(h.ttl - ci.LeaseMargin(h.ttl))
		k.apply(h, reply.Leases[0])
		return nil
	})
}

// release forgets a lease whose attempt is reported or lost.
func (k *keeper) release(h *held) {
	k.mu.Lock()
	delete(k.held, h.lease.Lease)
	k.mu.Unlock()
	k.nudge()
}

func (k *keeper) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// tryLimit bounds one try of a heartbeat, so that several fit between a renewal
// and the deadline.
func tryLimit(ttl time.Duration) time.Duration { return max(ttl/6, 500*time.Millisecond) }

// How long one listening poll is held at most, and how long nothing is asked of a
// server that does not know the route.
const (
	listenFor   = 30 * time.Second
	listenNever = 10 * time.Minute
)

// listen waits beside the heartbeats for a reason to send one at once, so that a
// cancel does not wait for the next. It asks only while something is held. What
// it hears is a hint: the heartbeat's answer counts.
func (k *keeper) listen(ctx context.Context) {
	var wait backoff
	for ctx.Err() == nil {
		session := k.session()
		if session == "" {
			select {
			case <-ctx.Done():
			case <-k.some:
			}
			continue
		}
		renew, err := k.server.call().Watch(ctx, protocol.Watch{Session: session, Wait: ci.Duration(listenFor)})
		switch {
		case errors.Is(err, ci.ErrNotFound):
			_ = pause(ctx, listenNever)
		case err != nil:
			_ = pause(ctx, wait.delay(err))
		default:
			wait.reset()
		}
		if renew {
			k.mu.Lock()
			k.soon = true
			k.mu.Unlock()
			k.nudge()
		}
	}
}

// session returns the session of a lease that is held, "" when none is.
func (k *keeper) session() ci.SessionID {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.held {
		return h.lease.Session
	}
	return ""
}

// beat is what one heartbeat brought.
type beat struct {
	start time.Time
	sent  []*held
	reply protocol.HeartbeatReply
	err   error
	cut   bool // no answer came within the try's limit
}

// run renews until the context ends. Deadlines are looked after while a
// heartbeat is under way.
func (k *keeper) run(ctx context.Context) {
	var (
		wait    backoff
		next    time.Time // of the next heartbeat; zero when nothing is held
		pending int       // heartbeats under way
		beats   = make(chan beat)
		timer   = time.NewTimer(time.Hour)
	)
	defer timer.Stop()
	for {
		now := time.Now()
		at, ttl, soon := k.expire(now)
		switch {
		case ttl == 0:
			next = time.Time{}
		case soon:
			next = now
		case next.IsZero() || next.After(now.Add(ci.RenewEvery(ttl))):
			next = now.Add(ci.RenewEvery(ttl))
		}
		if pending == 0 && !next.IsZero() && !next.After(now) {
			pending = k.send(ctx, tryLimit(ttl), beats)
			next = now.Add(ci.RenewEvery(ttl))
		}
		sleep := time.Hour
		if ttl != 0 {
			sleep = at.Sub(now)
			if pending == 0 {
				sleep = min(sleep, next.Sub(now))
			}
		}
		timer.Reset(max(sleep, 0))
		select {
		case <-ctx.Done():
			for ; pending > 0; pending-- {
				<-beats
			}
			return
		case <-timer.C:
		case <-k.wake:
		case b := <-beats:
			pending--
			if b.err == nil {
				wait.reset()
				k.renewed(b)
				break
			}
			if _, lost := verdict(b.err); lost {
				k.lost(b.sent)
				break
			}
			if b.cut {
				k.server.freshen()
			}
			level := slog.LevelDebug
			if wait.next == 0 {
				level = slog.LevelWarn // once for each outage
			}
			k.log.Log(ctx, level, "heartbeat failed", slog.Int("leases", len(b.sent)), slog.Any("error", b.err))
			// Whatever the outage, tries stay close enough to catch its end before the
			// deadline.
			d := min(wait.delay(b.err), max(ttl/60, 100*time.Millisecond))
			if again := time.Now().Add(d); again.Before(next) {
				next = again
			}
		}
	}
}

// expire gives up every lease whose deadline has come and returns the earliest
// deadline and the shortest TTL of those that are left.
func (k *keeper) expire(now time.Time) (at time.Time, ttl time.Duration, soon bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, h := range k.held {
		if !h.deadline.After(now) {
			delete(k.held, id)
			k.log.Warn("lease given up", slog.String(keyJob, string(h.lease.Job)),
				slog.Int64(keyAttempt, h.lease.Epoch), slog.String("cause", string(causeDeadline)))
			h.lose(causeDeadline)
			continue
		}
		if at.IsZero() || h.deadline.Before(at) {
			at = h.deadline
		}
		if ttl == 0 || h.ttl < ttl {
			ttl = h.ttl
		}
	}
	soon, k.soon = k.soon, false
	return at, ttl, soon
}

// send starts one heartbeat for each session that has leases, normally one, and
// returns how many.
func (k *keeper) send(ctx context.Context, limit time.Duration, beats chan<- beat) int {
	k.mu.Lock()
	sessions := map[ci.SessionID][]*held{}
	for _, h := range k.held {
		sessions[h.lease.Session] = append(sessions[h.lease.Session], h)
	}
	k.mu.Unlock()
	for session, all := range sessions {
		go func() {
			b := beat{start: time.Now(), sent: all}
			leases := make([]ci.LeaseRef, len(all))
			for i, h := range all {
				leases[i] = h.lease
			}
			try, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			have := k.id.current()
			b.reply, b.err = k.server.call().Heartbeat(try, protocol.Heartbeat{Session: session, Leases: leases})
			if errors.Is(b.err, ci.ErrUnauthorized) {
				// All slots may be taken and nobody else would notice; repeated soon.
				b.err = errors.Join(b.err, k.id.renew(try, have.Credential))
			}
			b.cut = try.Err() != nil
			beats <- b
		}()
	}
	return len(sessions)
}

// renewed moves the deadlines of what a heartbeat kept and ends what it did not.
// A lease that was given up meanwhile stays given up.
func (k *keeper) renewed(b beat) {
	k.mu.Lock()
	for i, h := range b.sent {
		if k.held[h.lease.Lease] == h && b.reply.Leases[i].Answer != protocol.LeaseGone {
			h.deadline = b.start.Add(h.ttl - ci.LeaseMargin(h.ttl))
		}
	}
	k.mu.Unlock()
	for i, h := range b.sent {
		k.apply(h, b.reply.Leases[i])
	}
	if b.reply.Drain {
		k.drained()
	}
}

// apply acts on the answer for one lease.
func (k *keeper) apply(h *held, answer protocol.HeartbeatLease) {
	switch answer.Answer {
	case protocol.LeaseRenewed:
	case protocol.LeaseCancel:
		h.stop(causeCancelled)
	case protocol.LeaseGone:
		k.log.Warn("lease lost", slog.String(keyJob, string(h.lease.Job)),
			slog.Int64(keyAttempt, h.lease.Epoch), slog.String("reject", string(answer.Reject)))
		k.lost([]*held{h})
	}
}

func (k *keeper) lost(all []*held) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range all {
		delete(k.held, h.lease.Lease)
		h.lose(causeLost)
	}
}
