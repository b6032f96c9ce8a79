package store_test

import (
	"context"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// What a transaction has put off is seen by the statements behind it, and fails it
// even if the statement that was sent along was taken for one that may fail.
func TestWhatIsPutOffIsSeenAndIsNotForgotten(t *testing.T) {
	t.Parallel()
	storetest.Each(t, testkit.Postgres, func(t *testing.T, w *storetest.World) {
		run, jobs := w.Run(ci.JobSpec{}, ci.JobSpec{})
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			js, err := tx.LockJobs(ctx, jobs)
			if err != nil {
				return err
			}
			js[0].State, js[1].State = ci.StateReady, ci.StateReady
			if err := tx.UpdateJobs(ctx, []*store.Job{&js[0], &js[1]}); err != nil {
				return err
			}
			seen, err := tx.Jobs(ctx, jobs)
			for _, j := range seen {
				if j.State != ci.StateReady {
					t.Errorf("behind its update a job is %s", j.State)
				}
			}
			return err
		})
		err := w.Store.Write(t.Context(), func(tx *store.Tx) error {
			js, err := tx.LockJobs(t.Context(), jobs)
			if err != nil {
				return err
			}
			js[0].State, js[1].State = ci.StateRunning, ci.StateRunning
			if err := tx.UpdateJobs(t.Context(), []*store.Job{&js[0], &js[1]}); err != nil {
				return err
			}
			_ = tx.SetPhases(t.Context(), []ci.LeaseRef{{Run: run.ID, Job: jobs[0]}}, []ci.Phase{ci.PhasePreparing}, []int64{0}, w.Now()) // no such lease
			_, _ = tx.Jobs(t.Context(), jobs)
			return nil
		})
		if err == nil {
			t.Error("a transaction was committed although one of its statements missed its rows")
		}
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			seen, err := tx.Jobs(ctx, jobs)
			for _, j := range seen {
				if j.State != ci.StateReady {
					t.Errorf("behind a failed transaction a job is %s", j.State)
				}
			}
			return err
		})
	})
}
