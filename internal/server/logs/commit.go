package logs

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

const (
	maxSegment  = 8 << 20               // a group is cut here
	fullGroup   = 1 << 20               // a group of this size does not wait
	busyWindow  = 20 * time.Millisecond // from one group's start to the next, without a window
	putLimit    = time.Minute           // of writing one segment
	commitLimit = 15 * time.Second      // of indexing it
	// segmentLife is how long after its key was made a segment may be indexed.
	// Objects without a row are deleted when they are orphanAge old: much later.
	segmentLife = 10 * time.Minute
	orphanAge   = time.Hour
)

// enqueue hands a request to the writers; while there are none its caller writes.
func (s *Service) enqueue(ctx context.Context, r *request) error {
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return unavailable("the server is shutting down", time.Second)
	}
	s.queue = append(s.queue, r)
	s.queued += r.size
	running := s.running
	s.mu.Unlock()
	if running {
		wake(s.arrived)
		return nil
	}
	if s.cfg.Gather != nil {
		s.cfg.Gather()
	}
	for len(r.done) == 0 && s.Flush(ctx) > 0 {
	}
	return nil
}

// withdraw takes a request back that no writer has begun with.
func (s *Service) withdraw(r *request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.queue, r)
	if i < 0 {
		return false
	}
	s.queue = slices.Delete(s.queue, i, i+1)
	s.queued -= r.size
	return true
}

func (s *Service) refuseAll() {
	s.mu.Lock()
	queue := s.queue
	s.queue, s.queued, s.stopped = nil, 0, true
	s.mu.Unlock()
	for _, r := range queue {
		r.done <- answer{err: unavailable("the server is shutting down", time.Second)}
	}
}

// write takes groups from the queue and stores them, one after the other.
func (s *Service) write(ctx context.Context) {
	var last time.Time // start of the last group
	for ctx.Err() == nil {
		if s.waiting() == 0 && !pause(ctx, time.Hour, s.arrived) {
			return
		}
		if s.waiting() == 0 {
			continue
		}
		wait := s.cfg.Window
		if wait == 0 {
			wait = time.Until(last.Add(busyWindow))
		}
		for deadline := time.Now().Add(wait); s.waiting() < fullGroup && time.Now().Before(deadline); {
			if !pause(ctx, time.Until(deadline), s.arrived) {
				return
			}
		}
		last = time.Now()
		s.Flush(ctx)
	}
}

// Flush makes one group of the requests that wait durable, answers each of them,
// and returns how many they were. It is all that a writer of Run does when it has
// waited for a group; a caller that owns the time may do it instead.
func (s *Service) Flush(ctx context.Context) int {
	group := s.group()
	if len(group) > 0 {
		s.store(ctx, group)
	}
	return len(group)
}

// waiting returns the size of the queue, at least 1 when something is in it.
func (s *Service) waiting() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.queued, int64(min(1, len(s.queue))))
}

// group takes what is written together: at most maxSegment bytes, and of one job
// only requests under the same lease, since at most one of its leases is current.
func (s *Service) group() []*request {
	s.mu.Lock()
	defer s.mu.Unlock()
	var group, rest []*request
	var size int64
	refs := map[ci.JobID]ci.LeaseRef{}
	for _, r := range s.queue {
		ref, seen := refs[r.ref.Job]
		if size > 0 && size+r.size > maxSegment || seen && ref != r.ref {
			rest = append(rest, r)
			continue
		}
		refs[r.ref.Job] = r.ref
		size += r.size
		group = append(group, r)
	}
	s.queue = rest
	s.queued -= size
	if len(rest) > 0 {
		wake(s.arrived)
	}
	return group
}

// store makes a group durable and answers each of its requests.
func (s *Service) store(ctx context.Context, group []*request) {
	answers, err := s.storeGroup(ctx, group)
	for i, r := range group {
		if err != nil {
			r.done <- answer{err: err}
			continue
		}
		r.done <- answers[i]
	}
}

