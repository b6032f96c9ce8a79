package main

import (
	"strings"
	"testing"

	"forgeci/internal/sim/spec"
)

// What Spin 6.5.2 prints, cut to what counts.
const (
	printedGood = `
(Spin Version 6.5.2 -- 6 December 2019)
	+ Partial Order Reduction

State-vector 84 byte, depth reached 497, errors: 0
  1892519 states, stored
  7692739 states, matched
`
	printedAssertion = `pan:1: assertion violated no_stale_accept (at depth 243)
pan: wrote lease.pml.trail

(Spin Version 6.5.2 -- 6 December 2019)
Warning: Search not completed
	+ Partial Order Reduction

State-vector 84 byte, depth reached 420, errors: 1
     1355 states, stored
`
	printedCycle = `pan:1: acceptance cycle (at depth 266)
pan: wrote lease.pml.trail
Warning: Search not completed

State-vector 92 byte, depth reached 420, errors: 1
     2456 states, stored (4892 visited)
`
	printedStuck = `pan:1: invalid end state (at depth 563)
pan: wrote log.pml.trail
Warning: Search not completed

State-vector 100 byte, depth reached 564, errors: 1
       47 states, stored
`
	printedCut = `pan: reached -DMEMLIM bound
Warning: Search not completed

State-vector 84 byte, depth reached 497, errors: 0
  1.5e+07 states, stored
`
	printedShallow = `error: max search depth too small
State-vector 84 byte, depth reached 99, errors: 0
  100 states, stored
`
)

func TestTheCheckersWordsAreUnderstood(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		out, violated string
		states        int64
		fails         bool
	}{
		"good":            {out: printedGood, states: 1892519},
		"assertion":       {out: printedAssertion, violated: "no_stale_accept", states: 1355},
		"cycle":           {out: printedCycle, violated: "everything_ends", states: 2456},
		"stuck":           {out: printedStuck, violated: "invalid end state", states: 47},
		"out of memory":   {out: printedCut, fails: true},
		"too shallow":     {out: printedShallow, fails: true},
		"nothing":         {out: "sh: 1: pan: not found\n", fails: true},
		"unnamed error":   {out: strings.Replace(printedGood, "errors: 0", "errors: 1", 1), fails: true},
		"uncounted error": {out: strings.Replace(printedAssertion, "errors: 1", "errors: 0", 1), fails: true},
	} {
		states, violated, err := read(c.out, "everything_ends")
		if (err != nil) != c.fails || states != c.states || violated != c.violated {
			t.Errorf("%s: %d states, %q violated, %v", name, states, violated, err)
		}
	}
}

// The verdict is red for each thing that is not as it must be, alone.
func TestTheVerdict(t *testing.T) {
	t.Parallel()
	checks := spec.Checks()
	good := func() []outcome {
		out := make([]outcome, len(checks))
		for i, c := range checks {
			out[i] = outcome{states: leastStates, violated: c.Fails}
		}
		return out
	}
	variants := 0
	firstGood, firstBroken := -1, -1
	for i, c := range checks {
		switch {
		case c.Broken != "":
			variants++
			firstBroken = max(firstBroken, i)
		case firstGood < 0:
			firstGood = i
		}
	}
	failures := make([]error, len(checks))
	total, wrong := judge(checks, good(), failures, true)
	if len(wrong) > 0 || total.Errors != 0 || total.Broken != variants || total.States != leastStates*int64(len(checks)-variants) {
		t.Errorf("all is well, and the verdict is %+v, %v", total, wrong)
	}
	for name, spoil := range map[string]func([]outcome){
		"a good model is violated":            func(o []outcome) { o[firstGood].violated = "one_winner" },
		"a broken variant passes":             func(o []outcome) { o[firstBroken].violated = "" },
		"a broken variant fails by another":   func(o []outcome) { o[firstBroken].violated = "invalid end state" },
		"the models are too small everywhere": func(o []outcome) { shrink(checks, o) },
	} {
		o := good()
		spoil(o)
		if _, wrong := judge(checks, o, failures, true); len(wrong) == 0 {
			t.Errorf("%s, and the verdict is green", name)
		}
	}
}

// shrink makes every size of the first model one state too small.
func shrink(checks []spec.Check, o []outcome) {
	for i, c := range checks {
		if c.Model == spec.Models()[0] && c.Broken == "" {
			o[i].states = leastStates - 1
		}
	}
}
