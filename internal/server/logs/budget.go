package logs

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// admitWait is how long bytes wait for room before the runner is asked to come
// again: shorter than any limit of its call.
const admitWait = 5 * time.Second

// budget bounds the bytes in front of the store. Those that fit go in the order
// in which they came; of one runner no more than its share, since what it sends may
// come slowly.
type budget struct {
	mu    sync.Mutex
	room  int64
	share int64
	held  map[ci.RunnerID]int64
	line  []*ticket // waiting, first come first
}

type ticket struct {
	of ci.RunnerID
	n  int64
	in chan struct{}
}

func newBudget(total int64) *budget {
	return &budget{room: total, share: max(total/4, min(total, protocol.MaxLogBody)), held: map[ci.RunnerID]int64{}}
}

// take waits for room for n bytes of a runner and returns what gives it back. A
// wait of more than admitWait is ErrUnavailable.
func (b *budget) take(ctx context.Context, of ci.RunnerID, n int64) (release func(), err error) {
	t := &ticket{of, min(n, b.share), make(chan struct{})}
	b.mu.Lock()
	b.line = append(b.line, t)
	b.serve()
	b.mu.Unlock()
	give := sync.OnceFunc(func() { b.give(t) })
	select {
	case <-t.in:
		return give, nil
	default:
	}
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
	i := slices.Index(b.line, t)
	if i < 0 {
		return give, nil // it came in at the last moment
	}
	b.line = slices.Delete(b.line, i, i+1)
	b.serve()
	return nil, err
}

func (b *budget) give(t *ticket) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.room += t.n
	if b.held[t.of] -= t.n; b.held[t.of] == 0 {
		delete(b.held, t.of)
	}
	b.serve()
}

// serve lets in who fits; the caller holds mu.
func (b *budget) serve() {
	full := false // the first that its share does not keep out waits for room, and all behind it
	b.line = slices.DeleteFunc(b.line, func(t *ticket) bool {
		if full || b.held[t.of]+t.n > b.share {
			return false
		}
		if full = b.room < t.n; full {
			return false
		}
		b.room -= t.n
		b.held[t.of] += t.n
		close(t.in)
		return true
	})
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
