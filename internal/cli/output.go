package cli

import (
	"encoding/json"
	"slices"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
)

// Forms of output.
const (
	outputText  = "text"
	outputJSON  = "json"
	outputLines = "jsonl"
)

// output is the --output flag.
type output struct{ form string }

// bind adds --output to a command. lines adds the form of one document a line,
// for commands that report while they wait.
func (o *output) bind(cmd *cobra.Command, lines bool) {
	o.form = outputText
	help, allowed := "text or json", []string{outputText, outputJSON}
	if lines {
		help, allowed = "text, json or jsonl (one document a line, while it happens)", append(allowed, outputLines)
	}
	cmd.Flags().VarP(&choice{&o.form, allowed}, "output", "o", help)
	registerChoices(cmd, "output", allowed)
}

func (o *output) json() bool { return o.form == outputJSON }

// choice is a flag with a fixed set of values.
type choice struct {
	value   *string
	allowed []string
}

// String returns the value.
func (c *choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

// Type names the value in the help.
func (c *choice) Type() string { return "form" }

// Set takes one of the allowed values.
func (c *choice) Set(v string) error {
	if slices.Contains(c.allowed, v) {
		*c.value = v
		return nil
	}
	return ci.Errorf(ci.ErrInvalid, "%q is none of %v", v, c.allowed)
}

func registerChoices(cmd *cobra.Command, flag string, values []string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic("cli: " + err.Error()) // the flag was added one line before
	}
}

// printJSON writes one indented document.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// printJSONLine writes one document on one line.
func (a *app) printJSONLine(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
