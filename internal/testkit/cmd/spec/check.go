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
	"slices"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/sim/spec"
)

// outcome is what came of one check.
type outcome struct {
	states   int64
	violated string        // the property; empty when all hold
	history  string        // the steps to a violation of a good model, the last ones
	cpu      time.Duration // of making and running the checker
}

const (
	timeLimit   = 15 * time.Minute // of one check, on a machine that does much else
	depthLimit  = "-m1000000"
	memoryLimit = "-DMEMLIM=2500" // MiB
	historyTail = 80              // lines
)

// perform makes the checker of one check and runs it to its end, or to the first
// violation.
func perform(ctx context.Context, root string, c spec.Check) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	dir := filepath.Join(root, c.Name())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return outcome{}, err
	}
	defer os.RemoveAll(dir) // the parent is removed, too
	text, err := spec.Text(c.Model)
	if err != nil {
		return outcome{}, err
	}
	file := c.Model + ".pml"
	if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
		return outcome{}, err
	}
	var o outcome
	define := make([]string, 0, len(c.Define)+1)
	for _, d := range c.Define {
		define = append(define, "-D"+d)
	}
	if c.Broken != "" {
		define = append(define, "-DBROKEN_"+c.Broken)
	}
	if _, err := o.call(ctx, dir, "spin", slices.Concat(define, []string{"-a", file})...); err != nil {
		return o, err
	}
	compile := []string{memoryLimit, "-o", "pan", "pan.c"}
	if c.Broken == "" {
		compile = append(compile, "-O1")
	}
	search := []string{depthLimit, "-w22"}
	if c.Formula == "" {
		compile = append(compile, "-DSAFETY", "-DNOCLAIM")
	} else {
		search = append(search, "-a")
	}
	if _, err := o.call(ctx, dir, "gcc", compile...); err != nil {
		return o, err
	}
	out, err := o.call(ctx, dir, "./pan", search...)
	if err != nil {
		return o, err
	}
	if o.states, o.violated, err = read(out, c.Formula); err != nil {
		return o, err
	}
	if o.violated != "" && c.Broken == "" {
		steps, err := o.call(ctx, dir, "spin", slices.Concat(define, []string{"-t", "-p", "-g", file})...)
		if err != nil {
			return o, err
		}
		lines := strings.Split(strings.TrimSpace(steps), "\n")
		o.history = strings.Join(lines[max(len(lines)-historyTail, 0):], "\n")
	}
	return o, nil
}

// call runs a program in a directory and returns what it printed.
func (o *outcome) call(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if s := cmd.ProcessState; s != nil {
		o.cpu += s.UserTime() + s.SystemTime()
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("%s: %w: %s", program, err, out.String())
	}
	return out.String(), nil
}

// read understands what a checker printed. A formula is violated by an execution
// that goes on, or stands still, for ever without it.
func read(out, formula string) (states int64, violated string, err error) {
	if m := regexp.MustCompile(`(?m)^pan:\d+: (.*?)(?: \(at depth \d+\))?$`).FindStringSubmatch(out); m != nil {
		switch {
		case strings.HasPrefix(m[1], "assertion violated "):
			violated = strings.TrimSpace(strings.TrimPrefix(m[1], "assertion violated "))
		case strings.HasPrefix(m[1], "acceptance cycle"):
			violated = formula
		default:
			violated = m[1]
		}
	}
	m := regexp.MustCompile(`(?m)^ *(\d+(?:\.\d+e\+\d+)?) states, stored`).FindStringSubmatch(out)
	errorsFound := regexp.MustCompile(`errors: (\d+)`).FindStringSubmatch(out)
	if m == nil || errorsFound == nil {
		return 0, "", fmt.Errorf("the checker says neither states nor errors: %s", out)
	}
	number, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, "", err
	}
	switch {
	case (errorsFound[1] == "0") != (violated == ""):
		return 0, "", fmt.Errorf("the checker counts %s errors and names %q", errorsFound[1], violated)
	case violated == "" && strings.Contains(out, "Search not completed"), strings.Contains(out, "max search depth too small"):
		return 0, "", errors.New("the search was not completed: the memory or the depth was too small")
	}
	return int64(number), violated, nil
}
