package runner

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"

	"forgeci/internal/protocol"
)

// shipping bounds one attempt's way of sending its log.
type shipping struct {
	limit    int64         // bytes the server keeps of the attempt; 0 means no limit
	delay    time.Duration // how long output may wait for more of it
	chunk    int           // bytes that are sent without waiting
	memory   int64         // bytes of unsent output kept in memory
	spool    int64         // bytes of unsent output kept on disk
	inFlight int           // requests under way; also the most that can be refused
}

// Defaults of shipping.
const (
	defaultLogDelay    = 100 * time.Millisecond
	defaultLogChunk    = 64 << 10
	defaultLogMemory   = 2 << 20
	defaultLogSpool    = 256 << 20
	defaultLogInFlight = 3 // CASES LOG-10 allows three refused requests
	logBody            = protocol.MaxChunk
)

// shipper sends the output of one attempt: it cuts the streams into chunks,
// numbers them, keeps what the server has not confirmed in bounded memory and
// on bounded disk, and repeats what was not answered. Its writers block only
// when memory and disk are full, never for the attempt's limit.
//
// The first and the last bytes of a step are sent at once; in between a chunk
// waits for its size or its delay and ends at a newline if it has one. While
// the server is slow, chunks grow to a MiB.
type shipper struct {
	cfg  shipping
	send func(context.Context, []byte) (protocol.LogReply, error)
	// refused is told once that the server takes no more because of the lease.
	refused func(cause)
	log     *slog.Logger
	began   time.Time
	wake    chan struct{} // for run, capacity 1

	mu      sync.Mutex
	changed *sync.Cond // on mu: room, idle or stopped may have changed
	// guarded by mu
	streams  []*logStream
	sequence int64
	taken    int64 // bytes accepted toward the limit
	queue    []protocol.Chunk
	spool    *spool
	memory   int64 // bytes in queue and in flight
	flying   int
	stopped  bool // the server takes nothing more
	lossy    bool // discard rather than block
	full     bool // the server said that the limit is reached
}

// logStream is one stream of one step; its fields are guarded by shipper.mu.
type logStream struct {
	ship    *shipper
	step    int
	stream  protocol.Stream
	open    []byte        // read, not cut
	openAt  time.Duration // since the attempt's start
	dropped int64         // discarded after open, not cut
	dropAt  time.Duration
	marked  bool // the first marker of a discard is on its way
	cutTo   int64
	sent    bool // something was cut
	acked   int64
	closed  bool
}

func newShipper(cfg shipping, spoolPath string, log *slog.Logger,
	send func(context.Context, []byte) (protocol.LogReply, error), refused func(cause),
) *shipper {
	s := &shipper{
		cfg: cfg, send: send, refused: refused, log: log, began: time.Now(), spool: newSpool(spoolPath, cfg.spool),
		wake: make(chan struct{}, 1),
	}
	s.changed = sync.NewCond(&s.mu)
	return s
}

// stream returns the writer of one stream. Its Write never fails; Close sends
// what is left at once.
func (s *shipper) stream(step int, stream protocol.Stream) *logStream {
	st := &logStream{ship: s, step: step, stream: stream}
	s.mu.Lock()
	s.streams = append(s.streams, st)
	s.mu.Unlock()
	return st
}

// Write takes p whole. It blocks while memory and disk are full.
func (st *logStream) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), st.ship.cfg.chunk)
		st.ship.take(st, rest[:n])
		rest = rest[n:]
	}
	return len(p), nil
}

// Close cuts and sends what is left of the stream.
func (st *logStream) Close() error {
	s := st.ship
	s.mu.Lock()
	defer s.mu.Unlock()
	if !st.closed {
		st.closed = true
		s.cutAll(st)
		s.nudge()
	}
	return nil
}

