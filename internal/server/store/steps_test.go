package store_test

import (
	"context"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// Records of one step that come in one batch are taken in their order, as if
// each came by itself: a finished step does not change.
func TestStepsOfOneBatchCountInTheirOrder(t *testing.T) {
	t.Parallel()
	running := store.Step{Name: "s", State: ci.StateRunning}
	good := store.Step{Name: "s", State: ci.StateFinished, Conclusion: ci.ConclusionSuccess}
	bad := store.Step{Name: "s", State: ci.StateFinished, Conclusion: ci.ConclusionFailed}
	storetest.Each(t, testkit.Postgres, func(t *testing.T, w *storetest.World) {
		for name, c := range map[string]struct {
			batch []store.Step
			want  store.Step
		}{
			"begins and ends":     {[]store.Step{running, good}, good},
			"ends twice":          {[]store.Step{running, good, bad}, good},
			"comes back":          {[]store.Step{good, running}, good},
			"begins twice":        {[]store.Step{running, running}, running},
			"more than ten times": {[]store.Step{running, running, running, running, running, running, running, running, running, running, running, bad}, bad},
		} {
			_, jobs := w.Run(ci.JobSpec{Name: "j", Key: "j", Steps: []ci.StepSpec{{Name: "s", Run: "true"}}})
			ref := w.Claim(jobs[0])
			steps := make([]store.StepOf, len(c.batch))
			for i, s := range c.batch {
				steps[i] = store.StepOf{Ref: ref, Step: s}
			}
			var got []store.Step
			w.Write(func(ctx context.Context, tx *store.Tx) error {
				if err := tx.UpsertSteps(ctx, steps, w.Now()); err != nil {
					return err
				}
				var err error
				got, err = tx.Steps(ctx, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
				return err
			})
			if len(got) != 1 || got[0] != c.want {
				t.Errorf("%s: %+v, want %+v", name, got, c.want)
			}
		}
	})
}
