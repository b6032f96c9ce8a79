package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// runsConfig are the settings of forgeci runs.
type runsConfig struct {
	connection
	output
	repo, state, conclusion, commit string
	limit                           int
}

func (a *app) runsCommand() *cobra.Command {
	var cfg runsConfig
	cmd := &cobra.Command{
		Use:   "runs",
		Short: "List runs, newest first",
		Example: `  forgeci runs --state running
  forgeci runs --repo local/hello --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runs(cmd.Context(), &cfg) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	f := cmd.Flags()
	f.StringVar(&cfg.repo, "repo", "", "only runs of this repository (owner/name)")
	f.StringVar(&cfg.state, "state", "", "only runs in this state: waiting, running, cancelling, finished")
	f.StringVar(&cfg.conclusion, "conclusion", "", "only runs that ended like this: success, failed, timed_out, cancelled")
	f.StringVar(&cfg.commit, "commit", "", "only runs of this commit")
	f.IntVar(&cfg.limit, "limit", 20, "how many at most; 0 lists all")
	return cmd
}

func (a *app) runs(ctx context.Context, cfg *runsConfig) error {
	if cfg.limit < 0 {
		return usage("--limit %d is negative", cfg.limit)
	}
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	q := protocol.RunsQuery{
		Repo: cfg.repo, State: ci.State(cfg.state), Conclusion: ci.Conclusion(cfg.conclusion), Commit: cfg.commit,
	}
	runs, more, err := listRuns(ctx, c, q, cfg.limit)
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(runs)
	}
	if len(runs) == 0 {
		a.err.line("no runs")
		return nil
	}
	t := table{head: []string{"RUN", "NO", "REPOSITORY", "WORKFLOW", "STATE", "SOURCE", "BY", "CREATED", "TOOK"}}
	for _, r := range runs {
		t.add(text(string(r.ID)), textf("%d", r.Number), text(r.Repo.Name), text(r.Workflow),
			status(r.State, r.Conclusion, r.Warnings), text(sourceName(r)), text(r.Actor),
			text(a.ago(r.CreatedAt)), text(a.took(r.StartedAt, r.FinishedAt)))
	}
	t.write(a.out)
	if more {
		a.err.linef("There are more: --limit %d shows the first.", cfg.limit)
	}
	return nil
}

// pageSize is how many items are asked for at once.
const pageSize = 100

// listRuns collects pages up to limit (0: all) and reports whether there are more.
func listRuns(ctx context.Context, c *protocol.Client, q protocol.RunsQuery, limit int) ([]protocol.RunSummary, bool, error) {
	runs := []protocol.RunSummary{}
	for {
		q.Limit = pageSize
		if limit > 0 {
			q.Limit = min(pageSize, limit-len(runs))
		}
		page, err := c.Runs(ctx, q)
		if err != nil {
			return nil, false, err
		}
		runs = append(runs, page.Items...)
		if page.Next == "" || limit > 0 && len(runs) >= limit {
			return runs, page.Next != "", nil
		}
		q.After = page.Next
	}
}

// sourceName describes a run's source in one word: ref@commit, with + when the
// tree differed from the commit.
func sourceName(r protocol.RunSummary) string {
	name := strings.TrimPrefix(strings.TrimPrefix(r.Ref, "refs/heads/"), "refs/tags/")
	if r.CommitSHA != "" {
		if name != "" {
			name += "@"
		}
		name += r.CommitSHA[:min(len(r.CommitSHA), 8)]
		if r.Dirty {
			name += "+"
		}
	}
	return name
}
