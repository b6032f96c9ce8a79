package workflow

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // a schedule's time zone must not depend on the machine
)

// On says which events start the workflow. A nil event does not.
type On struct {
	// Implicit is set when the file has no on: every push and pull request
	// starts the workflow, without filters.
	Implicit    bool
	Push        *Push
	PullRequest *PullRequest
	Schedule    []Schedule
	Manual      *Manual
}

// Push filters pushes of branches and tags. When only one of Branches and Tags
// has a filter, refs of the other kind do not start the workflow.
type Push struct {
	Branches, Tags, Paths Filter
}

// PullRequest filters pull requests by target branch and changed paths.
type PullRequest struct {
	Branches, Paths Filter
}

// Schedule is one cron expression of five fields and its IANA time zone ("UTC"
// by default).
type Schedule struct {
	Cron     string
	Timezone string
	Line     int
}

// Manual declares the inputs of runs started by a person or a program, in the
// order of the file.
type Manual struct {
	Inputs []Input
}

// Input is one typed input.
type Input struct {
	Name        string
	Type        InputType
	Description string
	Required    bool
	// HasDefault tells an empty default from none.
	HasDefault bool
	Default    string
	Options    []string // of a choice
	Line       int
}

// InputType says which texts an input accepts.
type InputType string

// Input types.
const (
	InputString  InputType = "string"
	InputBoolean InputType = "boolean" // "true" or "false"
	InputNumber  InputType = "number"  // a decimal number
	InputChoice  InputType = "choice"  // one of the options
)

// Accepts returns nil when the input's type allows the value.
func (in Input) Accepts(value string) error {
	switch in.Type {
	case InputString:
	case InputBoolean:
		if value != "true" && value != "false" {
			return errorText("must be true or false")
		}
	case InputNumber:
		if v, err := strconv.ParseFloat(value, 64); err != nil || math.IsNaN(v) || math.IsInf(v, 0) || strings.ContainsAny(value, "xXpP_") {
			return errorText("must be a number")
		}
	case InputChoice:
		if !slices.Contains(in.Options, value) {
			return errorText("must be " + list(in.Options))
		}
	}
	if limit := DefaultLimits().Value; in.Type != InputString && len(value) > limit {
		return errorText("must have at most " + strconv.Itoa(limit) + " bytes")
	}
	if len(value) > maxInput || strings.ContainsRune(value, 0) {
		return errorText("must have at most 64 KiB and no NUL")
	}
	return nil
}

const maxInput = 64 << 10

type errorText string

func (e errorText) Error() string { return string(e) }

func inputNames(inputs []Input) []string {
	out := make([]string, len(inputs))
	for i := range inputs {
		out[i] = inputs[i].Name
	}
	return out
}

func (p *parser) on(n *node) On {
	if n == nil {
		return On{Implicit: true, Push: &Push{}, PullRequest: &PullRequest{}}
	}
	var on On
	if n.kind != mapping {
		for _, item := range p.many(n) {
			p.event(&on, item)
		}
		return on
	}
	if p.fields(n, tOn) == nil {
		return on
	}
	if v := n.get("push"); v != nil {
		on.Push = &Push{}
		if !v.isNull() && p.fields(v, tPush) != nil {
			*on.Push = Push{Branches: p.filter(v, "branches"), Tags: p.filter(v, "tags"), Paths: p.filter(v, "paths")}
		}
	}
	if v := n.get("pull_request"); v != nil {
		on.PullRequest = &PullRequest{}
		if !v.isNull() && p.fields(v, tPullRequest) != nil {
			*on.PullRequest = PullRequest{Branches: p.filter(v, "branches"), Paths: p.filter(v, "paths")}
		}
	}
	if v := n.get("schedule"); v != nil {
		on.Schedule = p.schedules(v)
	}
	if v := n.get("manual"); v != nil {
		on.Manual = &Manual{}
		if !v.isNull() && p.fields(v, tManual) != nil && v.get("inputs") != nil {
			on.Manual.Inputs = p.manualInputs(v.get("inputs"))
		}
	}
	return on
}

// event reads an event that is written as a word.
func (p *parser) event(on *On, n *node) {
	word, ok := p.text(n, "on")
	if !ok {
		return
	}
	p.warn(tOn, word, n.at)
	switch word {
	case "push":
		on.Push = &Push{}
	case "pull_request":
		on.PullRequest = &PullRequest{}
	case "manual":
		on.Manual = &Manual{}
	case "schedule":
		p.add(n.at, "schedule needs times: write on: {schedule: [{cron: \"0 3 * * *\"}]}")
	default:
		p.add(n.at, "unknown event %s: %s", quote(word), tables()[tOn].advice(word))
	}
}

