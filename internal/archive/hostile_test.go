package archive_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
)

// craft makes an archive of headers as they are; a file's content is its name
// over and over.
func craft(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	return compress(t, craftPlain(t, headers...))
}

// craftPlain is craft without the compression.
func craftPlain(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var plain bytes.Buffer
	w := tar.NewWriter(&plain)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("craft %q: %v", h.Name, err)
		}
		if _, err := io.CopyN(w, repeat("x"), h.Size); err != nil && h.Size > 0 {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return plain.Bytes()
}

type repeat string

func (r repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r[i%len(r)]
	}
	return len(p), nil
}

func compress(t testing.TB, plain []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(64<<10), zstd.WithZeroFrames(true))
	if err != nil {
		t.Fatal(err)
	}
	return z.EncodeAll(plain, nil)
}

func file(name string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: 3}
}

func link(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}
}

func folder(name string) tar.Header {
	return tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}
}

// rawName makes an entry with a name that a tar writer refuses to write, by a
// PAX record put together by hand.
func rawName(t *testing.T, key, value string) []byte {
	t.Helper()
	record := func(k, v string) string {
		for n := len(k) + len(v) + 3; ; n++ {
			if s := fmt.Sprintf("%d %s=%s\n", n, k, v); len(s) == n {
				return s
			}
		}
	}
	body := record(key, value)
	var plain bytes.Buffer
	w := tar.NewWriter(&plain)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "pax", Size: int64(len(body))}); err != nil {
		t.Fatal(err)
	}
	plain.WriteString(body)
	plain.Write(make([]byte, -len(body)&511))
	b := plain.Bytes()
	b[156] = tar.TypeXHeader
	// The checksum covers the type: recompute it.
	copy(b[148:156], "        ")
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	rest := tar.NewWriter(&plain)
	if err := rest.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "short", Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if err := rest.Close(); err != nil {
		t.Fatal(err)
	}
	return compress(t, plain.Bytes())
}

// refused unpacks data into a directory that already holds something and sees
// that nothing changes, inside or outside, and that the error has the kind and
// names the entry.
func refused(t *testing.T, data []byte, kind ci.Kind, name string) {
	t.Helper()
	outer := t.TempDir()
	dir := filepath.Join(outer, "work", "dir")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, outer, "outside", []byte("before"), 0o644)
	write(t, dir, "inside", []byte("before"), 0o644)
	if err := os.Symlink("..", filepath.Join(dir, "up")); err != nil {
		t.Fatal(err)
	}
	before := tree(t, outer)
	_, err := archive.Unpack(t.Context(), bytes.NewReader(data), dir, archive.SourceLimits(), archive.UnpackOptions{Replace: true})
	if !errors.Is(err, kind) {
		t.Errorf("error %v, want %s", err, kind)
	} else if name != "" && !strings.Contains(err.Error(), fmt.Sprintf("%q", name)) {
		t.Errorf("error %q does not name %q", err, name)
	}
	sameTree(t, tree(t, outer), before)
	// A directory that was missing is missing again.
	fresh := filepath.Join(outer, "fresh")
	if _, err := archive.Unpack(t.Context(), bytes.NewReader(data), fresh, archive.SourceLimits(), archive.UnpackOptions{}); err == nil {
		t.Error("unpacked into a new directory")
	}
	if _, err := os.Lstat(fresh); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the new directory is left: %v", err)
	}
}

