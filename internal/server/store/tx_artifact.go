package store

import (
	"context"

	"forgeci/internal/ci"
)

// States of an artifact generation.
const (
	ArtifactOpen      = "open"      // its session takes parts
	ArtifactSealed    = "sealed"    // its bytes are verified
	ArtifactAbandoned = "abandoned" // its attempt ended before it was sealed
	ArtifactExpired   = "expired"   // its bytes have been or will be deleted
)

// SealedArtifacts returns the sealed generations of attempts.
func (t *Tx) SealedArtifacts(ctx context.Context, ks []AttemptKey) ([]Artifact, error) {
	m := make(map[string]any, len(ks))
	for _, k := range ks {
		m[string(k.Job)] = map[string]any{"e": k.Epoch}
	}
	return query(ctx, t, "ArtifactsSealedOf", scanArtifact, object(m))
}

// NewBinding binds a generation to a job of a run under a name.
type NewBinding struct {
	Run      ci.RunID
	Job      ci.JobID
	Name     string
	Artifact string
	Org      ci.OrgID
}

// InsertBindings makes artifact generations the outputs of their jobs. It locks
// them, so that none of them expires before the binding holds it; one that is
// not sealed (any more) is ErrGone and nothing is bound.
func (t *Tx) InsertBindings(ctx context.Context, bs []NewBinding, now int64) error {
	if len(bs) == 0 {
		return nil
	}
	m := make(map[string]any, len(bs))
	want := map[string]bool{}
	for i, b := range bs {
		m[itoa(i)] = map[string]any{"r": b.Run, "j": b.Job, "n": b.Name, "a": b.Artifact, "o": b.Org}
		want[b.Artifact] = true
	}
	sealed, err := query(ctx, t, "ArtifactsLockSealed", scanString, object(m))
	if err != nil {
		return err
	}
	if len(sealed) != len(want) {
		return ci.Errorf(ci.ErrGone, "%d of %d artifacts to bind are not there any more", len(want)-len(sealed), len(want))
	}
	_, err = t.exec(ctx, "BindingsInsert", object(m), now)
	return err
}

// BindingsOfRun returns the outputs of a run's jobs.
func (t *Tx) BindingsOfRun(ctx context.Context, id ci.RunID) ([]Binding, error) {
	return query(ctx, t, "BindingsOfRun", scanBinding, id)
}

// ArtifactSession is a generation with what its upload needs.
type ArtifactSession struct {
	Artifact
	RequestID     string
	RequestDigest string
	Upload        string // blob.Upload, JSON
	PartSize      int64
	Trust         ci.Trust
}

func scanArtifactSession(r scanner, v *ArtifactSession) error {
	return r.Scan(append(v.fields(), &v.RequestID, &v.RequestDigest, &v.Upload, &v.PartSize, &v.Trust)...)
}

// InsertArtifact stores an open session if the lease is current and not being
// cancelled, and neither the request ID nor the name is taken in the attempt;
// it reports whether it did.
func (t *Tx) InsertArtifact(ctx context.Context, ref ci.LeaseRef, a ArtifactSession, now int64) (bool, error) {
	n, err := t.exec(ctx, "ArtifactInsert", refs([]ci.LeaseRef{ref}, nil), now, object(map[string]any{a.ID: map[string]any{
		"i": a.ID, "o": a.Org, "r": a.Run, "j": a.Job, "e": a.Epoch, "n": a.Name, "q": a.RequestID, "h": a.RequestDigest,
		"k": a.BlobKey, "u": a.Upload, "p": a.PartSize, "s": a.Size, "d": a.Digest, "f": a.Files, "b": a.Bytes, "t": a.Trust,
	}}))
	return n == 1, err
}

// ArtifactByRequest returns the session that a request of the attempt opened.
func (t *Tx) ArtifactByRequest(ctx context.Context, k AttemptKey, request string) (ArtifactSession, bool, error) {
	return one(ctx, t, "ArtifactByRequest", scanArtifactSession, k.Job, k.Epoch, request)
}

// ArtifactByName returns the attempt's session of the name.
func (t *Tx) ArtifactByName(ctx context.Context, k AttemptKey, name string) (ArtifactSession, bool, error) {
	return one(ctx, t, "ArtifactByName", scanArtifactSession, k.Job, k.Epoch, name)
}

// ArtifactSession returns a generation of the organisation.
func (t *Tx) ArtifactSession(ctx context.Context, org ci.OrgID, id string) (ArtifactSession, bool, error) {
	return one(ctx, t, "ArtifactSession", scanArtifactSession, id, org)
}

// ArtifactPart is one part of a session.
type ArtifactPart struct {
	Number int
	Size   int64
	Digest string // hex
	ETag   string
}

