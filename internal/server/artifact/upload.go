package artifact

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strconv"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Begin opens an upload session under a fresh key for an artifact that the job
// declares. The same request ID with the same body (bodyDigest) gets the same
// session, with the parts that the store holds; with another body it is
// ErrConflict, as is a name that the attempt has used already. A lease that is
// not current or is being cancelled is refused and no session is left.
func (s *Service) Begin(ctx context.Context, held engine.Held, in protocol.NewArtifact, bodyDigest string) (protocol.ArtifactSession, error) {
	none := protocol.ArtifactSession{}
	sum, err := parseDigest(in.Digest)
	switch {
	case err != nil:
		return none, err
	case in.RequestID == "" || len(in.RequestID) > 128:
		return none, ci.Errorf(ci.ErrInvalid, "an upload session needs a request ID of at most 128 bytes")
	case in.Size < 1 || in.Files < 1 || in.Bytes < 0:
		return none, ci.Errorf(ci.ErrInvalid, "artifact %q is empty: nothing is kept of an artifact without files", in.Name)
	case in.Size > s.cfg.MaxSize:
		return none, ci.Errorf(ci.ErrTooLarge, "artifact %q has %d bytes; the limit is %d", in.Name, in.Size, s.cfg.MaxSize)
	}
	ref := held.Ref()
	k := store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch}
	var known store.ArtifactSession
	var found bool
	var run store.Run
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		if _, err = s.declared(ctx, tx, ref.Job, in.Name); err != nil {
			return err
		}
		if run, _, err = tx.Run(ctx, ref.Run); err != nil {
			return err
		}
		known, found, err = taken(ctx, tx, k, in, bodyDigest)
		return err
	})
	if err != nil {
		return none, err
	}
	if found {
		return s.session(ctx, known)
	}
	id := s.cfg.IDs.New(ci.PrefixArtifact)
	key := prefix + string(held.Org()) + "/" + s.cfg.Incarnation + "/" + id
	up, err := s.cfg.Blob.NewUpload(ctx, key, in.Size, sum)
	if err != nil {
		return none, err
	}
	text, err := json.Marshal(up)
	if err != nil {
		return none, err
	}
	fresh := store.ArtifactSession{
		RequestID: in.RequestID, RequestDigest: bodyDigest, Upload: string(text), PartSize: blob.PartSize(in.Size),
		Trust: run.Trust, Artifact: store.Artifact{
			ID: id, Org: held.Org(), Run: ref.Run, Job: ref.Job, Epoch: ref.Epoch, Name: in.Name,
			BlobKey: key, Size: in.Size, Digest: in.Digest, Files: int64(in.Files), Bytes: in.Bytes,
		},
	}
	inserted := false
	err = s.fenced(ctx, ref, func(tx *store.Tx, now int64) (bool, error) {
		inserted, err = tx.InsertArtifact(ctx, ref, fresh, now)
		if inserted || err != nil {
			return inserted, err
		}
		known, found, err = taken(ctx, tx, k, in, bodyDigest)
		return found, err
	})
	if err == nil && inserted {
		return protocol.ArtifactSession{ID: id, PartSize: fresh.PartSize}, nil
	}
	// Unless the commit's outcome is unknown nothing names this upload.
	if ci.KindOf(err) != ci.ErrUnavailable {
		if err := s.cfg.Blob.Abort(ctx, up); err != nil {
			s.cfg.Log.DebugContext(ctx, "upload not aborted", slog.Any("error", err))
		}
	}
	if err != nil {
		return none, err
	}
	return s.session(ctx, known)
}

// fenced runs fn in a transaction that holds the lease's row, with the time read
// behind it; fn reports whether its fenced statement took effect. When it did
// not, the error says why the lease is refused.
func (s *Service) fenced(ctx context.Context, ref ci.LeaseRef, fn func(tx *store.Tx, now int64) (bool, error)) error {
	return s.cfg.Store.Write(ctx, func(tx *store.Tx) error {
		if _, err := tx.LockLeases(ctx, []ci.JobID{ref.Job}); err != nil {
			return err
		}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		done, err := fn(tx, now)
		if err != nil || done {
			return err
		}
		why, err := tx.WhyRefused(ctx, ref, now)
		if err != nil {
			return err
		}
		return ci.Rejected(why)
	})
}

