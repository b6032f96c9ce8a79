package policy_test

import (
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/policy"
)

func TestWhatBecomesOfALostAttempt(t *testing.T) {
	t.Parallel()
	on := func(max int, causes ...ci.Reason) *ci.RetryPolicy {
		return &ci.RetryPolicy{Max: max, On: causes, Line: 7}
	}
	for _, c := range []struct {
		name    string
		cause   ci.Reason
		phase   ci.Phase
		retry   *ci.RetryPolicy
		used    policy.Used
		verdict policy.Verdict
		reason  ci.Reason
		after   policy.Used
	}{
		{"claimed, no policy: nothing of the user's ran", ci.ReasonRunnerLost, ci.PhaseClaimed, nil, policy.Used{}, policy.Requeue, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"preparing, no policy", ci.ReasonRunnerLost, ci.PhasePreparing, nil, policy.Used{}, policy.Requeue, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"building runs user code", ci.ReasonRunnerLost, ci.PhaseBuilding, nil, policy.Used{}, policy.Abort, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"executing, no policy: no guess", ci.ReasonRunnerLost, ci.PhaseExecuting, nil, policy.Used{}, policy.Abort, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"finalising, no policy", ci.ReasonRunnerLost, ci.PhaseFinalising, nil, policy.Used{}, policy.Abort, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"executing, covered", ci.ReasonRunnerLost, ci.PhaseExecuting, on(1, ci.ReasonRunnerLost), policy.Used{}, policy.Requeue, ci.ReasonRunnerLost, policy.Used{Infra: 1, Granted: 1}},
		{"executing, other cause covered", ci.ReasonRunnerLost, ci.PhaseExecuting, on(1, ci.ReasonTimeout), policy.Used{}, policy.Abort, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"max used up by a loss is a dead letter", ci.ReasonRunnerLost, ci.PhaseExecuting, on(1, ci.ReasonRunnerLost), policy.Used{Infra: 1, Granted: 1}, policy.DeadLetter, ci.ReasonAttemptsExhausted, policy.Used{Infra: 2, Granted: 1}},
		{"the budget is the smaller", ci.ReasonRunnerLost, ci.PhaseExecuting, on(9, ci.ReasonRunnerLost), policy.Used{Infra: 2, Granted: 2}, policy.DeadLetter, ci.ReasonAttemptsExhausted, policy.Used{Infra: 3, Granted: 2}},
		{"the budget counts early phases too", ci.ReasonRunnerLost, ci.PhaseClaimed, nil, policy.Used{Infra: 2}, policy.DeadLetter, ci.ReasonAttemptsExhausted, policy.Used{Infra: 3}},
		{"a restart is covered by runner_lost", ci.ReasonRunnerRestarted, ci.PhaseExecuting, on(1, ci.ReasonRunnerLost), policy.Used{}, policy.Requeue, ci.ReasonRunnerRestarted, policy.Used{Infra: 1, Granted: 1}},
		{"a fenced host is covered by runner_lost", ci.ReasonRunnerFenced, ci.PhaseExecuting, on(1, ci.ReasonRunnerLost), policy.Used{}, policy.Requeue, ci.ReasonRunnerFenced, policy.Used{Infra: 1, Granted: 1}},
		{"shutdown has a word of its own", ci.ReasonRunnerShutdown, ci.PhaseExecuting, on(1, ci.ReasonRunnerLost), policy.Used{}, policy.Abort, ci.ReasonRunnerShutdown, policy.Used{Infra: 1}},
		{"shutdown, covered", ci.ReasonRunnerShutdown, ci.PhaseExecuting, on(1, ci.ReasonRunnerShutdown), policy.Used{}, policy.Requeue, ci.ReasonRunnerShutdown, policy.Used{Infra: 1, Granted: 1}},
		{"a policy takes nothing away from a hand-over before user code", ci.ReasonRunnerShutdown, ci.PhasePreparing, on(1, ci.ReasonRunnerShutdown), policy.Used{Infra: 1, Granted: 1}, policy.Requeue, ci.ReasonRunnerShutdown, policy.Used{Infra: 2, Granted: 1}},
		{"a loss before user code uses nothing up", ci.ReasonRunnerLost, ci.PhasePreparing, on(1, ci.ReasonRunnerLost), policy.Used{}, policy.Requeue, ci.ReasonRunnerLost, policy.Used{Infra: 1}},
		{"the budget counts it with a policy, too", ci.ReasonRunnerLost, ci.PhasePreparing, on(9, ci.ReasonRunnerLost), policy.Used{Infra: 2}, policy.DeadLetter, ci.ReasonAttemptsExhausted, policy.Used{Infra: 3}},
		{"prepare, covered", ci.ReasonPrepare, ci.PhasePreparing, on(1, ci.ReasonPrepare), policy.Used{}, policy.Requeue, ci.ReasonPrepare, policy.Used{Infra: 1, Granted: 1}},
		{"prepare fails before user code", ci.ReasonPrepare, ci.PhasePreparing, nil, policy.Used{}, policy.Requeue, ci.ReasonPrepare, policy.Used{Infra: 1}},
		{"prepare with max 0", ci.ReasonPrepare, ci.PhasePreparing, on(0, ci.ReasonPrepare), policy.Used{}, policy.DeadLetter, ci.ReasonAttemptsExhausted, policy.Used{Infra: 1}},
		{"the runner's own defect while executing", ci.ReasonInternal, ci.PhaseExecuting, nil, policy.Used{}, policy.Abort, ci.ReasonInternal, policy.Used{Infra: 1}},
	} {
		got := policy.Lost(c.cause, c.phase, c.retry, c.used, 3)
		if got.Verdict != c.verdict || got.Reason != c.reason || got.Used != c.after {
			t.Errorf("%s: %+v, want verdict %d, %s, %+v", c.name, got, c.verdict, c.reason, c.after)
		}
	}
	aborted := policy.Lost(ci.ReasonRunnerLost, ci.PhaseExecuting, nil, policy.Used{}, 3)
	if !strings.Contains(aborted.Detail, "retry: {max: 1, on: [runner_lost]}") {
		t.Errorf("an abort does not name the line that would have allowed a retry: %s", aborted.Detail)
	}
}

