package ci_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"forgeci/internal/ci"
)

var update = flag.Bool("update", false, "write docs/states.md")

// The chart in the docs is the table in the code.
func TestStateChart(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString("# States\n\nGenerated from the transition tables of `internal/ci`, which the store enforces; do not edit.\n")
	for _, c := range []struct {
		title string
		table []ci.Transition
	}{{"Job", ci.JobTransitions()}, {"Run", ci.RunTransitions()}} {
		fmt.Fprintf(&b, "\n## %s\n\n```mermaid\nstateDiagram-v2\n    [*] --> waiting\n", c.title)
		for _, s := range c.table {
			fmt.Fprintf(&b, "    %s --> %s: %s\n", s.From, s.To, strings.ReplaceAll(s.By, ":", ","))
		}
		b.WriteString("    finished --> [*]\n```\n\n| from | to | by |\n|---|---|---|\n")
		for _, s := range c.table {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", s.From, s.To, s.By)
		}
	}
	b.WriteString(`
A finished job or run has a conclusion (success, failed, timed_out, cancelled,
aborted, skipped, cached) and a reason; in every other state the conclusion is
empty. Both are checked by the database.
`)
	const path = "../../docs/states.md"
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil || string(have) != b.String() {
		t.Error("docs/states.md is stale: run `go test ./internal/ci -run StateChart -update`")
	}
}

func TestNothingLeavesFinished(t *testing.T) {
	t.Parallel()
	for _, table := range [][]ci.Transition{ci.JobTransitions(), ci.RunTransitions()} {
		for _, s := range table {
			if s.From == ci.StateFinished {
				t.Errorf("%v", s)
			}
		}
	}
	if ci.Legal(ci.JobTransitions(), ci.StateFinished, ci.StateReady) || !ci.Legal(ci.JobTransitions(), ci.StateReady, ci.StateReady) {
		t.Error("finished is left, or staying refused")
	}
}
