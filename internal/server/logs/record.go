package logs

import (
	"cmp"
	"maps"
	"slices"
	"sort"

	"forgeci/internal/server/store"
)

// kind says what a record stands for.
type kind byte

const (
	data      kind = 1 // bytes
	discarded kind = 2 // bytes that a limit dropped
	lost      kind = 3 // bytes that never arrived
)

// record is a piece of one stream in the log's order, with what is needed to
// find lines without reading bytes.
type record struct {
	kind     kind
	begins   bool // its first byte begins a line (a marker: it begins one)
	stream   store.LogStream
	off      int64 // in the stream
	n        int64 // bytes
	pos      int64 // position in the log
	line     int64 // lines that begin before it
	at       int64 // microseconds since the attempt's start
	newlines int64
	firstNL  int64 // -1 when there is none
	lastNL   int64

	// Where the bytes are: a range of a segment, or of a frame of the archive.
	segment string
	digest  string // of the range, unpadded base64; empty in an archive
	place   int64  // in the segment, or in the frame's bytes
	frame   int32
}

// lines is how many lines begin in the record.
func (r record) lines() int64 {
	n := int64(0)
	if r.begins {
		n = 1
	}
	if r.kind == data {
		n += r.newlines
		if r.newlines > 0 && r.lastNL == r.n-1 {
			n--
		}
	}
	return n
}

// layout is a log in its order. It only grows at its end; a copy made by snap is
// not changed by what is added later.
type layout struct {
	recs    []record
	streams map[store.LogStream]*streamState
	end     int64 // position behind the last record
	lines   int64
	bytes   int64
	cut     int64
	gap     int64
	nextSeq int64
}

type streamState struct {
	end    int64
	open   bool    // its last line has not ended
	marker bool    // and holds markers only
	recs   []int32 // its records
}

func newLayout() *layout { return &layout{streams: map[store.LogStream]*streamState{}, nextSeq: 1} }

func (l *layout) stream(st store.LogStream) *streamState {
	s := l.streams[st]
	if s == nil {
		s = &streamState{}
		l.streams[st] = s
	}
	return s
}

// add appends a record; its pos, line and begins are worked out here.
func (l *layout) add(r record) {
	s := l.stream(r.stream)
	r.off, r.pos, r.line = s.end, l.end, l.lines
	if r.kind == data {
		r.begins = !s.open
		s.open, s.marker = r.lastNL != r.n-1, false
		l.bytes += r.n
	} else {
		r.begins = !s.marker
		s.open, s.marker = true, true
		if r.kind == lost {
			l.gap += r.n
		} else {
			l.cut += r.n
		}
	}
	s.end += r.n
	s.recs = append(s.recs, int32(len(l.recs)))
	l.recs = append(l.recs, r)
	l.end += r.n
	l.lines += r.lines()
}

// extend appends the extents that continue the visible part; those behind a hole
// are left out unless the log has ended, when a hole is a gap.
func (l *layout) extend(es []store.LogExtent, ended bool) {
	for _, e := range es {
		if e.Seq < l.nextSeq || !ended && e.Seq != l.nextSeq {
			continue
		}
		l.nextSeq = e.LastSeq + 1
		l.lose(e.Stream, e.Offset, e.AtMicros)
		r := record{
			kind: data, stream: e.Stream, n: e.Length, at: e.AtMicros, newlines: e.Newlines, firstNL: e.FirstNL,
			lastNL: e.LastNL, segment: e.Segment, digest: e.Digest, place: e.SegmentAt,
		}
		if e.Discarded > 0 {
			r = record{kind: discarded, stream: e.Stream, n: e.Discarded, at: e.AtMicros, firstNL: -1, lastNL: -1}
		}
		l.add(r)
	}
}

// lose marks what is missing of a stream up to an offset.
func (l *layout) lose(st store.LogStream, upTo, at int64) {
	if missing := upTo - l.stream(st).end; missing > 0 {
		l.add(record{kind: lost, stream: st, n: missing, at: at, firstNL: -1, lastNL: -1})
	}
}

// finish marks what the runner declared and did not deliver.
func (l *layout) finish(finals map[store.LogStream]int64) {
	at := int64(0)
	if len(l.recs) > 0 {
		at = l.recs[len(l.recs)-1].at
	}
	streams := slices.SortedFunc(maps.Keys(finals), func(a, b store.LogStream) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Stream, b.Stream))
	})
	for _, st := range streams {
		l.lose(st, finals[st], at)
	}
}

// snap returns a copy that shares the records.
func (l *layout) snap() *layout {
	out := *l
	out.streams = make(map[store.LogStream]*streamState, len(l.streams))
	for k, s := range l.streams {
		c := *s
		out.streams[k] = &c
	}
	return &out
}

// at returns the index of the record that holds a position, len(recs) at the end.
func (l *layout) at(pos int64) int {
	return sort.Search(len(l.recs), func(i int) bool { return l.recs[i].pos+l.recs[i].n > pos })
}

// next returns the following record of the same stream, -1 when there is none.
func (l *layout) next(i int) int {
	recs := l.streams[l.recs[i].stream].recs
	j, _ := slices.BinarySearch(recs, int32(i))
	if j+1 < len(recs) {
		return int(recs[j+1])
	}
	return -1
}

// from returns the index of the record in which line n (from 1) begins,
// len(recs) when there is none.
func (l *layout) from(n int64) int {
	return sort.Search(len(l.recs), func(i int) bool { return l.recs[i].line+l.recs[i].lines() >= n })
}

// selection is a part of a log: a step's or a stream's.
type selection struct {
	step   *int
	stream string
}

func (s selection) has(st store.LogStream) bool {
	return (s.step == nil || *s.step == st.Step) && (s.stream == "" || s.stream == st.Stream.String())
}

// total is how many lines of the log are in the selection.
func (l *layout) total(sel selection) int64 {
	if sel.step == nil && sel.stream == "" {
		return l.lines
	}
	var n int64
	for _, r := range l.recs {
		if sel.has(r.stream) {
			n += r.lines()
		}
	}
	return n
}

// tail returns the number of the line with which the last n lines of the
// selection begin, behind the last line when n is 0 or it has none.
func (l *layout) tail(sel selection, n int64) int64 {
	for i := len(l.recs) - 1; i >= 0 && n > 0; i-- {
		r := l.recs[i]
		if !sel.has(r.stream) {
			continue
		}
		if k := r.lines(); k >= n {
			return r.line + k - n + 1
		} else {
			n -= k
		}
	}
	if n > 0 {
		return 1
	}
	return l.lines + 1
}
