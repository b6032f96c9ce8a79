package logs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

const (
	sealBatch = 256             // logs in one round
	sealPoll  = 2 * time.Second // how often to look for logs that ended elsewhere
	sealGrace = 2 * time.Second // how long they are left to the node that ended them
	// busySeal is from one round's start to the next while logs end at a rate: their
	// archives share objects.
	busySeal = 500 * time.Millisecond
	// sealBytes is how many bytes of logs a round rewrites before it records what it has
	// done: a small log does not wait for many large ones, and the end of the node
	// costs little of its work.
	sealBytes = 16 << 20
	archiving = 30 * time.Minute // of one archive
	// archiveOrphan is the age at which an archive that no log names is deleted;
	// far above archiving, and a seal that took longer is refused.
	archiveOrphan = 24 * time.Hour
	// damaged and damagedTries are for how long and how often in a row a node has to
	// have found that the object store does not give bytes back, before they are
	// marked as lost: one read that fails proves nothing.
	damaged      = time.Hour
	damagedTries = 10
	releaseBatch = 5000
)

// seal rewrites ended logs into archives until ctx ends.
func (s *Service) seal(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		n, err := s.SealEnded(ctx)
		if err != nil && ctx.Err() == nil {
			s.cfg.Log.WarnContext(ctx, "logs not sealed", slog.Any("error", err))
		}
		switch {
		case n == 0 || err != nil:
			pause(ctx, sealPoll, s.ended)
		case n > 1 && n < sealBatch:
			pause(ctx, time.Until(began.Add(busySeal)), nil)
		}
	}
}

// SealEnded archives logs that have ended: those hinted by Ended at once, others
// after a grace in which the node that ended them does it. It returns how many
// it sealed. A log that cannot be archived now is tried again later and does not
// keep others waiting.
func (s *Service) SealEnded(ctx context.Context) (int, error) {
	s.sealing.Lock() // one round at a time
	defer s.sealing.Unlock()
	if err := s.recordAgain(ctx); err != nil {
		return 0, err
	}
	due, now, err := s.dueLogs(ctx)
	if err != nil || len(due) == 0 {
		return 0, err
	}
	extents, err := s.fewExtents(ctx, due)
	if err != nil {
		return 0, err
	}
	ps := packs{s: s, now: now, open: map[ci.OrgID]*pack{}}
	var failed error
	n, bytes := 0, int64(0)
	for i, l := range due {
		if err := s.archive(ctx, l, extents, &ps); err != nil {
			failed = errors.Join(failed, err)
		}
		if bytes += l.Bytes; bytes < sealBytes && i < len(due)-1 {
			continue
		}
		bytes = 0
		done, err := s.finish(ctx, &ps)
		n, failed = n+done, errors.Join(failed, err)
	}
	return n, failed
}

// finish stores the packs that are open and records all that has been stored.
func (s *Service) finish(ctx context.Context, ps *packs) (int, error) {
	failed := ps.closeAll(ctx)
	sealed, objects := ps.sealed, ps.objects
	ps.sealed, ps.objects = nil, nil
	if len(sealed) == 0 {
		return 0, failed
	}
	err := s.record(ctx, sealed, objects, ps.now)
	switch {
	case err == nil:
		return len(sealed), failed
	case isLate(err): // they are archived anew
		return 0, errors.Join(failed, err)
	case passing(err):
		s.unrecorded = append(s.unrecorded, unrecorded{sealed, objects, ps.now})
		return 0, errors.Join(failed, err)
	}
	// The rows of one of them are not as they should be: it keeps no other waiting.
	n := 0
	for _, part := range byObject(sealed) {
		held := slices.DeleteFunc(slices.Clone(objects), func(o store.LogObject) bool { return o.Key != part[0].ArchiveKey })
		if err := s.record(ctx, part, held, ps.now); err != nil {
			failed = errors.Join(failed, err)
			s.doubt(err, false, part...)
			continue
		}
		n += len(part)
	}
	return n, failed
}

