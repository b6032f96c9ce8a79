// Package spec holds the models of what must hold at every moment, whatever
// happens in whatever order: who owns a job, which bytes of its log are safe, and
// what the outside is told. They are written in Promela and checked by Spin, which
// visits every state that they can reach. `make spec` does that; docs/model.md says
// where each action and property is in the code.
//
// A model is worth what it can notice. So each has broken variants: the same model
// with one rule taken away by a BROKEN_ name. Such a variant must fail, and by the
// property that the rule is there for.
package spec

import (
	"embed"
	"fmt"
	"regexp"
	"slices"
)

//go:embed *.pml
var files embed.FS

// Models are the files.
func Models() []string { return []string{"lease", "log", "outbox"} }

// Text returns a model's source.
func Text(model string) ([]byte, error) { return files.ReadFile(model + ".pml") }

// Check is one run of the checker: a model in one size, with or without a rule.
type Check struct {
	Model string
	// Size names the run among those of its model.
	Size string
	// Define holds the constants of the size, NAME=VALUE.
	Define []string
	// Formula is the one to check; empty means every assertion, and that nothing
	// is stuck.
	Formula string
	// Broken is the rule that is taken away, Fails the property that must notice.
	Broken, Fails string
}

// Name tells checks apart.
func (c Check) Name() string {
	if c.Broken != "" {
		return c.Model + "-" + c.Broken
	}
	return c.Model + "-" + c.Size
}

// Checks returns all runs: the good models first, the largest of them at the
// start.
func Checks() []Check {
	var all []Check
	good := func(model, size, formula string, define ...string) {
		all = append(all, Check{Model: model, Size: size, Formula: formula, Define: define})
	}
	// Every fault once, in two attempts.
	good("lease", "faults", "", "BUDGET=2")
	// Three runners, three attempts.
	good("lease", "runners", "", "R=3", "BUDGET=3", "LATE=0", "LOST=0", "FENCES=0")
	// The policy grants another attempt behind user code.
	good("lease", "policy", "", "BUDGET=2", "RETRY=1", "LOST=0", "FENCES=0")
	// Two jobs, one attempt each: a claim must not get a second one.
	good("lease", "jobs", "", "J=2", "BUDGET=1", "CRASHES=0", "FENCES=0", "CANCELS=0")
	good("lease", "ends", "everything_ends", "BUDGET=2", "LOST=0", "FENCES=0")
	// One log of three chunks, two faults.
	good("log", "chunks", "", "E=1", "C=3")
	// Two attempts, one after the other, two nodes.
	good("log", "attempts", "", "C=2", "FAULTS=1")
	good("log", "ends", "everything_is_sealed", "E=1", "C=2")
	good("outbox", "faults", "")
	good("outbox", "ends", "final_is_told", "V=3", "FAULTS=2")

	broken := func(model, property, rule string, define ...string) {
		c := Check{Model: model, Define: define, Broken: rule, Fails: property}
		if slices.Contains([]string{"everything_ends", "everything_is_sealed", "final_is_told"}, property) {
			c.Formula = property
		}
		all = append(all, c)
	}
	small := []string{"BUDGET=2"}
	broken("lease", "no_stale_accept", "NO_FENCE", small...)
	broken("lease", "no_stale_accept", "GUARD_ONCE", small...)
	broken("lease", "winner_is_current", "STATE_ONLY", "BUDGET=2", "RETRY=1")
	broken("lease", "one_winner", "REPEAT_DECIDES", small...)
	broken("lease", "epoch_rises", "EPOCH_KEPT", small...)
	broken("lease", "one_job_a_claim", "CLAIM_FORGETS", small...)
	broken("lease", "no_rerun_on_a_guess", "GUESS", small...)
	broken("lease", "no_rerun_on_a_guess", "RUN_FIRST", small...)
	broken("lease", "told_is_stored", "ANSWER_FIRST", small...)
	broken("lease", "cancel_is_final", "CANCEL_IGNORED", small...)
	broken("lease", "cancelled_is_over", "TIMEOUT_CANCELS", small...)
	broken("lease", "cancelled_is_over", "READY_IS_OVER", small...)
	broken("lease", "slots_are_true", "SLOT_FREED", small...)
	broken("lease", "slots_are_true", "OLD_LIFE_OPENS", small...)
	broken("lease", "reserved_once", "REPEAT_RELEASES", small...)
	broken("lease", "everything_ends", "REPORT_DROPPED", small...)
	broken("lease", "everything_ends", "GHOSTS", small...)
	broken("log", "acked_is_stored", "ACK_ON_ARRIVAL")
	broken("log", "acked_is_stored", "ACK_BEFORE_INDEX")
	broken("log", "acked_is_stored", "OFF_BY_ONE")
	broken("log", "acked_is_stored", "ACK_AHEAD")
	broken("log", "acked_is_stored", "NO_AGE")
	broken("log", "acked_is_stored", "SEAL_UNVERIFIED")
	broken("log", "stored_once", "NO_SEQUENCE")
	broken("log", "no_stale_append", "NO_FENCE")
	broken("log", "refused_is_stale", "GROUP_FAILS")
	broken("log", "everything_is_sealed", "ONE_SEAL_TRY", "E=1", "C=2")
	broken("outbox", "told_is_true", "BEFORE_COMMIT")
	broken("outbox", "final_is_kept", "TWO_TRANSACTIONS")
	broken("outbox", "final_is_kept", "DELETED_FIRST")
	broken("outbox", "final_is_kept", "FIRST_ROW")
	broken("outbox", "final_is_kept", "DELETES_UNSEEN")
	broken("outbox", "final_is_kept", "TAKEN_TWICE")
	broken("outbox", "final_is_told", "NO_RELEASE", "V=3", "FAULTS=2")
	return all
}

// Properties returns the names that a model's text asserts, and its formula.
func Properties(text []byte) (assertions []string, formula string, err error) {
	for _, m := range regexp.MustCompile(`assert\((\w+)\)`).FindAllSubmatch(text, -1) {
		assertions = append(assertions, string(m[1]))
	}
	m := regexp.MustCompile(`(?m)^ltl (\w+) `).FindSubmatch(text)
	if m == nil || len(assertions) == 0 {
		return nil, "", fmt.Errorf("the model has no assertion or no formula")
	}
	return assertions, string(m[1]), nil
}

// Rules returns the BROKEN_ names of a model's text, each once.
func Rules(text []byte) []string {
	var rules []string
	for _, m := range regexp.MustCompile(`BROKEN_(\w+)`).FindAllSubmatch(text, -1) {
		rules = append(rules, string(m[1]))
	}
	slices.Sort(rules)
	return slices.Compact(rules)
}
