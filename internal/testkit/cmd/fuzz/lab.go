package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// lab builds the test programs of packages and fuzzes with them.
type lab struct {
	each     time.Duration
	atOnce   int               // targets that are fuzzed at the same time
	parallel int               // processes that fuzz one target
	temp     string            // programs, and what a run finds interesting
	programs map[string]string // by package
	broken   map[string]error  // packages without a program
}

// shown is how much of an input that fails is printed.
const shown = 8 << 10

// guides returns the packages in which fuzzing looks for new ways, besides the
// module: those that parse outside input for it. Go's own -fuzz looks at all of a
// program, down to the standard library and the embedded database: the program of
// a package that imports the store then tries 20 times fewer inputs a second, and
// is 3 minutes in building.
func guides() []string { return []string{"go.yaml.in/...", "cel.dev/..."} }

// newLab builds the packages of the targets into temp.
func newLab(ctx context.Context, temp string, each time.Duration, targets []target) (*lab, error) {
	l := &lab{each: each, atOnce: min(runtime.NumCPU(), len(targets)), temp: temp, programs: map[string]string{}, broken: map[string]error{}}
	l.parallel = runtime.NumCPU() / l.atOnce
	for _, t := range targets {
		if l.programs[t.pkg] != "" || l.broken[t.pkg] != nil {
			continue
		}
		program := filepath.Join(temp, strconv.Itoa(len(l.programs))+".test")
		args := []string{"test", "-c", "-ldflags=-s -w", "-o", program}
		for _, pattern := range append(guides(), t.module+"/...") {
			args = append(args, "-gcflags="+pattern+"=-d=libfuzzer")
		}
		cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
		cmd.Dir = t.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			l.broken[t.pkg] = fmt.Errorf("it does not build: %w\n%s", err, bytes.TrimSpace(out))
			continue
		}
		l.programs[t.pkg] = program
	}
	return l, ctx.Err()
}

// try fuzzes one target and returns how many inputs its committed corpus has.
func (l *lab) try(ctx context.Context, t target) (seeds int, r result, err error) {
	corpus, err := filepath.Glob(filepath.Join(t.dir, "testdata", "fuzz", t.name, "*"))
	switch {
	case err != nil:
		return 0, r, err
	case len(corpus) == 0:
		return 0, r, errors.New("no committed corpus in testdata/fuzz/" + t.name)
	case l.broken[t.pkg] != nil:
		return len(corpus), r, l.broken[t.pkg]
	}
	r, err = l.fuzz(ctx, t)
	return len(corpus), r, err
}

// fuzz runs one target.
func (l *lab) fuzz(ctx context.Context, t target) (result, error) {
	cmd := exec.CommandContext(ctx, l.programs[t.pkg], "-test.run=^$", "-test.fuzz=^"+t.name+"$",
		"-test.fuzztime="+l.each.String(), "-test.fuzzminimizetime=20x", "-test.parallel="+strconv.Itoa(l.parallel),
		"-test.fuzzcachedir="+filepath.Join(l.temp, "found", t.pkg))
	cmd.Dir = t.dir
	cmd.Env = append(os.Environ(), "TMPDIR="+l.temp) // workers leave their directories behind
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	output, err := cmd.CombinedOutput()
	r := read(string(output))
	if err != nil && timeEnded(t.name, r.output) {
		err = nil
	}
	switch {
	case err == nil && r.executions == 0:
		return r, errors.New("nothing was executed")
	case err != nil && r.input != "":
		// The log may be all that is left of the tree that it was found in.
		if text, err := os.ReadFile(filepath.Join(t.dir, r.input)); err == nil {
			r.output += fmt.Sprintf("%s:\n%.*s", r.input, shown, text)
		}
		return r, fmt.Errorf("fails on %s; again with: go test -run '%s' %s",
			filepath.Join(t.dir, r.input), t.name+"/"+filepath.Base(r.input), t.pkg)
	default:
		return r, err
	}
}

// timeEnded says that a target has failed by nothing but the end of its time: up
// to Go 1.26 the coordinator may take its own deadline for a failure when the
// machine is busy (https://go.dev/issue/75804). No input is named then, nothing
// else is said, and what a target itself says never stands there alone.
func timeEnded(name, output string) bool {
	return regexp.MustCompile(`^(fuzz: elapsed: .*\n)+--- FAIL: ` + name + ` \([0-9.]+s\)\n    context deadline exceeded\nFAIL\n$`).MatchString(output)
}
