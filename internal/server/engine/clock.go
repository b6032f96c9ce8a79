package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// clockGuard compares the advance of the database's clock with this process's
// monotonic clock. A difference over TTL/4 is a jump: it must expire nothing, so
// all live deadlines are moved by it, once for all nodes (SPEC decision 5). When
// between two looks of this node it came, and what of the difference the clock's
// rate has made, is not known, nor which leases were renewed behind it: so a repair
// brings the end of no lease nearer than a TTL from then, and none further away.
type clockGuard struct {
	ttl  time.Duration
	mono func() time.Duration

	mu      sync.Mutex
	base    int64         // database time at baseAt
	baseAt  time.Duration // monotonic
	seen    bool
	shift   int64 // the sum of shifts that this node has taken into account
	follows bool  // it has read that sum before
}

// clockJump says by how much the database's clock jumped, microseconds, and how
// long ago this node had looked at it before.
type clockJump struct {
	delta int64
	since time.Duration
}

func (j *clockJump) Error() string {
	return fmt.Sprintf("the database's clock jumped by %d µs", j.delta)
}

func asClockJump(err error) (*clockJump, bool) {
	var j *clockJump
	return j, errors.As(err, &j)
}

// read reads the database's clock and notes it; a jump is an error that ends the
// transaction before anything is decided. A reading that took long (the process
// was stopped, the database slow) says nothing about jumps and is taken again.
func (g *clockGuard) read(ctx context.Context, tx *store.Tx) (int64, error) {
	return g.taken(func() (int64, error) { return tx.Now(ctx) })
}

// taken is read for a clock that is read with something else; a time of 0 is none.
func (g *clockGuard) taken(read func() (int64, error)) (int64, error) {
	for try := 1; ; try++ {
		before := g.mono()
		now, err := read()
		if err != nil || now == 0 {
			return 0, err
		}
		after := g.mono()
		if after-before > g.ttl/16 {
			if try < 3 {
				continue
			}
			return now, nil
		}
		return now, g.check(now, after)
	}
}

func (g *clockGuard) check(now int64, at time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.seen {
		g.base, g.baseAt, g.seen = now, at, true
		return nil
	}
	delta := (now - g.base) - (at - g.baseAt).Microseconds()
	if max(delta, -delta) > (g.ttl / 4).Microseconds() {
		return &clockJump{delta, at - g.baseAt}
	}
	if at > g.baseAt { // the base follows, so that a slow drift is no jump
		g.base, g.baseAt = now, at
	}
	return nil
}

func (g *clockGuard) moved(delta, shift int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.base += delta
	g.shift = shift
}

// metaClock holds the sum of all shifts: the clock base that nodes agree on.
const metaClock = "clock_shift_us"

// shiftClock moves all live deadlines by a jump, unless another node has done so.
func (e *Engine) shiftClock(ctx context.Context, jump *clockJump) error {
	var sum, rest, moved int64
	err := e.Store.Write(ctx, func(tx *store.Tx) error {
		if err := tx.InsertMeta(ctx, metaClock, "0"); err != nil {
			return err
		}
		text, err := tx.LockMeta(ctx, metaClock)
		if err != nil {
			return err
		}
		if sum, err = strconv.ParseInt(text, 10, 64); err != nil {
			return fmt.Errorf("meta %s: %w", metaClock, err)
		}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		e.clock.mu.Lock()
		known := e.clock.shift
		e.clock.mu.Unlock()
		// Other nodes may have repaired all of it, or a part.
		rest = jump.delta - (sum - known)
		if max(rest, -rest) <= (e.clock.ttl / 8).Microseconds() {
			return nil
		}
		forward := int64(0)
		if rest > 0 { // more, by what a clock that was slow, too, may have hidden of the jump
			forward = max(rest, jump.delta) + jump.since.Microseconds() // others may have repaired something else
		}
		if moved, err = tx.ShiftLeases(ctx, forward, now, e.ttlUS()); err != nil {
			return err
		}
		if err := tx.ShiftDue(ctx, rest, now, policy.MaxBackoff.Microseconds()); err != nil {
			return err
		}
		sum += rest
		if err := tx.SetMeta(ctx, metaClock, strconv.FormatInt(sum, 10)); err != nil {
			return err
		}
		return auditInstallation(ctx, tx, now, "clock_shifted", fmt.Sprintf("the database's clock jumped by %s: %d live leases moved with it",
			time.Duration(rest)*time.Microsecond, moved))
	})
	if err != nil {
		return err
	}
	e.clock.moved(jump.delta, sum)
	e.Log.WarnContext(ctx, "the database's clock jumped; live deadlines were moved", "jump", time.Duration(rest)*time.Microsecond, "leases", moved)
	return nil
}

// followClock learns what shifts other nodes have stored. The sum is read before the
// clock: a repair that is in it, its jump would be seen behind it.
func (e *Engine) followClock(ctx context.Context, tx *store.Tx) error {
	e.clock.mu.Lock()
	before, follows := e.clock.shift, e.clock.follows
	e.clock.mu.Unlock()
	sum, err := storedShift(ctx, tx)
	if err != nil {
		return err
	}
	if _, err := e.clock.read(ctx, tx); err != nil {
		return err
	}
	if follows && e.clock.goneBack(before, sum) {
		return &clockJump{}
	}
	e.clock.mu.Lock()
	defer e.clock.mu.Unlock()
	e.clock.follows = true
	if e.clock.shift == before {
		e.clock.shift = sum
	}
	return nil
}

// goneBack reports whether deadlines have been moved back by other nodes. If this
// node has seen no jump, the clock was set back and forward again between two looks
// of it, and what they have moved has to be moved again.
func (g *clockGuard) goneBack(known, sum int64) bool {
	return known-sum > (g.ttl / 8).Microseconds()
}

// unseen is a jump if one of the leases seems to be over, but has been moved back by
// a node that saw the clock set back, while this node did not: ask it before a lease
// is called expired.
func (e *Engine) unseen(ctx context.Context, tx *store.Tx, leases []store.Lease, now int64) error {
	over := func(l store.Lease) bool { return l.ExpiresUS <= now || l.DeadlineUS > 0 && l.DeadlineUS <= now }
	if !slices.ContainsFunc(leases, over) {
		return nil
	}
	sum, err := storedShift(ctx, tx)
	if err != nil {
		return err
	}
	e.clock.mu.Lock()
	known := e.clock.shift
	e.clock.mu.Unlock()
	if !e.clock.goneBack(known, sum) {
		return nil
	}
	if _, err := e.clock.read(ctx, tx); err != nil { // its jump has come behind now
		return err
	}
	return &clockJump{}
}

// storedShift is the sum of all shifts.
func storedShift(ctx context.Context, tx *store.Tx) (int64, error) {
	text, err := tx.Meta(ctx, metaClock)
	if err != nil || text == "" {
		return 0, err
	}
	sum, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("meta %s: %w", metaClock, err)
	}
	return sum, nil
}
