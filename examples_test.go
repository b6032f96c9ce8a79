package forgeci_test

import (
	"os"
	"path/filepath"
	"testing"

	"forgeci/internal/workflow"
)

// TestExamplesAreValid keeps the examples true to the workflow format.
func TestExamplesAreValid(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("examples/*/.forgeci.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := workflow.Parse(file, data)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		if _, err := parsed.Compile(workflow.CompileOptions{}); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