// ATTACKS S40: names that lead out, or that would on another system.
func TestAttack_S40_Names(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"../x", "../../etc/x", "..", "a/../../x", "a/..", "a/../b", "./../x", "a/b/c/../../../../x", "../", "../../",
		"/x", "/", "//x", "/etc/passwd", "/../x", "/tmp/abs", "///",
		".", "./x", "a/./b", "a//b", "a/.", "./", "a/b//",
		`\x`, `\\srv\share\x`, `..\x`, `a\..\..\x`, `..\..\x`, `a/..\x`, `a\..`, `\\?\C:\x`, `\`,
		`C:\x`, `c:/x`, `C:\..\x`, `Z:\`, `C:/../x`,
		"\u2025/x", "\uff0e\uff0e/x", "\u2024\u2024/x", "\ufe52\ufe52/x", "a/\uff0e./x", "..\uff0fx", "..\uff3cx", "\uff0e\uff0e\uff0fx", ".\u2024/x", "a\\\uff0e\uff0e\\x",
		"a\x01b", "a\nb", "a\rb", "a\tb", "\x1b[2J", "a\x7f", "\b", "tab\t/x",
	} {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			t.Parallel()
			h := file(name)
			if strings.HasSuffix(name, "/") {
				h.Typeflag, h.Size = tar.TypeDir, 0
			}
			refused(t, craft(t, file("!good"), h), ci.ErrUnsafe, "")
			if err := archive.CheckPath(name, false); !errors.Is(err, ci.ErrUnsafe) {
				t.Errorf("CheckPath: %v, want ErrUnsafe", err)
			}
		})
	}
	t.Run("empty", func(t *testing.T) {
		t.Parallel()
		refused(t, craft(t, file("")), ci.ErrUnsafe, "")
	})
	for _, name := range []string{"a\x00b", "\x00", "a\x00/../../x"} {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			t.Parallel()
			refused(t, rawName(t, "path", name), ci.ErrDigest, "")
			if err := archive.CheckPath(name, true); !errors.Is(err, ci.ErrUnsafe) {
				t.Errorf("CheckPath: %v, want ErrUnsafe", err)
			}
		})
	}
	for n, kind := range map[int]ci.Kind{4097: ci.ErrTooLarge, 1 << 20: ci.ErrTooLarge, 3 << 20: ci.ErrTooLarge} {
		t.Run(fmt.Sprintf("%d bytes", n), func(t *testing.T) {
			t.Parallel()
			refused(t, rawName(t, "path", strings.Repeat("n", n)), kind, "")
		})
	}
}

// CACHE-05, ATTACKS S41: links, special files, duplicates, entries through
// links. Each is refused before anything is written, by its name.
func TestCase_CACHE_05_EscapingArchives(t *testing.T) {
	t.Parallel()
	special := func(typ byte, name string) tar.Header {
		return tar.Header{Typeflag: typ, Name: name, Linkname: "target", Mode: 0o644}
	}
	for what, c := range map[string]struct {
		data []byte
		name string
	}{
		"link to an absolute path":         {craft(t, link("a", "/tmp")), "a"},
		"link out":                         {craft(t, link("a", "../../x")), "a"},
		"link out from below":              {craft(t, link("d/a", "../../x")), "d/a"},
		"link with a drive":                {craft(t, link("a", `C:\Windows`)), "a"},
		"link with backslashes":            {craft(t, link("a", `..\..\x`)), "a"},
		"link with a control byte":         {craft(t, link("a", "b\n")), "a"},
		"link chain that climbs":           {craft(t, link("d/e/up", "../.."), link("x", "d/e/up/..")), "x"},
		"link through a later link":        {craft(t, link("a", "z/.."), link("z", "d/e/f")), "a"},
		"file through a link out":          {craft(t, link("a", "/tmp"), file("a/pwn")), "a"},
		"file through a link inside":       {craft(t, link("a", "b"), file("a/pwn")), "a/pwn"},
		"file through a link, later":       {craft(t, link("a", "b"), file("a-b"), file("a.c"), file("a/pwn")), "a/pwn"},
		"directory through a link":         {craft(t, link("a", "b"), folder("a/d")), "a/d"},
		"file through a file":              {craft(t, file("a"), file("a/b")), "a/b"},
		"link, then a directory there":     {craft(t, link("a", "b"), folder("a")), "a"},
		"file, then a directory there":     {craft(t, file("a"), folder("a")), "a"},
		"file twice":                       {craft(t, file("a"), file("a")), "a"},
		"out of order":                     {craft(t, file("b"), file("a")), "a"},
		"hard link out":                    {craft(t, tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "../outside"}), "a"},
		"hard link inside":                 {craft(t, file("0"), tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "0"}), "a"},
		"character device":                 {craft(t, special(tar.TypeChar, "a")), "a"},
		"block device":                     {craft(t, special(tar.TypeBlock, "a")), "a"},
		"named pipe":                       {craft(t, special(tar.TypeFifo, "a")), "a"},
		"contiguous file":                  {craft(t, special(tar.TypeCont, "a")), "a"},
		"unknown type":                     {craft(t, special('Z', "a")), "a"},
		"below a link that stands there":   {craft(t, file("up/outside")), "up/outside"},
		"into a link that stands there":    {craft(t, folder("up")), "up"},
		"a directory where a file stands":  {craft(t, folder("inside")), "inside"},
		"below a file that stands there":   {craft(t, file("inside/x")), "inside/x"},
		"good ones before the bad one":     {craft(t, file("a"), file("b"), folder("c"), file("c/d"), link("z", "/etc")), "z"},
		"directory below a standing link":  {craft(t, folder("up/new")), "up/new"},
		"link below a link standing there": {craft(t, link("up/new", "x")), "up/new"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			standing := strings.Contains(what, "stand")
			if !standing {
				refused(t, c.data, ci.ErrUnsafe, c.name)
				return
			}
			dir := t.TempDir()
			write(t, dir, "outside", []byte("before"), 0o644)
			write(t, dir, "in/inside", []byte("before"), 0o644)
			if err := os.Symlink("..", filepath.Join(dir, "in/up")); err != nil {
				t.Fatal(err)
			}
			before := tree(t, dir)
			_, err := archive.Unpack(t.Context(), bytes.NewReader(c.data), filepath.Join(dir, "in"), archive.SourceLimits(), archive.UnpackOptions{Replace: true})
			if !errors.Is(err, ci.ErrUnsafe) || !strings.Contains(err.Error(), fmt.Sprintf("%q", c.name)) {
				t.Errorf("error %v, want ErrUnsafe that names %q", err, c.name)
			}
			sameTree(t, tree(t, dir), before)
		})
	}
}

// CACHE-05: a harmless link stays a link; setuid, setgid and sticky are dropped.
func TestCase_CACHE_05_BenignLinksStayAndSetuidGoes(t *testing.T) {
	t.Parallel()
	suid := file("bin/su")
	suid.Mode = 0o7755
	dirMode := folder("bin")
	dirMode.Mode = 0o2755
	dir := filepath.Join(t.TempDir(), "out")
	data := craft(t, dirMode, suid, link("lib/lib.so", "lib.so.1"), file("lib/lib.so.1"), link("top", "lib/../bin/./su"))
	if _, err := archive.Unpack(t.Context(), bytes.NewReader(data), dir, archive.SourceLimits(), archive.UnpackOptions{}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{"bin/su": 0o755, "bin": os.ModeDir | 0o755} {
		info, err := os.Lstat(filepath.Join(dir, path))
		if err != nil || info.Mode() != want {
			t.Errorf("%s: mode %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
	for path, want := range map[string]string{"lib/lib.so": "lib.so.1", "top": "lib/../bin/./su"} {
		if got, err := os.Readlink(filepath.Join(dir, path)); got != want {
			t.Errorf("%s: link to %q, %v, want %q", path, got, err, want)
		}
	}
}

// CACHE-06: what an archive holds can be put over an existing copy.
func TestUnpackOverAnExistingCopy(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	write(t, src, "d/read-only", []byte("new"), 0o444)
	write(t, src, "d/large", noise(1<<20, 3), 0o640)
	if err := os.Symlink("large", filepath.Join(src, "d/link")); err != nil {
		t.Fatal(err)
	}
	data, _ := pack(t, src, 1)
	dst := t.TempDir()
	write(t, dst, "d/large", []byte("old"), 0o444)
	write(t, dst, "d/link", []byte("old"), 0o444)
	write(t, dst, "other", []byte("other"), 0o644)
	_, err := archive.Unpack(t.Context(), bytes.NewReader(data), dst, archive.ArtifactLimits(), archive.UnpackOptions{})
	if !errors.Is(err, ci.ErrConflict) || !strings.Contains(err.Error(), `"d/l`) {
		t.Errorf("error %v, want ErrConflict that names what is in the way", err)
	}
	want := tree(t, src)
	want["other"] = tree(t, dst)["other"]
	for range 2 {
		if _, err := archive.Unpack(t.Context(), bytes.NewReader(data), dst, archive.ArtifactLimits(), archive.UnpackOptions{Replace: true}); err != nil {
			t.Fatal(err)
		}
		sameTree(t, tree(t, dst), want)
	}
}

