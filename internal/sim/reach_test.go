package sim

import (
	"fmt"
	"slices"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// A large run has to have been everywhere: what is listed here is counted in each
// seed, and with at least reachSeeds seeds every line is required.
const reachSeeds = 500

// pairs are the state pairs that have to be reached: each step of the transition
// tables, and each state with the conclusions that it can have.
func pairs() []string {
	var out []string
	table := func(what string, ts []ci.Transition, ended ...ci.Conclusion) {
		for _, t := range ts {
			out = append(out, step(what, t.From, t.To))
			for _, s := range []ci.State{t.From, t.To} {
				if p := pair(what, s, ""); s != ci.StateFinished && !slices.Contains(out, p) {
					out = append(out, p)
				}
			}
		}
		for _, c := range ended {
			out = append(out, pair(what, ci.StateFinished, c))
		}
	}
	// Not a job's conclusion here: cached, which needs results that are looked up by
	// their inputs (`inputs:` of a job); nothing concludes a job so yet.
	table("job", ci.JobTransitions(), ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionCancelled,
		ci.ConclusionAborted, ci.ConclusionSkipped)
	// Not a run's conclusions: aborted and cached are words for jobs; skipped is
	// allowed by the schema and dag.Conclude does not use it.
	table("run", ci.RunTransitions(), ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionCancelled)
	slices.Sort(out)
	return out
}

func pair(what string, s ci.State, c ci.Conclusion) string {
	return strings.TrimSuffix(fmt.Sprintf("%s %s/%s", what, s, c), "/")
}

func step(what string, from, to ci.State) string { return fmt.Sprintf("%s %s to %s", what, from, to) }

// reachRun counts the steps that a run has taken, also those that one
// transaction takes one behind the other.
func (w *world) reachRun(was, is store.Run, known bool) {
	from := was.State
	if !known {
		from = ci.StateWaiting // inserted so
	}
	if is.CancelVersion > was.CancelVersion && from != ci.StateCancelling {
		w.pairs[step("run", from, ci.StateCancelling)]++
		from = ci.StateCancelling
	}
	w.path("run", ci.RunTransitions(), from, is.State)
	w.pairs[pair("run", is.State, is.Conclusion)]++
}

func (w *world) reachJob(was, is store.Job) {
	from := was.State
	switch {
	case was.ID == "" && is.PinnedFrom != "":
		w.pairs[pair("job", is.State, is.Conclusion)]++
		return
	case was.ID == "":
		from = ci.StateWaiting
		w.pairs[pair("job", from, "")]++
	case is.Epoch > was.Epoch && from != ci.StateReady: // lost and claimed again by one merge
		w.path("job", ci.JobTransitions(), from, ci.StateReady)
		from = ci.StateReady
	}
	if is.Epoch > was.Epoch && is.State != ci.StateRunning {
		w.path("job", ci.JobTransitions(), from, ci.StateRunning)
		from = ci.StateRunning
	}
	w.path("job", ci.JobTransitions(), from, is.State)
	w.pairs[pair("job", is.State, is.Conclusion)]++
}

// path counts the steps of the shortest legal way.
func (w *world) path(what string, ts []ci.Transition, from, to ci.State) {
	type way struct {
		at    ci.State
		steps []string
	}
	for open := []way{{at: from}}; len(open) > 0; open = open[1:] {
		if open[0].at == to {
			for _, s := range open[0].steps {
				w.pairs[s]++
			}
			return
		}
		for _, t := range ts {
			if t.From == open[0].at && len(open[0].steps) < len(ts) {
				open = append(open, way{t.To, append(slices.Clone(open[0].steps), step(what, t.From, t.To))})
			}
		}
	}
	w.bad("legal steps", "a %s does not go from %s to %s", what, from, to)
}

// missing returns what of a list was never counted.
func missing[T ~string](all []T, seen map[T]int) (out []T) {
	for _, s := range all {
		if seen[s] == 0 {
			out = append(out, s)
		}
	}
	return out
}

// keysOf returns what was counted, in order.
func keysOf[T ~string, V any](seen map[T]V) []T {
	out := []T{}
	for k := range seen {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// faults are the kinds of what goes wrong.
func faultKinds() []string {
	return append([]string{
		"crash", "crash before commit", "crash behind commit", "deadlock", "failed, not stored", "failed, but stored",
		"lock wait", "overtaken", "read failed", "request lost", "reply lost", "duplicate", "lie",
		"runner crash", "runner crash while it opens a session", "runner restart", "runner paused or resumed", "runner drains", "runner's polls are refused", "node stopped or started",
		"the database's clock jumps", "the database's clock is set a little", "the database's clock changes its rate", "time passes",
	}, storeFaults()...)
}

// sometimes are events of which at least one is required in a large run.
func sometimes() []string {
	return []string{
		evGrantLost, evGrantShutdown, evGrantPrepare, evGrantTimeout, evGrantExit, evGrantUsedUp, evBudget, evUnstarted, evAbort,
		evLost, evRestarted, evRefused, evOmitted, evOverdue, evOverdueEarly, evFenced, evShutdown,
		evHandBack, evHandOverAborts, evHandOverLate,
		evCancelFirst, evCompletionFirst, evCancelTwice, evCancelProof, evCancelFence,
		evQuarantineProof, evQuarantineFence, evClockRepaired, evStopsItself,
		evLateRepeat, evLateClaim, evLateSession, evSubmitTwice, evUploadTwice,
		evEarlierLife, evEarlierSession, evTwoSessions, evMerge, evRetryPinned, evRequeue, evAllSkipped,
		evLogTwice, evLogHole, evLogFull, evLogRefused, evLogLoss, evLogGap, evLogSealed, evReadFailed, evTendFailed, evRestored, evRestoreAgain,
	}
}

// Events.
const (
	evGrantLost      = "retry granted: runner lost"
	evGrantShutdown  = "retry granted: runner shutdown"
	evGrantPrepare   = "retry granted: preparation failed"
	evGrantTimeout   = "retry granted: timeout"
	evGrantExit      = "retry granted: exit code"
	evGrantUsedUp    = "dead letter: retry.max is used up"
	evBudget         = "dead letter: the budget is used up"
	evUnstarted      = "lost before user code: requeued"
	evAbort          = "lost behind user code without a policy: aborted"
	evLost           = "ended: runner lost"
	evRestarted      = "ended: runner restarted"
	evRefused        = "ended: runner refused"
	evOmitted        = "ended: heartbeats left the lease out"
	evOverdue        = "ended: overdue"
	evOverdueEarly   = "overdue before user code: requeued"
	evFenced         = "ended: host fenced"
	evShutdown       = "ended: runner shutdown"
	evHandBack       = "hand-over: requeued"
	evHandOverAborts = "hand-over: aborted"
	evHandOverLate   = "hand-over: refused while cancelling"

	evCancelFirst     = "cancel came first: completion refused"
	evCompletionFirst = "completion came first: cancel refused"
	evCancelTwice     = "cancel repeated"
	evCancelProof     = "cancelling, then proof of termination without a lease"
	evCancelFence     = "cancelling, then the host was fenced"

	evQuarantineProof = "quarantine, then proof"
	evQuarantineFence = "quarantine, then fenced by an operator"
	evClockRepaired   = "clock repaired"
	evStopsItself     = "runner stops an attempt by itself"

	evLateRepeat  = "late duplicate of an end answered"
	evLateClaim   = "repeated claim answered with its lease"
	evLateSession = "repeated session answered"
	evSubmitTwice = "repeated submission answered"
	evUploadTwice = "repeated upload session answered"

	evEarlierLife    = "call of an earlier process life arrived behind the next life's session"
	evEarlierSession = "opening of a session arrived behind that of the next life"
	evTwoSessions    = "session opened while jobs of an earlier one run"

	evLogTwice     = "repeated chunks acknowledged"
	evLogHole      = "chunks stored behind a hole"
	evLogFull      = "limit of a log reached"
	evLogRefused   = "chunks refused"
	evLogLoss      = "end of a log not waited for"
	evLogGap       = "gap marked in a sealed log"
	evLogSealed    = "log sealed while things go wrong"
	evReadFailed   = "log not readable while things go wrong"
	evTendFailed   = "sealing or collecting failed"
	evRestored     = "artifact restored"
	evRestoreAgain = "damaged artifact fetched again"

	evMerge       = "several calls in one transaction"
	evRetryPinned = "retry took results over"
	evRequeue     = "dead letter requeued"
	evAllSkipped  = "every job of a run skipped"
)

// saw counts an event.
func (w *world) saw(event string) { w.events[event]++ }

// sawEnd counts what the trail says of ends of attempts.
func (w *world) sawEnd(a store.Audit) {
	switch a.Action {
	case "clock_shifted":
		w.saw(evClockRepaired)
	case "dead_letter":
		if strings.Contains(a.Detail, "retry.max") {
			w.saw(evGrantUsedUp)
		} else {
			w.saw(evBudget)
		}
	case "attempt_ended", "requeued":
		w.sawReason(a.Detail)
	}
}

func (w *world) sawReason(detail string) {
	granted := strings.Contains(detail, "granted by retry.on")
	aborts := strings.Contains(detail, "would have allowed")
	early := strings.Contains(detail, "before any user code")
	for reason, event := range map[ci.Reason]string{
		ci.ReasonRunnerLost: evLost, ci.ReasonRunnerRestarted: evRestarted, ci.ReasonRunnerRefused: evRefused,
		ci.ReasonLeaseOmitted: evOmitted, ci.ReasonOverdue: evOverdue, ci.ReasonRunnerFenced: evFenced, ci.ReasonRunnerShutdown: evShutdown,
	} {
		if strings.Contains(detail, "("+string(reason)+")") {
			w.saw(event)
		}
	}
	shutdown := strings.Contains(detail, string(ci.ReasonRunnerShutdown))
	switch {
	case granted && strings.Contains(detail, "timeout;"):
		w.saw(evGrantTimeout)
	case granted && strings.Contains(detail, "exit code"):
		w.saw(evGrantExit)
	case granted && shutdown:
		w.saw(evGrantShutdown)
	case granted && strings.Contains(detail, "prepare;"):
		w.saw(evGrantPrepare)
	case granted:
		w.saw(evGrantLost)
	case aborts:
		w.saw(evAbort)
	case early:
		w.saw(evUnstarted)
	}
	if early && strings.Contains(detail, string(ci.ReasonOverdue)) {
		w.saw(evOverdueEarly)
	}
	switch {
	case shutdown && (granted || early):
		w.saw(evHandBack)
	case shutdown && aborts:
		w.saw(evHandOverAborts)
	}
}
