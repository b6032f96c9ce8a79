package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

const manyLines = 200_000

// log200k measures how long after the end of a job's process all 200,000 lines
// of 100 bytes can be read, and the server's memory at its largest.
func (b *bench) log200k(ctx context.Context) (err error) {
	w, err := b.open(ctx, sqlite)
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
	repo, err := w.repo(ctx, "log-200k")
	if err != nil {
		return err
	}
	stamp := filepath.Join(w.dir, "exit")
	dir, err := w.tree(map[string]string{workflowFile: fmt.Sprintf(
		"version: 1\njobs:\n  talk:\n    steps:\n      - |\n        seq -f '%%099.0f' %d\n        date +%%s%%N > %s.new && mv %s.new %s\n", manyLines, stamp, stamp, stamp)})
	if err != nil {
		return err
	}
	digest, err := w.upload(ctx, repo, dir)
	if err != nil {
		return err
	}
	var worst time.Duration
	for i := range 3 {
		if err := os.RemoveAll(stamp); err != nil {
			return err
		}
		took, err := w.talk(ctx, repo, digest, stamp, strconv.Itoa(i))
		if err != nil {
			return err
		}
		b.logf("log_200k: readable %.0f ms after exit", ms(took))
		worst = max(worst, took)
	}
	mem, err := w.server.memory()
	if err != nil {
		return err
	}
	line := struct {
		Bench    string  `json:"bench"`
		Readable float64 `json:"readable_after_exit_ms"`
		Peak     float64 `json:"server_peak_mib"`
	}{"log_200k", ms(worst), mib(mem.peak)}
	return b.report(line, "log_200k",
		goal{name: "readable_after_exit_ms", got: line.Readable, target: 1000, floor: 2000},
		goal{name: "server_peak_mib", got: line.Peak, target: 120, floor: 200})
}

// talk runs the job once and returns how long after its process wrote its stamp
// a reader had all of its lines.
func (w *world) talk(ctx context.Context, repo protocol.Repo, digest, stamp, key string) (time.Duration, error) {
	run, err := w.submit(ctx, repo, digest, key)
	if err != nil {
		return 0, err
	}
	job, err := w.onlyJob(ctx, run)
	if err != nil {
		return 0, err
	}
	var exit time.Time
	err = w.until(ctx, time.Minute, "the end of the job's process", func() (bool, error) {
		text, err := os.ReadFile(stamp)
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		nanos, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		exit = time.Unix(0, nanos)
		return true, err
	})
	if err != nil {
		return 0, err
	}
	err = w.until(ctx, time.Minute, "the last line", func() (bool, error) {
		return w.total(ctx, job)
	})
	if err != nil {
		return 0, err
	}
	if err := w.allLines(ctx, job); err != nil {
		return 0, err
	}
	readable := time.Since(exit)
	if err := w.finished(ctx, run); err != nil {
		return 0, err
	}
	done, err := w.client.Job(ctx, job)
	if err == nil && (done.Conclusion != ci.ConclusionSuccess || done.Attempt[0].LogBytes != manyLines*100) {
		err = fmt.Errorf("job %s: %s, %d bytes of log", job, done.Conclusion, done.Attempt[0].LogBytes)
	}
	return readable, err
}

// total reports whether the server has the last line.
func (w *world) total(ctx context.Context, job ci.JobID) (bool, error) {
	log, err := w.client.JobLog(ctx, job, protocol.LogQuery{Tail: 1})
	if err != nil {
		return false, err
	}
	defer log.Close()
	text, err := io.ReadAll(log)
	return string(text) == fmt.Sprintf("%099d\n", manyLines), err
}

// allLines reads the whole log and compares every line.
func (w *world) allLines(ctx context.Context, job ci.JobID) error {
	log, err := w.client.JobLog(ctx, job, protocol.LogQuery{})
	if err != nil {
		return err
	}
	defer log.Close()
	lines := bufio.NewReaderSize(log, 256<<10)
	want := make([]byte, 0, 100)
	for n := 1; n <= manyLines; n++ {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		want = numbered(want[:0], n)
		if string(line) != string(want) {
			return fmt.Errorf("line %d is %q", n, line)
		}
	}
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the log goes on after its last line: %v", err) //nolint:errorlint // there may be none
	}
	return nil
}

// numbered appends the line of 100 bytes with a number.
func numbered(b []byte, n int) []byte {
	digits := strconv.Itoa(n)
	for range 99 - len(digits) {
		b = append(b, '0')
	}
	return append(append(b, digits...), '\n')
}
