package source

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
)

// Verify reads a snapshot's archive to its end and recomputes its digest without
// writing anything; each, unless it is nil, is told the entries of its manifest in
// order. It refuses whatever Materialise would: what it accepts can be materialised
// anywhere with the same digest. It holds the names of links and about 12 MiB in
// memory, however much the archive holds.
func Verify(ctx context.Context, r io.Reader, lim archive.Limits, each func(Entry)) (string, error) {
	manifest := newDigester()
	sum := sha256.New()
	buf := make([]byte, 64<<10)
	_, err := archive.Read(ctx, r, lim, func(a archive.Entry, content io.Reader) error {
		if err := judge(a); err != nil {
			return err
		}
		if a.Type == archive.File {
			sum.Reset()
			if _, err := io.CopyBuffer(sum, content, buf); err != nil {
				return err
			}
			sum.Sum(a.SHA256[:0])
		}
		e := entryOf(&a)
		manifest.add(&e)
		if each != nil {
			each(e)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	return manifest.digest(), nil
}

// Want is what a snapshot must be.
type Want struct {
	// Digest is the canonical source digest, Blob the digest of the archive;
	// both "sha256:" and lower-case hex.
	Digest, Blob string
	// Size is the archive's length in bytes.
	Size int64
}

// Materialise writes the snapshot in the file at blob into dir, which must be
// missing or empty. In this order it checks the archive's size and digest,
// judges every entry, writes the files (0644 or 0755, whatever the umask),
// recomputes the manifest from the bytes that went into them, and compares its
// digest with the one wanted. Other bytes or another tree than wanted are
// ErrDigest; when it fails for any reason, dir is as it was before.
func Materialise(ctx context.Context, blob string, want Want, dir string, lim archive.Limits) error {
	f, err := os.Open(blob)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "open snapshot").WithCause(err)
	}
	defer f.Close()
	if err := checkBlob(ctx, f, want); err != nil {
		return err
	}
	existed, err := emptyOrMissing(dir)
	if err != nil {
		return err
	}
	entries, err := archive.Unpack(ctx, f, dir, lim, archive.UnpackOptions{Accept: judge})
	if err != nil {
		return err
	}
	if got := manifestOf(entries).Digest(); got != want.Digest {
		err := ci.Errorf(ci.ErrDigest, "the snapshot holds the tree %s, not %s", got, want.Digest)
		return errors.Join(err, clean(dir, existed))
	}
	return nil
}

// checkBlob compares the archive's bytes with what is wanted and rewinds.
func checkBlob(ctx context.Context, f *os.File, want Want) error {
	info, err := f.Stat()
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "read snapshot").WithCause(err)
	}
	if info.Size() != want.Size {
		return ci.Errorf(ci.ErrDigest, "the snapshot has %d bytes, not %d", info.Size(), want.Size)
	}
	sum := sha256.New()
	buf := make([]byte, 256<<10)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := f.Read(buf)
		sum.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return ci.Errorf(ci.ErrUnavailable, "read snapshot").WithCause(err)
		}
	}
	if got := digestText([32]byte(sum.Sum(nil))); got != want.Blob {
		return ci.Errorf(ci.ErrDigest, "the snapshot's bytes have the digest %s, not %s", got, want.Blob)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "read snapshot").WithCause(err)
	}
	return nil
}

// emptyOrMissing reports whether dir exists, and refuses one that holds anything.
func emptyOrMissing(dir string) (existed bool, err error) {
	f, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, ci.Errorf(ci.ErrUnavailable, "open directory").WithCause(err)
	}
	defer f.Close()
	switch names, err := f.Readdirnames(1); {
	case len(names) > 0:
		return true, ci.Errorf(ci.ErrConflict, "the directory for the source is not empty: it holds %q", names[0])
	case err != io.EOF:
		return true, ci.Errorf(ci.ErrUnavailable, "read directory").WithCause(err)
	}
	return true, nil
}

// clean removes what is in dir, and dir itself if it was not there before.
func clean(dir string, existed bool) error {
	if !existed {
		return os.RemoveAll(dir)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := root.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	for _, name := range names {
		err = errors.Join(err, root.RemoveAll(name))
	}
	return err
}

// NamedFile is one file that ReadFiles has read.
type NamedFile struct {
	Path string
	Data []byte
}

// ReadFiles returns the regular files of a snapshot's archive whose path match
// accepts, in order. A file of more than limit bytes is ErrTooLarge; a match that
// is a link is ErrInvalid. The archive is read to its end.
func ReadFiles(ctx context.Context, r io.Reader, match func(path string) bool, limit int64) ([]NamedFile, error) {
	var files []NamedFile
	_, err := archive.Read(ctx, r, archive.SourceLimits(), func(a archive.Entry, content io.Reader) error {
		if !match(a.Path) {
			return nil
		}
		data, err := readEntry(a, content, limit)
		files = append(files, NamedFile{a.Path, data})
		return err
	})
	if err != nil {
		return nil, err
	}
	return files, nil
}

// ReadFile returns one file of a snapshot's archive, of at most limit bytes, and
// reads no further than needed; ErrNotFound if there is none.
func ReadFile(ctx context.Context, r io.Reader, path string, limit int64) ([]byte, error) {
	var data []byte
	found := errors.New("found")
	_, err := archive.Read(ctx, r, archive.SourceLimits(), func(a archive.Entry, content io.Reader) error {
		if a.Path != path {
			return nil
		}
		var err error
		if data, err = readEntry(a, content, limit); err != nil {
			return err
		}
		return found
	})
	switch {
	case errors.Is(err, found):
		return data, nil
	case err != nil:
		return nil, err
	}
	return nil, ci.Errorf(ci.ErrNotFound, "the source has no file %q", path)
}

func readEntry(a archive.Entry, content io.Reader, limit int64) ([]byte, error) {
	if a.Type != archive.File {
		return nil, ci.Errorf(ci.ErrInvalid, "%q is a link, not a file", a.Path)
	}
	if a.Size > limit {
		return nil, ci.Errorf(ci.ErrTooLarge, "%q has %d bytes, the limit is %d", a.Path, a.Size, limit)
	}
	return io.ReadAll(content)
}
