package artifact

import (
	"context"
	"io"
	"slices"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Download returns a URL from which the holder of a lease reads an artifact that
// its job restores: one that is bound in the job's run to the job and under the
// name that the spec says, also by the run that this one retries. Any other is
// ErrNotFound, one that has expired ErrGone. A trusted run does not get what an
// untrusted one made (ErrForbidden). The consumer verifies the bytes against the
// digest in its ticket.
func (s *Service) Download(ctx context.Context, held engine.Held, id string) (protocol.SignedURL, error) {
	ref := held.Ref()
	var found store.Artifact
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) error {
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		current, err := s.current(ctx, tx, ref, now)
		if err != nil {
			return err
		}
		if !current {
			why, err := tx.WhyRefused(ctx, ref, now)
			if err != nil {
				return err
			}
			return ci.Rejected(why)
		}
		found, err = s.restorable(ctx, tx, held, id)
		return err
	})
	if err != nil {
		return protocol.SignedURL{}, err
	}
	signed, err := s.cfg.Blob.GetURL(ctx, found.BlobKey, urlLife)
	return protocol.SignedURL(signed), err
}

func (s *Service) restorable(ctx context.Context, tx *store.Tx, held engine.Held, id string) (store.Artifact, error) {
	ref := held.Ref()
	a, ok, err := tx.ArtifactSession(ctx, held.Org(), id)
	if err != nil || !ok {
		return a.Artifact, nonil(err, missing(id))
	}
	spec, err := specOf(ctx, tx, ref.Job)
	if err != nil {
		return a.Artifact, err
	}
	run, _, err := tx.Run(ctx, ref.Run)
	if err != nil {
		return a.Artifact, err
	}
	jobs, err := tx.JobsOfRun(ctx, ref.Run)
	if err != nil {
		return a.Artifact, err
	}
	bindings, err := tx.BindingsOfRun(ctx, ref.Run)
	if err != nil {
		return a.Artifact, err
	}
	for _, b := range bindings {
		if b.Artifact.ID != id {
			continue
		}
		i := slices.IndexFunc(jobs, func(j store.Job) bool { return j.ID == b.Job })
		if i < 0 || !slices.ContainsFunc(spec.Restore, func(r ci.ArtifactRestore) bool {
			return r.Name == b.Name && (r.FromJob == jobs[i].Key || r.FromJob == jobs[i].Name)
		}) {
			continue
		}
		switch {
		case run.Trust == ci.TrustTrusted && a.Trust != ci.TrustTrusted:
			return a.Artifact, ci.Errorf(ci.ErrForbidden, "artifact %q was made by an untrusted run", a.Name)
		case a.State == store.ArtifactExpired:
			return a.Artifact, gone(a.Artifact)
		case a.State != store.ArtifactSealed:
			return a.Artifact, missing(id)
		}
		return a.Artifact, nil
	}
	return a.Artifact, missing(id)
}

func nonil(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// Stat describes a sealed or expired artifact to a person of its organisation;
// anything else is ErrNotFound.
func (s *Service) Stat(ctx context.Context, v auth.Viewer, id string) (protocol.Artifact, error) {
	a, now, err := s.seen(ctx, v, id)
	if err != nil {
		return protocol.Artifact{}, err
	}
	return document(a, now), nil
}

// OfRun lists what a run made, also what no job may restore, and what it has
// bound of the run that it retries.
func (s *Service) OfRun(ctx context.Context, v auth.Viewer, run ci.RunID) ([]protocol.Artifact, error) {
	out := []protocol.Artifact{}
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) error {
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		rows, err := tx.SeenArtifacts(ctx, v.Org, run)
		for _, a := range rows {
			out = append(out, document(a, now))
		}
		return err
	})
	return out, err
}

// Content returns a URL from which a person of the organisation reads an
// artifact's archive. An expired one is ErrGone and says since when.
func (s *Service) Content(ctx context.Context, v auth.Viewer, id string) (blob.SignedRequest, error) {
	a, err := s.readable(ctx, v, id)
	if err != nil {
		return blob.SignedRequest{}, err
	}
	return s.cfg.Blob.GetURL(ctx, a.BlobKey, urlLife)
}

// Open is Content for a caller inside the server. The caller closes it.
func (s *Service) Open(ctx context.Context, v auth.Viewer, id string) (io.ReadCloser, error) {
	a, err := s.readable(ctx, v, id)
	if err != nil {
		return nil, err
	}
	return s.cfg.Blob.Open(ctx, a.BlobKey, 0, -1)
}

func (s *Service) readable(ctx context.Context, v auth.Viewer, id string) (store.ArtifactSeen, error) {
	a, now, err := s.seen(ctx, v, id)
	if err == nil && over(a.Artifact, now) {
		err = gone(a.Artifact)
	}
	return a, err
}

func (s *Service) seen(ctx context.Context, v auth.Viewer, id string) (a store.ArtifactSeen, now int64, err error) {
	if v.Org == "" || !ci.HasPrefix(id, ci.PrefixArtifact) {
		return a, 0, missing(id)
	}
	var ok bool
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		if now, err = tx.Now(ctx); err != nil {
			return err
		}
		a, ok, err = tx.SeenArtifact(ctx, v.Org, id)
		return err
	})
	if err == nil && !ok {
		err = missing(id)
	}
	return a, now, err
}

// over reports whether people do not get an artifact any more: its time is over,
// whether or not it has been collected. Runs that hold it still get it.
func over(a store.Artifact, now int64) bool {
	return a.State == store.ArtifactExpired || a.ExpiresUS <= now
}

func document(a store.ArtifactSeen, now int64) protocol.Artifact {
	expires := time.UnixMicro(a.ExpiresUS).UTC()
	return protocol.Artifact{
		ID: a.ID, Run: a.Run, Job: a.Job, JobName: a.JobName, Epoch: a.Epoch, Name: a.Name, Size: a.Size,
		Digest: a.Digest, Files: int(a.Files), Bytes: a.Bytes, Bound: a.Bound > 0, CreatedAt: time.UnixMicro(a.CreatedUS).UTC(),
		ExpiresAt: &expires, Expired: over(a.Artifact, now),
	}
}
