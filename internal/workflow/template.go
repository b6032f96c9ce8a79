package workflow

import (
	"regexp"
	"slices"
	"strings"
	"sync"

	"forgeci/internal/ci"
)

// interpolationRule is the answer to "${{" in the wrong place.
const interpolationRule = "${{ }} is allowed in env values, runs_on, image, artifact names, step names, environment and concurrency groups only, with matrix.NAME or inputs.NAME; " +
	"in a script it would run foreign text as commands: set env: {NAME: …} and use \"$NAME\""

// template is a value that may hold ${{ matrix.NAME }} and ${{ inputs.NAME }}.
// Expansion is done once on the parsed value and its result is never looked at
// again, so a value cannot add keys or further expressions (YAML-09).
type template struct {
	at    pos
	parts []part
}

type part struct {
	text    string
	context string // "", "matrix" or "inputs"
}

var (
	interpolationRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\$\{\{(.*?)\}\}`) })
	referenceRE     = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^\s*(matrix|inputs)(?:\.([A-Za-z_][A-Za-z0-9_-]*)|\["([^"\\]+)"\]|\['([^'\\]+)'\])\s*$`)
	})
)

func literal(at pos, s string) template { return template{at: at, parts: []part{{text: s}}} }

// usesInputs reports whether the value is known only when inputs are.
func (t template) usesInputs() bool {
	return slices.ContainsFunc(t.parts, func(p part) bool { return p.context == "inputs" })
}

// interpolates reports whether the value holds a reference.
func (t template) interpolates() bool {
	return slices.ContainsFunc(t.parts, func(p part) bool { return p.context != "" })
}

func (t template) isZero() bool { return t.parts == nil }

// expand returns the text with the leg's values and the inputs put in; what a
// leg does not have is empty.
func (t template) expand(leg []ci.KeyValue, inputs map[string]string) string {
	if len(t.parts) == 1 && !t.interpolates() {
		return t.parts[0].text // shared, not copied
	}
	var b strings.Builder
	for _, p := range t.parts {
		switch p.context {
		case "":
			b.WriteString(p.text)
		case "matrix":
			b.WriteString(valueOf(leg, p.text))
		default:
			b.WriteString(inputs[p.text])
		}
	}
	return b.String()
}

func valueOf(kv []ci.KeyValue, key string) string {
	for _, v := range kv {
		if v.Key == key {
			return v.Value
		}
	}
	return ""
}

// template reads a value in which interpolation is allowed. axes are the keys
// of the job's matrix; nil where no matrix is in reach.
func (p *parser) template(n *node, what string, axes []string) template {
	if n.kind == scalar && n.isNull() && n.text == "" {
		return literal(n.at, "")
	}
	if n.kind != scalar {
		p.add(n.at, "%s must be a single value, not %s", what, describe(n))
		return template{}
	}
	s := n.text
	if !strings.Contains(s, "${{") {
		return literal(n.at, s)
	}
	t := template{at: n.at}
	end := 0
	for _, m := range interpolationRE().FindAllStringSubmatchIndex(s, -1) {
		if m[0] > end {
			t.parts = append(t.parts, part{text: s[end:m[0]]})
		}
		end = m[1]
		if ref, ok := p.reference(n.at, s[m[0]:m[1]], s[m[2]:m[3]], what, axes); ok {
			t.parts = append(t.parts, ref)
		}
	}
	if strings.Contains(s[end:], "${{") {
		p.add(n.at, "%s %s: ${{ is not closed with }}", what, quote(s))
	}
	if end < len(s) {
		t.parts = append(t.parts, part{text: s[end:]})
	}
	return t
}

func (p *parser) reference(at pos, whole, expr, what string, axes []string) (part, bool) {
	m := referenceRE().FindStringSubmatch(expr)
	if m == nil {
		p.add(at, "%s holds %s: only ${{ matrix.NAME }} and ${{ inputs.NAME }} are interpolated", what, quote(whole))
		return part{}, false
	}
	name := m[2] + m[3] + m[4]
	known := axes
	if m[1] == "inputs" {
		known = inputNames(p.inputs)
	}
	if !slices.Contains(known, name) {
		p.add(at, "%s holds %s: there is no %s %s here (known: %s)", what, quote(whole), singular(m[1]), quote(name), list(known))
		return part{}, false
	}
	return part{text: name, context: m[1]}, true
}

func singular(context string) string {
	if context == "inputs" {
		return "input"
	}
	return "matrix value"
}
