package workflow

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
)

// node is one value of the file with aliases expanded and merge keys applied.
type node struct {
	at      pos
	kind    nodeKind
	text    string // scalar: the source text of a plain scalar, the content of a quoted one
	plain   bool   // scalar: neither quoted nor a block
	block   bool   // scalar: literal or folded
	comment bool   // scalar: a comment follows on its line
	entries []entry
	items   []*node
}

type entry struct {
	key   string
	at    pos
	value *node
}

type nodeKind int

const (
	scalar nodeKind = iota
	mapping
	sequence
)

func (k nodeKind) String() string {
	switch k {
	case mapping:
		return "a mapping"
	case sequence:
		return "a list"
	default:
		return "a single value"
	}
}

// isNull reports whether nothing was written for the value.
func (n *node) isNull() bool {
	if n.kind != scalar || !n.plain {
		return false
	}
	switch n.text {
	case "", "~", "null", "Null", "NULL":
		return true
	default:
		return false
	}
}

// get returns the value of a mapping's key, or nil.
func (n *node) get(key string) *node {
	for i := range n.entries {
		if n.entries[i].key == key {
			return n.entries[i].value
		}
	}
	return nil
}

// load reads one YAML document. It returns nil after reporting why it could not.
func load(data []byte, limits Limits, p *problems) *node {
	data, ok := checkText(data, limits, p)
	if !ok {
		return nil
	}
	depth := func(d int, _ *yaml.DepthContext) error {
		if d > limits.Depth {
			return errTooDeep
		}
		return nil
	}
	collections := 0
	counted := func(d int, c *yaml.DepthContext) error {
		if collections++; collections > limits.Nodes {
			return errTooMany
		}
		return depth(d, c)
	}
	loader, err := yaml.NewLoader(bytes.NewReader(data),
		yaml.WithV4Defaults(),
		yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthFunc(counted))))
	if err != nil {
		p.add(pos{1, 1}, "the file cannot be read: %v", err)
		return nil
	}
	var doc, second yaml.Node
	switch err := loader.Load(&doc); {
	case errors.Is(err, io.EOF) || (err == nil && len(doc.Content) == 0):
		p.add(pos{1, 1}, "the file is empty: begin with \"version: 1\" and \"jobs:\"")
		return nil
	case err != nil:
		reportSyntax(err, data, limits, p)
		return nil
	}
	switch err := loader.Load(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		reportSyntax(err, data, limits, p)
		return nil
	default:
		p.add(pos{max(second.Line, 1), max(second.Column, 1)},
			"a second YAML document begins here: one file holds one workflow, remove the \"---\" or split the file")
		return nil
	}
	r := &resolver{problems: p, limits: limits, active: map[*yaml.Node]bool{}}
	root := r.value(doc.Content[0], 1)
	if r.stopped {
		return nil
	}
	return root
}

var (
	errTooDeep = errors.New("too deep")
	errTooMany = errors.New("too many")
)

// checkText refuses what is not plain UTF-8 text and bounds the input before
// the parser sees it. It returns the text without a byte order mark.
func checkText(data []byte, limits Limits, p *problems) ([]byte, bool) {
	if len(data) > limits.Bytes {
		p.add(pos{1, 1}, "the file has %d bytes: the limit is %d; move scripts and data into files of the repository", len(data), limits.Bytes)
		return nil, false
	}
	if bytes.HasPrefix(data, []byte{0xff, 0xfe}) || bytes.HasPrefix(data, []byte{0xfe, 0xff}) {
		p.add(pos{1, 1}, "the file is UTF-16: save it as UTF-8")
		return nil, false
	}
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	line, start, separators := 1, 0, 0
	for i := 0; i < len(data); {
		c := data[i]
		switch {
		case c == '\n':
			line++
			start = i + 1
			separators++
		case c == ',' || c == '[' || c == '{':
			separators++
		case c == '\t' || c == '\r':
		case c < 0x20 || c == 0x7f:
			if c == 0 {
				p.add(pos{line, utf8.RuneCount(data[start:i]) + 1}, "control character \\x00: remove it, nothing in a workflow may hold a NUL")
				return nil, false
			}
			p.add(pos{line, utf8.RuneCount(data[start:i]) + 1}, "control character \\x%02x: remove it; inside a double-quoted string write the escape \"\\x%02x\"", c, c)
			return nil, false
		case c >= utf8.RuneSelf:
			r, n := utf8.DecodeRune(data[i:])
			if r == utf8.RuneError && n == 1 {
				p.add(pos{line, utf8.RuneCount(data[start:i]) + 1}, "byte \\x%02x is not UTF-8: save the file as UTF-8", c)
				return nil, false
			}
			i += n
			continue
		}
		i++
	}
	if separators > limits.Separators {
		p.add(pos{1, 1}, "the file has %d newlines, commas and opening brackets: the limit is %d; move scripts and data into files of the repository", separators, limits.Separators)
		return nil, false
	}
	return data, true
}

