package e2e_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The tests named TestChaos_Rnn are the fault tests of `make chaos`: each makes
// one check of the reliability list on real processes. `go test` runs one
// case of each in a size of some seconds; the flags make them as thorough as
// wanted.

// chaosFlags defines the sizes.
func chaosFlags() {
	flag.Bool("all", false, "every case of every check, not one that the seed chooses")
	flag.Int("points", 1, "R05, R11: how many commits, and calls of the object store, are broken, each before and after; 0 is every one")
	flag.Int("rounds", 1, "how often checks are repeated that choose their moment at random")
	flag.Int("cuts", 5, "R12: at how many moments the power fails")
	flag.Uint64("seed", 1, "where random choices begin")
	flag.String("summary", "", "directory for one file a check, and summary.json, which joins them")
}

func setting[T any](name string) T {
	v, _ := flag.Lookup(name).Value.(flag.Getter).Get().(T)
	return v
}

// tally counts what a check has tried and what of it held. It is written into
// the summary's directory when the check ends.
type tally struct {
	mu     sync.Mutex
	counts map[string]int // guarded by mu
}

// newTally begins the account of a check, "R05".
func newTally(t *testing.T, check string) *tally {
	t.Helper()
	s := &tally{counts: map[string]int{}}
	t.Cleanup(func() {
		dir := setting[string]("summary")
		if dir == "" {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.counts["failed"] = 0
		if t.Failed() {
			s.counts["failed"] = 1
		}
		b, err := json.Marshal(s.counts)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, check+".json"), b, 0o600)
		}
		if err != nil {
			t.Errorf("summary of %s: %v", check, err)
		}
	})
	return s
}

func (s *tally) add(what string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what] += n
}

// most keeps the largest value.
func (s *tally) most(what string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what] = max(s.counts[what], n)
}

// chaosSummary joins what the checks have written into the last line of `make
// chaos`.
func chaosSummary(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "R*.json"))
	if err != nil {
		return err
	}
	all := struct {
		Checks map[string]map[string]int `json:"checks"`
		Failed int                       `json:"failed"`
	}{Checks: map[string]map[string]int{}}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		counts := map[string]int{}
		if err := json.Unmarshal(b, &counts); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		all.Failed += counts["failed"]
		all.Checks[strings.TrimSuffix(filepath.Base(name), ".json")] = counts
	}
	line, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "summary.json"), append(line, '\n'), 0o600)
}

// some returns the cases of a check that are to run.
func some[T any](check string, cases map[string]T) map[string]T {
	if setting[bool]("all") {
		return cases
	}
	names := slices.Sorted(maps.Keys(cases))
	h := fnv.New32()
	_, _ = h.Write([]byte(check)) // never fails
	name := names[(uint64(h.Sum32())+setting[uint64]("seed"))%uint64(len(names))]
	return map[string]T{name: cases[name]}
}

// spread chooses n numbers of 1 to most, evenly; all if n is 0.
func spread(most, n int) []int {
	if n == 0 || n >= most {
		n = most
	}
	all := map[int]bool{}
	for i := range n {
		all[1+(2*i+1)*most/(2*n)] = true
	}
	return slices.Sorted(maps.Keys(all))
}
