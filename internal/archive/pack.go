package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/ci"
)

// Packed describes an archive that was written.
type Packed struct {
	Stats
	// Size and SHA256 are those of the archive's own bytes.
	Size   int64
	SHA256 [32]byte
}

// Pack writes an archive of the entries, read below root, to w, and sets the
// SHA256 of each file's entry. The entries must be sorted by path (as Scan and
// Walk return them); their Mode is what is stored. A file whose size or time
// differs from what Scan or Walk saw, before or after it is read, is
// ErrConflict. One that may not be read is ErrUnsafe. When Pack fails, what it
// wrote is to be thrown away. n is the number of workers; 0 is one per
// processor, four at most.
func Pack(ctx context.Context, w io.Writer, root *os.Root, entries []Entry, lim Limits, n int) (Packed, error) {
	g := newGuard(lim)
	for _, e := range entries {
		if err := g.add(e); err != nil {
			return Packed{}, err
		}
	}
	if err := g.finish(); err != nil {
		return Packed{}, err
	}
	n = workers(n)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &packer{
		root:  root,
		ctx:   ctx,
		stop:  cancel,
		work:  make(chan *frame),
		order: make(chan *frame, 2*n),
		spare: make(chan *frame, 3*n+2),
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.cut(entries) })
	for range n {
		wg.Go(p.worker)
	}
	out, err := p.collect(w, lim)
	if err != nil {
		cancel(err)
	}
	wg.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return Packed{}, cause
	}
	out.Stats = g.stats
	return out, nil
}

// packer is one run of Pack: cut makes frames in order, workers fill and
// compress them, collect writes them in order.
type packer struct {
	root  *os.Root
	ctx   context.Context
	stop  context.CancelCauseFunc
	work  chan *frame
	order chan *frame
	spare chan *frame
}

// frame is the unit of work. Either entries are set and a worker reads them, or
// raw already holds the plain bytes.
type frame struct {
	entries []Entry
	end     bool // the end mark of the archive follows the entries
	raw     bytes.Buffer
	packed  []byte
	done    chan struct{}
}

func (p *packer) newFrame() *frame {
	select {
	case f := <-p.spare:
		f.entries, f.end, f.packed, f.done = nil, false, f.packed[:0], make(chan struct{})
		f.raw.Reset()
		return f
	default:
		return &frame{done: make(chan struct{})}
	}
}

// cut divides the entries into frames: runs of small files up to FrameSize, and
// large files by themselves, read here in pieces of FrameSize.
func (p *packer) cut(entries []Entry) {
	defer close(p.work)
	defer close(p.order)
	d := dirs{root: p.root}
	defer d.close()
	from, size := 0, int64(0)
	for i := range entries {
		e := &entries[i]
		if e.Type == File && e.Size > FrameSize {
			if i > from && !p.send(p.small(entries[from:i])) {
				return
			}
			if !p.large(&d, e) {
				return
			}
			from, size = i+1, 0
			continue
		}
		if size += e.Size + 1024; size > FrameSize {
			if !p.send(p.small(entries[from : i+1])) {
				return
			}
			from, size = i+1, 0
		}
	}
	last := p.small(entries[from:])
	last.end = true
	p.send(last)
}

func (p *packer) small(entries []Entry) *frame {
	f := p.newFrame()
	f.entries = entries
	return f
}

// send hands a frame to a worker and to the writer; false means give up.
func (p *packer) send(f *frame) bool {
	select {
	case p.order <- f:
	case <-p.ctx.Done():
		return false
	}
	select {
	case p.work <- f:
		return true
	case <-p.ctx.Done():
		return false
	}
}

func (p *packer) worker() {
	// Single frames of at most FrameSize of input need no larger window.
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(FrameSize), zstd.WithLowerEncoderMem(true))
	if err != nil {
		p.stop(ci.Errorf(ci.ErrInternal, "make encoder").WithCause(err))
		return
	}
	d := dirs{root: p.root}
	defer d.close()
	buf := make([]byte, FrameSize)
	for f := range p.work {
		if p.ctx.Err() != nil {
			return
		}
		if err := f.fill(&d, buf); err != nil {
			p.stop(err)
			return
		}
		f.packed = enc.EncodeAll(f.raw.Bytes(), f.packed[:0])
		close(f.done)
	}
}

// fill reads a frame's entries. buf holds the largest of its files.
func (f *frame) fill(d *dirs, buf []byte) error {
	t := tar.NewWriter(&f.raw)
	for i := range f.entries {
		e := &f.entries[i]
		if err := writeHeader(t, e); err != nil {
			return err
		}
		if e.Type == File {
			content := buf[:e.Size]
			if err := readWhole(d, e, content); err != nil {
				return err
			}
			e.SHA256 = sha256.Sum256(content)
			if _, err := t.Write(content); err != nil {
				return ci.Errorf(ci.ErrInternal, "archive entry %s", quote(e.Path)).WithCause(err)
			}
		}
	}
	if err := t.Flush(); err != nil {
		return ci.Errorf(ci.ErrInternal, "archive padding").WithCause(err)
	}
	if f.end {
		f.raw.Write(make([]byte, 2*blockSize))
	}
	return nil
}

