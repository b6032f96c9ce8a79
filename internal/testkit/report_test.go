package testkit_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"forgeci/internal/testkit"
)

func TestVersionsListsEachPairOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "report")
	t.Setenv("FORGECI_TEST_REPORT", dir)
	for range 2 {
		testkit.RecordVersion(t, "PostgreSQL", "15.18")
		testkit.RecordVersion(t, "S3", "versitygw v1.8.0/x\n")
	}
	testkit.RecordVersion(t, "PostgreSQL", "16.1")
	got, err := testkit.Versions(dir)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"PostgreSQL 15.18", "PostgreSQL 16.1", "S3 versitygw v1.8.0/x"}; !slices.Equal(got, want) {
		t.Errorf("versions %q, want %q", got, want)
	}
}

func TestGitIsTheSameOnEveryMachine(t *testing.T) {
	t.Setenv("GIT_CONFIG_COUNT", "1")
	t.Setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
	t.Setenv("GIT_CONFIG_VALUE_0", "true")
	testkit.Git(t, t.TempDir(), "init", "-q") // into the report of this run
	report := t.TempDir()
	t.Setenv("FORGECI_TEST_REPORT", report)
	var commits []string
	for range 2 {
		dir := t.TempDir()
		testkit.Git(t, dir, "init", "-q")
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte("a\r\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		testkit.Git(t, dir, "add", "a")
		testkit.Git(t, dir, "commit", "-q", "-m", "first")
		commits = append(commits, testkit.Git(t, dir, "rev-parse", "HEAD"))
	}
	if commits[0] != commits[1] || len(commits[0]) != 40 {
		t.Errorf("commits %q are not one and the same", commits)
	}
	if versions, err := testkit.Versions(report); err != nil || len(versions) != 1 {
		t.Errorf("recorded %q, %v; want the version of git", versions, err)
	}
}
