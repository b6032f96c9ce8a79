// Package artifact keeps what jobs hand on: it opens an upload session for the
// attempt that owns its job, lets the runner send the bytes straight to the
// object store, verifies and seals them, and gives them to those who may have
// them.
//
// # What is promised
//
// A generation belongs to one attempt and one fresh key, which is never used
// again. It becomes a candidate (sealed) only when the store has verified its
// size and its SHA-256 and the attempt still owns its job, and an input of other
// jobs only by the binding that the completion commits. What a fenced attempt
// uploaded is never a candidate and is collected. What an unfinished run made or
// binds is not deleted.
//
// No object is written or deleted inside a transaction. A row is written before
// its object becomes visible and outlives it, so that every object can be found
// from the database and every object without a live row may go.
package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"strings"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Config says what a Service works with. Zero values of limits mean the defaults.
type Config struct {
	Store *store.Store
	Blob  blob.Store
	Log   *slog.Logger
	// Incarnation of the database; part of every object's key.
	Incarnation string
	// IDs makes identifiers.
	IDs ci.IDSource
	// Retention is how long an artifact is kept whose declaration does not say;
	// 30 days when 0.
	Retention time.Duration
	// MaxSize bounds one artifact, 100 GiB when 0.
	MaxSize int64
	// CollectEvery is the pause between collections, an hour when 0.
	CollectEvery time.Duration
}

const (
	// prefix of every object and upload.
	prefix = "artifacts/"
	// urlLife is how long a signed URL works (ID-6: at most 10 minutes).
	urlLife = blob.MaxURLLife
	// leftover is the age at which an upload or object without a row is deleted;
	// a row is written within seconds of its upload.
	leftover = 12 * time.Hour
	// again is when what an unfinished run holds is looked at again.
	again = time.Hour
)

// sealLimit is how long the store may take to put together and verify an upload
// of the size: a slow disk copies 8 MiB a second.
func sealLimit(size int64) time.Duration {
	return 10*time.Minute + time.Duration(size>>23)*time.Second
}

// Service is the artifact service of one node. New starts nothing; Run does. All
// methods are safe for concurrent use. A call for a runner takes the lease that
// the guard accepted and checks it again in the transaction that commits.
type Service struct {
	cfg Config
}

// New returns a service that does not run yet.
func New(cfg Config) *Service {
	if cfg.Retention == 0 {
		cfg.Retention = 30 * 24 * time.Hour
	}
	if cfg.MaxSize == 0 {
		cfg.MaxSize = 100 << 30
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
			s.cfg.Log.WarnContext(ctx, "artifacts not collected", slog.Any("error", err))
		}
	}
}

// parseDigest reads "sha256:hex".
func parseDigest(text string) (sum [sha256.Size]byte, err error) {
	digits, ok := strings.CutPrefix(text, "sha256:")
	if !ok || len(digits) != 2*sha256.Size || strings.ToLower(digits) != digits {
		return sum, ci.Errorf(ci.ErrInvalid, "digest %q: write it like sha256:<64 hex digits>", text)
	}
	if _, err := hex.Decode(sum[:], []byte(digits)); err != nil {
		return sum, ci.Errorf(ci.ErrInvalid, "digest %q: write it like sha256:<64 hex digits>", text)
	}
	return sum, nil
}

func uploadOf(a store.ArtifactSession) (up blob.Upload, err error) {
	err = json.Unmarshal([]byte(a.Upload), &up)
	return up, err
}

// gone is what reading an artifact answers whose time is over.
func gone(a store.Artifact) error {
	return ci.Errorf(ci.ErrGone, "artifact %q expired at %s", a.Name, time.UnixMicro(a.ExpiresUS).UTC().Format(time.RFC3339))
}

func missing(id string) error { return ci.Errorf(ci.ErrNotFound, "no artifact %s", id) }
