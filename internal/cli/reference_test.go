package cli

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write docs/cli.md")

// docs/cli.md is made from the commands. `go test ./internal/cli -run Reference
// -update` writes it.
func TestReferenceIsFresh(t *testing.T) {
	t.Parallel()
	a, _, _ := testApp(nil)
	var b bytes.Buffer
	b.WriteString(referenceHead)
	root := a.root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	document(&b, root)
	name := filepath.Join("..", "..", "docs", "cli.md")
	if *update {
		if err := os.WriteFile(name, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Error("docs/cli.md is stale: run `go test ./internal/cli -run Reference -update`")
	}
}

const referenceHead = `# The command line

<!-- Made from the commands by internal/cli/reference_test.go; edit those. -->

Standard output has the answer and nothing else; progress, notes and errors go
to standard error. Colours are for terminals only, and NO_COLOR switches them
off. A setting comes from its flag, else from its environment variable, else
from its default.

| exit code | meaning |
|---|---|
| 0 | success; a skipped run counts as one |
| 1 | the run failed or timed out |
| 2 | wrong usage, or an invalid workflow |
| 3 | the run was cancelled |
| 4 | not found or not allowed |
| 5 | infrastructure: no server, a lost runner, damaged bytes, a defect |
| 124 | ` + "`--timeout`" + ` passed; a run on a server goes on, ` + "`forgeci run`" + ` cancels its own |
| 130, 143 | interrupted, terminated; a run on a server goes on |

Commands that wait exit with the result of what they wait for; of several runs
the highest code. When the wait ends before that, ` + "`--output json`" + ` prints the runs
as they were read last, and the code says why it ended. Other commands exit with
0 when they have answered, whatever the state of what they show.
`

// document writes one command and those below it.
func document(b *bytes.Buffer, cmd *cobra.Command) {
	if cmd.Hidden || cmd.Name() == "help" {
		return
	}
	if cmd.Parent() != nil {
		fmt.Fprintf(b, "\n## %s\n\n", cmd.CommandPath())
		text := cmd.Long
		if text == "" {
			text = cmd.Short + "."
		}
		if strings.HasPrefix(cmd.CommandPath(), "forgeci completion") {
			text = cmd.Short + "."
		}
		fmt.Fprintf(b, "%s\n\n```\n%s\n```\n", strings.TrimSpace(text), cmd.UseLine())
		if cmd.Example != "" {
			fmt.Fprintf(b, "\nExamples:\n\n```\n%s\n```\n", strings.TrimRight(unindent(cmd.Example), "\n"))
		}
		flags := false
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden || f.Name == "help" {
				return
			}
			if !flags {
				b.WriteString("\n| flag | default | |\n|---|---|---|\n")
				flags = true
			}
			name := "--" + f.Name
			if f.Shorthand != "" {
				name = "-" + f.Shorthand + ", " + name
			}
			kind, usage := pflag.UnquoteUsage(f)
			if kind != "" {
				name += " " + kind
			}
			def := f.DefValue
			if def == "[]" || def == "false" || def == "0s" || def == "0" {
				def = ""
			}
			if def != "" {
				def = "`" + def + "`"
			}
			fmt.Fprintf(b, "| `%s` | %s | %s |\n", name, def, strings.ReplaceAll(usage, "|", `\|`))
		})
	}
	for _, sub := range cmd.Commands() {
		document(b, sub)
	}
}

func unindent(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimPrefix(l, "  ")
	}
	return strings.Join(lines, "\n")
}

// Every command says what it does, has an example or needs none, and no two
// flags of one command stand for the same variable.
func TestEveryCommandIsDescribed(t *testing.T) {
	t.Parallel()
	a, _, _ := testApp(nil)
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Short == "" {
			t.Errorf("%s has no description", cmd.CommandPath())
		}
		if !cmd.HasParent() || cmd.Parent().Name() == "forgeci" {
			if cmd.HasParent() && cmd.GroupID == "" {
				t.Errorf("%s stands in no group of the help", cmd.CommandPath())
			}
		}
		seen := map[string]string{}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s is not described", cmd.CommandPath(), f.Name)
			}
			for _, name := range f.Annotations[envAnnotation] {
				if seen[name] != "" {
					t.Errorf("%s: --%s and --%s stand for %s", cmd.CommandPath(), f.Name, seen[name], name)
				}
				seen[name] = f.Name
			}
		})
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(a.root())
}
