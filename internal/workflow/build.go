package workflow

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"forgeci/internal/ci"
)

// CompileOptions say for what a plan is made.
type CompileOptions struct {
	// Inputs are the values given for on.manual.inputs. Unknown names and values
	// that the type refuses are errors; defaults fill what is not given.
	Inputs map[string]string
	// Event says that an event starts the run and not a person or program: a
	// required input without a default is then empty instead of an error.
	Event bool
	// Jobs limits the plan to these jobs and all their ancestors: keys, or full
	// names of matrix legs. Empty means all jobs.
	Jobs []string
}

// Compile expands the file into a plan: matrices, defaults and interpolation.
// The same file and options always give the same plan. The error is a *ci.Error
// of kind ErrInvalid: an input is wrong, missing or unknown, a job is unknown,
// or a value that holds an input became invalid with it.
func (f *File) Compile(opts CompileOptions) (ci.Plan, error) {
	p := newProblems(f.Path, DefaultLimits().Problems)
	inputs, err := f.accept(opts)
	if err != nil {
		return ci.Plan{}, err
	}
	plan := f.build(p, inputs, false)
	if err := p.err(); err != nil {
		return ci.Plan{}, err
	}
	if len(opts.Jobs) > 0 {
		if plan.Jobs, err = f.only(plan.Jobs, opts.Jobs); err != nil {
			return ci.Plan{}, err
		}
	}
	return plan, nil
}

// accept checks given inputs against the declared ones and adds defaults.
func (f *File) accept(opts CompileOptions) (map[string]string, error) {
	given := opts.Inputs
	var declared []Input
	if f.On.Manual != nil {
		declared = f.On.Manual.Inputs
	}
	var fields []ci.FieldError
	bad := func(name, format string, args ...any) {
		fields = append(fields, ci.FieldError{Pointer: "/inputs/" + pointer(name), Detail: fmt.Sprintf(format, args...)})
	}
	accepted := map[string]string{}
	for _, in := range declared {
		v, ok := given[in.Name]
		switch {
		case ok:
			if err := in.Accepts(v); err != nil {
				bad(in.Name, "it is %s: it %v", quote(v), err)
			}
			accepted[in.Name] = v
		case in.HasDefault:
			accepted[in.Name] = in.Default
		case in.Required && !opts.Event:
			bad(in.Name, "a value is required")
		default:
			accepted[in.Name] = in.zero()
		}
	}
	for _, name := range sortedKeys(given) {
		if !slices.Contains(inputNames(declared), name) {
			bad(name, "the workflow has no input %s (known: %s)", quote(name), list(inputNames(declared)))
		}
	}
	if len(fields) > 0 {
		e := ci.Errorf(ci.ErrInvalid, "%s: the inputs are not accepted", f.Path)
		e.Fields = fields
		return nil, e
	}
	if len(accepted) == 0 {
		return nil, nil
	}
	return accepted, nil
}

// zero is the value of an input that has neither a value nor a default.
func (in Input) zero() string {
	switch in.Type {
	case InputString:
	case InputBoolean:
		return "false"
	case InputNumber:
		return "0"
	case InputChoice:
		if len(in.Options) > 0 {
			return in.Options[0]
		}
	}
	return ""
}

func pointer(s string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(s)
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func itoa(i int) string { return strconv.Itoa(i) }

// only keeps the named jobs and their ancestors, in order.
func (f *File) only(jobs []ci.JobSpec, names []string) ([]ci.JobSpec, error) {
	byKey := f.byKey()
	keep := map[string]bool{} // full names
	var unknown []string
	for _, name := range names {
		found := false
		for _, j := range jobs {
			if j.Key == name || j.Name == name {
				found = true
				keep[j.Name] = true
				up := ancestors(byKey, j.Key)
				for _, a := range jobs {
					if up[a.Key] {
						keep[a.Name] = true
					}
				}
			}
		}
		if !found {
			unknown = append(unknown, quote(name))
		}
	}
	if len(unknown) > 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "%s: unknown job %s (known: %s)", f.Path, list(unknown), list(f.Keys))
	}
	return slices.DeleteFunc(jobs, func(j ci.JobSpec) bool { return !keep[j.Name] }), nil
}

func (f *File) byKey() map[string]*job {
	m := make(map[string]*job, len(f.jobs))
	for _, j := range f.jobs {
		m[j.key] = j
	}
	return m
}

// builder makes a plan. While the inputs are unknown (partial) it leaves values
// that hold one unchecked; Compile checks them.
type builder struct {
	*problems
	file    *File
	inputs  map[string]string
	partial bool
	// broken: the file has problems already; what follows from values that may be
	// missing because of them is not reported.
	broken bool

	bytes, values int // of the plan so far
	stopped       bool
}

