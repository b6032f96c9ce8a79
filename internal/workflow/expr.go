package workflow

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/ext"

	"forgeci/internal/ci"
)

// Names of the variables that hold what the status functions return. No
// expression can spell them.
const (
	isSuccess   = "@success"
	isFailure   = "@failure"
	isCancelled = "@cancelled"
	isAlways    = "@always"
)

// exprCost bounds the work of one evaluation, in CEL's cost units.
const exprCost = 20_000

// exprNeed is a need as expressions see it.
type exprNeed struct {
	Conclusion string            `cel:"conclusion"`
	Outputs    map[string]string `cel:"outputs"`
}

// celEnv returns the one environment of all conditions. It has no function with
// a side effect; inputs and matrix values are text.
var celEnv = sync.OnceValue(func() *cel.Env {
	status := func(function, variable string) cel.EnvOption {
		return cel.Macros(cel.GlobalMacro(function, 0, func(f cel.MacroExprFactory, _ ast.Expr, _ []ast.Expr) (ast.Expr, *cel.Error) {
			return f.NewIdent(variable), nil
		}))
	}
	text := cel.MapType(cel.StringType, cel.StringType)
	env, err := cel.NewEnv(
		ext.NativeTypes(reflect.TypeFor[exprNeed](), ext.ParseStructTags(true)),
		cel.Variable("needs", cel.MapType(cel.StringType, cel.ObjectType("workflow.exprNeed"))),
		cel.Variable("inputs", text),
		cel.Variable("matrix", text),
		cel.Variable(isSuccess, cel.BoolType),
		cel.Variable(isFailure, cel.BoolType),
		cel.Variable(isCancelled, cel.BoolType),
		cel.Variable(isAlways, cel.BoolType),
		status("success", isSuccess),
		status("failure", isFailure),
		status("cancelled", isCancelled),
		status("always", isAlways),
		cel.ParserExpressionSizeLimit(DefaultLimits().Expression),
		cel.ParserRecursionLimit(64),
	)
	if err != nil {
		panic("workflow: the expression environment is not valid: " + err.Error())
	}
	return env
})

// condition is a compiled expression and what it refers to.
type condition struct {
	ast         *cel.Ast
	refs        []exprRef
	compared    []exprText
	namesStatus bool // a status function is named, so success() is not added
}

// exprRef is needs.NAME, inputs.NAME or matrix.NAME with a constant name.
type exprRef struct {
	context, name string
	field         string // needs only: the field taken of it, "" for none
	output        string // needs only: the output taken of field outputs
	presence      bool   // inside has()
	at            common.Location
}

// exprText is a text that a condition compares with a need's conclusion.
type exprText struct {
	text string
	at   common.Location
}

// exprError is a problem inside an expression, with its place there.
type exprError struct {
	line, column int // line from 1, column from 0
	text         string
}

func (e *exprError) Error() string { return e.text }

// compileCondition parses and type-checks an expression and reads its
// references. check may refuse references before types are checked, since it
// knows better what to say.
func compileCondition(expr string, check func([]exprRef) *exprError) (*condition, *exprError) {
	if len(expr) > DefaultLimits().Expression {
		return nil, &exprError{1, 0, fmt.Sprintf("it has %d bytes: the limit is %d", len(expr), DefaultLimits().Expression)}
	}
	env := celEnv()
	parsed, issues := env.Parse(expr)
	if e := firstIssue(issues); e != nil {
		return nil, e
	}
	c := &condition{}
	c.read(parsed)
	if check != nil {
		if e := check(c.refs); e != nil {
			return nil, e
		}
	}
	checked, issues := env.Check(parsed)
	if e := firstIssue(issues); e != nil {
		return nil, e
	}
	if t := checked.OutputType(); !t.IsExactType(types.BoolType) {
		return nil, &exprError{1, 0, fmt.Sprintf("it gives %s, not true or false: compare it, for example == \"true\"", typeName(t))}
	}
	for _, t := range c.compared {
		if text := unknownConclusion(t.text); text != "" {
			return nil, &exprError{max(t.at.Line(), 1), max(t.at.Column(), 0), text}
		}
	}
	c.ast = checked
	return c, nil
}

// unknownConclusion says what is wrong with a text that no need can end with: a
// comparison with it would never hold.
func unknownConclusion(text string) string {
	conclusions := []string{
		string(ci.ConclusionSuccess), string(ci.ConclusionFailed), string(ci.ConclusionTimedOut), string(ci.ConclusionCancelled),
		string(ci.ConclusionAborted), string(ci.ConclusionSkipped), string(ci.ConclusionCached),
	}
	if slices.Contains(conclusions, text) {
		return ""
	}
	foreign := map[string]string{"failure": "failed", "error": "failed", "timeout": "timed_out", "canceled": "cancelled"}
	if near := cmp.Or(foreign[text], nearest(text, conclusions)); near != "" {
		return fmt.Sprintf("no need ends with the conclusion %s: write %s", quote(text), quote(near))
	}
	return fmt.Sprintf("no need ends with the conclusion %s: use %s", quote(text), list(conclusions))
}

func typeName(t *cel.Type) string {
	switch {
	case t.IsExactType(types.StringType):
		return "text"
	case t.IsExactType(types.IntType), t.IsExactType(types.DoubleType), t.IsExactType(types.UintType):
		return "a number"
	default:
		return "a value of type " + strings.TrimPrefix(t.String(), "workflow.expr")
	}
}

