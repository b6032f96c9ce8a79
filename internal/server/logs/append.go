package logs

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// request is one append on its way.
type request struct {
	ref     ci.LeaseRef
	org     ci.OrgID
	chunks  []protocol.Chunk // by sequence, none twice
	extents []store.LogExtent
	size    int64 // of the data
	done    chan answer
}

type answer struct {
	reply protocol.LogReply
	again bool // some of it was stored before: compare
	err   error
}

func (r *request) key() store.AttemptKey { return store.AttemptKey{Job: r.ref.Job, Epoch: r.ref.Epoch} }

// AppendBody reads a body of frames of at most size bytes and appends them. It
// holds the body's memory only while the service has room for it.
func (s *Service) AppendBody(ctx context.Context, held engine.Held, body io.Reader, size int64) (protocol.LogReply, error) {
	if size < 0 || size > protocol.MaxLogBody {
		return protocol.LogReply{}, ci.Errorf(ci.ErrTooLarge, "a log body needs a length of at most %d bytes", protocol.MaxLogBody)
	}
	release, err := s.budget.take(ctx, held.Ref().Runner, size)
	if err != nil {
		return protocol.LogReply{}, err
	}
	defer release()
	b := make([]byte, size)
	if _, err := io.ReadFull(body, b); err != nil {
		return protocol.LogReply{}, ci.Errorf(ci.ErrInvalid, "the log body is cut").WithCause(err)
	}
	chunks, err := protocol.DecodeChunks(b)
	if err != nil {
		return protocol.LogReply{}, err
	}
	return s.append(ctx, held, chunks)
}

// Append stores chunks and returns when they are durable: in the object store
// and indexed. They may come in any order and several calls at once; chunks
// behind a hole are stored and become visible when the hole is filled. The reply
// names, for each stream in the request, the contiguous length that is durable.
//
// The same chunks again, in whatever groups, are accepted; other bytes under a
// known sequence number, or an overlap, are ErrConflict. A lease that is not
// current when the chunks would be committed is refused and nothing of the
// request is stored; others in the same group are not affected. Chunks over the
// attempt's limits are taken and dropped, with a marker in the log and Full in
// the reply; too many markers, and chunks too far behind a hole, are ErrTooLarge.
// ErrUnavailable: nothing is acknowledged, send the same again.
func (s *Service) Append(ctx context.Context, held engine.Held, chunks []protocol.Chunk) (protocol.LogReply, error) {
	var size int64
	for _, c := range chunks {
		size += int64(len(c.Data))
	}
	release, err := s.budget.take(ctx, held.Ref().Runner, size)
	if err != nil {
		return protocol.LogReply{}, err
	}
	defer release()
	return s.append(ctx, held, chunks)
}

func (s *Service) append(ctx context.Context, held engine.Held, chunks []protocol.Chunk) (protocol.LogReply, error) {
	chunks, err := ordered(chunks)
	if err != nil {
		return protocol.LogReply{}, err
	}
	streams := streamsOf(chunks)
	for range 8 {
		if len(chunks) == 0 {
			return s.position(ctx, held, streams)
		}
		r := &request{ref: held.Ref(), org: held.Org(), chunks: chunks, done: make(chan answer, 1)}
		r.extents = extentsOf(r.key(), chunks)
		for _, e := range r.extents {
			r.size += e.Length
		}
		if err := s.enqueue(ctx, r); err != nil {
			return protocol.LogReply{}, err
		}
		var a answer
		select {
		case a = <-r.done:
		case <-ctx.Done():
			if s.withdraw(r) {
				return protocol.LogReply{}, context.Cause(ctx)
			}
			a = <-r.done // the writer uses the bytes: they are given back behind it
		}
		if a.err != nil {
			return protocol.LogReply{}, a.err
		}
		if !a.again {
			return s.only(a.reply, streams), nil
		}
		if chunks, err = s.unstored(ctx, r.key(), chunks); err != nil {
			return protocol.LogReply{}, err
		}
	}
	return protocol.LogReply{}, unavailable("the attempt's log is being written by too many requests at once", time.Second)
}

// only completes a reply for the streams of the whole request.
func (s *Service) only(reply protocol.LogReply, streams []store.LogStream) protocol.LogReply {
	reply.Streams = slices.DeleteFunc(reply.Streams, func(e protocol.StreamEnd) bool {
		return !slices.Contains(streams, store.LogStream{Step: e.Step, Stream: e.Stream})
	})
	return reply
}

// position answers a request whose chunks are all stored.
func (s *Service) position(ctx context.Context, held engine.Held, streams []store.LogStream) (protocol.LogReply, error) {
	var l store.Log
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		l, _, err = tx.Log(ctx, held.Org(), store.AttemptKey{Job: held.Ref().Job, Epoch: held.Ref().Epoch})
		return err
	})
	return s.only(s.reply(l), streams), err
}

// reply says what of a log is durable.
func (s *Service) reply(l store.Log) protocol.LogReply {
	out := protocol.LogReply{Full: l.Bytes >= s.cfg.Limit || l.Extents >= s.cfg.Pieces}
	for st, n := range l.Streams {
		out.Streams = append(out.Streams, protocol.StreamEnd{Step: st.Step, Stream: st.Stream, Length: n})
	}
	slices.SortFunc(out.Streams, func(a, b protocol.StreamEnd) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Stream, b.Stream))
	})
	return out
}

