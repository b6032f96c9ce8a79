-- Installation, credentials, repositories, sources.

-- name: MetaGet
SELECT value FROM meta WHERE key = $1;

-- name: MetaLock
SELECT value FROM meta WHERE key = $1 /*lock*/;

-- name: MetaInsert
INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING;

-- name: MetaSet
UPDATE meta SET value = $2 WHERE key = $1;

-- name: OrgInsert
INSERT INTO org (id, name, created_us) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING;

-- name: OrgByName
SELECT {{org}} FROM org WHERE name = $1;

-- name: OrgIDs
SELECT id FROM org ORDER BY id;

-- name: OrgGet
SELECT {{org}} FROM org WHERE id = $1;

-- name: OrgsLock
SELECT {{org}} FROM org WHERE id IN (SELECT key FROM json_each($1)) ORDER BY id /*lock*/;

-- name: OrgsUpdate
UPDATE org SET admitted = x.admitted, vft = x.vft, audit_seq = x.audit_seq, audit_hash = x.audit_hash
FROM (SELECT key AS id, CAST(value->>'a' AS BIGINT) AS admitted, CAST(value->>'v' AS BIGINT) AS vft,
             CAST(value->>'s' AS BIGINT) AS audit_seq, value->>'h' AS audit_hash FROM json_each($1)) x
WHERE org.id = x.id;

-- name: OrgLimits
UPDATE org SET weight = $2, job_limit = $3 WHERE id = $1;

-- name: CredentialInsert
INSERT INTO credential (id, org_id, kind, hash, actor, runner_id, created_us, expires_us)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (hash) DO UPDATE SET revoked_us = 0;

-- name: CredentialDelete
DELETE FROM credential WHERE id = $1;

-- name: CredentialByHash
SELECT id, org_id, kind, actor, runner_id, created_us, expires_us, revoked_us FROM credential WHERE hash = $1;

-- name: CredentialsRevokeRunner
UPDATE credential SET revoked_us = $2 WHERE runner_id = $1 AND revoked_us = 0;

-- name: CredentialsRevokeBootstrap
UPDATE credential SET revoked_us = $1 WHERE kind IN ('admin', 'registration') AND revoked_us = 0;

-- name: RepoInsert
INSERT INTO repo (id, org_id, host, host_key, name, created_us) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (org_id, host, host_key) DO NOTHING;

-- name: RepoByKey
SELECT id, org_id, host, name, retry_default FROM repo WHERE org_id = $1 AND host = $2 AND host_key = $3;

-- name: ReposGet
SELECT id, org_id, host, name, retry_default FROM repo WHERE id IN (SELECT key FROM json_each($1));

-- name: ReposNextNumbers
UPDATE repo SET last_number = last_number + x.n FROM (SELECT key AS id, CAST(value->>'n' AS BIGINT) AS n FROM json_each($1)) x
WHERE repo.id = x.id RETURNING repo.id, repo.last_number;

-- name: SourceInsert
INSERT INTO source (org_id, digest, blob_key, blob_digest, size, files, bytes, created_us, used_us)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8) ON CONFLICT (org_id, digest) DO NOTHING;

-- name: SourceGet
SELECT digest, blob_key, blob_digest, size, files, bytes, used_us FROM source WHERE org_id = $1 AND digest = $2;

-- name: SourceUsed
UPDATE source SET used_us = $3 WHERE org_id = $1 AND digest = $2;

-- name: SourcesShare
-- Those that are there, and none of them goes before this transaction has ended.
SELECT org_id, digest FROM source WHERE (org_id, digest) IN (SELECT value->>'o', value->>'d' FROM json_each($1)) /*lock share*/;

-- name: SourceKeys
SELECT org_id, digest, blob_key FROM source WHERE (org_id, digest) IN (SELECT value->>'o', value->>'d' FROM json_each($1));

-- name: SourcesUnused
SELECT org_id, digest, blob_key FROM source WHERE kept = 0 AND used_us < $1 ORDER BY used_us LIMIT $2 /*lock skip*/;

-- name: SourcesKeep
UPDATE source SET kept = 1 WHERE (org_id, digest) IN (SELECT value->>'o', value->>'d' FROM json_each($1))
  AND EXISTS (SELECT 1 FROM run r WHERE r.org_id = source.org_id AND r.source_digest = source.digest);

-- name: SourcesDelete
DELETE FROM source WHERE (org_id, digest) IN (SELECT value->>'o', value->>'d' FROM json_each($1)) AND kept <> 1
RETURNING org_id, digest, blob_key;

-- name: IdempotencyInsert
INSERT INTO idempotency (org_id, caller, scope, key, digest, run_id, created_us)
SELECT value->>'o', value->>'c', value->>'s', value->>'k', value->>'d', value->>'r', CAST($2 AS BIGINT)
FROM json_each($1) WHERE true
ON CONFLICT (org_id, caller, scope, key) DO NOTHING;

-- name: IdempotencyGet
SELECT org_id, caller, scope, key, digest, run_id FROM idempotency WHERE (org_id, caller, scope, key) IN
  (SELECT value->>'o', value->>'c', value->>'s', value->>'k' FROM json_each($1));

-- name: IdempotencyCollect
DELETE FROM idempotency WHERE (org_id, caller, scope, key) IN
  (SELECT org_id, caller, scope, key FROM idempotency WHERE created_us < $1 ORDER BY created_us LIMIT $2 /*lock skip*/);

-- name: RejectionsAdd
INSERT INTO rejection (org_id, route, reason, n)
SELECT value->>'o', value->>'r', value->>'w', CAST(value->>'n' AS BIGINT) FROM json_each($1) WHERE true
ON CONFLICT (org_id, route, reason) DO UPDATE SET n = rejection.n + excluded.n;

-- name: Rejections
SELECT route, reason, n FROM rejection ORDER BY route, reason;

-- name: AuditInsert
INSERT INTO audit (org_id, seq, at_us, actor, action, run_id, job_id, epoch, object, detail, hash)
SELECT value->>'o', CAST(value->>'q' AS BIGINT), CAST(value->>'t' AS BIGINT), value->>'a', value->>'c',
       value->>'r', value->>'j', CAST(value->>'e' AS BIGINT), value->>'b', value->>'d', value->>'h'
FROM json_each($1) WHERE true;

-- name: AuditOfJob
SELECT seq, at_us, actor, action, run_id, job_id, epoch, object, detail, hash FROM audit
WHERE org_id = $1 AND job_id = $2 ORDER BY seq;

-- name: AuditAll
SELECT seq, at_us, actor, action, run_id, job_id, epoch, object, detail, hash FROM audit
WHERE org_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;
