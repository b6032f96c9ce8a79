package powerfs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"forgeci/internal/testkit/powerfs"
)

// What is synced, with its name, survives every cut from then on; what is not may
// be missing, whole or torn at a sector, and in some cut is each of these.
func TestACutKeepsWhatWasSynced(t *testing.T) {
	t.Parallel()
	f := powerfs.Mount(t)
	old, fresh := bytes.Repeat([]byte("a"), 8192), bytes.Repeat([]byte("b"), 8192)
	file, err := os.Create(filepath.Join(f.Dir(), "new"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	write := func(b []byte) {
		if _, err := file.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
	}
	write(old)
	if err := file.Sync(); err != nil {
		t.Fatal(err)
	}
	unnamed := f.Now()
	if err := os.Rename(filepath.Join(f.Dir(), "new"), filepath.Join(f.Dir(), "name")); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(f.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		t.Fatal(err)
	}
	write(fresh)
	seen := map[string]bool{}
	for seed := range uint64(200) {
		to := t.TempDir()
		if err := f.Cut(f.Now(), seed, to); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(to, "name"))
		if err != nil || len(got) != len(old) {
			t.Fatalf("seed %d: %d bytes, %v", seed, len(got), err)
		}
		n := bytes.Count(got, []byte("b"))
		switch {
		case n%512 != 0:
			t.Fatalf("seed %d: a sector is torn", seed)
		case n == 0:
			seen["lost"] = true
		case n == len(fresh):
			seen["whole"] = true
		case n%4096 != 0:
			seen["torn"] = true
		}
		to = t.TempDir()
		if err := f.Cut(unnamed, seed, to); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(to, "new")); err != nil {
			seen["without a name"] = true
		}
	}
	if len(seen) != 4 {
		t.Errorf("seen: %v", seen)
	}
	to := t.TempDir()
	if err := f.Copy(to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "name")); err != nil || !bytes.Equal(got, fresh) {
		t.Errorf("a copy lost something: %v", err)
	}
}

// A sync that fails says so and makes nothing durable.
func TestSyncsFail(t *testing.T) {
	t.Parallel()
	f := powerfs.Mount(t)
	file, err := os.Create(filepath.Join(f.Dir(), "name"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	f.FailSyncs(true)
	if err := file.Sync(); !errors.Is(err, syscall.EIO) || f.Failed() != 1 || len(f.Syncs()) != 0 {
		t.Errorf("sync: %v, %d failed, %d succeeded", err, f.Failed(), len(f.Syncs()))
	}
	f.FailSyncs(false)
	if err := file.Sync(); err != nil || len(f.Syncs()) != 1 {
		t.Errorf("sync: %v, %d succeeded", err, len(f.Syncs()))
	}
}
