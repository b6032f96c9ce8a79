package sim

import (
	"fmt"
	"math/rand/v2"

	"forgeci/internal/ci"
)

// Labels and features: every organisation has a runner with each of the first
// ones, nobody has the last.
const (
	labelCommon = "pool=common"
	labelRare   = "gpu"
	labelNobody = "quantum"
)

func conditions(need string) []string {
	return []string{
		"always()", "success()", "failure()", "success() || failure()", "cancelled()",
		fmt.Sprintf("always() && needs[%q].conclusion == %q", need, "failed"),
		fmt.Sprintf("needs[%q].outputs.v == %q", need, "1"),
		fmt.Sprintf("always() && needs[%q].outputs.v != %q", need, "1"),
		"needs.nobody.conclusion == 'failed'",
		`inputs.mode == "fast"`,
	}
}

func retries() []*ci.RetryPolicy {
	return []*ci.RetryPolicy{
		{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}, Line: 3},
		{Max: 2, On: []ci.Reason{ci.ReasonRunnerLost, ci.ReasonRunnerShutdown, ci.ReasonPrepare}, Line: 3},
		{Max: 1, On: []ci.Reason{ci.ReasonTimeout}, Line: 3},
		{Max: 2, Exit: []int{75}, Line: 3},
		{Max: 1, On: []ci.Reason{ci.ReasonPrepare}, Exit: []int{1}, Line: 3},
		{Max: 5, On: []ci.Reason{ci.ReasonRunnerLost, ci.ReasonRunnerShutdown, ci.ReasonPrepare, ci.ReasonTimeout}, Exit: []int{1, 75}, Line: 3},
		{Max: 0, On: []ci.Reason{ci.ReasonRunnerLost}, Line: 3},
	}
}

// randomPlan makes a plan: a list or a graph of keys, some of them matrices.
func randomPlan(r *rand.Rand) ci.Plan {
	plan := ci.Plan{Workflow: "w", Path: ".forgeci.yaml", Digest: "d", Inputs: map[string]string{"mode": []string{"fast", "full"}[r.IntN(2)]}}
	if r.IntN(6) == 0 {
		plan.Priority = r.IntN(5) - 2
	}
	list := r.IntN(2) == 0
	keys := 1 + r.IntN(4)
	for k := range keys {
		spec := ci.JobSpec{
			Key: fmt.Sprintf("k%d", k), Timeout: ci.Duration(20_000_000_000 + r.Int64N(40)*1_000_000_000),
			RunsOn: ci.Requirements{OS: "linux"},
		}
		if k > 0 {
			if list {
				spec.Needs = []string{fmt.Sprintf("k%d", k-1)}
			} else {
				for n := range k {
					if r.IntN(2) == 0 {
						spec.Needs = append(spec.Needs, fmt.Sprintf("k%d", n))
					}
				}
			}
		}
		if len(spec.Needs) > 0 && r.IntN(3) == 0 {
			c := conditions(spec.Needs[r.IntN(len(spec.Needs))])
			spec.If = c[r.IntN(len(c))]
		}
		if len(spec.Needs) == 0 && r.IntN(10) == 0 {
			spec.If = `inputs.mode == "fast"`
		}
		spec.AllowFailure = r.IntN(5) == 0
		if p := retries(); r.IntN(2) == 0 {
			spec.Retry = p[r.IntN(len(p))]
		}
		switch r.IntN(12) {
		case 0, 1:
			spec.RunsOn.Labels = []string{labelRare}
		case 2, 3:
			spec.RunsOn.Labels = []string{labelCommon}
		case 4:
			spec.RunsOn.Features = []string{ci.FeatureImage}
		case 5:
			if r.IntN(4) == 0 {
				spec.RunsOn.Labels = []string{labelNobody}
			}
		}
		if r.IntN(2) == 0 {
			spec.Outputs = []string{"v"}
		}
		if r.IntN(3) == 0 {
			spec.Publish = []ci.ArtifactPublish{{Name: "out", Paths: []string{"out/**"}, Optional: r.IntN(3) == 0}}
		}
		for _, need := range spec.Needs {
			if r.IntN(3) > 0 {
				for _, j := range plan.Jobs {
					if j.Key == need && len(j.Publish) > 0 {
						spec.Restore = append(spec.Restore, ci.ArtifactRestore{FromJob: j.Name, Name: "out", Path: "in"})
					}
				}
			}
		}
		spec.Steps = []ci.StepSpec{{Name: "one", Run: "make"}}
		if r.IntN(5) == 0 {
			spec.Priority = r.IntN(3)
		}
		legs := 1
		if r.IntN(4) == 0 {
			legs = 2 + r.IntN(2)
		}
		for leg := range legs {
			s := spec
			s.Name = s.Key
			if legs > 1 {
				s.Matrix = []ci.KeyValue{{Key: "leg", Value: fmt.Sprint(leg)}}
				s.Name = fmt.Sprintf("%s (%d)", s.Key, leg)
			}
			plan.Jobs = append(plan.Jobs, s)
		}
	}
	return plan
}

// handOnPlan makes one artifact that several jobs restore, early in a seed.
func handOnPlan() ci.Plan {
	base := ci.JobSpec{Timeout: ci.Duration(60_000_000_000), RunsOn: ci.Requirements{OS: "linux"}, Steps: []ci.StepSpec{{Name: "one", Run: "make"}}}
	maker := base
	maker.Key, maker.Name, maker.Publish = "k0", "k0", []ci.ArtifactPublish{{Name: "out", Paths: []string{"out/**"}}}
	plan := ci.Plan{Workflow: "w", Path: ".forgeci.yaml", Digest: "d", Jobs: []ci.JobSpec{maker}}
	for k := range 4 {
		user := base
		user.Key = fmt.Sprintf("k%d", k+1)
		user.Name, user.Needs = user.Key, []string{"k0"}
		user.Restore = []ci.ArtifactRestore{{FromJob: "k0", Name: "out", Path: "in"}}
		plan.Jobs = append(plan.Jobs, user)
	}
	return plan
}
