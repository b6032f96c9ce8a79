// Package powerfs is a file system for tests that remembers the order of
// everything that was written to it, and what was made durable when. From that
// it makes the disk as it may be after the power failed at any moment: what was
// synced is there, of the rest each write is there, missing or torn. It can also
// fail when it is asked to sync. It keeps its files in memory and is mounted with
// FUSE, so that real processes use it.
package powerfs

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	gofs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// FS is a mounted file system. Its methods may be called from any goroutine. The
// test process itself must not map its files into memory.
type FS struct {
	dir string

	mu      sync.Mutex
	journal []op // guarded by mu
	nodes   int  // IDs given so far; guarded by mu
	failing bool // guarded by mu
	failed  int  // syncs that failed; guarded by mu
}

// kind is what an entry of the journal did.
type kind int

const (
	opWrite kind = iota
	opTruncate
	opSync // of a file's content or of a directory's names
	opAdd  // a name for a node
	opRemove
	opRename
)

// op is one entry of the journal. node is what it changed: for names the
// directory.
type op struct {
	kind  kind
	node  int
	off   int64 // of a write; size of a truncation
	data  []byte
	name  string
	child int
	mode  uint32 // of an added child
	dest  int    // of a rename
	as    string
}

// Mount mounts an empty file system at a new directory, until the test ends.
func Mount(t testing.TB) *FS {
	t.Helper()
	f := &FS{dir: t.TempDir()}
	root := &node{fs: f, id: f.newID(), mode: syscall.S_IFDIR | 0o755}
	server, err := gofs.Mount(f.dir, root, &gofs.Options{
		MountOptions: fuse.MountOptions{FsName: "powerfs", Name: "powerfs", DirectMount: true, MaxWrite: 1 << 20},
	})
	if err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Errorf("unmount %s: %v", f.dir, err)
		}
	})
	return f
}

// Dir returns where it is mounted.
func (f *FS) Dir() string { return f.dir }

// Now returns the position in the journal: everything before it has been done.
func (f *FS) Now() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.journal)
}

// Syncs lists the positions directly behind each successful sync.
func (f *FS) Syncs() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	var at []int
	for i, o := range f.journal {
		if o.kind == opSync {
			at = append(at, i+1)
		}
	}
	return at
}

// FailSyncs makes every sync fail with EIO, or succeed again.
func (f *FS) FailSyncs(failing bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failing = failing
}

// Failed counts the syncs that failed.
func (f *FS) Failed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

func (f *FS) newID() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes++
	return f.nodes
}

func (f *FS) log(o op) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.journal = append(f.journal, o)
}

// sync logs that a node is durable, or fails.
func (f *FS) sync(id int) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failing {
		f.failed++
		return syscall.EIO
	}
	f.journal = append(f.journal, op{kind: opSync, node: id})
	return 0
}

// Copy writes the files as they are now into a directory.
func (f *FS) Copy(to string) error { return f.image(f.Now(), nil).write(to) }

// Cut writes into a directory what a disk may hold when the power fails at a
// position: the seed chooses what becomes of that which was not synced.
func (f *FS) Cut(position int, seed uint64, to string) error {
	return f.image(position, rand.New(rand.NewPCG(seed, uint64(position)))).write(to)
}

// image is what a disk holds.
type image struct {
	content map[int][]byte
	names   map[int]map[string]int
	mode    map[int]uint32
}

// Sizes in which a disk writes: a sector is written whole or not at all, a page
// may be torn between its sectors.
const (
	sector = 512
	page   = 4096
)

// image replays the journal; without random nothing is lost.
func (f *FS) image(position int, random *rand.Rand) *image {
	f.mu.Lock()
	defer f.mu.Unlock()
	journal := f.journal[:position]
	synced := map[int]int{} // node -> position of its last sync
	for i, o := range journal {
		if o.kind == opSync {
			synced[o.node] = i
		}
	}
	// Names that were not synced survive up to some change of their directory, in
	// the order in which they were made.
	horizon := map[int]int{}
	im := &image{content: map[int][]byte{}, names: map[int]map[string]int{1: {}}, mode: map[int]uint32{1: syscall.S_IFDIR | 0o755}}
	for i, o := range journal {
		durable := random == nil || i < synced[o.node] || o.kind == opRename && i < synced[o.dest]
		switch o.kind {
		case opSync:
		case opWrite:
			if durable {
				im.put(o.node, o.off, o.data)
			} else {
				im.tear(o, random)
			}
		case opTruncate:
			if durable || random.IntN(2) == 0 {
				im.resize(o.node, o.off)
			}
		case opAdd, opRemove, opRename:
			dir := o.node
			if o.kind == opRename {
				dir = o.dest
			}
			if !durable && horizon[dir] == 0 {
				horizon[dir] = i + random.IntN(len(journal)-i+1) + 1
			}
			if durable || i+1 < horizon[dir] {
				im.rename(o)
			}
		}
	}
	return im
}

// tear applies a part of a write that was not synced.
func (im *image) tear(o op, random *rand.Rand) {
	for start := 0; start < len(o.data); {
		end := min(start+page-int(o.off+int64(start))%page, len(o.data))
		switch random.IntN(3) {
		case 0: // lost
		case 1:
			im.put(o.node, o.off+int64(start), o.data[start:end])
		case 2: // torn between two sectors
			sectors := (end - start + sector - 1) / sector
			keep := min(start+random.IntN(sectors+1)*sector, end)
			im.put(o.node, o.off+int64(start), o.data[start:keep])
		}
		start = end
	}
}

func (im *image) put(node int, off int64, data []byte) {
	if need := off + int64(len(data)); need > int64(len(im.content[node])) && len(data) > 0 {
		im.resize(node, need)
	}
	copy(im.content[node][min(off, int64(len(im.content[node]))):], data)
}

func (im *image) resize(node int, size int64) {
	old := im.content[node]
	if size <= int64(cap(old)) {
		grown := old[:size]
		if int64(len(old)) < size {
			clear(grown[len(old):])
		}
		im.content[node] = grown
		return
	}
	grown := make([]byte, size, 2*size)
	copy(grown, old)
	im.content[node] = grown
}

func (im *image) rename(o op) {
	switch o.kind {
	case opAdd:
		im.dirOf(o.node)[o.name] = o.child
		im.mode[o.child] = o.mode
	case opRemove:
		delete(im.dirOf(o.node), o.name)
	case opRename:
		delete(im.dirOf(o.node), o.name)
		im.dirOf(o.dest)[o.as] = o.child
		im.mode[o.child] = o.mode
	case opWrite, opTruncate, opSync:
	}
}

func (im *image) dirOf(node int) map[string]int {
	if im.names[node] == nil {
		im.names[node] = map[string]int{}
	}
	return im.names[node]
}

// write makes the directory tree.
func (im *image) write(to string) error { return im.writeDir(1, to) }

func (im *image) writeDir(node int, path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	for name, child := range im.names[node] {
		at, mode := filepath.Join(path, name), im.mode[child]
		var err error
		if mode&syscall.S_IFMT == syscall.S_IFDIR {
			err = im.writeDir(child, at)
		} else {
			err = os.WriteFile(at, im.content[child], os.FileMode(mode&0o777))
		}
		if err != nil {
			return fmt.Errorf("write the disk's image: %w", err)
		}
	}
	return nil
}
