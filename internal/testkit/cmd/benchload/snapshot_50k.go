package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"forgeci/internal/archive"
	"forgeci/internal/source"
)

// snapshot50k compares the capture of 50,000 files with what tar and a
// compressor on all processors need for them, both with their files in memory.
func (b *bench) snapshot50k(ctx context.Context) error {
	const files, rounds = 50_000, 3
	dir := filepath.Join(b.dir, "snapshot")
	defer os.RemoveAll(dir) // it is in a directory that is removed
	tree := filepath.Join(dir, "tree")
	if err := largeTree(tree, files); err != nil {
		return err
	}
	compressor := "zstd -q -T0"
	if _, err := exec.LookPath("zstd"); err != nil {
		compressor = "gzip -1"
		b.logf("snapshot_50k: no zstd on this machine, compared with %s", compressor)
	}
	packed := filepath.Join(dir, "reference")
	reference := func() error {
		cmd := b.command(ctx, dir, "/bin/sh", "-c", "tar -c -f - tree | "+compressor+" > reference")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("tar: %w\n%s", err, out)
		}
		return nil
	}
	var size int64
	digest := ""
	capture := func() error {
		snap, err := source.Capture(ctx, tree, source.CaptureOptions{TempDir: dir, Limits: archive.SourceLimits()})
		if err != nil {
			return err
		}
		defer snap.Close() // only its digest was wanted
		if snap.Files != files || digest != "" && snap.Digest != digest {
			return fmt.Errorf("captured %d files as %s, then %s", snap.Files, digest, snap.Digest)
		}
		size, digest = snap.Size, snap.Digest
		return nil
	}
	var ours, theirs []time.Duration
	for i := range rounds + 1 {
		mine, err := timed(capture)
		if err != nil {
			return err
		}
		other, err := timed(reference)
		if err != nil {
			return err
		}
		if i > 0 { // the first brings the files into memory
			ours, theirs = append(ours, mine), append(theirs, other)
		}
	}
	info, err := os.Stat(packed)
	if err != nil {
		return err
	}
	our, their := quantile(ours, 0.5), quantile(theirs, 0.5)
	b.logf("snapshot_50k: captured in %.2f s (%.1f MiB), tar | %s %.2f s (%.1f MiB)",
		our.Seconds(), mib(size), compressor, their.Seconds(), mib(info.Size()))
	line := struct {
		Bench string  `json:"bench"`
		Ratio float64 `json:"ratio_to_tar_zstd"`
	}{"snapshot_50k", round2(float64(our) / float64(their))}
	return b.report(line, "snapshot_50k", goal{name: "ratio_to_tar_zstd", got: line.Ratio, target: 2, floor: 3})
}

func timed(f func() error) (time.Duration, error) {
	begun := time.Now()
	err := f()
	return time.Since(begun), err
}

// largeTree writes files of 1 to 7 KiB that compress as source code does.
func largeTree(dir string, files int) error {
	r := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // the same tree every time
	text := words(r, 4<<20)
	const perDir = 100
	for i := range files {
		sub := filepath.Join(dir, fmt.Sprintf("d%02d", i/perDir/25), fmt.Sprintf("d%02d", i/perDir%25))
		if i%perDir == 0 {
			if err := os.MkdirAll(sub, 0o755); err != nil {
				return err
			}
		}
		size := 1<<10 + r.IntN(6<<10)
		from := r.IntN(len(text) - size)
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprintf("file%05d.go", i)), []byte(text[from:from+size]), 0o644); err != nil {
			return err
		}
	}
	return nil
}