// reportSyntax turns the parser's error into a place, a text and a fix.
func reportSyntax(err error, data []byte, limits Limits, p *problems) {
	at := pos{1, 1}
	message := err.Error()
	if le, ok := errors.AsType[*yaml.LoadError](err); ok {
		message = le.Message
		if le.Mark.Line > 0 {
			at = pos{le.Mark.Line, max(le.Mark.Column, 1)}
		}
		if le.ContextMsg != "" {
			message += " " + le.ContextMsg
			if le.ContextMark.Line > 0 {
				message += fmt.Sprintf(" that begins at line %d, column %d", le.ContextMark.Line, le.ContextMark.Column)
			}
		}
	}
	lines := bytes.Split(data, []byte("\n"))
	text := ""
	if at.line <= len(lines) {
		text = strings.TrimRight(string(lines[at.line-1]), "\r")
	}
	indent := text[:len(text)-len(strings.TrimLeft(text, " \t"))]
	switch {
	case errors.Is(err, errTooDeep) || strings.Contains(message, errTooDeep.Error()):
		p.add(at, "nested deeper than %d levels: flatten the file", limits.Depth)
	case errors.Is(err, errTooMany) || strings.Contains(message, errTooMany.Error()):
		p.add(at, "more than %d mappings and lists: split the workflow into several files", limits.Nodes)
	case strings.Contains(indent, "\t"):
		p.add(at, "a tab indents %s: indent with spaces", quote(strings.TrimSpace(text)))
	default:
		near := "the end of the file"
		if text = strings.TrimSpace(text); text != "" {
			near = quote(text)
		}
		fix := ""
		switch {
		case strings.Contains(message, "scanning an alias"), strings.Contains(message, "unknown anchor"):
			fix = "; quote a value that begins with *"
		case strings.Contains(message, "mapping values are not allowed"):
			fix = "; quote a value that holds \": \""
		case strings.Contains(message, "block scalar"), strings.Contains(message, "cannot start any token"):
			fix = "; quote a value that begins with a special character"
		}
		p.add(at, "not valid YAML near %s: %s%s", near, message, fix)
	}
}

// resolver copies the parser's tree with aliases expanded and merges applied.
type resolver struct {
	problems *problems
	limits   Limits
	active   map[*yaml.Node]bool
	nodes    int
	stopped  bool
}

func (r *resolver) stop(at pos, format string, args ...any) *node {
	if !r.stopped {
		r.problems.add(at, format, args...)
	}
	r.stopped = true
	return &node{at: at, kind: scalar, plain: true}
}

func place(y *yaml.Node) pos { return pos{max(y.Line, 1), max(y.Column, 1)} }

func (r *resolver) value(y *yaml.Node, depth int) *node {
	at := place(y)
	if r.stopped {
		return &node{at: at, kind: scalar, plain: true}
	}
	if r.nodes++; r.nodes > r.limits.Nodes {
		return r.stop(at, "the file has more than %d values after aliases are expanded: split the workflow into several files", r.limits.Nodes)
	}
	if depth > r.limits.Depth {
		return r.stop(at, "nested deeper than %d levels: flatten the file", r.limits.Depth)
	}
	if y.Kind == yaml.AliasNode {
		if y.Alias == nil || r.active[y.Alias] {
			return r.stop(at, "alias *%s contains itself: remove the circle", y.Value)
		}
		r.nodes-- // the target is counted
		return r.value(y.Alias, depth)
	}
	r.checkTag(y)
	r.active[y] = true
	defer delete(r.active, y)
	switch y.Kind {
	case yaml.MappingNode:
		return r.mapping(y, depth)
	case yaml.SequenceNode:
		n := &node{at: at, kind: sequence}
		for _, c := range y.Content {
			n.items = append(n.items, r.value(c, depth+1))
		}
		return n
	default:
		return &node{
			at: at, kind: scalar, text: y.Value,
			plain:   y.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) == 0,
			block:   y.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0,
			comment: y.LineComment != "",
		}
	}
}

