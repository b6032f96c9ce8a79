package cli

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/workflow"
)

func (a *app) validateCommand() *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "validate [FILE]...",
		Short: "Check workflow files",
		Long: `Check workflow files, all of the checkout's when none is named, and print every
problem as file:line:column with the fix, and a warning for every key that has no
effect yet. Needs no server.`,
		Example: "  forgeci validate\n  forgeci validate .forgeci/*.yaml --output json",
		RunE:    func(_ *cobra.Command, args []string) error { return a.validate(o, args) },
	}
	o.bind(cmd, false)
	return cmd
}

// verdict is what forgeci validate --output json prints for each file.
type verdict struct {
	File     string             `json:"file"`
	Valid    bool               `json:"valid"`
	Errors   []ci.FieldError    `json:"errors,omitempty"`
	Warnings []workflow.Warning `json:"warnings,omitempty"`
}

func (a *app) validate(o output, files []string) error {
	if len(files) == 0 {
		co, err := choosing{all: true}.find("")
		if err != nil {
			return err
		}
		for _, f := range co.files {
			name := filepath.Join(co.root, filepath.FromSlash(f))
			if wd, err := filepath.Abs("."); err == nil {
				if rel, err := filepath.Rel(wd, name); err == nil {
					name = rel
				}
			}
			files = append(files, name)
		}
	}
	verdicts := []verdict{}
	bad := 0
	for _, name := range files {
		v, err := judge(name)
		if err != nil {
			return err
		}
		verdicts = append(verdicts, v)
		if !v.Valid {
			bad++
		}
		if o.json() {
			continue
		}
		for _, e := range v.Errors {
			a.err.line(clean(e.String()))
		}
		a.warn(v.Warnings)
		if v.Valid {
			a.out.line(clean(name) + ": " + a.out.paint(green, "valid"))
		}
	}
	if o.json() {
		if err := a.printJSON(verdicts); err != nil {
			return err
		}
	}
	if bad > 0 {
		return &exitError{exitUsage, fmt.Errorf("%d of %d files are not valid", bad, len(files))}
	}
	return nil
}

// judge parses one file and, when that succeeds, makes its plan with the inputs'
// defaults, so that what only the expansion shows is found too.
func judge(name string) (verdict, error) {
	v := verdict{File: name}
	b, err := readWorkflow(name)
	if err != nil {
		return v, err
	}
	f, err := workflow.Parse(filepath.ToSlash(name), b)
	if err == nil && !needsInputs(f) {
		_, err = f.Compile(workflow.CompileOptions{})
	}
	var e *ci.Error
	switch {
	case err == nil:
		v.Valid, v.Warnings = true, f.Warnings
	case errors.As(err, &e) && len(e.Fields) > 0:
		v.Errors = e.Fields
	default:
		v.Errors = []ci.FieldError{{File: name, Detail: describe(err)}}
	}
	return v, nil
}

// warn writes every warning of a workflow file.
func (a *app) warn(warnings []workflow.Warning) {
	for _, w := range warnings {
		a.err.line(a.err.paint(yellow, clean(w.String())))
	}
}

// warnBriefly writes one line for each key without effect, at its first place.
func (a *app) warnBriefly(warnings []workflow.Warning) {
	first := map[string]int{} // by what is said
	var said []workflow.Warning
	var more []int
	for _, w := range warnings {
		i, known := first[w.Detail]
		if !known {
			i = len(said)
			first[w.Detail] = i
			said, more = append(said, w), append(more, -1)
		}
		more[i]++
	}
	for i, w := range said {
		if more[i] > 0 {
			w.Detail += " (and at " + ci.Count(more[i], "other place") + ")"
		}
		a.err.line(a.err.paint(yellow, clean(w.String())))
	}
}

// needsInputs reports whether a plan cannot be made without values from outside.
func needsInputs(f *workflow.File) bool {
	if f.On.Manual == nil {
		return false
	}
	for _, in := range f.On.Manual.Inputs {
		if in.Required && !in.HasDefault {
			return true
		}
	}
	return false
}

func (a *app) schemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of workflow files, for editors",
		Example: "  forgeci schema >forgeci.schema.json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.out.Write(workflow.Schema())
			return err
		},
	}
}
