package logs

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

// view is one node's picture of one attempt's log, shared by all its readers.
type view struct {
	key store.AttemptKey
	org ci.OrgID

	mu sync.Mutex // one refresh at a time
	// guarded by mu
	log     store.Log
	found   bool
	lay     *layout // of extents while the log is not sealed, else of its archive
	frames  []frame
	archive string        // whose index lay is
	at      time.Duration // on the monotonic clock

	now snapshot // guarded by hint

	hint    sync.Mutex
	dirty   bool          // guarded by hint: something was stored since the last refresh
	changed chan struct{} // guarded by hint: closed at the next touch
	used    time.Duration // guarded by Service.mu
	readers int           // guarded by Service.mu
}

// snapshot is a view at one moment. It is not changed any more.
type snapshot struct {
	*layout
	log     store.Log
	found   bool
	frames  []frame
	changed <-chan struct{}
}

func (s snapshot) sealed() bool { return s.log.State == store.LogSealed }

// Bounds of what is kept of logs nobody reads.
const (
	keptViews   = 64
	keptRecords = 200_000
	extentPage  = 5000
)

// open returns the view of an attempt's log for reading; the caller calls done.
func (s *Service) open(org ci.OrgID, k store.AttemptKey) (v *view, done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v = s.views[k]
	if v == nil || v.org != org {
		v = &view{key: k, org: org, lay: newLayout(), changed: make(chan struct{})}
		s.trim()
		s.views[k] = v
	}
	v.readers++
	v.used = s.cfg.Monotonic()
	return v, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		v.readers--
	})
}

// trim drops the views that have not been read for longest; the caller holds mu.
func (s *Service) trim() {
	for {
		records := 0
		var oldest *view
		for _, v := range s.views {
			v.hint.Lock()
			if v.now.layout != nil {
				records += len(v.now.recs)
			}
			v.hint.Unlock()
			if v.readers == 0 && (oldest == nil || v.used < oldest.used) {
				oldest = v
			}
		}
		if oldest == nil || len(s.views) < keptViews && records < keptRecords {
			return
		}
		delete(s.views, oldest.key)
	}
}

// touch tells the readers of logs that something has changed.
func (s *Service) touch(ks ...store.AttemptKey) {
	for _, k := range ks {
		s.mu.Lock()
		v := s.views[k]
		s.mu.Unlock()
		if v == nil {
			continue
		}
		v.hint.Lock()
		v.dirty = true
		close(v.changed)
		v.changed = make(chan struct{})
		v.hint.Unlock()
	}
}

// look returns the log as the database has it, or as it had it at most maxAge
// ago if nothing has been stored through this node since.
func (s *Service) look(ctx context.Context, v *view, maxAge time.Duration) (snapshot, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.hint.Lock()
	fresh := !v.dirty && v.now.layout != nil && maxAge > 0 && s.cfg.Monotonic()-v.at < maxAge
	snap := v.now
	snap.changed = v.changed
	v.dirty = false
	v.hint.Unlock()
	if fresh {
		return snap, nil
	}
	at := s.cfg.Monotonic()
	changed := snap.changed
	if err := s.refresh(ctx, v); err != nil {
		v.hint.Lock()
		v.dirty = true
		v.hint.Unlock()
		return snapshot{}, err
	}
	v.at = at
	snap = snapshot{layout: v.lay.snap(), log: v.log, found: v.found, frames: v.frames}
	v.hint.Lock()
	v.now = snap
	v.hint.Unlock()
	snap.changed = changed
	return snap, nil
}

// refresh brings the view up to date; the caller holds v.mu.
func (s *Service) refresh(ctx context.Context, v *view) error {
	for {
		var l store.Log
		var found, sealed bool
		var es []store.LogExtent
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			if l, found, err = tx.Log(ctx, v.org, v.key); err != nil || !found {
				return err
			}
			if l.State == store.LogOpen && l.NextSeq > v.lay.nextSeq || l.State == store.LogEnded {
				es, err = tx.LogExtents(ctx, v.key, v.lay.nextSeq, extentPage)
			}
			if err != nil || l.State != store.LogEnded {
				return err
			}
			// What is not there is a gap only if the extents were not released meanwhile.
			after, _, err := tx.Log(ctx, v.org, v.key)
			sealed = after.State != l.State
			return err
		})
		if err != nil || !found {
			return err
		}
		if sealed {
			continue
		}
		switch {
		case l.State == store.LogSealed && v.archive != l.ArchiveKey || l.State == store.LogSealed && v.log.State != l.State:
			frames, lay, err := s.loadIndex(ctx, l)
			if err != nil {
				return err
			}
			v.frames, v.lay, v.archive = frames, lay, l.ArchiveKey
		case l.State == store.LogOpen || l.State == store.LogEnded && v.log.State != l.State:
			ended := l.State == store.LogEnded
			v.lay.extend(es, ended)
			if len(es) == extentPage {
				continue // v.log stays: the end is not reached
			}
			if ended {
				v.lay.finish(l.Finals)
			}
		}
		v.log, v.found = l, true
		return nil
	}
}

