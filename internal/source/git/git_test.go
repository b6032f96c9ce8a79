package git_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/source/git"
	"forgeci/internal/testkit"
)

func write(t *testing.T, dir, name, data string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

func repo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	testkit.Git(t, dir, "init", "-q")
	write(t, dir, "file", "1\n")
	testkit.Git(t, dir, "add", ".")
	testkit.Git(t, dir, "commit", "-qm", "Say one thing\nand go on\n\nBody.")
	return dir
}

func describe(t *testing.T, dir string) git.Commit {
	t.Helper()
	c, err := git.Describe(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDescribe(t *testing.T) {
	t.Parallel()
	dir := repo(t)
	sha := testkit.Git(t, dir, "rev-parse", "HEAD")
	want := git.Commit{
		SHA: sha, Ref: "refs/heads/main", Subject: "Say one thing and go on", Author: "author <author@example.com>",
		AuthoredAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
	if got := describe(t, dir); got != want {
		t.Errorf("clean: %+v, want %+v", got, want)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := describe(t, filepath.Join(dir, "sub")); got != want {
		t.Errorf("from a subdirectory: %+v, want %+v", got, want)
	}
	// A changed time alone is no change.
	if err := os.Chtimes(filepath.Join(dir, "file"), time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if got := describe(t, dir); got != want {
		t.Errorf("touched: %+v, want %+v", got, want)
	}
	write(t, dir, "new", "x")
	if got := describe(t, dir); !got.Dirty {
		t.Error("an untracked file does not make it dirty")
	}
	write(t, dir, ".git/info/exclude", "new\n")
	if got := describe(t, dir); got.Dirty {
		t.Error("an ignored file makes it dirty")
	}
	write(t, dir, "file", "2\n")
	if got := describe(t, dir); !got.Dirty {
		t.Error("a changed file does not make it dirty")
	}
	testkit.Git(t, dir, "checkout", "-q", "--detach")
	if got := describe(t, dir); got.Ref != "" || got.SHA != sha {
		t.Errorf("detached: %+v", got)
	}
	// What looks like an option in a name is only a name.
	testkit.Git(t, dir, "symbolic-ref", "HEAD", "refs/heads/--upload-pack=x")
	if got := describe(t, dir); got.Ref != "refs/heads/--upload-pack=x" || got.SHA != "" {
		t.Errorf("a branch without commits: %+v", got)
	}
}

func TestNoRepository(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if root, ok := git.Root(dir); ok {
		t.Fatalf("the temporary directory is in the repository %s: set TMPDIR", root)
	}
	_, err := git.Describe(t.Context(), dir)
	if !errors.Is(err, ci.ErrNotFound) {
		t.Errorf("error %v, want ErrNotFound", err)
	}
	empty := t.TempDir()
	testkit.Git(t, empty, "init", "-q")
	if got := describe(t, empty); got.SHA != "" || got.Ref != "refs/heads/main" || got.Dirty {
		t.Errorf("without commits: %+v", got)
	}
	write(t, dir, ".git", "not a git file")
	if _, err := git.ListFiles(t.Context(), dir, true); !errors.Is(err, ci.ErrUnavailable) {
		t.Errorf("broken: error %v, want ErrUnavailable", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := git.ListFiles(ctx, empty, true); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error %v", err)
	}
}

// ATTACKS S65: nothing that a repository's configuration or attributes name is
// run, and the index is not written.
func TestAttack_S65_NothingOfTheRepositoryRuns(t *testing.T) {
	t.Parallel()
	dir := repo(t)
	marker := filepath.Join(t.TempDir(), "ran")
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho \"$0 $*\" >>"+marker+"\ncat\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{
		"core.fsmonitor", "core.sshCommand", "core.gitProxy", "core.pager", "core.editor", "core.askPass", "credential.helper",
		"filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "filter.a.b c.clean", "diff.external", "diff.evil.textconv", "diff.evil.command",
		"gpg.program", "uploadpack.packObjectsHook", "core.alternateRefsCommand", "pager.status", "pager.ls-files", "alias.status", "alias.ls-files", "interactive.diffFilter",
	} {
		testkit.Git(t, dir, "config", key, script)
	}
	for key, value := range map[string]string{"log.showSignature": "true", "filter.evil.required": "true", "core.hooksPath": filepath.Dir(script), "remote.origin.url": "ext::" + script, "remote.origin.promisor": "true", "extensions.partialClone": "origin"} {
		testkit.Git(t, dir, "config", key, value)
	}
	for _, hook := range []string{"post-index-change", "fsmonitor-watchman", "reference-transaction", "pre-auto-gc", "post-checkout"} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(script), hook), []byte("#!/bin/sh\necho hook >>"+marker+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, dir, ".git/info/attributes", "* filter=evil diff=evil\nfile filter=evil diff=evil\n")
	write(t, dir, ".gitattributes", "* filter=evil diff=evil\n")
	write(t, dir, "file", "2\n")
	if err := os.Chtimes(filepath.Join(dir, "file"), time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	index, err := os.ReadFile(filepath.Join(dir, ".git/index"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := git.ListFiles(t.Context(), dir, true)
	if want := []string{".gitattributes", "file"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("files %q, %v, want %q", got, err, want)
	}
	if c := describe(t, dir); !c.Dirty {
		t.Errorf("described as %+v", c)
	}
	if _, err := git.Ignored(t.Context(), dir); err != nil {
		t.Error(err)
	}
	if ran, err := os.ReadFile(marker); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the repository's programs ran: %s %v", ran, err)
	}
	after, err := os.ReadFile(filepath.Join(dir, ".git/index"))
	if err != nil || string(after) != string(index) {
		t.Errorf("the index was written: %v", err)
	}
}

// SRC-06: neither the user's nor the system's configuration has an effect. The
// test's process has both in its environment.
func TestCase_SRC_06_TheUsersConfigurationHasNoEffect(t *testing.T) { //nolint:paralleltest // it sets the environment
	dir := repo(t)
	write(t, dir, "kept.tmp", "x")
	home := t.TempDir()
	write(t, home, "ignore", "*.tmp\n")
	write(t, home, ".gitconfig", "[core]\n\texcludesFile = "+filepath.Join(home, "ignore")+"\n\tautocrlf = true\n[status]\n\tshowUntrackedFiles = no\n")
	write(t, home, ".config/git/ignore", "*.tmp\n")
	for name, value := range map[string]string{
		"HOME": home, "XDG_CONFIG_HOME": filepath.Join(home, ".config"), "GIT_CONFIG_GLOBAL": filepath.Join(home, ".gitconfig"), "GIT_CONFIG_SYSTEM": filepath.Join(home, ".gitconfig"),
		"GIT_DIR": "/nonexistent", "GIT_WORK_TREE": "/nonexistent", "GIT_INDEX_FILE": "/nonexistent", "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.excludesFile", "GIT_CONFIG_VALUE_0": filepath.Join(home, "ignore"),
	} {
		t.Setenv(name, value)
	}
	got, err := git.ListFiles(t.Context(), dir, true)
	if want := []string{"file", "kept.tmp"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("files %q, %v, want %q", got, err, want)
	}
	if c := describe(t, dir); !c.Dirty {
		t.Error("an untracked file does not make it dirty")
	}
}

// A checkout of another owner can be read: git alone would refuse it.
func TestAnothersCheckout(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Log("only root can give a checkout away; asserting the caller's own")
	}
	dir := repo(t)
	sub := filepath.Join(dir, "sub")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, 12345, 12345))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range []string{dir, sub} {
		if c := describe(t, at); c.SHA == "" {
			t.Errorf("%s: %+v", at, c)
		}
	}
}
