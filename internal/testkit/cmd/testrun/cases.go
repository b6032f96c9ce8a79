package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

// testCase is a case of the list: tests that prove it, the area that it waits for,
// or both when a part of it waits.
type testCase struct {
	id      string // AREA-NN
	pattern string // as listed, empty for a case that waits
	tests   *regexp.Regexp
	area    string // empty for a case that is proved whole
	why     string
}

// parseCases reads the list. A line is
//
//	LOG-03  test   TestCase_LOG_03.*
//	SRC-05  waits  code hosts: large files are fetched from a host
//
// with a regular expression that a whole name of a top-level test must match.
// Empty lines and lines that start with # are left out. Each ID occurs once, but
// for a case whose tests prove a part: its next line says what the rest waits for.
func parseCases(text string) ([]testCase, error) {
	var cases []testCase
	var errs []error
	seen := map[string]bool{}
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		c, err := parseCase(line)
		if last := len(cases) - 1; err == nil && last >= 0 && cases[last].id == c.id && cases[last].area == "" && c.tests == nil {
			cases[last].area, cases[last].why = c.area, c.why
			continue
		}
		if err == nil && seen[c.id] {
			err = fmt.Errorf("%s is listed twice", c.id)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", i+1, err))
			continue
		}
		seen[c.id] = true
		cases = append(cases, c)
	}
	return cases, errors.Join(errs...)
}

func parseCase(line string) (testCase, error) {
	id, rest, _ := strings.Cut(line, " ")
	if !regexp.MustCompile(`^[A-Z]+-[0-9]{2}$`).MatchString(id) {
		return testCase{}, fmt.Errorf("%q is not the ID of a case", id)
	}
	kind, value, _ := strings.Cut(strings.TrimSpace(rest), " ")
	value = strings.TrimSpace(value)
	switch kind {
	case "test":
		re, err := regexp.Compile("^(?:" + value + ")$")
		if err != nil || value == "" {
			return testCase{}, fmt.Errorf("%s names no test: %q", id, value)
		}
		return testCase{id: id, pattern: value, tests: re}, nil
	case "waits":
		area, why, ok := strings.Cut(value, ": ")
		if !ok || area == "" || why == "" {
			return testCase{}, fmt.Errorf("%s waits for no area or gives no reason: %q", id, value)
		}
		return testCase{id: id, area: area, why: why}, nil
	}
	return testCase{}, fmt.Errorf("%s has neither a test nor a reason", id)
}

func (c testCase) inAreas(areas []string) bool {
	area, _, _ := strings.Cut(c.id, "-")
	return len(areas) == 0 || slices.Contains(areas, area)
}

// runCases runs the tests of the listed cases and prints ID, test and result.
func runCases(ctx context.Context, out io.Writer, file string, areas, args []string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	cases, err := parseCases(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	cases = slices.DeleteFunc(cases, func(c testCase) bool { return !c.inAreas(areas) })

	var names []string
	for _, c := range cases {
		if c.tests != nil {
			names = append(names, c.pattern)
		}
	}
	results := newResults(func(*packageResult) {})
	testErr := goTest(ctx, results, "", append([]string{"-run", "^(" + strings.Join(names, "|") + ")$"}, args...))
	results.finish()

	proved, partly, waiting, broken := printCases(out, cases, results)
	for _, p := range results.sorted() {
		fmt.Fprint(out, p.failures())
	}
	fmt.Fprintf(out, "\n%d cases proved, %d in part, %d waiting, %d without proof\n", proved, partly, waiting, broken)
	if broken > 0 {
		return fmt.Errorf("%d cases have no passing test", broken)
	}
	return testErr
}

// printCases prints a line for each test of each case and counts the cases.
func printCases(out io.Writer, cases []testCase, results *results) (proved, partly, waiting, broken int) {
	for _, c := range cases {
		if c.tests == nil {
			waiting++
			fmt.Fprintf(out, "%-9s waits for %s: %s\n", c.id, c.area, c.why)
			continue
		}
		if c.area != "" {
			fmt.Fprintf(out, "%-9s waits in part for %s: %s\n", c.id, c.area, c.why)
		}
		found, good := 0, true
		for _, p := range results.sorted() {
			for _, name := range p.order {
				if !c.tests.MatchString(name) {
					continue
				}
				found++
				outcome := p.tests[name].outcome
				good = good && outcome == "pass"
				if outcome == "" {
					outcome = "never ended"
				}
				fmt.Fprintf(out, "%-9s %s %s: %s\n", c.id, shortPackage(p.path), name, outcome)
			}
		}
		switch {
		case found == 0:
			broken++
			fmt.Fprintf(out, "%-9s no test is called %s\n", c.id, c.pattern)
		case good && c.area != "":
			partly++
		case good:
			proved++
		default:
			broken++
		}
	}
	return proved, partly, waiting, broken
}
