package store

import (
	"context"
	"fmt"

	"forgeci/internal/ci"
)

// Meta returns the value under key, "" when there is none.
func (t *Tx) Meta(ctx context.Context, key string) (string, error) {
	v, _, err := one(ctx, t, "MetaGet", scanString, key)
	return v, err
}

// LockMeta is Meta with the row locked.
func (t *Tx) LockMeta(ctx context.Context, key string) (string, error) {
	v, _, err := one(ctx, t, "MetaLock", scanString, key)
	return v, err
}

// InsertMeta stores a value unless the key has one.
func (t *Tx) InsertMeta(ctx context.Context, key, value string) error {
	_, err := t.exec(ctx, "MetaInsert", key, value)
	return err
}

// SetMeta replaces the value of an existing key.
func (t *Tx) SetMeta(ctx context.Context, key, value string) error {
	_, err := t.exec(ctx, "MetaSet", key, value)
	return err
}

// EnsureOrg makes an organisation of the name unless there is one.
func (t *Tx) EnsureOrg(ctx context.Context, id ci.OrgID, name string, now int64) (Org, error) {
	if _, err := t.exec(ctx, "OrgInsert", id, name, now); err != nil {
		return Org{}, err
	}
	o, _, err := one(ctx, t, "OrgByName", scanOrg, name)
	return o, err
}

// Org returns an organisation.
func (t *Tx) Org(ctx context.Context, id ci.OrgID) (Org, bool, error) {
	return one(ctx, t, "OrgGet", scanOrg, id)
}

// OrgIDs returns all organisations.
func (t *Tx) OrgIDs(ctx context.Context) ([]ci.OrgID, error) {
	return query(ctx, t, "OrgIDs", func(r scanner, v *ci.OrgID) error { return r.Scan(v) })
}

// LockOrgs locks and returns organisations, in order. They come last in the
// order of locks.
func (t *Tx) LockOrgs(ctx context.Context, ids []ci.OrgID) ([]Org, error) {
	return query(ctx, t, "OrgsLock", scanOrg, keys(ids))
}

// UpdateOrgs writes back what a transaction changes of locked organisations:
// admission, virtual time and the head of the audit chain.
func (t *Tx) UpdateOrgs(ctx context.Context, orgs []Org) error {
	m := make(map[string]any, len(orgs))
	for _, o := range orgs {
		m[string(o.ID)] = map[string]any{"a": o.Admitted, "v": o.VFT, "s": o.AuditSeq, "h": o.AuditHash}
	}
	return t.later(ctx, "OrgsUpdate", -1, "organisations", object(m))
}

// SetOrgLimits sets an organisation's weight and its limit of opened and running jobs.
func (t *Tx) SetOrgLimits(ctx context.Context, id ci.OrgID, weight, jobLimit int64) error {
	_, err := t.exec(ctx, "OrgLimits", id, weight, jobLimit)
	return err
}

// InsertCredential stores a credential by the hash of its text; one with the
// same hash is valid again.
func (t *Tx) InsertCredential(ctx context.Context, c Credential, hash string) error {
	_, err := t.exec(ctx, "CredentialInsert", c.ID, c.Org, c.Kind, hash, c.Actor, c.Runner, c.CreatedUS, c.ExpiresUS)
	return err
}

// CredentialByHash finds a credential; the caller checks revocation and expiry.
func (t *Tx) CredentialByHash(ctx context.Context, hash string) (Credential, bool, error) {
	return one(ctx, t, "CredentialByHash", scanCredential, hash)
}

// RevokeRunnerCredentials revokes every credential of a runner.
func (t *Tx) RevokeRunnerCredentials(ctx context.Context, id ci.RunnerID, now int64) error {
	_, err := t.exec(ctx, "CredentialsRevokeRunner", id, now)
	return err
}

// RevokeBootstrap revokes the bootstrap tokens.
func (t *Tx) RevokeBootstrap(ctx context.Context, now int64) error {
	_, err := t.exec(ctx, "CredentialsRevokeBootstrap", now)
	return err
}

// DeleteCredential removes a credential; the token that it was made of is then
// worth nothing. One that is not there is no error.
func (t *Tx) DeleteCredential(ctx context.Context, id string) error {
	_, err := t.exec(ctx, "CredentialDelete", id)
	return err
}

// EnsureRepo makes a repository for the key at the host unless there is one.
func (t *Tx) EnsureRepo(ctx context.Context, id ci.RepoID, org ci.OrgID, host, hostKey, name string, now int64) (Repo, error) {
	if _, err := t.exec(ctx, "RepoInsert", id, org, host, hostKey, name, now); err != nil {
		return Repo{}, err
	}
	r, _, err := one(ctx, t, "RepoByKey", scanRepo, org, host, hostKey)
	return r, err
}

