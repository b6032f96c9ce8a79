package workflow

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"forgeci/internal/ci"
)

// FuzzParse checks, for any bytes: no panic, a typed error with places, and for
// a valid file the same plan twice, within the limits. The corpus is the golden
// files and testdata/fuzz/FuzzParse, where bomb-* are the beginnings of bombs.
func FuzzParse(f *testing.F) {
	for _, dir := range []string{"plan", "invalid"} {
		files, err := filepath.Glob(filepath.Join("testdata", dir, "*.txtar"))
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add([]byte(section(txtar.Parse(data), "workflow.yaml")))
		}
	}
	for _, text := range hostileTexts() {
		f.Add([]byte("version: 1\nname: " + text[:min(len(text), 100)] + "\njobs: {a: {steps: [x]}}\n"))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("w.yaml", data)
		if err != nil {
			mustBeInvalid(t, err)
			return
		}
		limits := DefaultLimits()
		plan, err := file.Compile(CompileOptions{Event: true})
		if err != nil {
			if !errors.Is(err, ci.ErrInvalid) || file.On.Manual == nil {
				t.Fatalf("a valid file without inputs is not compiled: %v", err)
			}
			return
		}
		if len(plan.Jobs) == 0 || len(plan.Jobs) > limits.Jobs {
			t.Fatalf("%d jobs", len(plan.Jobs))
		}
		seen := map[string]bool{}
		for _, j := range plan.Jobs {
			if seen[j.Name] {
				t.Fatalf("two jobs are called %q", j.Name)
			}
			seen[j.Name] = true
			if len(j.Steps) == 0 || len(j.Steps) > limits.Steps || j.Timeout <= 0 {
				t.Fatalf("job %q: %d steps, timeout %v", j.Name, len(j.Steps), j.Timeout)
			}
			for _, s := range j.Steps {
				if strings.TrimSpace(s.Run) == "" || s.Name == "" || strings.ContainsRune(s.Run, 0) {
					t.Fatalf("job %q holds the step %+v", j.Name, s)
				}
			}
			for _, n := range j.Needs {
				if _, err := EvalJobIf(j.If, IfContext{Needs: map[string]Need{n: {Conclusion: ci.ConclusionSuccess}}}); err != nil && ci.KindOf(err) != ci.ErrInvalid {
					t.Fatal(err)
				}
			}
		}
		first, err := json.Marshal(plan)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("w.yaml", data)
		if err != nil {
			t.Fatalf("valid once: %v", err)
		}
		second, err := again.Compile(CompileOptions{Event: true})
		if err != nil {
			t.Fatal(err)
		}
		if text, err := json.Marshal(second); err != nil || string(text) != string(first) {
			t.Fatalf("two plans of the same bytes (%v)", err)
		}
	})
}