func TestCase_RERUN_04_AFailingTestIsAResult(t *testing.T) {
	t.Parallel()
	n := func(i int) *int { return &i }
	retry := &ci.RetryPolicy{Max: 2, On: []ci.Reason{ci.ReasonTimeout}, Exit: []int{75}}
	for _, c := range []struct {
		conclusion ci.Conclusion
		exit       *int
		retry      *ci.RetryPolicy
		used       policy.Used
		want       policy.Verdict
	}{
		{ci.ConclusionFailed, n(1), nil, policy.Used{}, policy.Keep},
		{ci.ConclusionFailed, n(1), retry, policy.Used{}, policy.Keep},
		{ci.ConclusionFailed, n(137), retry, policy.Used{}, policy.Keep},
		{ci.ConclusionFailed, n(75), retry, policy.Used{}, policy.Requeue},
		{ci.ConclusionFailed, n(75), retry, policy.Used{Granted: 1}, policy.Requeue},
		{ci.ConclusionFailed, n(75), retry, policy.Used{Granted: 2}, policy.Keep},
		{ci.ConclusionFailed, nil, retry, policy.Used{}, policy.Keep},
		{ci.ConclusionTimedOut, nil, retry, policy.Used{}, policy.Requeue},
		{ci.ConclusionTimedOut, nil, nil, policy.Used{}, policy.Keep},
		{ci.ConclusionTimedOut, n(75), &ci.RetryPolicy{Max: 1, Exit: []int{75}}, policy.Used{}, policy.Keep},
	} {
		if got := policy.Failed(c.conclusion, c.exit, c.retry, c.used); got.Verdict != c.want {
			t.Errorf("%s exit %v with %+v used %+v: %d, want %d", c.conclusion, c.exit, c.retry, c.used, got.Verdict, c.want)
		}
	}
}

func TestBackoffDoublesFromOneSecondToFiveMinutes(t *testing.T) {
	t.Parallel()
	for attempts, want := range map[int]time.Duration{
		0: time.Second, 1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second,
		8: 128 * time.Second, 9: 256 * time.Second, 10: 5 * time.Minute, 1000: 5 * time.Minute,
	} {
		if got := policy.Backoff(attempts, 0); got != want {
			t.Errorf("after %d attempts: %s, want %s", attempts, got, want)
		}
		if got := policy.Backoff(attempts, 0.999); got < want/2 || got >= want {
			t.Errorf("after %d attempts with jitter: %s, want between %s and %s", attempts, got, want/2, want)
		}
	}
}

func TestARequirementIsMetByAnOfferOrSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	offer := policy.Offer{
		OS: "linux", Arch: "amd64", Size: "big", Isolation: []ci.Isolation{ci.IsolationProcess},
		Labels: []string{"gpu", "zone=a"}, Features: []string{"image"},
	}
	for want, need := range map[string]ci.Requirements{
		"":                       {OS: "linux", Arch: "amd64", Size: "big", Isolation: "process", Labels: []string{"gpu", "zone=a"}, Features: []string{"image"}},
		"os darwin":              {OS: "darwin"},
		"arch arm64, label fast": {Arch: "arm64", Labels: []string{"fast", "gpu"}},
		"label zone=b":           {Labels: []string{"zone=b"}},
		"label zone":             {Labels: []string{"zone"}},
		"isolation vm":           {Isolation: ci.IsolationVM},
		"feature secrets":        {Features: []string{"secrets"}},
		"size small":             {Size: "small"},
	} {
		if got := policy.Mismatch(need, offer); got != want {
			t.Errorf("%+v: %q, want %q", need, got, want)
		}
	}
	if got := policy.Mismatch(ci.Requirements{}, policy.Offer{}); got != "" {
		t.Errorf("no requirement is not met: %s", got)
	}
}

func TestGrantedLabelsOverrideDeclaredOnes(t *testing.T) {
	t.Parallel()
	if got := policy.Labels([]string{"prod", "b", "b"}, []string{"*"}); len(got) != 2 || got[0] != "b" || got[1] != "prod" {
		t.Errorf("declared labels with a registration that allows them: %v", got)
	}
	if got := policy.Labels([]string{"prod"}, []string{"dev"}); len(got) != 1 || got[0] != "dev" {
		t.Errorf("declared labels count although others were granted: %v", got)
	}
	if got := policy.Labels([]string{"prod"}, nil); len(got) != 0 {
		t.Errorf("declared labels count although none was granted: %v", got)
	}
}