func (s *Service) storeGroup(ctx context.Context, group []*request) ([]answer, error) {
	// The order within a segment is the order of the extents in it.
	var size int64
	for _, r := range group {
		for i := range r.extents {
			r.extents[i].SegmentAt = size
			size += r.extents[i].Length
		}
	}
	segment := make([]byte, 0, size)
	for _, r := range group {
		for _, c := range r.chunks {
			segment = append(segment, c.Data...)
		}
	}
	made, err := s.now(ctx)
	if err != nil {
		return nil, away(err)
	}
	began := s.cfg.Monotonic()
	key := objectKey(segmentPrefix, s.cfg.Incarnation, made, s.cfg.IDs.New(ci.PrefixObject))
	if size > 0 {
		put, cancel := context.WithTimeout(ctx, putLimit)
		err := s.cfg.Blob.PutNew(put, key, bytes.NewReader(segment), size, sha256.Sum256(segment))
		cancel()
		if err != nil {
			s.cfg.Log.WarnContext(ctx, "log segment not stored", slog.Any("error", err), slog.Int("requests", len(group)))
			return nil, away(err)
		}
	}
	commit, cancel := context.WithTimeout(ctx, commitLimit)
	defer cancel()
	var c commitment
	err = s.cfg.Store.Write(commit, func(tx *store.Tx) error {
		c = commitment{limit: s.cfg.Limit, pieces: s.cfg.Pieces, group: group, segment: key, size: size, made: made, late: s.cfg.Monotonic()-began > segmentLife}
		return c.run(commit, tx)
	})
	if c.now != 0 {
		s.setNow(c.now) // a refusal, too: the estimate may be what was wrong, because the clock has jumped
	}
	if err != nil {
		s.cfg.Log.WarnContext(ctx, "log segment not indexed", slog.Any("error", err), slog.Int("requests", len(group)))
		return nil, away(err)
	}
	if len(c.stored) == 0 && size > 0 {
		// Nothing refers to it and nothing will; what a failure here leaves is collected.
		if err := s.cfg.Blob.Delete(ctx, key); err != nil {
			s.cfg.Log.DebugContext(ctx, "log segment not deleted", slog.Any("error", err))
		}
	}
	if len(c.stored) > 0 {
		s.cache.put(key, segment)
		touched := make([]store.AttemptKey, 0, len(c.logs))
		for _, l := range c.logs {
			touched = append(touched, l.Key())
		}
		s.touch(touched...)
	}
	for i := range c.answers {
		if l := c.logs[group[i].ref.Job]; l != nil && c.answers[i].err == nil {
			c.answers[i].reply = s.reply(*l)
			c.answers[i].reply.Full = c.answers[i].reply.Full || c.full[l.Job]
		}
	}
	return c.answers, nil
}

// away turns the failure of a part that is needed into an answer that asks the
// runner to send the same again.
func away(err error) error {
	if ci.KindOf(err) == ci.ErrUnavailable {
		if after := retryAfter(err); after > 0 {
			return err
		}
	}
	e := unavailable("the log cannot be stored now: send the same again", time.Second)
	return e.WithCause(err)
}

// commitment indexes one segment in one transaction. It is made anew for each try.
type commitment struct {
	limit   int64
	pieces  int64
	group   []*request
	segment string
	size    int64
	made    int64 // when the segment's key was made, database time
	late    bool  // by the monotonic clock, too

	now     int64
	answers []answer
	logs    map[ci.JobID]*store.Log
	full    map[ci.JobID]bool
	stored  []store.LogExtent
}