const blockSize = 512

func pad(size int64) int64 { return -size & (blockSize - 1) }

// writeHeader writes what a tar says of an entry: path, type, mode, size, target.
func writeHeader(t *tar.Writer, e *Entry) error {
	h := &tar.Header{Name: e.Path, Mode: int64(e.Mode.Perm()), Format: tar.FormatPAX}
	switch e.Type {
	case Dir:
		h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
	case Symlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.Link
	case File:
		h.Typeflag, h.Size = tar.TypeReg, e.Size
	}
	if err := t.WriteHeader(h); err != nil {
		return ci.Errorf(ci.ErrUnsafe, "archive entry %s cannot be stored", quote(e.Path)).WithCause(err)
	}
	return nil
}

// openFile opens a file that Scan or Walk has seen.
func openFile(d *dirs, e *Entry) (*os.File, error) {
	dir, name := split(e.Path)
	parent, err := d.open(dir, nil)
	if err != nil {
		return nil, readError(e, err)
	}
	// Without O_NONBLOCK a named pipe put there meanwhile would hang us.
	f, err := parent.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if info, now := parent.Lstat(name); now == nil && !info.Mode().IsRegular() {
			return nil, changed(e)
		}
		return nil, readError(e, err)
	}
	if err := unchanged(f, e); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// unchanged compares a file with what Scan or Walk saw.
func unchanged(f *os.File, e *Entry) error {
	info, err := f.Stat()
	if err != nil {
		return readError(e, err)
	}
	if !info.Mode().IsRegular() || info.Size() != e.Size || info.ModTime().UnixNano() != e.modified {
		return changed(e)
	}
	return nil
}

func changed(e *Entry) error {
	return ci.Errorf(ci.ErrConflict, "%s changed while it was read; try again when nothing writes to it", quote(e.Path))
}

// readError says why a file that Scan or Walk has seen cannot be read.
func readError(e *Entry, err error) error {
	var notDir *notDirError
	switch {
	case errors.Is(err, fs.ErrPermission):
		return ci.Errorf(ci.ErrUnsafe, "%s is not readable; make it readable or have it ignored", quote(e.Path)).WithCause(err)
	case errors.Is(err, fs.ErrNotExist), errors.As(err, &notDir), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return changed(e)
	}
	return ci.Errorf(ci.ErrUnavailable, "read %s", quote(e.Path)).WithCause(err)
}

// readWhole reads a file of the size of buf.
func readWhole(d *dirs, e *Entry, buf []byte) error {
	f, err := openFile(d, e)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.ReadFull(f, buf); err != nil {
		return cutShort(e, err)
	}
	return unchanged(f, e)
}

func cutShort(e *Entry, err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return changed(e)
	}
	return readError(e, err)
}

// large reads a file in pieces; false means give up.
func (p *packer) large(d *dirs, e *Entry) bool {
	err := p.pieces(d, e)
	if err != nil {
		p.stop(err)
	}
	return err == nil
}

func (p *packer) pieces(d *dirs, e *Entry) error {
	file, err := openFile(d, e)
	if err != nil {
		return err
	}
	defer file.Close()
	f := p.newFrame()
	if err := writeHeader(tar.NewWriter(&f.raw), e); err != nil {
		return err
	}
	sum := sha256.New()
	for left := e.Size; left > 0; {
		n := min(left, int64(FrameSize-f.raw.Len()))
		at := f.raw.Len()
		if _, err := io.CopyN(&f.raw, file, n); err != nil {
			return cutShort(e, err)
		}
		sum.Write(f.raw.Bytes()[at:])
		if left -= n; left == 0 {
			f.raw.Write(make([]byte, pad(e.Size)))
		}
		if !p.send(f) {
			return context.Cause(p.ctx)
		}
		f = p.newFrame()
	}
	sum.Sum(e.SHA256[:0])
	return unchanged(file, e)
}

// collect writes the frames in order.
func (p *packer) collect(w io.Writer, lim Limits) (Packed, error) {
	var out Packed
	var plain int64
	sum := sha256.New()
	for f := range p.order {
		select {
		case <-f.done:
		case <-p.ctx.Done():
			return out, context.Cause(p.ctx)
		}
		plain += int64(f.raw.Len())
		out.Size += int64(len(f.packed))
		if plain > ratioSlack && plain-ratioSlack > lim.Ratio*out.Size {
			return out, ci.Errorf(ci.ErrTooLarge, "the files shrink to less than one part in %d, which no reader accepts", lim.Ratio)
		}
		if _, err := io.MultiWriter(sum, w).Write(f.packed); err != nil {
			return out, ci.Errorf(ci.ErrUnavailable, "write archive").WithCause(err)
		}
		select {
		case p.spare <- f:
		default:
		}
	}
	sum.Sum(out.SHA256[:0])
	return out, nil
}
