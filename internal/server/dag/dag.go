// Package dag decides, without input or output, what becomes of a run's jobs:
// which are ready, which are skipped and how the run is concluded. Engine loads
// the rows, asks, and writes the answers while it holds the run's lock.
package dag

import (
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

// Results folds the needs by key. A single job's conclusion stands. That of a
// matrix is failed if any leg failed, timed out or was aborted, else cancelled if any
// was, else skipped if all were, else success; it is satisfied when each leg that was
// not skipped is. Of an output that several legs set, the last that is not empty
// stands.
func Results(needs []Need) map[string]Result {
	legs := map[string][]Need{}
	for _, n := range needs {
		legs[n.Key] = append(legs[n.Key], n)
	}
	out := make(map[string]Result, len(legs))
	for key, of := range legs {
		r := Result{Conclusion: ci.ConclusionSkipped, Satisfied: true, Outputs: map[string]string{}}
		for _, n := range of {
			r.Conclusion = worse(r.Conclusion, n.Conclusion)
			r.Satisfied = r.Satisfied && (n.satisfied() || n.Conclusion == ci.ConclusionSkipped)
			for k, v := range n.Outputs {
				if v != "" || r.Outputs[k] == "" {
					r.Outputs[k] = v
				}
			}
		}
		r.Satisfied = r.Satisfied && r.Conclusion != ci.ConclusionSkipped
		if len(of) == 1 {
			r.Conclusion = of[0].Conclusion
		}
		out[key] = r
	}
	return out
}

// worse returns which of a matrix's conclusions so far and a leg's counts.
func worse(a, leg ci.Conclusion) ci.Conclusion {
	switch leg {
	case ci.ConclusionTimedOut, ci.ConclusionAborted:
		leg = ci.ConclusionFailed
	case ci.ConclusionCached:
		leg = ci.ConclusionSuccess
	case ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionCancelled, ci.ConclusionSkipped:
	}
	order := []ci.Conclusion{ci.ConclusionSkipped, ci.ConclusionSuccess, ci.ConclusionCancelled, ci.ConclusionFailed}
	return order[max(slices.Index(order, a), slices.Index(order, leg))]
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
	results := Results(needs)
	if expr == "" {
		if missing := missing(needs, results); missing != "" {
			return Decision{Reason: ci.ReasonNeeds, Detail: "needs: " + missing}
		}
		return Decision{Ready: true}
	}
	ok, err := eval(expr, results)
	switch {
	case err != nil:
		return Decision{Reason: ci.ReasonConditionError, Detail: "if: " + err.Error()}
	case !ok:
		detail := "if: " + expr + " was false"
		if missing := missing(needs, results); missing != "" {
			detail += " (" + missing + ")"
		}
		return Decision{Reason: ci.ReasonCondition, Detail: detail}
	default:
		return Decision{Ready: true}
	}
}

// missing names the jobs because of which needs are not satisfied, and how they
// ended.
func missing(needs []Need, results map[string]Result) string {
	var parts []string
	for _, n := range needs {
		if !n.satisfied() && !results[n.Key].Satisfied {
			parts = append(parts, n.Name+" "+string(n.Conclusion))
		}
	}
	return strings.Join(parts, ", ")
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
