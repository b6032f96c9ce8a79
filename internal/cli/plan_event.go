package cli

import (
	"fmt"
	"slices"
	"strings"

	"forgeci/internal/workflow"
)

// happening is an event that somebody asks about.
type happening struct {
	event, branch, tag string
	paths              []string
}

func events() []string { return []string{"push", "pull_request", "schedule", "manual"} }

func (h happening) check() error {
	asked := h.branch != "" || h.tag != "" || len(h.paths) > 0
	switch {
	case h.event == "" && asked:
		return usage("--branch, --tag and --path need --event")
	case h.branch != "" && h.tag != "":
		return usage("--branch and --tag exclude each other")
	case h.event == "push" && h.branch == "" && h.tag == "":
		return usage("--event push needs --branch or --tag")
	case h.event == "pull_request" && (h.branch == "" || h.tag != ""):
		return usage("--event pull_request needs --branch, the branch that it is to be merged into")
	case (h.event == "schedule" || h.event == "manual") && asked:
		return usage("--event %s has neither branch, tag nor paths", h.event)
	default:
		return nil
	}
}

// starts reports whether an event starts a workflow, and why or why not.
func (h happening) starts(on workflow.On) (bool, string) {
	switch h.event {
	case "push":
		switch {
		case on.Implicit:
			return true, "without on:, every push starts it"
		case on.Push == nil:
			return false, "on: has no push"
		}
		return h.pushed(*on.Push)
	case "pull_request":
		switch {
		case on.Implicit:
			return true, "without on:, every pull request starts it"
		case on.PullRequest == nil:
			return false, "on: has no pull_request"
		case !on.PullRequest.Branches.Match(h.branch):
			return false, fmt.Sprintf("branch %s does not pass the filter", h.branch)
		}
		return h.touched(on.PullRequest.Paths)
	case "schedule":
		if len(on.Schedule) == 0 {
			return false, "on: has no schedule"
		}
		times := make([]string, len(on.Schedule))
		for i, s := range on.Schedule {
			times[i] = s.Cron + " " + s.Timezone
		}
		return true, strings.Join(times, ", ")
	default:
		if on.Manual == nil {
			return false, "on: has no manual"
		}
		return true, "on: has manual"
	}
}

func (h happening) pushed(on workflow.Push) (bool, string) {
	mine, other, kind, name := on.Branches, on.Tags, "branch", h.branch
	if h.tag != "" {
		mine, other, kind, name = on.Tags, on.Branches, "tag", h.tag
	}
	switch {
	case mine.IsZero() && !other.IsZero():
		return false, fmt.Sprintf("no filter admits a %s", kind)
	case !mine.Match(name):
		return false, fmt.Sprintf("%s %s does not pass the filter", kind, name)
	}
	return h.touched(on.Paths)
}

func (h happening) touched(paths workflow.Filter) (bool, string) {
	switch {
	case paths.IsZero():
		return true, "its filters pass"
	case len(h.paths) == 0:
		return false, "the changed paths decide: give them with --path"
	case !paths.Match(h.paths...):
		return false, "no changed path passes the filter"
	default:
		return true, "its filters pass"
	}
}

// planned is what forgeci plan --event --output json prints for each file.
type planned struct {
	File   string      `json:"file"`
	Starts bool        `json:"starts"`
	Why    string      `json:"why"`
	Plan   *planOutput `json:"plan,omitempty"`
}

// planEvent shows which workflows an event starts, and their plans.
func (a *app) planEvent(cfg *planConfig, dir string, inputs map[string]string) error {
	co, err := choosing{file: cfg.file, all: cfg.file == ""}.find(dir)
	if err != nil {
		return err
	}
	answers := make([]planned, len(co.files))
	// An event gives no inputs: where they are missing, they are empty.
	opts := workflow.CompileOptions{Inputs: inputs, Event: cfg.event != "manual", Jobs: cfg.jobs}
	for i, file := range co.files {
		f, err := co.parse(file)
		if err != nil {
			return err
		}
		answers[i].File = file
		if answers[i].Starts, answers[i].Why = cfg.starts(f.On); !answers[i].Starts {
			continue
		}
		plan, err := planOf(f, opts)
		if err != nil {
			return err
		}
		answers[i].Plan = &plan
	}
	if cfg.json() {
		return a.printJSON(answers)
	}
	t := table{head: []string{"FILE", "STARTS", "WHY"}}
	for _, p := range answers {
		starts := dimmed("no")
		if p.Starts {
			starts = cell{"yes", green}
		}
		t.add(text(p.File), starts, text(p.Why))
	}
	t.write(a.out)
	for _, p := range answers {
		if p.Plan != nil {
			a.out.line("")
			a.printPlan(p.Plan.Plan)
		}
	}
	for _, p := range answers {
		if p.Plan != nil {
			a.warnBriefly(p.Plan.Warnings)
		}
	}
	if !slices.ContainsFunc(answers, func(p planned) bool { return p.Starts }) {
		a.err.line("nothing would start")
	}
	return nil
}
