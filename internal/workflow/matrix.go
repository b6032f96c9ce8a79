package workflow

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"forgeci/internal/ci"
)

// matrix expands a matrix into its legs: the product of the axes (the first
// axis changes slowest), without what exclude names, then extended by include
// (YAML-04): an entry extends every leg of the product whose axis values it does
// not contradict and may overwrite what earlier entries added; an entry that
// fits none is a leg of its own, after the others. Equal values of one axis are
// one value.
func (p *parser) matrix(n *node) [][]ci.KeyValue {
	if n.kind == mapping && len(n.entries) > p.limits.MatrixKeys+2 {
		p.add(n.at, "the matrix has %d keys: the limit is %d", len(n.entries), p.limits.MatrixKeys)
		return nil
	}
	if n.kind != mapping || len(n.entries) == 0 {
		p.add(n.at, "matrix is a mapping of axes, not %s: write matrix: {os: [linux, darwin]}", describe(n))
		return nil
	}
	var axes []string
	legs := [][]ci.KeyValue{nil}
	for _, e := range n.entries {
		if e.key == "include" || e.key == "exclude" {
			continue
		}
		if err := Name(e.key); err != nil {
			p.add(e.at, "matrix axis %s: %v", quote(e.key), err)
			continue
		}
		values := p.axis(e)
		if len(values) == 0 {
			continue
		}
		axes = append(axes, e.key)
		if len(legs)*len(values) > p.limits.Legs {
			p.add(e.at, "the matrix has more than %d legs: remove values, or split the job", p.limits.Legs)
			return nil
		}
		legs = product(legs, e.key, values)
	}
	if len(axes) == 0 {
		legs = nil
	}
	if v := n.get("exclude"); v != nil {
		legs = p.exclude(legs, axes, v)
	}
	if v := n.get("include"); v != nil {
		legs = p.include(legs, axes, v)
	}
	if keys := len(keysOf(legs)); keys > p.limits.MatrixKeys {
		p.add(n.at, "the matrix has %d keys: the limit is %d", keys, p.limits.MatrixKeys)
		return nil
	}
	if len(legs) == 0 {
		p.add(n.at, "the matrix has no leg: every combination is excluded or no axis has a value")
	}
	if len(legs) > p.limits.Legs {
		p.add(n.at, "the matrix has %d legs: the limit is %d; remove values, or split the job", len(legs), p.limits.Legs)
		return nil
	}
	return legs
}

func product(legs [][]ci.KeyValue, key string, values []string) [][]ci.KeyValue {
	out := make([][]ci.KeyValue, 0, len(legs)*len(values))
	for _, leg := range legs {
		for _, v := range values {
			out = append(out, append(slices.Clone(leg), ci.KeyValue{Key: key, Value: v}))
		}
	}
	return out
}

func (p *parser) axis(e entry) []string {
	if e.value.kind != sequence || len(e.value.items) == 0 {
		p.add(e.value.at, "matrix axis %s is a list of values, not %s: write %s: [A, B]", quote(e.key), emptyOr(e.value), e.key)
		return nil
	}
	var values []string
	for _, item := range e.value.items {
		if v, ok := p.matrixValue(e.key, item); ok && !slices.Contains(values, v) {
			values = append(values, v)
		}
	}
	return values
}

// matrixValue returns the source text of a value: 3.10 stays 3.10 (YAML-02).
func (p *parser) matrixValue(key string, n *node) (string, bool) {
	switch {
	case n.kind != scalar:
		p.add(n.at, "matrix value of %s must be a single value, not %s", quote(key), describe(n))
	case strings.Contains(n.text, "${{"):
		p.add(n.at, "matrix value of %s holds %s: the matrix is expanded before anything is interpolated", quote(key), quote(n.text))
	case len(n.text) > p.limits.Value:
		p.add(n.at, "matrix value of %s has %d bytes: the limit is %d", quote(key), len(n.text), p.limits.Value)
	case strings.ContainsFunc(n.text, unicode.IsControl):
		p.add(n.at, "matrix value of %s holds a line break or control character: %s", quote(key), quote(n.text))
	default:
		return n.text, true
	}
	return "", false
}

