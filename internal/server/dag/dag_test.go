package dag_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"forgeci/internal/ci"
	"forgeci/internal/server/dag"
)

func never(string, map[string]dag.Result) (bool, error) { panic("not asked") }

func TestAJobWithoutAConditionNeedsItsDirectNeeds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		conclusion ci.Conclusion
		allow      bool
		ready      bool
	}{
		{ci.ConclusionSuccess, false, true},
		{ci.ConclusionCached, false, true},
		{ci.ConclusionFailed, false, false},
		{ci.ConclusionFailed, true, true},
		{ci.ConclusionTimedOut, false, false},
		{ci.ConclusionTimedOut, true, true},
		{ci.ConclusionSkipped, false, false},
		{ci.ConclusionSkipped, true, false},
		{ci.ConclusionCancelled, true, false},
		{ci.ConclusionAborted, false, false},
		{ci.ConclusionAborted, true, false}, // uncertain is never allowed
	} {
		got := dag.Decide("", []dag.Need{{Key: "a", Name: "a", Conclusion: c.conclusion, AllowFailure: c.allow}}, never)
		if got.Ready != c.ready {
			t.Errorf("need %s allowed=%t: ready %t", c.conclusion, c.allow, got.Ready)
		}
		if !got.Ready && (got.Reason != ci.ReasonNeeds || got.Detail != "needs: a "+string(c.conclusion)) {
			t.Errorf("need %s: reason %s %q does not name it", c.conclusion, got.Reason, got.Detail)
		}
	}
}

func TestAConditionDecidesAndItsErrorSkipsWithAReason(t *testing.T) {
	t.Parallel()
	needs := []dag.Need{{Key: "a", Name: "a", Conclusion: ci.ConclusionFailed}}
	answer := func(ok bool, err error) dag.Evaluator {
		return func(string, map[string]dag.Result) (bool, error) { return ok, err }
	}
	if d := dag.Decide("always()", needs, answer(true, nil)); !d.Ready {
		t.Errorf("true: %+v", d)
	}
	if d := dag.Decide("success()", needs, answer(false, nil)); d.Ready || d.Reason != ci.ReasonCondition || d.Detail != "if: success() was false (a failed)" {
		t.Errorf("false: %+v", d)
	}
	if d := dag.Decide("x", needs, answer(false, errors.New("boom"))); d.Ready || d.Reason != ci.ReasonConditionError || d.Detail != "if: boom" {
		t.Errorf("error: %+v", d)
	}
}

