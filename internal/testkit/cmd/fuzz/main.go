// Command fuzz runs the project's fuzz targets, as many at once as there are
// processors.
//
//	fuzz [-time 10s] [-only NAME] [PACKAGES]
//
// All packages are built first, so that the time of a target goes into fuzzing.
// Each target begins with its committed corpus and with nothing that earlier runs
// have found interesting: no run depends on those before it. An input that fails
// is written into the corpus, and named here. The last line of standard output is
// one JSON object; the exit code is 1 when a target failed or when a target has
// no committed corpus.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// summary is the last line.
type summary struct {
	Targets     int    `json:"targets"`
	Seeds       int    `json:"seeds"`
	Executions  int64  `json:"executions"`
	Interesting int64  `json:"new_interesting"`
	Failures    int    `json:"failures"`
	Time        string `json:"fuzztime"`
}

func main() {
	each := flag.Duration("time", 10*time.Second, "how long each target is fuzzed")
	only := flag.String("only", "", "only targets whose name contains this")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	packages := flag.Args()
	if len(packages) == 0 {
		packages = []string{"./..."}
	}
	s, err := run(ctx, os.Stdout, *each, *only, packages)
	line, jsonErr := json.Marshal(s)
	if err = errors.Join(err, jsonErr); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
	}
	fmt.Println(string(line))
	if err != nil {
		os.Exit(1)
	}
}

// run fuzzes every target, and goes on behind one that fails.
func run(ctx context.Context, out io.Writer, each time.Duration, only string, packages []string) (summary, error) {
	s := summary{Time: each.String()}
	targets, err := find(ctx, only, packages)
	if err != nil {
		return s, err
	}
	if len(targets) == 0 {
		return s, errors.New("no fuzz target")
	}
	temp, err := os.MkdirTemp("", "forgeci-fuzz-")
	if err != nil {
		return s, err
	}
	defer os.RemoveAll(temp) // a leftover in the temporary directory harms nothing
	l, err := newLab(ctx, temp, each, targets)
	if err != nil {
		return s, err
	}
	var failed []error
	var mu sync.Mutex // guards s, failed and out
	var workers sync.WaitGroup
	work := make(chan target)
	for range l.atOnce {
		workers.Go(func() {
			for t := range work {
				seeds, r, err := l.try(ctx, t)
				mu.Lock()
				s.Targets++
				s.Seeds += seeds
				s.Executions += r.executions
				s.Interesting += r.interesting
				if err != nil {
					s.Failures++
					failed = append(failed, fmt.Errorf("%s %s: %w", t.pkg, t.name, err))
					fmt.Fprintf(out, "FAIL  %s %s: %v\n%s", t.pkg, t.name, err, r.output)
				} else {
					fmt.Fprintf(out, "ok    %s %s: %d seeds, %d executions, %d new interesting\n", t.pkg, t.name, seeds, r.executions, r.interesting)
				}
				mu.Unlock()
			}
		})
	}
	for _, t := range targets {
		if ctx.Err() != nil {
			break
		}
		work <- t
	}
	close(work)
	workers.Wait()
	if ctx.Err() != nil {
		return s, context.Cause(ctx)
	}
	return s, errors.Join(failed...)
}
