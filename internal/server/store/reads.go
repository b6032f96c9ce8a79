package store

import (
	"context"
	"errors"
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
	turn chan struct{} // taken by the round that is being read

	mu   sync.Mutex
	next *round[K, V] // takes questions; nil when nobody asks
	last int          // questions in the round before
	at   time.Time    // when it began
}

type round[K comparable, V any] struct {
	keys []K
	done chan struct{}
	// Set when done is closed.
	answers map[K]V
	errs    map[K]error // of questions that were asked alone
	err     error       // of all others
}

const (
	// readPause is how long after a round of several questions the next one begins
	// at the earliest.
	readPause = 4 * time.Millisecond
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
	r.mu.Lock()
	mine := r.next
	first := mine == nil
	if first {
		mine = &round[K, V]{done: make(chan struct{})}
		r.next = mine
	}
	mine.keys = append(mine.keys, key)
	r.mu.Unlock()
	if first {
		r.lead(ctx, mine)
	}
	select {
	case <-mine.done:
	case <-ctx.Done():
		return v, false, ctx.Err()
	}
	if err, alone := mine.errs[key]; alone && err != nil {
		return v, false, err
	}
	v, ok = mine.answers[key]
	return v, ok, mine.err
}

// lead reads a round, when it is its turn, for all who ask in it: whoever asked
// first may have gone by then.
func (r *Reads[K, V]) lead(ctx context.Context, mine *round[K, V]) {
	r.turn <- struct{}{}
	mine.err = ci.Errorf(ci.ErrInternal, "a read was not finished") // unless it is, below
	defer func() {
		<-r.turn
		close(mine.done)
	}()
	r.mu.Lock()
	wait := time.Duration(0)
	if r.last > 1 {
		wait = time.Until(r.at.Add(readPause))
	}
	r.mu.Unlock()
	if wait > 0 {
		time.Sleep(wait)
	}
	r.mu.Lock()
	r.next, r.last, r.at = nil, len(mine.keys), time.Now()
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readMost)
	defer cancel()
	mine.answers, mine.err = r.read(ctx, mine.keys)
	switch {
	case mine.err == nil:
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		mine.err = ci.Errorf(ci.ErrUnavailable, "the database did not answer in time; try again").WithCause(mine.err)
	case len(mine.keys) > 1 && !errors.Is(mine.err, ci.ErrUnavailable):
		r.alone(ctx, mine)
	}
}

// alone asks each question of a failed round by itself, so that one that cannot
// be answered fails alone.
func (r *Reads[K, V]) alone(ctx context.Context, mine *round[K, V]) {
	answers, errs := map[K]V{}, map[K]error{}
	for _, k := range mine.keys {
		one, err := r.read(ctx, []K{k})
		if v, ok := one[k]; ok {
			answers[k] = v
		}
		errs[k] = err
	}
	mine.answers, mine.errs, mine.err = answers, errs, nil
}
