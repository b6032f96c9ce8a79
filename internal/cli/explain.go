package cli

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// explainConfig are the settings of forgeci explain.
type explainConfig struct {
	connection
	output
}

func (a *app) explainCommand() *cobra.Command {
	var cfg explainConfig
	cmd := &cobra.Command{
		Use:   "explain JOB",
		Short: "Say why a job waits, ran, was lost or was skipped, with its whole history",
		Long: `Say in words why a job is where it is, and list what happened to its ownership:
claims, phases, rejected reports, expiries, decisions with their reasons.

A job is named by its ID or as RUN/NAME.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.explain(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	return cmd
}

func (a *app) explain(ctx context.Context, cfg *explainConfig, name string) error {
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	id, err := a.jobTarget(ctx, c, name, false)
	if err != nil {
		return err
	}
	e, err := c.Explain(ctx, id)
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(e)
	}
	s := a.out
	st := status(e.Job.State, e.Job.Conclusion, false)
	s.line(s.paint(bold, clean(e.Job.Name)) + "  " + s.paint(st.style, st.text))
	s.line(cleanText(e.Summary))
	if len(e.History) > 0 {
		s.line("")
		t := table{head: []string{"AT", "ATTEMPT", "WHO", "WHAT", "DETAIL"}}
		for _, h := range e.History {
			epoch := ""
			if h.Epoch > 0 {
				epoch = textf("%d", h.Epoch).text
			}
			who := h.ActorName
			if who == "" {
				who = h.Actor
			}
			t.add(dimmed(h.At.UTC().Format(time.DateTime+".000")), text(epoch), text(who), text(h.Action), text(news(h.Detail, e.Summary)))
		}
		t.write(s)
	}
	return nil
}

// news is what an entry of the history says beyond the summary above it: how it
// ended, without the reason once more.
func news(detail, summary string) string {
	head, reason, ok := strings.Cut(detail, ": ")
	if ok && strings.Contains(summary, reason) {
		return head
	}
	return detail
}

// jobTarget resolves the name of a job. A run stands for its job when it has only one.
func (a *app) jobTarget(ctx context.Context, c *protocol.Client, name string, patient bool) (ci.JobID, error) {
	run, job, err := a.target(ctx, c, name, patient)
	if err != nil || job != "" {
		return job, err
	}
	r, err := a.readRun(ctx, c, run, patient)
	if err != nil {
		return "", err
	}
	if len(r.JobList) == 1 {
		return r.JobList[0].ID, nil
	}
	names := make([]string, len(r.JobList))
	for i, j := range r.JobList {
		names[i] = j.Name
	}
	return "", usage("run %s has %d jobs; name one as %s/NAME: %s", run, len(names), run, nameList(names))
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