// declared returns the job's declaration of an artifact.
func (s *Service) declared(ctx context.Context, tx *store.Tx, job ci.JobID, name string) (ci.ArtifactPublish, error) {
	spec, err := specOf(ctx, tx, job)
	if err != nil {
		return ci.ArtifactPublish{}, err
	}
	for _, p := range spec.Publish {
		if p.Name == name {
			return p, nil
		}
	}
	return ci.ArtifactPublish{}, ci.Errorf(ci.ErrForbidden, "the job does not declare an artifact %q", name)
}

func specOf(ctx context.Context, tx *store.Tx, job ci.JobID) (spec ci.JobSpec, err error) {
	specs, err := tx.Specs(ctx, []ci.JobID{job})
	if err == nil {
		err = json.Unmarshal([]byte(specs[job]), &spec)
	}
	return spec, err
}

// taken returns the session of the same request, ErrConflict when the request ID
// or the name was used for something else.
func taken(ctx context.Context, tx *store.Tx, k store.AttemptKey, in protocol.NewArtifact, bodyDigest string) (store.ArtifactSession, bool, error) {
	a, ok, err := tx.ArtifactByRequest(ctx, k, in.RequestID)
	if err != nil {
		return a, false, err
	}
	if ok {
		if a.RequestDigest != bodyDigest {
			return a, false, ci.Errorf(ci.ErrConflict, "request ID %s was used for another artifact", in.RequestID)
		}
		return a, true, nil
	}
	if _, ok, err = tx.ArtifactByName(ctx, k, in.Name); err != nil || !ok {
		return store.ArtifactSession{}, false, err
	}
	job, _, err := tx.Job(ctx, k.Job)
	if err != nil {
		return store.ArtifactSession{}, false, err
	}
	return store.ArtifactSession{}, false, ci.Errorf(ci.ErrConflict, "artifact %q of job %q, attempt %d, is there already: the first one stays",
		in.Name, job.Name, k.Epoch)
}

// StoredSession answers a repeat of Begin whose lease has ended; ok is false when
// the attempt opened no session by this request.
func (s *Service) StoredSession(ctx context.Context, who engine.Identity, ref ci.LeaseRef, in protocol.NewArtifact, bodyDigest string) (got protocol.ArtifactSession, ok bool, err error) {
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) error {
		a, found, err := tx.Attempt(ctx, ref.Job, ref.Epoch)
		if err != nil || !found || a.Org != who.Org || a.Runner != who.Runner || a.Ref() != ref {
			return err
		}
		row, found, err := tx.ArtifactByRequest(ctx, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch}, in.RequestID)
		if err != nil || !found {
			return err
		}
		if row.RequestDigest != bodyDigest {
			return ci.Errorf(ci.ErrConflict, "request ID %s was used for another artifact", in.RequestID)
		}
		got, ok = protocol.ArtifactSession{ID: row.ID, PartSize: row.PartSize, Sealed: row.State == store.ArtifactSealed}, true
		return nil
	})
	return got, ok, err
}

// session answers a repeated Begin: what the store holds need not be sent again.
func (s *Service) session(ctx context.Context, a store.ArtifactSession) (protocol.ArtifactSession, error) {
	out := protocol.ArtifactSession{ID: a.ID, PartSize: a.PartSize, Sealed: a.State == store.ArtifactSealed}
	switch a.State {
	case store.ArtifactSealed:
		return out, nil
	case store.ArtifactOpen:
	default:
		return protocol.ArtifactSession{}, missing(a.ID)
	}
	up, err := uploadOf(a)
	if err != nil {
		return protocol.ArtifactSession{}, err
	}
	var known []store.ArtifactPart
	err = s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		known, err = tx.ArtifactParts(ctx, a.ID)
		return err
	})
	if err != nil {
		return protocol.ArtifactSession{}, err
	}
	held, err := s.cfg.Blob.Parts(ctx, up)
	if err != nil && !errors.Is(err, ci.ErrNotFound) {
		return protocol.ArtifactSession{}, err
	}
	for _, p := range held {
		i := slices.IndexFunc(known, func(k store.ArtifactPart) bool { return k.Number == p.Number })
		if i >= 0 && known[i].Size == p.Size {
			out.Stored = append(out.Stored, protocol.ArtifactPart{Number: p.Number, Size: p.Size, Digest: known[i].Digest, ETag: p.ETag})
		}
	}
	return out, nil
}

