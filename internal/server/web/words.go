package web

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// status is how a run, a job, a step or an attempt is shown: a key that names
// shape and colour, and the word. The word is always there; shape and colour
// only repeat it.
type status struct {
	Key  string // of the glyph and the CSS class
	Word string
}

func statusOf(state ci.State, conclusion ci.Conclusion) status {
	switch state {
	case ci.StateWaiting:
		return status{"waiting", "Waiting"}
	case ci.StateReady:
		return status{"ready", "Queued"}
	case ci.StateRunning:
		return status{"running", "Running"}
	case ci.StateCancelling:
		return status{"cancelling", "Cancelling"}
	case ci.StateFinished:
		return ended(conclusion)
	}
	return status{"waiting", "Not started"}
}

func ended(c ci.Conclusion) status {
	switch c {
	case ci.ConclusionSuccess:
		return status{"success", "Succeeded"}
	case ci.ConclusionFailed:
		return status{"failed", "Failed"}
	case ci.ConclusionTimedOut:
		return status{"timed_out", "Timed out"}
	case ci.ConclusionCancelled:
		return status{"cancelled", "Cancelled"}
	case ci.ConclusionAborted:
		return status{"aborted", "Aborted"}
	case ci.ConclusionSkipped:
		return status{"skipped", "Skipped"}
	case ci.ConclusionCached:
		return status{"cached", "Cached"}
	}
	return status{"waiting", "Ended"}
}

func runStatus(r protocol.RunSummary) status {
	s := statusOf(r.State, r.Conclusion)
	if r.Warnings && r.Conclusion == ci.ConclusionSuccess {
		s = status{"warned", "Succeeded with warnings"}
	}
	if r.State == ci.StateWaiting {
		s.Word = "Queued"
	}
	return s
}

// jobStatus is the status of a job: a failure that its workflow allows is a
// warning, not a failure of the run.
func jobStatus(j protocol.JobSummary) status {
	s := statusOf(j.State, j.Conclusion)
	if j.AllowFailure && badEnd(j.Conclusion) {
		return status{"warned", s.Word + ", allowed"}
	}
	return s
}

func badEnd(c ci.Conclusion) bool {
	return c == ci.ConclusionFailed || c == ci.ConclusionTimedOut || c == ci.ConclusionAborted
}

// jobCounts is RunSummary.Jobs as it is shown: what went wrong in a run that
// succeeded was allowed to.
func jobCounts(r protocol.RunSummary) map[string]int {
	if !r.Warnings || r.Conclusion != ci.ConclusionSuccess {
		return r.Jobs
	}
	out := map[string]int{}
	for word, n := range r.Jobs {
		if badEnd(ci.Conclusion(word)) {
			word = "warned"
		}
		out[word] += n
	}
	return out
}

// countStatus reads a key of jobCounts: a state, a conclusion or a warning.
func countStatus(word string) status {
	if word == "warned" {
		return status{"warned", "Failed, allowed"}
	}
	if s := statusOf(ci.State(word), ""); ci.State(word) != ci.StateFinished && s.Word != "Not started" {
		return s
	}
	return ended(ci.Conclusion(word))
}

// keysInOrder lists what RunSummary.Jobs and job groups are counted by, in the
// order in which it is shown: what is over, then what is under way, then the rest.
func keysInOrder() []string {
	return []string{"success", "cached", "warned", "failed", "timed_out", "aborted", "cancelled", "running", "cancelling", "ready", "waiting", "skipped"}
}