func TestTheLegsOfAMatrixAreOneResult(t *testing.T) {
	t.Parallel()
	const (
		ok, cached, failed, timedOut, aborted, cancelled, skipped = ci.ConclusionSuccess, ci.ConclusionCached, ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted, ci.ConclusionCancelled, ci.ConclusionSkipped
	)
	for _, c := range []struct {
		legs      []ci.Conclusion
		allowed   string // of which failure is allowed: all, first or none
		want      ci.Conclusion
		satisfied bool
		missing   string
	}{
		{[]ci.Conclusion{ok, ok}, "none", ok, true, ""},
		{[]ci.Conclusion{ok, cached}, "none", ok, true, ""},
		{[]ci.Conclusion{ok, skipped}, "none", ok, true, ""},
		{[]ci.Conclusion{skipped, skipped}, "all", skipped, false, "m0 skipped, m1 skipped"},
		{[]ci.Conclusion{skipped, cancelled}, "none", cancelled, false, "m0 skipped, m1 cancelled"},
		{[]ci.Conclusion{ok, cancelled}, "all", cancelled, false, "m1 cancelled"},
		{[]ci.Conclusion{cancelled, failed, ok}, "none", failed, false, "m0 cancelled, m1 failed"},
		{[]ci.Conclusion{ok, timedOut}, "none", failed, false, "m1 timed_out"},
		{[]ci.Conclusion{aborted, ok}, "all", failed, false, "m0 aborted"}, // uncertain is never allowed
		{[]ci.Conclusion{failed, timedOut, ok}, "all", failed, true, ""},
		{[]ci.Conclusion{failed, failed}, "first", failed, false, "m1 failed"},
		{[]ci.Conclusion{timedOut}, "none", timedOut, false, "m0 timed_out"},
		{[]ci.Conclusion{timedOut}, "all", timedOut, true, ""},
		{[]ci.Conclusion{cached}, "none", cached, true, ""},
		{[]ci.Conclusion{skipped}, "none", skipped, false, "m0 skipped"},
	} {
		var needs []dag.Need
		for i, l := range c.legs {
			needs = append(needs, dag.Need{
				Key: "m", Name: fmt.Sprint("m", i), Conclusion: l, AllowFailure: c.allowed == "all" || c.allowed == "first" && i == 0,
			})
		}
		if got := dag.Results(needs)["m"]; got.Conclusion != c.want || got.Satisfied != c.satisfied {
			t.Errorf("%v, %s allowed: %s, satisfied %t", c.legs, c.allowed, got.Conclusion, got.Satisfied)
		}
		// Without a condition the same decides as with success().
		detail := ""
		if c.missing != "" {
			detail = "needs: " + c.missing
		}
		if got := dag.Decide("", needs, never); got.Ready != c.satisfied || got.Detail != detail {
			t.Errorf("%v, %s allowed: %+v, want %q", c.legs, c.allowed, got, detail)
		}
	}
	got := dag.Results([]dag.Need{
		{Key: "m", Conclusion: ok, Outputs: map[string]string{"v": "1", "w": "a"}}, {Key: "m", Conclusion: ok, Outputs: map[string]string{"v": "2", "w": ""}},
	})
	if want := map[string]string{"v": "2", "w": "a"}; !maps.Equal(got["m"].Outputs, want) {
		t.Errorf("outputs %v, want %v", got["m"].Outputs, want)
	}
}

func TestARunIsConcludedByTheWorstThatIsCertain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tally      dag.Tally
		conclusion ci.Conclusion
		reason     ci.Reason
	}{
		{dag.Tally{}, ci.ConclusionSuccess, ""},
		{dag.Tally{Failed: 1}, ci.ConclusionFailed, ci.ReasonJobFailed},
		{dag.Tally{TimedOut: 1}, ci.ConclusionTimedOut, ci.ReasonTimeout},
		{dag.Tally{Failed: 1, TimedOut: 1}, ci.ConclusionFailed, ci.ReasonJobFailed},
		{dag.Tally{Failed: 1, Infra: 1}, ci.ConclusionFailed, ci.ReasonInfrastructure},
		{dag.Tally{Infra: 1, Cancelled: true}, ci.ConclusionCancelled, ci.ReasonUser},
	} {
		if got, why := dag.Conclude(c.tally); got != c.conclusion || why != c.reason {
			t.Errorf("%+v: %s (%s), want %s (%s)", c.tally, got, why, c.conclusion, c.reason)
		}
	}
}

// Chains agrees with a slow definition on drawn graphs.
func TestChainsAreTheLongestPaths(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "jobs")
		jobs := make([]ci.JobSpec, n)
		for i := range jobs {
			jobs[i].Key = fmt.Sprint(i)
			for k := range i {
				if rapid.Bool().Draw(t, "edge") {
					jobs[i].Needs = append(jobs[i].Needs, fmt.Sprint(k))
				}
			}
		}
		edges := dag.Edges(jobs)
		var longest func(i int) int
		longest = func(i int) int {
			most := 0
			for _, e := range edges {
				if e[0] == i {
					most = max(most, longest(e[1]))
				}
			}
			return most + 1
		}
		got := dag.Chains(n, edges)
		for i := range n {
			if want := longest(i); got[i] != want {
				t.Fatalf("job %d: %d, want %d", i, got[i], want)
			}
		}
	})
}

func TestAKeyInNeedsStandsForAllLegs(t *testing.T) {
	t.Parallel()
	got := dag.Edges([]ci.JobSpec{{Key: "m"}, {Key: "m"}, {Key: "t", Needs: []string{"m"}}})
	if want := [][2]int{{0, 2}, {1, 2}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
