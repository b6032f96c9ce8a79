package logs

import (
	"context"
	"errors"
	"sync"
	"time"

	"forgeci/internal/ci"
)

// admitWait is how long bytes wait for room before the runner is asked to come
// again: shorter than any limit of its call.
const admitWait = 5 * time.Second

// budget bounds the bytes in front of the store. Those that fit go in the order
// in which they came.
type budget struct {
	mu    sync.Mutex
	room  int64
	total int64
	line  []*ticket // waiting, first come first
}

type ticket struct {
	n  int64
	in chan struct{}
}

func newBudget(total int64) *budget { return &budget{room: total, total: total} }

// take waits for room for n bytes and returns what gives it back. A wait of more
// than admitWait is ErrUnavailable.
func (b *budget) take(ctx context.Context, n int64) (release func(), err error) {
	n = min(n, b.total)
	give := sync.OnceFunc(func() { b.give(n) })
	b.mu.Lock()
	if len(b.line) == 0 && b.room >= n {
		b.room -= n
		b.mu.Unlock()
		return give, nil
	}
	t := &ticket{n, make(chan struct{})}
	b.line = append(b.line, t)
	b.mu.Unlock()
	timer := time.NewTimer(admitWait)
	defer timer.Stop()
	select {
	case <-t.in:
		return give, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = unavailable("the log store is behind: nothing of this request was stored", time.Second)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, other := range b.line {
		if other == t {
			b.line = append(b.line[:i], b.line[i+1:]...)
			b.serve()
			return nil, err
		}
	}
	return give, nil // it came in at the last moment
}

func (b *budget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.room += n
	b.serve()
}

// serve lets in who fits; the caller holds mu.
func (b *budget) serve() {
	for len(b.line) > 0 && b.room >= b.line[0].n {
		b.room -= b.line[0].n
		close(b.line[0].in)
		b.line = b.line[1:]
	}
}

func unavailable(detail string, after time.Duration) *ci.Error {
	e := ci.Errorf(ci.ErrUnavailable, "%s", detail)
	e.RetryAfter = after
	return e
}

func retryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*ci.Error](err); ok {
		return e.RetryAfter
	}
	return 0
}
