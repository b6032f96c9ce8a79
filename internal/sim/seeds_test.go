package sim

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
)

func TestMain(m *testing.M) {
	flag.Int("seeds", 30, "how many seeds TestSeeds runs")
	flag.Uint64("seed", 1, "the first seed")
	flag.Bool("next", false, "begin with the seed of testdata/next_seed, and keep there where to go on")
	flag.Bool("history", false, "print the history of the first seed")
	flag.Int("shrink", 200, "how many simulations may be spent on cutting the first failing seed down")
	flag.String("summary", "", "file for what TestSeeds comes to; its last line is one JSON object")
	flag.Parse()
	debug.SetGCPercent(400) // a simulation makes much garbage and keeps little
	os.Exit(m.Run())
}

func setting[T any](name string) T {
	v, _ := flag.Lookup(name).Value.(flag.Getter).Get().(T)
	return v
}

func hexSum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// summary is the last line of `make sim`.
type summary struct {
	Seeds      int         `json:"seeds"`
	Steps      int         `json:"steps"`
	Faults     int         `json:"faults"`
	Violations int         `json:"violations"`
	Stuck      int         `json:"stuck"`
	Distinct   int         `json:"distinct_traces"`
	Pairs      []string    `json:"state_pairs_reached"`
	Rejects    []ci.Reject `json:"reject_reasons_reached"`
	Speed      float64     `json:"simulated_s_per_cpu_s"`
}

// tally is what many seeds came to.
type tally struct {
	summary
	traces    map[string]bool
	pairs     map[string]int
	rejects   map[ci.Reject]int
	kinds     map[string]int
	events    map[string]int
	simulated time.Duration
}

func newTally() *tally {
	return &tally{traces: map[string]bool{}, pairs: map[string]int{}, rejects: map[ci.Reject]int{}, kinds: map[string]int{}, events: map[string]int{}}
}

func merge[T ~string](into, from map[T]int) {
	for k, n := range from {
		into[k] += n
	}
}

func (s *tally) add(r result) {
	s.Seeds++
	s.Steps += r.ran
	s.Faults += r.faults()
	s.traces[r.hash] = true
	s.simulated += r.simulated
	merge(s.pairs, r.pairs)
	merge(s.rejects, r.rejects)
	merge(s.kinds, r.kinds)
	merge(s.events, r.events)
	if r.violation != nil {
		s.Violations++
		if r.busy {
			s.Stuck++
		}
	}
}

func (s *tally) done(used time.Duration) {
	s.Distinct, s.Pairs, s.Rejects = len(s.traces), keysOf(s.pairs), keysOf(s.rejects)
	s.Speed = s.simulated.Seconds() / used.Seconds()
}

// lines are what `make sim` prints: what was counted, then the summary.
func (s *tally) lines(used time.Duration) (string, error) {
	var b strings.Builder
	for _, part := range []struct {
		what string
		n    map[string]int
	}{{"fault", s.kinds}, {"event", s.events}} {
		for _, k := range keysOf(part.n) {
			fmt.Fprintf(&b, "%s %d %s\n", part.what, part.n[k], k)
		}
	}
	fmt.Fprintf(&b, "CPU: %.0f ms a seed\n", float64(used.Milliseconds())/float64(max(s.Seeds, 1)))
	line, err := json.Marshal(s.summary)
	b.Write(append(line, '\n'))
	return b.String(), err
}

// TestSeeds simulates many seeds, one thread each, on all processors.
func TestSeeds(t *testing.T) { //nolint:paralleltest // its seeds are
	seeds, first := setting[int]("seeds"), setting[uint64]("seed")
	counter := filepath.Join("testdata", "next_seed")
	if setting[bool]("next") {
		text, err := os.ReadFile(counter)
		if err != nil {
			t.Fatal(err)
		}
		if first, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil {
			t.Fatal(err)
		}
		t.Logf("the first seed is %d", first)
	}
	configs, results := make([]config, seeds), make([]chan result, seeds)
	for i := range seeds {
		configs[i] = config{seed: first + uint64(i), steps: stepsPerSeed, history: i == 0 && setting[bool]("history")}
		results[i] = make(chan result, 1)
	}
	began := cpu()
	var next atomic.Int64
	for range runtime.GOMAXPROCS(0) {
		go func() {
			for i := next.Add(1) - 1; i < int64(seeds); i = next.Add(1) - 1 {
				results[i] <- simulate(configs[i])
			}
		}()
	}
	sum := newTally()
	for i, c := range configs {
		r := <-results[i]
		sum.add(r)
		for _, line := range r.lines {
			t.Log(line)
		}
		switch {
		case r.violation != nil:
			t.Errorf("seed %d: %v", c.seed, r.violation)
			if n := setting[int]("shrink"); sum.Violations == 1 && n > 0 {
				report(t, c, r, n)
			}
		case r.ran < fewestSteps || r.faults() < fewestFaults:
			t.Errorf("seed %d: %d steps and %d faults are too few", c.seed, r.ran, r.faults())
		}
	}
	used := cpu() - began
	sum.done(used)
	if seeds >= reachSeeds {
		demandReach(t, sum)
	}
	text, err := sum.lines(used)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(text)
	if name := setting[string]("summary"); name != "" {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Error(err)
		}
	}
	if setting[bool]("next") && !t.Failed() {
		if err := os.WriteFile(counter, fmt.Appendf(nil, "%d\n", first+uint64(seeds)), 0o644); err != nil {
			t.Error(err)
		}
	}
}

// demandReach requires that a large run has been everywhere.
func demandReach(t *testing.T, sum *tally) {
	t.Helper()
	for _, s := range missing(pairs(), sum.pairs) {
		t.Errorf("state pair %q was not reached", s)
	}
	for _, s := range missing(ci.Rejects(), sum.rejects) {
		t.Errorf("nothing was rejected as %q", s)
	}
	for _, s := range missing(faultKinds(), sum.kinds) {
		t.Errorf("fault %q did not happen", s)
	}
	for _, s := range missing(sometimes(), sum.events) {
		t.Errorf("it never happened: %s", s)
	}
	if 100*sum.Distinct < 95*sum.Seeds {
		t.Errorf("%d seeds have %d different traces", sum.Seeds, sum.Distinct)
	}
}

// report shrinks a failing seed and prints what is left of it.
func report(t *testing.T, c config, r result, budget int) {
	t.Helper()
	small, again := shrink(c, r, budget)
	t.Logf("seed %d is cut down to %d steps and %d faults: %v", c.seed, again.ran, again.faults(), again.violation)
	var kept []int
	for i := range small.steps {
		if !small.drop[i] && (small.from == 0 || i < small.from) {
			kept = append(kept, i)
		}
	}
	t.Logf("its steps: %v", kept)
	for _, line := range again.lines {
		t.Log(line)
	}
}
