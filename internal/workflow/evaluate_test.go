package workflow

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
)

// decide evaluates a job's condition; keys without a conclusion are left out.
func decide(t *testing.T, expr string, needs map[string]Need) bool {
	t.Helper()
	got, err := EvalJobIf(expr, IfContext{Needs: needs})
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	return got
}

func conclusion(c ci.Conclusion) Need { return Need{Conclusion: c} }

// run plays a graph: what a job that runs concludes is in results (success
// without), one that does not run is skipped.
func run(t *testing.T, p ci.Plan, results map[string]ci.Conclusion) map[string]ci.Conclusion {
	t.Helper()
	done := map[string]ci.Conclusion{}
	for _, j := range p.Jobs {
		needs := map[string]Need{}
		for _, n := range j.Needs {
			needs[n] = conclusion(done[n])
		}
		runs, err := EvalJobIf(j.If, IfContext{Needs: needs})
		switch {
		case err != nil:
			t.Fatalf("%s: %v", j.Name, err)
		case !runs:
			done[j.Name] = ci.ConclusionSkipped
		case results[j.Name] != "":
			done[j.Name] = results[j.Name]
		default:
			done[j.Name] = ci.ConclusionSuccess
		}
	}
	return done
}

func TestCase_YAML_05_ASkippedNeedHasAConclusion(t *testing.T) {
	t.Parallel()
	p := planOf(t, `version: 1
jobs:
  a: {steps: [x], if: false}
  b: {steps: [x], needs: a}
  c: {steps: [x], needs: a, if: always()}
  d: {steps: [x], needs: a, if: needs.a.conclusion == 'skipped'}
  e: {steps: [x], needs: a, if: always() && needs.a.conclusion == 'skipped'}
  f: {steps: [x], needs: c}
  g: {steps: [x], needs: [b, c], if: success() || failure() || cancelled()}
`)
	want := map[string]ci.Conclusion{
		"a": ci.ConclusionSkipped, "b": ci.ConclusionSkipped, "c": ci.ConclusionSuccess, "d": ci.ConclusionSkipped,
		"e": ci.ConclusionSuccess, "f": ci.ConclusionSuccess, "g": ci.ConclusionSkipped,
	}
	if diff := cmp.Diff(want, run(t, p, nil)); diff != "" {
		t.Error(diff)
	}
	skipped := map[string]Need{"a": conclusion(ci.ConclusionSkipped)}
	for expr, want := range map[string]bool{
		`always() && needs.a.conclusion == "skipped"`:                    true,
		`always() && needs["a"].outputs.x == ""`:                         true,
		`always() && needs.a.outputs["no-such"] == ""`:                   true,
		`always() && size(needs.a.outputs) == 0`:                         true,
		`always() && !has(needs.a.outputs.x)`:                            true,
		`always() && has(needs.a.outputs.x) && needs.a.outputs.x == "1"`: false,
		`success()`: false, `failure()`: false, `cancelled()`: false, ``: false, `true`: false, `always()`: true, `!success()`: true,
	} {
		if got := decide(t, expr, skipped); got != want {
			t.Errorf("%s = %v with a skipped need, want %v", expr, got, want)
		}
	}
	got := refused(t, "version: 1\njobs:\n  a: {steps: [x]}\n  b: {steps: [x], needs: a, if: needs.a.result == 'skipped'}\n")
	says(t, got, "4:38", "write needs.a.conclusion")
}

func TestCase_YAML_06_OnlyDirectNeedsCount(t *testing.T) {
	t.Parallel()
	text := `version: 1
jobs:
  a: {steps: [x], if: CONDITION}
  b: {steps: [x], needs: a, if: always()}
  c: {steps: [x], needs: b}
`
	for condition, a := range map[string]ci.Conclusion{"false": ci.ConclusionSkipped, "true": ci.ConclusionFailed} {
		got := run(t, planOf(t, strings.ReplaceAll(text, "CONDITION", condition)), map[string]ci.Conclusion{"a": a})
		want := map[string]ci.Conclusion{"a": a, "b": ci.ConclusionSuccess, "c": ci.ConclusionSuccess}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("a %s:\n%s", a, diff)
		}
	}
}

func TestStatusFunctionsForEveryConclusion(t *testing.T) {
	t.Parallel()
	type row struct{ success, failure, cancelled bool }
	for c, want := range map[ci.Conclusion]row{
		ci.ConclusionSuccess:   {true, false, false},
		ci.ConclusionCached:    {true, false, false},
		ci.ConclusionFailed:    {false, true, false},
		ci.ConclusionTimedOut:  {false, true, false},
		ci.ConclusionAborted:   {false, true, false},
		ci.ConclusionCancelled: {false, false, true},
		ci.ConclusionSkipped:   {false, false, false},
	} {
		needs := map[string]Need{"ok": conclusion(ci.ConclusionSuccess), "n": conclusion(c)}
		got := row{decide(t, "success()", needs), decide(t, "failure()", needs), decide(t, "cancelled()", needs)}
		if got != want {
			t.Errorf("%s: %+v, want %+v", c, got, want)
		}
		if decide(t, "", needs) != want.success || !decide(t, "always()", needs) {
			t.Errorf("%s: the empty condition is success(), always() is true", c)
		}
		allowed := map[string]Need{"n": {Conclusion: c, AllowFailure: true}}
		failed := want.failure
		if decide(t, "success()", allowed) != (want.success || failed) || decide(t, "failure()", allowed) {
			t.Errorf("%s under allow_failure: a failure counts as success, nothing else changes", c)
		}
		if !decide(t, fmt.Sprintf("always() && needs.n.conclusion == %q", c), allowed) {
			t.Errorf("%s: allow_failure must not hide the conclusion", c)
		}
	}
	if got := decide(t, "success()", nil); !got {
		t.Error("a job without needs starts")
	}
	for expr, want := range map[string]bool{"success()": false, "": false, "always()": true, "cancelled()": true, "failure()": false} {
		got, err := EvalJobIf(expr, IfContext{Cancelled: true})
		if err != nil || got != want {
			t.Errorf("%q in a cancelled run = %v, %v, want %v", expr, got, err, want)
		}
	}
}