// unrecorded is what was archived and could not be recorded: the database takes no
// writes, or did not say whether it took this one.
type unrecorded struct {
	logs    []store.Log
	objects []store.LogObject
	madeUS  int64
}

// recordAgain records what could not be recorded before. Nothing else is archived
// until then: each round would store the same archives once more.
func (s *Service) recordAgain(ctx context.Context) error {
	for len(s.unrecorded) > 0 {
		u := s.unrecorded[0]
		if err := s.record(ctx, u.logs, u.objects, u.madeUS); passing(err) {
			return err
		}
		// Else the logs are sealed, or archived anew.
		s.unrecorded = s.unrecorded[1:]
	}
	return nil
}

// byObject parts logs by the object that their archives are in. Those without one
// are alone.
func byObject(logs []store.Log) (parts [][]store.Log) {
	at := map[string]int{}
	for _, l := range logs {
		i, ok := at[l.ArchiveKey]
		if !ok || l.ArchiveKey == "" {
			i, parts = len(parts), append(parts, nil)
			at[l.ArchiveKey] = i
		}
		parts[i] = append(parts[i], l)
	}
	return parts
}

// dueLogs returns logs that are to be sealed now, and the database's time. Those in
// doubt come last, and there are few of them while others are due.
func (s *Service) dueLogs(ctx context.Context) (due []store.Log, now int64, err error) {
	s.mu.Lock()
	look := 2*sealBatch + len(s.doubted)
	s.mu.Unlock()
	var logs []store.Log
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		if now, err = tx.Now(ctx); err != nil {
			return err
		}
		logs, err = tx.EndedLogs(ctx, now, look)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	if len(logs) < look {
		s.undoubtAllBut(logs)
	}
	var again []store.Log
	for _, l := range logs {
		s.mu.Lock()
		hinted := s.hinted[l.Key()]
		_, doubted := s.doubted[l.Key()]
		delete(s.hinted, l.Key())
		s.mu.Unlock()
		switch {
		case !hinted && now-l.EndedUS < sealGrace.Microseconds():
		case doubted:
			again = append(again, l)
		case len(due) < sealBatch:
			due = append(due, l)
		case hinted:
			s.hint(l.Key())
		}
	}
	most := max(sealBatch-len(due), sealBatch/8)
	return append(due, again[:min(most, len(again))]...), now, nil
}

// fewExtents returns the extents of those logs that have few, read at once.
func (s *Service) fewExtents(ctx context.Context, logs []store.Log) (map[store.AttemptKey][]store.LogExtent, error) {
	var keys []store.AttemptKey
	left := int64(extentPage)
	for _, l := range logs {
		if l.Extents > 0 && l.Extents <= left {
			left -= l.Extents
			keys = append(keys, l.Key())
		}
	}
	if len(keys) == 0 {
		return nil, nil
	}
	var es map[store.AttemptKey][]store.LogExtent
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		es, err = tx.LogExtentsOf(ctx, keys)
		return err
	})
	return es, err
}

func (s *Service) hint(k store.AttemptKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hinted[k] = true
}

// lateError says that archives are too old to be recorded: as objects without a
// row they may be collected.
type lateError struct{ made, now int64 }

// Error implements error.
func (e lateError) Error() string {
	return fmt.Sprintf("sealing took too long: %s", time.Duration(e.now-e.made)*time.Microsecond)
}

func isLate(err error) bool {
	_, late := errors.AsType[lateError](err)
	return late
}

// record makes verified archives the logs' bytes and releases what they replace.
func (s *Service) record(ctx context.Context, batch []store.Log, objects []store.LogObject, madeUS int64) error {
	var won map[store.AttemptKey]bool
	err := s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		if now-madeUS > (archiveOrphan / 2).Microseconds() {
			return lateError{madeUS, now}
		}
		won, err = tx.SealLogs(ctx, batch, objects, now)
		return err
	})
	if err != nil {
		return err
	}
	keys := make([]store.AttemptKey, 0, len(batch))
	held := map[string]bool{}
	for _, l := range batch {
		keys = append(keys, l.Key())
		held[l.ArchiveKey] = held[l.ArchiveKey] || won[l.Key()]
	}
	if err := s.forgo(ctx, objects, held); err != nil {
		s.cfg.Log.DebugContext(ctx, "log archives not deleted", slog.Any("error", err))
	}
	s.touch(keys...)
	var many []store.AttemptKey
	for _, l := range batch {
		if store.ReleasedLater(l) {
			many = append(many, l.Key())
		}
	}
	if len(many) == 0 {
		return nil
	}
	return s.release(ctx, many)
}

