package cli

import (
	"github.com/spf13/cobra"
)

func (a *app) runnerCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "runner", Short: "Run jobs for a server, or look after its runners", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(a.runnerListCommand(), a.runnerDrainCommand(), a.runnerFenceCommand())
	return cmd
}