func (r *resolver) checkTag(y *yaml.Node) {
	switch {
	case y.Style&yaml.TaggedStyle == 0:
	case strings.HasPrefix(y.Tag, "!!"):
		r.problems.add(place(y), "tag %s is not supported: remove it; values are text as written", quote(y.Tag))
	default:
		r.problems.add(place(y), "%s without quotes is a YAML tag: quote a value that begins with !", quote(y.Tag))
	}
}

// mapping applies the rules of YAML-01: an explicit key wins over a merged one
// wherever "<<" stands, the earlier mapping of a merge list wins, and a merge
// is shallow. Keys written twice are an error that names both lines.
func (r *resolver) mapping(y *yaml.Node, depth int) *node {
	n := &node{at: place(y), kind: mapping}
	index := map[string]int{}
	var merges []*yaml.Node
	var mergeAt pos
	for i := 0; i+1 < len(y.Content) && !r.stopped; i += 2 {
		k, v := y.Content[i], y.Content[i+1]
		if k.Kind == yaml.AliasNode && k.Alias != nil {
			k = k.Alias
		}
		if k.Kind != yaml.ScalarNode {
			r.problems.add(place(k), "a key must be a single value, not %s: quote it if it is meant as text", kindOf(k))
			continue
		}
		r.checkTag(k)
		if isMergeKey(k) {
			if merges != nil {
				r.problems.add(place(k), "duplicate key %q (lines %d and %d): merge several mappings with <<: [*a, *b]", "<<", mergeAt.line, k.Line)
				continue
			}
			mergeAt = place(k)
			merges = r.mergeSources(v)
			continue
		}
		if first, ok := index[k.Value]; ok {
			r.problems.add(place(k), "duplicate key %s (lines %d and %d): keep one", quote(k.Value), n.entries[first].at.line, k.Line)
			continue
		}
		index[k.Value] = len(n.entries)
		n.entries = append(n.entries, entry{key: k.Value, at: place(k), value: r.value(v, depth+1)})
	}
	for _, source := range merges {
		if r.stopped {
			return n
		}
		if r.active[source] {
			r.stop(mergeAt, "merge << contains itself: remove the circle")
			return n
		}
		r.active[source] = true
		merged := r.mapping(source, depth)
		delete(r.active, source)
		for _, e := range merged.entries {
			if _, ok := index[e.key]; ok || r.stopped {
				continue
			}
			index[e.key] = len(n.entries)
			n.entries = append(n.entries, e)
		}
	}
	return n
}

func isMergeKey(k *yaml.Node) bool {
	return k.Value == "<<" && k.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0
}

// mergeSources returns the mappings that a merge key's value names.
func (r *resolver) mergeSources(v *yaml.Node) []*yaml.Node {
	follow := func(y *yaml.Node) *yaml.Node {
		for hops := 0; y.Kind == yaml.AliasNode && y.Alias != nil && hops < r.limits.Depth; hops++ {
			y = y.Alias
		}
		return y
	}
	target := follow(v)
	sources := []*yaml.Node{}
	candidates := []*yaml.Node{v}
	if target.Kind == yaml.SequenceNode {
		candidates = target.Content
	}
	for _, c := range candidates {
		t := follow(c)
		if t.Kind != yaml.MappingNode {
			r.problems.add(place(c), "merge << takes a mapping or a list of mappings, not %s: write <<: *anchor", kindOf(t))
			continue
		}
		if r.nodes++; r.nodes > r.limits.Nodes {
			r.stop(place(c), "the file has more than %d values after aliases are expanded: split the workflow into several files", r.limits.Nodes)
			return sources
		}
		sources = append(sources, t)
	}
	return sources
}

func kindOf(y *yaml.Node) string {
	switch y.Kind {
	case yaml.MappingNode:
		return mapping.String()
	case yaml.SequenceNode:
		return sequence.String()
	case yaml.ScalarNode:
		return fmt.Sprintf("the value %s", quote(y.Value))
	default:
		return "this"
	}
}
