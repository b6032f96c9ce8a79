// Command testrun runs the project's tests and says plainly what happened.
//
//	testrun [-require NAMES] -- [go test arguments]   counts per package, failures in full
//	testrun -cases FILE [-areas AREAS] -- [go test arguments]   case by case
//
// It ends with an error when a test failed or was skipped, when none ran, or
// when the tests did not talk to a program that -require names: a green run
// means that everything ran, against the real things.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"forgeci/internal/testkit"
)

func main() {
	require := flag.String("require", "", "programs that the tests must have talked to, separated by commas")
	casesFile := flag.String("cases", "", "print the cases listed in this file and run only their tests")
	areas := flag.String("areas", "", "with -cases: only these areas, separated by commas")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	var err error
	if *casesFile != "" {
		err = runCases(ctx, os.Stdout, *casesFile, list(*areas), flag.Args())
	} else {
		err = runTests(ctx, os.Stdout, list(*require), flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// list splits a flag's value.
func list(value string) []string {
	return strings.FieldsFunc(value, func(r rune) bool { return r == ',' })
}

// runTests runs `go test` and prints a line a package, the failures, what was
// talked to, and as its last line the counts.
func runTests(ctx context.Context, out io.Writer, require, args []string) error {
	report, err := os.MkdirTemp("", "forgeci-report-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(report) // a leftover in the temporary directory harms nothing

	results := newResults(func(p *packageResult) { fmt.Fprint(out, p.line()) })
	testErr := goTest(ctx, results, report, args)
	results.finish()

	for _, p := range results.sorted() {
		fmt.Fprint(out, p.failures())
	}
	versions, err := testkit.Versions(report)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\ntalked to: %s\n", strings.Join(append(versions, goVersion()), ", "))
	total := results.total()
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return verdict(total, versions, require, testErr)
}

// verdict decides what a green run is.
func verdict(total counts, versions, require []string, testErr error) error {
	switch {
	case total.failed > 0:
		return fmt.Errorf("%d tests failed", total.failed)
	case testErr != nil:
		return testErr
	case total.skipped > 0:
		return fmt.Errorf("%d tests were skipped; a test runs or fails", total.skipped)
	case total.passed == 0:
		return fmt.Errorf("no test ran")
	}
	for _, name := range require {
		if !strings.Contains("\n"+strings.Join(versions, "\n"), "\n"+name+" ") {
			return fmt.Errorf("no test talked to %s", name)
		}
	}
	return nil
}

// goTest runs `go test -json` with the arguments and feeds the results.
func goTest(ctx context.Context, results *results, report string, args []string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json", "-count=1"}, args...)...)
	cmd.Env = append(os.Environ(), "FORGECI_TEST_REPORT="+report)
	// An interrupt goes to the tests, so that they end what they started.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start go test: %w", err)
	}
	readErr := results.read(out)
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	return readErr
}

// goVersion names the toolchain that the tests were built with.
func goVersion() string {
	out, err := exec.Command("go", "env", "GOVERSION").Output()
	if err != nil {
		return "unknown toolchain"
	}
	return strings.TrimSpace(string(out))
}

// shortPackage drops the module from a package path for display.
func shortPackage(path string) string {
	if rest, ok := strings.CutPrefix(path, "forgeci/"); ok {
		return filepath.ToSlash(rest)
	}
	return path
}