// reasonText says a reason in words, as the end of "Failed: …".
func reasonText(r ci.Reason) string {
	switch r {
	case ci.ReasonNone:
		return ""
	case ci.ReasonExit:
		return "a step ended with an error"
	case ci.ReasonTimeout:
		return "a time limit of the workflow was reached"
	case ci.ReasonRunnerLost:
		return "the runner was lost: its lease ran out"
	case ci.ReasonRunnerShutdown:
		return "the runner shut down and handed the job over"
	case ci.ReasonRunnerRestarted:
		return "the runner restarted and reported the old attempt as ended"
	case ci.ReasonRunnerRefused:
		return "the runner refused the job before any of its commands ran"
	case ci.ReasonLeaseOmitted:
		return "the runner no longer reported the job"
	case ci.ReasonOverdue:
		return "the runner kept the job far beyond its time limit"
	case ci.ReasonPrepare:
		return "preparing source, workspace or image failed"
	case ci.ReasonArtifactMissing:
		return "an artifact that it restores is not there"
	case ci.ReasonOutputMissing:
		return "a declared output was not produced"
	case ci.ReasonOutputInvalid:
		return "a declared output is not acceptable"
	case ci.ReasonNeeds:
		return "a job that it needs did not succeed"
	case ci.ReasonCondition:
		return "its condition was false"
	case ci.ReasonConditionError:
		return "its condition could not be evaluated"
	case ci.ReasonUser:
		return "a person asked for it"
	case ci.ReasonInfrastructure:
		return "infrastructure, not the workflow, ended a job"
	case ci.ReasonAttemptsExhausted:
		return "infrastructure used up all attempts"
	case ci.ReasonPinned:
		return "its result was taken over from the run that was retried"
	case ci.ReasonRunnerFenced:
		return "an operator declared the runner's host dead"
	case ci.ReasonJobFailed:
		return "a job failed"
	case ci.ReasonCancelled:
		return "the run was cancelled"
	case ci.ReasonInternal:
		return "the runner met an error of its own"
	}
	return strings.ReplaceAll(string(r), "_", " ")
}

// waitText says in one line why a job has not started.
func waitText(w *protocol.WaitReason, now time.Time) string {
	if w == nil {
		return ""
	}
	text := w.Detail
	if text == "" {
		switch w.Code {
		case "needs":
			text = "Needs " + strings.Join(w.Needs, ", ")
		case "no_runner_online":
			text = "No runner is online"
		case "no_matching_runner":
			text = "No runner that is online offers what it asks for"
		case "runners_draining":
			text = "All matching runners are draining"
		case "runners_busy":
			text = "All matching runners are busy"
		case "quota":
			text = "The organisation's quota is used up"
		case "backoff":
			text = "Waits before the next attempt"
		default:
			text = strings.ReplaceAll(w.Code, "_", " ")
		}
	}
	if w.Position > 0 {
		text += fmt.Sprintf(" · number %d in its queue", w.Position)
	}
	if w.Until != nil && w.Until.After(now) {
		text += " · tries again in " + duration(w.Until.Sub(now))
	}
	return text
}

// duration writes a length of time as people say it, to two units.
func duration(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return strconv.FormatFloat(float64(d.Milliseconds()/100)/10, 'f', 1, 64) + " s"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min %02d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %02d min", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%d days", int(d.Hours())/24)
	}
}

// ago writes how long before now an instant was.
func ago(t, now time.Time) string {
	switch d := now.Sub(t); {
	case d < 5*time.Second:
		return "just now"
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 24*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	case d < 14*24*time.Hour:
		return fmt.Sprintf("%d d ago", int(d.Hours())/24)
	default:
		return t.UTC().Format("2 Jan 2006")
	}
}

// size writes a number of bytes.
func size(n int64) string {
	if n < 1000 {
		return strconv.FormatInt(n, 10) + " B"
	}
	v := float64(n)
	for _, unit := range []string{"kB", "MB", "GB", "TB"} {
		v /= 1000
		if v < 999.5 || unit == "TB" {
			if v < 9.95 {
				return strconv.FormatFloat(v, 'f', 1, 64) + " " + unit
			}
			return strconv.FormatFloat(v, 'f', 0, 64) + " " + unit
		}
	}
	return ""
}

// plural writes a number with its noun.
func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return grouped(int64(n)) + " " + many
}

// grouped writes a number with a thin space between groups of three digits.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "\u202f" + s[i:]
	}
	return s
}

// shortHash returns the part of a commit or digest that people read.
func shortHash(s string) string {
	s = strings.TrimPrefix(s, "sha256:")
	if len(s) > 10 {
		return s[:10]
	}
	return s
}

// subject returns the first line of a commit message.
func subject(message string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(message), "\n")
	return cut(strings.TrimSpace(line), 200)
}

// cut shortens text to n characters.
func cut(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

// fit shortens text to about n narrow columns; wide characters count twice.
func fit(s string, n int) string {
	used := 0
	for i, c := range s {
		w := 1
		if c >= 0x1100 {
			w = 2
		}
		if used += w; used > n {
			return strings.TrimRight(s[:i], " ") + "…"
		}
	}
	return s
}

// span returns how long something took, or has taken until now.
func span(from, to *time.Time, now time.Time) (time.Duration, bool) {
	switch {
	case from == nil:
		return 0, false
	case to == nil:
		return now.Sub(*from), true
	default:
		return to.Sub(*from), true
	}
}
