package workflow

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
)

// parser walks the tree of one file and collects problems.
type parser struct {
	*problems
	limits Limits
	// Known before the jobs are read:
	inputs  []Input // of on.manual
	fileEnv []setting

	current    *job               // the job being read
	conditions []pendingCondition // checked when all jobs are known
	byKey      map[string]*job
	inherited  map[string]bool // keys of defaults that a job took

	warnings []Warning
	warned   map[warningPlace]int // where in warnings

	data  []byte
	lines [][]byte // of data, split when first asked for
}

// fields checks that n is a mapping with keys of the table only, reports what
// is missing, and returns n, or nil when it is no mapping.
func (p *parser) fields(n *node, name string) *node {
	t := tables()[name]
	if n.kind != mapping {
		p.add(n.at, "%s is a mapping of keys, not %s: use %s", t.what, describe(n), list(t.names()))
		return nil
	}
	for _, e := range n.entries {
		if !t.has(e.key) {
			p.add(e.at, "unknown key %s in %s: %s", quote(e.key), t.what, t.advice(e.key))
		}
		p.warn(name, e.key, e.at)
	}
	for _, r := range t.required {
		if n.get(r) == nil {
			p.add(n.at, "%s needs %s", t.what, r+example(r))
		}
	}
	return n
}

// example ends the complaint about a missing key with what to write, where one
// line can say it.
func example(key string) string {
	switch key {
	case "version":
		return ": write version: 1"
	case "jobs":
		return ": write jobs: {NAME: {steps: [COMMAND]}}"
	case "max":
		return ": write max: 1"
	case "on":
		return ": write on: [runner_lost]"
	default:
		return ""
	}
}

// advice says what to write instead of a key that t does not have.
func (t *table) advice(key string) string {
	if a, ok := t.foreign[key]; ok {
		return a
	}
	if snake := strings.ReplaceAll(strings.ToLower(key), "-", "_"); snake != key && t.has(snake) {
		return "write " + snake
	}
	if near := nearest(strings.ToLower(key), t.names()); near != "" {
		return "did you mean " + near + "?"
	}
	return "use " + list(t.names())
}

func describe(n *node) string {
	switch {
	case n.isNull():
		return "nothing"
	case n.kind == scalar:
		return "the value " + quote(n.text)
	default:
		return n.kind.String()
	}
}

// text returns the source text of a single value; nothing is no text.
func (p *parser) text(n *node, what string) (string, bool) {
	s, ok := p.raw(n, what)
	if ok && strings.Contains(s, "${{") {
		p.add(n.at, "%s holds %s: %s", what, quote(s), interpolationRule)
		return "", false
	}
	return s, ok
}

// raw is text without the check for interpolation.
func (p *parser) raw(n *node, what string) (string, bool) {
	if n.kind != scalar || n.isNull() {
		p.add(n.at, "%s must be a single value, not %s", what, describe(n))
		return "", false
	}
	return n.text, true
}

// checked is text that must satisfy a rule.
func (p *parser) checked(n *node, what string, rule func(string) error) string {
	s, _ := p.valid(n, what, rule)
	return s
}

// valid is checked that tells an empty text from none.
func (p *parser) valid(n *node, what string, rule func(string) error) (string, bool) {
	s, ok := p.text(n, what)
	if !ok {
		return "", false
	}
	if err := rule(s); err != nil {
		p.add(n.at, "%s %s: %v", what, quote(s), err)
		return "", false
	}
	return s, true
}

func (p *parser) oneOf(n *node, what string, words ...string) string {
	s, ok := p.text(n, what)
	if !ok {
		return ""
	}
	if !slices.Contains(words, s) {
		hint := "use " + list(words)
		if near := nearest(s, words); near != "" {
			hint = "did you mean " + near + "?"
		}
		p.add(n.at, "%s %s is unknown: %s", what, quote(s), hint)
		return ""
	}
	return s
}

func (p *parser) boolean(n *node, what string) bool {
	if n.kind == scalar && n.plain {
		switch n.text {
		case "true":
			return true
		case "false":
			return false
		}
	}
	p.add(n.at, "%s must be true or false, not %s", what, describe(n))
	return false
}

func (p *parser) integer(n *node, what string, low, high int) int {
	if n.kind == scalar && n.plain {
		if v, err := strconv.Atoi(n.text); err == nil && v >= low && v <= high && strconv.Itoa(v) == n.text {
			return v
		}
	}
	p.add(n.at, "%s must be a whole number from %d to %d, not %s", what, low, high, describe(n))
	return low
}

var durationRE = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`)
})

func (p *parser) duration(n *node, what string) ci.Duration {
	s, ok := p.text(n, what)
	if !ok {
		return 0
	}
	if number, err := strconv.ParseFloat(s, 64); err == nil && number > 0 {
		p.add(n.at, "%s %s has no unit: write %ss, %sm or %sh", what, quote(s), s, s, s)
		return 0
	}
	d, err := time.ParseDuration(s)
	if s != "0" && (err != nil || !durationRE().MatchString(s)) {
		p.add(n.at, "%s %s is not a duration: write it like 90s, 10m or 1h30m", what, quote(s))
		return 0
	}
	if d <= 0 || d > p.limits.Timeout {
		p.add(n.at, "%s %s is out of range: use more than 0 and at most %s", what, quote(s), p.limits.Timeout)
		return 0
	}
	return ci.Duration(d)
}

// many returns the items of a list, or the one value itself.
func (p *parser) many(n *node) []*node {
	if n.kind == sequence {
		return n.items
	}
	return []*node{n}
}

// texts reads a list of values (or one) that satisfy a rule, each once.
func (p *parser) texts(n *node, what string, rule func(string) error) []string {
	out, _ := p.placed(n, what, rule)
	return out
}

// placed is texts with the place of each.
func (p *parser) placed(n *node, what string, rule func(string) error) ([]string, []pos) {
	var out []string
	var at []pos
	for _, item := range p.many(n) {
		s, ok := p.valid(item, what, rule)
		if !ok {
			continue
		}
		if s == "" {
			p.add(item.at, "%s is empty: write a value, or remove it", what)
			continue
		}
		if slices.Contains(out, s) {
			p.add(item.at, "%s %s is written twice: keep one", what, quote(s))
			continue
		}
		out = append(out, s)
		at = append(at, item.at)
	}
	return out, at
}

func anyText(string) error { return nil }
