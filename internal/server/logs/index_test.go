package logs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"testing"

	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// sample builds an archive of two streams, a gap, and a truncation.
func sample(tb testing.TB) (archive, index []byte, want *layout) {
	tb.Helper()
	c := newCodec()
	out := newSpool(tb.TempDir())
	defer out.close()
	a := &archiver{codec: c, out: out}
	want = newLayout()
	add := func(r record, b []byte) {
		r.n = max(r.n, int64(len(b)))
		r.firstNL, r.lastNL = int64(bytes.IndexByte(b, '\n')), int64(bytes.LastIndexByte(b, '\n'))
		r.newlines = int64(bytes.Count(b, []byte{'\n'}))
		want.add(r)
		if err := a.add(r, b); err != nil {
			tb.Fatal(err)
		}
	}
	out1 := store.LogStream{Step: 0, Stream: protocol.Stdout}
	err1 := store.LogStream{Step: protocol.StepSystem, Stream: protocol.System}
	add(record{kind: data, stream: out1, at: 5}, bytes.Repeat([]byte("line\n"), 200_000))
	add(record{kind: data, stream: err1, at: 7}, []byte("no end"))
	add(record{kind: lost, stream: out1, at: 9, n: 12}, nil)
	add(record{kind: discarded, stream: out1, at: 3, n: 5}, nil)
	add(record{kind: data, stream: out1, at: 11}, bytes.Repeat([]byte{'x'}, 700_000))
	size, digest, err := a.close()
	if err != nil {
		tb.Fatal(err)
	}
	archive, err = io.ReadAll(out.reader())
	if err != nil {
		tb.Fatal(err)
	}
	index = archive[int64(len(archive))-size:]
	if sum := sha256.Sum256(index); hex.EncodeToString(sum[:]) != digest {
		tb.Fatal("the index does not have its digest")
	}
	return archive, index, want
}

func TestAnArchiveIsOneZstdStreamOfTheLogAndItsIndexSaysWhereEverythingIs(t *testing.T) {
	t.Parallel()
	archive, index, want := sample(t)
	c := newCodec()
	whole, err := c.dec().DecodeAll(archive, nil)
	if err != nil || len(whole) != 1_000_000+6+700_000 {
		t.Fatalf("decompressed whole: %d bytes, %v", len(whole), err)
	}
	frames, lay, err := c.readIndex(index)
	if err != nil {
		t.Fatal(err)
	}
	if len(frames) != 2 || lay.lines != want.lines || lay.end != want.end || lay.gap != 12 || lay.cut != 5 || len(lay.recs) != len(want.recs) {
		t.Fatalf("%d frames, %d lines, %d records", len(frames), lay.lines, len(lay.recs))
	}
	for i, r := range lay.recs {
		w := want.recs[i]
		r.frame, r.place = 0, 0
		if r != w {
			t.Errorf("record %d is %+v, want %+v", i, r, w)
		}
	}
	for _, f := range frames {
		if _, err := c.unpack(archive[f.at:f.at+f.size], f); err != nil {
			t.Error(err)
		}
	}
}

// FuzzIndex reads anything as an index: an answer or a typed error, in bounded
// memory, and what it accepts is consistent.
func FuzzIndex(f *testing.F) {
	_, index, _ := sample(f)
	c := newCodec()
	payload, err := c.dec().DecodeAll(index[8:], nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(payload)
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, payload []byte) {
		packed := c.enc().EncodeAll(payload, nil)
		b := append([]byte{0x5D, 0x2A, 0x4D, 0x18, byte(len(packed)), byte(len(packed) >> 8), byte(len(packed) >> 16), byte(len(packed) >> 24)}, packed...)
		frames, lay, err := c.readIndex(b)
		if err != nil {
			return
		}
		var pos, lines int64
		for _, r := range lay.recs {
			if r.pos != pos || r.line != lines || r.n < 1 {
				t.Fatalf("record %+v at %d", r, pos)
			}
			if r.kind == data && (int(r.frame) >= len(frames) || r.place+r.n > frames[r.frame].n) {
				t.Fatalf("record %+v lies outside of its frame", r)
			}
			pos += r.n
			lines += r.lines()
		}
	})
}
