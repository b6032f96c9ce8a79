package main

import (
	"errors"
	"os"
	"strings"
	"testing"
)

const passing = `{"Action":"start","Package":"forgeci/internal/a"}
{"Action":"run","Package":"forgeci/internal/a","Test":"TestX"}
{"Action":"run","Package":"forgeci/internal/a","Test":"TestX/one"}
{"Action":"pass","Package":"forgeci/internal/a","Test":"TestX/one"}
{"Action":"run","Package":"forgeci/internal/a","Test":"TestX/two"}
{"Action":"pass","Package":"forgeci/internal/a","Test":"TestX/two"}
{"Action":"pass","Package":"forgeci/internal/a","Test":"TestX"}
{"Action":"pass","Package":"forgeci/internal/a","Elapsed":0.5}
`

func collect(t *testing.T, stream string) *results {
	t.Helper()
	r := newResults(func(*packageResult) {})
	if err := r.read(strings.NewReader(stream)); err != nil {
		t.Fatal(err)
	}
	r.finish()
	return r
}

func TestCountsAndVerdict(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, stream string
		want         counts
		shows        string // in the failures
		versions     []string
		testErr      error
		verdict      string // empty for a green run
	}{
		{"a test with subtests counts as its subtests", passing, counts{2, 0, 0}, "", []string{"PostgreSQL 15.18"}, nil, ""},
		{"a failing subtest counts once and is shown", `{"Action":"output","Package":"p","Test":"TestX/one","Output":"want 1\n"}
{"Action":"fail","Package":"p","Test":"TestX/one"}
{"Action":"pass","Package":"p","Test":"TestX/two"}
{"Action":"fail","Package":"p","Test":"TestX"}
{"Action":"fail","Package":"p"}`, counts{1, 1, 0}, "=== FAILED p TestX/one\nwant 1\n", nil, errors.New("exit status 1"), "1 tests failed"},
		{"a parent that fails by itself counts", `{"Action":"pass","Package":"p","Test":"TestX/one"}
{"Action":"fail","Package":"p","Test":"TestX"}
{"Action":"fail","Package":"p"}`, counts{1, 1, 0}, "=== FAILED p TestX\n", nil, errors.New("exit status 1"), "1 tests failed"},
		{"a skipped test is no green run", `{"Action":"pass","Package":"p","Test":"TestY"}
{"Action":"output","Package":"p","Test":"TestX","Output":"not today\n"}
{"Action":"skip","Package":"p","Test":"TestX"}
{"Action":"pass","Package":"p"}`, counts{1, 0, 1}, "=== SKIPPED p TestX\nnot today\n", nil, nil, "1 tests were skipped"},
		{"a package that does not build is a failure with the compiler's words", `{"ImportPath":"p [p.test]","Action":"build-output","Output":"./x.go:1: undefined: y\n"}
{"ImportPath":"p [p.test]","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}`, counts{0, 1, 0}, "./x.go:1: undefined: y\n", nil, errors.New("exit status 1"), "1 tests failed"},
		{"a test that never ends is a failure", `{"Action":"output","Package":"p","Test":"TestX","Output":"panic: out of time\n"}
{"Action":"fail","Package":"p"}`, counts{0, 1, 0}, "=== NEVER ENDED p TestX\npanic: out of time\n", nil, errors.New("exit status 1"), "1 tests failed"},
		{"a run that is cut is a failure", `{"Action":"pass","Package":"p","Test":"TestX"}`, counts{1, 1, 0}, "=== FAILED p\n", nil, nil, "1 tests failed"},
		{"no test at all", `{"Action":"skip","Package":"p"}`, counts{}, "", nil, nil, "no test ran"},
		{"a failure that no test explains", passing, counts{2, 0, 0}, "", nil, errors.New("go test: exit status 2"), "exit status 2"},
		{"a run that did not talk to the database", passing, counts{2, 0, 0}, "", []string{"git 2.39"}, nil, "no test talked to PostgreSQL"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := collect(t, c.stream)
			if got := r.total(); got != c.want {
				t.Errorf("counts %+v, want %+v", got, c.want)
			}
			var failures strings.Builder
			for _, p := range r.sorted() {
				failures.WriteString(p.failures())
			}
			if !strings.Contains(failures.String(), c.shows) || c.shows == "" && failures.Len() > 0 {
				t.Errorf("failures show %q, want %q in them", failures.String(), c.shows)
			}
			err := verdict(r.total(), c.versions, []string{"PostgreSQL"}, c.testErr)
			if c.verdict == "" && err != nil || c.verdict != "" && (err == nil || !strings.Contains(err.Error(), c.verdict)) {
				t.Errorf("verdict %v, want %q", err, c.verdict)
			}
		})
	}
}

