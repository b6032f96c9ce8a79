package workflow

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// pendingCondition is an if of the file; it is checked when all jobs are known.
type pendingCondition struct {
	job  *job
	at   *node
	text string
	step bool
}

// condition reads an if.
func (p *parser) condition(n *node, step bool) string {
	s, ok := p.raw(n, "if")
	if !ok {
		return ""
	}
	if strings.TrimSpace(s) == "" {
		p.add(n.at, "if is empty: write a condition, or remove it")
		return ""
	}
	if strings.Contains(s, "${{") {
		inner := strings.TrimSpace(strings.NewReplacer("${{", "", "}}", "").Replace(s))
		p.add(n.at, "if holds %s: an if is an expression already, write if: %s", quote(s), inner)
		return ""
	}
	p.conditions = append(p.conditions, pendingCondition{p.current, n, s, step})
	return s
}

// checkConditions type-checks every if and the names in it. Equal expressions
// are compiled once.
func (p *parser) checkConditions(keys []string) {
	type result struct {
		refs    []exprRef
		problem *exprError
	}
	inputs := inputNames(p.inputs)
	compiled := map[string]result{}
	size := 0
	for _, c := range p.conditions {
		r, ok := compiled[c.text]
		if !ok {
			if size += len(c.text); size > p.limits.Conditions {
				p.add(c.at.at, "the conditions of the file have more than %d bytes: shorten them, or split the workflow into several files", p.limits.Conditions)
				return
			}
			_, r.problem = compileCondition(c.text, func(refs []exprRef) *exprError {
				r.refs = refs
				return nil
			})
			compiled[c.text] = r
		}
		scope := scope{job: c.job, keys: keys, inputs: inputs, text: c.text, jobs: p.byKey}
		problem := scope.check(r.refs)
		if problem == nil {
			problem = r.problem
		}
		if problem != nil {
			p.add(p.placeIn(c.at, problem), "if %s: %s", quote(c.text), problem.text)
		}
	}
}

// scope is what the names in a condition may refer to.
type scope struct {
	job    *job
	jobs   map[string]*job
	keys   []string
	inputs []string
	text   string
}

func (s scope) check(refs []exprRef) *exprError {
	for _, r := range refs {
		var why string
		switch r.context {
		case "needs":
			why = s.need(r)
		case "inputs":
			if !slices.Contains(s.inputs, r.name) {
				why = s.unknown(r, "on.manual declares no input", s.inputs)
			}
		case "matrix":
			if !slices.Contains(s.job.axes, r.name) {
				why = s.unknown(r, "the matrix of this job has no value", s.job.axes)
			}
		}
		if why != "" {
			return &exprError{max(r.at.Line(), 1), max(r.at.Column(), 0), why}
		}
	}
	return nil
}

// need checks needs.NAME and the field taken of it.
func (s scope) need(r exprRef) string {
	if !slices.Contains(s.job.needs, r.name) {
		if fix := s.indexed(r, s.job.needs); fix != "" {
			return fix
		}
		if slices.Contains(s.keys, r.name) {
			return fmt.Sprintf("job %s is not among the needs of this job: add it to needs", quote(r.name))
		}
		return s.unknown(r, "this job has no need", s.job.needs)
	}
	switch r.field {
	case "conclusion", "":
		return ""
	case "outputs":
		if need := s.jobs[r.name]; r.output != "" && need != nil && !slices.Contains(need.outputs, r.output) {
			return fmt.Sprintf("job %s declares no output %s (declared: %s): add it to outputs", quote(r.name), quote(r.output), list(need.outputs))
		}
		return ""
	case "result", "status", "outcome", "state":
		return fmt.Sprintf("a need has no %s: write %s.conclusion", r.field, spell("needs", r.name))
	default:
		return fmt.Sprintf("a need has no %s: use conclusion or outputs", quote(r.field))
	}
}

func (s scope) unknown(r exprRef, what string, known []string) string {
	if fix := s.indexed(r, known); fix != "" {
		return fix
	}
	if near := nearest(r.name, known); near != "" {
		return fmt.Sprintf("%s %s: did you mean %s?", what, quote(r.name), near)
	}
	return fmt.Sprintf("%s %s (known: %s)", what, quote(r.name), list(known))
}

// indexed explains needs.integration-test, which CEL reads as a subtraction.
func (s scope) indexed(r exprRef, known []string) string {
	for _, k := range known {
		rest, ok := strings.CutPrefix(k, r.name)
		if ok && rest != "" && strings.Contains(s.text, r.context+"."+k) {
			return fmt.Sprintf("%s.%s is read as a subtraction or a field: write %s", r.context, k, spell(r.context, k))
		}
	}
	return ""
}

// spell writes a reference to a name as an expression.
func spell(context, name string) string {
	for i := range len(name) {
		c := name[i]
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return context + "[\"" + name + "\"]"
		}
	}
	return context + "." + name
}

// placeIn maps a place in an expression to the file: exactly in plain, quoted
// and literal values, to the beginning of the value where lines were folded.
func (p *parser) placeIn(n *node, e *exprError) pos {
	at := pos{n.at.line, n.at.col + e.column}
	switch {
	case n.block:
		at.line = n.at.line + e.line
		line := p.line(at.line)
		at.col = len(line) - len(bytes.TrimLeft(line, " ")) + e.column + 1
	case !n.plain:
		at.col++
	}
	if !n.block && e.line > 1 || at.col > len(p.line(at.line))+1 {
		return n.at
	}
	return at
}

// line returns a line of the file, from 1, without its end.
func (p *parser) line(number int) []byte {
	if p.lines == nil {
		p.lines = bytes.Split(p.data, []byte("\n"))
	}
	if number < 1 || number > len(p.lines) {
		return nil
	}
	return bytes.TrimRight(p.lines[number-1], "\r")
}
