package fs

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

// path returns where the object of a key is.
func (s *Store) path(key string) string {
	return filepath.Join(s.dir, "objects", filepath.FromSlash(key)) + "~"
}

// PutNew implements blob.Store.
func (s *Store) PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error {
	if err := blob.CheckUpload(key, size); err != nil {
		return err
	}
	if err := s.writable(); err != nil {
		return err
	}
	if done, err := s.settled(key, size, sum); done || err != nil {
		return err
	}
	tmp, err := s.spool(ctx, r, size, sum)
	if err != nil {
		return err
	}
	return s.publish(tmp, key, size, sum)
}

// settled reports whether the object is there, durably and with the content; an
// object with other content is ErrConflict.
func (s *Store) settled(key string, size int64, sum [32]byte) (bool, error) {
	info, err := s.stat(key)
	switch {
	case errors.Is(err, ci.ErrNotFound):
		return false, nil
	case err != nil:
		return false, err
	case info.SHA256 != sum || info.Size != size:
		return false, ci.Errorf(ci.ErrConflict, "the object %s exists with other content", key)
	}
	// Whoever stored it may not have come to the end yet.
	return true, s.commitDir(filepath.Dir(s.path(key)))
}

// bufferSize is how much is hashed and written at once.
const bufferSize = 128 << 10

// spool writes a new file of this content under tmp, synced, and returns its
// path. After any error the file is gone.
func (s *Store) spool(ctx context.Context, r io.Reader, size int64, sum [32]byte) (string, error) {
	f, path, err := s.newFile()
	if err != nil {
		return "", diskError("make temporary file", err)
	}
	err = s.fill(ctx, f, r, size, sum)
	if closed := f.Close(); err == nil && closed != nil {
		err = diskError("close object", closed)
	}
	if err != nil {
		// Also when only the sync has failed: such a file is never used again,
		// its pages may count as clean although they were not written.
		_ = os.Remove(path)
		return "", err
	}
	return path, nil
}

// filesMost is how many files have one directory below tmp (spread).
const filesMost = 256

// newFile makes a temporary file.
func (s *Store) newFile() (*os.File, string, error) {
	n := s.counter.Add(1)
	dir := filepath.Join(s.tmp, strconv.FormatInt(n/filesMost, 36))
	path := filepath.Join(dir, strconv.FormatInt(n, 36))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		// The one before the last is empty by now, or is removed with all of them.
		_ = os.Remove(filepath.Join(s.tmp, strconv.FormatInt(n/filesMost-2, 36)))
		if err = os.MkdirAll(dir, 0o700); err == nil {
			f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		}
	}
	return f, path, err
}

// fill writes an object's header and content to a file and syncs it.
func (s *Store) fill(ctx context.Context, f *os.File, r io.Reader, size int64, sum [32]byte) error {
	v := blob.NewVerifier(r, size, sum)
	buf := append(make([]byte, 0, min(bufferSize, headerSize+size+1)), header(size, sum)...)
	for ended := false; !ended; {
		for len(buf) < cap(buf) && !ended {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			n, err := v.Read(buf[len(buf):cap(buf)])
			buf = buf[:len(buf)+n]
			if err == io.EOF {
				ended = true
			} else if err != nil {
				return err
			}
		}
		if _, err := s.disk.write(f, buf); err != nil {
			return diskError("write object", err)
		}
		buf = buf[:0]
	}
	if err := s.disk.sync(f); err != nil {
		return diskError("sync object", err)
	}
	return nil
}

// publish gives the file at tmp the name of key, unless that exists, and
// removes tmp.
func (s *Store) publish(tmp, key string, size int64, sum [32]byte) error {
	defer os.Remove(tmp)
	path := s.path(key)
	dir := filepath.Dir(path)
	s.naming.RLock()
	defer s.naming.RUnlock()
	for try := 0; ; try++ {
		if err := s.ensureDir(dir); err != nil {
			return diskError("make directory", err)
		}
		err := os.Link(tmp, path)
		switch {
		case err == nil:
			return s.commitDir(dir)
		case errors.Is(err, os.ErrExist):
			if done, err := s.settled(key, size, sum); done || err != nil {
				return err
			}
		case errors.Is(err, os.ErrNotExist):
			// Another process has removed the directory with its last object.
			s.forget(dir)
		default:
			return diskError("name object", err)
		}
		if try == 10 {
			return ci.Errorf(ci.ErrUnavailable, "the object %s appears and disappears", key)
		}
	}
}

