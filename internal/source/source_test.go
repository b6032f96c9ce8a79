package source_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/source"
	"forgeci/internal/testkit"
)

func write(t testing.TB, dir, name, data string, mode fs.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func symlink(t testing.TB, dir, target, name string) {
	t.Helper()
	if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func git(t testing.TB, dir string, args ...string) {
	t.Helper()
	testkit.Git(t, dir, append([]string{"-c", "protocol.file.allow=always"}, args...)...)
}

func capture(t testing.TB, dir string, opt source.CaptureOptions) *source.Snapshot {
	t.Helper()
	s, err := source.Capture(t.Context(), dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func paths(m source.Manifest) []string {
	got := []string{}
	for _, e := range m {
		got = append(got, e.Path)
	}
	return got
}

// save writes a snapshot's archive to a file.
func save(t testing.TB, s *source.Snapshot) (string, source.Want) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "blob")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.WriteTo(f); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path, source.Want{Digest: s.Digest, Blob: s.BlobDigest, Size: s.Size}
}

// SR-1: the digest is the one that the documented encoding gives, on every
// machine.
func TestDigestIsTheDocumentedOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "b", "hello\n", 0o644)
	write(t, dir, "a/run", "#!/bin/sh\n", 0o755)
	symlink(t, dir, "a/run", "link")
	s := capture(t, dir, source.CaptureOptions{})
	var want bytes.Buffer
	want.WriteString("forgeci source manifest 1\n")
	for _, e := range []struct{ kind, path, content string }{{"x", "a/run", "#!/bin/sh\n"}, {"f", "b", "hello\n"}, {"l", "link", "a/run"}} {
		sum := sha256.Sum256([]byte(e.content))
		want.WriteString(e.kind + "\x00\x00\x00" + string(rune(len(e.path))) + e.path)
		want.WriteString("\x00\x00\x00\x00\x00\x00\x00" + string(rune(len(e.content))))
		want.Write(sum[:])
	}
	sum := sha256.Sum256(want.Bytes())
	if s.Digest != "sha256:"+hex.EncodeToString(sum[:]) {
		t.Errorf("digest %s, want that of the documented encoding", s.Digest)
	}
}