// grow counts what the plan holds and reports once when that is too much:
// legs multiply what the file says.
func (b *builder) grow(values, bytes int) bool {
	limits := DefaultLimits()
	b.values += values
	b.bytes += bytes
	if !b.stopped && (b.values > limits.PlanValues || b.bytes > limits.PlanBytes) {
		b.stopped = true
		b.add(pos{1, 1}, "the plan with all legs of matrices would hold more than %d values or %d bytes of text: remove legs, or move scripts and data into files of the repository", limits.PlanValues, limits.PlanBytes)
	}
	return !b.stopped
}

func (f *File) build(p *problems, inputs map[string]string, partial bool) ci.Plan {
	b := &builder{problems: p, file: f, inputs: inputs, partial: partial, broken: len(p.list) > 0}
	plan := ci.Plan{Workflow: f.Name, Path: f.Path, Digest: f.Digest, Priority: f.priority, Inputs: inputs}
	plan.Concurrency = b.concurrency(f.concurrency, nil)
	total := 0
	for _, j := range f.jobs {
		total += max(1, len(j.legs))
	}
	if limit := DefaultLimits().Jobs; total > limit {
		p.add(pos{1, 1}, "the workflow has %d jobs with all legs of matrices: the limit is %d; remove values, or split the workflow into several files", total, limit)
		return plan
	}
	plan.Jobs = make([]ci.JobSpec, 0, total)
	for _, j := range f.jobs {
		for i, name := range legNames(j.key, j.legs) {
			var leg []ci.KeyValue
			if len(j.legs) > 0 {
				leg = j.legs[i]
			}
			if b.stopped {
				return plan
			}
			plan.Jobs = append(plan.Jobs, b.job(j, name, leg))
		}
	}
	if !b.stopped && !b.broken {
		b.restores(plan.Jobs)
	}
	return plan
}

// text expands a value and checks it against the rule.
func (b *builder) text(t template, leg []ci.KeyValue, what string, rule func(string) error) string {
	if t.isZero() {
		return ""
	}
	v := t.expand(leg, b.inputs)
	if !b.grow(1, len(v)) || b.unknown(t) {
		return v
	}
	if err := rule(v); err != nil {
		b.add(t.at, "%s %s: %v", what, quote(v), err)
	}
	return v
}

// unknown reports whether a value cannot be judged yet.
func (b *builder) unknown(t template) bool {
	return b.partial && t.usesInputs() || b.broken && (t.isZero() || t.interpolates())
}

func (b *builder) settings(in []setting, leg []ci.KeyValue) []ci.KeyValue {
	if len(in) == 0 {
		return nil
	}
	out := make([]ci.KeyValue, 0, len(in))
	index := make(map[string]int, len(in))
	for _, s := range in {
		v := s.value.expand(leg, b.inputs)
		if !b.grow(1, len(s.key)+len(v)) {
			return out
		}
		if i, ok := index[s.key]; ok { // a later one replaces the value in its place
			out[i].Value = v
			continue
		}
		index[s.key] = len(out)
		out = append(out, ci.KeyValue{Key: s.key, Value: v})
	}
	return out
}

// concurrency expands a group; one that comes out empty groups nothing (CONC-02).
func (b *builder) concurrency(c *concurrency, leg []ci.KeyValue) *ci.Concurrency {
	if c == nil || c.group.isZero() {
		return nil
	}
	group := c.group.expand(leg, b.inputs)
	if whole := b.file.concurrency; whole != nil && c != whole && !whole.group.isZero() && !b.unknown(c.group) && !b.unknown(whole.group) &&
		group != "" && group == whole.group.expand(nil, b.inputs) {
		b.add(c.group.at, "the job waits for the group %s, which its own workflow holds (line %d): choose another name", quote(group), whole.group.at.line)
	}
	if !c.group.interpolates() || group != "" {
		group = b.text(c.group, leg, "concurrency group", displayName)
	}
	if group == "" {
		return nil
	}
	return &ci.Concurrency{Group: group, CancelInProgress: c.cancel}
}

