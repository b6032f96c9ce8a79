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

	"forgeci/internal/server/store"
)

const (
	collectEvery = 10 * time.Minute
	collectBatch = 500
	// freeAge is how old an object is at least when it goes because nothing refers to
	// it: a log that ends soon after it began keeps its segments for the readers who
	// have just found them. Others look again (walk.next).
	freeAge = 10 * time.Minute
	// roundBatches is how many batches of the round through everything one collection
	// takes: 10,000 objects, and 1.4 million in a day.
	roundBatches = 20
)

func (s *Service) collect(ctx context.Context) {
	for pause(ctx, collectEvery, nil) {
		if err := s.Collect(ctx); err != nil && ctx.Err() == nil {
			s.cfg.Log.WarnContext(ctx, "logs not collected", slog.Any("error", err))
		}
	}
}

// Collect deletes what nothing needs: segments whose extents are released, archives
// of logs past their retention, objects that no row has come to name. It may
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
		s.expire(ctx, now-s.cfg.Retention.Microseconds()),
		s.free(ctx, now-freeAge.Microseconds()),
		s.orphans(ctx, segmentPrefix, &s.searched[0], now-orphanAge.Microseconds()),
		s.orphans(ctx, archivePrefix, &s.searched[1], now-archiveOrphan.Microseconds()),
	)
}

func (s *Service) releaseLeftovers(ctx context.Context) error {
	var keys []store.AttemptKey
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		keys, err = tx.ReleasingLogs(ctx, collectBatch)
		return err
	})
	if err != nil || len(keys) == 0 {
		return err
	}
	return s.release(ctx, keys)
}

// free deletes objects first and their rows then: an interruption leaves
// a row, and the deletion is repeated. What cannot be deleted keeps no other, as
// long as it is less than a batch.
func (s *Service) free(ctx context.Context, beforeUS int64) error {
	tried := map[string]bool{}
	var failed error
	for {
		var keys []string
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			keys, err = tx.FreeLogObjects(ctx, beforeUS, collectBatch)
			return err
		})
		if err != nil {
			return errors.Join(failed, err)
		}
		var gone []string
		for _, k := range keys {
			if tried[k] {
				continue
			}
			if err := s.cfg.Blob.Delete(ctx, k); err != nil {
				tried[k] = true
				failed = errors.Join(failed, err)
				continue
			}
			gone = append(gone, k)
		}
		if len(gone) == 0 {
			return failed
		}
		err = s.cfg.Store.Write(ctx, func(tx *store.Tx) error { return tx.DeleteLogObjects(ctx, gone) })
		if err != nil || len(keys) < collectBatch {
			return errors.Join(failed, err)
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
func (s *Service) orphans(ctx context.Context, prefix string, at *searched, beforeUS int64) error {
	prefix += s.cfg.Incarnation + "/"
	end := fmt.Sprintf("%s%016x", prefix, max(beforeUS, 0))
	s.mu.Lock()
	was := *at
	s.mu.Unlock()
	is := searched{fresh: end}
	var failed error
	if was.fresh != "" {
		_, kept, err := s.deleteOrphans(ctx, prefix, was.fresh, end, math.MaxInt)
		if failed = kept; err != nil {
			return errors.Join(failed, err)
		}
	}
	round, kept, err := s.deleteOrphans(ctx, prefix, was.round, end, roundBatches)
	if failed = errors.Join(failed, kept); err != nil {
		return errors.Join(failed, err)
	}
	is.round = round
	s.mu.Lock()
	*at = is
	s.mu.Unlock()
	return failed
}

// deleteOrphans searches behind a key, up to another, as many batches as allowed,
// and returns where to go on, "" when it has come to the end. What it could not
// delete, and why, is in failed: a later round comes by again.
func (s *Service) deleteOrphans(ctx context.Context, prefix, after, end string, batches int) (next string, failed, err error) {
	for range batches {
		infos, err := s.cfg.Blob.List(ctx, prefix, after, collectBatch)
		if err != nil {
			return "", failed, err
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
			live, err := s.known(ctx, keys)
			if err != nil {
				return "", failed, err
			}
			for _, k := range keys {
				if !live[k] {
					failed = errors.Join(failed, s.cfg.Blob.Delete(ctx, k))
				}
			}
		}
		if !more {
			return "", failed, nil
		}
	}
	return after, failed, nil
}

// isTimed reports whether an object's key says when it was made; what does not is
// never an orphan.
func isTimed(key, prefix string) bool {
	text, _, _ := strings.Cut(strings.TrimPrefix(key, prefix), "-")
	_, err := strconv.ParseInt(text, 16, 64)
	return err == nil && len(text) == 16
}

func (s *Service) known(ctx context.Context, keys []string) (known map[string]bool, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		known, err = tx.KnownLogObjects(ctx, keys)
		return err
	})
	return known, err
}

// expire ends the keeping of old logs: readers are told at once, and what was
// their archives' alone is free.
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
		err := s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
			if logs, err = tx.ExpiredLogs(ctx, collectBatch); err != nil || len(logs) == 0 {
				return err
			}
			return tx.ForgetArchives(ctx, logs)
		})
		if err != nil && len(logs) > 1 && !passing(err) && ctx.Err() == nil {
			// The rows of one of them are not as they should be: it keeps no other waiting.
			err = nil
			for _, l := range logs {
				err = errors.Join(err, s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
					return tx.ForgetArchives(ctx, []store.Log{l})
				}))
			}
		}
		if err != nil || len(logs) < collectBatch {
			return err
		}
	}
}
