package archive_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
)

// pack archives everything below dir with the given number of workers.
func pack(t *testing.T, dir string, workers int) ([]byte, []archive.Entry) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	found, err := archive.Walk(t.Context(), root, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := found.Err(); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	packed, err := archive.Pack(t.Context(), &buf, root, found.Entries, archive.ArtifactLimits(), workers)
	if err != nil {
		t.Fatal(err)
	}
	if packed.Size != int64(buf.Len()) || packed.SHA256 != sha256.Sum256(buf.Bytes()) {
		t.Fatalf("Pack says %d bytes with sum %x; it wrote %d with %x", packed.Size, packed.SHA256, buf.Len(), sha256.Sum256(buf.Bytes()))
	}
	return buf.Bytes(), found.Entries
}

// tree describes what stands below dir: type, mode, content or target by path.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		what := info.Mode().String()
		switch {
		case info.Mode().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			what += fmt.Sprintf(" %x", sha256.Sum256(b))
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what += " " + target
		}
		got[strings.TrimPrefix(path, dir+"/")] = what
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func sameTree(t *testing.T, got, want map[string]string) {
	t.Helper()
	for path, w := range want {
		if got[path] != w {
			t.Errorf("%q: got %q, want %q", path, got[path], w)
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%q should not be there", path)
		}
	}
}

