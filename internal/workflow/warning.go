package workflow

import (
	"cmp"
	"fmt"
	"slices"

	"forgeci/internal/ci"
)

// Warning names a place of a valid file that asks for what nothing does yet.
type Warning struct {
	// File, Line and Column (both from 1) are where the key stands.
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
	// Key is what has no effect: a key of the workflow or of a job.
	Key string `json:"key"`
	// Jobs are the names in the file of the jobs that have the key from this place;
	// none when it is the workflow's.
	Jobs []string `json:"jobs,omitempty"`
	// Detail says that it has no effect, and what does not happen.
	Detail string `json:"detail"`
}

// String renders file:line:column: warning: detail.
func (w Warning) String() string {
	return fmt.Sprintf("%s:%d:%d: warning: %s", w.File, w.Line, w.Column, w.Detail)
}

// Starts reports whether it is about what starts runs, and not about a run.
func (w Warning) Starts() bool { return w.Key == tOn }

// Touches reports whether it is about the workflow or a job of the plan.
func (w Warning) Touches(plan ci.Plan) bool {
	return len(w.Jobs) == 0 || slices.ContainsFunc(plan.Jobs, func(j ci.JobSpec) bool { return slices.Contains(w.Jobs, j.Key) })
}

// withoutEffect returns the keys that are checked and that nothing acts on yet:
// by table and key, what does not happen. The schema and the warnings are made of
// it, and a test holds docs/workflow.md to it.
func withoutEffect() map[string]map[string]string {
	const started = "no event starts a run, only a person or a program does"
	return map[string]map[string]string{
		tWorkflow: {"concurrency": "runs of a group are not limited"},
		tOn:       {"push": started, "pull_request": started, "schedule": started},
		tJob: {
			"concurrency": "jobs of a group are not limited",
			"cache":       "nothing is kept between runs",
			"reports":     "no report is read",
			"inputs":      "the job is never skipped, and its workspace has all files",
		},
	}
}

// warn records that a key without effect stands at a place. Of on there is one
// warning, at its first event. A place that aliases bring into several jobs is
// one place.
func (p *parser) warn(table, key string, at pos) {
	missing := tables()[table].idle[key]
	if missing == "" {
		return
	}
	if table == tOn {
		if key = tOn; slices.ContainsFunc(p.warnings, Warning.Starts) {
			return
		}
	}
	place := warningPlace{at, key}
	i, known := p.warned[place]
	if !known {
		i = len(p.warnings)
		p.warned[place] = i
		p.warnings = append(p.warnings, Warning{
			File: p.problems.file, Line: at.line, Column: at.col, Key: key, Detail: fmt.Sprintf("`%s` has no effect yet: %s", key, missing),
		})
	}
	if w := &p.warnings[i]; table == tJob && !slices.Contains(w.Jobs, p.current.key) {
		w.Jobs = append(w.Jobs, p.current.key)
	}
}

type warningPlace struct {
	at  pos
	key string
}

// sortedWarnings returns the warnings in the order of the file.
func (p *parser) sortedWarnings() []Warning {
	slices.SortStableFunc(p.warnings, func(a, b Warning) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return p.warnings
}
