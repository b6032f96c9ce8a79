package workflow

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
)

// A key without effect is told with its place, once for a place that several jobs
// share, and with the jobs that it concerns.
func TestWhatHasNoEffectYetIsTold(t *testing.T) {
	t.Parallel()
	f, err := Parse("w.yaml", []byte(`version: 1
on:
  manual: {inputs: {x: {}}}
  schedule: [{cron: "0 3 * * *"}]
  push:
concurrency: {group: deploy}
jobs:
  one: &one
    steps: [make]
    inputs: ["src/**"]
    cache: {kind: directory, paths: [out], inputs: [go.sum]}
  two:
    <<: *one
    cache: {kind: directory, paths: [two]}
  three:
    matrix: {n: [1, 2]}
    concurrency: three
    reports: {kind: junit, path: out.xml}
    steps: [make]
`))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range f.Warnings {
		got = append(got, fmt.Sprintf("%s %s %v", w, w.Key, w.Jobs))
	}
	if diff := cmp.Diff([]string{
		"w.yaml:4:3: warning: `on` has no effect yet: no event starts a run, only a person or a program does on []",
		"w.yaml:6:1: warning: `concurrency` has no effect yet: runs of a group are not limited concurrency []",
		"w.yaml:10:5: warning: `inputs` has no effect yet: the job is never skipped, and its workspace has all files inputs [one two]",
		"w.yaml:11:5: warning: `cache` has no effect yet: nothing is kept between runs cache [one]",
		"w.yaml:14:5: warning: `cache` has no effect yet: nothing is kept between runs cache [two]",
		"w.yaml:17:5: warning: `concurrency` has no effect yet: jobs of a group are not limited concurrency [three]",
		"w.yaml:18:5: warning: `reports` has no effect yet: no report is read reports [three]",
	}, got); diff != "" {
		t.Errorf("want -, got +:\n%s", diff)
	}
	if !f.Warnings[0].Starts() || f.Warnings[1].Starts() {
		t.Error("only what starts runs is about that")
	}
	plan, err := f.Compile(CompileOptions{Jobs: []string{"two"}})
	if err != nil {
		t.Fatal(err)
	}
	var touched []string
	for _, w := range f.Warnings {
		if w.Touches(plan) {
			touched = append(touched, fmt.Sprint(w.Line))
		}
	}
	if have := strings.Join(touched, " "); have != "4 6 10 14" {
		t.Errorf("a plan of job two is touched by lines %s", have)
	}
	if f.Warnings[2].Touches(ci.Plan{}) {
		t.Error("a job's warning touches a plan without jobs")
	}
}

func TestAFileWithoutSuchKeysHasNoWarnings(t *testing.T) {
	t.Parallel()
	for _, on := range []string{"", "on: manual\n", "on: {manual: {inputs: {x: {}}}}\n"} {
		f, err := Parse("w.yaml", []byte("version: 1\n"+on+"jobs: {a: {steps: [make], outputs: [x]}}\n"))
		if err != nil || len(f.Warnings) > 0 {
			t.Errorf("%q: %v %v", on, f.Warnings, err)
		}
	}
}

// The schema and the reference say of every key without effect that it has none:
// the reference in its list, and in the section that explains the key.
func TestWhatHasNoEffectYetIsMarkedInSchemaAndReference(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../docs/workflow.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(data), "\n## "+idleHeading+"\n")
	list, _, _ = strings.Cut(list, "\n## ")
	defs := schemaRoot(t)["$defs"].(map[string]any)
	marks := 0
	for table, keys := range withoutEffect() {
		for key, missing := range keys {
			if !tables()[table].has(key) {
				t.Errorf("%s has no key %s", table, key)
			}
			if !strings.Contains(list, "`"+key+"`") || !strings.Contains(list, "| "+missing+" |") {
				t.Errorf("the list in docs/workflow.md lacks `%s` | %s |", key, missing)
			}
			doc := defs[table].(map[string]any)["properties"].(map[string]any)[key].(map[string]any)["description"].(string)
			if !strings.HasSuffix(doc, "Checked, without effect yet: "+missing+".") {
				t.Errorf("the schema says of %s in %s only %q", key, table, doc)
			}
		}
	}
	for section := range strings.SplitSeq(string(data), "\n## ") {
		if strings.Contains(section, "["+idleHeading+"](#checked-without-effect-yet):") {
			marks++
		}
	}
	// Cache with a job's inputs, reports, events, concurrency.
	if marks != 4 {
		t.Errorf("%d sections of docs/workflow.md are marked, want 4", marks)
	}
}

const idleHeading = "Checked, without effect yet"
