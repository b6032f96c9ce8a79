package workflow

import (
	"fmt"
	"slices"
	"strings"
)

// Filter holds the patterns of one filter of an event. The zero value lets
// everything pass. At most one of the two is set.
type Filter struct {
	Only   []string // the last pattern that matches decides, "!" excludes
	Ignore []string // values that match do not count
}

// IsZero reports whether there is no filter.
func (f Filter) IsZero() bool { return f.Only == nil && f.Ignore == nil }

// Match reports whether any of the values passes: one branch or tag name, or
// all changed paths of a push. With no values nothing passes but the zero
// filter. The time is bounded by the length of the patterns times the length of
// the values.
func (f Filter) Match(values ...string) bool {
	switch {
	case f.IsZero():
		return true
	case f.Ignore != nil:
		ignored := compileFilter(f.Ignore)
		return slices.ContainsFunc(values, func(v string) bool { return !ignored.match(v) })
	default:
		only := compileFilter(f.Only)
		return slices.ContainsFunc(values, only.match)
	}
}

// MatchFilter reports whether a branch, tag or path passes a list of patterns:
// the last pattern that matches decides, and one that begins with "!" excludes.
// Nothing passes an empty list.
//
//   - any characters but /
//     **     any characters; as a whole segment also none ("a/**/b" matches "a/b")
//     ?      one character but /
//     [a-z]  one ASCII character of the set, [!a-z] none of it
//     \      takes the next character literally
//
// Time and memory are bounded by the length of the pattern times the length of
// the value, whatever they hold: there is no backtracking.
func MatchFilter(patterns []string, value string) bool {
	return compileFilter(patterns).match(value)
}

// CheckPattern returns nil for a pattern that MatchFilter understands whole;
// the error says what is wrong. MatchFilter takes any text: what is malformed
// there matches literally.
func CheckPattern(pattern string) error {
	rest := strings.TrimPrefix(pattern, "!")
	switch {
	case rest == "":
		return fmt.Errorf("the pattern is empty")
	case len(pattern) > DefaultLimits().Pattern:
		return fmt.Errorf("the pattern has %d bytes: the limit is %d", len(pattern), DefaultLimits().Pattern)
	case strings.HasPrefix(rest, "/") || strings.HasPrefix(rest, "./"):
		return fmt.Errorf("patterns begin at the root of the repository: remove the leading %q", rest[:strings.IndexByte(rest, '/')+1])
	case strings.HasSuffix(rest, `\`) && !strings.HasSuffix(rest, `\\`):
		return fmt.Errorf(`nothing follows the last \: remove it or double it`)
	}
	for i := 0; i < len(rest); i++ {
		switch rest[i] {
		case '\\':
			i++
		case '[':
			_, end, ok := class(rest, i)
			if !ok {
				return fmt.Errorf(`"[" at byte %d begins no set of ASCII characters that "]" closes: write \[ for the character itself`, i+1)
			}
			i = end - 1
		case '{':
			return fmt.Errorf(`{a,b} is not supported: write one pattern for each, or \{ for the character itself`)
		}
	}
	return nil
}

type compiledFilter []compiledPattern

type compiledPattern struct {
	exclude bool
	glob    glob
}

func compileFilter(patterns []string) compiledFilter {
	out := make(compiledFilter, len(patterns))
	for i, p := range patterns {
		rest, exclude := strings.CutPrefix(p, "!")
		out[i] = compiledPattern{exclude, compileGlob(rest)}
	}
	return out
}

func (f compiledFilter) match(value string) bool {
	for _, p := range slices.Backward(f) {
		if p.glob.match(value) {
			return !p.exclude
		}
	}
	return false
}
