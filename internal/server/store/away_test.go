package store_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// Whatever a transaction was doing when the database went away, its error says
// that the database is not there, never that the server has a defect; and the
// same store works again when the database is back.
func TestALostDatabaseIsAlwaysUnavailable(t *testing.T) {
	t.Parallel()
	pg := testkit.StartPostgres(t, true)
	s, err := store.Open(t.Context(), store.Options{URL: pg.Database(t), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	work := []func(context.Context) error{
		func(ctx context.Context) error {
			return s.Write(ctx, func(tx *store.Tx) error { return tx.InsertMeta(ctx, "k", "v") })
		},
		func(ctx context.Context) error {
			return s.Read(ctx, func(tx *store.Tx) error {
				for range 10 {
					if _, err := tx.Now(ctx); err != nil {
						return err
					}
				}
				_, err := tx.PresentSessions(ctx)
				return err
			})
		},
		s.Ping,
		func(ctx context.Context) error { _, err := s.Inconsistencies(ctx); return err },
	}
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var mu sync.Mutex
	failed := 0
	for i := range 16 {
		all.Go(func() {
			for ctx.Err() == nil {
				err := work[i%len(work)](context.WithoutCancel(ctx))
				if err == nil {
					continue
				}
				mu.Lock()
				failed++
				mu.Unlock()
				if ci.KindOf(err) != ci.ErrUnavailable {
					t.Errorf("%d: %s: %v (%T)", i%len(work), ci.KindOf(err), err, err)
				}
				<-time.After(time.Millisecond)
			}
		})
	}
	for range 2 {
		<-time.After(200 * time.Millisecond)
		pg.Kill(t)
		<-time.After(50 * time.Millisecond)
		pg.Start(t)
	}
	stop()
	all.Wait()
	if failed == 0 {
		t.Error("no transaction noticed anything")
	}
	for i, f := range work {
		if err := f(t.Context()); err != nil {
			t.Errorf("%d, after the database is back: %v", i, err)
		}
	}
}