func (c *commitment) run(ctx context.Context, tx *store.Tx) error {
	c.answers = make([]answer, len(c.group))
	c.logs, c.full = map[ci.JobID]*store.Log{}, map[ci.JobID]bool{}
	byJob := map[ci.JobID]ci.LeaseRef{}
	for _, r := range c.group {
		byJob[r.ref.Job] = r.ref
	}
	refs := make([]ci.LeaseRef, 0, len(byJob))
	for _, ref := range byJob {
		refs = append(refs, ref)
	}
	logs, err := tx.LockLogs(ctx, refs)
	if err != nil {
		return err
	}
	if c.now, err = tx.Now(ctx); err != nil {
		return err
	}
	if age := c.now - c.made; c.late || age > segmentLife.Microseconds() {
		return unavailable("the log segment took too long to write", time.Second)
	}
	current, err := tx.CurrentLeases(ctx, refs, c.now)
	if err != nil {
		return err
	}
	// What has no row yet gets one with its first bytes.
	known := make(map[ci.JobID]bool, len(logs))
	for _, l := range logs {
		known[l.Job] = true
	}
	locked := len(logs)
	for _, r := range c.group {
		if k := r.key(); !known[k.Job] {
			known[k.Job] = true
			logs = append(logs, store.Log{Job: k.Job, Epoch: k.Epoch, Org: r.org, State: store.LogOpen, NextSeq: 1, AheadSeq: 1})
		}
	}
	plans := map[ci.JobID]*plan{}
	for i, l := range logs {
		if !current[l.Job] || l.State != store.LogOpen {
			continue
		}
		p := &plan{log: l, isNew: i >= locked, limit: c.limit, pieces: c.pieces}
		if l.AheadSeq > l.NextSeq {
			if p.ahead, err = tx.LogExtents(ctx, l.Key(), l.NextSeq, protocol.MaxAhead); err != nil {
				return err
			}
		}
		plans[l.Job] = p
	}
	var changed, made []store.Log
	var fenced []ci.LeaseRef
	for i, r := range c.group {
		p := plans[r.ref.Job]
		if p == nil {
			why, err := tx.WhyRefused(ctx, r.ref, c.now)
			if err != nil {
				return err
			}
			c.answers[i].err = ci.Rejected(why)
			continue
		}
		c.answers[i].again, c.answers[i].err = p.take(r.extents)
	}
	for job, p := range plans {
		c.logs[job], c.full[job] = &p.log, p.full
		if len(p.fresh) > 0 {
			if p.isNew {
				made = append(made, p.log)
			} else {
				changed = append(changed, p.log)
			}
			fenced = append(fenced, byJob[job])
			c.stored = append(c.stored, p.fresh...)
		}
	}
	if len(c.stored) == 0 {
		return nil
	}
	return tx.AppendLogs(ctx, fenced, changed, made, c.stored, c.segment, c.size, c.now)
}

// markers is how many pieces without bytes a full log takes.
const markers = 1 << 16

// plan decides what of the requests for one log is stored, which is locked or new.
type plan struct {
	log   store.Log
	isNew bool
	ahead []store.LogExtent // stored behind the hole, by sequence
	limit int64
	// pieces is how many extents hold bytes; after markers more, none is taken.
	pieces int64
	fresh  []store.LogExtent // to store
	full   bool
}

// take accepts the extents of one request, all or none. again says that some of
// them were stored before and have to be compared.
func (p *plan) take(es []store.LogExtent) (again bool, err error) {
	for _, e := range es {
		if e.Seq < p.log.NextSeq || slices.ContainsFunc(p.ahead, func(o store.LogExtent) bool {
			return o.Seq <= e.LastSeq && e.Seq <= o.LastSeq
		}) {
			return true, nil
		}
		if ahead := e.LastSeq - p.log.NextSeq; ahead >= protocol.MaxAhead {
			return false, ci.Errorf(ci.ErrTooLarge, "log chunk %d is %d ahead of the first that is missing: at most %d are kept behind a hole",
				e.LastSeq, ahead, protocol.MaxAhead)
		}
	}
	if p.log.Extents+int64(len(es)) > p.pieces+markers {
		return false, ci.Errorf(ci.ErrTooLarge, "the log has %d pieces: no more are taken", p.log.Extents)
	}
	was, wasAhead, wasFresh, wasFull := p.log, slices.Clone(p.ahead), len(p.fresh), p.full
	p.log.Streams = clone(was.Streams)
	for _, e := range es {
		p.add(e)
	}
	slices.SortFunc(p.ahead, func(a, b store.LogExtent) int { return cmp.Compare(a.Seq, b.Seq) })
	if err := p.advance(); err != nil {
		p.log, p.ahead, p.fresh, p.full = was, wasAhead, p.fresh[:wasFresh], wasFull
		return false, err
	}
	return false, nil
}

