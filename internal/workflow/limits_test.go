package workflow

import (
	"errors"
	"runtime"
	"runtime/metrics"
	"slices"
	"testing"
	"time"

	"forgeci/internal/ci"
)

// mustBeInvalid checks the promise of Parse's error and returns its fields.
func mustBeInvalid(t *testing.T, err error) []ci.FieldError {
	t.Helper()
	var e *ci.Error
	if !errors.As(err, &e) || !errors.Is(err, ci.ErrInvalid) {
		t.Fatalf("the error is %v (%T), want a *ci.Error of kind invalid", err, err)
	}
	if len(e.Fields) == 0 || len(e.Fields) > DefaultLimits().Problems {
		t.Fatalf("%d problems, want 1 to %d", len(e.Fields), DefaultLimits().Problems)
	}
	for _, f := range e.Fields {
		if f.File == "" || f.Line < 1 || f.Column < 1 || f.Detail == "" {
			t.Errorf("a problem without place or text: %+v", f)
		}
		if len(f.Detail) > 2000 {
			t.Errorf("a problem of %d bytes: %.200s…", len(f.Detail), f.Detail)
		}
	}
	return e.Fields
}

// peakHeap runs f and returns the most memory that was in use above what was
// in use before, sampled every 100 µs.
func peakHeap(f func()) uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() uint64 { metrics.Read(sample); return sample[0].Value.Uint64() }
	runtime.GC()
	before := read()
	stop, peak := make(chan struct{}), make(chan uint64)
	go func() {
		var most uint64
		tick := time.NewTicker(100 * time.Microsecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				peak <- most
				return
			case <-tick.C:
				most = max(most, read())
			}
		}
	}()
	f()
	close(stop)
	if most := <-peak; most > before {
		return most - before
	}
	return 0
}

// Not parallel: it measures time and memory.
func TestCase_S10_EveryBombIsJudgedWithinASecondAnd64MiB(t *testing.T) { //nolint:paralleltest // it measures time and memory
	all := bombs()
	for _, name := range sortedKeys(all) {
		data := []byte(all[name])
		t.Run(name, func(t *testing.T) {
			var err error
			var elapsed time.Duration
			var peak uint64
			for range 3 { // others use the machine too
				start := time.Now()
				peak = peakHeap(func() { _, err = Parse(".forgeci.yaml", data) })
				if elapsed = time.Since(start); elapsed <= time.Second || underRace {
					break
				}
			}
			t.Logf("%7.1f ms %6.1f MiB: %.150v", float64(elapsed.Microseconds())/1000, float64(peak)/(1<<20), err)
			if elapsed > time.Second && !underRace {
				t.Errorf("judged in %v, want at most 1 s", elapsed)
			}
			if peak > 64<<20 {
				t.Errorf("judged with %d bytes, want at most 64 MiB", peak)
			}
			if !slices.Contains(harmless(), name) {
				mustBeInvalid(t, err)
			} else if err != nil {
				t.Errorf("refused: %v", err)
			}
		})
	}
}

// harmless names the bombs that are only large: they are valid.
func harmless() []string {
	return []string{"matrix, exclude", "matrix, include", "conditions, short"}
}
