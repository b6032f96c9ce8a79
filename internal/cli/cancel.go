package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// cancelConfig are the settings of forgeci cancel.
type cancelConfig struct {
	connection
	output
	wait waiting
}

func (a *app) cancelCommand() *cobra.Command {
	var cfg cancelConfig
	cmd := &cobra.Command{
		Use:   "cancel RUN",
		Short: "Cancel a run",
		Long: `Cancel a run.

The run is cancelling until every runner has proved that its processes have
ended. A run that has finished otherwise stays as it is, and the command exits
with 4.

With --wait the command blocks until the run has finished and exits with 3; a run
that finished otherwise before the request arrived keeps its own result and code.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.cancel(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	f := cmd.Flags()
	f.BoolVar(&cfg.wait.wait, "wait", false, "wait until every process of the run has ended")
	f.DurationVar(&cfg.wait.timeout, "timeout", 0, "with --wait: exit with 124 after so long")
	return cmd
}

func (a *app) cancel(ctx context.Context, cfg *cancelConfig, name string) error {
	if err := cfg.wait.check(); err != nil {
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
	run, err := c.Cancel(ctx, id)
	if errors.Is(err, ci.ErrConflict) && cfg.wait.wait {
		err = nil // it has finished, and its result is what is waited for
	}
	if err != nil {
		return err
	}
	if cfg.wait.wait {
		runs, err := a.awaitRuns(ctx, c, []ci.RunID{id}, cfg.wait, cfg.output)
		if runs[0].State != "" {
			run = runs[0].RunSummary
		}
		if err != nil && cfg.output.json() && run.State != "" {
			return errors.Join(err, a.printJSON(run))
		}
		if err != nil {
			return err
		}
		if err := a.printCancelled(cfg.output, run); err != nil {
			return err
		}
		return finish(runs)
	}
	return a.printCancelled(cfg.output, run)
}

func (a *app) printCancelled(o output, run protocol.RunSummary) error {
	if o.json() {
		return a.printJSON(run)
	}
	st := status(run.State, run.Conclusion, run.Warnings)
	a.out.line(clean(string(run.ID)) + " " + a.out.paint(st.style, st.text))
	return nil
}

// runID takes the ID of a run from the command line.
func runID(name string) (ci.RunID, error) {
	if !ci.HasPrefix(name, ci.PrefixRun) {
		return "", ci.Errorf(ci.ErrNotFound, "%q is not a run (run_…); `forgeci runs` lists them", name)
	}
	return ci.RunID(name), nil
}