// ordered returns the chunks by sequence number, each once.
func ordered(chunks []protocol.Chunk) ([]protocol.Chunk, error) {
	if len(chunks) == 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "a log request without chunks")
	}
	out := slices.Clone(chunks)
	slices.SortStableFunc(out, func(a, b protocol.Chunk) int { return cmp.Compare(a.Sequence, b.Sequence) })
	ends := map[store.LogStream]int64{}
	kept := out[:0]
	for i, c := range out {
		if i > 0 && c.Sequence == kept[len(kept)-1].Sequence {
			if last := kept[len(kept)-1]; c.Step != last.Step || c.Stream != last.Stream || c.Offset != last.Offset ||
				c.Discarded != last.Discarded || !bytes.Equal(c.Data, last.Data) {
				return nil, conflict(c)
			}
			continue
		}
		st := streamOf(c)
		if c.Offset < ends[st] {
			return nil, conflict(c)
		}
		ends[st] = c.Offset + c.Len()
		kept = append(kept, c)
	}
	return kept, nil
}

func streamOf(c protocol.Chunk) store.LogStream {
	return store.LogStream{Step: c.Step, Stream: c.Stream}
}

func streamsOf(chunks []protocol.Chunk) []store.LogStream {
	var out []store.LogStream
	for _, c := range chunks {
		if st := streamOf(c); !slices.Contains(out, st) {
			out = append(out, st)
		}
	}
	return out
}

func conflict(c protocol.Chunk) error {
	return ci.Errorf(ci.ErrConflict, "log chunk %d (step %d, %s, offset %d) is not what is stored in its place",
		c.Sequence, c.Step, c.Stream, c.Offset)
}

// maxExtent bounds an extent, which is read as a whole.
const maxExtent = protocol.MaxChunk

// extentsOf merges neighbouring chunks of one stream: the rows of a busy log
// grow with its mebibytes, not with its chunks.
func extentsOf(k store.AttemptKey, chunks []protocol.Chunk) []store.LogExtent {
	var out []store.LogExtent
	for i := 0; i < len(chunks); {
		c := chunks[i]
		e := store.LogExtent{
			Job: k.Job, Epoch: k.Epoch, Seq: c.Sequence, Stream: streamOf(c), Offset: c.Offset,
			AtMicros: c.AtMicros, FirstNL: -1, LastNL: -1,
		}
		sum := sha256.New()
		for ; i < len(chunks); i++ {
			n := chunks[i]
			if n.Sequence != c.Sequence && !follows(e, n) {
				break
			}
			if first := bytes.IndexByte(n.Data, '\n'); first >= 0 {
				if e.FirstNL < 0 {
					e.FirstNL = e.Length + int64(first)
				}
				e.LastNL = e.Length + int64(bytes.LastIndexByte(n.Data, '\n'))
				e.Newlines += int64(bytes.Count(n.Data, []byte{'\n'}))
			}
			_, _ = sum.Write(n.Data)
			e.Length += int64(len(n.Data))
			e.Discarded += n.Discarded
			e.LastSeq = n.Sequence
		}
		if e.Length > 0 {
			e.Digest = base64.RawStdEncoding.EncodeToString(sum.Sum(nil))
		}
		out = append(out, e)
	}
	return out
}

// follows reports whether a chunk may be merged into the extent before it.
func follows(e store.LogExtent, c protocol.Chunk) bool {
	return c.Sequence == e.LastSeq+1 && streamOf(c) == e.Stream && c.Offset == e.Offset+e.Length+e.Discarded &&
		(e.Discarded > 0) == (c.Discarded > 0) && e.Length+int64(len(c.Data)) <= maxExtent &&
		c.AtMicros-e.AtMicros < time.Second.Microseconds()
}

// unstored compares chunks with what is stored under their sequence numbers and
// returns those that are not; a difference is ErrConflict.
func (s *Service) unstored(ctx context.Context, k store.AttemptKey, chunks []protocol.Chunk) ([]protocol.Chunk, error) {
	var extents []store.LogExtent
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		extents, err = tx.LogExtentsOver(ctx, k, chunks[0].Sequence, chunks[len(chunks)-1].Sequence)
		return err
	})
	if err != nil {
		return nil, err
	}
	var left []protocol.Chunk
	for _, c := range chunks {
		i, _ := slices.BinarySearchFunc(extents, c.Sequence, func(e store.LogExtent, seq int64) int { return cmp.Compare(e.LastSeq, seq) })
		if i == len(extents) || extents[i].Seq > c.Sequence {
			left = append(left, c)
			continue
		}
		e := extents[i]
		from := c.Offset - e.Offset
		if e.Stream != streamOf(c) || from < 0 || from+c.Len() > e.Length+e.Discarded || e.Discarded == 0 && c.Discarded > 0 {
			return nil, conflict(c)
		}
		if e.Discarded > 0 {
			continue // its bytes were dropped: there is nothing to compare
		}
		data, err := s.loadExtent(ctx, e)
		if err != nil {
			return nil, away(err) // what is stored cannot be read now: that says nothing about the chunk
		}
		if !bytes.Equal(data[from:from+c.Len()], c.Data) {
			return nil, conflict(c)
		}
	}
	return left, nil
}