// combinations reads the list of include or exclude.
func (p *parser) combinations(n *node, what string) []combination {
	if n.kind != sequence {
		p.add(n.at, "%s is a list of combinations, not %s: write %s: [{AXIS: value}]", what, describe(n), what)
		return nil
	}
	var out []combination
	for _, item := range n.items {
		if item.kind != mapping || len(item.entries) == 0 {
			p.add(item.at, "%s holds %s: write {AXIS: value}", what, describe(item))
			continue
		}
		if len(item.entries) > p.limits.MatrixKeys {
			p.add(item.at, "%s holds a combination of %d keys: the limit is %d", what, len(item.entries), p.limits.MatrixKeys)
			continue
		}
		var c []ci.KeyValue
		for _, e := range item.entries {
			if err := Name(e.key); err != nil {
				p.add(e.at, "matrix key %s: %v", quote(e.key), err)
				continue
			}
			if v, ok := p.matrixValue(e.key, e.value); ok {
				c = append(c, ci.KeyValue{Key: e.key, Value: v})
			}
		}
		if len(c) == len(item.entries) {
			out = append(out, combination{item.at, c})
		}
	}
	return out
}

// combination is one entry of include or exclude.
type combination struct {
	at     pos
	values []ci.KeyValue
}

func (p *parser) exclude(legs [][]ci.KeyValue, axes []string, n *node) [][]ci.KeyValue {
	for _, c := range p.combinations(n, "exclude") {
		for _, kv := range c.values {
			if !slices.Contains(axes, kv.Key) {
				p.add(c.at, "exclude names %s, which is no axis of the matrix (axes: %s)", quote(kv.Key), list(axes))
			}
		}
		legs = slices.DeleteFunc(legs, func(leg []ci.KeyValue) bool {
			return !slices.ContainsFunc(c.values, func(kv ci.KeyValue) bool { return valueOf(leg, kv.Key) != kv.Value })
		})
	}
	return legs
}

func (p *parser) include(legs [][]ci.KeyValue, axes []string, n *node) [][]ci.KeyValue {
	ofProduct := len(legs)
	for _, combination := range p.combinations(n, "include") {
		c := combination.values
		fits := false
		for i, leg := range legs[:ofProduct] {
			contradicts := slices.ContainsFunc(c, func(kv ci.KeyValue) bool {
				return slices.Contains(axes, kv.Key) && valueOf(leg, kv.Key) != kv.Value
			})
			if !contradicts {
				fits = true
				legs[i] = extend(leg, c)
			}
		}
		if !fits && !slices.ContainsFunc(legs[ofProduct:], func(l []ci.KeyValue) bool { return slices.Equal(l, c) }) {
			legs = append(legs, c)
		}
		if len(legs) > p.limits.Legs {
			return legs
		}
	}
	return legs
}

func extend(leg, more []ci.KeyValue) []ci.KeyValue {
	for _, kv := range more {
		if i := slices.IndexFunc(leg, func(l ci.KeyValue) bool { return l.Key == kv.Key }); i >= 0 {
			leg[i].Value = kv.Value
		} else {
			leg = append(leg, kv)
		}
	}
	return leg
}

// legNames returns the names of a job's legs: the key, with the leg's values in
// parentheses. A name that would be too long, or that another leg has (values
// may hold ", "), ends with the number of the leg instead.
func legNames(key string, legs [][]ci.KeyValue) []string {
	const most = 200
	if len(legs) == 0 {
		return []string{key}
	}
	names := make([]string, len(legs))
	seen := map[string]bool{}
	for i, leg := range legs {
		values := make([]string, len(leg))
		for k, kv := range leg {
			values[k] = kv.Value
		}
		name := key + " (" + strings.Join(values, ", ") + ")"
		if len(name) > most || seen[name] {
			head := name[:min(len(name)-1, most)]
			for !utf8.ValidString(head) {
				head = head[:len(head)-1]
			}
			name = head + "… #" + itoa(i+1) + ")"
		}
		seen[name] = true
		names[i] = name
	}
	return names
}
