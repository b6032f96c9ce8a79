package logs

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// An archive is a sequence of independent zstd frames of about 1 MiB of the
// log's bytes in its order, so that `zstd -dc` prints it, and a skippable frame
// with the index: the size and digest of every frame and the head of every
// record. Version 1 of the index, zstd compressed, all numbers varints:
//
//	1
//	number of frames; for each: compressed size, size, SHA-256 (32 bytes)
//	number of records; for each: kind, step+1, stream, n, at (signed, difference
//	to the record before); for data also: newlines, and when there are any, the
//	first one's position and the last one's distance from the end
//
// Records fill the frames in order; none crosses a border.

const (
	frameSize = 1 << 20
	// Bounds of what an index may say.
	maxFrame   = 2 << 20
	maxIndex   = 256 << 20
	skippable  = 0x184D2A5D
	indexV1    = 1
	maxRecords = 16 << 20
)

// frame is one compressed piece of an archive.
type frame struct {
	at   int64 // in the archive
	size int64 // compressed
	n    int64
	sum  [sha256.Size]byte
}

// codec compresses and decompresses; it is safe for concurrent use.
type codec struct {
	enc func() *zstd.Encoder
	dec func() *zstd.Decoder
}

func newCodec() *codec {
	return &codec{
		enc: sync.OnceValue(func() *zstd.Encoder {
			e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
				zstd.WithWindowSize(frameSize), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false))
			if err != nil {
				panic("logs: zstd: " + err.Error()) // the options are constants
			}
			return e
		}),
		dec: sync.OnceValue(func() *zstd.Decoder {
			d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxMemory(maxIndex), zstd.WithDecoderLowmem(true))
			if err != nil {
				panic("logs: zstd: " + err.Error())
			}
			return d
		}),
	}
}

// unpack decompresses one frame and verifies it.
func (c *codec) unpack(b []byte, f frame) ([]byte, error) {
	out, err := c.dec().DecodeAll(b, make([]byte, 0, f.n))
	if err != nil || int64(len(out)) != f.n || sha256.Sum256(out) != f.sum {
		return nil, ci.Errorf(ci.ErrDigest, "a frame of a log archive does not have its digest").WithCause(err)
	}
	return out, nil
}

// archiver writes an archive.
type archiver struct {
	codec  *codec
	out    *spool
	frames []frame
	open   []byte
	index  []byte // the records' part
	count  int
	lastAt int64
	buf    []byte
}

// add appends a record; b are its bytes when it is data.
func (a *archiver) add(r record, b []byte) error {
	if len(a.open) > 0 && len(a.open)+len(b) > frameSize {
		if err := a.flush(); err != nil {
			return err
		}
	}
	a.open = append(a.open, b...)
	x := append(a.index, byte(r.kind))
	x = binary.AppendUvarint(x, uint64(r.stream.Step+1))
	x = binary.AppendUvarint(x, uint64(r.stream.Stream))
	x = binary.AppendUvarint(x, uint64(r.n))
	x = binary.AppendVarint(x, r.at-a.lastAt)
	if r.kind == data {
		x = binary.AppendUvarint(x, uint64(r.newlines))
		if r.newlines > 0 {
			x = binary.AppendUvarint(x, uint64(r.firstNL))
			x = binary.AppendUvarint(x, uint64(r.n-1-r.lastNL))
		}
	}
	a.index, a.lastAt = x, r.at
	a.count++
	return nil
}

func (a *archiver) flush() error {
	if len(a.open) == 0 {
		return nil
	}
	a.buf = a.codec.enc().EncodeAll(a.open, a.buf[:0])
	a.frames = append(a.frames, frame{at: a.out.size, size: int64(len(a.buf)), n: int64(len(a.open)), sum: sha256.Sum256(a.open)})
	a.open = a.open[:0]
	_, err := a.out.Write(a.buf)
	return err
}

// close writes the index and returns its size and digest.
func (a *archiver) close() (size int64, digest string, err error) {
	if err := a.flush(); err != nil {
		return 0, "", err
	}
	x := binary.AppendUvarint(nil, indexV1)
	x = binary.AppendUvarint(x, uint64(len(a.frames)))
	for _, f := range a.frames {
		x = binary.AppendUvarint(x, uint64(f.size))
		x = binary.AppendUvarint(x, uint64(f.n))
		x = append(x, f.sum[:]...)
	}
	x = binary.AppendUvarint(x, uint64(a.count))
	x = append(x, a.index...)
	packed := a.codec.enc().EncodeAll(x, nil)
	head := binary.LittleEndian.AppendUint32(nil, skippable)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(packed)))
	packed = append(head, packed...)
	sum := sha256.Sum256(packed)
	_, err = a.out.Write(packed)
	return int64(len(packed)), hex.EncodeToString(sum[:]), err
}