// SR-1, SR-2: the same tree gives the same digest and the same bytes: in
// another place, with other times and owners' bits, with and without git.
func TestSameTreeSameDigest(t *testing.T) {
	t.Parallel()
	build := func(mode fs.FileMode, when time.Time) string {
		dir := t.TempDir()
		write(t, dir, "caf\xe9", "latin", mode)
		write(t, dir, "sub/dir/file", strings.Repeat("text\n", 1000), mode)
		write(t, dir, "Readme", "1", mode)
		write(t, dir, "README", "2", mode)
		write(t, dir, "run", "x", mode|0o100)
		symlink(t, dir, "sub/dir", "link")
		symlink(t, dir, "nowhere", "dangling")
		for _, p := range []string{"Readme", "sub"} {
			if err := os.Chtimes(filepath.Join(dir, p), when, when); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	first := capture(t, build(0o644, time.Unix(1, 0)), source.CaptureOptions{Workers: 1})
	if want := []string{"README", "Readme", "caf\xe9", "dangling", "link", "run", "sub/dir/file"}; !slices.Equal(paths(first.Manifest), want) {
		t.Errorf("paths %q, want %q", paths(first.Manifest), want)
	}
	other := build(0o600, time.Unix(1e9, 0))
	if err := os.Mkdir(filepath.Join(other, "empty-dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	inGit := build(0o640, time.Unix(2e9, 0))
	git(t, inGit, "init", "-q")
	for name, s := range map[string]*source.Snapshot{
		"another tree":        capture(t, other, source.CaptureOptions{Workers: 4}),
		"untracked in git":    capture(t, inGit, source.CaptureOptions{Untracked: true}),
		"the same once again": capture(t, other, source.CaptureOptions{}),
	} {
		if s.Digest != first.Digest || s.BlobDigest != first.BlobDigest || s.Size != first.Size || s.Files != 7 || s.Bytes != first.Bytes {
			t.Errorf("%s: %s %s %d %d, want %s %s %d", name, s.Digest, s.BlobDigest, s.Size, s.Files, first.Digest, first.BlobDigest, first.Size)
		}
	}
	// What counts changes the digest.
	for name, change := range map[string]func(dir string) error{
		"content":    func(d string) error { return os.WriteFile(filepath.Join(d, "Readme"), []byte("3"), 0o644) },
		"executable": func(d string) error { return os.Chmod(filepath.Join(d, "Readme"), 0o755) },
		"name":       func(d string) error { return os.Rename(filepath.Join(d, "Readme"), filepath.Join(d, "ReadMe")) },
		"new file":   func(d string) error { return os.WriteFile(filepath.Join(d, "new"), nil, 0o644) },
		"link": func(d string) error {
			return errors.Join(os.Remove(filepath.Join(d, "link")), os.Symlink("sub", filepath.Join(d, "link")))
		},
		"link becomes file with the same text": func(d string) error {
			return errors.Join(os.Remove(filepath.Join(d, "link")), os.WriteFile(filepath.Join(d, "link"), []byte("sub/dir"), 0o644))
		},
	} {
		dir := build(0o644, time.Unix(1, 0))
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if s := capture(t, dir, source.CaptureOptions{}); s.Digest == first.Digest {
			t.Errorf("%s: the digest is the same", name)
		}
	}
}

// SR-3, SR-4: what was captured comes back as it was then, whatever happens to
// the tree afterwards.
func TestMaterialiseGivesWhatWasCaptured(t *testing.T) { //nolint:paralleltest // it sets the umask of the process
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	dir := t.TempDir()
	write(t, dir, "run", "#!/bin/sh\n", 0o700)
	write(t, dir, "deep/er/data", strings.Repeat("0123456789abcdef", 1<<16), 0o600)
	write(t, dir, "caf\xe9", "", 0o644)
	symlink(t, dir, "deep/er", "link")
	s := capture(t, dir, source.CaptureOptions{})
	write(t, dir, "run", "changed", 0o644)
	blob, want := save(t, s)
	for _, existing := range []bool{true, false} {
		to := filepath.Join(t.TempDir(), "ws")
		if existing {
			if err := os.Mkdir(to, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := source.Materialise(t.Context(), blob, want, to, archive.SourceLimits()); err != nil {
			t.Fatal(err)
		}
		for path, mode := range map[string]fs.FileMode{"run": 0o755, "deep/er/data": 0o644, "caf\xe9": 0o644, "deep": fs.ModeDir | 0o755, ".": fs.ModeDir | 0o700} {
			info, err := os.Lstat(filepath.Join(to, path))
			if err != nil || info.Mode() != mode {
				t.Errorf("%q: %v, %v, want %v", path, info.Mode(), err, mode)
			}
		}
		if b, err := os.ReadFile(filepath.Join(to, "run")); string(b) != "#!/bin/sh\n" {
			t.Errorf("run holds %q, %v", b, err)
		}
		again := capture(t, to, source.CaptureOptions{})
		if again.Digest != s.Digest {
			t.Error("the materialised tree has another digest")
		}
	}
	var m source.Manifest
	digest, err := source.Verify(t.Context(), s.Open(), archive.SourceLimits(), func(e source.Entry) { m = append(m, e) })
	if err != nil || digest != s.Digest || !slices.Equal(m, s.Manifest) {
		t.Errorf("Verify: %s, %v, want %s", digest, err, s.Digest)
	}
}

// SR-3: any mismatch is a typed error and leaves nothing behind.
func TestMaterialiseLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a", "content", 0o644)
	write(t, dir, "b/c", "more", 0o755)
	s := capture(t, dir, source.CaptureOptions{})
	blob, want := save(t, s)
	data, err := os.ReadFile(blob)
	if err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(t.TempDir(), "damaged")
	bad := data[:len(data)/2]
	if err := os.WriteFile(damaged, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(bad)
	badDigest := "sha256:" + hex.EncodeToString(sum[:])
	zero := "sha256:" + strings.Repeat("0", 64)
	tight := archive.SourceLimits()
	tight.Bytes = 5
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		blob string
		want source.Want
		lim  archive.Limits
		kind error
	}{
		"another tree":        {t.Context(), blob, source.Want{Digest: zero, Blob: want.Blob, Size: want.Size}, archive.SourceLimits(), ci.ErrDigest},
		"other bytes":         {t.Context(), damaged, want, archive.SourceLimits(), ci.ErrDigest},
		"cut, digest agrees":  {t.Context(), damaged, source.Want{Digest: want.Digest, Blob: badDigest, Size: int64(len(bad))}, archive.SourceLimits(), ci.ErrDigest},
		"another blob digest": {t.Context(), blob, source.Want{Digest: want.Digest, Blob: zero, Size: want.Size}, archive.SourceLimits(), ci.ErrDigest},
		"another size":        {t.Context(), blob, source.Want{Digest: want.Digest, Blob: want.Blob, Size: want.Size + 1}, archive.SourceLimits(), ci.ErrDigest},
		"no blob":             {t.Context(), blob + "x", want, archive.SourceLimits(), ci.ErrUnavailable},
		"over a limit":        {t.Context(), blob, want, tight, ci.ErrTooLarge},
		"cancelled":           {ended, blob, want, archive.SourceLimits(), context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, existing := range []bool{true, false} {
				outer := t.TempDir()
				to := filepath.Join(outer, "ws")
				if existing {
					if err := os.Mkdir(to, 0o700); err != nil {
						t.Fatal(err)
					}
				}
				if err := source.Materialise(c.ctx, c.blob, c.want, to, c.lim); !errors.Is(err, c.kind) {
					t.Errorf("error %v, want %v", err, c.kind)
				}
				left, err := os.ReadDir(to)
				if existing && (err != nil || len(left) > 0) || !existing && !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("existing %v: left %v, %v", existing, left, err)
				}
			}
		})
	}
	t.Run("a directory in use", func(t *testing.T) {
		t.Parallel()
		to := t.TempDir()
		write(t, to, "mine", "keep", 0o644)
		if err := source.Materialise(t.Context(), blob, want, to, archive.SourceLimits()); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("error %v, want ErrConflict", err)
		}
		if b, err := os.ReadFile(filepath.Join(to, "mine")); string(b) != "keep" {
			t.Errorf("mine holds %q, %v", b, err)
		}
	})
}

// A snapshot is an archive of files and links only, with two modes, and never
// holds git's own directory.
func TestVerifyRefusesWhatNoCaptureMakes(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(dir string){
		"empty directory": func(d string) { _ = os.Mkdir(filepath.Join(d, "d"), 0o755) },
		"mode":            func(d string) { write(t, d, "f", "x", 0o600) },
		"git":             func(d string) { write(t, d, ".git/config", "x", 0o644) },
		"git in capitals": func(d string) { write(t, d, "sub/.GIT/hooks/post-checkout", "x", 0o755) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			make(dir)
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			found, err := archive.Walk(t.Context(), root, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(name, "git") {
				found.Entries = slices.DeleteFunc(found.Entries, func(e archive.Entry) bool { return e.Type == archive.Dir })
			}
			var buf bytes.Buffer
			packed, err := archive.Pack(t.Context(), &buf, root, found.Entries, archive.ArtifactLimits(), 1)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := source.Verify(t.Context(), bytes.NewReader(buf.Bytes()), archive.SourceLimits(), nil); !errors.Is(err, ci.ErrUnsafe) {
				t.Errorf("Verify: %v, want ErrUnsafe", err)
			}
			blob := filepath.Join(t.TempDir(), "blob")
			if err := os.WriteFile(blob, buf.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			to := filepath.Join(t.TempDir(), "ws")
			want := source.Want{Digest: "sha256:", Blob: "sha256:" + hex.EncodeToString(packed.SHA256[:]), Size: packed.Size}
			if err := source.Materialise(t.Context(), blob, want, to, archive.SourceLimits()); !errors.Is(err, ci.ErrUnsafe) {
				t.Errorf("Materialise: %v, want ErrUnsafe", err)
			}
			if _, err := os.Lstat(to); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("left: %v", err)
			}
		})
	}
}

// SR-8: in a checkout the files are git's: tracked ones as they stand in the
// working tree, untracked ones by choice, ignored ones never.
func TestCaptureTakesWhatGitLists(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	git(t, dir, "init", "-q")
	write(t, dir, ".gitignore", "*.log\n/build/\n!keep.log\n", 0o644)
	write(t, dir, "tracked", "1", 0o644)
	write(t, dir, "changed", "1", 0o644)
	write(t, dir, "deleted", "1", 0o644)
	write(t, dir, "becomes-dir", "1", 0o644)
	write(t, dir, "-dash", "1", 0o644)
	write(t, dir, "new\xffline", "1", 0o644)
	write(t, dir, "forced.log", "1", 0o644)
	git(t, dir, "add", "--", ".gitignore", "tracked", "changed", "deleted", "becomes-dir", "-dash", "new\xffline")
	git(t, dir, "add", "-f", "forced.log")
	git(t, dir, "commit", "-qm", "first")
	write(t, dir, "changed", "2", 0o755)
	write(t, dir, "untracked", "u", 0o644)
	write(t, dir, "keep.log", "u", 0o644)
	write(t, dir, "no.log", "ignored", 0o644)
	write(t, dir, "build/out", "ignored", 0o644)
	if err := errors.Join(os.Remove(filepath.Join(dir, "deleted")), os.Remove(filepath.Join(dir, "becomes-dir"))); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "becomes-dir/file", "u", 0o644)
	// Nothing else of the repository is looked at: what would be refused in a
	// plain directory is ignored here.
	if err := syscall.Mkfifo(filepath.Join(dir, "build/pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	tracked := []string{"-dash", ".gitignore", "changed", "forced.log", "new\xffline", "tracked"}
	s := capture(t, dir, source.CaptureOptions{})
	if !slices.Equal(paths(s.Manifest), tracked) {
		t.Errorf("tracked: %q, want %q", paths(s.Manifest), tracked)
	}
	if e := s.Manifest[2]; e.Kind != source.Executable || e.SHA256 != sha256.Sum256([]byte("2")) {
		t.Errorf("changed is not as it stands in the working tree: %+v", e)
	}
	all := append(slices.Clone(tracked), "becomes-dir/file", "keep.log", "untracked")
	slices.Sort(all)
	s = capture(t, dir, source.CaptureOptions{Untracked: true})
	if !slices.Equal(paths(s.Manifest), all) {
		t.Errorf("with untracked: %q, want %q", paths(s.Manifest), all)
	}
	// A directory within the checkout is captured by the same rules; one that
	// the checkout ignores stands for itself.
	if s := capture(t, filepath.Join(dir, "becomes-dir"), source.CaptureOptions{Untracked: true}); !slices.Equal(paths(s.Manifest), []string{"file"}) {
		t.Errorf("subdirectory: %q", paths(s.Manifest))
	}
	if err := os.Remove(filepath.Join(dir, "build/pipe")); err != nil {
		t.Fatal(err)
	}
	if s := capture(t, filepath.Join(dir, "build"), source.CaptureOptions{}); !slices.Equal(paths(s.Manifest), []string{"out"}) {
		t.Errorf("ignored directory: %q", paths(s.Manifest))
	}
}

// Files of submodules that are checked out belong to the source, also nested.
func TestCaptureTakesSubmodules(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	for _, name := range []string{"inner", "lib", "top", "unused"} {
		repo := filepath.Join(base, name)
		write(t, repo, name+".txt", name, 0o644)
		git(t, repo, "init", "-q")
		git(t, repo, "add", ".")
		git(t, repo, "commit", "-qm", name)
	}
	git(t, filepath.Join(base, "lib"), "submodule", "--quiet", "add", filepath.Join(base, "inner"), "nested/inner")
	git(t, filepath.Join(base, "lib"), "commit", "-qm", "nested")
	top := filepath.Join(base, "top")
	git(t, top, "submodule", "--quiet", "add", filepath.Join(base, "lib"), "lib")
	git(t, top, "submodule", "--quiet", "add", filepath.Join(base, "unused"), "unused")
	git(t, top, "submodule", "--quiet", "update", "--init", "--recursive")
	git(t, top, "commit", "-qm", "submodules")
	git(t, top, "submodule", "--quiet", "deinit", "-f", "unused")
	write(t, top, "lib/untracked", "u", 0o644)
	want := []string{".gitmodules", "lib/.gitmodules", "lib/lib.txt", "lib/nested/inner/inner.txt", "top.txt"}
	if got := paths(capture(t, top, source.CaptureOptions{}).Manifest); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	want = append(want, "lib/untracked")
	slices.Sort(want)
	if got := paths(capture(t, top, source.CaptureOptions{Untracked: true}).Manifest); !slices.Equal(got, want) {
		t.Errorf("with untracked: %q, want %q", got, want)
	}
}

// A plain directory is taken whole, but for git's own directories.
func TestCaptureOfAPlainDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, ".hidden", "x", 0o644)
	write(t, dir, "a.log", "x", 0o644)
	write(t, dir, "sub/.git", "gitdir: elsewhere", 0o644)
	write(t, dir, "sub/.gitignore", "*", 0o644)
	write(t, dir, "sub/x", "x", 0o644)
	want := []string{".hidden", "a.log", "sub/.gitignore", "sub/x"}
	if got := paths(capture(t, dir, source.CaptureOptions{}).Manifest); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	_, err := source.Capture(t.Context(), filepath.Join(dir, "gone"), source.CaptureOptions{})
	if !errors.Is(err, ci.ErrNotFound) {
		t.Errorf("missing directory: error %v, want ErrNotFound", err)
	}
	_, err = source.Capture(t.Context(), filepath.Join(dir, "a.log"), source.CaptureOptions{})
	if !errors.Is(err, ci.ErrNotFound) {
		t.Errorf("a file: error %v, want ErrNotFound", err)
	}
}

// What cannot be captured is refused with every name and what to do; nothing is
// left in the temporary directory.
func TestCaptureRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "good", "x", 0o644)
	for i := range 3 {
		if err := syscall.Mkfifo(filepath.Join(dir, fmt.Sprintf("pipe%d", i)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var lc net.ListenConfig
	short := filepath.Join(os.TempDir(), fmt.Sprintf("forgeci-capture-%d", os.Getpid()))
	symlinked := os.Symlink(dir, short)
	if symlinked != nil {
		t.Fatal(symlinked)
	}
	defer os.Remove(short)
	l, err := lc.Listen(t.Context(), "unix", filepath.Join(short, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	tmp := t.TempDir()
	_, err = source.Capture(t.Context(), dir, source.CaptureOptions{TempDir: tmp})
	if !errors.Is(err, ci.ErrUnsafe) {
		t.Fatalf("error %v, want ErrUnsafe", err)
	}
	for _, part := range []string{"pipe0", "pipe1", "pipe2", "sock", "a named pipe", "a socket", "ignored"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
	linked := t.TempDir()
	symlink(t, linked, "/etc/passwd", "out")
	if _, err := source.Capture(t.Context(), linked, source.CaptureOptions{TempDir: tmp}); !errors.Is(err, ci.ErrUnsafe) || !strings.Contains(err.Error(), `"out"`) {
		t.Errorf("link out: error %v, want ErrUnsafe that names it", err)
	}
	control := t.TempDir()
	write(t, control, "a\nb", "x", 0o644)
	if _, err := source.Capture(t.Context(), control, source.CaptureOptions{TempDir: tmp}); !errors.Is(err, ci.ErrUnsafe) || !strings.Contains(err.Error(), `"a\nb"`) {
		t.Errorf("control byte: error %v, want ErrUnsafe that names it", err)
	}
	lim := archive.SourceLimits()
	lim.Entries = 1
	write(t, linked, "one", "x", 0o644)
	write(t, linked, "two", "x", 0o644)
	if err := os.Remove(filepath.Join(linked, "out")); err != nil {
		t.Fatal(err)
	}
	if _, err := source.Capture(t.Context(), linked, source.CaptureOptions{TempDir: tmp, Limits: lim}); !errors.Is(err, ci.ErrTooLarge) {
		t.Errorf("too many: error %v, want ErrTooLarge", err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left in the temporary directory: %v, %v", left, err)
	}
}

// SR-4: a file that is written to while it is captured fails the capture by its
// name, or is captured before or after; never a mixture.
func TestCaptureOfAChangingFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const size = 8 << 20
	path := filepath.Join(dir, "changing")
	versions := [][]byte{bytes.Repeat([]byte("a"), size), bytes.Repeat([]byte("b"), size)}
	if err := os.WriteFile(path, versions[0], 0o644); err != nil {
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return
		}
		defer f.Close()
		for i := 1; ; i++ {
			for at := 0; at < size; at += 1 << 20 {
				select {
				case <-stop:
					return
				default:
				}
				_, _ = f.WriteAt(versions[i%2][at:at+1<<20], int64(at))
			}
		}
	}()
	defer func() { close(stop); <-done }()
	failed := 0
	for range 20 {
		s, err := source.Capture(t.Context(), dir, source.CaptureOptions{})
		if err != nil {
			if !errors.Is(err, ci.ErrConflict) || !strings.Contains(err.Error(), `"changing"`) {
				t.Fatalf("error %v, want ErrConflict that names the file", err)
			}
			failed++
			continue
		}
		_ = s.Close()
	}
	if failed == 0 {
		t.Error("20 captures of a file that is always being written succeeded")
	}
}

func TestReadFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, ".forgeci.yaml", "version: 1\n", 0o644)
	write(t, dir, ".forgeci/a.yaml", "a", 0o644)
	write(t, dir, ".forgeci/b.yaml", "", 0o644)
	write(t, dir, "big", strings.Repeat("x", 3<<20), 0o644)
	symlink(t, dir, "a.yaml", ".forgeci/link.yaml")
	s := capture(t, dir, source.CaptureOptions{})
	files, err := source.ReadFiles(t.Context(), s.Open(), func(p string) bool { return p == ".forgeci.yaml" || p == ".forgeci/a.yaml" || p == ".forgeci/b.yaml" }, 1000)
	if err != nil {
		t.Fatal(err)
	}
	want := []source.NamedFile{{Path: ".forgeci.yaml", Data: []byte("version: 1\n")}, {Path: ".forgeci/a.yaml", Data: []byte("a")}, {Path: ".forgeci/b.yaml", Data: []byte{}}}
	if len(files) != len(want) {
		t.Fatalf("%d files, want %d", len(files), len(want))
	}
	for i := range want {
		if files[i].Path != want[i].Path || !bytes.Equal(files[i].Data, want[i].Data) {
			t.Errorf("file %d is %+v, want %+v", i, files[i], want[i])
		}
	}
	if b, err := source.ReadFile(t.Context(), s.Open(), ".forgeci.yaml", 11); string(b) != "version: 1\n" || err != nil {
		t.Errorf("ReadFile: %q, %v", b, err)
	}
	for path, kind := range map[string]ci.Kind{
		"none": ci.ErrNotFound, ".forgeci": ci.ErrNotFound, "big": ci.ErrTooLarge, ".forgeci/link.yaml": ci.ErrInvalid, "": ci.ErrNotFound,
	} {
		if _, err := source.ReadFile(t.Context(), s.Open(), path, 1000); !errors.Is(err, kind) {
			t.Errorf("ReadFile %q: error %v, want %s", path, err, kind)
		}
	}
	cut := io.LimitReader(s.Open(), s.Size/2)
	if _, err := source.ReadFiles(t.Context(), cut, func(string) bool { return false }, 10); !errors.Is(err, ci.ErrDigest) {
		t.Errorf("cut off: error %v, want ErrDigest", err)
	}
}

func TestManifestDecodes(t *testing.T) {
	t.Parallel()
	m := source.Manifest{
		{Path: "a", Kind: source.Regular, Size: 5, SHA256: sha256.Sum256([]byte("a"))},
		{Path: "b/c\xff", Kind: source.Executable, Size: 1 << 40, SHA256: sha256.Sum256([]byte("b"))},
		{Path: "l", Kind: source.Symlink, Size: 1},
	}
	got, err := source.DecodeManifest(m.Encode())
	if err != nil || !slices.Equal(got, m) {
		t.Errorf("decoded %+v, %v", got, err)
	}
	if got, err := source.DecodeManifest(source.Manifest{}.Encode()); err != nil || len(got) != 0 {
		t.Errorf("empty: %v, %v", got, err)
	}
	b := m.Encode()
	for n := range b {
		if got, err := source.DecodeManifest(b[:n]); err == nil && len(got) == len(m) {
			t.Errorf("cut at %d: accepted", n)
		}
	}
	for what, bad := range map[string]source.Manifest{
		"order":     {m[1], m[0]},
		"twice":     {m[0], m[0]},
		"kind":      {{Path: "a", Kind: 'd'}},
		"traversal": {{Path: "../a", Kind: source.Regular}},
		"size":      {{Path: "a", Kind: source.Regular, Size: -1}},
	} {
		if _, err := source.DecodeManifest(bad.Encode()); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

func FuzzDecodeManifest(f *testing.F) {
	f.Add(source.Manifest{{Path: "a", Kind: source.Regular, Size: 5}, {Path: "b/c", Kind: source.Symlink, Size: 1}}.Encode())
	f.Add([]byte("forgeci source manifest 1\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := source.DecodeManifest(b)
		if err != nil {
			if _, ok := errors.AsType[*ci.Error](err); !ok {
				t.Errorf("error %v is not typed", err)
			}
			return
		}
		if !bytes.Equal(m.Encode(), b) {
			t.Error("what was decoded has another encoding")
		}
	})
}

// ATTACKS S44: names that are as long as they may be, and headers that are as long
// around short ones, in a snapshot of some kilobytes, take no memory from the
// server that verifies it.
func TestAttack_S44_VerifyKeepsNothing(t *testing.T) { //nolint:paralleltest // it measures memory
	rest, junk := strings.Repeat("/"+strings.Repeat("n", 200), 20), strings.Repeat("j", 20<<10)
	for what, c := range map[string]struct {
		n     int
		entry func(i int) *tar.Header
	}{
		"60 MiB of names": {15_000, func(i int) *tar.Header {
			return &tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%09d", i) + rest, Mode: 0o644}
		}},
		// A letter beyond ASCII brings the name into the extended header.
		"100 MiB of headers": {5_000, func(i int) *tar.Header {
			return &tar.Header{Typeflag: tar.TypeSymlink, Name: fmt.Sprintf("é%d", 100_000+i), Linkname: "to", PAXRecords: map[string]string{"TEST.junk": junk}}
		}},
	} {
		t.Run(what, func(t *testing.T) {
			var packed bytes.Buffer
			z, err := zstd.NewWriter(&packed)
			if err != nil {
				t.Fatal(err)
			}
			w := tar.NewWriter(z)
			for i := range c.n {
				if err := w.WriteHeader(c.entry(i)); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(w.Close(), z.Close()); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			if _, err := source.Verify(t.Context(), &packed, archive.SourceLimits(), nil); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if grown := int64(after.Sys) - int64(before.Sys); grown > 40<<20 {
				t.Errorf("memory grew by %d MiB", grown>>20)
			}
		})
	}
}

func FuzzVerify(f *testing.F) {
	dir := f.TempDir()
	write(f, dir, "a", "content", 0o644)
	write(f, dir, "b/c", "x", 0o755)
	symlink(f, dir, "a", "l")
	s, err := source.Capture(context.Background(), dir, source.CaptureOptions{})
	if err != nil {
		f.Fatal(err)
	}
	var buf bytes.Buffer
	if _, err := s.WriteTo(&buf); err != nil {
		f.Fatal(err)
	}
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(buf.Bytes())
	f.Add([]byte{})
	lim := archive.Limits{Entries: 100, Bytes: 1 << 20, File: 1 << 20, Path: 256, Names: 1 << 16, Ratio: 100}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m source.Manifest
		digest, err := source.Verify(t.Context(), bytes.NewReader(b), lim, func(e source.Entry) { m = append(m, e) })
		if err != nil {
			if _, ok := errors.AsType[*ci.Error](err); !ok {
				t.Errorf("error %v is not typed", err)
			}
			return
		}
		// What is accepted materialises to the same digest.
		blob := filepath.Join(t.TempDir(), "blob")
		if err := os.WriteFile(blob, b, 0o600); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(b)
		want := source.Want{Digest: digest, Blob: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(b))}
		if err := source.Materialise(t.Context(), blob, want, filepath.Join(t.TempDir(), "ws"), lim); err != nil && !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("materialise what was verified: %v", err)
		}
		if back, err := source.DecodeManifest(m.Encode()); err != nil || !slices.Equal(back, m) {
			t.Errorf("the manifest does not decode: %v", err)
		}
	})
}
