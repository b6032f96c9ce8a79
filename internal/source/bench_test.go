package source_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"forgeci/internal/archive"
	"forgeci/internal/source"
)

// tree50k makes a tree like a large repository of source code: 50,000 files of
// 0.5 to 6.5 kB in 2,000 directories.
func tree50k(b *testing.B) string {
	b.Helper()
	dir := b.TempDir()
	r := rand.New(rand.NewPCG(1, 2))
	words := []string{"func ", "return ", "err ", "nil", "if ", "package ", "import ", "context.", "string ", "int ", "struct ", "\n\t", "{\n", "}\n", " == "}
	for i := range 50_000 {
		at := filepath.Join(dir, fmt.Sprintf("d%03d/s%02d", i%200, i/200%10))
		if err := os.MkdirAll(at, 0o755); err != nil {
			b.Fatal(err)
		}
		var text []byte
		for size := 500 + r.IntN(6000); len(text) < size; {
			text = append(text, words[r.IntN(len(words))]...)
			text = append(text, byte('a'+r.IntN(26)), byte('a'+r.IntN(26)))
		}
		if err := os.WriteFile(filepath.Join(at, fmt.Sprintf("f%d.go", i)), text, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	return dir
}

// tarZstd returns the time that tar and zstd take for the tree, piped.
func tarZstd(b *testing.B, dir string) time.Duration {
	b.Helper()
	start := time.Now()
	cmd := exec.CommandContext(b.Context(), "sh", "-c", `tar -C "$1" -cf - . | zstd -q -o "$2"`, "sh", dir, filepath.Join(b.TempDir(), "out.zst"))
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("tar | zstd: %v\n%s", err, out)
	}
	return time.Since(start)
}

// BenchmarkSnapshot50k measures the capture of 50,000 files as a ratio to
// tar | zstd of the same tree, taken in turns; the target is 2, the floor 3.
func BenchmarkSnapshot50k(b *testing.B) {
	plain := tree50k(b)
	for _, in := range []string{"directory", "checkout"} {
		b.Run(in, func(b *testing.B) {
			if in == "checkout" {
				git(b, plain, "init", "-q")
				git(b, plain, "add", ".")
			}
			tarZstd(b, plain) // warms the page cache
			var peer time.Duration
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				peer += tarZstd(b, plain)
				b.StartTimer()
				s, err := source.Capture(b.Context(), plain, source.CaptureOptions{Untracked: true})
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(s.Bytes)
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed())/float64(peer), "ratio-to-tar-zstd")
		})
	}
	s := capture(b, plain, source.CaptureOptions{})
	blob, want := save(b, s)
	b.Run("verify", func(b *testing.B) {
		b.SetBytes(s.Bytes)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := source.Verify(b.Context(), s.Open(), archive.SourceLimits(), nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("materialise", func(b *testing.B) {
		b.SetBytes(s.Bytes)
		b.ReportAllocs()
		for b.Loop() {
			b.StopTimer()
			to := filepath.Join(b.TempDir(), "ws")
			b.StartTimer()
			if err := source.Materialise(b.Context(), blob, want, to, archive.SourceLimits()); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := os.RemoveAll(to); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
}

// BenchmarkSnapshotSmall is the source of an ordinary job: 200 files, 2 MB.
func BenchmarkSnapshotSmall(b *testing.B) {
	dir := b.TempDir()
	for i := range 200 {
		write(b, dir, fmt.Sprintf("d%d/f%d", i%20, i), string(make([]byte, 10<<10)), 0o644)
	}
	s := capture(b, dir, source.CaptureOptions{})
	blob, want := save(b, s)
	b.Run("capture", func(b *testing.B) {
		for b.Loop() {
			s, err := source.Capture(b.Context(), dir, source.CaptureOptions{})
			if err != nil {
				b.Fatal(err)
			}
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("verify", func(b *testing.B) {
		for b.Loop() {
			if _, err := source.Verify(b.Context(), s.Open(), archive.SourceLimits(), nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("materialise", func(b *testing.B) {
		parent := b.TempDir()
		for i := 0; b.Loop(); i++ {
			if err := source.Materialise(b.Context(), blob, want, filepath.Join(parent, fmt.Sprint(i)), archive.SourceLimits()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
