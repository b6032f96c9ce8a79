package logs

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Bodies of one runner that come slowly leave room for others, and go on in their
// order when there is room for them.
func TestOneRunnerDoesNotTakeTheWholeBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(32 << 20)
		took := make(chan func(), 12)
		for range 12 {
			go func() {
				release, err := b.take(t.Context(), "slow", protocol.MaxLogBody)
				if err == nil {
					took <- release
				}
			}()
		}
		synctest.Wait()
		if len(took) != 2 { // a quarter of the budget
			t.Errorf("one runner holds %d bodies", len(took))
		}
		for range 6 {
			if _, err := b.take(t.Context(), "other", 1<<20); err != nil {
				t.Fatal(err)
			}
		}
		(<-took)()
		synctest.Wait()
		if len(took) != 2 {
			t.Errorf("it holds %d bodies after the end of one", len(took))
		}
		// What does not get in is told to come again.
		ctx, cancel := context.WithTimeout(t.Context(), 2*admitWait)
		defer cancel()
		if _, err := b.take(ctx, "slow", protocol.MaxLogBody); !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("without room: %v", err)
		}
	})
}
