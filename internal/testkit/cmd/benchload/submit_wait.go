package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// submitWait measures the whole process `forgeci submit --wait` of one step in
// a git checkout, against an embedded database and a runner beside the server.
func (b *bench) submitWait(ctx context.Context) (err error) {
	const samples, warm = 40, 3
	w, err := b.open(ctx, sqlite, "--runner")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := w.awaitRunners(ctx, 1); err != nil {
		return err
	}
	dir, err := w.tree(map[string]string{workflowFile: trivial, "README.md": "A checkout.\n"})
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"init", "-q"},
		{"add", "."},
		{"-c", "user.name=bench", "-c", "user.email=bench@example.com", "commit", "-q", "-m", "first"},
	} {
		if out, err := b.command(ctx, dir, "git", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w\n%s", args[0], err, out)
		}
	}
	var took []time.Duration
	for i := range samples + warm {
		if err := idle(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		cmd := b.command(ctx, dir, b.binary, "submit", "--wait", "--server", w.client.BaseURL(),
			"--token-file", filepath.Join(w.dir, "data", "admin.token"))
		var out, progress bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &progress
		begun := time.Now()
		err := cmd.Run()
		if i >= warm {
			took = append(took, time.Since(begun))
		}
		if err != nil {
			return fmt.Errorf("submit: %w\n%s", err, progress.String())
		}
		job, err := w.onlyJob(ctx, ci.RunID(strings.TrimSpace(out.String())))
		if err != nil {
			return err
		}
		if _, err := w.succeeded(ctx, job, "hi\n"); err != nil {
			return err
		}
	}
	line := struct {
		Bench string  `json:"bench"`
		P50   float64 `json:"p50_ms"`
	}{"submit_wait", ms(quantile(took, 0.5))}
	b.logf("submit_wait: min %.1f ms, p90 %.1f ms", ms(quantile(took, 0)), ms(quantile(took, 0.9)))
	return b.report(line, "submit_wait", goal{name: "p50_ms", got: line.P50, target: 150, floor: 200})
}

// command is a program with the clean environment of every started program.
func (b *bench) command(ctx context.Context, dir, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Env = dir, b.environment()
	return cmd
}
