package workflow

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"forgeci/internal/ci"
)

var update = flag.Bool("update", false, "rewrite the golden files") //nolint:gochecknoglobals // a test flag

// golden runs every txtar file of a directory: "workflow.yaml" in, "want" out,
// and "inputs" (NAME=value lines) and "jobs" (a name a line) where they matter.
func golden(t *testing.T, dir string, run func(t *testing.T, a *txtar.Archive) string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", dir, "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files in %s (%v)", dir, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := run(t, a)
			want := section(a, "want")
			if *update {
				setSection(a, "want", got)
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("want -, got +:\n%s", diff)
			}
		})
	}
}

func section(a *txtar.Archive, name string) string {
	for _, f := range a.Files {
		if f.Name == name {
			return string(f.Data)
		}
	}
	return ""
}

func setSection(a *txtar.Archive, name, data string) {
	for i := range a.Files {
		if a.Files[i].Name == name {
			a.Files[i].Data = []byte(data)
			return
		}
	}
	a.Files = append(a.Files, txtar.File{Name: name, Data: []byte(data)})
}

func compileOptions(a *txtar.Archive) CompileOptions {
	var opts CompileOptions
	for line := range strings.Lines(section(a, "inputs")) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if opts.Inputs == nil {
			opts.Inputs = map[string]string{}
		}
		opts.Inputs[name] = value
	}
	opts.Jobs = strings.Fields(section(a, "jobs"))
	return opts
}

func TestValidFilesGiveThePlanOfTheGoldenFile(t *testing.T) {
	t.Parallel()
	golden(t, "plan", func(t *testing.T, a *txtar.Archive) string {
		data := []byte(section(a, "workflow.yaml"))
		f, err := Parse(".forgeci.yaml", data)
		if err != nil {
			t.Fatalf("refused: %v", err)
		}
		plan, err := f.Compile(compileOptions(a))
		if err != nil {
			t.Fatalf("not compiled: %v", err)
		}
		got := planJSON(t, plan)
		again, err := Parse(".forgeci.yaml", bytes.Clone(data))
		if err != nil {
			t.Fatal(err)
		}
		second, err := again.Compile(compileOptions(a))
		if err != nil {
			t.Fatal(err)
		}
		if planJSON(t, second) != got {
			t.Error("the same bytes gave two plans")
		}
		var back ci.Plan
		if err := json.Unmarshal([]byte(got), &back); err != nil || planJSON(t, back) != got {
			t.Errorf("the plan does not survive JSON: %v", err)
		}
		return got
	})
}

func TestInvalidFilesAreRefusedAsTheGoldenFileSays(t *testing.T) {
	t.Parallel()
	golden(t, "invalid", func(t *testing.T, a *txtar.Archive) string {
		f, err := Parse("w.yaml", []byte(section(a, "workflow.yaml")))
		if err == nil {
			_, err = f.Compile(compileOptions(a))
		} else {
			mustBeInvalid(t, err)
		}
		if err == nil {
			t.Fatal("accepted")
		}
		return err.Error() + "\n"
	})
}

func planJSON(t *testing.T, plan ci.Plan) string {
	t.Helper()
	out, err := json.MarshalIndent(plan, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(out) + "\n"
}
