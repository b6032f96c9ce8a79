package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	firstSlice = 2  // seeds in the first process: most mutants die at once
	slice      = 10 // at most in one
	quickSeeds = 30
	// Of one process of tests: only what hangs takes so long, also on a machine
	// that is busy with other things.
	testLimit = 30 * time.Minute
)

// lab builds and runs.
type lab struct {
	root, temp string
	seeds      int
	log        io.Writer
}

// command runs a program in a folder and returns what it said and its exit code.
func (l *lab) command(ctx context.Context, dir, name string, args ...string) (string, int, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	// An interrupt goes to the tests, so that they end what they started.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		return out.String(), exit.ExitCode(), nil
	}
	return out.String(), 0, err
}

// build makes the test program of a package; overlay may be empty.
func (l *lab) build(ctx context.Context, pkg, overlay, to string) error {
	args := []string{"test", "-c", "-ldflags=-s -w", "-o", to}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	out, code, err := l.command(ctx, l.root, "go", append(args, pkg)...)
	if err == nil && code != 0 {
		err = fmt.Errorf("it does not compile:\n%s", out)
	}
	return err
}

func (l *lab) vet(ctx context.Context, overlay string, pkgs []string) error {
	out, code, err := l.command(ctx, l.root, "go", append([]string{"vet", "-overlay", overlay}, pkgs...)...)
	if err == nil && code != 0 {
		err = fmt.Errorf("go vet refuses it:\n%s", out)
	}
	return err
}

// simulate runs one slice of seeds.
func (l *lab) simulate(ctx context.Context, program string, from, n int) (string, int, error) {
	return l.command(ctx, filepath.Join(l.root, simPkg), program, "-test.run", "^TestSeeds$", "-test.timeout", testLimit.String(),
		"-seed", strconv.Itoa(from), "-seeds", strconv.Itoa(n), "-shrink", "0")
}

// test runs tests of one package.
func (l *lab) test(ctx context.Context, pkg, program string, names []string) (string, int, error) {
	return l.command(ctx, filepath.Join(l.root, pkg), program, "-test.run", "^("+strings.Join(names, "|")+")$", "-test.v",
		"-test.timeout", testLimit.String())
}

// green proves that what kills the mutants is not there without them.
func (l *lab) green(ctx context.Context, patches []patch) error {
	dir := filepath.Join(l.temp, "unpatched")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	tests := map[string][]string{}
	sim := false
	for _, p := range patches {
		switch {
		case p.tool == toolSim:
			sim = true
		case !slices.Contains(tests[p.pkg], p.test):
			tests[p.pkg] = append(tests[p.pkg], p.test)
		}
	}
	for i, pkg := range slices.Sorted(maps.Keys(tests)) {
		program := filepath.Join(dir, strconv.Itoa(i)+".test")
		if err := l.build(ctx, pkg, "", program); err != nil {
			return err
		}
		out, code, err := l.test(ctx, pkg, program, tests[pkg])
		if err != nil {
			return err
		}
		for _, name := range tests[pkg] {
			if code != 0 || !strings.Contains(out, "--- PASS: "+name+" ") {
				return fmt.Errorf("%s %s: exit code %d\n%s", pkg, name, code, tail(out))
			}
		}
	}
	if !sim {
		return nil
	}
	program := filepath.Join(dir, "sim.test")
	if err := l.build(ctx, simPkg, "", program); err != nil {
		return err
	}
	out, code, err := l.simulate(ctx, program, 1, l.seeds)
	if err == nil && code != 0 {
		err = fmt.Errorf("seeds 1 to %d: exit code %d\n%s", l.seeds, code, tail(out))
	}
	return err
}

// kill proves that a mutant dies by its assertion and says how; an error says
// what happened instead.
func (l *lab) kill(ctx context.Context, p patch) (string, error) {
	dir := filepath.Join(l.temp, p.name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	defer os.RemoveAll(dir) // the whole folder is removed at the end
	overlay, err := p.apply(ctx, l.root, dir)
	if err != nil {
		return "", err
	}
	if err := l.vet(ctx, overlay, p.packages()); err != nil {
		return "", err
	}
	program := filepath.Join(dir, "mutant.test")
	if p.tool == toolTest {
		if err := l.build(ctx, p.pkg, overlay, program); err != nil {
			return "", err
		}
		out, code, err := l.test(ctx, p.pkg, program, []string{p.test})
		if err != nil {
			return "", err
		}
		return "killed by " + p.test, testVerdict(p, out, code)
	}
	if err := l.build(ctx, simPkg, overlay, program); err != nil {
		return "", err
	}
	others := map[string]int{}
	for from, n := 1, firstSlice; from <= l.seeds; from, n = from+n, min(2*n, slice) {
		out, code, err := l.simulate(ctx, program, from, min(n, l.seeds-from+1))
		if err != nil {
			return "", err
		}
		seed, err := simVerdict(p, out, code, others)
		if err != nil || seed != "" {
			return "killed by seed " + seed, err
		}
	}
	return "", fmt.Errorf("it survives %d seeds%s", l.seeds, counted(others))
}

func counted(names map[string]int) string {
	if len(names) == 0 {
		return ""
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		parts = append(parts, fmt.Sprintf("%q in %d", name, names[name]))
	}
	return "; other assertions failed: " + strings.Join(parts, ", ")
}

// simVerdict reads a slice of the simulation: the first seed that broke the named
// promise, "" when none did. What else failed in seeds is counted; an end of the
// process that TestSeeds did not decide is an error.
func simVerdict(p patch, out string, code int, others map[string]int) (seed string, err error) {
	if code > 1 || code < 0 {
		return "", fmt.Errorf("it dies otherwise, with exit code %d\n%s", code, tail(out))
	}
	name, words, _ := strings.Cut(p.assertion, ": ")
	// This is how TestSeeds reports a broken promise.
	broken := regexp.MustCompile(`(?m)^\s+\w+_test\.go:\d+: seed (\d+): (.*) broken in step -?\d+: (.*)$`)
	found := broken.FindAllStringSubmatch(out, -1)
	for _, f := range found {
		if f[2] == name && strings.Contains(f[3], words) {
			return f[1], nil
		}
		others[f[2]]++
	}
	if code == 1 && len(found) == 0 {
		others["TestSeeds"]++
	}
	return "", nil
}

// testVerdict reads the output of a mutant's test: it failed, by an assertion
// with the words, and in no other way.
func testVerdict(p patch, out string, code int) error {
	said := regexp.MustCompile(`(?m)^\s+\w+_test\.go:\d+: .*` + regexp.QuoteMeta(p.assertion))
	switch {
	case code == 0:
		return fmt.Errorf("it survives %s", p.test)
	case code != 1 || strings.Contains(out, "\npanic: ") || !strings.Contains(out, "--- FAIL: "+p.test+" "):
		return fmt.Errorf("it dies otherwise, with exit code %d\n%s", code, tail(out))
	case !said.MatchString(out):
		return fmt.Errorf("%s fails, but not by %q\n%s", p.test, p.assertion, tail(out))
	}
	return nil
}

// tail is the end of a long text.
func tail(s string) string {
	const most = 3000
	if len(s) > most {
		s = "…" + s[len(s)-most:]
	}
	return s
}