func firstIssue(issues *cel.Issues) *exprError {
	if issues == nil || len(issues.Errors()) == 0 {
		return nil
	}
	e := issues.Errors()[0]
	text := strings.TrimPrefix(e.Message, "Syntax error: ")
	text = strings.TrimSuffix(text, " (in container '')")
	return &exprError{max(e.Location.Line(), 1), max(e.Location.Column(), 0), text + hint(text)}
}

// hint adds the fix to CEL's own words where people bring habits from elsewhere.
func hint(message string) string {
	_, rest, ok := strings.Cut(message, "undeclared reference to '")
	if !ok {
		for _, function := range []string{"contains", "startsWith", "endsWith"} {
			if strings.Contains(message, "overload for '"+function+"' applied to '(") {
				return ": write TEXT." + function + "(\"…\")"
			}
		}
		if strings.Contains(message, "found no matching overload") && strings.Contains(message, "string") {
			return ": needs, inputs and matrix give text, compare it with text, for example == \"true\""
		}
		switch {
		case strings.HasPrefix(message, "token recognition error at: '= "), strings.HasPrefix(message, "token recognition error at: '='"):
			return ": write == to compare"
		case strings.Contains(message, " input 'and'"):
			return ": write &&"
		case strings.Contains(message, " input 'or'"):
			return ": write ||"
		}
		return ""
	}
	switch name, _, _ := strings.Cut(rest, "'"); name {
	case "success", "failure", "always", "cancelled":
		return ": write " + name + "()"
	case "contains", "startsWith", "endsWith", "matches":
		return ": write TEXT." + name + "(\"…\")"
	case "github", "env", "secrets", "steps", "vars", "event", "job", "runner":
		return ": a condition knows needs, inputs, matrix, success(), failure(), cancelled() and always()"
	case "on_success":
		return ": write success()"
	case "on_failure":
		return ": write failure()"
	default:
		return ": text is written in quotes; known are needs, inputs, matrix, success(), failure(), cancelled() and always()"
	}
}

// read collects references and status functions of a parsed expression.
func (c *condition) read(parsed *cel.Ast) {
	native := parsed.NativeRep()
	info := native.SourceInfo()
	// taken says what is taken of an expression: the visitor sees
	// needs.a.outputs.x from the outside, x first.
	type access struct {
		name     string
		by       int64
		presence bool
	}
	taken := map[int64]access{}
	step := func(e, operand ast.Expr, name string, presence bool) {
		context, ok := contextOf(operand)
		if !ok {
			taken[operand.ID()] = access{name, e.ID(), presence}
			return
		}
		field := taken[e.ID()]
		output := taken[field.by]
		c.refs = append(c.refs, exprRef{
			context: context, name: name, field: field.name, output: output.name,
			presence: presence || field.presence || output.presence, at: info.GetStartLocation(e.ID()),
		})
	}
	ast.PreOrderVisit(native.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		switch e.Kind() { //nolint:exhaustive // the others name nothing
		case ast.IdentKind:
			if slices.Contains([]string{isSuccess, isFailure, isCancelled, isAlways}, e.AsIdent()) {
				c.namesStatus = true
			}
		case ast.SelectKind:
			s := e.AsSelect()
			step(e, s.Operand(), s.FieldName(), s.IsTestOnly())
		case ast.CallKind:
			call := e.AsCall()
			c.compare(info, call)
			if call.FunctionName() != operators.Index || len(call.Args()) != 2 || call.Args()[1].Kind() != ast.LiteralKind {
				return
			}
			if name, ok := call.Args()[1].AsLiteral().(types.String); ok {
				step(e, call.Args()[0], string(name), false)
			}
		}
	}))
}

// compare collects texts that a call compares with needs.NAME.conclusion.
func (c *condition) compare(info *ast.SourceInfo, call ast.CallExpr) {
	if !slices.Contains([]string{operators.Equals, operators.NotEquals, operators.In}, call.FunctionName()) || len(call.Args()) != 2 {
		return
	}
	add := func(e ast.Expr) {
		if e.Kind() != ast.LiteralKind {
			return
		}
		if text, ok := e.AsLiteral().(types.String); ok {
			c.compared = append(c.compared, exprText{string(text), info.GetStartLocation(e.ID())})
		}
	}
	for i, other := range []ast.Expr{call.Args()[1], call.Args()[0]} {
		switch side := call.Args()[i]; {
		case !isConclusion(side):
		case other.Kind() == ast.ListKind:
			for _, item := range other.AsList().Elements() {
				add(item)
			}
		default:
			add(other)
		}
	}
}

// isConclusion reports whether an expression is needs.NAME.conclusion.
func isConclusion(e ast.Expr) bool {
	if e.Kind() != ast.SelectKind || e.AsSelect().FieldName() != "conclusion" {
		return false
	}
	var context string
	switch need := e.AsSelect().Operand(); {
	case need.Kind() == ast.SelectKind:
		context, _ = contextOf(need.AsSelect().Operand())
	case need.Kind() == ast.CallKind && need.AsCall().FunctionName() == operators.Index:
		context, _ = contextOf(need.AsCall().Args()[0])
	}
	return context == "needs"
}

func contextOf(e ast.Expr) (string, bool) {
	if e.Kind() != ast.IdentKind {
		return "", false
	}
	name := e.AsIdent()
	return name, name == "needs" || name == "inputs" || name == "matrix"
}
