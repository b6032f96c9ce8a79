package testkit

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Git runs git in dir, fails the test when git does, and returns what it wrote
// to its standard output without the last newline. Nothing of the machine's or
// the user's configuration has an effect, and author and dates are fixed, so
// that equal commands make equal commits.
func Git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	version, err := exec.Command("git", "--version").Output()
	if err != nil {
		t.Fatalf("git --version: %v; install git (Debian: apt-get install git)", err)
	}
	// git version 2.39.5
	RecordVersion(t, "git", strings.TrimPrefix(strings.TrimSpace(string(version)), "git version "))

	cmd := exec.Command("git", append([]string{"-C", dir, "-c", "init.defaultBranch=main", "-c", "commit.gpgSign=false"}, args...)...)
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "HOME=/nonexistent", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
		"GIT_AUTHOR_NAME=author", "GIT_AUTHOR_EMAIL=author@example.com", "GIT_AUTHOR_DATE=2026-01-02T03:04:05Z",
		"GIT_COMMITTER_NAME=author", "GIT_COMMITTER_EMAIL=author@example.com", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z",
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return strings.TrimSuffix(string(out), "\n")
}