func write(t *testing.T, dir, name string, data []byte, mode fs.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// noise returns n bytes that do not compress, different for each seed.
func noise(n int, seed byte) []byte {
	out := make([]byte, 0, n+32)
	sum := sha256.Sum256([]byte{seed})
	for len(out) < n {
		out = append(out, sum[:]...)
		sum = sha256.Sum256(sum[:])
	}
	return out[:n]
}

// ART-01: modes, links and content come back whatever the umask is.
func TestCase_ART_01_ModesAndLinksComeBack(t *testing.T) { //nolint:paralleltest // it sets the umask of the process
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	src := t.TempDir()
	write(t, src, "bin/tool", noise(3<<20+7, 1), 0o755)
	write(t, src, "data", []byte("data"), 0o644)
	write(t, src, "secret", []byte("s"), 0o600)
	write(t, src, "script", nil, 0o700)
	write(t, src, "read/only", []byte("x"), 0o444)
	for _, err := range []error{
		os.Mkdir(filepath.Join(src, "dir"), 0o755),
		os.Chmod(filepath.Join(src, "dir"), 0o755),
		os.Chmod(filepath.Join(src, "bin"), 0o755),
		os.Chmod(filepath.Join(src, "read"), 0o555),
		os.Symlink("tool", filepath.Join(src, "bin/tool-latest")),
		os.Symlink("nowhere", filepath.Join(src, "dangling")),
		os.Symlink("loop-b", filepath.Join(src, "loop-a")),
		os.Symlink("loop-a", filepath.Join(src, "loop-b")),
		os.Symlink("../data", filepath.Join(src, "bin/up")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	data, _ := pack(t, src, 0)
	dst := filepath.Join(t.TempDir(), "out")
	entries, err := archive.Unpack(t.Context(), bytes.NewReader(data), dst, archive.ArtifactLimits(), archive.UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sameTree(t, tree(t, dst), tree(t, src))
	for _, e := range entries {
		if e.Type != archive.File {
			continue
		}
		b, err := os.ReadFile(filepath.Join(src, e.Path))
		if err != nil {
			t.Fatal(err)
		}
		if e.SHA256 != sha256.Sum256(b) {
			t.Errorf("%q: Unpack reports a sum that its content does not have", e.Path)
		}
	}
	if err := os.Chmod(filepath.Join(dst, "read"), 0o755); err != nil {
		t.Fatal(err) // or TempDir cannot be removed without root
	}
	if err := os.Chmod(filepath.Join(src, "read"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// ART-01: a link that leaves the tree is refused by name, and what it points to
// is never read.
func TestCase_ART_01_LinksThatLeaveTheTreeAreRefused(t *testing.T) {
	t.Parallel()
	for name, target := range map[string]string{
		"absolute":     "/etc/passwd",
		"up":           "../x",
		"a/up":         "../../x",
		"climbs":       "a/../../x",
		"backslash":    `..\x`,
		"drive":        `C:\x`,
		"drive2":       `c:/x`,
		"a/b/through":  "../../link/../..",
		"out-of-a-dir": "a/b/../../../x",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src := t.TempDir()
			if err := os.MkdirAll(filepath.Join(src, "a/b"), 0o755); err != nil {
				t.Fatal(err)
			}
			for path, to := range map[string]string{name: target, "link": "a/b"} {
				if err := os.Symlink(to, filepath.Join(src, path)); err != nil {
					t.Fatal(err)
				}
			}
			root, err := os.OpenRoot(src)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			found, err := archive.Walk(t.Context(), root, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			var buf bytes.Buffer
			_, err = archive.Pack(t.Context(), &buf, root, found.Entries, archive.ArtifactLimits(), 1)
			if !errors.Is(err, ci.ErrUnsafe) || !strings.Contains(err.Error(), fmt.Sprintf("%q", name)) {
				t.Errorf("error %v, want ErrUnsafe that names %q", err, name)
			}
			if buf.Len() > 0 {
				t.Errorf("%d bytes were written", buf.Len())
			}
		})
	}
}

// ART-03: every name that exists comes back byte for byte.
func TestCase_ART_03_EveryNameComesBack(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	for _, name := range []string{
		"19:17:33.log", `a"b`, `a|b?.txt`, "trailing.", "CON", "\u00e9", "e\u0301", "new\nline", "caf\xe9",
		strings.Repeat("n", 255), "-dash", ".dot", "empty", `dev-disk-by\x2dlabel.swap`, "a b", "…", "tab\t", "\xff\xfe",
		strings.Repeat("long/", 200) + "end",
	} {
		data := []byte(name)
		if name == "empty" {
			data = nil
		}
		write(t, src, name, data, 0o644)
	}
	if err := os.Mkdir(filepath.Join(src, "empty-dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	data, entries := pack(t, src, 0)
	dst := t.TempDir()
	got, err := archive.Unpack(t.Context(), bytes.NewReader(data), dst, archive.ArtifactLimits(), archive.UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(entries) {
		t.Errorf("%d entries in, %d out", len(entries), len(got))
	}
	sameTree(t, tree(t, dst), tree(t, src))
}

// ART-03: a path of 5,000 levels, far longer than a system call takes.
func TestCase_ART_03_DeepPath(t *testing.T) {
	t.Parallel()
	const levels = 5000
	src, dst := t.TempDir(), t.TempDir()
	at, err := os.OpenRoot(src)
	if err != nil {
		t.Fatal(err)
	}
	for range levels {
		if err := at.Mkdir("d", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := at.OpenRoot("d")
		if err != nil {
			t.Fatal(err)
		}
		_ = at.Close()
		at = next
	}
	if err := at.WriteFile("f", []byte("deep"), 0o644); err != nil {
		t.Fatal(err)
	}
	_ = at.Close()
	data, _ := pack(t, src, 1)
	entries, err := archive.Unpack(t.Context(), bytes.NewReader(data), dst, archive.ArtifactLimits(), archive.UnpackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	last := entries[len(entries)-1]
	if len(entries) != levels+1 || last.Path != strings.Repeat("d/", levels)+"f" || last.SHA256 != sha256.Sum256([]byte("deep")) {
		t.Errorf("%d entries, the last at level %d", len(entries), strings.Count(last.Path, "/"))
	}
}

// The same tree gives the same bytes, whatever the number of workers, the times
// and the order on the disk.
func TestPackIsDeterministic(t *testing.T) {
	t.Parallel()
	make := func(reverse bool) string {
		dir := t.TempDir()
		for i := range 300 {
			if reverse {
				i = 299 - i
			}
			write(t, dir, fmt.Sprintf("d%d/f%d", i%7, i), noise(i*97, byte(i)), 0o644)
		}
		write(t, dir, "large", noise(5<<20, 9), 0o755)
		write(t, dir, "exact", noise(archive.FrameSize, 9), 0o755)
		return dir
	}
	want, _ := pack(t, make(false), 1)
	other := make(true)
	if err := os.Chtimes(filepath.Join(other, "large"), time.Unix(1, 0), time.Unix(2, 0)); err != nil {
		t.Fatal(err)
	}
	for _, workers := range []int{1, 2, 3, 8} {
		if got, _ := pack(t, other, workers); !bytes.Equal(got, want) {
			t.Errorf("%d workers: other bytes", workers)
		}
	}
}

// A plain tar of the kind reads what Pack writes.
func TestAnArchiveIsATar(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	write(t, src, "dir/file", []byte("content"), 0o755)
	data, _ := pack(t, src, 0)
	z, err := zstd.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	r := tar.NewReader(z)
	var names []string
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(time.Unix(0, 0)) || h.Uid != 0 || h.Uname != "" {
			t.Errorf("%s: has a time or an owner", h.Name)
		}
		names = append(names, h.Name)
	}
	if want := []string{"dir/", "dir/file"}; !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
}

// A file that changes between the look and the read, or while it is read, fails
// the archive by its name.
func TestPackNoticesChanges(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(path string) error{
		"grown":      func(p string) error { return appendTo(p, "x") },
		"shrunk":     func(p string) error { return os.Truncate(p, 1) },
		"touched":    func(p string) error { return os.Chtimes(p, time.Unix(1, 0), time.Unix(1, 0)) },
		"removed":    os.Remove,
		"now a link": func(p string) error { return errors.Join(os.Remove(p), os.Symlink("/etc/passwd", p)) },
		"now a pipe": func(p string) error { return errors.Join(os.Remove(p), syscall.Mkfifo(p, 0o644)) },
		"now a dir":  func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o755)) },
		"parent link": func(p string) error {
			return errors.Join(os.RemoveAll(filepath.Dir(p)), os.Symlink("/etc", filepath.Dir(p)))
		},
	} {
		for _, size := range []int{100, 3 << 20} {
			t.Run(fmt.Sprintf("%s/%d", name, size), func(t *testing.T) {
				t.Parallel()
				src := t.TempDir()
				write(t, src, "sub/file", noise(size, 1), 0o644)
				root, err := os.OpenRoot(src)
				if err != nil {
					t.Fatal(err)
				}
				defer root.Close()
				found, err := archive.Scan(t.Context(), root, []string{"sub/file"}, 1)
				if err != nil {
					t.Fatal(err)
				}
				if err := change(filepath.Join(src, "sub/file")); err != nil {
					t.Fatal(err)
				}
				_, err = archive.Pack(t.Context(), io.Discard, root, found.Entries, archive.ArtifactLimits(), 2)
				if !errors.Is(err, ci.ErrConflict) || !strings.Contains(err.Error(), `"sub/file"`) {
					t.Errorf("error %v, want ErrConflict that names the file", err)
				}
			})
		}
	}
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// A cancelled context ends each operation.
func TestCancel(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	write(t, src, "f", noise(1000, 1), 0o644)
	data, entries := pack(t, src, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("told to stop")
	cancel(why)
	root, err := os.OpenRoot(src)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, errPack := archive.Pack(ctx, io.Discard, root, entries, archive.ArtifactLimits(), 1)
	_, errRead := archive.Read(ctx, bytes.NewReader(data), archive.ArtifactLimits(), nil)
	_, errUnpack := archive.Unpack(ctx, bytes.NewReader(data), filepath.Join(t.TempDir(), "x"), archive.ArtifactLimits(), archive.UnpackOptions{})
	_, errWalk := archive.Walk(ctx, root, "", nil)
	_, errScan := archive.Scan(ctx, root, []string{"f"}, 1)
	for what, err := range map[string]error{"Pack": errPack, "Read": errRead, "Unpack": errUnpack, "Walk": errWalk, "Scan": errScan} {
		if !errors.Is(err, why) {
			t.Errorf("%s: error %v, want the cause", what, err)
		}
	}
}
