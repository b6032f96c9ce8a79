package workflow

import (
	"maps"
	"strings"

	"cel.dev/cel-go/cel"

	"forgeci/internal/ci"
)

// Need is what a condition knows of a needed job: for a matrix, of all its legs
// together.
type Need struct {
	Conclusion ci.Conclusion
	// Outputs are the declared outputs; a name that is not there reads as "".
	Outputs map[string]string
	// AllowFailure makes a failure count as success for success() and failure().
	AllowFailure bool
}

func (n Need) failed() bool {
	switch n.Conclusion {
	case ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted:
		return true
	default:
		return false
	}
}

// IfContext is what a condition is evaluated against.
type IfContext struct {
	// Needs holds the direct needs by key.
	Needs map[string]Need
	// Cancelled: the run, or for a step the job, is being cancelled.
	Cancelled bool
	// Failed, for steps: an earlier step failed without continue_on_error.
	Failed bool
	// Inputs are the run's accepted inputs.
	Inputs map[string]string
	// Matrix holds the leg's values.
	Matrix []ci.KeyValue
}

// EvalJobIf decides whether a job whose needs have all finished runs. success()
// looks at the direct needs only: each succeeded (success, cached, or failed
// under allow_failure) and the run is not cancelled; a skipped need is no
// success. An expression that names no status function has success() added;
// an empty one is success(). The error is of kind ErrInvalid: the expression is
// wrong, costs too much, or names what is not there.
func EvalJobIf(expr string, c IfContext) (bool, error) {
	success, failure, cancelled := !c.Cancelled, false, c.Cancelled
	for _, n := range c.Needs {
		failed := n.failed() && !n.AllowFailure
		failure = failure || failed
		cancelled = cancelled || n.Conclusion == ci.ConclusionCancelled
		success = success && (n.Conclusion.Succeeded() || n.failed() && n.AllowFailure)
	}
	return evalCondition(expr, c, success, failure, cancelled)
}

// EvalStepIf decides whether the next step of a job runs. success() holds while
// no earlier step failed (without continue_on_error) and the job is not
// cancelled; success() is added as for jobs.
func EvalStepIf(expr string, c IfContext) (bool, error) {
	return evalCondition(expr, c, !c.Failed && !c.Cancelled, c.Failed, c.Cancelled)
}

func evalCondition(expr string, c IfContext, success, failure, cancelled bool) (bool, error) {
	if strings.TrimSpace(expr) == "" {
		return success, nil
	}
	wrong := func(why string) error {
		return ci.Errorf(ci.ErrInvalid, "condition %s: %s", quote(expr), why)
	}
	compiled, problem := compileCondition(expr, nil)
	if problem != nil {
		return false, wrong(problem.text)
	}
	program, err := celEnv().Program(compiled.ast, cel.CostLimit(exprCost))
	if err != nil {
		return false, wrong(err.Error())
	}
	value, _, err := program.Eval(compiled.activation(c, success, failure, cancelled))
	if err != nil {
		return false, wrong(err.Error())
	}
	holds, ok := value.Value().(bool)
	if !ok {
		return false, wrong("it gives no truth value")
	}
	return holds && (success || compiled.namesStatus), nil
}

// activation returns the variables. Values that the expression names and that
// are not there are empty text; has() still tells the difference.
func (c *condition) activation(ctx IfContext, success, failure, cancelled bool) map[string]any {
	inputs, matrix, needs := map[string]string{}, map[string]string{}, map[string]*exprNeed{}
	maps.Copy(inputs, ctx.Inputs)
	for _, kv := range ctx.Matrix {
		matrix[kv.Key] = kv.Value
	}
	for k, n := range ctx.Needs {
		outputs := map[string]string{}
		maps.Copy(outputs, n.Outputs)
		needs[k] = &exprNeed{Conclusion: string(n.Conclusion), Outputs: outputs}
	}
	c.fill(inputs, matrix, needs)
	return map[string]any{
		"needs": needs, "inputs": inputs, "matrix": matrix,
		isSuccess: success, isFailure: failure, isCancelled: cancelled, isAlways: true,
	}
}

// fill adds empty text for constant names that are not there, unless has()
// asks for them.
func (c *condition) fill(inputs, matrix map[string]string, needs map[string]*exprNeed) {
	asked := map[exprRef]bool{}
	key := func(r exprRef) exprRef { return exprRef{context: r.context, name: r.name, output: r.output} }
	for _, r := range c.refs {
		if r.presence {
			asked[key(r)] = true
		}
	}
	add := func(m map[string]string, name string) {
		if _, ok := m[name]; !ok {
			m[name] = ""
		}
	}
	for _, r := range c.refs {
		switch {
		case asked[key(r)]:
		case r.context == "inputs":
			add(inputs, r.name)
		case r.context == "matrix":
			add(matrix, r.name)
		case r.field == "outputs" && r.output != "" && needs[r.name] != nil:
			add(needs[r.name].Outputs, r.output)
		}
	}
}
