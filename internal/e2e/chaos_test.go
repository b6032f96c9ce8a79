package e2e_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"regexp"
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

// chaosChecks are the accounts that all of chaos writes.
func chaosChecks() []string {
	return []string{
		"R05", "R07", "R08", "R09", "R10", "R11", "R12", "R13", "R14-R25", "R15", "R15-sender",
		"R22-server", "R22-rolling", "R22-runner", "R23",
	}
}

// chaosSummary joins what the checks have written into the last line of `make
// chaos`. Each check that the pattern of -run selects whole must be there, and at
// least one: what is missing counts as failed.
func chaosSummary(dir, pattern string) (failed int, err error) {
	selects, err := regexp.Compile(pattern)
	if err != nil {
		return 0, err
	}
	files, err := filepath.Glob(filepath.Join(dir, "R*.json"))
	if err != nil {
		return 0, err
	}
	all := struct {
		Checks  map[string]map[string]int `json:"checks"`
		Missing []string                  `json:"missing,omitempty"`
		Failed  int                       `json:"failed"`
	}{Checks: map[string]map[string]int{}}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			return 0, err
		}
		counts := map[string]int{}
		if err := json.Unmarshal(b, &counts); err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		all.Failed += counts["failed"]
		all.Checks[strings.TrimSuffix(filepath.Base(name), ".json")] = counts
	}
	for _, check := range chaosChecks() {
		test := "TestChaos_"
		for part := range strings.SplitSeq(check, "-") {
			if strings.HasPrefix(part, "R") {
				test += part + "_"
			}
		}
		if all.Checks[check] == nil && selects.MatchString(test) {
			all.Missing = append(all.Missing, check)
		}
	}
	if len(all.Checks) == 0 && len(all.Missing) == 0 {
		all.Missing = []string{"all"}
	}
	all.Failed += len(all.Missing)
	line, err := json.Marshal(all)
	if err != nil {
		return 0, err
	}
	return all.Failed, os.WriteFile(filepath.Join(dir, "summary.json"), append(line, '\n'), 0o600)
}

// A check that was asked for and has not run is a failed one.
func TestAChaosCheckThatIsMissingFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ran     []string
		pattern string
		want    int
	}{
		"all":                  {chaosChecks(), "^TestChaos_", 0},
		"all but one":          {chaosChecks()[1:], "^TestChaos_", 1},
		"two parts of three":   {[]string{"R22-server", "R22-runner"}, "^TestChaos_R22", 1},
		"one part, asked for":  {[]string{"R22-rolling"}, "^TestChaos_R22_Rolling", 0},
		"one of two numbers":   {[]string{"R14-R25"}, "^TestChaos_R14", 0},
		"another was asked":    {[]string{"R05"}, "^TestChaos_R07", 1},
		"none":                 {nil, "^TestChaos_R99", 1},
		"each, and more tests": {chaosChecks(), "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for _, check := range c.ran {
				if err := os.WriteFile(filepath.Join(dir, check+".json"), []byte(`{"failed":0}`), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got, err := chaosSummary(dir, c.pattern); err != nil || got != c.want {
				t.Errorf("%d failed, want %d (%v)", got, c.want, err)
			}
		})
	}
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

// broken demands that a check that means to break something at n of points moments
// of a run has found as many moments as a run has at least, and has broken half of
// what it meant to: renewals make one run a little longer than another.
func broken(t *testing.T, what string, points, least, n, did int) {
	t.Helper()
	if points < least {
		t.Errorf("only %d %ss in a run, where there are %d at least: they were not noticed", points, what, least)
	}
	if did == 0 || did < n/2 {
		t.Errorf("%d of %d %ss were broken", did, n, what)
	}
}
