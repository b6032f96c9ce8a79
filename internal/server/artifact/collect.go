package artifact

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/server/store"
)

const batch = 200

// Collect ends what nobody may use any more and deletes its bytes: artifacts past
// their retention that no unfinished run holds, sessions whose attempt does not
// own its job any more, uploads and objects that no live row names. It may run
// on several nodes at once and be interrupted anywhere. Ages are told by the
// database's clock, against what the store says of its objects; rows are closed
// before their objects are deleted, so that a late seal finds its session closed.
// What cannot be deleted keeps nothing else, and is tried again the next time.
func (s *Service) Collect(ctx context.Context) error {
	var now int64
	err := s.cfg.Store.Write(ctx, func(tx *store.Tx) (err error) {
		if now, err = tx.Now(ctx); err != nil {
			return err
		}
		_, err = tx.AbandonArtifacts(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(s.expire(ctx), s.purge(ctx), s.uploads(ctx, now), s.objects(ctx, now))
}

func (s *Service) expire(ctx context.Context) error {
	for {
		due := 0
		err := s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
			now, err := tx.Now(ctx)
			if err != nil {
				return err
			}
			due, err = tx.ExpireArtifacts(ctx, now, now+again.Microseconds(), batch)
			return err
		})
		if err != nil || due < batch {
			return err
		}
	}
}

// purge deletes the bytes of closed generations and records it.
func (s *Service) purge(ctx context.Context) error {
	after := ""
	var failed error
	for {
		var rows []store.ArtifactSession
		err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
			rows, err = tx.UnpurgedArtifacts(ctx, after, batch)
			return err
		})
		if err != nil || len(rows) == 0 {
			return errors.Join(failed, err)
		}
		for _, a := range rows {
			after = a.ID
			if err := s.purgeOne(ctx, a); err != nil {
				failed = errors.Join(failed, err)
			}
		}
	}
}

func (s *Service) purgeOne(ctx context.Context, a store.ArtifactSession) error {
	up, err := uploadOf(a)
	if err != nil {
		return err
	}
	// The upload first: a seal that is under way may still make the object
	// visible, and is waited for or loses its parts.
	if err := s.cfg.Blob.Abort(ctx, up); err != nil {
		return err
	}
	if err := s.cfg.Blob.Delete(ctx, a.BlobKey); err != nil {
		return err
	}
	s.cfg.Log.InfoContext(ctx, "artifact deleted", slog.String("artifact", a.ID), slog.Any("job", a.Job), slog.String("state", a.State))
	return s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		return tx.PurgedArtifact(ctx, a.ID, now)
	})
}

// live returns the rows that own keys.
func (s *Service) live(ctx context.Context, keys []string) (rows map[string]store.ArtifactSession, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		rows, err = tx.ArtifactsByKey(ctx, keys)
		return err
	})
	return rows, err
}

// old reports whether something has been in the store for longer than any writer
// takes to write its row.
func old(at time.Time, now int64) bool { return now-at.UnixMicro() > leftover.Microseconds() }

// uploads aborts uploads whose session is closed, and those without a session
// when they are old.
func (s *Service) uploads(ctx context.Context, now int64) error {
	ups, err := s.cfg.Blob.Uploads(ctx, prefix)
	for len(ups) > 0 {
		n := min(batch, len(ups))
		var keys []string
		for _, up := range ups[:n] {
			keys = append(keys, up.Key)
		}
		rows, lookErr := s.live(ctx, keys)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		for _, up := range ups[:n] {
			if a, ok := rows[up.Key]; ok && s.uses(a, up) || !ok && !old(up.Opened, now) {
				continue
			}
			err = errors.Join(err, s.cfg.Blob.Abort(ctx, up))
		}
		ups = ups[n:]
	}
	return err
}

// uses reports whether a session still takes parts by an upload. A sealed one
// does not: what is left of its upload goes when it is old.
func (s *Service) uses(a store.ArtifactSession, up blob.Upload) bool {
	own, err := uploadOf(a)
	return err == nil && own.ID == up.ID && a.State == store.ArtifactOpen
}

// objects deletes objects whose row is closed or that never had one.
func (s *Service) objects(ctx context.Context, now int64) error {
	after := ""
	var failed error
	for {
		infos, err := s.cfg.Blob.List(ctx, prefix, after, batch)
		if err != nil || len(infos) == 0 {
			return errors.Join(failed, err)
		}
		var keys []string
		for _, in := range infos {
			keys = append(keys, in.Key)
			after = in.Key
		}
		rows, err := s.live(ctx, keys)
		if err != nil {
			return errors.Join(failed, err)
		}
		for _, in := range infos {
			a, ok := rows[in.Key]
			closed := ok && (a.State == store.ArtifactAbandoned || a.State == store.ArtifactExpired)
			if !closed && (ok || !old(in.Modified, now)) {
				continue
			}
			failed = errors.Join(failed, s.cfg.Blob.Delete(ctx, in.Key))
		}
	}
}
