package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// drain fills the queue with runs of one trivial job each and lets two runners
// of 16 slots empty it.
func (b *bench) drain(ctx context.Context) error {
	for _, kind := range []string{sqlite, postgres} {
		if err := b.drainOn(ctx, kind); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
	return nil
}

const echoRun = "version: 1\njobs:\n  hi:\n    steps:\n      - echo \"hi $CI_RUN_ID\"\n"

func (b *bench) drainOn(ctx context.Context, kind string) (err error) {
	const jobs, runners, slots = 1000, 2, 32
	w, err := b.open(ctx, kind)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	runs, err := w.fill(ctx, jobs)
	if err != nil {
		return err
	}
	before, err := w.server.cpu()
	if err != nil {
		return err
	}
	for range runners {
		if _, err := w.addRunner(slots / runners); err != nil {
			return err
		}
	}
	defer w.profile(ctx, "drain-"+kind, 10*time.Second)()
	// The youngest run ends among the last; waiting for it costs the server little.
	if err := w.finished(ctx, runs[jobs-1]); err != nil {
		return err
	}
	if err := w.allFinished(ctx); err != nil {
		return err
	}
	after, err := w.server.cpu()
	if err != nil {
		return err
	}
	first, last, err := w.verify(ctx, runs)
	if err != nil {
		return err
	}
	for i, p := range w.runners {
		own, children, err := p.times()
		if err != nil {
			return err
		}
		b.logf("drain %s: runner %d used %.2f ms CPU for one of its jobs, and its children %.2f ms", kind, i+1,
			ms(own)*runners/jobs, ms(children)*runners/jobs)
	}
	line := struct {
		Bench    string  `json:"bench"`
		Database string  `json:"database"`
		Slots    int     `json:"slots"`
		Rate     float64 `json:"jobs_per_s"`
		CPU      float64 `json:"server_cpu_ms_per_job"`
	}{"drain", kind, slots, round1(jobs / last.Sub(first).Seconds()), round2(float64(after-before) / float64(time.Millisecond) / jobs)}
	return b.report(line, "drain "+kind,
		goal{name: "jobs_per_s", got: line.Rate, target: 150, floor: 75, atLeast: true},
		goal{name: "server_cpu_ms_per_job", got: line.CPU, target: 4, floor: 8})
}

// fill submits runs while no runner is there, oldest first.
func (w *world) fill(ctx context.Context, n int) ([]ci.RunID, error) {
	repo, err := w.repo(ctx, "drain")
	if err != nil {
		return nil, err
	}
	dir, err := w.tree(map[string]string{workflowFile: echoRun})
	if err != nil {
		return nil, err
	}
	digest, err := w.upload(ctx, repo, dir)
	if err != nil {
		return nil, err
	}
	runs := make([]ci.RunID, n)
	submit := func(ctx context.Context, i int) (err error) {
		runs[i], err = w.submit(ctx, repo, digest, "run-"+strconv.Itoa(i))
		return err
	}
	if err := each(ctx, n-1, 8, submit); err != nil {
		return nil, err
	}
	return runs, submit(ctx, n-1)
}

// allFinished waits until no run is in another state than finished.
func (w *world) allFinished(ctx context.Context) error {
	return w.until(ctx, 2*time.Minute, "the end of all runs", func() (bool, error) {
		for _, state := range []ci.State{ci.StateWaiting, ci.StateReady, ci.StateRunning, ci.StateCancelling} {
			page, err := w.client.Runs(ctx, protocol.RunsQuery{State: state, Limit: 1})
			if err != nil || len(page.Items) > 0 {
				return false, err
			}
		}
		return true, nil
	})
}

// verify checks every job's result and output and returns when the first was
// claimed and the last finished, both by the server's clock.
func (w *world) verify(ctx context.Context, runs []ci.RunID) (first, last time.Time, err error) {
	done := make([]protocol.Job, len(runs))
	err = each(ctx, len(runs), 4, func(ctx context.Context, i int) error {
		job, err := w.onlyJob(ctx, runs[i])
		if err != nil {
			return err
		}
		done[i], err = w.succeeded(ctx, job, "hi "+string(runs[i])+"\n")
		return err
	})
	if err != nil {
		return first, last, err
	}
	for _, job := range done {
		claimed := job.Attempt[0].ClaimedAt
		if first.IsZero() || claimed.Before(first) {
			first = claimed
		}
		if job.FinishedAt.After(last) {
			last = *job.FinishedAt
		}
	}
	return first, last, nil
}
