package logs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

const (
	collectEvery = 10 * time.Minute
	collectBatch = 500
	// freeAge is how long a segment stays behind its last reference, for readers
	// whose picture of the log is older.
	freeAge = 10 * time.Minute
	// roundBatches is how many batches of the round through everything one collection
	// takes: 10,000 objects, and 1.4 million in a day.
	roundBatches = 20
)

func (s *Service) collect(ctx context.Context) {
	for pause(ctx, collectEvery, nil) {
		if err := s.Collect(ctx); err != nil && ctx.Err() == nil {
			s.cfg.Log.Warn("logs not collected", slog.Any("error", err))
		}
	}
}

// Collect deletes what nothing needs: segments whose extents are released,
// objects that no row has come to name, and logs past their retention. It may
// run on several nodes at once and be interrupted anywhere; it goes by the
// database's clock alone.
func (s *Service) Collect(ctx context.Context) error {
	var now int64
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		now, err = tx.Now(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(
		s.releaseLeftovers(ctx),
		s.freeSegments(ctx, now-freeAge.Microseconds()),
		s.orphans(ctx, segmentPrefix, &s.searched[0], now-orphanAge.Microseconds(), s.segmentsKnown),
		s.orphans(ctx, archivePrefix, &s.searched[1], now-archiveOrphan.Microseconds(), s.archivesKnown),
		s.expire(ctx, now-s.cfg.Retention.Microseconds()),
	)
}

func (s *Service) releaseLeftovers(ctx context.Context) error {
	var keys []store.AttemptKey
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		keys, err = tx.UnreleasedLogs(ctx, collectBatch)
		return err
	})
	if err != nil || len(keys) == 0 {
		return err
	}
	return s.release(ctx, keys)
}

// freeSegments deletes objects first and their rows then: an interruption leaves
// a row, and the deletion is repeated.
func (s *Service) freeSegments(ctx context.Context, beforeUS int64) error {
	for {
		var keys []string
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			keys, err = tx.FreeSegments(ctx, beforeUS, collectBatch)
			return err
		})
		if err != nil || len(keys) == 0 {
			return err
		}
		for _, k := range keys {
			if err := s.cfg.Blob.Delete(ctx, k); err != nil {
				return err
			}
		}
		err = s.cfg.Store.Write(ctx, func(tx *store.Tx) error { return tx.DeleteSegments(ctx, keys) })
		if err != nil || len(keys) < collectBatch {
			return err
		}
	}
}

// orphans deletes objects under a prefix that are older than any writer that
// could still name them, and that no row names. Keys carry the time at which
// they were made and sort by it, so what has come of age since the last time is
// what is searched at once. That misses what is named for a time that has been
// searched already, because the database's clock was wrong or this process not
// there: it is found by a round through everything, a part each time, that rests
// on no clock but the one that tells ages.
func (s *Service) orphans(ctx context.Context, prefix string, at *searched, beforeUS int64,
	known func(context.Context, []string) (map[string]bool, error),
) error {
	prefix += s.cfg.Incarnation + "/"
	end := fmt.Sprintf("%s%016x", prefix, max(beforeUS, 0))
	s.mu.Lock()
	was := *at
	s.mu.Unlock()
	is := searched{fresh: end}
	if was.fresh != "" {
		if _, err := s.deleteOrphans(ctx, prefix, was.fresh, end, math.MaxInt, known); err != nil {
			return err
		}
	}
	var err error
	if is.round, err = s.deleteOrphans(ctx, prefix, was.round, end, roundBatches, known); err != nil {
		return err
	}
	s.mu.Lock()
	*at = is
	s.mu.Unlock()
	return nil
}

// deleteOrphans searches behind a key, up to another, as many batches as allowed,
// and returns where to go on, "" when it has come to the end.
func (s *Service) deleteOrphans(ctx context.Context, prefix, after, end string, batches int,
	known func(context.Context, []string) (map[string]bool, error),
) (string, error) {
	for range batches {
		infos, err := s.cfg.Blob.List(ctx, prefix, after, collectBatch)
		if err != nil {
			return "", err
		}
		more := len(infos) == collectBatch
		var keys []string
		for _, in := range infos {
			if after = in.Key; after >= end {
				more = false
				break
			}
			if isTimed(in.Key, prefix) {
				keys = append(keys, in.Key)
			}
		}
		if len(keys) > 0 {
			live, err := known(ctx, keys)
			if err != nil {
				return "", err
			}
			for _, k := range keys {
				if live[k] {
					continue
				}
				if err := s.cfg.Blob.Delete(ctx, k); err != nil {
					return "", err
				}
			}
		}
		if !more {
			return "", nil
		}
	}
	return after, nil
}

// isTimed reports whether an object's key says when it was made; what does not is
// never an orphan.
func isTimed(key, prefix string) bool {
	text, _, _ := strings.Cut(strings.TrimPrefix(key, prefix), "-")
	_, err := strconv.ParseInt(text, 16, 64)
	return err == nil && len(text) == 16
}

func (s *Service) segmentsKnown(ctx context.Context, keys []string) (known map[string]bool, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		known, err = tx.KnownSegments(ctx, keys)
		return err
	})
	return known, err
}

// archivesKnown asks the logs that the archives' keys name.
func (s *Service) archivesKnown(ctx context.Context, keys []string) (known map[string]bool, err error) {
	var attempts []store.AttemptKey
	for _, k := range keys {
		p := strings.Split(k[strings.LastIndexByte(k, '/')+1:], "-")
		if len(p) != 4 {
			continue
		}
		if epoch, err := strconv.ParseInt(p[2], 10, 64); err == nil {
			attempts = append(attempts, store.AttemptKey{Job: ci.JobID(p[1]), Epoch: epoch})
		}
	}
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		known, err = tx.KnownArchives(ctx, attempts)
		return err
	})
	return known, err
}

// expire ends the keeping of old logs: first in the database, so that readers
// are told, then in the store.
func (s *Service) expire(ctx context.Context, beforeUS int64) error {
	for {
		var marked int64
		err := s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
			marked, err = tx.ExpireLogs(ctx, beforeUS, collectBatch)
			return err
		})
		if err != nil {
			return err
		}
		if marked < collectBatch {
			break
		}
	}
	for {
		var logs []store.Log
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			logs, err = tx.ExpiredLogs(ctx, collectBatch)
			return err
		})
		if err != nil || len(logs) == 0 {
			return err
		}
		for _, l := range logs {
			if err := s.cfg.Blob.Delete(ctx, l.ArchiveKey); err != nil {
				return err
			}
		}
		err = s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
			for _, l := range logs {
				if err := tx.ForgetArchive(ctx, l.Key()); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
}
