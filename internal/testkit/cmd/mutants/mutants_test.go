package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every committed patch has a header that says what it breaks and by which
// assertion it dies, and applies to the code as it is.
func TestEveryPatchApplies(t *testing.T) {
	t.Parallel()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	all, err := loadPatches(filepath.Join(root, patchDir))
	if err != nil {
		t.Fatal(err)
	}
	sim, quick := 0, 0
	for _, p := range all {
		if _, err := p.apply(t.Context(), root, filepath.Join(t.TempDir(), p.name)); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		if p.tool == toolSim {
			sim++
		}
		if p.quick {
			quick++
		}
	}
	if len(all) < leastMutants || sim < leastBySim || quick == 0 {
		t.Errorf("%d mutants, %d for the simulation, %d quick", len(all), sim, quick)
	}
}

func TestAPatchThatDoesNotApplySaysSo(t *testing.T) {
	t.Parallel()
	root, dir := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "internal/a"), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "internal/a/a.go")
	if err := os.WriteFile(file, []byte("package a\n\n// A.\n\nconst n = 2\n\n// Z.\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := "Breaks: x\nTool: sim\nAssertion: I1\n\n--- a/internal/a/a.go\n+++ b/internal/a/a.go\n@@ -3,5 +3,5 @@\n // A.\n \n-const n = 1\n+const n = 3\n \n // Z.\n"
	p, err := parsePatch("stale", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	p.path = filepath.Join(root, "stale.patch")
	if err := os.WriteFile(p.path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := p.apply(t.Context(), root, filepath.Join(dir, "one")); err == nil || !strings.Contains(err.Error(), "does not apply any more") {
		t.Errorf("against other code: %v", err)
	}
	if err := os.WriteFile(file, []byte("package a\n\nconst moved = 0\n\n// A.\n\nconst n = 1\n\n// Z.\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	overlay, err := p.apply(t.Context(), root, filepath.Join(dir, "two"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "two/internal/a/a.go"))
	if err != nil || !strings.Contains(string(got), "n = 3") {
		t.Errorf("patched: %q, %v", got, err)
	}
	if b, err := os.ReadFile(file); err != nil || !strings.Contains(string(b), "n = 1") {
		t.Errorf("the tree was touched: %q, %v", b, err)
	}
	if b, err := os.ReadFile(overlay); err != nil || !strings.Contains(string(b), file) {
		t.Errorf("overlay: %s, %v", b, err)
	}
}

func TestAHeaderThatSaysTooLittleIsRefused(t *testing.T) {
	t.Parallel()
	const diff = "\n--- a/internal/a/a.go\n+++ b/internal/a/a.go\n"
	for name, text := range map[string]string{
		"no promise":       "Tool: sim\nAssertion: I1\n" + diff,
		"no assertion":     "Breaks: x\nTool: sim\n" + diff,
		"no tool":          "Breaks: x\nAssertion: I1\n" + diff,
		"a tool of others": "Breaks: x\nTool: test ./cmd/x TestX\nAssertion: I1\n" + diff,
		"no test":          "Breaks: x\nTool: test ./internal/x\nAssertion: I1\n" + diff,
		"a word too much":  "Breaks: x\nTool: sim\nAssertion: I1\nSeeds: 3\n" + diff,
		"no change":        "Breaks: x\nTool: sim\nAssertion: I1\n",
		"a test is broken": "Breaks: x\nTool: sim\nAssertion: I1\n\n+++ b/internal/a/a_test.go\n",
		"outside":          "Breaks: x\nTool: sim\nAssertion: I1\n\n+++ b/internal/../a.go\n",
	} {
		if _, err := parsePatch("p", []byte(text)); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// A mutant dies by the assertion that its patch names, and by nothing else.
func TestTheVerdictOnATest(t *testing.T) {
	t.Parallel()
	p := patch{tool: toolTest, test: "TestX", assertion: "was lost"}
	const named = "=== RUN   TestX\n    x_test.go:7: job 3 was lost\n--- FAIL: TestX (0.00s)\nFAIL\n"
	for _, c := range []struct {
		what, out string
		code      int
		wrong     string // empty: it is killed
	}{
		{"the named assertion", named, 1, ""},
		{"it in a subtest", "    --- FAIL: TestX/sqlite (0.01s)\n        x_test.go:7: job 3 was lost\n--- FAIL: TestX (0.01s)\n", 1, ""},
		{"no failure", "--- PASS: TestX (0.00s)\nPASS\n", 0, "survives"},
		{"another assertion", "    x_test.go:9: job 3 is late\n--- FAIL: TestX (0.00s)\n", 1, "not by"},
		{"the words in a log line", "    level=WARN msg=\"job was lost\"\n    x_test.go:9: late\n--- FAIL: TestX (0.00s)\n", 1, "not by"},
		{"another test", "    y_test.go:7: job 3 was lost\n--- FAIL: TestY (0.00s)\n", 1, "otherwise"},
		{"a panic", named + "panic: nil map\n", 2, "otherwise"},
		{"a panic of a test, which has exit code 2", "--- FAIL: TestX (0.00s)\npanic: job was lost [recovered]\n", 2, "otherwise"},
		{"a time that ran out", named + "panic: test timed out after 5m0s\n", 2, "otherwise"},
		{"an end by a signal", named, -1, "otherwise"},
	} {
		err := testVerdict(p, c.out, c.code)
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

func TestTheVerdictOnASliceOfSeeds(t *testing.T) {
	t.Parallel()
	p := patch{tool: toolSim, assertion: "I3 fencing"}
	detailed := patch{tool: toolSim, assertion: "rows agree: 2 winners"}
	const other = "    seeds_test.go:9: seed 4: LP-7 broken in step 3: job x\n"
	const mine = "    seeds_test.go:9: seed 5: I3 fencing broken in step -1: y: z\n"
	for _, c := range []struct {
		what  string
		p     patch
		out   string
		code  int
		seed  string
		wrong bool
	}{
		{"the named promise", p, other + mine, 1, "5", false},
		{"another promise", p, other, 1, "", false},
		{"a promise whose name begins alike", patch{assertion: "I3"}, mine, 1, "", false},
		{"all is well", p, "PASS\n", 0, "", false},
		{"a seed that did too little", p, "    seeds_test.go:9: seed 4: 3 steps and 0 faults are too few\n", 1, "", false},
		{"a panic", p, mine + "panic: x\n", 2, "", true},
		{"an end by a signal", p, mine, -1, "", true},
		{"a detail", detailed, "    a_test.go:9: seed 6: rows agree broken in step 1: job x has 2 winners\n", 1, "6", false},
		{"another detail", detailed, "    a_test.go:9: seed 6: rows agree broken in step 1: run x\n", 1, "", false},
	} {
		seed, err := simVerdict(c.p, c.out, c.code, map[string]int{})
		if seed != c.seed || (err != nil) != c.wrong {
			t.Errorf("%s: seed %q, %v", c.what, seed, err)
		}
	}
}
