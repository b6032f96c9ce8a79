package testkit

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// reportEnv names the directory in which a test run collects what its test
// processes talked to; `make test` sets it and prints the collection.
const reportEnv = "FORGECI_TEST_REPORT"

// RecordVersion notes that this test process talked to a program of this
// version, for example RecordVersion(t, "PostgreSQL", "15.18"). The same pair
// may be recorded any number of times by any number of processes; it is listed
// once. Without a report directory it does nothing.
func RecordVersion(t testing.TB, program, version string) {
	t.Helper()
	if err := recordVersion(os.Getenv(reportEnv), program, version); err != nil {
		t.Fatalf("record version of %s: %v", program, err)
	}
}

func recordVersion(dir, program, version string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	line := strings.Join(strings.Fields(program+" "+version), " ")
	return os.WriteFile(filepath.Join(dir, versionFile(line)), []byte(line+"\n"), 0o644)
}

// versionFile makes a file name of a line, so that equal lines meet in one file.
func versionFile(line string) string {
	return "version-" + strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' {
			return r
		}
		return '_'
	}, line)
}

// Versions returns the recorded lines of a report directory, "program version"
// each, sorted and without repetition. A missing directory has none.
func Versions(dir string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "version-*"))
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		lines = append(lines, strings.TrimSpace(string(b)))
	}
	slices.Sort(lines)
	return slices.Compact(lines), nil
}
