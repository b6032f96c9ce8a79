package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/ci"
)

// Read reads an archive from r and calls visit for each entry in order with
// the content of a file (empty for other types), which is good until visit
// returns; what visit leaves unread is skipped. An entry has been judged when
// visit sees it, except that a link which climbs out of another link is refused
// only when all have been seen: a caller that writes reads twice, as Unpack
// does. Read returns after the last byte of r has been consumed; visit may be
// nil. An error of visit is returned as it is.
func Read(ctx context.Context, r io.Reader, lim Limits, visit func(e Entry, content io.Reader) error) (Stats, error) {
	packed := &countReader{ctx: ctx, r: r}
	z, err := zstd.NewReader(packed, zstd.WithDecoderConcurrency(2), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return Stats{}, damaged("", err)
	}
	defer z.Close()
	plain := &boundReader{r: z, packed: packed, ratio: lim.Ratio}
	t := tar.NewReader(plain)
	g := newGuard(lim)
	// Room for one entry's headers: the tar header, two extended ones, padding.
	overhead := int64(2*lim.Path + 16<<10)
	skip := make([]byte, 32<<10)
	for {
		// A tar that is cut off between two entries reads as one that ends
		// there: only the end mark tells them apart.
		plain.room, plain.zeros = plain.room+overhead, 0
		hdr, err := t.Next()
		if err == io.EOF && plain.zeros >= 2*blockSize {
			break
		}
		if err != nil {
			return g.stats, plain.explain(ctx, "after "+quote(g.last), err)
		}
		e, err := entryOf(hdr)
		if err != nil {
			return g.stats, err
		}
		if err := g.add(e); err != nil {
			return g.stats, err
		}
		plain.room += e.Size
		content := &contentReader{ctx: ctx, r: t, plain: plain, path: e.Path}
		if visit != nil {
			if err := visit(e, content); err != nil {
				return g.stats, err
			}
		}
		if e.Size > 0 {
			if _, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{content}, skip); err != nil {
				return g.stats, err
			}
		}
	}
	if err := plain.drain(ctx); err != nil {
		return g.stats, err
	}
	return g.stats, g.finish()
}

// entryOf translates a tar header, or refuses its type. The entry's names are its
// own: those of the header are cut out of all of its records, and would keep them.
func entryOf(h *tar.Header) (Entry, error) {
	e := Entry{Path: strings.Clone(h.Name)}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return e, ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: a sparse file", quote(h.Name))
		}
	}
	// Only the permission bits are taken: setuid, setgid and sticky are dropped.
	e.Mode = h.FileInfo().Mode().Perm()
	switch h.Typeflag {
	case tar.TypeReg:
		e.Type, e.Size = File, h.Size
	case tar.TypeDir:
		e.Type, e.Path = Dir, strings.TrimSuffix(e.Path, "/")
	case tar.TypeSymlink:
		e.Type, e.Mode, e.Link = Symlink, 0o777, strings.Clone(h.Linkname)
	case tar.TypeLink:
		return e, ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: a hard link to %s", quote(h.Name), quote(h.Linkname))
	case tar.TypeChar, tar.TypeBlock:
		return e, ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: a device", quote(h.Name))
	case tar.TypeFifo:
		return e, ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: a named pipe", quote(h.Name))
	default:
		return e, ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: type %q is not supported", quote(h.Name), h.Typeflag)
	}
	return e, nil
}

// damaged is the error for bytes that are not an archive.
func damaged(where string, err error) error {
	if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		return ci.Errorf(ci.ErrTooLarge, "the archive needs a window of more than %d bytes to unpack", maxWindow).WithCause(err)
	}
	if errors.Is(err, tar.ErrFieldTooLong) {
		return ci.Errorf(ci.ErrTooLarge, "the archive is refused %s: a name or header is too long", where).WithCause(err)
	}
	if where == "" {
		where = "at its beginning"
	}
	return ci.Errorf(ci.ErrDigest, "the archive is damaged or cut off %s", where).WithCause(err)
}

// countReader counts compressed bytes and ends with the context. The decoder
// reads it from a goroutine of its own; n is only looked at through seen.
type countReader struct {
	ctx  context.Context
	r    io.Reader
	seen atomic.Int64
	err  errorBox
}

func (c *countReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	n, err := c.r.Read(p)
	c.seen.Add(int64(n))
	if err != nil && err != io.EOF {
		c.err.set(err)
	}
	return n, err
}

// boundReader holds what comes out of the decoder to what the entries so far
// allow and to the ratio.
type boundReader struct {
	r      io.Reader
	packed *countReader
	ratio  int64
	room   int64 // bytes that may still be read
	total  int64
	zeros  int64 // how many of the last bytes read were zero
}

func (b *boundReader) Read(p []byte) (int, error) {
	if b.room <= 0 {
		return 0, ci.Errorf(ci.ErrTooLarge, "the archive's headers are too long")
	}
	if int64(len(p)) > b.room {
		p = p[:b.room]
	}
	n, err := b.r.Read(p)
	b.room -= int64(n)
	b.total += int64(n)
	if tail := bytes.TrimRight(p[:n], "\x00"); len(tail) > 0 {
		b.zeros = int64(n - len(tail))
	} else {
		b.zeros += int64(n)
	}
	if b.total > ratioSlack+FrameSize+maxWindow && b.total-ratioSlack-FrameSize-maxWindow > b.ratio*b.packed.seen.Load() {
		return 0, ci.Errorf(ci.ErrTooLarge, "the archive unpacks to more than %d times its size", b.ratio)
	}
	return n, err
}

// explain finds the error to report for one that came out of the tar reader:
// the context's, ours, the source's, or damage.
func (b *boundReader) explain(ctx context.Context, where string, err error) error {
	var ours *ci.Error
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &ours):
		return ours
	case b.packed.err.get() != nil:
		return b.packed.err.get()
	}
	return damaged(where, err)
}

// drain reads what follows the end mark: padding and the checksum of the last
// frame.
func (b *boundReader) drain(ctx context.Context) error {
	b.room = 1 << 20
	buf := make([]byte, 4096)
	for {
		n, err := b.Read(buf)
		for _, c := range buf[:n] {
			if c != 0 {
				return ci.Errorf(ci.ErrDigest, "the archive has bytes after its end")
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return b.explain(ctx, "at its end", err)
		}
	}
}

// contentReader is one file's content; its errors name the file.
type contentReader struct {
	ctx   context.Context
	r     io.Reader
	plain *boundReader
	path  string
}

func (c *contentReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		err = c.plain.explain(c.ctx, "in "+quote(c.path), err)
	}
	return n, err
}