func TestCasesNeedATestOrAReason(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ line, want string }{
		{"LOG-03  test  TestCase_LOG_03.*", ""},
		{"SRC-05  waits  code hosts: large files come from a host", ""},
		{"LOG-03", "neither a test nor a reason"},
		{"LOG-03 test", "names no test"},
		{"LOG-03 test (", "names no test"},
		{"LOG-03 waits", "no reason"},
		{"LOG-03 waits code hosts", "no reason"},
		{"LOG-3 test X", "not the ID"},
		{"LOG-03 test A\nLOG-03 test B", "listed twice"},
		{"LOG-03 test A\nLOG-03 waits b: c", ""},
		{"LOG-03 waits b: c\nLOG-03 test A", "listed twice"},
		{"LOG-03 test A\nLOG-03 waits b: c\nLOG-03 waits d: e", "listed twice"},
	} {
		_, err := parseCases(c.line)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: %v, want %q", c.line, err, c.want)
		}
	}
}

func TestCasesAreProvedByPassingTestsOnly(t *testing.T) {
	t.Parallel()
	cases, err := parseCases(`
# a comment
RUN-01 test TestCase_RUN_01.*
RUN-02 test TestCase_RUN_02
RUN-03 test TestCase_RUN_03
RUN-03 waits retention: what is deleted
LOG-01 test TestCase_LOG_01
SRC-05 waits code hosts: large files come from a host`)
	if err != nil {
		t.Fatal(err)
	}
	r := collect(t, `{"Action":"pass","Package":"p","Test":"TestCase_RUN_01_partition"}
{"Action":"pass","Package":"p","Test":"TestCase_RUN_01_cancel"}
{"Action":"pass","Package":"p","Test":"TestCase_RUN_02_longer"}
{"Action":"pass","Package":"p","Test":"TestCase_RUN_03"}
{"Action":"skip","Package":"p","Test":"TestCase_LOG_01"}
{"Action":"pass","Package":"p"}`)
	var out strings.Builder
	proved, partly, waiting, broken := printCases(&out, cases, r)
	if proved != 1 || partly != 1 || waiting != 1 || broken != 2 || !strings.Contains(out.String(), "RUN-03    waits in part for retention: what is deleted\n") {
		t.Errorf("%d proved, %d in part, %d waiting, %d broken; want 1, 1, 1, 2\n%s", proved, partly, waiting, broken, out.String())
	}
}

// TestCommittedCasesAreComplete holds the committed list to the areas that it
// promises, numbered without a hole.
func TestCommittedCasesAreComplete(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../cases.txt")
	if err != nil {
		t.Fatal(err)
	}
	cases, err := parseCases(string(text))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, c := range cases {
		area, _, _ := strings.Cut(c.id, "-")
		got[area]++
		if want := area + "-" + string('0'+rune(got[area]/10)) + string('0'+rune(got[area]%10)); c.id != want {
			t.Errorf("%s comes where %s is expected", c.id, want)
		}
	}
	for area, want := range map[string]int{"RUN": 5, "CAN": 4, "LOG": 11, "SRC": 7, "ART": 5, "RERUN": 4, "DB": 5, "CLI": 4} {
		if got[area] != want {
			t.Errorf("%d cases of area %s, want %d", got[area], area, want)
		}
	}
}