// ArtifactParts returns the parts of a session by number.
func (t *Tx) ArtifactParts(ctx context.Context, id string) ([]ArtifactPart, error) {
	return query(ctx, t, "ArtifactParts", func(r scanner, v *ArtifactPart) error {
		return r.Scan(&v.Number, &v.Size, &v.Digest, &v.ETag)
	}, id)
}

// InsertArtifactParts stores parts of an open session if the lease is current
// and not being cancelled. Parts that are known keep their size and digest: the
// caller compares. It returns how many were new.
func (t *Tx) InsertArtifactParts(ctx context.Context, ref ci.LeaseRef, id string, ps []ArtifactPart, now int64) (int64, error) {
	m := make(map[string]any, len(ps))
	for _, p := range ps {
		m[itoa(p.Number)] = map[string]any{"n": p.Number, "s": p.Size, "d": p.Digest}
	}
	return t.exec(ctx, "ArtifactPartsInsert", refs([]ci.LeaseRef{ref}, nil), now, object(m), id)
}

// SetArtifactETags records what the store answered for parts.
func (t *Tx) SetArtifactETags(ctx context.Context, id string, ps []ArtifactPart) error {
	m := make(map[string]any, len(ps))
	for _, p := range ps {
		m[itoa(p.Number)] = map[string]any{"n": p.Number, "t": p.ETag}
	}
	_, err := t.exec(ctx, "ArtifactPartsEtags", object(m), id)
	return err
}

// SealArtifact marks an open session as sealed if the lease is current and not
// being cancelled; it reports whether it did.
func (t *Tx) SealArtifact(ctx context.Context, ref ci.LeaseRef, id string, now, expiresUS int64) (bool, error) {
	n, err := t.exec(ctx, "ArtifactSeal", refs([]ci.LeaseRef{ref}, nil), now, id, expiresUS)
	return n == 1, err
}

// ArtifactSeen is a sealed or expired generation for people.
type ArtifactSeen struct {
	Artifact
	JobName string
	Bound   int64 // bindings in the run asked about
}

func scanArtifactSeen(r scanner, v *ArtifactSeen) error {
	return r.Scan(append(v.fields(), &v.JobName, &v.Bound)...)
}

// SeenArtifact returns a sealed or expired generation of the organisation.
func (t *Tx) SeenArtifact(ctx context.Context, org ci.OrgID, id string) (ArtifactSeen, bool, error) {
	return one(ctx, t, "ArtifactSeen", scanArtifactSeen, id, org)
}

// SeenArtifacts returns what a run of the organisation made or has bound.
func (t *Tx) SeenArtifacts(ctx context.Context, org ci.OrgID, run ci.RunID) ([]ArtifactSeen, error) {
	return query(ctx, t, "ArtifactsSeenOfRun", scanArtifactSeen, run, org)
}

// ExpireArtifacts expires up to limit generations past their time. One that an
// unfinished run made or binds is held: it is looked at again at againUS. It
// returns how many were due.
func (t *Tx) ExpireArtifacts(ctx context.Context, now, againUS int64, limit int) (due int, err error) {
	ids, err := query(ctx, t, "ArtifactsDue", scanString, now, limit)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	if _, err := query(ctx, t, "ArtifactsExpire", scanString, keys(ids)); err != nil {
		return 0, err
	}
	_, err = t.exec(ctx, "ArtifactsDefer", keys(ids), againUS)
	return len(ids), err
}

// AbandonArtifacts closes sessions whose attempt does not own its job any more.
func (t *Tx) AbandonArtifacts(ctx context.Context) (int64, error) {
	return t.exec(ctx, "ArtifactsAbandon")
}

// UnpurgedArtifacts returns up to limit generations behind an ID whose bytes are
// to be deleted.
func (t *Tx) UnpurgedArtifacts(ctx context.Context, after string, limit int) ([]ArtifactSession, error) {
	return query(ctx, t, "ArtifactsUnpurged", scanArtifactSession, after, limit)
}

// PurgedArtifact records that a generation's bytes are gone.
func (t *Tx) PurgedArtifact(ctx context.Context, id string, now int64) error {
	if _, err := t.exec(ctx, "ArtifactPurged", id, now); err != nil {
		return err
	}
	_, err := t.exec(ctx, "ArtifactPartsForget", id)
	return err
}

// ArtifactsByKey returns the generations that own objects, by key.
func (t *Tx) ArtifactsByKey(ctx context.Context, ks []string) (map[string]ArtifactSession, error) {
	rows, err := query(ctx, t, "ArtifactsByKey", scanArtifactSession, keys(ks))
	out := make(map[string]ArtifactSession, len(rows))
	for _, a := range rows {
		out[a.BlobKey] = a
	}
	return out, err
}
