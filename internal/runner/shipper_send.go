package runner

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// digestTries is how often a body is sent again that arrived damaged.
const digestTries = 3

// run sends until the context ends; every request it started has ended when it
// returns.
func (s *shipper) run(ctx context.Context) {
	var requests sync.WaitGroup
	defer requests.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(s.launch(ctx, &requests))
		select {
		case <-ctx.Done():
			s.stop()
			return
		case <-s.wake:
		case <-timer.C:
		}
	}
}

// launch cuts what is due, starts requests while some may be under way, and
// returns how long nothing more is due.
func (s *shipper) launch(ctx context.Context, requests *sync.WaitGroup) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	sleep := time.Hour
	if s.stopped {
		return sleep
	}
	if s.flying < s.cfg.inFlight {
		now := time.Since(s.began)
		for _, st := range s.streams {
			if len(st.open) == 0 {
				continue
			}
			if due := st.openAt + s.cfg.delay; due <= now {
				s.cutLines(st)
			}
			if len(st.open) > 0 {
				sleep = min(sleep, st.openAt+s.cfg.delay-now)
			}
		}
	}
	for s.flying < s.cfg.inFlight {
		batch := s.batch()
		if len(batch) == 0 {
			break
		}
		s.flying++
		requests.Go(func() { s.deliver(ctx, batch) })
	}
	return sleep
}

// batch takes the next chunks, as many as go into one body.
func (s *shipper) batch() []protocol.Chunk {
	for s.spool.len() > 0 && s.memory < s.cfg.memory {
		c, err := s.spool.pop()
		if err != nil {
			s.log.Error("log spool cannot be read: output is lost", slog.Any("error", err))
			c.Discarded, c.Data = int64(len(c.Data)), nil
		}
		s.queue = append(s.queue, c)
		s.memory += int64(len(c.Data))
	}
	size, n := 0, 0
	for n < len(s.queue) && n < protocol.MaxChunksPerBody && (n == 0 || size+len(s.queue[n].Data) <= logBody) {
		size += len(s.queue[n].Data)
		n++
	}
	batch := s.queue[:n:n]
	s.queue = s.queue[n:]
	return batch
}

// deliver sends one body until it is answered, its bytes are confirmed by
// another answer, or nothing more may be sent.
func (s *shipper) deliver(ctx context.Context, batch []protocol.Chunk) {
	var body []byte
	var size int64
	for _, c := range batch {
		body = protocol.AppendChunk(body, c)
		size += int64(len(c.Data))
	}
	var wait backoff
	limit := sending(len(body))
	damaged := 0
	for {
		try, cancel := context.WithTimeout(ctx, limit.first)
		reply, err := s.send(try, body)
		if try.Err() != nil {
			limit = limit.next()
		}
		cancel()
		if err == nil {
			s.confirmed(reply)
			break
		}
		if ctx.Err() != nil {
			break
		}
		if why, refused := verdict(err); refused {
			if s.stop() {
				s.refused(why)
			}
			break
		}
		if ci.KindOf(err) == ci.ErrTooLarge {
			s.setFull()
			break
		}
		if ci.KindOf(err) == ci.ErrDigest && damaged < digestTries {
			damaged++
		} else if !transient(err) {
			// Repeating would be refused for ever (CASES LOG-03).
			s.log.ErrorContext(ctx, "log chunks were refused: output is lost", slog.Any("error", err),
				slog.Int("chunks", len(batch)), slog.Int64("bytes", size))
			break
		}
		if pause(ctx, wait.delay(err)) != nil || s.settled(batch) {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying--
	s.memory -= size
	s.changed.Broadcast()
	s.nudge()
}

// confirmed takes over the cumulative acknowledgements of one answer.
func (s *shipper) confirmed(reply protocol.LogReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, end := range reply.Streams {
		for _, st := range s.streams {
			if st.step == end.Step && st.stream == end.Stream {
				st.acked = max(st.acked, end.Length)
			}
		}
	}
	s.full = s.full || reply.Full
}

// settled reports whether the server has confirmed all of the batch in answers
// to later requests, or takes nothing more.
func (s *shipper) settled(batch []protocol.Chunk) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return true
	}
	for _, c := range batch {
		ok := false
		for _, st := range s.streams {
			if st.step == c.Step && st.stream == c.Stream {
				ok = st.acked >= c.Offset+c.Len()
			}
		}
		if !ok {
			return false
		}
	}
	return true
}

func (s *shipper) setFull() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.full = true
}

// stop gives up: writers discard, nothing more is sent. It reports whether it
// was the first to do so.
func (s *shipper) stop() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := !s.stopped
	s.stopped = true
	s.changed.Broadcast()
	s.nudge()
	return first
}
