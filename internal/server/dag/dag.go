// Package dag decides, without input or output, what becomes of a run's jobs:
// which are ready, which are skipped and how the run is concluded. Engine loads
// the rows, asks, and writes the answers while it holds the run's lock.
package dag

import (
	"maps"
	"slices"
	"strings"

	"forgeci/internal/ci"
)

// Need is one job that another needs, after it has finished.
type Need struct {
	Key          string
	Name         string
	Conclusion   ci.Conclusion
	AllowFailure bool
	Outputs      map[string]string
}

// satisfied reports whether the need counts as success: it succeeded, or it
// failed by itself and is allowed to. An infrastructure loss is never allowed.
func (n Need) satisfied() bool {
	return n.Conclusion.Succeeded() ||
		n.AllowFailure && (n.Conclusion == ci.ConclusionFailed || n.Conclusion == ci.ConclusionTimedOut)
}

// Result is what an expression sees under needs.KEY: the legs of a matrix are
// one result.
type Result struct {
	Conclusion ci.Conclusion
	// Satisfied says that success() holds for this need.
	Satisfied bool
	Outputs   map[string]string
}

// Results folds the needs by key. The worst leg decides the conclusion: failed,
// timed_out, aborted, cancelled, then skipped if all legs are, else success.
// When legs set the same output the last leg's value stands.
func Results(needs []Need) map[string]Result {
	out := map[string]Result{}
	for _, n := range needs {
		r, seen := out[n.Key]
		if !seen {
			r = Result{Conclusion: n.Conclusion, Satisfied: true, Outputs: map[string]string{}}
		}
		r.Conclusion = worse(r.Conclusion, n.Conclusion)
		r.Satisfied = r.Satisfied && n.satisfied()
		maps.Copy(r.Outputs, n.Outputs)
		out[n.Key] = r
	}
	return out
}

func worse(a, b ci.Conclusion) ci.Conclusion {
	order := []ci.Conclusion{
		ci.ConclusionSkipped, ci.ConclusionCached, ci.ConclusionSuccess, ci.ConclusionCancelled,
		ci.ConclusionAborted, ci.ConclusionTimedOut, ci.ConclusionFailed,
	}
	return order[max(slices.Index(order, a), slices.Index(order, b))]
}

// Evaluator evaluates a job's if over the results of its needs.
type Evaluator func(expr string, needs map[string]Result) (bool, error)

// Decision says what becomes of a job whose needs have all finished.
type Decision struct {
	Ready  bool
	Reason ci.Reason
	Detail string
}

// Decide says whether a job whose needs have all finished starts or is skipped.
// Without an expression it starts when every direct need is satisfied. An
// expression that cannot be evaluated skips the job and says why; nothing about
// ancestors further up is looked at.
func Decide(expr string, needs []Need, eval Evaluator) Decision {
	if expr == "" {
		var missing []string
		for _, n := range needs {
			if !n.satisfied() {
				missing = append(missing, n.Name+" "+string(n.Conclusion))
			}
		}
		if len(missing) > 0 {
			return Decision{Reason: ci.ReasonNeeds, Detail: "needs: " + strings.Join(missing, ", ")}
		}
		return Decision{Ready: true}
	}
	ok, err := eval(expr, Results(needs))
	switch {
	case err != nil:
		return Decision{Reason: ci.ReasonConditionError, Detail: "if: " + err.Error()}
	case !ok:
		return Decision{Reason: ci.ReasonCondition, Detail: "if: " + expr + " was false" + unsatisfied(needs)}
	default:
		return Decision{Ready: true}
	}
}

func unsatisfied(needs []Need) string {
	var parts []string
	for _, n := range needs {
		if !n.satisfied() {
			parts = append(parts, n.Name+" "+string(n.Conclusion))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

// Tally counts how a run's jobs ended.
type Tally struct {
	Failed   int64 // failed by themselves, not allowed
	TimedOut int64 // not allowed
	Infra    int64 // aborted or dead letters
	// Cancelled says that the run was cancelled.
	Cancelled bool
}

// Conclude says how a run ends whose jobs have all finished.
func Conclude(t Tally) (ci.Conclusion, ci.Reason) {
	switch {
	case t.Cancelled:
		return ci.ConclusionCancelled, ci.ReasonUser
	case t.Infra > 0:
		return ci.ConclusionFailed, ci.ReasonInfrastructure
	case t.Failed > 0:
		return ci.ConclusionFailed, ci.ReasonJobFailed
	case t.TimedOut > 0:
		return ci.ConclusionTimedOut, ci.ReasonTimeout
	default:
		return ci.ConclusionSuccess, ci.ReasonNone
	}
}

// Edges returns the pairs (need, job) of indexes into jobs: a key in needs
// stands for all jobs of that key.
func Edges(jobs []ci.JobSpec) [][2]int {
	byKey := map[string][]int{}
	for i, j := range jobs {
		byKey[j.Key] = append(byKey[j.Key], i)
	}
	var out [][2]int
	for i, j := range jobs {
		for _, key := range j.Needs {
			for _, n := range byKey[key] {
				out = append(out, [2]int{n, i})
			}
		}
	}
	return out
}

// Chains returns for each of n jobs the number of jobs on the longest chain that
// begins with it. The edges must have no cycle.
func Chains(n int, edges [][2]int) []int {
	next := make([][]int, n)
	left := make([]int, n) // unfinished successors
	for _, e := range edges {
		next[e[1]] = append(next[e[1]], e[0])
		left[e[0]]++
	}
	chain := make([]int, n)
	var ready []int
	for i := range n {
		if left[i] == 0 {
			chain[i] = 1
			ready = append(ready, i)
		}
	}
	for len(ready) > 0 {
		i := ready[len(ready)-1]
		ready = ready[:len(ready)-1]
		for _, need := range next[i] {
			chain[need] = max(chain[need], chain[i]+1)
			if left[need]--; left[need] == 0 {
				ready = append(ready, need)
			}
		}
	}
	return chain
}
