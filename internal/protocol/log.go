package protocol

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"io"

	"forgeci/internal/ci"
)

// Stream is one of a step's two output streams.
type Stream uint8

// Streams. System carries the runner's own lines about the attempt.
const (
	Stdout Stream = 1
	Stderr Stream = 2
	System Stream = 3
)

// String returns the stream's word.
func (s Stream) String() string {
	switch s {
	case Stdout:
		return "stdout"
	case Stderr:
		return "stderr"
	case System:
		return "system"
	default:
		return "unknown"
	}
}

// StepSystem is the step index of what belongs to no step: preparation and teardown.
const StepSystem = -1

// Chunk is a piece of one stream of one attempt.
type Chunk struct {
	// Step is the step's index from 0, or StepSystem.
	Step   int
	Stream Stream
	// Sequence is attempt-wide, from 1, without gaps in what the runner sends; it
	// fixes the order of the archive.
	Sequence int64
	// Offset is the position of the first byte in the stream.
	Offset int64
	// AtMicros is when the first byte was read, microseconds since the attempt's
	// start on the runner's monotonic clock.
	AtMicros int64
	// Discarded is how many bytes were dropped in this place instead of stored
	// (limit or spool reached); Data is then empty and the stream's offset still
	// advances by it.
	Discarded int64
	Data      []byte
}

// Limits of the framing.
const (
	// MaxChunk is the most bytes of data in one chunk.
	MaxChunk = 1 << 20
	// MaxLogBody is the most bytes in one append request.
	MaxLogBody = 4 << 20
	// MaxChunksPerBody bounds the number of chunks in one request.
	MaxChunksPerBody = 4096
	// MaxSteps is how many steps an attempt may have: step indexes are below it.
	MaxSteps = 1000
	// MaxStreamLength is where a stream ends at the latest, in bytes; what is not
	// stored counts too.
	MaxStreamLength = 1 << 48
	// MaxAhead is how far the last chunk of a body may be ahead, in sequence numbers,
	// of the first that is missing.
	MaxAhead = 50_000
)

const logMagic = "FLG1"

const chunkHeader = 2 + 1 + 1 + 8*4 + 4 + sha256.Size

// AppendChunk appends the chunk's frame to b. A body is the magic "FLG1"
// followed by frames; an empty b gets the magic first. A frame is big-endian:
// step+1 uint16, stream uint8, flags uint8 (0), sequence, offset, at, discarded
// uint64 each, length uint32, SHA-256 of the data, data.
func AppendChunk(b []byte, c Chunk) []byte {
	if len(b) == 0 {
		b = append(b, logMagic...)
	}
	b = binary.BigEndian.AppendUint16(b, uint16(c.Step+1))
	b = append(b, byte(c.Stream), 0)
	b = binary.BigEndian.AppendUint64(b, uint64(c.Sequence))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Offset))
	b = binary.BigEndian.AppendUint64(b, uint64(c.AtMicros))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Discarded))
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.Data)))
	sum := sha256.Sum256(c.Data)
	b = append(b, sum[:]...)
	return append(b, c.Data...)
}

// DecodeChunks reads a whole body. The chunks' data aliases body. Anything
// malformed, out of bounds or with a wrong digest is ErrInvalid or ErrDigest
// and no chunk is returned.
func DecodeChunks(body []byte) ([]Chunk, error) {
	if len(body) > MaxLogBody {
		return nil, ci.Errorf(ci.ErrTooLarge, "log body of %d bytes is over the limit of %d", len(body), MaxLogBody)
	}
	rest, ok := bytes.CutPrefix(body, []byte(logMagic))
	if !ok {
		return nil, ci.Errorf(ci.ErrInvalid, "log body does not begin with FLG1")
	}
	var out []Chunk
	for len(rest) > 0 {
		if len(out) == MaxChunksPerBody {
			return nil, ci.Errorf(ci.ErrTooLarge, "log body has more than %d chunks", MaxChunksPerBody)
		}
		if len(rest) < chunkHeader {
			return nil, ci.Errorf(ci.ErrInvalid, "log body is cut in the header of chunk %d", len(out)+1)
		}
		c := Chunk{
			Step:      int(binary.BigEndian.Uint16(rest)) - 1,
			Stream:    Stream(rest[2]),
			Sequence:  int64(binary.BigEndian.Uint64(rest[4:])),
			Offset:    int64(binary.BigEndian.Uint64(rest[12:])),
			AtMicros:  int64(binary.BigEndian.Uint64(rest[20:])),
			Discarded: int64(binary.BigEndian.Uint64(rest[28:])),
		}
		n := int(binary.BigEndian.Uint32(rest[36:]))
		sum := [sha256.Size]byte(rest[40:chunkHeader])
		flags := rest[3]
		rest = rest[chunkHeader:]
		if n > MaxChunk || n > len(rest) {
			return nil, ci.Errorf(ci.ErrInvalid, "chunk %d: length %d is out of bounds", len(out)+1, n)
		}
		c.Data, rest = rest[:n:n], rest[n:]
		const maxNumber = 1 << 53
		switch {
		case flags != 0, c.Stream < Stdout || c.Stream > System, c.Step >= MaxSteps,
			c.Sequence < 1 || c.Sequence > maxNumber, c.Offset < 0 || c.Offset > MaxStreamLength,
			c.AtMicros < 0 || c.AtMicros > maxNumber, c.Discarded < 0 || c.Discarded > MaxStreamLength,
			c.Discarded > 0 && n > 0, c.Discarded == 0 && n == 0:
			return nil, ci.Errorf(ci.ErrInvalid, "chunk %d: a field is out of bounds", len(out)+1)
		case sha256.Sum256(c.Data) != sum:
			return nil, ci.Errorf(ci.ErrDigest, "chunk %d: data does not have its digest", len(out)+1)
		}
		out = append(out, c)
	}
	return out, nil
}

// Len is how far the chunk advances its stream.
func (c Chunk) Len() int64 { return int64(len(c.Data)) + c.Discarded }

// WriteTo writes the data, or nothing for a discarded piece.
func (c Chunk) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(c.Data)
	return int64(n), err
}
