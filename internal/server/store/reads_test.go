package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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
		value := 0
		r := NewReads(func(_ context.Context, keys []int) (map[int]int, error) {
			seen := value
			time.Sleep(time.Second)
			return map[int]int{keys[0]: seen}, nil
		})
		var all sync.WaitGroup
		all.Go(func() { _, _, _ = r.Get(t.Context(), 1) })
		time.Sleep(time.Millisecond)
		value = 1
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