// filter reads KEY or KEY_ignore of an event (YAML-07).
func (p *parser) filter(event *node, key string) Filter {
	only, ignore := event.get(key), event.get(key+"_ignore")
	var f Filter
	if only != nil {
		f.Only = p.patterns(only, key)
		if len(f.Only) == 0 {
			p.add(only.at, "%s has no pattern and would match nothing: remove it or write patterns", key)
		} else if !slices.ContainsFunc(f.Only, func(s string) bool { return !strings.HasPrefix(s, "!") }) {
			p.add(only.at, "%s has only patterns that exclude and would match nothing: write \"**\" before them, or use %s_ignore", key, key)
		}
	}
	if ignore != nil {
		f.Ignore = p.patterns(ignore, key+"_ignore")
		for _, item := range p.many(ignore) {
			if item.kind == scalar && strings.HasPrefix(item.text, "!") {
				p.add(item.at, "%s cannot take back with !, found %s: write %s: [\"**\", \"!PATTERN\", \"PATTERN\"], the last match decides", key+"_ignore", quote(item.text), key)
			}
		}
		if only != nil {
			p.add(ignore.at, "%s and %s_ignore cannot be used together: keep one; in %s a pattern with ! excludes", key, key, key)
		}
	}
	return f
}

func (p *parser) patterns(n *node, what string) []string {
	var out []string
	for _, item := range p.many(n) {
		if s := p.checked(item, what+" pattern", CheckPattern); s != "" {
			out = append(out, s)
		}
	}
	return out
}

func (p *parser) schedules(n *node) []Schedule {
	if n.kind != sequence || len(n.items) == 0 {
		p.add(n.at, "schedule is a list of {cron, timezone}, not %s", describe(n))
		return nil
	}
	var out []Schedule
	for _, item := range n.items {
		if p.fields(item, tSchedule) == nil {
			continue
		}
		s := Schedule{Timezone: "UTC", Line: item.at.line}
		if v := item.get("cron"); v != nil {
			s.Cron = p.checked(v, "cron", checkCron)
		}
		if v := item.get("timezone"); v != nil {
			s.Timezone = p.checked(v, "timezone", checkTimezone)
		}
		out = append(out, s)
	}
	return out
}

func checkTimezone(s string) error {
	if s == "" || s == "Local" {
		return errorText("write an IANA name like Europe/Zurich")
	}
	if _, err := time.LoadLocation(s); err != nil {
		return errorText("unknown time zone: write an IANA name like Europe/Zurich")
	}
	return nil
}

func (p *parser) manualInputs(n *node) []Input {
	if n.kind != mapping {
		p.add(n.at, "inputs is a mapping of names, not %s", describe(n))
		return nil
	}
	var out []Input
	for _, e := range n.entries {
		if err := Name(e.key); err != nil {
			p.add(e.at, "input name %s: %v", quote(e.key), err)
			continue
		}
		in := Input{Name: e.key, Type: InputString, Line: e.at.line}
		if !e.value.isNull() && p.fields(e.value, tInput) != nil {
			p.input(&in, e.value)
		}
		out = append(out, in)
	}
	return out
}

func (p *parser) input(in *Input, n *node) {
	if v := n.get("type"); v != nil {
		if word := p.oneOf(v, "type", "string", "boolean", "number", "choice"); word != "" {
			in.Type = InputType(word)
		}
	}
	if v := n.get("description"); v != nil {
		in.Description, _ = p.text(v, "description")
	}
	if v := n.get("required"); v != nil {
		in.Required = p.boolean(v, "required")
	}
	if v := n.get("options"); v != nil {
		in.Options = p.texts(v, "option", anyText)
		if in.Type != InputChoice {
			p.add(v.at, "options are for type: choice, this input is a %s", in.Type)
		}
	}
	if in.Type == InputChoice && len(in.Options) == 0 {
		p.add(n.at, "input %s is a choice without options: write options: [A, B]", quote(in.Name))
	}
	if v := n.get("default"); v != nil {
		if v.kind != scalar {
			p.add(v.at, "default must be a single value, not %s", describe(v))
			return
		}
		in.HasDefault, in.Default = true, v.text
		if err := in.Accepts(v.text); err != nil {
			p.add(v.at, "default %s of input %s %v", quote(v.text), quote(in.Name), err)
		}
	}
}
