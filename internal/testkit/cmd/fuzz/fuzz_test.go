package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestReadCountsTheLastLineOfProgress(t *testing.T) {
	t.Parallel()
	r := read(`fuzz: elapsed: 0s, gathering baseline coverage: 0/16 completed
fuzz: elapsed: 3s, execs: 100 (33/sec), new interesting: 1 (total: 17)
fuzz: elapsed: 6s, execs: 12345 (4081/sec), new interesting: 7 (total: 23)
PASS
`)
	if r.executions != 12345 || r.interesting != 7 || r.input != "" {
		t.Errorf("%+v", r)
	}
}

// The one failure that is none: Go's coordinator took the end of the time for it.
// Whatever else is said is a failure.
func TestTheEndOfTheTimeIsNoFailure(t *testing.T) {
	t.Parallel()
	const progress = "fuzz: elapsed: 0s, gathering baseline coverage: 0/16 completed\nfuzz: elapsed: 10s, execs: 100 (33/sec), new interesting: 1 (total: 17)\n"
	const ended = "--- FAIL: FuzzX (10.01s)\n    context deadline exceeded\nFAIL\n"
	for name, c := range map[string]struct {
		output string
		want   bool
	}{
		"the race":               {progress + ended, true},
		"without progress":       {ended, false},
		"another target":         {progress + strings.ReplaceAll(ended, "FuzzX", "FuzzXY"), false},
		"an input":               {progress + strings.TrimSuffix(ended, "FAIL\n") + "    Failing input written to testdata/fuzz/FuzzX/1\n    To re-run:\n    go test -run=FuzzX/1\nFAIL\n", false},
		"an input fails with it": {progress + "--- FAIL: FuzzX (1.01s)\n    --- FAIL: FuzzX (0.00s)\n        x_test.go:1: context deadline exceeded\n    \nFAIL\n", false},
		"a seed fails with it":   {progress + "failure while testing seed corpus entry: FuzzX/a\n" + ended, false},
		"a worker that died":     {progress + "--- FAIL: FuzzX (3.01s)\n    fuzzing process hung or terminated unexpectedly: exit status 2\nFAIL\n", false},
		"more behind it":         {progress + ended + "panic: x\n", false},
	} {
		if got := timeEnded("FuzzX", c.output); got != c.want {
			t.Errorf("%s: %v\n%s", name, got, c.output)
		}
	}
}

// A target that fails is named with the input that fails it, one without a
// committed corpus is refused, and the others are run all the same.
func TestAFailureNamesItsTargetAndItsInput(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module m\n\ngo 1.26\n",
		"m_test.go": `package m
import "testing"
func FuzzGood(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) {}) }
func FuzzBad(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) { if len(b) > 3 { t.Fatal("too long") } }) }
func FuzzBare(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) {}) }
func FuzzKnown(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) { if string(b) == "known" { t.Fatal("known") } }) }
`,
		"testdata/fuzz/FuzzGood/a":      "go test fuzz v1\n[]byte(\"a\")\n",
		"testdata/fuzz/FuzzBad/a":       "go test fuzz v1\n[]byte(\"a\")\n",
		"testdata/fuzz/FuzzKnown/known": "go test fuzz v1\n[]byte(\"known\")\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	var out strings.Builder
	s, err := run(t.Context(), &out, 2*time.Second, "", []string{"."})
	if err == nil || s.Targets != 4 || s.Failures != 3 || s.Seeds != 3 || s.Executions == 0 {
		t.Errorf("%+v, %v\n%s", s, err, out.String())
	}
	text := err.Error()
	for _, want := range []string{"m FuzzBad: fails on " + filepath.Join(dir, "testdata/fuzz/FuzzBad/"), "m FuzzBare: no committed corpus", "testdata/fuzz/FuzzKnown/known"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not say %q", text, want)
		}
	}
	for _, want := range []string{"testdata/fuzz/FuzzKnown/known:\ngo test fuzz v1\n[]byte(\"known\")\n", "too long"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s\ndoes not say %q", out.String(), want)
		}
	}
	if strings.Contains(text, "FuzzGood") || !strings.Contains(out.String(), "ok    m FuzzGood: 1 seeds") {
		t.Errorf("the good target: %s\n%s", text, out.String())
	}
}
