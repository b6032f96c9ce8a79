// Command fuzz runs the project's fuzz targets one after another.
//
//	fuzz [-time 10s] [-only NAME] [PACKAGES]
//
// Each target begins with its committed corpus. What a target finds is written
// into its corpus by the Go command, and named here. The last line of standard
// output is one JSON object; the exit code is 1 when a target failed or when a
// target has no committed corpus.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
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
	var failed []error
	for _, t := range targets {
		s.Targets++
		seeds, err := filepath.Glob(filepath.Join(t.dir, "testdata", "fuzz", t.name, "*"))
		s.Seeds += len(seeds)
		if err == nil && len(seeds) == 0 {
			err = errors.New("no committed corpus in testdata/fuzz/" + t.name)
		}
		var r result
		if err == nil {
			r, err = fuzz(ctx, t, each)
		}
		if ctx.Err() != nil {
			return s, context.Cause(ctx)
		}
		s.Executions += r.executions
		s.Interesting += r.interesting
		if err != nil {
			s.Failures++
			failed = append(failed, fmt.Errorf("%s %s: %w", t.pkg, t.name, err))
			fmt.Fprintf(out, "FAIL  %s %s: %v\n%s", t.pkg, t.name, err, r.output)
			continue
		}
		fmt.Fprintf(out, "ok    %s %s: %d seeds, %d executions, %d new interesting\n", t.pkg, t.name, len(seeds), r.executions, r.interesting)
	}
	return s, errors.Join(failed...)
}

// fuzz runs one target.
func fuzz(ctx context.Context, t target, each time.Duration) (result, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-fuzz", "^"+t.name+"$",
		"-fuzztime", each.String(), "-fuzzminimizetime", "20x", ".")
	cmd.Dir = t.dir
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	output, err := cmd.CombinedOutput()
	r := read(string(output))
	switch {
	case err == nil && r.executions == 0:
		return r, errors.New("nothing was executed")
	case err != nil && r.input != "":
		return r, fmt.Errorf("fails on %s; again with: go test -run '%s' %s",
			filepath.Join(t.dir, r.input), t.name+"/"+filepath.Base(r.input), t.pkg)
	default:
		return r, err
	}
}