// loadIndex reads and verifies the index of a sealed log.
func (s *Service) loadIndex(ctx context.Context, l store.Log) ([]frame, *layout, error) {
	if l.ArchiveKey == "" {
		return nil, newLayout(), nil
	}
	if l.IndexSize > maxIndex || l.IndexSize > l.ArchiveSize {
		return nil, nil, ci.Errorf(ci.ErrDigest, "the index of a log archive is out of bounds")
	}
	b, err := s.read(ctx, l.ArchiveKey, l.ArchiveAt+l.ArchiveSize-l.IndexSize, l.IndexSize)
	if err != nil {
		return nil, nil, err
	}
	return s.readIndex(l, b)
}

// readIndex decodes the index of a log's archive, if it has the digest that it was
// recorded with.
func (s *Service) readIndex(l store.Log, b []byte) ([]frame, *layout, error) {
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != l.IndexDigest {
		return nil, nil, ci.Errorf(ci.ErrDigest, "the index of log archive %s does not have its digest", l.ArchiveKey)
	}
	return s.codec.readIndex(b)
}

// loadExtent reads and verifies the bytes of an extent.
func (s *Service) loadExtent(ctx context.Context, e store.LogExtent) ([]byte, error) {
	return s.loadRange(ctx, e.Segment, e.SegmentAt, e.Length, e.Digest)
}

func (s *Service) loadRange(ctx context.Context, segment string, at, n int64, digest string) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if b, ok := s.cache.get(segment); ok && at+n <= int64(len(b)) {
		return b[at : at+n : at+n], nil
	}
	key := segment + "@" + digest
	if b, ok := s.cache.get(key); ok {
		return b, nil
	}
	b, err := s.read(ctx, segment, at, n)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(b); base64.RawStdEncoding.EncodeToString(sum[:]) != digest {
		return nil, ci.Errorf(ci.ErrDigest, "a piece of log segment %s does not have its digest", segment)
	}
	s.cache.put(key, b)
	return b, nil
}

// load returns the bytes of a data record; they must not be changed.
func (s *Service) load(ctx context.Context, snap snapshot, r record) ([]byte, error) {
	if r.segment != "" {
		return s.loadRange(ctx, r.segment, r.place, r.n, r.digest)
	}
	f := snap.frames[r.frame]
	key := snap.log.ArchiveKey + "#" + hex.EncodeToString(f.sum[:8])
	b, ok := s.cache.get(key)
	if !ok {
		packed, err := s.read(ctx, snap.log.ArchiveKey, snap.log.ArchiveAt+f.at, f.size)
		if err != nil {
			return nil, err
		}
		if b, err = s.codec.unpack(packed, f); err != nil {
			return nil, err
		}
		s.cache.put(key, b)
	}
	return b[r.place : r.place+r.n : r.place+r.n], nil
}

// target is the log that a query means.
type target struct {
	key  store.AttemptKey
	sel  selection
	none bool // the job has no attempt yet
}

// find resolves a query for a viewer: ErrNotFound for what the viewer may not
// see, too.
func (s *Service) find(ctx context.Context, v auth.Viewer, q Query) (target, error) {
	t := target{key: store.AttemptKey{Job: q.Job, Epoch: q.Epoch}, sel: selection{q.Step, q.Stream}}
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) error {
		j, ok, err := tx.Job(ctx, q.Job)
		switch {
		case err != nil:
			return err
		case !ok || v.Org == "" || j.Org != v.Org:
			return ci.Errorf(ci.ErrNotFound, "no job %s", q.Job)
		case q.Epoch < 0 || q.Epoch > j.Epoch:
			return ci.Errorf(ci.ErrNotFound, "job %s has no attempt %d", q.Job, q.Epoch)
		case q.Epoch == 0:
			t.key.Epoch = j.Epoch
		}
		t.none = t.key.Epoch == 0
		return nil
	})
	return t, err
}

// expired is what reading a log answers whose bytes have been deleted.
func expired(l store.Log) error {
	return ci.Errorf(ci.ErrGone, "the log of this attempt has expired")
}

// moved reports whether a piece of a log was not where the snapshot says: it was
// sealed, or deleted, meanwhile, and another look tells.
func moved(err error) bool { return errors.Is(err, ci.ErrNotFound) }
