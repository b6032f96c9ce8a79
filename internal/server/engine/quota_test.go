package engine_test

import (
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// A tenant at its limit gives a free place to the best of its jobs, not to the
// one that happened to become ready with it.
func TestAFreePlaceGoesToTheBestHeldJob(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.write(func(tx *store.Tx) error { return tx.SetOrgLimits(w.ctx, w.org, 1, 1) })
		a := w.agent("a", 4)
		w.submit(job("first"), job("second", "first"))
		first := a.mustClaim()
		urgent := job("urgent")
		urgent.Priority = 10
		w.submit(urgent)
		a.complete(first.Lease, success())
		if got := a.mustClaim(); got.Job.Name != "urgent" {
			w.t.Errorf("claimed %s", got.Job.Name)
		}
		w.check()
	})
}

// A runner serves its own tenant's jobs: another tenant's job of the same shape is
// not opened for it and takes none of that tenant's quota.
func TestARunnerOfAnotherTenantOpensNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		other, err := w.e.EnsureOrg(w.ctx, "other")
		if err != nil {
			w.t.Fatal(err)
		}
		w.agentOf(other.ID, "theirs", 1)
		w.submit(job("mine"))
		var mine store.Org
		w.write(func(tx *store.Tx) (err error) {
			mine, err = tx.EnsureOrg(w.ctx, ci.OrgID("x"), "default", 1)
			return err
		})
		if mine.Admitted != 0 {
			w.t.Errorf("%d jobs were admitted that nobody can claim", mine.Admitted)
		}
	})
}

// A runner that comes back with less to offer leaves open what only its earlier
// session served; the next sweep takes that back, so that the tenant's quota is
// not held by what nobody can claim.
func TestASweepClosesWhatNobodyServesAnyMore(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.write(func(tx *store.Tx) error { return tx.SetOrgLimits(w.ctx, w.org, 1, 1) })
		a := w.agentWith("a", 1, "gpu")
		gpu := job("gpu")
		gpu.RunsOn.Labels = []string{"gpu"}
		w.submit(gpu)
		w.submit(job("plain"))
		a.labels = nil
		a.open(1)
		if err := w.e.Sweep(w.ctx, true); err != nil {
			w.t.Fatal(err)
		}
		if got := a.claim(); got == nil || got.Job.Name != "plain" {
			w.t.Errorf("claimed %v", got)
		}
		w.check()
	})
}
