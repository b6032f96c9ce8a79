package fs

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

// uploadDir returns where the parts of an upload are, or ErrNotFound for an ID
// that no upload can have.
func (s *Store) uploadDir(id string) (string, error) {
	if len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" {
		return "", noUpload(id)
	}
	return filepath.Join(s.dir, "uploads", id), nil
}

func noUpload(id string) error { return ci.Errorf(ci.ErrNotFound, "no open upload %q", id) }

// NewUpload implements blob.Store.
func (s *Store) NewUpload(_ context.Context, key string, size int64, sum [32]byte) (blob.Upload, error) {
	if err := blob.CheckUpload(key, size); err != nil {
		return blob.Upload{}, err
	}
	if err := s.writable(); err != nil {
		return blob.Upload{}, err
	}
	up := blob.Upload{Key: key, ID: randomName(), Size: size, SHA256: sum, Opened: s.now().UTC().Round(0)}
	meta, err := json.Marshal(up)
	if err != nil {
		return blob.Upload{}, ci.Errorf(ci.ErrInternal, "encode upload").WithCause(err)
	}
	// The upload appears whole: made aside, then moved to its place.
	tmp := filepath.Join(s.tmp, "upload-"+up.ID)
	err = s.writeUpload(tmp, meta)
	if err == nil {
		err = os.Rename(tmp, filepath.Join(s.dir, "uploads", up.ID))
	}
	if err != nil {
		_ = os.RemoveAll(tmp)
		return blob.Upload{}, diskError("open upload", err)
	}
	return up, s.commitDir(filepath.Join(s.dir, "uploads"))
}

func (s *Store) writeUpload(dir string, meta []byte) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "meta"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err = s.disk.write(f, meta); err == nil {
		err = s.disk.sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return s.disk.syncDir(dir)
}

// readUpload reads what NewUpload has stored.
func (s *Store) readUpload(id string) (blob.Upload, string, error) {
	var up blob.Upload
	dir, err := s.uploadDir(id)
	if err != nil {
		return up, "", err
	}
	meta, err := os.ReadFile(filepath.Join(dir, "meta"))
	if errors.Is(err, os.ErrNotExist) {
		return up, "", noUpload(id)
	}
	if err != nil {
		return up, "", diskError("read upload", err)
	}
	if err := json.Unmarshal(meta, &up); err != nil {
		return up, "", ci.Errorf(ci.ErrDigest, "the record of upload %s is damaged", id).WithCause(err)
	}
	return up, dir, nil
}

// find returns the directory of up, which must be as NewUpload returned it.
func (s *Store) find(up blob.Upload) (string, error) {
	stored, dir, err := s.readUpload(up.ID)
	if err != nil {
		return "", err
	}
	if stored.Key != up.Key || stored.Size != up.Size || stored.SHA256 != up.SHA256 {
		return "", noUpload(up.ID)
	}
	return dir, nil
}

func partPath(dir string, n int) string { return filepath.Join(dir, fmt.Sprintf("%05d", n)) }

// PartURL implements blob.Store. A URL for bytes other than those already
// stored for the part is refused.
func (s *Store) PartURL(_ context.Context, up blob.Upload, n int, size int64, sum [32]byte, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckPart(up, n, size, expires); err != nil {
		return blob.SignedRequest{}, err
	}
	dir, err := s.find(up)
	if err != nil {
		return blob.SignedRequest{}, err
	}
	if _, err := samePart(dir, n, size, sum); err != nil {
		return blob.SignedRequest{}, err
	}
	c := claim{op: opPart, key: up.Key, upload: up.ID, part: n, size: size, sum: sum, expires: s.now().Add(expires).Unix()}
	return blob.SignedRequest{Method: "PUT", URL: s.sign(c)}, nil
}

// samePart reports whether part n is stored with this content; other content is
// ErrConflict.
func samePart(dir string, n int, size int64, sum [32]byte) (bool, error) {
	f, err := os.Open(partPath(dir, n))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, diskError("read part", err)
	}
	defer f.Close()
	info, err := readHeader(f)
	if err != nil {
		return false, err
	}
	if info.Size != size || info.SHA256 != sum {
		return false, ci.Errorf(ci.ErrConflict, "part %d is stored with other bytes", n)
	}
	return true, nil
}

// putPart stores a part that a signed URL describes.
func (s *Store) putPart(ctx context.Context, c claim, r io.Reader) error {
	if err := s.writable(); err != nil {
		return err
	}
	up, dir, err := s.readUpload(c.upload)
	if err != nil {
		return err
	}
	if up.Key != c.key {
		return noUpload(c.upload)
	}
	if same, err := samePart(dir, c.part, c.size, c.sum); err != nil {
		return err
	} else if same {
		return s.commitDir(dir)
	}
	tmp, err := s.spool(ctx, r, c.size, c.sum)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	err = os.Link(tmp, partPath(dir, c.part))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return noUpload(c.upload) // sealed or aborted meanwhile
	case errors.Is(err, os.ErrExist):
		if _, err := samePart(dir, c.part, c.size, c.sum); err != nil {
			return err
		}
	case err != nil:
		return diskError("name part", err)
	}
	return s.commitDir(dir)
}