// own returns a session of the attempt that holds the lease; any other is
// ErrNotFound.
func own(ctx context.Context, tx *store.Tx, held engine.Held, id string) (store.ArtifactSession, error) {
	a, ok, err := tx.ArtifactSession(ctx, held.Org(), id)
	if err != nil {
		return a, err
	}
	if ref := held.Ref(); !ok || a.Job != ref.Job || a.Epoch != ref.Epoch {
		return a, missing(id)
	}
	return a, nil
}

// Sign returns a URL for each part, which works for that part of that upload
// with those bytes only, and not once the session is sealed. Numbers, sizes and
// digests of parts are kept: other bytes for a part that is known are
// ErrConflict, a part that is not one of the session's plan is ErrInvalid.
func (s *Service) Sign(ctx context.Context, held engine.Held, id string, parts []protocol.ArtifactPart) (protocol.SignedParts, error) {
	none := protocol.SignedParts{}
	if len(parts) == 0 || len(parts) > 1000 {
		return none, ci.Errorf(ci.ErrInvalid, "ask for 1 to 1000 parts at once, not %d", len(parts))
	}
	ref := held.Ref()
	var a store.ArtifactSession
	var rows []store.ArtifactPart
	err := s.fenced(ctx, ref, func(tx *store.Tx, now int64) (bool, error) {
		var err error
		if a, err = own(ctx, tx, held, id); err != nil {
			return false, err
		}
		if current, err := s.current(ctx, tx, ref, now); err != nil || !current {
			return false, err
		}
		if a.State != store.ArtifactOpen {
			return false, ci.Errorf(ci.ErrConflict, "artifact %q takes no more parts: it is %s", a.Name, a.State)
		}
		if rows, err = planned(a, parts); err != nil {
			return false, err
		}
		if _, err := tx.InsertArtifactParts(ctx, ref, id, rows, now); err != nil {
			return false, err
		}
		known, err := tx.ArtifactParts(ctx, id)
		if err != nil {
			return false, err
		}
		present := 0
		for _, r := range rows {
			i := slices.IndexFunc(known, func(k store.ArtifactPart) bool { return k.Number == r.Number })
			if i < 0 {
				continue
			}
			present++
			if known[i].Digest != r.Digest || known[i].Size != r.Size {
				return false, ci.Errorf(ci.ErrConflict, "part %d of artifact %q was announced with other bytes", r.Number, a.Name)
			}
		}
		return present == len(rows), nil
	})
	if err != nil {
		return none, err
	}
	up, err := uploadOf(a)
	if err != nil {
		return none, err
	}
	var out protocol.SignedParts
	for i, r := range rows {
		sum, err := parseDigest(parts[i].Digest)
		if err != nil {
			return none, err
		}
		signed, err := s.cfg.Blob.PartURL(ctx, up, r.Number, r.Size, sum, urlLife)
		if err != nil {
			return none, err
		}
		out.URLs = append(out.URLs, protocol.SignedURL(signed))
	}
	return out, nil
}

// current reports whether the lease is current and not being cancelled.
func (s *Service) current(ctx context.Context, tx *store.Tx, ref ci.LeaseRef, now int64) (bool, error) {
	jobs, err := tx.CurrentLeases(ctx, []ci.LeaseRef{ref}, now)
	if err != nil || !jobs[ref.Job] {
		return false, err
	}
	l, ok, err := tx.Lease(ctx, ref.Job)
	return ok && l.Cancel == 0, err
}

