package cli

import (
	"context"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// retryConfig are the settings of forgeci retry.
type retryConfig struct {
	connection
	output
	waiting
	failed bool
	key    string
}

func (a *app) retryCommand() *cobra.Command {
	var cfg retryConfig
	cmd := &cobra.Command{
		Use:   "retry RUN",
		Short: "Run a finished run again, as a new run",
		Long: `Make a new run with the same source, the same workflow and the same inputs.

With --failed, jobs that succeeded keep their results and artifacts; the others
and everything that depends on them run again. Standard output has the ID of the
new run alone.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.retry(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, true)
	cfg.waiting.bind(cmd)
	f := cmd.Flags()
	f.BoolVar(&cfg.failed, "failed", false, "run only what did not succeed, and what depends on it")
	f.StringVar(&cfg.key, "idempotency-key", "", "the same key gives the same new run")
	return cmd
}

func (a *app) retry(ctx context.Context, cfg *retryConfig, name string) error {
	if err := cfg.check(); err != nil {
		return err
	}
	id, err := runID(name)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	key := cfg.key
	if key == "" {
		key = ci.IDSource{}.New(ci.PrefixRequest)
	}
	created, err := c.Retry(ctx, id, key, protocol.RetryRun{Failed: cfg.failed})
	if err != nil {
		return err
	}
	return a.submitted(ctx, c, []protocol.RunCreated{created}, cfg.waiting, cfg.output, true)
}

// submitted tells of new runs: their IDs on standard output, and nothing else
// there; then it waits for them when asked to.
func (a *app) submitted(
	ctx context.Context, c *protocol.Client, created []protocol.RunCreated, w waiting, o output, single bool,
) error {
	ids := a.nameRuns(created, o)
	if !w.wait {
		switch {
		case o.form == outputText:
			return nil
		case single:
			return a.printJSON(created[0])
		default:
			return a.printJSON(created)
		}
	}
	runs, err := a.awaitRuns(ctx, c, ids, w, o)
	if err != nil {
		return a.cutShort(err, o, runs, single)
	}
	if o.form == outputText {
		for _, r := range runs {
			st := status(r.State, r.Conclusion, r.Warnings)
			a.err.line(string(r.ID) + ": " + a.err.paint(st.style, st.text))
		}
	} else if err := a.printAwaited(o, runs, single); err != nil {
		return err
	}
	return finish(runs)
}

// nameRuns prints the IDs of runs that were created, unless a document will have
// them, and their addresses.
func (a *app) nameRuns(created []protocol.RunCreated, o output) []ci.RunID {
	ids := make([]ci.RunID, len(created))
	for i, r := range created {
		ids[i] = r.RunID
		if o.form == outputText {
			a.out.linef("%s", string(r.RunID))
		}
		if r.URL != "" {
			a.err.linef("%s", r.URL)
		}
	}
	return ids
}