// Parts implements blob.Store.
func (s *Store) Parts(_ context.Context, up blob.Upload) ([]blob.Part, error) {
	dir, err := s.find(up)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, noUpload(up.ID)
	}
	if err != nil {
		return nil, diskError("list parts", err)
	}
	var parts []blob.Part
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue // meta
		}
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, diskError("read part", err)
		}
		info, err := readHeader(f)
		_ = f.Close()
		if err != nil {
			return nil, err
		}
		parts = append(parts, blob.Part{Number: n, Size: info.Size, SHA256: info.SHA256, ETag: etag(info.SHA256)})
	}
	return parts, nil
}

func etag(sum [32]byte) string { return fmt.Sprintf("\"%x\"", sum[:16]) }

// Seal implements blob.Store. It reads the parts once to verify the whole and
// copies them together; an object of one part takes that part's file as it is.
func (s *Store) Seal(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	defer s.seals.lock(up.ID)()
	if err := s.writable(); err != nil {
		return err
	}
	dir, err := s.find(up)
	if errors.Is(err, ci.ErrNotFound) {
		// The answer of an earlier Seal may have been lost.
		if done, settled := s.settled(up.Key, up.Size, up.SHA256); done || settled != nil {
			return settled
		}
		return err
	}
	if err != nil {
		return err
	}
	if err := s.seal(ctx, up, dir, parts); err != nil {
		if errors.Is(err, ci.ErrDigest) {
			return errors.Join(err, s.discard(dir))
		}
		return err
	}
	return s.discard(dir)
}

func (s *Store) seal(ctx context.Context, up blob.Upload, dir string, parts []blob.Part) error {
	if err := blob.CheckParts(up, parts); err != nil {
		return err
	}
	for _, p := range parts {
		same, err := samePart(dir, p.Number, p.Size, p.SHA256)
		if err != nil {
			return err
		}
		if !same {
			return ci.Errorf(ci.ErrConflict, "part %d is not stored", p.Number)
		}
	}
	if len(parts) == 1 {
		if parts[0].SHA256 != up.SHA256 {
			return ci.Errorf(ci.ErrDigest, "the object %s does not have the promised SHA-256", up.Key)
		}
		// A second name: publish removes the one that it is given.
		tmp := filepath.Join(s.tmp, "seal-"+up.ID)
		if err := os.Link(partPath(dir, 1), tmp); err != nil && !errors.Is(err, os.ErrExist) {
			return diskError("seal object", err)
		}
		return s.publish(tmp, up.Key, up.Size, up.SHA256)
	}
	joined := &partsReader{dir: dir, count: len(parts)}
	defer joined.close()
	tmp, err := s.spool(ctx, joined, up.Size, up.SHA256)
	if err != nil {
		return err
	}
	return s.publish(tmp, up.Key, up.Size, up.SHA256)
}

// partsReader reads the content of parts 1 to count one after the other.
type partsReader struct {
	dir   string
	count int
	next  int
	f     *os.File
}

func (p *partsReader) Read(b []byte) (int, error) {
	for {
		if p.f == nil {
			if p.next == p.count {
				return 0, io.EOF
			}
			p.next++
			f, err := os.Open(partPath(p.dir, p.next))
			if err != nil {
				return 0, err
			}
			p.f = f
			if _, err := f.Seek(headerSize, io.SeekStart); err != nil {
				return 0, err
			}
		}
		n, err := p.f.Read(b)
		if err != io.EOF {
			return n, err
		}
		p.close()
		if n > 0 {
			return n, nil
		}
	}
}

func (p *partsReader) close() {
	if p.f != nil {
		_ = p.f.Close()
		p.f = nil
	}
}

// discard removes an upload at once for everyone, then its files.
func (s *Store) discard(dir string) error {
	tmp := filepath.Join(s.tmp, "gone-"+filepath.Base(dir))
	err := os.Rename(dir, tmp)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = os.RemoveAll(tmp)
	}
	if err != nil {
		return diskError("remove upload", err)
	}
	return nil
}

// Abort implements blob.Store.
func (s *Store) Abort(_ context.Context, up blob.Upload) error {
	defer s.seals.lock(up.ID)()
	dir, err := s.uploadDir(up.ID)
	if err != nil {
		return nil // an ID that no upload can have names nothing to remove
	}
	return s.discard(dir)
}

// Uploads implements blob.Store.
func (s *Store) Uploads(ctx context.Context, prefix string) ([]blob.Upload, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "uploads"))
	if err != nil {
		return nil, diskError("list uploads", err)
	}
	var ups []blob.Upload
	var failed error
	for _, e := range entries {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		up, _, err := s.readUpload(e.Name())
		if errors.Is(err, ci.ErrNotFound) {
			continue
		}
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		if strings.HasPrefix(up.Key, prefix) {
			ups = append(ups, up)
		}
	}
	slices.SortFunc(ups, func(a, b blob.Upload) int {
		return cmp.Or(a.Opened.Compare(b.Opened), cmp.Compare(a.ID, b.ID))
	})
	return ups, failed
}
