package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
)

// asked is a source of answers that notes each round.
type asked struct {
	mu     sync.Mutex
	rounds [][]int
	takes  time.Duration
}

func (a *asked) read(ctx context.Context, keys []int) (map[int]string, error) {
	a.mu.Lock()
	a.rounds = append(a.rounds, slices.Sorted(slices.Values(keys)))
	a.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(a.takes):
	}
	if slices.Contains(keys, 13) {
		return nil, errors.New("13 cannot be asked for")
	}
	out := map[int]string{}
	for _, k := range keys {
		if k >= 0 {
			out[k] = fmt.Sprint("answer ", k)
		}
	}
	return out, nil
}

func TestReadsMergeWhatIsAskedWhileARoundIsRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: time.Millisecond}
		r := NewReads(a.read)
		get := func(k int) {
			v, ok, err := r.Get(t.Context(), k)
			if err != nil || ok != (k >= 0) || ok && v != fmt.Sprint("answer ", k) {
				t.Errorf("%d is answered %q %t %v", k, v, ok, err)
			}
		}
		var all sync.WaitGroup
		all.Go(func() { get(1) })
		synctest.Wait()
		for _, k := range []int{2, 3, -1} {
			all.Go(func() { get(k) })
		}
		all.Wait()
		if want := [][]int{{1}, {-1, 2, 3}}; !slices.EqualFunc(a.rounds, want, slices.Equal) {
			t.Errorf("rounds %v, want %v", a.rounds, want)
		}
	})
}

// A question is never answered by a round that had begun before it was asked.
func TestReadsAreNotOlderThanTheirQuestion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var value atomic.Int64
		r := NewReads(func(_ context.Context, keys []int) (map[int]int64, error) {
			seen := value.Load()
			time.Sleep(time.Second)
			return map[int]int64{keys[0]: seen}, nil
		})
		var all sync.WaitGroup
		all.Go(func() { _, _, _ = r.Get(t.Context(), 1) })
		time.Sleep(time.Millisecond)
		value.Store(1)
		if v, _, _ := r.Get(t.Context(), 1); v != 1 {
			t.Errorf("read %d, which was true before the question", v)
		}
		all.Wait()
	})
}

func TestAReadThatFailsFailsAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: time.Millisecond}
		r := NewReads(a.read)
		var all sync.WaitGroup
		all.Go(func() { _, _, _ = r.Get(t.Context(), 0) })
		synctest.Wait()
		for _, k := range []int{12, 13, 14} {
			all.Go(func() {
				if v, ok, err := r.Get(t.Context(), k); (err != nil) != (k == 13) || ok != (k != 13) {
					t.Errorf("%d is answered %q %t %v", k, v, ok, err)
				}
			})
		}
		all.Wait()
	})
}

// Whoever asked first may go: the others of its round are answered.
func TestReadsOutliveWhoeverAskedFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: time.Second}
		r := NewReads(a.read)
		var all sync.WaitGroup
		all.Go(func() { _, _, _ = r.Get(t.Context(), 0) })
		synctest.Wait()
		first, leave := context.WithCancel(t.Context())
		all.Go(func() { _, _, _ = r.Get(first, 1) })
		synctest.Wait()
		all.Go(func() {
			if v, _, err := r.Get(t.Context(), 2); err != nil || v != "answer 2" {
				t.Errorf("answered %q %v", v, err)
			}
		})
		synctest.Wait()
		leave()
		all.Wait()
	})
}

func TestReadsThatTakeTooLongAreUnavailable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewReads((&asked{takes: time.Hour}).read)
		if _, _, err := r.Get(t.Context(), 1); !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("answered %v", err)
		}
	})
}

// A round that hangs, on a connection whose other end is gone, holds up nobody who
// asks behind it: they are read on other connections.
func TestAReadThatHangsHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: time.Millisecond}
		r := NewReads(func(ctx context.Context, keys []int) (map[int]string, error) {
			if slices.Contains(keys, 100) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return a.read(ctx, keys)
		})
		var all sync.WaitGroup
		all.Go(func() {
			if _, _, err := r.Get(t.Context(), 100); !errors.Is(err, ci.ErrUnavailable) {
				t.Errorf("the one that hangs is answered %v", err)
			}
		})
		synctest.Wait()
		began := time.Now()
		for k := range 20 {
			if v, _, err := r.Get(t.Context(), k); err == nil && v != fmt.Sprint("answer ", k) || (err != nil) != (k == 13) {
				t.Errorf("%d is answered %q %v", k, v, err)
			}
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("twenty reads took %s behind one that hangs", took)
		}
		all.Wait()
	})
}

// Nobody waits longer than his own time, neither who asked first nor the others.
func TestWhoeverAsksMayGoAtAnyTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: 10 * time.Second}
		r := NewReads(a.read)
		var all sync.WaitGroup
		for k := range 4 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(10-k)*time.Millisecond)
				defer cancel()
				began := time.Now()
				if _, _, err := r.Get(ctx, k); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Second {
					t.Errorf("%d was answered %v after %s", k, err, time.Since(began))
				}
			})
			synctest.Wait()
		}
		all.Wait()
		synctest.Wait()
		if len(a.rounds) != 1 {
			t.Errorf("read for nobody: %v", a.rounds)
		}
		if v, _, err := r.Get(t.Context(), 5); err != nil || v != "answer 5" {
			t.Errorf("behind those who went: %q %v", v, err)
		}
	})
}

// A defect in a read is one of those who asked, and of no more.
func TestAReadThatPanicsPanicsInThoseWhoAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: time.Millisecond}
		r := NewReads(func(ctx context.Context, keys []int) (map[int]string, error) {
			if slices.Contains(keys, 100) {
				panic("a defect")
			}
			return a.read(ctx, keys)
		})
		func() {
			defer func() {
				if p, ok := recover().(*Panic); !ok || p.Value != "a defect" || !strings.Contains(p.Stack, "reads_test.go") {
					t.Errorf("the panic is %v", p)
				}
			}()
			_, _, err := r.Get(t.Context(), 100)
			t.Errorf("answered %v", err)
		}()
		if v, _, err := r.Get(t.Context(), 1); err != nil || v != "answer 1" {
			t.Errorf("behind it: %q %v", v, err)
		}
	})
}

// The time of a round is that of all its questions: those that are asked alone
// behind a failure and find none left are told so.
func TestQuestionsThatRunOutOfTimeAloneAreUnavailable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &asked{takes: 4 * time.Second}
		r := NewReads(a.read)
		var all sync.WaitGroup
		all.Go(func() { _, _, _ = r.Get(t.Context(), 0) })
		synctest.Wait()
		for range 3 { // the same question is asked once
			all.Go(func() { _, _, _ = r.Get(t.Context(), 13) })
		}
		synctest.Wait()
		for k := range 8 {
			all.Go(func() {
				_, _, err := r.Get(t.Context(), k)
				if err != nil && ci.KindOf(err) != ci.ErrUnavailable {
					t.Errorf("%d is answered %v", k, err)
				}
			})
			synctest.Wait()
		}
		all.Wait()
		alone := 0
		for _, round := range a.rounds {
			if slices.Equal(round, []int{13}) {
				alone++
			}
		}
		if alone > 1 {
			t.Errorf("a question was asked %d times", alone)
		}
	})
}