// A link that stands where a file is to be written is replaced, not followed.
func TestUnpackNeverWritesThroughAStandingLink(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "victim", []byte("untouched"), 0o644)
	if err := os.Mkdir(filepath.Join(dir, "in"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"../victim", "sibling", filepath.Join(dir, "victim")} {
		if err := os.Symlink(target, filepath.Join(dir, "in/f")); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Unpack(t.Context(), bytes.NewReader(craft(t, file("f"))), filepath.Join(dir, "in"), archive.SourceLimits(), archive.UnpackOptions{}); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("error %v, want ErrConflict", err)
		}
		if _, err := archive.Unpack(t.Context(), bytes.NewReader(craft(t, file("f"))), filepath.Join(dir, "in"), archive.SourceLimits(), archive.UnpackOptions{Replace: true}); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "victim")); string(b) != "untouched" {
			t.Errorf("the link's target holds %q, %v", b, err)
		}
		if _, err := os.Lstat(filepath.Join(dir, "in/sibling")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the link's target was made: %v", err)
		}
		if err := os.Remove(filepath.Join(dir, "in/f")); err != nil {
			t.Fatal(err)
		}
	}
}

// ATTACKS S44: bombs stop at the limits, with bounded memory and nothing left.
func TestAttack_S44_Bombs(t *testing.T) { //nolint:paralleltest // it measures memory
	big := func(name string, size int64) []byte {
		var buf bytes.Buffer
		z, err := zstd.NewWriter(&buf)
		if err != nil {
			t.Fatal(err)
		}
		w := tar.NewWriter(z)
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(w, repeat("\x00"), size); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.Close(), z.Close()); err != nil {
			t.Fatal(err)
		}
		return buf.Bytes()
	}
	many := func(n int, rest string) []byte {
		var buf bytes.Buffer
		z, err := zstd.NewWriter(&buf)
		if err != nil {
			t.Fatal(err)
		}
		w := tar.NewWriter(z)
		for i := range n {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%09d", i) + rest, Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(w.Close(), z.Close()); err != nil {
			t.Fatal(err)
		}
		return buf.Bytes()
	}
	// Extended headers without an end, that one call of a tar reader would eat.
	endless := func() []byte {
		var plain bytes.Buffer
		one := rawNameBlocks(t)
		for plain.Len() < 4<<20 {
			plain.Write(one)
		}
		return compress(t, plain.Bytes())
	}
	limits := archive.SourceLimits()
	small := limits
	small.Bytes, small.File = 1<<20, 1<<20
	for what, c := range map[string]struct {
		data []byte
		lim  archive.Limits
	}{
		"ratio":              {big("bomb", 200<<20), limits},
		"one file":           {big("bomb", 2<<20), small},
		"entries":            {many(limits.Entries+1, ""), limits},
		"long names":         {many(20_000, strings.Repeat("/"+strings.Repeat("n", 200), 20)), limits},
		"endless extensions": {endless(), limits},
		"many empty":         {craft(t, file("a"), file("b")), archive.Limits{Entries: 1, Bytes: 1 << 20, File: 1 << 20, Path: 100, Names: 100, Ratio: 100}},
		"sum":                {craft(t, file("a"), file("b")), archive.Limits{Entries: 10, Bytes: 5, File: 5, Path: 100, Names: 100, Ratio: 100}},
		"window":             {window(t), limits},
	} {
		t.Run(what, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			dir := filepath.Join(t.TempDir(), "out")
			_, err := archive.Unpack(t.Context(), bytes.NewReader(c.data), dir, c.lim, archive.UnpackOptions{})
			if !errors.Is(err, ci.ErrTooLarge) {
				t.Errorf("error %v, want ErrTooLarge", err)
			}
			if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is left: %v", err)
			}
			runtime.ReadMemStats(&after)
			if grown := int64(after.Sys) - int64(before.Sys); grown > 128<<20 {
				t.Errorf("memory grew by %d MiB", grown>>20)
			}
		})
	}
}