func TestStepConditionsLookAtTheJobSoFar(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		expr              string
		failed, cancelled bool
		want              bool
	}{
		{"", false, false, true},
		{"", true, false, false},
		{"", false, true, false},
		{"always()", true, true, true},
		{"failure()", true, false, true},
		{"failure()", false, false, false},
		{"cancelled()", false, true, true},
		{`matrix.os == "linux"`, false, false, true},
		{`matrix.os == "linux"`, true, false, false},
		{`failure() && matrix["os"] == "linux"`, true, false, true},
		{`inputs.deploy == "true" && needs.build.outputs.version.startsWith("1.")`, false, false, true},
		{`matrix.missing == ""`, false, false, true},
		{`has(matrix.missing)`, false, false, false},
	} {
		got, err := EvalStepIf(c.expr, IfContext{
			Failed: c.failed, Cancelled: c.cancelled,
			Matrix: []ci.KeyValue{{Key: "os", Value: "linux"}},
			Inputs: map[string]string{"deploy": "true"},
			Needs:  map[string]Need{"build": {Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"version": "1.10"}}},
		})
		if err != nil || got != c.want {
			t.Errorf("%q failed=%v cancelled=%v: %v, %v, want %v", c.expr, c.failed, c.cancelled, got, err, c.want)
		}
	}
}

func TestConditionsAreBounded(t *testing.T) {
	t.Parallel()
	needs := map[string]Need{}
	for i := range 1000 {
		needs[fmt.Sprintf("job-%d", i)] = Need{Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"text": strings.Repeat("a", 1<<20)}}
	}
	c := IfContext{Needs: needs}
	if got, err := EvalJobIf(`needs.all(n, needs[n].conclusion == "success")`, c); err != nil || !got {
		t.Errorf("1,000 needs: %v %v", got, err)
	}
	for _, expr := range []string{
		`needs.all(a, needs.all(b, needs.all(c, a + b != c)))`,
		`needs.all(a, needs[a].outputs.text.matches("(a*)*b") == false)`,
		`size(needs.map(a, needs.map(b, needs.map(c, a + b + c)))) > 0`,
		`size(needs.map(a, needs[a].outputs.text + needs[a].outputs.text + needs[a].outputs.text)) > 5000`,
		strings.Repeat("(", 60) + "1" + strings.Repeat(")", 60),
		strings.Repeat("!", 3000) + "true",
		`needs.nope.conclusion == "success"`,
		`1 / 0 == 1`,
		"true &&",
		"\x00", "\xff", "", "`", "\"", "@success", "needs.@", "…",
	} {
		if expr == "" {
			continue
		}
		start := time.Now()
		got, err := EvalJobIf(expr, c)
		elapsed := time.Since(start)
		t.Logf("%8v %.60q: %.100v", elapsed.Round(time.Microsecond), expr, err)
		if elapsed > time.Second && !underRace {
			t.Errorf("%.60q took %v", expr, elapsed)
		}
		if ci.KindOf(err) != ci.ErrInvalid || got {
			t.Errorf("%.60q = %v, %v, want an error of kind invalid", expr, got, err)
		}
	}
}

func FuzzEvalJobIf(f *testing.F) {
	for _, s := range []string{
		"", "success()", `needs.a.conclusion == "success"`, `needs["a-b"].outputs.x`, "always() && (", `inputs.x.matches("(a*)*")`, "[1,2].all(x, x > 0)", "@success", `has(matrix.os)`,
		"1 + 1 == 2 ? true : false", "needs.exists(n, needs[n].conclusion == 'failed')", "matrix.v < '3'", "b'a' == b'a'", "duration('1s') > duration('2s')", "{'a': 1}.a == 1",
	} {
		f.Add(s)
	}
	c := IfContext{
		Needs:  map[string]Need{"a": {Conclusion: ci.ConclusionSuccess, Outputs: map[string]string{"x": "1"}}, "a-b": {Conclusion: ci.ConclusionFailed}},
		Inputs: map[string]string{"x": "y"}, Matrix: []ci.KeyValue{{Key: "os", Value: "linux"}},
	}
	f.Fuzz(func(t *testing.T, expr string) {
		first, err := EvalJobIf(expr, c)
		if err != nil && ci.KindOf(err) != ci.ErrInvalid {
			t.Errorf("error of kind %s: %v", ci.KindOf(err), err)
		}
		if err != nil && first {
			t.Error("true with an error")
		}
		if again, _ := EvalJobIf(expr, c); again != first {
			t.Error("two answers")
		}
	})
}
