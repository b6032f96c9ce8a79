package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// runnerAdminConfig are the settings of forgeci runner list, drain and fence.
type runnerAdminConfig struct {
	connection
	output
}

func (a *app) runnerListCommand() *cobra.Command {
	var cfg runnerAdminConfig
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List runners with what they offer and hold",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return a.runnerList(cmd.Context(), &cfg) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	return cmd
}

func (a *app) runnerList(ctx context.Context, cfg *runnerAdminConfig) error {
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	runners, err := allPages(func(after string) (protocol.Page[protocol.Runner], error) { return c.Runners(ctx, after) })
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(runners)
	}
	if len(runners) == 0 {
		a.err.line("no runners")
		return nil
	}
	t := table{head: []string{"RUNNER", "NAME", "STATUS", "SLOTS", "OFFERS", "SEEN", "JOBS"}}
	for _, r := range runners {
		offer := []string{r.Offer.OS + "/" + r.Offer.Arch}
		for _, class := range r.Offer.Isolation {
			offer = append(offer, string(class))
		}
		offer = append(offer, r.Offer.Labels...)
		seen := "never"
		if r.LastSeen != nil {
			seen = a.ago(*r.LastSeen)
		}
		var jobs []string
		for _, j := range r.Running {
			jobs = append(jobs, j.Name)
		}
		if r.Quarantined > 0 {
			jobs = append(jobs, fmt.Sprintf("(%d not proved to have ended)", r.Quarantined))
		}
		t.add(text(string(r.ID)), text(r.Name), runnerStatus(r), textf("%d/%d", len(r.Running), r.Slots),
			text(strings.Join(offer, " ")), text(seen), text(strings.Join(jobs, ", ")))
	}
	t.write(a.out)
	return nil
}

// runnerStatus is the word for what a runner is good for. One that has not been
// heard of for a while may be gone: that is said instead of online.
func runnerStatus(r protocol.Runner) cell {
	s := r.Status
	if r.Silent != nil {
		silent := "silent for " + span(r.Silent.Std())
		if s != "online" {
			silent = s + ", " + silent
		}
		return cell{clean(silent), yellow}
	}
	switch s {
	case "online":
		return cell{s, green}
	case "draining":
		return cell{s, yellow}
	case "fenced":
		return cell{s, red}
	default:
		return dimmed(s)
	}
}

func (a *app) runnerDrainCommand() *cobra.Command {
	var cfg runnerAdminConfig
	cmd := &cobra.Command{
		Use:   "drain RUNNER",
		Short: "Let a runner finish what it holds and take nothing new",
		Long: `Let a runner finish what it holds and take nothing new. Its process ends then,
an idle one at once, and takes jobs again once it is started again. A
server does not start a drained runner beside it again before its own next start.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runnerAct(cmd.Context(), &cfg, args[0], (*protocol.Client).DrainRunner)
		},
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	return cmd
}

func (a *app) runnerFenceCommand() *cobra.Command {
	var cfg runnerAdminConfig
	cmd := &cobra.Command{
		Use:   "fence RUNNER",
		Short: "Declare a runner's host dead",
		Long: `Declare that nothing runs on a runner's host any more, because you have switched
it off or cut it off. Its leases end at once, its quarantined capacity is
released and cancelled runs that wait for it end.

Nothing is stopped by this command. Fencing a host that still runs lets two
copies of a job run at the same time.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runnerAct(cmd.Context(), &cfg, args[0], (*protocol.Client).FenceRunner)
		},
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	return cmd
}

// runnerAct does one of the operator's actions to a runner.
func (a *app) runnerAct(
	ctx context.Context, cfg *runnerAdminConfig, name string,
	act func(*protocol.Client, context.Context, ci.RunnerID) (protocol.Runner, error),
) error {
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	id, err := runnerID(ctx, c, name)
	if err != nil {
		return err
	}
	r, err := act(c, ctx, id)
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(r)
	}
	st := runnerStatus(r)
	a.out.line(clean(string(r.ID)) + " " + a.out.paint(st.style, st.text))
	return nil
}

// runnerID takes a runner's ID, or the name of exactly one runner.
func runnerID(ctx context.Context, c *protocol.Client, name string) (ci.RunnerID, error) {
	if ci.HasPrefix(name, ci.PrefixRunner) {
		return ci.RunnerID(name), nil
	}
	runners, err := allPages(func(after string) (protocol.Page[protocol.Runner], error) { return c.Runners(ctx, after) })
	if err != nil {
		return "", err
	}
	var found []string
	for _, r := range runners {
		if r.Name == name {
			found = append(found, string(r.ID))
		}
	}
	switch len(found) {
	case 1:
		return ci.RunnerID(found[0]), nil
	case 0:
		return "", ci.Errorf(ci.ErrNotFound, "there is no runner %q; `forgeci runner list` lists them", name)
	default:
		return "", usage("several runners are named %q; name one by its ID: %s", clean(name), strings.Join(found, ", "))
	}
}
