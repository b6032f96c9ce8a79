package store

import (
	"context"

	"forgeci/internal/ci"
)

// InsertSource records a published snapshot; one with the same digest stays.
func (t *Tx) InsertSource(ctx context.Context, org ci.OrgID, s Source, now int64) error {
	_, err := t.exec(ctx, "SourceInsert", org, s.Digest, s.BlobKey, s.BlobDigest, s.Size, s.Files, s.Bytes, now)
	return err
}

// Source returns the organisation's snapshot with the manifest digest.
func (t *Tx) Source(ctx context.Context, org ci.OrgID, digest string) (Source, bool, error) {
	return one(ctx, t, "SourceGet", scanSource, org, digest)
}

// UseSource notes that a snapshot was asked for, and reports whether it is there.
func (t *Tx) UseSource(ctx context.Context, org ci.OrgID, digest string, now int64) (bool, error) {
	n, err := t.exec(ctx, "SourceUsed", org, digest, now)
	return n > 0, err
}

// SourceKey names a snapshot of an organisation by its manifest digest.
type SourceKey struct {
	Org    ci.OrgID
	Digest string
}

// SourceObject is a snapshot and the object that holds it.
type SourceObject struct {
	SourceKey
	BlobKey string
}

func scanSourceObject(r scanner, v *SourceObject) error {
	return r.Scan(&v.Org, &v.Digest, &v.BlobKey)
}

func sourceKeys(ks []SourceKey) string {
	m := make(map[string]any, len(ks))
	for _, k := range ks {
		m[string(k.Org)+"\x1f"+k.Digest] = map[string]any{"o": k.Org, "d": k.Digest}
	}
	return object(m)
}

// ShareSources returns those of the snapshots that are published. They cannot be
// collected before the transaction has ended, and then it may name them.
func (t *Tx) ShareSources(ctx context.Context, ks []SourceKey) (map[SourceKey]bool, error) {
	rows, err := query(ctx, t, "SourcesShare", func(r scanner, v *SourceKey) error { return r.Scan(&v.Org, &v.Digest) }, sourceKeys(ks))
	out := make(map[SourceKey]bool, len(rows))
	for _, k := range rows {
		out[k] = true
	}
	return out, err
}

// SourceObjects returns the objects of those of the snapshots that are published.
func (t *Tx) SourceObjects(ctx context.Context, ks []SourceKey) (map[SourceKey]string, error) {
	rows, err := query(ctx, t, "SourceKeys", scanSourceObject, sourceKeys(ks))
	out := make(map[SourceKey]string, len(rows))
	for _, o := range rows {
		out[o.SourceKey] = o.BlobKey
	}
	return out, err
}

// CollectSources looks at up to limit snapshots that nobody has asked for since an
// instant. Those that a run names are kept for good; the others are deleted and
// returned. n is how many were looked at. A run that is being made of one shares
// it, and is waited for by leaving it out.
func (t *Tx) CollectSources(ctx context.Context, beforeUS int64, limit int) (deleted []SourceObject, n int, err error) {
	rows, err := query(ctx, t, "SourcesUnused", scanSourceObject, beforeUS, limit)
	if err != nil || len(rows) == 0 {
		return nil, 0, err
	}
	ks := make([]SourceKey, len(rows))
	for i, r := range rows {
		ks[i] = r.SourceKey
	}
	// A statement of its own sees the runs that came before the locks.
	if _, err := t.exec(ctx, "SourcesKeep", sourceKeys(ks)); err != nil {
		return nil, 0, err
	}
	deleted, err = query(ctx, t, "SourcesDelete", scanSourceObject, sourceKeys(ks))
	return deleted, len(rows), err
}
