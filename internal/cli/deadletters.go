package cli

import (
	"context"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// deadLettersConfig are the settings of forgeci deadletters.
type deadLettersConfig struct {
	connection
	output
}

func (a *app) deadLettersCommand() *cobra.Command {
	var cfg deadLettersConfig
	cmd := &cobra.Command{
		Use:   "deadletters",
		Short: "List jobs that infrastructure made fail, and requeue them",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return a.deadLetters(cmd.Context(), &cfg) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	cmd.AddCommand(a.requeueCommand())
	return cmd
}

func (a *app) deadLetters(ctx context.Context, cfg *deadLettersConfig) error {
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	letters, err := allPages(func(after string) (protocol.Page[protocol.DeadLetter], error) { return c.DeadLetters(ctx, after) })
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(letters)
	}
	if len(letters) == 0 {
		a.err.line("no dead letters")
		return nil
	}
	t := table{head: []string{"JOB", "NAME", "RUN", "REPOSITORY", "ATTEMPTS", "REASON", "AT", "REQUEUED AS", "DETAIL"}}
	for _, l := range letters {
		t.add(text(string(l.Job)), text(l.Name), text(string(l.Run)), text(l.Repo), textf("%d", l.Attempts),
			text(string(l.Reason)), text(a.ago(l.At)), text(string(l.Requeued)), text(l.Detail))
	}
	t.write(a.out)
	return nil
}

// requeueConfig are the settings of forgeci deadletters requeue.
type requeueConfig struct {
	connection
	output
	waiting
}

func (a *app) requeueCommand() *cobra.Command {
	var cfg requeueConfig
	cmd := &cobra.Command{
		Use:   "requeue JOB",
		Short: "Run a dead letter again, as a retry run",
		Long: `Make a retry run of the dead letter's run: what succeeded keeps its results, the
dead letter and what depends on it run again. Standard output has the ID of the
new run alone.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.requeue(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, true)
	cfg.waiting.bind(cmd)
	return cmd
}

func (a *app) requeue(ctx context.Context, cfg *requeueConfig, name string) error {
	if err := cfg.check(); err != nil {
		return err
	}
	if !ci.HasPrefix(name, ci.PrefixJob) {
		return ci.Errorf(ci.ErrNotFound, "%q is not a job (job_…); `forgeci deadletters` lists them", name)
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	created, err := c.Requeue(ctx, ci.JobID(name))
	if err != nil {
		return err
	}
	return a.submitted(ctx, c, []protocol.RunCreated{created}, cfg.waiting, cfg.output, true)
}

// allPages collects a list that comes in pages.
func allPages[T any](page func(after string) (protocol.Page[T], error)) ([]T, error) {
	items := []T{}
	after := ""
	for {
		p, err := page(after)
		if err != nil {
			return nil, err
		}
		items = append(items, p.Items...)
		if p.Next == "" {
			return items, nil
		}
		after = p.Next
	}
}
