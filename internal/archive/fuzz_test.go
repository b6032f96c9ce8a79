package archive_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
)

// fuzzLimits keep one input cheap.
func fuzzLimits() archive.Limits {
	return archive.Limits{Entries: 1000, Bytes: 4 << 20, File: 4 << 20, Path: 1024, Names: 1 << 20, Ratio: 1000}
}

// FuzzRead feeds the reader plain tars (the fuzzer cannot invent a zstd frame
// with a right checksum): whatever they hold, the error is a typed one; and what
// is accepted unpacks, without a trace outside, to what was read, and packs
// again to an archive with the same entries.
func FuzzRead(f *testing.F) {
	f.Add(craftPlain(f, file("a"), link("b", "a"), folder("c"), file("c/d")))
	f.Add(craftPlain(f, link("a", "../x")))
	f.Add(craftPlain(f, link("a", "b"), file("a/x")))
	f.Add(craftPlain(f, file("../x")))
	f.Add(craftPlain(f, file("caf\xe9"), file(strings.Repeat("long/", 60)+"x")))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, plain []byte) {
		data := compress(t, plain)
		var seen []archive.Entry
		_, err := archive.Read(t.Context(), bytes.NewReader(data), fuzzLimits(), func(e archive.Entry, content io.Reader) error {
			seen = append(seen, e)
			n, err := io.Copy(io.Discard, content)
			if err == nil && n != e.Size {
				t.Errorf("%q: %d bytes, the entry says %d", e.Path, n, e.Size)
			}
			return err
		})
		outer := t.TempDir()
		write(t, outer, "canary", []byte("c"), 0o644)
		dir := filepath.Join(outer, "dir")
		got, unpackErr := archive.Unpack(t.Context(), bytes.NewReader(data), dir, fuzzLimits(), archive.UnpackOptions{Workers: 1})
		if err != nil {
			if _, ok := errors.AsType[*ci.Error](err); !ok {
				t.Errorf("error %v is not typed", err)
			}
			if unpackErr == nil {
				t.Errorf("Unpack takes what Read refuses with %v", err)
			}
			if names := entriesOf(t, outer); len(names) != 1 {
				t.Errorf("left behind: %q", names)
			}
			return
		}
		if unpackErr != nil {
			// Names longer than the file system takes are left to it.
			if !errors.Is(unpackErr, ci.ErrUnavailable) {
				t.Fatalf("Unpack: %v", unpackErr)
			}
			return
		}
		if names := entriesOf(t, outer); len(names) != 2 {
			t.Errorf("beside the directory: %q", names)
		}
		if len(got) != len(seen) {
			t.Fatalf("%d entries read, %d unpacked", len(seen), len(got))
		}
		again(t, dir, got)
	})
}

// again packs what was unpacked and compares the entries.
func again(t *testing.T, dir string, want []archive.Entry) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	paths := make([]string, 0, len(want))
	for _, e := range want {
		paths = append(paths, e.Path)
	}
	found, err := archive.Scan(t.Context(), root, paths, 1)
	if err != nil {
		t.Fatal(err)
	}
	if len(found.Entries) != len(want) {
		t.Fatalf("%d entries unpacked, %d found", len(want), len(found.Entries))
	}
	readable := true
	for i, e := range found.Entries {
		w := want[i]
		if e.Path != w.Path || e.Type != w.Type || e.Size != w.Size || e.Link != w.Link || e.Mode != w.Mode {
			t.Errorf("unpacked %+v, found %+v", w, e)
		}
		readable = readable && e.Mode&0o400 != 0
	}
	if _, err := archive.Pack(t.Context(), io.Discard, root, found.Entries, fuzzLimits(), 1); err != nil && readable {
		t.Errorf("pack again: %v", err)
	}
}

func entriesOf(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// FuzzReadCompressed feeds the reader raw bytes.
func FuzzReadCompressed(f *testing.F) {
	f.Add(craft(f, file("a"), link("b", "a")))
	f.Add([]byte("\x28\xb5\x2f\xfd"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := archive.Read(t.Context(), bytes.NewReader(data), fuzzLimits(), nil)
		var typed *ci.Error
		if err != nil && !errors.As(err, &typed) {
			t.Errorf("error %v is not typed", err)
		}
	})
}

// FuzzCheckPath holds the rule to what it is for: an accepted path, joined to a
// directory by any system's rules, stays below it.
func FuzzCheckPath(f *testing.F) {
	for _, s := range []string{"a", "../a", "a/../b", `a\..\b`, "/a", `C:\a`, "a\x00", "\uff0e\uff0e/a", "a/.", strings.Repeat("a/", 100)} {
		f.Add(s, true)
		f.Add(s, false)
	}
	f.Fuzz(func(t *testing.T, path string, control bool) {
		if archive.CheckPath(path, control) != nil {
			return
		}
		for _, p := range []string{path, strings.ReplaceAll(path, `\`, "/")} {
			joined := filepath.Join("/root/dir", p)
			if !strings.HasPrefix(joined, "/root/dir/") && joined != "/root/dir" {
				t.Errorf("%q joins to %q", p, joined)
			}
		}
		if path == "" || path[0] == '/' || strings.Contains(path, "\x00") || filepath.Clean(path) != path {
			t.Errorf("%q is accepted", path)
		}
	})
}