func (p *plan) add(e store.LogExtent) {
	if e.Length > 0 && (p.log.Bytes+e.Length > p.limit || p.log.Extents >= p.pieces) {
		e.Discarded, e.Length, e.Newlines, e.FirstNL, e.LastNL = e.Length, 0, 0, -1, -1
		p.full = true
	}
	p.log.Bytes += e.Length
	p.log.Cut += e.Discarded
	p.log.Extents++
	p.log.AheadSeq = max(p.log.AheadSeq, e.LastSeq+1)
	p.ahead = append(p.ahead, e)
	p.fresh = append(p.fresh, e)
}

// advance moves the end of the part without a hole. Within a stream, offsets
// must rise with sequence numbers and must not jump where these do not.
func (p *plan) advance() error {
	for len(p.ahead) > 0 && p.ahead[0].Seq == p.log.NextSeq {
		e := p.ahead[0]
		if e.Offset != p.log.Streams[e.Stream] {
			return misplaced(e, p.log.Streams[e.Stream])
		}
		p.log.NextSeq = e.LastSeq + 1
		p.log.Streams[e.Stream] = end(e)
		p.ahead = p.ahead[1:]
	}
	ends := clone(p.log.Streams)
	for _, e := range p.ahead {
		if e.Offset < ends[e.Stream] {
			return misplaced(e, ends[e.Stream])
		}
		ends[e.Stream] = end(e)
	}
	return nil
}

func end(e store.LogExtent) int64 { return e.Offset + e.Length + e.Discarded }

func misplaced(e store.LogExtent, want int64) error {
	return ci.Errorf(ci.ErrConflict, "log chunk %d (step %d, %s) begins at offset %d; its stream is stored up to %d",
		e.Seq, e.Stream.Step, e.Stream.Stream, e.Offset, want)
}

func clone(m map[store.LogStream]int64) map[store.LogStream]int64 {
	out := make(map[store.LogStream]int64, len(m)+1)
	maps.Copy(out, m)
	return out
}

// Prefixes of objects. Keys sort by the time they were made.
const (
	segmentPrefix = "logs/segments/"
	archivePrefix = "logs/archives/"
)

func objectKey(prefix, incarnation string, madeUS int64, name string) string {
	return fmt.Sprintf("%s%s/%016x-%s", prefix, incarnation, madeUS, name)
}

// read reads a range of an object whole. That an object ends within it is
// ErrDigest; any other failure in the middle says nothing about the object: it is
// the store's own error, the caller's that ctx ended with, or ErrUnavailable.
func (s *Service) read(ctx context.Context, key string, at, n int64) ([]byte, error) {
	select {
	case s.loads <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-s.loads }()
	r, err := s.cfg.Blob.Open(ctx, key, at, n)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	b := make([]byte, n)
	switch _, err := io.ReadFull(r, b); {
	case err == nil:
		return b, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err == io.EOF || err == io.ErrUnexpectedEOF: // wrapped, it is how a connection ended
		return nil, ci.Errorf(ci.ErrDigest, "object %s is shorter than its index says", key).WithCause(err)
	default:
		if _, typed := errors.AsType[*ci.Error](err); typed {
			return nil, err
		}
		return nil, ci.Errorf(ci.ErrUnavailable, "object %s cannot be read now", key).WithCause(err)
	}
}