// readIndex decodes the index at the end of an archive whose digest has been
// verified. Anything that is not what close writes is ErrDigest.
func (c *codec) readIndex(b []byte) ([]frame, *layout, error) {
	bad := func(what string) ([]frame, *layout, error) {
		return nil, nil, ci.Errorf(ci.ErrDigest, "the index of a log archive cannot be read: %s", what)
	}
	if len(b) < 8 || binary.LittleEndian.Uint32(b) != skippable || int64(binary.LittleEndian.Uint32(b[4:])) != int64(len(b)-8) {
		return bad("not an index")
	}
	x, err := c.dec().DecodeAll(b[8:], nil)
	if err != nil {
		return bad("not compressed")
	}
	in := &varints{b: x}
	if in.next(indexV1) != indexV1 {
		return bad("unknown version")
	}
	frames := make([]frame, 0, min(in.peek(), uint64(len(x)/34+1)))
	var at int64
	for range in.next(uint64(len(x) / 34)) {
		f := frame{at: at, size: int64(in.next(2 * maxFrame)), n: int64(in.next(maxFrame))}
		copy(f.sum[:], in.bytes(sha256.Size))
		at += f.size
		frames = append(frames, f)
	}
	l := newLayout()
	var now, place int64
	number := 0
	const maxPosition = 1 << 53 // of a number
	const maxEnd = 1 << 62      // of all: far above MaxSteps times MaxStreamLength
	for range in.next(min(maxRecords, uint64(len(in.b)/5))) {
		r := record{kind: kind(in.next(uint64(lost))), firstNL: -1, lastNL: -1}
		r.stream.Step = int(in.next(1<<16)) - 1
		r.stream.Stream = protocol.Stream(in.next(uint64(protocol.System)))
		r.n = int64(in.next(maxPosition))
		now += in.signed(maxPosition)
		r.at = now
		if r.kind == data {
			r.newlines = int64(in.next(uint64(r.n)))
			if r.newlines > 0 {
				r.firstNL = int64(in.next(uint64(r.n - 1)))
				r.lastNL = r.n - 1 - int64(in.next(uint64(r.n-1)))
			}
			for number < len(frames) && place == frames[number].n {
				number, place = number+1, 0
			}
			if number == len(frames) || place+r.n > frames[number].n {
				return bad("a record is in no frame")
			}
			r.frame, r.place = int32(number), place
			place += r.n
		}
		if in.bad || r.kind == 0 || r.n == 0 || now < 0 || l.end > maxEnd {
			return bad("a record is out of bounds")
		}
		l.add(r)
	}
	if in.bad || len(in.b) > 0 {
		return bad("its length is wrong")
	}
	return frames, l, nil
}

// varints reads bounded numbers; after one that is out of bounds all are 0.
type varints struct {
	b   []byte
	bad bool
}

func (v *varints) peek() uint64 {
	n, _ := binary.Uvarint(v.b)
	return n
}

func (v *varints) next(most uint64) uint64 {
	n, size := binary.Uvarint(v.b)
	if v.bad || size <= 0 || n > most {
		v.bad = true
		return 0
	}
	v.b = v.b[size:]
	return n
}

func (v *varints) signed(most int64) int64 {
	n, size := binary.Varint(v.b)
	if v.bad || size <= 0 || n > most || n < -most {
		v.bad = true
		return 0
	}
	v.b = v.b[size:]
	return n
}

func (v *varints) bytes(n int) []byte {
	if v.bad || len(v.b) < n {
		v.bad = true
		return nil
	}
	out := v.b[:n]
	v.b = v.b[n:]
	return out
}

// spool takes the archive while it is built: in memory while it is small, else
// in a file without a name.
type spool struct {
	dir  string
	size int64
	mem  []byte
	file *os.File
	sum  hash.Hash
}

const spoolMemory = 1 << 20

func newSpool(dir string) *spool { return &spool{dir: dir, sum: sha256.New()} }

func (s *spool) Write(b []byte) (int, error) {
	_, _ = s.sum.Write(b)
	s.size += int64(len(b))
	if s.file == nil && s.size <= spoolMemory {
		s.mem = append(s.mem, b...)
		return len(b), nil
	}
	if s.file == nil {
		f, err := os.CreateTemp(s.dir, "forgeci-log-*")
		if err != nil {
			return 0, ci.Errorf(ci.ErrUnavailable, "no temporary file for a log archive").WithCause(err)
		}
		if err := os.Remove(f.Name()); err != nil {
			return 0, ci.Errorf(ci.ErrUnavailable, "temporary file of a log archive").WithCause(err)
		}
		s.file = f
		if _, err := f.Write(s.mem); err != nil {
			return 0, ci.Errorf(ci.ErrUnavailable, "temporary file of a log archive").WithCause(err)
		}
		s.mem = nil
	}
	n, err := s.file.Write(b)
	if err != nil {
		return n, ci.Errorf(ci.ErrUnavailable, "temporary file of a log archive").WithCause(err)
	}
	return n, nil
}

// reader reads what was written from the start.
func (s *spool) reader() io.Reader {
	if s.file != nil {
		return io.NewSectionReader(s.file, 0, s.size)
	}
	return bytes.NewReader(s.mem)
}

func (s *spool) close() {
	if s.file != nil {
		_ = s.file.Close()
	}
}