func (b *builder) job(j *job, name string, leg []ci.KeyValue) ci.JobSpec {
	spec := ci.JobSpec{
		Name: name, Key: j.key, Line: j.at.line, Matrix: leg, Needs: j.needs, If: j.condition,
		Priority: j.priority, Timeout: j.timeout, Retry: j.retry, AllowFailure: j.allowFailure,
		Outputs: j.outputs, Cache: j.cache, Reports: j.reports, Secrets: j.secrets, Identity: j.identity,
		Inputs: j.inputs,
	}
	if !b.grow(j.weight(name, leg)) {
		return spec
	}
	spec.RunsOn = b.requirements(j, leg)
	spec.Env = b.settings(slices.Concat(b.file.env, j.env), leg)
	spec.Environment = b.text(j.environment, leg, "environment", Name)
	spec.Concurrency = b.concurrency(j.concurrency, leg)
	if img := j.image; img != nil {
		spec.Image = &ci.Image{Ref: b.text(img.ref, leg, "image", imageRef), Dockerfile: img.dockerfile, Context: img.context, Target: img.target}
	}
	for _, s := range j.services {
		spec.Services = append(spec.Services, ci.Service{
			Name: s.name, Image: b.text(s.image, leg, "image", imageRef), Env: b.settings(s.env, leg), Ports: s.ports,
		})
	}
	for _, s := range j.steps {
		if !b.grow(4+len(s.secrets), len(s.run)+len(s.condition)+len(s.directory)+textOf(s.secrets)) {
			return spec
		}
		spec.Steps = append(spec.Steps, ci.StepSpec{
			Name: b.text(s.name, leg, "step name", displayName), Run: s.run, Shell: s.shell, Env: b.settings(s.env, leg),
			WorkingDirectory: s.directory, Timeout: s.timeout, If: s.condition,
			ContinueOnError: s.continueOnError, Secrets: s.secrets, Line: s.at.line,
		})
	}
	published := map[string]bool{}
	for _, a := range j.publish {
		out := ci.ArtifactPublish{Name: b.text(a.name, leg, "artifact name", ArtifactName), Paths: a.paths, Optional: a.optional, Retention: a.retention}
		if !b.unknown(a.name) { // else it may be any other name
			if published[out.Name] {
				b.add(a.name.at, "job %s publishes %s twice: rename one", quote(name), quote(out.Name))
			}
			published[out.Name] = true
		}
		spec.Publish = append(spec.Publish, out)
	}
	for _, r := range j.restore {
		spec.Restore = append(spec.Restore, ci.ArtifactRestore{
			FromJob: b.text(r.from, leg, "from_job", anyText), Name: b.text(r.name, leg, "artifact name", ArtifactName), Path: r.path,
		})
	}
	return spec
}

// weight returns how many values, and of how many bytes, each leg of the job
// repeats as they stand in the file.
func (j *job) weight(name string, leg []ci.KeyValue) (values, bytes int) {
	lists := [][]string{j.needs, j.outputs, j.secrets, j.identity, j.inputs, {name, j.condition}}
	for _, c := range j.cache {
		lists = append(lists, c.Inputs, c.Paths, []string{c.Kind, c.Version})
	}
	for _, r := range j.reports {
		lists = append(lists, []string{r.Kind, r.Path})
	}
	for _, a := range j.publish {
		lists = append(lists, a.paths)
	}
	for _, r := range j.restore {
		lists = append(lists, []string{r.path})
	}
	for _, kv := range leg {
		lists = append(lists, []string{kv.Key, kv.Value})
	}
	for _, l := range lists {
		values += len(l)
		bytes += textOf(l)
	}
	for _, s := range j.services {
		values += len(s.ports)
	}
	return values + 10, bytes
}

func textOf(words []string) int {
	n := 0
	for _, w := range words {
		n += len(w)
	}
	return n
}

func (b *builder) requirements(j *job, leg []ci.KeyValue) ci.Requirements {
	r := ci.Requirements{
		OS:        b.text(j.runsOn.os, leg, "os", osWord),
		Arch:      b.text(j.runsOn.arch, leg, "arch", archWord),
		Size:      b.text(j.runsOn.size, leg, "size", Name),
		Isolation: ci.Isolation(b.text(j.runsOn.isolation, leg, "isolation", isolationWord)),
	}
	for _, l := range j.runsOn.labels {
		r.Labels = append(r.Labels, b.text(l, leg, "label", Label))
	}
	slices.Sort(r.Labels)
	r.Labels = slices.Compact(r.Labels)
	need := func(on bool, feature string) {
		if on {
			r.Features = append(r.Features, feature)
		}
	}
	need(!j.environment.isZero(), ci.FeatureEnvironment)
	need(len(j.identity) > 0, ci.FeatureIdentity)
	need(j.image != nil, ci.FeatureImage)
	need(len(j.secrets) > 0, ci.FeatureSecrets)
	need(len(j.services) > 0, ci.FeatureServices)
	slices.Sort(r.Features)
	return r
}
