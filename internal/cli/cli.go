// Package cli is the command line: one file for each command, one struct of
// settings for each command, and the only place that reads flags, environment
// variables and the terminal.
//
// A setting comes from its flag, else from its environment variable, else from
// its default. Standard output carries the answer and nothing else; progress,
// notes and errors go to standard error. Nothing but the answer's own bytes is
// written to what is not a terminal: no colours, no control codes.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Process is what the command line knows of its process.
type Process struct {
	// Args are the arguments without the program's name.
	Args           []string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// LookupEnv reads the environment.
	LookupEnv func(string) (string, bool)
	// Now tells the time for "3m ago".
	Now func() time.Time
}

// System is the process as it is.
func System() Process {
	return Process{
		Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		LookupEnv: os.LookupEnv, Now: time.Now,
	}
}

// Main runs one command to its end and returns the exit code of exit.go.
func Main(ctx context.Context, p Process) int {
	a := newApp(p)
	root := a.root() //nolint:contextcheck // commands get it from ExecuteContextC
	root.SetArgs(p.Args)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.started && !errors.As(err, new(*exitError)) {
		err = usage("%s\nSee %q.", err, cmd.CommandPath()+" --help")
	}
	if failed := a.out.err(); err == nil && failed != nil {
		err = &exitError{exitInfra, fmt.Errorf("the answer could not be written: %w", failed)}
	}
	return a.exit(err)
}

// app is one invocation.
type app struct {
	Process
	out, err *screen
	// started is set when arguments and flags were found right.
	started bool
	// fromEnv names flags of the command whose value came from the environment.
	fromEnv map[string]bool
	// lost is set once the user has been told that no server answers.
	lost atomic.Bool
	// tokenName is the file of a server's first token of the kind that is needed.
	tokenName string
	// variables are the environment variables that stand in for a flag of any command.
	variables []string
}

func newApp(p Process) *app {
	a := &app{Process: p, fromEnv: map[string]bool{}, tokenName: adminTokenName}
	noColor := a.getenv("NO_COLOR") != "" || a.getenv("TERM") == "dumb"
	a.out, a.err = newScreen(p.Stdout, noColor), newScreen(p.Stderr, noColor)
	return a
}

func (a *app) getenv(name string) string {
	v, _ := a.LookupEnv(name)
	return v
}

// Groups of commands in the help.
const (
	groupWork  = "work"
	groupAdmin = "admin"
	groupFile  = "file"
)

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "forgeci",
		Short: "Continuous integration in one binary: server, runner and client",
		Long: `ForgeCI runs the workflow of a repository.

  forgeci run                 runs the workflow here and now, without a server
  forgeci server --runner     starts a server with a runner beside it
  forgeci submit --wait       runs the working tree on that server

Exit codes: 0 success, 1 the run failed or timed out, 2 wrong usage or an
invalid workflow, 3 cancelled, 4 not found or not allowed, 5 infrastructure.
124 means that --timeout passed, 130 that the command was interrupted (a run on
a server goes on).`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Args:              cobra.NoArgs,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.prepare(cmd) },
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usage("%s\nSee %q.", err, cmd.CommandPath()+" --help")
	})
	root.AddGroup(
		&cobra.Group{ID: groupWork, Title: "Runs:"},
		&cobra.Group{ID: groupFile, Title: "Workflow files:"},
		&cobra.Group{ID: groupAdmin, Title: "Installation:"},
	)
	root.SetHelpCommandGroupID(groupAdmin)
	root.SetCompletionCommandGroupID(groupAdmin)
	for _, g := range []struct {
		id   string
		cmds []*cobra.Command
	}{
		{groupWork, []*cobra.Command{
			a.runCommand(), a.submitCommand(), a.runsCommand(), a.showCommand(), a.logsCommand(),
			a.cancelCommand(), a.retryCommand(), a.artifactsCommand(), a.explainCommand(),
		}},
		{groupFile, []*cobra.Command{a.validateCommand(), a.planCommand(), a.schemaCommand()}},
		{groupAdmin, []*cobra.Command{
			a.serverCommand(), a.runnerCommand(), a.deadLettersCommand(), a.versionCommand(),
		}},
	} {
		for _, c := range g.cmds {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	return root
}

// envAnnotation marks a flag with the environment variable that stands in for it.
const envAnnotation = "forgeci_env"

// env lets an environment variable stand in for a flag and says so in the help.
func (a *app) env(flags *pflag.FlagSet, name, variable string) {
	if !slices.Contains(a.variables, variable) {
		a.variables = append(a.variables, variable)
	}
	f := flags.Lookup(name)
	f.Usage += " [$" + variable + "]"
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[envAnnotation] = []string{variable}
}

// prepare runs before every command, when its line was found right: it takes
// settings from the environment where there is no flag.
func (a *app) prepare(cmd *cobra.Command) error {
	var failed error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		names := f.Annotations[envAnnotation]
		if f.Changed || len(names) == 0 || failed != nil {
			return
		}
		value := a.getenv(names[0])
		if value == "" {
			return
		}
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			failed = usage("environment variable %s: %s", names[0], err)
			return
		}
		a.fromEnv[f.Name] = true
	})
	a.started = failed == nil
	return failed
}
