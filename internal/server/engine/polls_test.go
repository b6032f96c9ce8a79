package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// One session cannot take the server's memory with open polls: those over the
// bound are told to wait, those under it and other sessions are served on, and
// an ended poll makes room.
func TestOpenPollsOfASessionAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "sqlite:"+t.TempDir()+"/forgeci.db")
	greedy, other := w.agent("greedy", 1), w.agent("other", 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const asked, most = 150, 100
	refused := make(chan error, asked)
	var polls sync.WaitGroup
	for i := range asked {
		polls.Go(func() {
			_, err := w.e.Claim(ctx, greedy.who, protocol.Claim{Session: greedy.session, RequestID: fmt.Sprint("p", i), Wait: ci.Duration(time.Minute)})
			if ctx.Err() == nil {
				refused <- err
			}
		})
	}
	for range asked - most {
		var e *ci.Error
		if err := <-refused; !errors.Is(err, ci.ErrRateLimited) || !errors.As(err, &e) || e.RetryAfter == 0 {
			t.Errorf("%v, want rate_limited with a time", err)
		}
	}
	other.claim() // is not refused
	cancel()
	polls.Wait()
	select {
	case err := <-refused:
		t.Errorf("one more poll was answered: %v", err)
	default:
	}
	greedy.claim() // there is room again: no error
}
