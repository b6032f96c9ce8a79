package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/workflow"
)

// planConfig are the settings of forgeci plan.
type planConfig struct {
	output
	choosing
	happening
	jobs, inputs []string
}

func (a *app) planCommand() *cobra.Command {
	var cfg planConfig
	cmd := &cobra.Command{
		Use:   "plan [DIR]",
		Short: "Show the jobs that a workflow expands to",
		Long: `Show what would run: jobs with matrices expanded, in the order of the file, with
what each of them waits for and needs of a runner. Needs no server.

With --event it shows which of the workflow files an event would start, and why;
no event starts a run yet.`,
		Example: "  forgeci plan --event push --branch main --path src/main.go\n  forgeci plan --file .forgeci/release.yaml --input version=1.2\n  forgeci plan --output json",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.showPlan(&cfg, strings.Join(args, ""))
		},
	}
	cfg.output.bind(cmd, false)
	f := cmd.Flags()
	f.StringVar(&cfg.file, "file", "", "workflow file; the default is the only one of .forgeci.yaml and .forgeci/*.yaml")
	f.BoolVar(&cfg.all, "all", false, "show every workflow file")
	f.StringArrayVar(&cfg.jobs, "job", nil, "only this job and what it needs; may be repeated")
	f.StringArrayVar(&cfg.inputs, "input", nil, "an input of the workflow as name=value; may be repeated")
	f.Var(&choice{&cfg.event, events()}, "event", "show what this event would start: push, pull_request, schedule or manual")
	f.StringVar(&cfg.branch, "branch", "", "with --event: the branch pushed to, or the one to merge into")
	f.StringVar(&cfg.tag, "tag", "", "with --event push: the tag that was pushed")
	f.StringArrayVar(&cfg.paths, "path", nil, "with --event: a changed path; may be repeated")
	registerChoices(cmd, "event", events())
	return cmd
}

// planOutput is what forgeci plan --output json prints: the plan, and what of it
// has no effect yet.
type planOutput struct {
	ci.Plan
	Warnings []workflow.Warning `json:"warnings,omitempty"`
}

// plan makes the plan of one workflow file, with the warnings that are about it.
func (co checkout) plan(file string, inputs map[string]string, jobs []string) (planOutput, error) {
	f, err := co.parse(file)
	if err != nil {
		return planOutput{}, err
	}
	return planOf(f, workflow.CompileOptions{Inputs: inputs, Jobs: jobs})
}

func planOf(f *workflow.File, opts workflow.CompileOptions) (planOutput, error) {
	plan, err := f.Compile(opts)
	out := planOutput{Plan: plan}
	for _, w := range f.Warnings {
		if w.Touches(plan) {
			out.Warnings = append(out.Warnings, w)
		}
	}
	return out, err
}

func (a *app) showPlan(cfg *planConfig, dir string) error {
	inputs, err := (&submission{inputs: cfg.inputs}).values()
	if err != nil {
		return err
	}
	if err := cfg.check(); err != nil {
		return err
	}
	if cfg.event != "" {
		return a.planEvent(cfg, dir, inputs)
	}
	co, err := cfg.find(dir)
	if err != nil {
		return err
	}
	plans := make([]planOutput, len(co.files))
	for i, file := range co.files {
		if plans[i], err = co.plan(file, inputs, cfg.jobs); err != nil {
			return err
		}
	}
	switch {
	case cfg.json() && cfg.all:
		return a.printJSON(plans)
	case cfg.json():
		return a.printJSON(plans[0])
	}
	for i, p := range plans {
		if i > 0 {
			a.out.line("")
		}
		a.printPlan(p.Plan)
	}
	for _, p := range plans {
		a.warnBriefly(p.Warnings)
	}
	return nil
}

func (a *app) printPlan(p ci.Plan) {
	s := a.out
	s.line(fmt.Sprintf("%s (%s), %s", s.paint(bold, clean(p.Workflow)), clean(p.Path), count(len(p.Jobs), "job")))
	t := table{head: []string{"JOB", "NEEDS", "STEPS", "RUNS ON", "TIMEOUT", "ARTIFACTS", "IF"}}
	for _, j := range p.Jobs {
		var arts []string
		for _, r := range j.Restore {
			arts = append(arts, "<"+r.Name)
		}
		for _, out := range j.Publish {
			arts = append(arts, ">"+out.Name)
		}
		t.add(text(j.Name), text(strings.Join(j.Needs, ", ")), textf("%d", len(j.Steps)), text(runsOn(j.RunsOn)),
			text(span(j.Timeout.Std())), text(strings.Join(arts, " ")), text(j.If))
	}
	t.write(s)
}

// runsOn says what a job needs of a runner.
func runsOn(r ci.Requirements) string {
	var parts []string
	for _, p := range []string{r.OS, r.Arch, r.Size, string(r.Isolation)} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	parts = append(parts, r.Labels...)
	parts = append(parts, r.Features...)
	if len(parts) == 0 {
		return "any"
	}
	return strings.Join(parts, " ")
}

// count says how many there are of a thing.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
