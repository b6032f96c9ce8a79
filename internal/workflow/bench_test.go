package workflow

import (
	"fmt"
	"strings"
	"testing"
)

// thousandJobs is a file at the limit: 1,000 jobs with needs, labels,
// conditions and two steps each, in chains of ten.
func thousandJobs() []byte {
	var b strings.Builder
	b.WriteString("version: 1\nenv: {CI_LEVEL: full}\ndefaults: {runs_on: [linux], timeout: 20m}\njobs:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  job-%d:\n", i)
		if i%10 != 0 {
			fmt.Fprintf(&b, "    needs: job-%d\n", i-1)
		}
		if i%100 == 1 {
			fmt.Fprintf(&b, "    if: always() && needs[\"job-%d\"].conclusion != \"skipped\"\n", i-1)
		}
		fmt.Fprintf(&b, "    steps:\n      - make build-%d\n      - run: |\n          set -x\n          make test-%d\n", i, i)
	}
	return []byte(b.String())
}

func TestAFileOfAThousandJobsIsValid(t *testing.T) {
	t.Parallel()
	if got := len(planOf(t, string(thousandJobs())).Jobs); got != 1000 {
		t.Errorf("%d jobs", got)
	}
}

func BenchmarkParse(b *testing.B) {
	data := thousandJobs()
	b.Run("1000_jobs", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Parse("w.yaml", data); err != nil {
				b.Fatal(err)
			}
		}
	})
	small := []byte("version: 1\njobs: {a: {steps: [make]}}\n")
	b.Run("one_job", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Parse("w.yaml", small); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkCompile(b *testing.B) {
	f, err := Parse("w.yaml", thousandJobs())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := f.Compile(CompileOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEvalJobIf(b *testing.B) {
	c := IfContext{Needs: map[string]Need{"build": {Conclusion: "success"}}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := EvalJobIf(`always() && needs.build.conclusion == "success"`, c); err != nil {
			b.Fatal(err)
		}
	}
}