// rawNameBlocks is one extended header of the largest size, without an entry.
func rawNameBlocks(t *testing.T) []byte {
	t.Helper()
	body := "30 mtime=1350244992.023960108\n"
	var plain bytes.Buffer
	w := tar.NewWriter(&plain)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "pax", Size: int64(len(body))}); err != nil {
		t.Fatal(err)
	}
	plain.WriteString(body)
	plain.Write(make([]byte, -len(body)&511))
	b := plain.Bytes()
	b[156] = tar.TypeXHeader
	copy(b[148:156], "        ")
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// window is an archive whose frame asks for a window of 512 MiB.
func window(t *testing.T) []byte {
	t.Helper()
	var buf bytes.Buffer
	z, err := zstd.NewWriter(&buf, zstd.WithWindowSize(512<<20), zstd.WithSingleSegment(false))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(z, repeat("not a tar, but that is not looked at "), 20<<20); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// A sparse file could stand for any size; it is refused.
func TestSparseFilesAreRefused(t *testing.T) {
	t.Parallel()
	refused(t, rawName(t, "GNU.sparse.name", "a"), ci.ErrUnsafe, "")
}

// Damaged and cut archives are ErrDigest wherever they are cut, and leave
// nothing.
func TestDamagedArchives(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	write(t, src, "a", noise(5000, 1), 0o644)
	write(t, src, "b", noise(300<<10, 2), 0o644)
	data, _ := pack(t, src, 1)
	try := func(what string, bad []byte) {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "out")
		_, err := archive.Unpack(t.Context(), bytes.NewReader(bad), dir, archive.SourceLimits(), archive.UnpackOptions{})
		if !errors.Is(err, ci.ErrDigest) && !errors.Is(err, ci.ErrUnsafe) && !errors.Is(err, ci.ErrTooLarge) {
			t.Errorf("%s: error %v, want ErrDigest", what, err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: something is left", what)
		}
	}
	for _, n := range []int{0, 1, 3, 4, 100, len(data) / 2, len(data) - 5, len(data) - 4, len(data) - 1} {
		try(fmt.Sprintf("cut at %d", n), data[:n])
	}
	for i := 0; i < len(data); i += 1 + len(data)/200 {
		bad := bytes.Clone(data)
		bad[i] ^= 0x10
		try(fmt.Sprintf("bit at %d", i), bad)
	}
	try("bytes after the end", append(bytes.Clone(data), "more"...))
	try("a second archive after the end", append(bytes.Clone(data), data...))
	var padded bytes.Buffer
	w := tar.NewWriter(&padded)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	try("bytes after the end mark", compress(t, append(padded.Bytes(), 0, 0, 1)))
	try("not an archive", []byte("hello"))
	try("an empty frame", compress(t, nil))
}

// S43: while files and links change places all the time, nothing from outside
// gets into an archive.
func TestAttack_S43_LinksThatFlip(t *testing.T) {
	t.Parallel()
	outer := t.TempDir()
	canary := []byte("CANARY-OUTSIDE-OF-THE-WORKSPACE")
	write(t, outer, "secret", canary, 0o644)
	write(t, outer, "secrets/f", canary, 0o644)
	work := filepath.Join(outer, "work")
	write(t, work, "f", []byte("file that is inside the tree..."), 0o644)
	write(t, work, "d/f", []byte("file that is inside the tree..."), 0o644)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			for path, target := range map[string]string{"f": "../secret", "d": "../secrets"} {
				at := filepath.Join(work, path)
				_ = os.Rename(at, at+".away")
				_ = os.Symlink(target, at)
				_ = os.Remove(at)
				_ = os.Rename(at+".away", at)
			}
		}
	}()
	defer func() { close(stop); <-done }()
	root, err := os.OpenRoot(work)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	stored := 0
	for range 3000 {
		found, err := archive.Walk(t.Context(), root, "", nil)
		if err != nil {
			continue
		}
		var buf bytes.Buffer
		if _, err := archive.Pack(t.Context(), &buf, root, found.Entries, archive.ArtifactLimits(), 1); err != nil {
			continue
		}
		_, err = archive.Read(t.Context(), &buf, archive.ArtifactLimits(), func(e archive.Entry, content io.Reader) error {
			b, err := io.ReadAll(content)
			if bytes.Contains(b, []byte("CANARY")) {
				t.Fatalf("%q holds bytes from outside", e.Path)
			}
			stored++
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if stored == 0 {
		t.Error("no archive was made: the test saw nothing")
	}
}

// Special files and unreadable ones are listed by name, all of them.
func TestWalkListsWhatCannotBeStored(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "good", nil, 0o644)
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	// A socket's name must be short; a link makes it so.
	short := filepath.Join(os.TempDir(), fmt.Sprintf("forgeci-sock-%d", os.Getpid()))
	if err := os.Symlink(dir, short); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(short)
	l, err := net.Listen("unix", filepath.Join(short, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	walked, err := archive.Walk(t.Context(), root, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	scanned, err := archive.Scan(t.Context(), root, []string{"sock", "good", "gone", "pipe", "good/below"}, 2)
	if err != nil {
		t.Fatal(err)
	}
	for what, s := range map[string]*archive.Scanned{"Walk": walked, "Scan": scanned} {
		want := []archive.Refusal{{Path: "pipe", Why: "a named pipe"}, {Path: "sock", Why: "a socket"}}
		if !slices.Equal(s.Refused, want) {
			t.Errorf("%s refuses %v, want %v", what, s.Refused, want)
		}
		if len(s.Entries) != 1 || s.Entries[0].Path != "good" {
			t.Errorf("%s finds %v, want good", what, s.Entries)
		}
		err := s.Err()
		if !errors.Is(err, ci.ErrUnsafe) || !strings.Contains(err.Error(), `"pipe" is a named pipe`) || !strings.Contains(err.Error(), `"sock" is a socket`) {
			t.Errorf("%s: error %v, want ErrUnsafe that names both", what, err)
		}
	}
	if want := []string{"gone", "good/below"}; !slices.Equal(scanned.Missing, want) {
		t.Errorf("Scan misses %q, want %q", scanned.Missing, want)
	}
}
