// Command mutants proves that the simulation and the tests notice defects: it
// applies each patch of internal/testkit/mutants to production code, and requires
// that the one assertion which the patch names fails.
//
//	mutants [-quick] [-only NAME,...] [-seeds N]
//
// First the tree without patches is shown to be green, with the same tests and
// the same seeds. A mutant compiles and passes go vet. It dies by its named
// assertion only: another failure, a panic, a time that ran out or an assertion
// of another name is no death. Patches are applied to copies that the compiler
// is given in place of the files (go build -overlay); the tree is not touched.
//
// It tells on standard error what it does; the last line of standard output is
// one JSON object. It ends with an error when a mutant did not die as it should.
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
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	only := flag.String("only", "", "run only these mutants, separated by commas")
	quick := flag.Bool("quick", false, "run only the mutants that are marked Quick")
	seeds := flag.Int("seeds", 120, "how many seeds of the simulation may be tried on a mutant")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	names := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	if err := run(ctx, os.Stdout, os.Stderr, names, *quick, *seeds); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		stop()
		os.Exit(1)
	}
}

// What a run over all mutants has to have at least.
const (
	leastMutants = 25
	leastBySim   = 15
)

// summary is the last line of standard output.
type summary struct {
	Total       int `json:"total"`
	Killed      int `json:"killed"`
	KilledBySim int `json:"killed_by_sim"`
	Survivors   int `json:"survivors"`
	// Survived names those that did not die by their assertion.
	Survived []string `json:"survived"`
	CPU      float64  `json:"cpu_s"`
}

func run(ctx context.Context, out, log io.Writer, only []string, quick bool, seeds int) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	all, err := loadPatches(filepath.Join(root, patchDir))
	if err != nil {
		return err
	}
	for _, name := range only {
		if !slices.ContainsFunc(all, func(p patch) bool { return p.name == name }) {
			return fmt.Errorf("there is no mutant %q in %s", name, patchDir)
		}
	}
	whole := len(only) == 0 && !quick
	chosen := slices.DeleteFunc(all, func(p patch) bool {
		return len(only) > 0 && !slices.Contains(only, p.name) || quick && !p.quick
	})
	if quick {
		seeds = min(seeds, quickSeeds)
	}
	temp, err := os.MkdirTemp("", "forgeci-mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp) // a leftover in the temporary directory harms nothing

	l := &lab{root: root, temp: temp, seeds: seeds, log: log}
	began := time.Now()
	if err := l.green(ctx, chosen); err != nil {
		return fmt.Errorf("the tree without patches is not green: %w", err)
	}
	l.logf("the tree without patches is green after %s", time.Since(began).Round(time.Second))
	sum, err := l.all(ctx, chosen)
	sum.CPU = childCPU().Seconds()
	l.logf("all took %s", time.Since(began).Round(time.Second))
	line, encodeErr := json.Marshal(sum)
	fmt.Fprintf(out, "%s\n", line)
	if whole && (sum.Total < leastMutants || sum.KilledBySim < leastBySim) {
		err = errors.Join(err, fmt.Errorf("%d mutants, %d of them killed by the simulation: at least %d and %d are promised",
			sum.Total, sum.KilledBySim, leastMutants, leastBySim))
	}
	return errors.Join(err, encodeErr)
}

// all runs mutants, as many at once as there are processors.
func (l *lab) all(ctx context.Context, chosen []patch) (summary, error) {
	sum := summary{Total: len(chosen), Survived: []string{}}
	var mu sync.Mutex
	var failed error
	var workers sync.WaitGroup
	work := make(chan patch)
	done := 0
	for range runtime.NumCPU() {
		workers.Go(func() {
			for p := range work {
				began := time.Now()
				how, err := l.kill(ctx, p)
				mu.Lock()
				done++
				if err == nil {
					sum.Killed++
					if p.tool == toolSim {
						sum.KilledBySim++
					}
					l.logf("%2d/%d %s: %s (%s)", done, len(chosen), p.name, how, time.Since(began).Round(100*time.Millisecond))
				} else {
					sum.Survivors++
					sum.Survived = append(sum.Survived, p.name)
					failed = errors.Join(failed, fmt.Errorf("%s: %w", p.name, err))
					l.logf("%2d/%d %s: NOT KILLED: %v", done, len(chosen), p.name, err)
				}
				mu.Unlock()
			}
		})
	}
	for _, p := range chosen {
		select {
		case work <- p:
		case <-ctx.Done():
			failed = errors.Join(failed, ctx.Err())
		}
		if ctx.Err() != nil {
			break
		}
	}
	close(work)
	workers.Wait()
	slices.Sort(sum.Survived)
	return sum, failed
}

func (l *lab) logf(format string, a ...any) { fmt.Fprintf(l.log, format+"\n", a...) }

// childCPU is the processor time of all processes that this one has waited for.
func childCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// moduleRoot is the nearest folder upwards that holds go.mod.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no go.mod here or above")
		}
		dir = filepath.Dir(dir)
	}
}