func (s *shipper) take(st *logStream, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.stopped && !s.lossy && s.crowded() {
		s.changed.Wait()
	}
	if s.stopped || st.closed {
		return
	}
	room := len(p)
	if s.crowded() || s.full {
		room = 0
	} else if s.cfg.limit > 0 {
		room = int(min(int64(room), s.cfg.limit-s.taken))
	}
	now := time.Since(s.began)
	if room > 0 {
		s.taken += int64(room)
		if st.dropped > 0 {
			s.cutAll(st) // the marker stands before what follows it
		}
		if len(st.open) == 0 {
			st.openAt = now
		}
		st.open = append(st.open, p[:room]...)
	}
	if lost := len(p) - room; lost > 0 {
		if st.dropped == 0 {
			st.dropAt = now
		}
		st.dropped += int64(lost)
	}
	switch {
	case !st.sent && st.stream != protocol.System:
		// What the runner said before goes with it, in order.
		for _, other := range s.streams {
			if other.step == protocol.StepSystem && other != st {
				s.cutAll(other)
			}
		}
		s.cutAll(st)
	case st.dropped > 0 && !st.marked:
		s.cutAll(st)
	case len(st.open) >= s.want():
		s.cutLines(st)
	case len(st.open) > room: // a timer for it is running already
		return
	}
	s.nudge()
}

// crowded reports whether there is no place for more output.
func (s *shipper) crowded() bool {
	return s.memory >= s.cfg.memory && s.spool.crowded()
}

// want is how long an open chunk gets before it is cut for its size.
func (s *shipper) want() int {
	if s.flying >= s.cfg.inFlight {
		return protocol.MaxChunk - s.cfg.chunk
	}
	return s.cfg.chunk
}

// cutLines cuts the stream's open bytes behind their last newline, or all.
func (s *shipper) cutLines(st *logStream) {
	n := bytes.LastIndexByte(st.open, '\n') + 1
	if n == 0 {
		n = len(st.open)
	}
	s.cut(st, n)
}

// cutAll cuts everything, the marker of discarded bytes too.
func (s *shipper) cutAll(st *logStream) {
	if len(st.open) > 0 {
		s.cut(st, len(st.open))
	}
	if st.dropped > 0 {
		s.enqueue(st, protocol.Chunk{Discarded: st.dropped}, st.dropAt)
		st.dropped, st.marked = 0, true
	}
}

func (s *shipper) cut(st *logStream, n int) {
	data := st.open[:n:n]
	at := st.openAt
	st.open, st.openAt = append([]byte(nil), st.open[n:]...), time.Since(s.began)
	s.enqueue(st, protocol.Chunk{Data: data}, at)
}

// enqueue numbers a chunk and puts it behind all others, in memory if there is
// room and nothing is on disk, else on disk. When the disk refuses, memory takes
// it: at most one open chunk of each stream.
func (s *shipper) enqueue(st *logStream, c protocol.Chunk, at time.Duration) {
	s.sequence++
	c.Step, c.Stream, c.Sequence, c.Offset, c.AtMicros = st.step, st.stream, s.sequence, st.cutTo, at.Microseconds()
	st.cutTo += c.Len()
	st.sent = true
	if s.spool.len() > 0 || s.memory >= s.cfg.memory {
		err := s.spool.push(c)
		if err == nil {
			return
		}
		s.log.Warn("log spool cannot be written: the job waits for the server", slog.Any("error", err))
		if s.spool.len() > 0 {
			s.spool.keep(c)
			return
		}
	}
	s.queue = append(s.queue, c)
	s.memory += int64(len(c.Data))
}

// line writes one line of the runner's own about the attempt or a step.
func (st *logStream) line(text string) { _, _ = st.Write([]byte(text + "\n")) }

// ends returns the final length of every stream.
func (s *shipper) ends() []protocol.StreamEnd {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []protocol.StreamEnd
	for _, st := range s.streams {
		if n := st.cutTo + int64(len(st.open)) + st.dropped; n > 0 {
			out = append(out, protocol.StreamEnd{Step: st.step, Stream: st.stream, Length: n})
		}
	}
	return out
}

// flush closes all streams and waits until the server holds everything, takes
// nothing more, or ctx is done. It reports whether everything arrived.
func (s *shipper) flush(ctx context.Context) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.streams {
		st.closed = true
		s.cutAll(st)
	}
	s.nudge()
	defer context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.changed.Broadcast()
	})()
	for !s.idle() && !s.stopped && ctx.Err() == nil {
		s.changed.Wait()
	}
	return s.idle() && !s.stopped
}

func (s *shipper) idle() bool { return len(s.queue) == 0 && s.flying == 0 && s.spool.len() == 0 }

// relent makes writers discard with a marker instead of blocking: the job is
// being ended and its processes must not hang on a full pipe.
func (s *shipper) relent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lossy = true
	s.changed.Broadcast()
}

func (s *shipper) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
