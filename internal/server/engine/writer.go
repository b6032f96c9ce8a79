package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
)

// writer merges waiting requests of the hot use cases into one transaction. A
// request is answered after the commit. A merge that fails is tried again whole
// by the store, then each request alone, so that one poisoned request fails by
// itself.
type writer struct {
	e       *Engine
	in      chan *request
	running atomic.Bool
	mu      sync.Mutex // serialises transactions while the loop is not running
	waiting []*request // handed over while the loop is not running; guarded by mu
	stopped chan struct{}
}

// request is one call; exactly one of the operations is set.
type request struct {
	phase  *phaseOp
	end    *endOp
	claim  *claimOp
	submit *submitOp
	alone  func(context.Context, *txn) error

	err  error
	done chan struct{}
}

// How many requests a merge takes at most, and how long a busy writer pauses for
// more (measured: 960 starts/s with 64, 1,270 with 256 on two cores).
const (
	mergeMost  = 256
	mergePause = 2 * time.Millisecond
	// mergeJobs is how many new jobs a merge has before it takes no more.
	mergeJobs = 1024
)

func newWriter(e *Engine) *writer {
	return &writer{e: e, in: make(chan *request, 4*mergeMost), stopped: make(chan struct{})}
}

// do hands a request over and waits for its answer. When ctx ends first the
// outcome is unknown to the caller, as after a lost reply; repeating is safe.
func (w *writer) do(ctx context.Context, r *request) error {
	if !w.running.Load() {
		w.doNow(ctx, r)
		return r.err
	}
	select {
	case w.in <- r:
	case <-ctx.Done():
		return ctx.Err()
	case <-w.stopped:
		return errStopping()
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	case <-w.stopped:
		select {
		case <-r.done:
			return r.err
		default:
			return errStopping()
		}
	}
}

// doNow applies a request without the loop, with those that Gather brought.
func (w *writer) doNow(ctx context.Context, r *request) {
	if w.e.Gather != nil {
		w.mu.Lock()
		w.waiting = append(w.waiting, r)
		w.mu.Unlock()
		w.e.Gather()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	batch := []*request{r}
	if w.e.Gather != nil {
		batch, w.waiting = w.waiting, nil
	}
	w.flush(ctx, batch)
}

// outOfTime turns the end of a transaction's own time into ErrUnavailable: what
// became of it is unknown, and it is not tried request by request.
func outOfTime(ctx context.Context, err error) error {
	if err == nil || !errors.Is(ctx.Err(), context.DeadlineExceeded) || errors.Is(err, ci.ErrUnavailable) {
		return err
	}
	return (&ci.Error{Kind: ci.ErrUnavailable, Detail: "the database did not answer in time; try again", RetryAfter: time.Second}).WithCause(err)
}

func errStopping() error {
	return &ci.Error{Kind: ci.ErrUnavailable, Detail: "the server is stopping; try again", RetryAfter: time.Second}
}

func (w *writer) run(ctx context.Context) {
	w.mu.Lock()
	w.running.Store(true)
	w.mu.Unlock()
	defer close(w.stopped)
	// A transaction that has begun is finished: its context outlives ctx.
	work := context.WithoutCancel(ctx)
	var batch []*request
	last := 0
	for {
		batch = batch[:0]
		select {
		case r := <-w.in:
			batch = append(batch, r)
		case <-ctx.Done():
			return
		}
		batch = w.gather(batch)
		// A lone request is not kept waiting; a stream of small batches is.
		if last > 1 && len(batch) < mergeMost/8 {
			pause(ctx, mergePause)
			batch = w.gather(batch)
		}
		last = len(batch)
		w.flush(work, batch)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (w *writer) gather(batch []*request) []*request {
	for len(batch) < mergeMost {
		select {
		case r := <-w.in:
			batch = append(batch, r)
		default:
			return batch
		}
	}
	return batch
}

// flush applies the mergeable requests together and the others one by one.
func (w *writer) flush(ctx context.Context, batch []*request) {
	var merge []*request
	jobs := 0
	for _, r := range batch {
		if r.alone != nil {
			w.apply(ctx, []*request{r})
			continue
		}
		merge = append(merge, r)
		if r.submit == nil {
			continue
		}
		if jobs += len(r.submit.s.Plan.Jobs); jobs >= mergeJobs {
			w.apply(ctx, merge)
			merge, jobs = nil, 0
		}
	}
	if len(merge) > 0 {
		w.apply(ctx, merge)
	}
}

// apply runs requests in one transaction and answers them.
func (w *writer) apply(ctx context.Context, rs []*request) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	err := outOfTime(ctx, w.e.commit(ctx, func(t *txn) error { return t.apply(ctx, rs) }))
	cancel()
	if err != nil && len(rs) > 1 && !errors.Is(err, ci.ErrUnavailable) {
		for _, r := range rs {
			w.apply(ctx, []*request{r})
		}
		return
	}
	for _, r := range rs {
		if err != nil {
			r.err = err
		}
		close(r.done)
	}
}

// apply runs the operations in the order of locks: sessions, runs, leases and
// jobs of what ends; then the queue; then what is new.
func (t *txn) apply(ctx context.Context, rs []*request) error {
	var phases []*phaseOp
	var ends []*endOp
	var claims []*claimOp
	var submits []*submitOp
	for _, r := range rs {
		r.err = nil
		switch {
		case r.alone != nil:
			if err := r.alone(ctx, t); err != nil {
				return err
			}
		case r.phase != nil:
			r.phase.err = &r.err
			phases = append(phases, r.phase)
		case r.end != nil:
			r.end.err = &r.err
			ends = append(ends, r.end)
		case r.claim != nil:
			r.claim.err = &r.err
			claims = append(claims, r.claim)
		case r.submit != nil:
			r.submit.err = &r.err
			submits = append(submits, r.submit)
		}
	}
	sessions, err := t.lockClaimers(ctx, claims)
	if err != nil {
		return err
	}
	if err := t.endBatch(ctx, ends, phases); err != nil {
		return err
	}
	if err := t.claimBatch(ctx, claims, sessions); err != nil {
		return err
	}
	return t.submitBatch(ctx, submits)
}
