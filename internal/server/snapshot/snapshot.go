// Package snapshot keeps the immutable source that runs are made of: published
// once per content inside a tenant, found by the digest of its manifest, and
// collected when no run has come to name it.
//
// # What is promised
//
// A snapshot that was found or published is there for Keep from then on, so that a
// run can be made of it, and for good once a run names it. Making a run shares the
// snapshot's row (store.ShareSources): it is made of a snapshot that stays, or it
// is told that there is none and has to be published again. An object has a fresh
// key, which is never used again; its row is written after it and goes before it,
// so that a row always has its object, and every object without a row may go.
package snapshot

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Config says what a Service works with.
type Config struct {
	Store *store.Store
	Blob  blob.Store
	Log   *slog.Logger
	// Incarnation of the database; part of every object's key.
	Incarnation string
	// IDs makes identifiers.
	IDs ci.IDSource
	// Keep is how long a snapshot without a run is kept since it was last asked for,
	// a day when 0.
	Keep time.Duration
	// CollectEvery is the pause between collections, an hour when 0.
	CollectEvery time.Duration
}

const (
	// prefix of every object.
	prefix = "sources/"
	// usedEvery is how exactly it is known when a snapshot was last asked for, as a
	// part of Keep: asking for one that is in use writes nothing.
	usedEvery = 24
	// leftover is the age at which an object without a row is deleted, from when its
	// publication began. publishWithin is how long that may take: whoever was
	// suspended for longer finds its row refused, not its object missing.
	leftover      = 24 * time.Hour
	publishWithin = 6 * time.Hour
	batch         = 500
	// roundBatches bounds how many batches of objects one collection looks at; the
	// next one goes on from there.
	roundBatches = 20
)

// Service is the snapshot service of one node. New starts nothing; Run does. All
// methods are safe for concurrent use.
type Service struct {
	cfg Config

	mu    sync.Mutex
	round string // where the round through all objects goes on; guarded by mu
}

// New returns a service that does not run yet.
func New(cfg Config) *Service {
	if cfg.Keep == 0 {
		cfg.Keep = 24 * time.Hour
	}
	if cfg.CollectEvery == 0 {
		cfg.CollectEvery = time.Hour
	}
	if cfg.Incarnation == "" {
		cfg.Incarnation = "0"
	}
	return &Service{cfg: cfg}
}

// Run collects until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	t := time.NewTicker(s.cfg.CollectEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := s.Collect(ctx); err != nil && ctx.Err() == nil {
			s.cfg.Log.WarnContext(ctx, "snapshots not collected", slog.Any("error", err))
		}
	}
}

func missing(digest string) error {
	if len(digest) > 80 {
		digest = strings.ToValidUTF8(digest[:80], "") + "…"
	}
	return ci.Errorf(ci.ErrNotFound, "no source %s: upload the snapshot first", digest)
}

// Get returns the organisation's snapshot with the manifest digest; ErrNotFound
// when there is none. It may be collected at once.
func (s *Service) Get(ctx context.Context, org ci.OrgID, digest string) (store.Source, error) {
	src, _, err := s.get(ctx, org, digest)
	return src, err
}

func (s *Service) get(ctx context.Context, org ci.OrgID, digest string) (src store.Source, now int64, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) error {
		var found bool
		if src, found, err = tx.Source(ctx, org, digest); err != nil {
			return err
		}
		if !found {
			return missing(digest)
		}
		now, err = tx.Now(ctx)
		return err
	})
	return src, now, err
}

// Find is Get, and keeps the snapshot for Keep from now on.
func (s *Service) Find(ctx context.Context, org ci.OrgID, digest string) (store.Source, error) {
	src, now, err := s.get(ctx, org, digest)
	if err != nil {
		return src, err
	}
	found := true
	if now-src.UsedUS >= (s.cfg.Keep / usedEvery).Microseconds() {
		err = s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
			if now, err = tx.Now(ctx); err != nil {
				return err
			}
			found, err = tx.UseSource(ctx, org, digest, now)
			return err
		})
	}
	if err == nil && !found {
		err = missing(digest)
	}
	return src, err
}

// Publish stores a snapshot whose manifest and sum the caller has verified, and
// returns what the organisation has under its digest now: the snapshot that was
// there first, if there was one. src says everything but the key.
func (s *Service) Publish(ctx context.Context, org ci.OrgID, src store.Source, body io.Reader, sum [32]byte) (store.Source, error) {
	began, err := s.now(ctx)
	if err != nil {
		return src, err
	}
	key, err := s.newKey(org, src.Digest, began)
	if err != nil {
		return src, err
	}
	if err := s.cfg.Blob.PutNew(ctx, key, body, src.Size, sum); err != nil {
		return src, err
	}
	src.BlobKey = key
	var now store.Source
	err = s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
		now, err = publish(ctx, tx, org, src, began)
		return err
	})
	if err != nil || now.BlobKey == key {
		return now, err
	}
	// Somebody else was first. What fails here is found by the collection.
	if err := s.cfg.Blob.Delete(ctx, key); err != nil {
		s.cfg.Log.WarnContext(ctx, "a snapshot that came twice is deleted later", slog.String("key", key), slog.Any("error", err))
	}
	return now, nil
}

