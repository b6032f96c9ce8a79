package store

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"forgeci/internal/ci"
)

// Reads merges concurrent reads of one kind into one statement, as the engine's
// writer merges requests: what is asked for while a round is being read waits for the
// next one, which begins behind all of its questions. A lone read does not wait.
// Under load a statement for each question would cost more than what it reads
// (measured: a third of the server's time, a quarter of the database's).
type Reads[K comparable, V any] struct {
	read func(context.Context, []K) (map[K]V, error)
	turn chan struct{} // taken by the round that is being read, for at most readSlow

	mu   sync.Mutex
	next *round[K, V] // takes questions; nil when nobody asks
	last int          // questions in the round before
	at   time.Time    // when it began
}

type round[K comparable, V any] struct {
	keys []K
	here int                // who wait for its answers, guarded by Reads.mu
	gone context.CancelFunc // nobody waits any more
	done chan struct{}
	// Set when done is closed.
	answers map[K]V
	errs    map[K]error // of questions that were asked alone
	err     error       // of all others
	// panicked is raised again in each who asks.
	panicked *Panic
}

// Panic is what a merged read panicked with, raised again where it was asked for.
type Panic struct {
	Value any
	Stack string
}

func (p *Panic) String() string { return fmt.Sprintf("%v\n%s", p.Value, p.Stack) }

const (
	// readPause is how long after a round of several questions the next one begins
	// at the earliest.
	readPause = 4 * time.Millisecond
	// readSlow is how long a round keeps the next one waiting: one that hangs, on a
	// connection whose other end is gone, delays nobody else by more.
	readSlow = time.Second
	// readMost is how long a round may take before its questions are answered
	// ErrUnavailable.
	readMost = 15 * time.Second
)

// NewReads returns what merges calls of read, which answers the questions of a
// round together: one without an answer is missing in what it returns.
func NewReads[K comparable, V any](read func(context.Context, []K) (map[K]V, error)) *Reads[K, V] {
	return &Reads[K, V]{read: read, turn: make(chan struct{}, 1)}
}

// Get answers a question with what was committed at some moment since it was
// called; ok is false when there is no answer. It returns when ctx ends.
func (r *Reads[K, V]) Get(ctx context.Context, key K) (v V, ok bool, err error) {
	mine := r.join(ctx, key)
	select {
	case <-mine.done:
	case <-ctx.Done():
		r.leave(mine)
		return v, false, ctx.Err()
	}
	if mine.panicked != nil {
		panic(mine.panicked) //nolint:forbidigo // one that a question of this round has raised
	}
	if err, alone := mine.errs[key]; alone && err != nil {
		return v, false, err
	}
	v, ok = mine.answers[key]
	return v, ok, mine.err
}

func (r *Reads[K, V]) join(ctx context.Context, key K) *round[K, V] {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next == nil {
		mine := &round[K, V]{done: make(chan struct{})}
		ctx, mine.gone = context.WithCancel(context.WithoutCancel(ctx))
		r.next = mine
		go r.lead(ctx, mine)
	}
	r.next.keys = append(r.next.keys, key)
	r.next.here++
	return r.next
}

func (r *Reads[K, V]) leave(mine *round[K, V]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if mine.here--; mine.here > 0 {
		return
	}
	if r.next == mine {
		r.next = nil
	}
	mine.gone()
}

// lead reads a round, when it is its turn, for all who ask in it, until ctx ends:
// nobody waits for it any more.
func (r *Reads[K, V]) lead(ctx context.Context, mine *round[K, V]) {
	defer mine.gone()
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return
	}
	pass := sync.OnceFunc(func() { <-r.turn })
	mine.err = ci.Errorf(ci.ErrInternal, "a read was not finished") // unless it is, below
	defer func() {
		if p := recover(); p != nil {
			mine.panicked = &Panic{p, string(debug.Stack())}
		}
		pass()
		close(mine.done)
	}()
	r.mu.Lock()
	wait := time.Duration(0)
	if r.last > 1 {
		wait = time.Until(r.at.Add(readPause))
	}
	r.mu.Unlock()
	if wait > 0 {
		_ = sleep(ctx, wait)
	}
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	if r.next == mine {
		r.next = nil
	}
	r.last, r.at = len(mine.keys), time.Now()
	r.mu.Unlock()
	defer time.AfterFunc(readSlow, pass).Stop()
	ctx, cancel := context.WithTimeout(ctx, readMost)
	defer cancel()
	mine.answers, mine.err = r.read(ctx, mine.keys)
	if mine.err != nil && len(mine.keys) > 1 && ctx.Err() == nil && !errors.Is(mine.err, ci.ErrUnavailable) {
		r.alone(ctx, mine)
		return
	}
	mine.err = inTime(ctx, mine.err)
}

// alone asks each question of a failed round by itself, so that one that cannot
// be answered fails alone.
func (r *Reads[K, V]) alone(ctx context.Context, mine *round[K, V]) {
	answers, errs := map[K]V{}, map[K]error{}
	for _, k := range mine.keys {
		if _, asked := errs[k]; asked {
			continue
		}
		one, err := r.read(ctx, []K{k})
		if v, ok := one[k]; ok {
			answers[k] = v
		}
		errs[k] = inTime(ctx, err)
	}
	mine.answers, mine.errs, mine.err = answers, errs, nil
}

// inTime turns the end of a round's time into an answer to those who ask.
func inTime(ctx context.Context, err error) error {
	if err == nil || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return err
	}
	return ci.Errorf(ci.ErrUnavailable, "the database did not answer in time; try again").WithCause(err)
}
