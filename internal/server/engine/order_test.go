package engine_test

import (
	"fmt"
	"slices"
	"testing"

	"forgeci/internal/ci"
)

// order lets a runner of one slot do all jobs and returns their names as they came.
func (w *world) order(a *agent, n int) []string {
	w.t.Helper()
	var names []string
	for range n {
		ticket := a.mustClaim()
		names = append(names, ticket.Job.Name)
		a.complete(ticket.Lease, success())
	}
	return names
}

// WF-3: of a run, jobs with the longest remaining chain go first, whenever they
// become ready.
func TestTheLongestChainOfARunGoesFirst(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		jobs := []ci.JobSpec{job("leaf 1"), job("leaf 2"), job("a"), job("b", "a"), job("c", "b"), job("d", "c"), job("x"), job("y", "x"), job("leaf 3")}
		w.submit(jobs...)
		got := w.order(w.agent("a", 1), len(jobs))
		want := []string{"a", "b", "c", "x", "d", "leaf 1", "leaf 2", "leaf 3", "y"}
		place := func(name string) int { return slices.Index(got, name) }
		slices.Sort(want)
		if names := slices.Sorted(slices.Values(got)); !slices.Equal(names, want) {
			w.t.Fatalf("%q", got)
		}
		// a has a chain of 4, b of 3, c and x of 2, the others of 1.
		for _, pair := range [][2]string{{"a", "b"}, {"b", "x"}, {"b", "c"}, {"c", "leaf 1"}, {"x", "leaf 1"}, {"c", "d"}, {"x", "y"}} {
			if place(pair[0]) > place(pair[1]) {
				w.t.Errorf("%s comes behind %s: %q", pair[0], pair[1], got)
			}
		}
		if place("d") < place("leaf 1") || place("y") < place("leaf 3") {
			w.t.Errorf("a job overtakes others with as long a chain: %q", got)
		}
		w.check()
	})
}

// A job overtakes others of its own run only: another run's job waits for one job
// more for each that does, and for none when nothing of that run is before it.
func TestAChainDelaysAnotherRunByItsOwnLengthOnly(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		first := []ci.JobSpec{job("a"), job("b", "a"), job("c", "b"), job("d", "c")}
		for i := range 5 {
			first = append(first, job(fmt.Sprint("leaf ", i)))
		}
		w.submit(first...)
		w.submit(job("other"))
		last := []ci.JobSpec{job("p"), job("q", "p")}
		w.submit(last...)
		got := w.order(w.agent("a", 1), len(first)+1+len(last))
		if at := slices.Index(got, "other"); at != 8 || !slices.Equal(got[:3], []string{"a", "b", "c"}) {
			w.t.Errorf("the other run's job comes as number %d of %q", at+1, got)
		}
		if !slices.Equal(got[9:], []string{"p", "d", "q"}) {
			w.t.Errorf("behind it come %q", got[9:])
		}
		w.check()
	})
}