// forgo deletes archives that are nobody's since another node was first, but not
// those that an earlier try has recorded, whose answer was lost. What it leaves is
// collected.
func (s *Service) forgo(ctx context.Context, objects []store.LogObject, held map[string]bool) error {
	var keys []string
	for _, o := range objects {
		if !held[o.Key] {
			keys = append(keys, o.Key)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	known, err := s.known(ctx, keys)
	for _, k := range keys {
		if err == nil && !known[k] {
			err = s.cfg.Blob.Delete(ctx, k)
		}
	}
	return err
}

// release drops the extents of sealed logs in transactions of bounded size.
func (s *Service) release(ctx context.Context, keys []store.AttemptKey) error {
	for {
		n := 0
		err := s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
			n, err = tx.ReleaseExtents(ctx, keys, releaseBatch)
			return err
		})
		if err != nil && len(keys) > 1 && !passing(err) && ctx.Err() == nil {
			// The rows of one of them are not as they should be: it keeps no other waiting.
			err = nil
			for _, k := range keys {
				err = errors.Join(err, s.release(ctx, []store.AttemptKey{k}))
			}
			return err
		}
		if err != nil || n < releaseBatch {
			return err
		}
	}
}

// archive builds the archive of an ended log and gives it to a pack, or stores and
// verifies it alone.
func (s *Service) archive(ctx context.Context, l store.Log, known map[store.AttemptKey][]store.LogExtent, ps *packs) error {
	ctx, cancel := context.WithTimeout(ctx, archiving)
	defer cancel()
	lay := newLayout()
	if es, ok := known[l.Key()]; ok {
		lay.extend(es, true)
	}
	for l.Extents > int64(len(known[l.Key()])) {
		var es []store.LogExtent
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			es, err = tx.LogExtents(ctx, l.Key(), lay.nextSeq, extentPage)
			return err
		})
		if err != nil {
			return err
		}
		lay.extend(es, true)
		if len(es) < extentPage {
			break
		}
	}
	lay.finish(l.Finals)
	if len(lay.recs) == 0 {
		ps.sealed = append(ps.sealed, l) // nothing was written: there is nothing to keep
		return nil
	}
	out := newSpool(s.cfg.Temp)
	defer out.close()
	a := &archiver{codec: s.codec, out: out}
	sealed, err := s.rewrite(ctx, lay, a, s.givesUp(l.Key()))
	if err != nil {
		s.doubt(err, notBack(err), l)
		return err
	}
	if l.IndexSize, l.IndexDigest, err = a.close(); err != nil {
		return err
	}
	l.Lines, l.Gap, l.ArchiveSize = sealed.lines, sealed.gap, out.size
	if out.size <= packedMost && !s.doubts(l.Key()) {
		return ps.add(ctx, l, out.mem)
	}
	l.ArchiveKey = ps.key()
	if err := s.cfg.Blob.PutNew(ctx, l.ArchiveKey, out.reader(), out.size, [32]byte(out.sum.Sum(nil))); err != nil {
		return err
	}
	if err := s.verify(ctx, l); err != nil {
		s.doubt(err, false, l)
		return errors.Join(err, s.cfg.Blob.Delete(ctx, l.ArchiveKey))
	}
	ps.stored(store.LogObject{Key: l.ArchiveKey, Size: out.size}, l)
	return nil
}

// joined is up to what gap in time neighbouring records become one.
const joined = 100 * time.Millisecond

