package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"forgeci/internal/protocol"
)

const trivial = "version: 1\njobs:\n  hi:\n    steps:\n      - echo hi\n"

// firstLog measures, on an idle system, from the request that makes a run to
// the first byte of its job's output in the reader's hands. Each run has a
// source that its runner has never seen.
func (b *bench) firstLog(ctx context.Context) error {
	for _, kind := range []string{sqlite, postgres} {
		if err := b.firstLogOn(ctx, kind); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
	return nil
}

func (b *bench) firstLogOn(ctx context.Context, kind string) (err error) {
	const samples, warm = 100, 3
	w, err := b.open(ctx, kind)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if _, err := w.addRunner(2); err != nil {
		return err
	}
	if err := w.awaitRunners(ctx, 1); err != nil {
		return err
	}
	repo, err := w.repo(ctx, "first-log")
	if err != nil {
		return err
	}
	dir, err := w.tree(sourceFiles(200, 10<<10))
	if err != nil {
		return err
	}
	var took []time.Duration
	for i := range samples + warm {
		if err := os.WriteFile(filepath.Join(dir, "sample"), []byte(strconv.Itoa(i)), 0o644); err != nil {
			return err
		}
		digest, err := w.upload(ctx, repo, dir)
		if err != nil {
			return err
		}
		if err := idle(ctx, 30*time.Millisecond); err != nil {
			return err
		}
		d, err := w.firstLine(ctx, repo, digest, "sample-"+strconv.Itoa(i))
		if err != nil {
			return err
		}
		if i >= warm {
			took = append(took, d)
		}
	}
	line := struct {
		Bench    string  `json:"bench"`
		Database string  `json:"database"`
		P50      float64 `json:"p50_ms"`
		P99      float64 `json:"p99_ms"`
	}{"first_log", kind, ms(quantile(took, 0.5)), ms(quantile(took, 0.99))}
	return b.report(line, "first_log "+kind,
		goal{name: "p50_ms", got: line.P50, target: 50, floor: 100}, goal{name: "p99_ms", got: line.P99, target: 200, floor: 400})
}

// firstLine makes a run and follows its job's log.
func (w *world) firstLine(ctx context.Context, repo protocol.Repo, digest, key string) (time.Duration, error) {
	begun := time.Now()
	run, err := w.submit(ctx, repo, digest, key)
	if err != nil {
		return 0, err
	}
	job, err := w.onlyJob(ctx, run)
	if err != nil {
		return 0, err
	}
	var took time.Duration
	err = w.client.LogEvents(ctx, job, protocol.LogQuery{}, protocol.Follow{GiveUp: time.Second}, func(item protocol.LogItem) error {
		if took == 0 && item.Log != nil && bytes.Contains(item.Log.Data, []byte("hi\n")) {
			took = time.Since(begun)
		}
		return nil
	})
	switch {
	case err != nil:
		return 0, err
	case took == 0:
		return 0, fmt.Errorf("the log of %s was sealed without its line", job)
	}
	if err := w.finished(ctx, run); err != nil {
		return 0, err
	}
	_, err = w.succeeded(ctx, job, "hi\n")
	return took, err
}

// sourceFiles is a tree of files of a size, of words that compress as source
// code does, with the trivial workflow.
func sourceFiles(count, size int) map[string]string {
	files := map[string]string{workflowFile: trivial}
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same tree every time
	for i := range count - 1 {
		files[fmt.Sprintf("dir%02d/file%03d.txt", i%20, i)] = words(r, size)
	}
	return files
}

func words(r *rand.Rand, size int) string {
	var b bytes.Buffer
	for b.Len() < size {
		fmt.Fprintf(&b, "func name%d(in%d) { return %d }\n", r.IntN(5000), r.IntN(100), r.Uint32())
	}
	return b.String()[:size]
}

// idle waits, so that what came before does not count.
func idle(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