func publish(ctx context.Context, tx *store.Tx, org ci.OrgID, src store.Source, began int64) (store.Source, error) {
	now, err := tx.Now(ctx)
	if err != nil {
		return src, err
	}
	if now-began > publishWithin.Microseconds() {
		return src, ci.Errorf(ci.ErrUnavailable, "storing the snapshot took longer than %s: upload it again", publishWithin)
	}
	there, err := tx.UseSource(ctx, org, src.Digest, now)
	if err != nil {
		return src, err
	}
	if !there {
		if err := tx.InsertSource(ctx, org, src, now); err != nil {
			return src, err
		}
	}
	out, ok, err := tx.Source(ctx, org, src.Digest)
	if err == nil && !ok {
		err = store.ErrSerialization // another's, which was collected in between
	}
	return out, err
}

func (s *Service) now(ctx context.Context) (now int64, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		now, err = tx.Now(ctx)
		return err
	})
	return now, err
}

// newKey makes the key of an object, which says what its row is and when its
// publication began.
func (s *Service) newKey(org ci.OrgID, digest string, began int64) (string, error) {
	digits, ok := strings.CutPrefix(digest, "sha256:")
	if sum, err := hex.DecodeString(digits); !ok || err != nil || len(sum) != 32 {
		return "", fmt.Errorf("snapshot: %q is no digest", digest)
	}
	return fmt.Sprintf("%s%s/%s/%s-%016x-%s", prefix, s.cfg.Incarnation, org, digits, began, s.cfg.IDs.New(ci.PrefixObject)), nil
}

// readKey is the opposite of newKey; what has another form is no object of ours.
func readKey(key string) (row store.SourceKey, began int64, ok bool) {
	p := strings.Split(key, "/")
	if len(p) != 4 {
		return row, 0, false
	}
	q := strings.Split(p[3], "-")
	if len(q) != 3 || len(q[0]) != 64 {
		return row, 0, false
	}
	began, err := strconv.ParseInt(q[1], 16, 64)
	return store.SourceKey{Org: ci.OrgID(p[2]), Digest: "sha256:" + q[0]}, began, err == nil
}

// Collect deletes snapshots that no run names and nobody has asked for within
// Keep, and objects that no row names. It may run on several nodes at once and be
// interrupted anywhere. It goes by the database's clock alone.
func (s *Service) Collect(ctx context.Context) error {
	now, err := s.now(ctx)
	if err != nil {
		return err
	}
	return errors.Join(s.unused(ctx, now-s.cfg.Keep.Microseconds()), s.orphans(ctx, now-leftover.Microseconds()))
}

func (s *Service) unused(ctx context.Context, beforeUS int64) error {
	var failed error
	for {
		var deleted []store.SourceObject
		var n int
		err := s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
			deleted, n, err = tx.CollectSources(ctx, beforeUS, batch)
			return err
		})
		if err != nil {
			return errors.Join(failed, err)
		}
		for _, d := range deleted {
			if err := s.cfg.Blob.Delete(ctx, d.BlobKey); err != nil {
				failed = errors.Join(failed, err) // the object is an orphan now
				continue
			}
			s.cfg.Log.InfoContext(ctx, "snapshot deleted: no run names it", slog.String("source", d.Digest))
		}
		if n < batch {
			return failed
		}
	}
}

func (s *Service) orphans(ctx context.Context, beforeUS int64) error {
	s.mu.Lock()
	after := s.round
	s.mu.Unlock()
	var failed error
	for range roundBatches {
		infos, err := s.cfg.Blob.List(ctx, prefix, after, batch)
		if err != nil {
			return errors.Join(failed, err)
		}
		kept, err := s.deleteOrphans(ctx, infos, beforeUS)
		if failed = errors.Join(failed, kept); err != nil {
			return errors.Join(failed, err)
		}
		if len(infos) < batch {
			after = ""
			break
		}
		after = infos[len(infos)-1].Key
	}
	s.mu.Lock()
	s.round = after
	s.mu.Unlock()
	return failed
}

// deleteOrphans deletes those of the objects that no row names. What it could not
// delete, and why, is in failed: the next round comes by again.
func (s *Service) deleteOrphans(ctx context.Context, infos []blob.Info, beforeUS int64) (failed, err error) {
	rows := map[string]store.SourceKey{}
	for _, in := range infos {
		if row, began, ok := readKey(in.Key); ok && began < beforeUS {
			rows[in.Key] = row
		}
	}
	if len(rows) == 0 {
		return nil, nil
	}
	ks := make([]store.SourceKey, 0, len(rows))
	for _, k := range rows {
		ks = append(ks, k)
	}
	var owned map[store.SourceKey]string
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		owned, err = tx.SourceObjects(ctx, ks)
		return err
	})
	if err != nil {
		return nil, err
	}
	for key, row := range rows {
		if owned[row] != key {
			failed = errors.Join(failed, s.cfg.Blob.Delete(ctx, key))
		}
	}
	return failed, nil
}
