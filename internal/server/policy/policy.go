// Package policy holds decisions without input or output: what becomes of an
// attempt that infrastructure ended, whether a failing result is tried again,
// how long to wait, and whether a runner's offer meets a job's requirements.
package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// Verdict says what becomes of a job after an attempt.
type Verdict int

// Verdicts.
const (
	// Keep: the attempt's own result is the job's.
	Keep Verdict = iota
	// Requeue: back to ready, next epoch, after a backoff.
	Requeue
	// Abort: what happened is uncertain and no policy allows another attempt.
	Abort
	// DeadLetter: infrastructure used up the budget or retry.max; the job failed.
	DeadLetter
)

// Used counts what a job has used so far, the attempt that just ended not included.
type Used struct {
	Infra   int // attempts that infrastructure ended
	Granted int // further attempts that retry.on granted
}

// Outcome is a verdict with the counts after it and the sentence that explains it.
type Outcome struct {
	Verdict Verdict
	Reason  ci.Reason
	Detail  string
	Used    Used
}

// Lost decides about an attempt that infrastructure ended (SPEC decision 1).
// cause is runner_lost, runner_shutdown, runner_restarted, runner_refused,
// lease_omitted, overdue, runner_fenced or prepare; budget counts every attempt
// that infrastructure ends, in any phase.
func Lost(cause ci.Reason, phase ci.Phase, retry *ci.RetryPolicy, used Used, budget int) Outcome {
	used.Infra++
	if used.Infra >= budget {
		return Outcome{
			DeadLetter, ci.ReasonAttemptsExhausted,
			fmt.Sprintf("%s; infrastructure ended %d of %d attempts", cause, used.Infra, budget), used,
		}
	}
	name := policyName(cause)
	covered := retry != nil && slices.Contains(retry.On, name)
	early := !phase.UserCodeMayHaveRun()
	switch {
	case early && (name != ci.ReasonPrepare || !covered):
		// Nothing is granted, and nothing used up: nothing of the user's ran.
		return Outcome{Requeue, cause, fmt.Sprintf("%s in phase %s, before any user code", cause, phase), used}
	case covered && used.Granted >= retry.Max:
		return Outcome{
			DeadLetter, ci.ReasonAttemptsExhausted,
			fmt.Sprintf("%s; retry.max: %d%s is used up", cause, retry.Max, at(retry)), used,
		}
	case covered:
		used.Granted++
		return Outcome{Requeue, cause, fmt.Sprintf("%s; granted by retry.on%s", cause, at(retry)), used}
	default:
		return Outcome{Abort, cause, fmt.Sprintf(
			"%s in phase %s; `retry: {max: 1, on: [%s]}` in the job would have allowed another attempt",
			cause, phase, name), used}
	}
}

// policyName is the word of retry.on that covers a cause.
func policyName(cause ci.Reason) ci.Reason {
	switch cause {
	case ci.ReasonRunnerShutdown, ci.ReasonPrepare:
		return cause
	default:
		return ci.ReasonRunnerLost
	}
}

func at(r *ci.RetryPolicy) string {
	if r.Line == 0 {
		return " (default policy)"
	}
	return fmt.Sprintf(" (line %d)", r.Line)
}

// Failed decides about an attempt that ended by its own result: a failing test
// is a result, unless the policy names its exit code, or timeout.
func Failed(c ci.Conclusion, exit *int, retry *ci.RetryPolicy, used Used) Outcome {
	keep := Outcome{Verdict: Keep, Used: used}
	if retry == nil || used.Granted >= retry.Max {
		return keep
	}
	switch {
	case c == ci.ConclusionTimedOut && slices.Contains(retry.On, ci.ReasonTimeout):
		used.Granted++
		return Outcome{Requeue, ci.ReasonTimeout, "timeout; granted by retry.on" + at(retry), used}
	case c == ci.ConclusionFailed && exit != nil && slices.Contains(retry.Exit, *exit):
		used.Granted++
		return Outcome{Requeue, ci.ReasonExit, fmt.Sprintf("exit code %d; granted by retry.on%s", *exit, at(retry)), used}
	}
	return keep
}

// MaxBackoff is the longest a job waits before its next attempt.
const MaxBackoff = 5 * time.Minute

// Backoff returns how long a job waits before its next attempt: 1 s doubling to
// 5 min with the number of attempts so far (from 1), then a jitter in [0, 1)
// takes up to half of it away.
func Backoff(attempts int, jitter float64) time.Duration {
	const first, most = time.Second, MaxBackoff
	d := most
	if attempts < 10 {
		d = min(first<<max(attempts-1, 0), most)
	}
	return d - time.Duration(jitter*float64(d)/2)
}

// Offer is what a session offers after the server's grants.
type Offer struct {
	OS        string         `json:"os"`
	Arch      string         `json:"arch"`
	Size      string         `json:"size,omitempty"`
	Isolation []ci.Isolation `json:"isolation"`
	Labels    []string       `json:"labels,omitempty"`
	Features  []string       `json:"features,omitempty"`
}

// Mismatch returns why the offer does not meet the requirements, "" when it does.
func Mismatch(need ci.Requirements, o Offer) string {
	var missing []string
	say := func(format string, a ...any) { missing = append(missing, fmt.Sprintf(format, a...)) }
	if need.OS != "" && need.OS != o.OS {
		say("os %s", need.OS)
	}
	if need.Arch != "" && need.Arch != o.Arch {
		say("arch %s", need.Arch)
	}
	if need.Size != "" && need.Size != o.Size {
		say("size %s", need.Size)
	}
	if need.Isolation != "" && !slices.Contains(o.Isolation, need.Isolation) {
		say("isolation %s", need.Isolation)
	}
	for _, l := range need.Labels {
		if !slices.Contains(o.Labels, l) {
			say("label %s", l)
		}
	}
	for _, f := range need.Features {
		if !slices.Contains(o.Features, f) {
			say("feature %s", f)
		}
	}
	return strings.Join(missing, ", ")
}

// Describe names requirements for a person: "os linux, label gpu".
func Describe(need ci.Requirements) string {
	if m := Mismatch(need, Offer{}); m != "" {
		return m
	}
	return "any runner"
}

// Labels returns what a session's labels count for: what the runner declares
// when its registration grants "*", else the granted labels alone.
func Labels(declared, granted []string) []string {
	if slices.Contains(granted, "*") {
		return canonical(declared)
	}
	return canonical(granted)
}

func canonical(l []string) []string {
	l = slices.Clone(l)
	slices.Sort(l)
	return slices.Compact(l)
}
