package main

import (
	"context"
	"errors"
	"time"
)

// footprint measures the memory of an idle server and an idle runner, and how
// long a server takes to start on an empty data directory.
func (b *bench) footprint(ctx context.Context) (err error) {
	const starts = 5
	var took []time.Duration
	for range starts {
		w, err := b.open(ctx, sqlite)
		if err != nil {
			return err
		}
		took = append(took, w.started)
		if err := w.close(); err != nil {
			return err
		}
	}
	w, err := b.open(ctx, sqlite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	runner, err := w.addRunner(2)
	if err != nil {
		return err
	}
	if err := w.awaitRunners(ctx, 1); err != nil {
		return err
	}
	if err := idle(ctx, 10*time.Second); err != nil {
		return err
	}
	server, err := w.server.memory()
	if err != nil {
		return err
	}
	beside, err := runner.memory()
	if err != nil {
		return err
	}
	line := struct {
		Bench      string  `json:"bench"`
		ServerAnon float64 `json:"server_idle_anon_mib"`
		RunnerAnon float64 `json:"runner_idle_anon_mib"`
		ServerRSS  float64 `json:"server_idle_rss_mib"`
		RunnerRSS  float64 `json:"runner_idle_rss_mib"`
		Start      float64 `json:"start_ms"`
	}{"footprint", mib(server.anon), mib(beside.anon), mib(server.rss), mib(beside.rss), ms(quantile(took, 0.5))}
	return b.report(line, "footprint",
		goal{name: "server_idle_anon_mib", got: line.ServerAnon, target: 30, floor: 45},
		goal{name: "runner_idle_anon_mib", got: line.RunnerAnon, target: 12, floor: 20},
		goal{name: "start_ms", got: line.Start, target: 300, floor: 600})
}
