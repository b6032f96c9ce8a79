package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build events
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// counts of tests. A test with subtests counts as its subtests, unless it
// failed by itself.
type counts struct{ passed, failed, skipped int }

// testResult is one test or subtest.
type testResult struct {
	outcome string // pass, fail, skip; empty when it never ended
	output  strings.Builder
}

// packageResult is what is known of one package.
type packageResult struct {
	path        string
	outcome     string
	elapsed     float64
	failedBuild string
	tests       map[string]*testResult
	order       []string
	output      strings.Builder // of the package outside any test
	build       *strings.Builder
}

// results collects the events of one run.
type results struct {
	packages map[string]*packageResult
	builds   map[string]*strings.Builder // compiler output by import path
	stray    strings.Builder             // lines that are no events
	ended    func(*packageResult)
}

// newResults returns an empty collection that calls ended for each package that
// has come to its end.
func newResults(ended func(*packageResult)) *results {
	return &results{packages: map[string]*packageResult{}, builds: map[string]*strings.Builder{}, ended: ended}
}

// read takes events until the end of the stream.
func (r *results) read(stream io.Reader) error {
	lines := bufio.NewReader(stream)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		switch {
		case len(line) == 0:
		case json.Unmarshal(line, &e) != nil:
			r.stray.Write(line)
		default:
			r.add(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *results) add(e event) {
	if e.ImportPath != "" {
		if r.builds[e.ImportPath] == nil {
			r.builds[e.ImportPath] = &strings.Builder{}
		}
		r.builds[e.ImportPath].WriteString(e.Output)
		return
	}
	p := r.packages[e.Package]
	if p == nil {
		p = &packageResult{path: e.Package, tests: map[string]*testResult{}}
		r.packages[e.Package] = p
	}
	if e.Test == "" {
		switch e.Action {
		case "output":
			p.output.WriteString(e.Output)
		case "pass", "fail", "skip":
			p.outcome, p.elapsed, p.failedBuild = e.Action, e.Elapsed, e.FailedBuild
			p.build = r.builds[e.FailedBuild]
			r.ended(p)
		}
		return
	}
	test := p.tests[e.Test]
	if test == nil {
		test = &testResult{}
		p.tests[e.Test] = test
		p.order = append(p.order, e.Test)
	}
	switch e.Action {
	case "output":
		test.output.WriteString(e.Output)
	case "pass", "fail", "skip":
		test.outcome = e.Action
	}
}

// finish ends packages whose end never came, because the run was cut.
func (r *results) finish() {
	for _, p := range r.sorted() {
		if p.outcome == "" {
			p.outcome = "fail"
			r.ended(p)
		}
	}
}

// sorted returns the packages by path.
func (r *results) sorted() []*packageResult {
	var all []*packageResult
	for _, p := range r.packages {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *packageResult) int { return strings.Compare(a.path, b.path) })
	return all
}

func (r *results) total() counts {
	var sum counts
	for _, p := range r.packages {
		c := p.counts()
		sum.passed += c.passed
		sum.failed += c.failed
		sum.skipped += c.skipped
	}
	return sum
}

// counts counts the package's tests. A package that failed although none of its
// tests did (it does not build, it panicked, it ran out of time) is one failure.
func (p *packageResult) counts() counts {
	var c counts
	for name, test := range p.tests {
		parent := p.hasChild(name, func(*testResult) bool { return true })
		switch {
		case test.outcome == "pass" && !parent:
			c.passed++
		case test.outcome == "skip":
			c.skipped++
		case test.outcome != "pass" && !p.hasChild(name, func(child *testResult) bool { return child.outcome != "pass" && child.outcome != "skip" }):
			c.failed++
		}
	}
	if p.outcome == "fail" && c.failed == 0 {
		c.failed = 1
	}
	return c
}

func (p *packageResult) hasChild(name string, is func(*testResult) bool) bool {
	for other, test := range p.tests {
		if strings.HasPrefix(other, name+"/") && is(test) {
			return true
		}
	}
	return false
}

// line is the package's line in the list; packages without tests have none.
func (p *packageResult) line() string {
	if len(p.tests) == 0 && p.outcome != "fail" {
		return ""
	}
	mark := "ok    "
	if p.outcome == "fail" {
		mark = "FAILED"
	}
	c := p.counts()
	return fmt.Sprintf("%s %-36s %5d passed %3d failed %3d skipped %7.1f s\n", mark, shortPackage(p.path), c.passed, c.failed, c.skipped, p.elapsed)
}

// failures is the whole output of everything in the package that did not pass.
func (p *packageResult) failures() string {
	var b strings.Builder
	for _, name := range p.order {
		test := p.tests[name]
		if test.outcome == "pass" {
			continue
		}
		what := map[string]string{"fail": "FAILED", "skip": "SKIPPED"}[test.outcome]
		if what == "" {
			what = "NEVER ENDED"
		}
		fmt.Fprintf(&b, "\n=== %s %s %s\n%s", what, shortPackage(p.path), name, test.output.String())
	}
	if p.outcome == "fail" {
		fmt.Fprintf(&b, "\n=== FAILED %s\n", shortPackage(p.path))
		if p.build != nil {
			b.WriteString(p.build.String())
		}
		b.WriteString(p.output.String())
	}
	return b.String()
}
