package sim

import (
	"maps"
	"slices"
	"testing"

	"forgeci/internal/server/store"
)

// shrink leaves out steps, then faults, of a failing simulation while it still
// breaks the same promise; it runs it at most budget times.
func shrink(c config, failed result, budget int) (config, result) {
	broken := failed.violation
	c.history, c.steps = false, max(failed.drawn, broken.step+1)
	c.drop, c.calm = maps.Clone(c.drop), maps.Clone(c.calm)
	if c.drop == nil {
		c.drop = map[int]bool{}
	}
	if c.calm == nil {
		c.calm = map[int]bool{}
	}
	fails := func(c config) bool {
		if budget <= 0 {
			return false
		}
		budget--
		r := simulate(c)
		return r.violation != nil && r.violation.invariant == broken.invariant
	}
	if broken.step+1 < c.steps {
		short := c
		short.from = broken.step + 1
		if fails(short) {
			c = short
		}
	}
	// without tries to add a run of steps to a set, and keeps it when it still fails.
	without := func(set map[int]bool, steps []int) bool {
		var added []int
		for _, s := range steps {
			if !set[s] {
				set[s] = true
				added = append(added, s)
			}
		}
		if len(added) > 0 && fails(c) {
			return true
		}
		for _, s := range added {
			delete(set, s)
		}
		return false
	}
	last := c.steps
	if c.from > 0 {
		last = c.from
	}
	all := make([]int, last)
	for i := range all {
		all[i] = i
	}
	for _, set := range []map[int]bool{c.calm, c.drop} {
		for size := max(last/2, 1); size >= 1 && budget > 0; size /= 2 {
			for chunk := range slices.Chunk(all, size) {
				without(set, chunk)
			}
		}
	}
	c.history = true
	return c, simulate(c)
}

// firstFailure returns a configuration whose simulation breaks a promise, because
// fail breaks it.
func firstFailure(t *testing.T, fail func(*world)) config {
	t.Helper()
	for seed := range uint64(50) {
		c := config{seed: seed + 1, steps: stepsPerSeed, sabotage: fail}
		if r := simulate(c); r.violation != nil {
			return c
		}
	}
	t.Fatal("no seed of 50 noticed")
	return config{}
}

// loseLease deletes a live lease behind the engine's back.
func loseLease(w *world) {
	if w.step != 150 || len(w.mirror.leaseOrder) == 0 {
		return
	}
	l := w.mirror.leases[w.mirror.leaseOrder[0]].row
	w.must(w.store.Write(w.ctx, func(tx *store.Tx) error { return tx.EndLeases(w.ctx, []store.Lease{l}) }))
}

func TestAFailingSeedReplaysBitForBit(t *testing.T) {
	t.Parallel()
	bad := firstFailure(t, loseLease)
	for _, c := range []config{bad, {seed: bad.seed, steps: stepsPerSeed}} {
		first := simulate(c)
		for range 2 {
			if again := simulate(c); again.hash != first.hash || again.ran != first.ran {
				t.Fatalf("seed %d: trace %s in %d steps, then %s in %d", c.seed, first.hash, first.ran, again.hash, again.ran)
			}
		}
	}
}

func TestAFailingSeedIsShrunk(t *testing.T) {
	t.Parallel()
	bad := firstFailure(t, loseLease)
	was := simulate(bad)
	small, r := shrink(bad, was, 150)
	if r.violation == nil || r.violation.invariant != was.violation.invariant {
		t.Fatalf("it broke %q and breaks %v now", was.violation.invariant, r.violation)
	}
	if small.drop[150] {
		t.Error("the step that breaks it was left out")
	}
	if r.ran > 60 || r.faults() > was.faults()/2 {
		t.Errorf("%d of %d steps and %d of %d faults are left", r.ran, was.ran, r.faults(), was.faults())
	}
	if len(r.lines) == 0 {
		t.Error("no history")
	}
}

func TestDifferentSeedsDiffer(t *testing.T) {
	t.Parallel()
	seen := map[string]uint64{}
	for seed := range uint64(6) {
		r := simulate(config{seed: seed + 500, steps: 60})
		if other, ok := seen[r.hash]; ok {
			t.Errorf("seeds %d and %d have one trace", seed+500, other)
		}
		seen[r.hash] = seed + 500
	}
}
