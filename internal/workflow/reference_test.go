package workflow

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// referenceExamples returns the YAML blocks of docs/workflow.md by their place.
// A block that does not begin with "version:" is a fragment: it is put into a
// job, or at the top of a file when it holds a key of the top.
func referenceExamples(t *testing.T) map[string]string {
	t.Helper()
	const path = "../../docs/workflow.md"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	var block strings.Builder
	open, start := false, 0
	for i, line := range strings.Split(string(data), "\n") {
		switch {
		case !open && strings.HasPrefix(line, "```yaml"):
			open, start = true, i+1
			block.Reset()
		case open && line == "```":
			open = false
			out[fmt.Sprintf("%s:%d", path, start)] = complete(block.String())
		case open:
			block.WriteString(line + "\n")
		}
	}
	return out
}

// complete makes a file of a fragment.
func complete(fragment string) string {
	if strings.HasPrefix(fragment, "version:") {
		return fragment
	}
	key, _, _ := strings.Cut(fragment, ":")
	if key != "env" && key != "concurrency" && tables()[tWorkflow].has(key) {
		text := "version: 1\n" + fragment
		if key != "jobs" {
			text += "jobs: {example: {steps: [make]}}\n"
		}
		return text
	}
	var b strings.Builder
	b.WriteString("version: 1\njobs:\n  build: {steps: [make], outputs: [version], artifacts: {publish: {name: app, path: out}}}\n  example:\n    needs: [build]\n")
	for line := range strings.Lines(fragment) {
		b.WriteString("    " + line)
	}
	text := b.String()
	if strings.Contains(fragment, "needs:") {
		text = strings.Replace(text, "    needs: [build]\n", "", 1)
	}
	if !strings.Contains("\n"+fragment, "\nsteps:") {
		text += "    steps: [make]\n"
	}
	return text
}

func TestEveryExampleOfTheReferenceIsValid(t *testing.T) {
	t.Parallel()
	examples := referenceExamples(t)
	if len(examples) < 20 {
		t.Fatalf("%d examples: the reference is not complete", len(examples))
	}
	for place, text := range examples {
		f, err := Parse(".forgeci.yaml", []byte(text))
		if err != nil {
			t.Errorf("%s: %v\n%s", place, err, text)
			continue
		}
		if _, err := f.Compile(CompileOptions{Event: true}); err != nil {
			t.Errorf("%s: %v", place, err)
		}
	}
}

func TestTheReferenceNamesEveryKeyAndLimit(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../docs/workflow.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, table := range tables() {
		for _, k := range table.keys {
			if !strings.Contains(string(data), "`"+k.name+"`") {
				t.Errorf("docs/workflow.md does not explain `%s` of %s", k.name, name)
			}
		}
	}
	l := DefaultLimits()
	for what, limit := range map[string]int{
		"depth": l.Depth, "values": l.Nodes, "separators": l.Separators, "jobs": l.Jobs, "steps": l.Steps, "legs": l.Legs, "matrix keys": l.MatrixKeys,
		"problems": l.Problems, "condition": l.Expression, "pattern": l.Pattern,
	} {
		if text := thousands(limit); !strings.Contains(string(data), text) {
			t.Errorf("docs/workflow.md does not name the limit of %s, %s", what, text)
		}
	}
}

// thousands writes 10000 as 10,000.
func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
