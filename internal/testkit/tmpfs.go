package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Disk is a small file system of its own.
type Disk struct {
	Dir  string
	fill string
}

// NewDisk mounts a disk of a size in bytes, until the test ends. It needs root.
func NewDisk(t testing.TB, size int64) *Disk {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0755", size)); err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return &Disk{Dir: dir, fill: filepath.Join(dir, "fill")}
}

// Fill leaves no more than rest bytes free.
func (d *Disk) Fill(t testing.TB, rest int64) {
	t.Helper()
	f, err := os.Create(d.fill)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	at := int64(0)
	for chunk := int64(16 << 20); chunk >= 4<<10; { // others write meanwhile
		var fs syscall.Statfs_t
		if err := syscall.Statfs(d.Dir, &fs); err != nil {
			t.Fatal(err)
		}
		if int64(fs.Bavail)*fs.Bsize-chunk < rest || syscall.Fallocate(int(f.Fd()), 0, at, chunk) != nil {
			chunk /= 2
			continue
		}
		at += chunk
	}
}

// Clear gives the space back.
func (d *Disk) Clear(t testing.TB) {
	t.Helper()
	if err := os.Remove(d.fill); err != nil {
		t.Fatal(err)
	}
}
