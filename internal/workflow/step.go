package workflow

import (
	"slices"
	"strings"
	"unicode/utf8"
)

func (p *parser) steps(n *node, j *job) []step {
	if n.kind != sequence || len(n.items) == 0 {
		p.add(n.at, "steps is a list of commands, not %s: write steps: [make]", emptyOr(n))
		return nil
	}
	if len(n.items) > p.limits.Steps {
		p.add(n.at, "%d steps in job %s: the limit is %d; put several commands into one step or into a script", len(n.items), quote(j.key), p.limits.Steps)
		return nil
	}
	out := make([]step, 0, len(n.items))
	for _, item := range n.items {
		s := step{at: item.at, shell: j.shell, directory: j.directory}
		switch item.kind {
		case mapping:
			p.step(&s, item, j)
		case sequence:
			p.add(item.at, "a step is a command or a mapping, not a list: write run: [COMMAND, …] for several commands in one shell")
		default:
			s.run = p.command(item)
		}
		if s.name.isZero() && s.run != "" { // without a command there is a problem already
			s.name = literal(item.at, titleOf(s.run))
		}
		out = append(out, s)
	}
	return out
}

func emptyOr(n *node) string {
	if n.kind == sequence {
		return "an empty list"
	}
	return describe(n)
}

func (p *parser) step(s *step, n *node, j *job) {
	if isSplitCommand(n) {
		e := n.entries[0]
		p.add(e.at, "the command %s is read as a mapping, since it holds \": \": write it as a block with | or in quotes", quote(e.key+": "+e.value.text))
		return
	}
	p.fields(n, tStep)
	if v := n.get("name"); v != nil {
		s.name = p.template(v, "step name", j.axes)
	}
	if v := n.get("run"); v != nil {
		s.run = p.command(v)
	}
	if v := n.get("shell"); v != nil {
		s.shell = p.oneOf(v, "shell", "sh", "bash")
	}
	if v := n.get("env"); v != nil {
		s.env = p.env(v, j.axes)
	}
	if v := n.get("working_directory"); v != nil {
		s.directory = p.checked(v, "working_directory", workspacePath)
	}
	if v := n.get("timeout"); v != nil {
		s.timeout = p.duration(v, "timeout")
	}
	if v := n.get("if"); v != nil {
		s.condition = p.condition(v, true)
	}
	if v := n.get("continue_on_error"); v != nil {
		s.continueOnError = p.boolean(v, "continue_on_error")
	}
	if v := n.get("secrets"); v != nil {
		s.hasSecrets = true
		if !v.isNull() {
			s.secrets = p.texts(v, "secret", secretName)
		}
	}
}

// isSplitCommand reports whether a step is a command that YAML has taken for a
// key and its value: - echo "a: b".
func isSplitCommand(n *node) bool {
	return len(n.entries) == 1 && n.entries[0].value.kind == scalar && strings.ContainsAny(n.entries[0].key, " \"'$")
}

// command reads a script: text, or a list of lines for one shell. Nothing is
// ever interpolated into it (SPEC WF-7).
func (p *parser) command(n *node) string {
	var lines []string
	for _, item := range p.many(n) {
		if item.kind != scalar || item.isNull() {
			p.add(item.at, "a command must be text, not %s: quote it if it holds \": \" or begins with - or {", describe(item))
			return ""
		}
		if i := strings.Index(item.text, "${{"); i >= 0 {
			p.add(item.at, "the script holds %s: untrusted text put into a script is run as commands, so nothing is interpolated there; set env: {NAME: ${{ … }}} and use \"$NAME\"", quote(cutLine(item.text[i:])))
			return ""
		}
		if strings.ContainsRune(item.text, 0) {
			p.add(item.at, "the script holds a NUL byte: no shell can run it")
			return ""
		}
		if item.plain && item.comment && (strings.Count(item.text, "'")%2 == 1 || strings.Count(item.text, `"`)%2 == 1) {
			p.add(item.at, "the command is read as %s, since YAML takes \" #\" for the beginning of a comment: write the command as a block with | or in quotes", quote(item.text))
			return ""
		}
		lines = append(lines, item.text)
	}
	run := strings.Join(lines, "\n")
	if strings.TrimSpace(run) == "" {
		p.add(n.at, "the step has no command: write a command, or true to do nothing")
		return ""
	}
	return strings.ReplaceAll(run, "\r\n", "\n")
}

func cutLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// titleOf names a step after the first line of its script that shows anything,
// cut to what displayName accepts.
func titleOf(run string) string {
	for line := range strings.Lines(run) {
		line = strings.TrimSpace(strings.Map(func(r rune) rune {
			if r < 0x20 || r == 0x7f {
				return ' '
			}
			return r
		}, line))
		if line != "" {
			return cutTitle(line)
		}
	}
	return "…"
}

// cutTitle keeps 80 characters, and of those that take many bytes fewer.
func cutTitle(line string) string {
	const most, end = 80, "…"
	if utf8.RuneCountInString(line) <= most && len(line) <= maxDisplayName {
		return line
	}
	kept, runes := 0, 0
	for i, r := range line {
		next := i + utf8.RuneLen(r)
		if runes == most-1 || next > maxDisplayName-len(end) {
			break
		}
		kept, runes = next, runes+1
	}
	return line[:kept] + end
}

// spreadSecrets gives the job's secrets to its steps. Once a step names its
// own, the job's list only declares and each step gets what it names.
func (p *parser) spreadSecrets(j *job) {
	named := slices.ContainsFunc(j.steps, func(s step) bool { return s.hasSecrets })
	known := map[string]bool{}
	for _, name := range j.secrets {
		known[name] = true
	}
	all := slices.Clone(j.secrets)
	for i := range j.steps {
		s := &j.steps[i]
		if !named {
			s.secrets = j.secrets
			continue
		}
		for _, name := range s.secrets {
			if !known[name] {
				known[name] = true
				all = append(all, name)
			}
		}
	}
	j.secrets = all
	for i := range j.steps {
		s := &j.steps[i]
		if len(s.secrets) == 0 {
			continue
		}
		for _, v := range slices.Concat(p.fileEnv, j.env, s.env) {
			if redirectsPrograms(v.key) {
				p.add(v.value.at, "variable %s may not be set for a step that gets secrets (%s): it can make another program see them", v.key, strings.Join(s.secrets, ", "))
			}
		}
	}
}
