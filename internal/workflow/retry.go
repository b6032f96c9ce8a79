package workflow

import (
	"slices"
	"strconv"

	"forgeci/internal/ci"
)

// retry reads the one grammar of SPEC decision 1.
func (p *parser) retry(n *node) *ci.RetryPolicy {
	if n.kind == scalar {
		p.add(n.at, "retry needs its causes, found %s: write retry: {max: 2, on: [runner_lost]}", describe(n))
		return nil
	}
	if p.fields(n, tRetry) == nil {
		return nil
	}
	r := &ci.RetryPolicy{Line: n.at.line}
	if v := n.get("max"); v != nil {
		r.Max = p.integer(v, "max", 0, maxRetry)
	}
	if v := n.get("on"); v != nil {
		causes := p.many(v)
		if len(causes) == 0 {
			p.add(v.at, "on names no cause: use runner_lost, runner_shutdown, prepare, timeout or {exit: [75]}")
		}
		for _, item := range causes {
			p.cause(r, item)
		}
	}
	return r
}

func (p *parser) cause(r *ci.RetryPolicy, n *node) {
	if n.kind == mapping {
		if p.fields(n, tExit) == nil || n.get("exit") == nil {
			return
		}
		for _, item := range p.many(n.get("exit")) {
			code := p.integer(item, "exit", 1, 255)
			if !slices.Contains(r.Exit, code) {
				r.Exit = append(r.Exit, code)
			}
		}
		return
	}
	if n.kind == scalar && n.plain {
		if _, err := strconv.Atoi(n.text); err == nil {
			p.add(n.at, "cause %s is an exit code: write {exit: [%s]}", quote(n.text), n.text)
			return
		}
	}
	word := p.oneOf(n, "cause", "runner_lost", "runner_shutdown", "prepare", "timeout")
	if reason := ci.Reason(word); word != "" && !slices.Contains(r.On, reason) {
		r.On = append(r.On, reason)
	}
}