// open opens an object's file and reads its header.
func (s *Store) open(key string) (*os.File, blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, blob.Info{}, err
	}
	f, err := os.Open(s.path(key))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, blob.Info{}, ci.Errorf(ci.ErrNotFound, "no object %s", key)
		}
		return nil, blob.Info{}, diskError("open object", err)
	}
	info, err := readHeader(f)
	if err != nil {
		_ = f.Close()
		return nil, blob.Info{}, err
	}
	info.Key = key
	return f, info, nil
}

func (s *Store) stat(key string) (blob.Info, error) {
	f, info, err := s.open(key)
	if err != nil {
		return info, err
	}
	return info, f.Close()
}

// Open implements blob.Store.
func (s *Store) Open(_ context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	f, info, err := s.open(key)
	if err != nil {
		return nil, err
	}
	if offset < 0 || offset > info.Size {
		_ = f.Close()
		return nil, ci.Errorf(ci.ErrInvalid, "offset %d in an object of %d bytes", offset, info.Size)
	}
	if length < 0 || length > info.Size-offset {
		length = info.Size - offset
	}
	return &objectReader{SectionReader: io.NewSectionReader(f, headerSize+offset, length), f: f}, nil
}

// objectReader reads a part of an object's content.
type objectReader struct {
	*io.SectionReader
	f *os.File
}

// Close closes the object.
func (r *objectReader) Close() error { return r.f.Close() }

// Stat implements blob.Store.
func (s *Store) Stat(_ context.Context, key string) (blob.Info, error) { return s.stat(key) }

// Delete implements blob.Store. It is not synced: an object may be back after a
// crash, as one that nothing refers to.
func (s *Store) Delete(_ context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	path := s.path(key)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return diskError("remove object", err)
	}
	// Directories go with their last object; one that is not empty stays.
	for dir := filepath.Dir(path); dir != filepath.Join(s.dir, "objects"); dir = filepath.Dir(dir) {
		if !s.removeEmpty(dir) {
			break
		}
	}
	return nil
}

// removeEmpty removes a directory that has become empty, and reports whether it
// did. No object gets its name meanwhile: one that did, in a directory that is
// made anew, would be durable only with that directory's own entry.
func (s *Store) removeEmpty(dir string) bool {
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	_, err = f.Readdirnames(1)
	_ = f.Close()
	if !errors.Is(err, io.EOF) {
		return false
	}
	s.naming.Lock()
	defer s.naming.Unlock()
	s.known.Delete(dir)
	return os.Remove(dir) == nil
}

// List implements blob.Store. Infos carry no SHA256.
func (s *Store) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	l := lister{ctx: ctx, prefix: prefix, after: after, limit: limit}
	err := l.walk(filepath.Join(s.dir, "objects"), "")
	return l.found, err
}

// lister walks directories in the byte order of keys.
type lister struct {
	ctx           context.Context
	prefix, after string
	limit         int
	found         []blob.Info
}

// walk adds the objects of a directory; at is the keys' common beginning.
func (l *lister) walk(dir, at string) error {
	if l.ctx.Err() != nil {
		return context.Cause(l.ctx)
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil // removed meanwhile
	}
	if err != nil {
		return diskError("list objects", err)
	}
	// A directory sorts as its keys do, with a slash after its name.
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name()+"/")
		} else if name, ok := strings.CutSuffix(e.Name(), "~"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if len(l.found) >= l.limit {
			return nil
		}
		key := at + name
		if sub, isDir := strings.CutSuffix(name, "/"); isDir {
			wanted := strings.HasPrefix(key, l.prefix) || strings.HasPrefix(l.prefix, key)
			if wanted && (l.after < key || strings.HasPrefix(l.after, key)) {
				if err := l.walk(filepath.Join(dir, sub), key); err != nil {
					return err
				}
			}
			continue
		}
		if key <= l.after || !strings.HasPrefix(key, l.prefix) {
			continue
		}
		stat, err := os.Lstat(filepath.Join(dir, name+"~"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return diskError("list objects", err)
		}
		l.found = append(l.found, blob.Info{Key: key, Size: stat.Size() - headerSize, Modified: stat.ModTime()})
	}
	return nil
}
