package workflow

import (
	"crypto/sha256"
	"encoding/hex"
	"path"
	"slices"
	"strings"

	"forgeci/internal/ci"
)

// File is a workflow that Parse found to be valid. It is immutable and safe for
// concurrent use.
type File struct {
	// Path is the path given to Parse.
	Path string
	// Name is the name key, or the file's base name without extension.
	Name string
	// Digest is the SHA-256 of the file's bytes, lower-case hex.
	Digest string
	// On says which events start the workflow.
	On On
	// Keys holds the jobs' names in the order of the file.
	Keys []string
	// Warnings are the places that ask for what nothing does yet, in the order of
	// the file.
	Warnings []Warning

	priority    int
	env         []setting
	concurrency *concurrency
	jobs        []*job
}

// setting is one variable.
type setting struct {
	key   string
	value template
}

type concurrency struct {
	group  template
	cancel bool
}

// job is one job of the file before its matrix is expanded.
type job struct {
	key          string
	at           pos
	needs        []string
	needsAt      []pos // of each need; where the job begins when it needs the one before it
	hasNeeds     bool  // needs is written
	condition    string
	axes         []string // keys of all legs, in order
	legs         [][]ci.KeyValue
	runsOn       requirements
	priority     int
	image        *image
	services     []service
	env          []setting
	shell        string
	directory    string
	steps        []step
	timeout      ci.Duration
	retry        *ci.RetryPolicy
	allowFailure bool
	outputs      []string
	cache        []ci.Cache
	publish      []publish
	restore      []restore
	reports      []ci.Report
	secrets      []string
	identity     []string
	environment  template
	inputs       []string
	concurrency  *concurrency
}

type requirements struct {
	os, arch, size, isolation template
	labels                    []template
}

type image struct {
	at                          pos
	ref                         template
	dockerfile, context, target string
}

type service struct {
	name  string
	image template
	env   []setting
	ports []int
}

type step struct {
	at              pos
	name            template
	run             string
	shell           string
	env             []setting
	directory       string
	timeout         ci.Duration
	condition       string
	continueOnError bool
	secrets         []string
	hasSecrets      bool
}

type publish struct {
	name      template
	paths     []string
	optional  bool
	retention ci.Duration
}

type restore struct {
	from, name template
	path       string
}

// Parse reads and validates a workflow file. path is only named in messages and
// in the plan. The error is a *ci.Error of kind ErrInvalid whose Fields hold
// every problem found (at most Limits.Problems) in the order of the file, each
// with its line and column, the offending text and the fix.
func Parse(path string, data []byte) (*File, error) {
	limits := DefaultLimits()
	p := &parser{problems: newProblems(path, limits.Problems), limits: limits, data: data, warned: map[warningPlace]int{}, inherited: map[string]bool{}}
	root := load(data, limits, p.problems)
	if root == nil {
		return nil, p.err()
	}
	f := p.file(path, data, root)
	f.build(p.problems, nil, true)
	if err := p.err(); err != nil {
		return nil, err
	}
	return f, nil
}

func (p *parser) file(name string, data []byte, root *node) *File {
	sum := sha256.Sum256(data)
	base := path.Base(name)
	f := &File{Path: name, Digest: hex.EncodeToString(sum[:]), Name: strings.TrimSuffix(base, path.Ext(base))}
	if f.Name == "" {
		f.Name = strings.TrimPrefix(base, ".")
	}
	if base == ".forgeci.yaml" {
		f.Name = "forgeci"
	}
	if p.fields(root, tWorkflow) == nil {
		return f
	}
	if v := root.get("version"); v != nil && (v.kind != scalar || v.text != "1") {
		p.add(v.at, "version must be 1, not %s: write version: 1", describe(v))
	}
	if v := root.get("name"); v != nil {
		f.Name = p.checked(v, "name", displayName)
	}
	f.On = p.on(root.get("on"))
	if f.On.Manual != nil {
		p.inputs = f.On.Manual.Inputs
	}
	if v := root.get("priority"); v != nil {
		f.priority = p.integer(v, "priority", -maxPriority, maxPriority)
	}
	if v := root.get("env"); v != nil {
		f.env = p.env(v, nil)
		p.fileEnv = f.env
	}
	if v := root.get("concurrency"); v != nil {
		f.concurrency = p.concurrency(v, nil)
	}
	var defaults *node
	if v := root.get("defaults"); v != nil && !v.isNull() {
		defaults = p.fields(v, tDefaults)
	}
	if v := root.get("jobs"); v != nil {
		f.jobs = p.jobs(v, defaults)
		p.idleDefaults(defaults, f.jobs)
		p.graph(f.jobs)
	}
	for _, j := range f.jobs {
		f.Keys = append(f.Keys, j.key)
	}
	f.Warnings = p.sortedWarnings()
	return f
}

