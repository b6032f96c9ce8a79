package powerfs

import (
	"context"
	"sync"
	"syscall"
	"time"

	gofs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// node is a file or a directory.
type node struct {
	gofs.Inode
	fs *FS
	id int

	mu   sync.Mutex
	mode uint32 // guarded by mu
	data []byte // guarded by mu
	// mtime is guarded by mu.
	mtime time.Time
}

// What the kernel may ask a node.
var (
	_ gofs.NodeGetattrer = (*node)(nil)
	_ gofs.NodeSetattrer = (*node)(nil)
	_ gofs.NodeOpener    = (*node)(nil)
	_ gofs.NodeCreater   = (*node)(nil)
	_ gofs.NodeReader    = (*node)(nil)
	_ gofs.NodeWriter    = (*node)(nil)
	_ gofs.NodeFsyncer   = (*node)(nil)
	_ gofs.NodeFlusher   = (*node)(nil)
	_ gofs.NodeMkdirer   = (*node)(nil)
	_ gofs.NodeUnlinker  = (*node)(nil)
	_ gofs.NodeRmdirer   = (*node)(nil)
	_ gofs.NodeRenamer   = (*node)(nil)
	_ gofs.NodeLinker    = (*node)(nil)
	_ gofs.NodeStatfser  = (*node)(nil)
)

func (n *node) attr(out *fuse.Attr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out.Mode, out.Size, out.Blocks, out.Blksize, out.Nlink = n.mode, uint64(len(n.data)), uint64(len(n.data)+511)/512, page, 1
	out.SetTimes(nil, &n.mtime, &n.mtime)
}

// Getattr answers what a node is.
func (n *node) Getattr(_ context.Context, _ gofs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.attr(&out.Attr)
	return 0
}

// Setattr changes mode, time and size; only the size matters to a disk.
func (n *node) Setattr(_ context.Context, _ gofs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	n.mu.Lock()
	if mode, ok := in.GetMode(); ok {
		n.mode = n.mode&syscall.S_IFMT | mode&0o7777
	}
	if at, ok := in.GetMTime(); ok {
		n.mtime = at
	}
	if size, ok := in.GetSize(); ok {
		n.resize(int64(size))
		n.fs.log(op{kind: opTruncate, node: n.id, off: int64(size)})
	}
	n.mu.Unlock()
	n.attr(&out.Attr)
	return 0
}

func (n *node) resize(size int64) {
	if size <= int64(len(n.data)) {
		n.data = n.data[:size:size]
		return
	}
	n.data = append(n.data, make([]byte, size-int64(len(n.data)))...)
}

// Open needs no handle: a node knows everything.
func (n *node) Open(context.Context, uint32) (gofs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_KEEP_CACHE, 0
}

func (n *node) child(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) *gofs.Inode {
	c := &node{fs: n.fs, id: n.fs.newID(), mode: mode, mtime: time.Now()}
	inode := n.NewPersistentInode(ctx, c, gofs.StableAttr{Mode: mode & syscall.S_IFMT, Ino: uint64(c.id)})
	n.AddChild(name, inode, true)
	n.fs.log(op{kind: opAdd, node: n.id, name: name, child: c.id, mode: mode})
	c.attr(&out.Attr)
	return inode
}

// Create makes a file and opens it.
func (n *node) Create(ctx context.Context, name string, _, mode uint32, out *fuse.EntryOut) (*gofs.Inode, gofs.FileHandle, uint32, syscall.Errno) {
	return n.child(ctx, name, mode&0o7777|syscall.S_IFREG, out), nil, 0, 0
}

// Mkdir makes a directory.
func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*gofs.Inode, syscall.Errno) {
	return n.child(ctx, name, mode&0o7777|syscall.S_IFDIR, out), 0
}

// Read reads from memory.
func (n *node) Read(_ context.Context, _ gofs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if off >= int64(len(n.data)) {
		return fuse.ReadResultData(nil), 0
	}
	return fuse.ReadResultData(dest[:copy(dest, n.data[off:])]), 0
}

// Write writes to memory and the journal.
func (n *node) Write(_ context.Context, _ gofs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if end := off + int64(len(data)); end > int64(len(n.data)) {
		n.resize(end)
	}
	copy(n.data[off:], data)
	n.mtime = time.Now()
	n.fs.log(op{kind: opWrite, node: n.id, off: off, data: append([]byte(nil), data...)})
	return uint32(len(data)), 0
}

// Fsync makes a file's content, or a directory's names, durable.
func (n *node) Fsync(context.Context, gofs.FileHandle, uint32) syscall.Errno { return n.fs.sync(n.id) }

// Flush is the end of a descriptor and makes nothing durable.
func (n *node) Flush(context.Context, gofs.FileHandle) syscall.Errno { return 0 }

// Unlink removes a file's name.
func (n *node) Unlink(_ context.Context, name string) syscall.Errno {
	n.fs.log(op{kind: opRemove, node: n.id, name: name})
	return 0
}

// Rmdir removes an empty directory.
func (n *node) Rmdir(_ context.Context, name string) syscall.Errno {
	if c := n.GetChild(name); c != nil && len(c.Children()) > 0 {
		return syscall.ENOTEMPTY
	}
	n.fs.log(op{kind: opRemove, node: n.id, name: name})
	return 0
}

// Rename moves a name, over another if there is one, at once.
func (n *node) Rename(_ context.Context, name string, parent gofs.InodeEmbedder, as string, flags uint32) syscall.Errno {
	to, ok := parent.(*node)
	c := n.GetChild(name)
	switch {
	case !ok || c == nil:
		return syscall.ENOENT
	case flags&^uint32(renameNoReplace) != 0:
		return syscall.EINVAL
	case flags&renameNoReplace != 0 && to.GetChild(as) != nil:
		return syscall.EEXIST
	}
	moved, ok := c.Operations().(*node)
	if !ok {
		return syscall.EIO
	}
	moved.mu.Lock()
	mode := moved.mode
	moved.mu.Unlock()
	n.fs.log(op{kind: opRename, node: n.id, name: name, child: moved.id, mode: mode, dest: to.id, as: as})
	return 0
}

const renameNoReplace = 1

// Link gives a file another name.
func (n *node) Link(_ context.Context, target gofs.InodeEmbedder, name string, out *fuse.EntryOut) (*gofs.Inode, syscall.Errno) {
	c, ok := target.(*node)
	if !ok {
		return nil, syscall.EXDEV
	}
	n.AddChild(name, c.EmbeddedInode(), true)
	c.attr(&out.Attr)
	n.fs.log(op{kind: opAdd, node: n.id, name: name, child: c.id, mode: out.Mode})
	return c.EmbeddedInode(), 0
}

// Statfs says that there is room.
func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	out.Bsize, out.Blocks, out.Bfree, out.Bavail, out.NameLen = page, 1<<24, 1<<24, 1<<24, 255
	return 0
}