// rewrite copies a layout into an archive, joining small neighbours. giveUp
// marks bytes as lost that the store does not give back.
func (s *Service) rewrite(ctx context.Context, lay *layout, a *archiver, giveUp bool) (*layout, error) {
	out := newLayout()
	var open record
	var held []byte
	flush := func() error {
		if open.n == 0 {
			return nil
		}
		r, b := open, held
		open.n, held = 0, held[:0]
		out.add(r)
		return a.add(r, b)
	}
	snap := snapshot{layout: lay}
	for _, r := range lay.recs {
		var b []byte
		if r.kind == data {
			var err error
			if b, err = s.load(ctx, snap, r); err != nil {
				if !giveUp || !notBack(err) {
					return nil, err
				}
				s.cfg.Log.ErrorContext(ctx, "log bytes are lost: the object store does not give them back", slog.Any("error", err),
					slog.Int64("bytes", r.n))
				r, b = record{kind: lost, stream: r.stream, n: r.n, at: r.at, firstNL: -1, lastNL: -1}, nil
			}
		}
		if open.n > 0 && open.kind == data && r.kind == data && open.stream == r.stream &&
			r.at-open.at < joined.Microseconds() && open.n+r.n <= frameSize/4 {
			if r.newlines > 0 {
				if open.firstNL < 0 {
					open.firstNL = open.n + r.firstNL
				}
				open.lastNL = open.n + r.lastNL
				open.newlines += r.newlines
			}
			open.n += r.n
			held = append(held, b...)
			continue
		}
		if err := flush(); err != nil {
			return nil, err
		}
		open, held = r, append(held[:0], b...)
	}
	return out, flush()
}

// notBack reports whether the object store does not have what it was given.
func notBack(err error) bool {
	return !passing(err) && (errors.Is(err, ci.ErrNotFound) || errors.Is(err, ci.ErrDigest))
}

// passing reports whether an error says nothing about the log that met it.
func passing(err error) bool {
	return errors.Is(err, ci.ErrUnavailable) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// doubt is what is known about an ended log that could not be sealed.
type doubt struct {
	since time.Duration // on the monotonic clock
	times int           // how often its bytes were not given back
}

// doubt notes that ended logs could not be sealed, if that is for a reason of their
// own, and whether it is because their bytes were not given back.
func (s *Service) doubt(why error, lost bool, logs ...store.Log) {
	if passing(why) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range logs {
		d := s.doubted[l.Key()]
		if lost {
			if d.times == 0 {
				d.since = s.cfg.Monotonic()
			}
			d.times++
		}
		s.doubted[l.Key()] = d
	}
}

// doubts reports whether a log is in doubt: it shares no object with others.
func (s *Service) doubts(k store.AttemptKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.doubted[k]
	return ok
}

// undoubtAllBut forgets the doubts about all but the logs that are not sealed yet.
func (s *Service) undoubtAllBut(logs []store.Log) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.doubted {
		if !slices.ContainsFunc(logs, func(l store.Log) bool { return l.Key() == k }) {
			delete(s.doubted, k)
		}
	}
}

// givesUp reports whether bytes of an ended log that are not given back once more
// are lost.
func (s *Service) givesUp(k store.AttemptKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.doubted[k]
	return d.times >= damagedTries && s.cfg.Monotonic()-d.since > damaged
}

// verify reads an archive back as a reader would: its index, and every frame
// against its digest.
func (s *Service) verify(ctx context.Context, l store.Log) error {
	frames, lay, err := s.loadIndex(ctx, l)
	if err != nil {
		return err
	}
	return s.verifyFrames(l, frames, lay, func(f frame) ([]byte, error) { return s.read(ctx, l.ArchiveKey, l.ArchiveAt+f.at, f.size) })
}

func (s *Service) verifyFrames(l store.Log, frames []frame, lay *layout, read func(frame) ([]byte, error)) error {
	if lay.lines != l.Lines || lay.bytes != l.Bytes && l.Gap == 0 {
		return ci.Errorf(ci.ErrDigest, "log archive %s does not hold what its log holds", l.ArchiveKey)
	}
	for _, f := range frames {
		b, err := read(f)
		if err != nil {
			return err
		}
		if _, err := s.codec.unpack(b, f); err != nil {
			return err
		}
	}
	return nil
}