// planned checks that parts are those in which the session is to be sent.
func planned(a store.ArtifactSession, parts []protocol.ArtifactPart) ([]store.ArtifactPart, error) {
	count := (a.Size + a.PartSize - 1) / a.PartSize
	out := make([]store.ArtifactPart, 0, len(parts))
	seen := map[int]bool{}
	for _, p := range parts {
		if _, err := parseDigest(p.Digest); err != nil {
			return nil, err
		}
		want := a.PartSize
		if int64(p.Number) == count {
			want = a.Size - (count-1)*a.PartSize
		}
		if p.Number < 1 || int64(p.Number) > count || p.Size != want || seen[p.Number] {
			return nil, ci.Errorf(ci.ErrInvalid, "part %d of %d bytes: artifact %q is sent once in %d parts of %d bytes, the last one shorter",
				p.Number, p.Size, a.Name, count, a.PartSize)
		}
		if len(p.ETag) > 256 {
			return nil, ci.Errorf(ci.ErrInvalid, "part %d: the ETag is too long", p.Number)
		}
		seen[p.Number] = true
		out = append(out, store.ArtifactPart{Number: p.Number, Size: p.Size, Digest: p.Digest, ETag: p.ETag})
	}
	return out, nil
}

// Seal verifies the uploaded bytes in the store and makes them a candidate for
// binding, if the lease is current and not being cancelled when that commits.
// parts are all parts of the session, as announced; it may be repeated after a
// lost answer, also while the store is at it. A caller that hangs up ends nothing
// of what the store has begun, so that bytes that take longer than a call may are
// sealed when it asks again. Bytes that do not have the session's size and digest
// are ErrDigest and can never become visible.
func (s *Service) Seal(ctx context.Context, held engine.Held, id string, parts []protocol.ArtifactPart) error {
	ref := held.Ref()
	var a store.ArtifactSession
	var known []store.ArtifactPart
	var keep ci.ArtifactPublish
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		if a, err = own(ctx, tx, held, id); err != nil {
			return err
		}
		if keep, err = s.declared(ctx, tx, a.Job, a.Name); err != nil {
			return err
		}
		known, err = tx.ArtifactParts(ctx, id)
		return err
	})
	if err != nil {
		return err
	}
	switch a.State {
	case store.ArtifactSealed:
		return nil
	case store.ArtifactOpen:
	default: // abandoned: its attempt has ended
		return s.fenced(ctx, ref, func(*store.Tx, int64) (bool, error) { return false, nil })
	}
	rows, err := planned(a, parts)
	if err != nil {
		return err
	}
	slices.SortFunc(rows, func(x, y store.ArtifactPart) int { return x.Number - y.Number })
	if int64(len(rows)) != (a.Size+a.PartSize-1)/a.PartSize {
		return ci.Errorf(ci.ErrInvalid, "artifact %q: %d parts are not all of it", a.Name, len(rows))
	}
	whole := make([]blob.Part, len(rows))
	for i, r := range rows {
		j := slices.IndexFunc(known, func(k store.ArtifactPart) bool { return k.Number == r.Number })
		if j < 0 || known[j].Size != r.Size || known[j].Digest != r.Digest {
			return ci.Errorf(ci.ErrConflict, "part %s of artifact %q was not announced with these bytes", strconv.Itoa(r.Number), a.Name)
		}
		sum, err := parseDigest(r.Digest)
		if err != nil {
			return err
		}
		whole[i] = blob.Part{Number: r.Number, Size: r.Size, SHA256: sum, ETag: r.ETag}
	}
	// The ETags are kept before the store is asked: a repeat finds them.
	err = s.fenced(ctx, ref, func(tx *store.Tx, now int64) (bool, error) {
		ok, err := s.current(ctx, tx, ref, now)
		if err != nil || !ok {
			return false, err
		}
		return true, tx.SetArtifactETags(ctx, id, rows)
	})
	if err != nil {
		return err
	}
	up, err := uploadOf(a)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sealLimit(a.Size))
	defer cancel()
	if err := s.cfg.Blob.Seal(ctx, up, whole); err != nil {
		return err
	}
	retention := keep.Retention.Std()
	if retention == 0 {
		retention = s.cfg.Retention
	}
	return s.fenced(ctx, ref, func(tx *store.Tx, now int64) (bool, error) {
		sealed, err := tx.SealArtifact(ctx, ref, id, now, now+retention.Microseconds())
		if sealed || err != nil {
			return sealed, err
		}
		// A repeat of this call may have been faster.
		a, err := own(ctx, tx, held, id)
		if err != nil {
			return false, err
		}
		return a.State == store.ArtifactSealed, nil
	})
}
