package engine

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// record adds an entry to the trail of the transaction.
func (t *txn) record(a store.Audit) { t.audits = append(t.audits, a) }

// chain numbers and hashes the entries of an organisation behind its head.
func chain(org *store.Org, entries []store.Audit, now int64) []store.Audit {
	for i := range entries {
		a := &entries[i]
		org.AuditSeq++
		a.Org, a.Seq, a.AtUS = org.ID, org.AuditSeq, now
		a.Hash = AuditHash(org.AuditHash, *a)
		org.AuditHash = a.Hash
	}
	return entries
}

// AuditHash is the chained hash of an entry: SHA-256, hex, over the previous
// hash and the entry's fields, each with its length before it, so that no two
// different entries have the same bytes.
func AuditHash(previous string, a store.Audit) string {
	var b []byte
	add := func(s string) {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	for _, s := range []string{
		previous, string(a.Org), itoa(a.Seq), itoa(a.AtUS), a.Actor, a.Action, string(a.Run),
		string(a.Job), itoa(a.Epoch), a.Object, a.Detail,
	} {
		add(s)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// auditInstallation adds an entry to every organisation's trail.
func auditInstallation(ctx context.Context, tx *store.Tx, now int64, action, detail string) error {
	ids, err := tx.OrgIDs(ctx)
	if err != nil || len(ids) == 0 {
		return err
	}
	orgs, err := tx.LockOrgs(ctx, ids)
	if err != nil {
		return err
	}
	var entries []store.Audit
	for i := range orgs {
		entries = append(entries, chain(&orgs[i], []store.Audit{{Actor: actorServer, Action: action, Detail: detail}}, now)...)
	}
	if err := tx.InsertAudit(ctx, entries); err != nil {
		return err
	}
	return tx.UpdateOrgs(ctx, orgs)
}

// VerifyAudit walks an organisation's chain and returns the sequence number of
// the first entry that does not fit, 0 when all do.
func (e *Engine) VerifyAudit(ctx context.Context, org ci.OrgID) (int64, error) {
	bad := int64(0)
	err := e.Store.Read(ctx, func(tx *store.Tx) error {
		hash, seq := "", int64(0)
		for {
			entries, err := tx.AuditAfter(ctx, org, seq, 1000)
			if err != nil || len(entries) == 0 {
				return err
			}
			for _, a := range entries {
				a.Org = org
				if a.Seq != seq+1 || AuditHash(hash, a) != a.Hash {
					bad = seq + 1
					return nil
				}
				seq, hash = a.Seq, a.Hash
			}
		}
	})
	return bad, err
}