const maxDisplayName = 200 // bytes

// displayName accepts a name that people read.
func displayName(s string) error {
	switch {
	case strings.TrimSpace(s) == "":
		return errorText("it is empty: write a name")
	case len(s) > maxDisplayName:
		return errorText("it is longer than " + itoa(maxDisplayName) + " bytes: shorten it")
	case strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return errorText("it holds a line break or control character: remove it")
	}
	return nil
}

// jobs reads the list or the mapping of jobs. A list is an ordered pipeline: a
// job without needs needs the one before it (SPEC decision 2).
func (p *parser) jobs(n *node, defaults *node) []*job {
	var out []*job
	seen := map[string]*job{}
	add := func(key string, at pos, body *node) {
		j := p.job(key, at, body, defaults)
		if first := seen[key]; first != nil {
			p.add(at, "two jobs are called %s (lines %d and %d): rename one", quote(key), first.at.line, at.line)
			return
		}
		seen[key] = j
		out = append(out, j)
	}
	switch {
	case n.kind == mapping && len(n.entries) > 0:
		for _, e := range n.entries {
			if err := Name(e.key); err != nil {
				p.add(e.at, "job name %s: %v", quote(e.key), err)
				continue
			}
			if name := e.value.get("name"); name != nil {
				p.add(name.at, "name is for a list of jobs: in a mapping the key %s is the job's name, remove name", quote(e.key))
			}
			add(e.key, e.at, e.value)
		}
	case n.kind == sequence && len(n.items) > 0:
		for _, item := range n.items {
			key := p.listedName(item)
			if key == "" {
				continue
			}
			before := len(out)
			add(key, item.at, item)
			if before > 0 && len(out) > before && !out[before].hasNeeds {
				out[before].needs, out[before].needsAt = []string{out[before-1].key}, []pos{item.at}
			}
		}
	default:
		p.add(n.at, "jobs is a list or a mapping of jobs, not %s: write jobs: {build: {steps: [make]}}", describe(n))
	}
	if len(out) > p.limits.Jobs {
		p.add(n.at, "%d jobs: the limit is %d; split the workflow into several files", len(out), p.limits.Jobs)
		out = out[:p.limits.Jobs]
	}
	return out
}

// listedName returns the name of a job in a list, or "" after reporting why
// there is none.
func (p *parser) listedName(item *node) string {
	if item.kind != mapping {
		p.add(item.at, "a job is a mapping of keys, not %s: write - name: build", describe(item))
		return ""
	}
	v := item.get("name")
	if v == nil {
		if len(item.entries) == 1 && item.entries[0].value.kind == mapping {
			p.add(item.at, "a job in a list needs name: write - name: %s and its keys below, or write jobs as a mapping", item.entries[0].key)
			return ""
		}
		p.fields(item, tJob)
		p.add(item.at, "a job in a list needs name: write - name: build")
		return ""
	}
	return p.checked(v, "job name", Name)
}

// inherit returns the job's own value or the default.
func (p *parser) inherit(own, defaults *node, key string) *node {
	if v := own.get(key); v != nil || defaults == nil {
		return v
	}
	p.inherited[key] = true
	return defaults.get(key)
}

// keysOf returns the keys of all legs in the order of their first appearance.
func keysOf(legs [][]ci.KeyValue) []string {
	var keys []string
	for _, leg := range legs {
		for _, kv := range leg {
			if !slices.Contains(keys, kv.Key) {
				keys = append(keys, kv.Key)
			}
		}
	}
	return keys
}