// Repos returns repositories of any organisation: the caller compares.
func (t *Tx) Repos(ctx context.Context, ids []ci.RepoID) (map[ci.RepoID]Repo, error) {
	rows, err := query(ctx, t, "ReposGet", scanRepo, keys(ids))
	out := make(map[ci.RepoID]Repo, len(rows))
	for _, r := range rows {
		out[r.ID] = r
	}
	return out, err
}

// NextRunNumbers takes so many run numbers of each repository and returns the
// last of them.
func (t *Tx) NextRunNumbers(ctx context.Context, n map[ci.RepoID]int64) (map[ci.RepoID]int64, error) {
	type row struct {
		id   ci.RepoID
		last int64
	}
	m := make(map[string]any, len(n))
	for id, k := range n {
		m[string(id)] = map[string]any{"n": k}
	}
	rows, err := query(ctx, t, "ReposNextNumbers", func(r scanner, v *row) error { return r.Scan(&v.id, &v.last) }, object(m))
	out := make(map[ci.RepoID]int64, len(rows))
	for _, r := range rows {
		out[r.id] = r.last
	}
	if err == nil && len(out) != len(n) {
		err = fmt.Errorf("store: %d of %d repositories are there", len(out), len(n))
	}
	return out, err
}

// CallKey is a caller's idempotency key.
type CallKey struct {
	Org                ci.OrgID
	Caller, Scope, Key string
}

// Idempotency is what a caller's key is used for.
type Idempotency struct {
	CallKey
	Digest string // of the request
	Run    ci.RunID
}

// ClaimIdempotency binds callers' keys to requests and runs unless they are bound;
// it returns what each is bound to now. Of several for one key the first counts.
func (t *Tx) ClaimIdempotency(ctx context.Context, ks []Idempotency, now int64) (map[CallKey]Idempotency, error) {
	m := make(map[string]any, len(ks))
	for _, k := range ks {
		name := string(k.Org) + "\x1f" + k.Caller + "\x1f" + k.Scope + "\x1f" + k.Key
		if m[name] != nil {
			continue
		}
		m[name] = map[string]any{
			"o": k.Org, "c": k.Caller, "s": k.Scope, "k": k.Key, "d": k.Digest, "r": k.Run,
		}
	}
	if _, err := t.exec(ctx, "IdempotencyInsert", object(m), now); err != nil {
		return nil, err
	}
	rows, err := query(ctx, t, "IdempotencyGet", func(r scanner, v *Idempotency) error {
		return r.Scan(&v.Org, &v.Caller, &v.Scope, &v.Key, &v.Digest, &v.Run)
	}, object(m))
	out := make(map[CallKey]Idempotency, len(rows))
	for _, v := range rows {
		out[v.CallKey] = v
	}
	if err == nil && len(out) != len(m) {
		err = ErrSerialization // one was collected between the two statements
	}
	return out, err
}

// Rejection counts refused lease calls of one route and reason.
type Rejection struct {
	Org    ci.OrgID
	Route  string
	Reason ci.Reject
	N      int64
}

// AddRejections adds to the counts.
func (t *Tx) AddRejections(ctx context.Context, rs []Rejection) error {
	m := make(map[string]any, len(rs))
	for _, r := range rs {
		m[string(r.Org)+"\x1f"+r.Route+"\x1f"+string(r.Reason)] = map[string]any{"o": r.Org, "r": r.Route, "w": r.Reason, "n": r.N}
	}
	_, err := t.exec(ctx, "RejectionsAdd", object(m))
	return err
}

// Rejections returns the counts of all organisations.
func (t *Tx) Rejections(ctx context.Context) ([]Rejection, error) {
	return query(ctx, t, "Rejections", func(r scanner, v *Rejection) error { return r.Scan(&v.Route, &v.Reason, &v.N) })
}

// InsertAudit appends entries whose sequence and hash the caller has chained
// under the organisation's lock.
func (t *Tx) InsertAudit(ctx context.Context, es []Audit) error {
	m := make(map[string]any, len(es))
	for i, e := range es {
		m[itoa(i)] = map[string]any{
			"o": e.Org, "q": e.Seq, "t": e.AtUS, "a": e.Actor, "c": e.Action, "r": e.Run,
			"j": e.Job, "e": e.Epoch, "b": e.Object, "d": e.Detail, "h": e.Hash,
		}
	}
	return t.later(ctx, "AuditInsert", -1, "audit entries", object(m))
}

// AuditOfJob returns a job's entries in order.
func (t *Tx) AuditOfJob(ctx context.Context, org ci.OrgID, job ci.JobID) ([]Audit, error) {
	return query(ctx, t, "AuditOfJob", scanAudit, org, job)
}

// AuditAfter returns up to limit entries of an organisation behind seq.
func (t *Tx) AuditAfter(ctx context.Context, org ci.OrgID, seq int64, limit int) ([]Audit, error) {
	return query(ctx, t, "AuditAll", scanAudit, org, seq, limit)
}
