// Command spec checks the models of internal/sim/spec with Spin and a C compiler.
//
//	spec [-only WORDS]
//
// Good models must hold in every state that they can reach, and each must reach
// more than 100,000; broken variants must fail, each by the property that its rule
// is there for. It tells on standard error what it does, and its last line on
// standard output is one JSON object. It ends with an error when anything is not
// as it must be. Its temporary files are removed.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"forgeci/internal/sim/spec"
)

func main() {
	only := flag.String("only", "", "run only checks whose name contains one of these words, separated by commas")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	words := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	if err := run(ctx, os.Stdout, os.Stderr, words); err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		stop()
		os.Exit(1)
	}
}

// leastStates is what the largest size of each model must reach.
const leastStates = 100_000

// summary is the last line.
type summary struct {
	States int64 `json:"states"` // of the good models together
	Errors int   `json:"errors"` // of the good models
	Broken int   `json:"broken_variants_failed"`
}

func run(ctx context.Context, stdout, stderr io.Writer, only []string) error {
	checks := slices.DeleteFunc(spec.Checks(), func(c spec.Check) bool {
		return len(only) > 0 && !slices.ContainsFunc(only, func(word string) bool { return strings.Contains(c.Name(), word) })
	})
	if len(checks) == 0 {
		return errors.New("no check has such a name")
	}
	dir, err := os.MkdirTemp("", "forgeci-spec-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // a leftover in the temporary directory harms nothing
	began := time.Now()
	outcomes := make([]outcome, len(checks))
	failures := make([]error, len(checks))
	next := make(chan int)
	var tell sync.Mutex
	var workers sync.WaitGroup
	for range runtime.NumCPU() {
		workers.Go(func() {
			for i := range next {
				outcomes[i], failures[i] = perform(ctx, dir, checks[i])
				if ctx.Err() != nil {
					continue // interrupted: that is said once, at the end
				}
				tell.Lock()
				fmt.Fprintln(stderr, line(checks[i], outcomes[i], failures[i]))
				tell.Unlock()
			}
		})
	}
	for i := range checks {
		next <- i
	}
	close(next)
	workers.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	total, wrong := judge(checks, outcomes, failures, len(only) == 0)
	fmt.Fprintf(stderr, "%d checks in %s\n", len(checks), time.Since(began).Round(time.Second))
	text, err := json.Marshal(total)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(stdout, "%s\n", text); err != nil {
		return err
	}
	return errors.Join(wrong...)
}

// line tells of one check.
func line(c spec.Check, o outcome, failed error) string {
	s := fmt.Sprintf("%-26s", c.Name())
	switch {
	case failed != nil:
		return s + " NOT DONE: " + failed.Error()
	case c.Broken != "" && o.violated == c.Fails:
		s += " fails as it must: " + o.violated
	case c.Broken != "":
		s += fmt.Sprintf(" WRONG: %s should have failed, it was %q", c.Fails, o.violated)
	case o.violated != "":
		s += " BROKEN: " + o.violated + "\n" + o.history
	default:
		s += fmt.Sprintf(" holds in %d states", o.states)
		if c.Formula != "" {
			s += ": " + c.Formula
		}
	}
	return s + fmt.Sprintf(" (%.1f s of CPU)", o.cpu.Seconds())
}

// judge counts, and says what is not as it must be. whole says that every check
// was run.
func judge(checks []spec.Check, outcomes []outcome, failures []error, whole bool) (summary, []error) {
	var total summary
	var wrong []error
	largest := map[string]int64{}
	for i, c := range checks {
		o := outcomes[i]
		switch {
		case failures[i] != nil:
			wrong = append(wrong, fmt.Errorf("%s: %w", c.Name(), failures[i]))
			if c.Broken == "" {
				total.Errors++
			}
		case c.Broken != "" && o.violated != c.Fails:
			wrong = append(wrong, fmt.Errorf("%s: violates %q, must violate %q", c.Name(), o.violated, c.Fails))
		case c.Broken != "":
			total.Broken++
		case o.violated != "":
			total.Errors++
			wrong = append(wrong, fmt.Errorf("%s: violates %s", c.Name(), o.violated))
		default:
			total.States += o.states
			largest[c.Model] = max(largest[c.Model], o.states)
		}
	}
	for _, model := range spec.Models() {
		if whole && largest[model] < leastStates {
			wrong = append(wrong, fmt.Errorf("%s: %d states are too few to say anything, %d are needed", model, largest[model], leastStates))
		}
	}
	slices.SortStableFunc(wrong, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return total, wrong
}
