package engine

import (
	"context"
	"errors"
	"time"

	"forgeci/internal/server/store"
)

// DefaultKeep is how long a caller's idempotency key is kept at least, and a
// session after its end.
const DefaultKeep = 7 * 24 * time.Hour

const (
	tidyEvery = 10 * time.Minute
	// tidyMost is how many rows one transaction deletes: a few milliseconds, in which
	// an embedded database takes no other writer.
	tidyMost = 500
)

func (e *Engine) tidyLoop(ctx context.Context) {
	every := time.NewTicker(tidyEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
		if err := e.Tidy(ctx); err != nil && ctx.Err() == nil {
			e.Log.WarnContext(ctx, "not tidied; it is tried again", "error", err)
		}
	}
}

// Tidy deletes rows that only grow in number and that nobody can need any more:
// idempotency keys and ended sessions older than Keep, offers that no session
// makes. It works in small transactions, may run on several nodes at once and be
// interrupted anywhere.
//
// A request that names what was deleted is answered as if it had never been: a
// submission under a collected key makes a run, the late opening of a collected
// session is told the runner's latest, and its claims are of no session.
func (e *Engine) Tidy(ctx context.Context) error {
	var failed error
	for _, collect := range []func(context.Context, *store.Tx, int64) (int64, error){
		func(ctx context.Context, tx *store.Tx, before int64) (int64, error) {
			return tx.CollectIdempotency(ctx, before, tidyMost)
		},
		func(ctx context.Context, tx *store.Tx, before int64) (int64, error) {
			return tx.CollectSessions(ctx, before, tidyMost)
		},
		func(ctx context.Context, tx *store.Tx, before int64) (int64, error) {
			if _, err := tx.LockMeta(ctx, metaShapes); err != nil {
				return 0, err
			}
			return tx.CollectOffers(ctx, before, tidyMost)
		},
	} {
		failed = errors.Join(failed, e.deleteAll(ctx, collect))
	}
	return failed
}

func (e *Engine) deleteAll(ctx context.Context, collect func(context.Context, *store.Tx, int64) (int64, error)) error {
	for {
		var n int64
		err := e.Store.Write(ctx, func(tx *store.Tx) error {
			now, err := tx.Now(ctx)
			if err != nil {
				return err
			}
			n, err = collect(ctx, tx, now-e.Keep.Microseconds())
			return err
		})
		if err != nil || n < tidyMost {
			return err
		}
	}
}
