package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"forgeci/internal/ci"
)

// Every wait of the runner is one of the two in this file, so that a test in
// virtual time sees all of them and nothing sleeps past its context.

// pause waits for d. It returns the context's cause when that ends first.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Bounds of the backoff. The ceiling grows with the outage, so that a runner is
// back about a second after a server's restart and a fleet does not hammer a
// server that is away for an hour.
const (
	backoffFirst = 50 * time.Millisecond
	backoffShort = time.Second
	backoffLong  = 15 * time.Second
	backoffShare = 20 // the ceiling is the outage so far divided by this
)

// backoff counts the repeats of one call. The zero value is ready.
type backoff struct {
	since time.Time
	next  time.Duration
}

// delay returns how long to wait before the next try: doubling, with half of it
// random, never less than what the server asked for in err.
func (b *backoff) delay(err error) time.Duration {
	now := time.Now()
	if b.next == 0 {
		b.since, b.next = now, backoffFirst
	}
	ceiling := min(max(now.Sub(b.since)/backoffShare, backoffShort), backoffLong)
	d := min(b.next, ceiling)
	b.next = min(2*d, backoffLong)
	d = d/2 + rand.N(d/2+1)
	var e *ci.Error
	if errors.As(err, &e) && e.RetryAfter > d {
		d = min(e.RetryAfter, backoffLong)
	}
	return d
}

// reset forgets the outage after a call was answered.
func (b *backoff) reset() { *b = backoff{} }

// insist repeats a call until it is answered: it returns nil, an error that a
// repeat cannot cure, or the context's cause. Each try gets at most its time
// limit, so that a connection into the void is given up and made anew.
func insist(ctx context.Context, limit limits, call func(context.Context) error) error {
	var wait backoff
	for {
		try, cancel := context.WithTimeout(ctx, limit.first)
		err := call(try)
		if try.Err() != nil {
			limit = limit.next()
		}
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !transient(err):
			return err
		}
		if stopped := pause(ctx, wait.delay(err)); stopped != nil {
			return stopped
		}
	}
}

// transient reports whether the same request may be answered later: the server
// is away, overloaded or met a defect, the network failed, or the credential is
// refused and may be renewed by the poller meanwhile.
func transient(err error) bool {
	switch ci.KindOf(err) {
	case ci.ErrUnavailable, ci.ErrRateLimited, ci.ErrInternal, ci.ErrUnauthorized:
		return true
	case ci.ErrInvalid, ci.ErrForbidden, ci.ErrNotFound, ci.ErrConflict, ci.ErrLeaseLost, ci.ErrRunEnded,
		ci.ErrGone, ci.ErrTooLarge, ci.ErrDigest, ci.ErrUnsafe, ci.ErrIncompatible, ci.ErrMethod:
		return false
	default:
		return true
	}
}

// cause is why a job's context ended. It tells a worker what to report.
type cause string

// Error returns the cause in words.
func (c cause) Error() string { return string(c) }

// Grace shortens the time that a job's processes get to end: a job that is not
// ours any more must be gone within seconds (RELIABILITY R07), inside the margin
// of the default TTL.
func (c cause) Grace() time.Duration {
	switch c {
	case causeLost, causeDeadline:
		return time.Second
	default:
		return time.Hour
	}
}

// Causes.
const (
	causeLost      cause = "the lease is lost"
	causeDeadline  cause = "the lease could not be renewed in time"
	causeCancelled cause = "the job is cancelled"
	causeStop      cause = "the runner is shutting down"
	causeTimeout   cause = "the job's time limit is reached"
	causeStep      cause = "the step's time limit is reached"
)

// limit is a time limit that was reached: a cause that says whose limit it was
// and how long.
type limit struct {
	cause cause
	whose string
	after time.Duration
	// grace, when set, is all that processes get to end: the time of the job is over
	// soon.
	grace time.Duration
}

// Error says which limit is reached.
func (l limit) Error() string {
	return fmt.Sprintf("%s of %s is reached", l.whose, ci.Duration(l.after))
}

// Grace is the limit's own, else the cause's.
func (l limit) Grace() time.Duration {
	if l.grace > 0 {
		return l.grace
	}
	return l.cause.Grace()
}

// Unwrap returns the cause, for errors.Is and errors.As.
func (l limit) Unwrap() error { return l.cause }

// verdict is what a refusal on a lease route means for the job.
func verdict(err error) (cause, bool) {
	if ci.RejectOf(err) == ci.RejectCancelling {
		return causeCancelled, true
	}
	switch ci.KindOf(err) {
	case ci.ErrLeaseLost, ci.ErrRunEnded, ci.ErrNotFound: // not found: a job or a session of nobody, or of another tenant
		return causeLost, true
	default:
		return "", false
	}
}
