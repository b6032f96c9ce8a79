// Package fs keeps objects in a local directory.
//
// An object is one file: a header of 64 bytes with its size and SHA-256, then
// its content. It is written under tmp/, synced, linked to its name (a link
// never replaces a file), and its directory is synced; only then does the call
// return. What is visible is therefore whole, and what was acknowledged
// survives a crash.
//
//	objects/<key>~         an object; "~" cannot occur in a key
//	uploads/<id>/meta      an open multipart upload and its parts
//	uploads/<id>/<number>
//	tmp/<process>/<n>/     files being written, locked while their process lives
//
// Several processes of one machine may share the directory.
package fs

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

var _ blob.Store = (*Store)(nil)

// Options configure a store. The zero value works.
type Options struct {
	// SignKey signs URLs; nodes that share a store share it. When it is empty a
	// random one is made, and URLs do not outlive the process.
	SignKey []byte
	// PathPrefix is where Handler is mounted; empty means "/v1/blobs".
	PathPrefix string
	// Now tells the time for the expiry of URLs; nil means time.Now.
	Now func() time.Time
}

// Store is a blob.Store in a local directory.
type Store struct {
	dir    string
	key    []byte
	prefix string
	now    func() time.Time
	disk   disk

	tmp     string // this process's own directory below tmp/
	lock    *os.File
	counter atomic.Int64
	dirs    dirSyncer
	known   sync.Map // directories known to be durable, by path
	seals   keyedMutex
	// naming is read-locked while an object gets its name, locked while a directory
	// goes that has become empty.
	naming sync.RWMutex

	// broken is set for good once a directory could not be synced: what the
	// kernel still keeps of it is unknown, so nothing more is acknowledged.
	broken atomic.Bool
}

// disk holds the operations that fail when a disk does; tests replace them.
type disk struct {
	write   func(f *os.File, p []byte) (int, error)
	sync    func(f *os.File) error
	syncDir func(path string) error
}

// Open opens the store in dir, which is made if it is missing, and removes what
// processes that are gone have left half-written.
func Open(dir string, opt Options) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "blob directory").WithCause(err)
	}
	s := &Store{
		dir: dir, key: opt.SignKey, prefix: opt.PathPrefix, now: opt.Now,
		disk: disk{write: (*os.File).Write, sync: (*os.File).Sync, syncDir: syncDir},
	}
	if s.prefix == "" {
		s.prefix = "/v1/blobs"
	}
	if s.now == nil {
		s.now = time.Now
	}
	if len(s.key) == 0 {
		s.key = make([]byte, 32)
		_, _ = rand.Read(s.key) // never fails
	}
	s.dirs.sync = func(path string) error { return s.disk.syncDir(path) }
	for _, sub := range []string{"", "objects", "uploads", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, diskError("make blob directory", err)
		}
	}
	if err := errors.Join(syncDir(filepath.Dir(dir)), syncDir(dir)); err != nil {
		return nil, diskError("sync blob directory", err)
	}
	if err := s.claimTmp(); err != nil {
		return nil, err
	}
	spread(s.tmp)
	s.sweep()
	return s, nil
}

// Close gives up the store's temporary directory. Calls that are under way fail.
func (s *Store) Close() error {
	return errors.Join(os.RemoveAll(s.tmp), s.lock.Close())
}

// claimTmp makes a temporary directory of this process and locks it.
func (s *Store) claimTmp() error {
	for {
		s.tmp = filepath.Join(s.dir, "tmp", randomName())
		if err := os.Mkdir(s.tmp, 0o700); err != nil {
			return diskError("make temporary directory", err)
		}
		lock, err := lockDir(s.tmp)
		if err != nil {
			return diskError("lock temporary directory", err)
		}
		// Another process may have swept it between the two steps.
		if _, err := os.Stat(s.tmp); lock != nil && err == nil {
			s.lock = lock
			return nil
		}
		if lock != nil {
			_ = lock.Close()
		}
	}
}

// sweep removes temporary directories whose processes are gone, and uploads
// that Seal or Abort had begun to remove.
func (s *Store) sweep() {
	entries, _ := os.ReadDir(filepath.Join(s.dir, "tmp"))
	for _, e := range entries {
		path := filepath.Join(s.dir, "tmp", e.Name())
		if path == s.tmp {
			continue
		}
		if lock, err := lockDir(path); err == nil && lock != nil {
			_ = os.RemoveAll(path)
			_ = lock.Close()
		}
	}
}

func randomName() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Layout of the header.
const (
	headerSize  = 64
	headerMagic = "forgeci object 1"
)

// header returns the first bytes of an object's file.
func header(size int64, sum [32]byte) []byte {
	b := append(make([]byte, 0, headerSize), headerMagic...)
	b = binary.BigEndian.AppendUint64(b, uint64(size))
	b = append(b, sum[:]...)
	return b[:headerSize]
}

// readHeader reads and checks the header of an open file.
func readHeader(f *os.File) (blob.Info, error) {
	var b [headerSize]byte
	stat, err := f.Stat()
	if err != nil {
		return blob.Info{}, diskError("read object", err)
	}
	if _, err := f.ReadAt(b[:], 0); err != nil && err != io.EOF {
		return blob.Info{}, diskError("read object", err)
	}
	info := blob.Info{
		Size:     int64(binary.BigEndian.Uint64(b[len(headerMagic):])),
		Modified: stat.ModTime(),
		SHA256:   [32]byte(b[len(headerMagic)+8:]),
	}
	if string(b[:len(headerMagic)]) != headerMagic || info.Size != stat.Size()-headerSize {
		return blob.Info{}, ci.Errorf(ci.ErrDigest, "the file of an object in the store is damaged")
	}
	return info, nil
}

// diskError is the error for a disk that refuses.
func diskError(what string, err error) error {
	var ours *ci.Error
	switch {
	case errors.As(err, &ours):
		return ours
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return ci.Errorf(ci.ErrUnavailable, "%s: the disk of the blob store is full", what).WithCause(err)
	}
	return ci.Errorf(ci.ErrUnavailable, "%s: the disk of the blob store refuses", what).WithCause(err)
}

// writable refuses writes once the store is broken.
func (s *Store) writable() error {
	if s.broken.Load() {
		return ci.Errorf(ci.ErrUnavailable, "the blob store is read-only since its disk failed to sync a directory; check the disk and restart the server")
	}
	return nil
}
