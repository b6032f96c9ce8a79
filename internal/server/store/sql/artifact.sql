-- Artifact generations and bindings. A generation is locked after the lease
-- that writes it; what expires it or binds it locks it first.

-- name: ArtifactsSealedOf
-- The sealed generations of attempts, by job and epoch.
SELECT {{artifact}} FROM artifact WHERE state NOT IN ('open', 'abandoned', 'expired') AND (job_id, epoch) IN
  (SELECT key, CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: ArtifactsLockSealed
-- Those of the generations that may be bound: locked, so that none expires meanwhile.
SELECT artifact.id FROM artifact WHERE artifact.state NOT IN ('open', 'abandoned', 'expired') AND artifact.id IN
  (SELECT value->>'a' FROM json_each($1)) ORDER BY artifact.id /*lock*/;

-- name: BindingsInsert
INSERT INTO artifact_binding (run_id, job_id, name, artifact_id, org_id, created_us)
SELECT value->>'r', value->>'j', value->>'n', value->>'a', value->>'o', CAST($2 AS BIGINT) FROM json_each($1) WHERE true;

-- name: BindingsOfRun
SELECT b.job_id, b.name, {{artifact_a}} FROM artifact_binding b JOIN artifact a ON a.id = b.artifact_id
WHERE b.run_id = $1 ORDER BY b.job_id, b.name;

-- name: ArtifactInsert
-- A session of an attempt whose lease is current and not being cancelled.
INSERT INTO artifact (id, org_id, run_id, job_id, epoch, name, request_id, request_digest, blob_key, upload, part_size, size,
  digest, files, bytes, trust, state, created_us)
SELECT value->>'i', value->>'o', value->>'r', value->>'j', CAST(value->>'e' AS BIGINT), value->>'n', value->>'q', value->>'h',
  value->>'k', value->>'u', CAST(value->>'p' AS BIGINT), CAST(value->>'s' AS BIGINT), value->>'d', CAST(value->>'f' AS BIGINT),
  CAST(value->>'b' AS BIGINT), value->>'t', 'open', $2
FROM json_each($3) WHERE value->>'j' IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}} AND lease.cancel <> 1)
ON CONFLICT DO NOTHING;

-- name: ArtifactByRequest
SELECT {{session_a}} FROM artifact a WHERE a.job_id = $1 AND a.epoch = $2 AND a.request_id = $3;

-- name: ArtifactByName
SELECT {{session_a}} FROM artifact a WHERE a.job_id = $1 AND a.epoch = $2 AND a.name = $3;

-- name: ArtifactSession
SELECT {{session_a}} FROM artifact a WHERE a.id = $1 AND a.org_id = $2;

-- name: ArtifactParts
SELECT number, size, digest, etag FROM artifact_part WHERE artifact_id = $1 ORDER BY number;

-- name: ArtifactPartsInsert
-- Parts of an open session ($4) of an attempt whose lease is current and not
-- being cancelled; a part that is known stays as it is.
INSERT INTO artifact_part (artifact_id, number, size, digest)
SELECT $4, CAST(value->>'n' AS BIGINT), CAST(value->>'s' AS BIGINT), value->>'d' FROM json_each($3)
WHERE EXISTS (SELECT 1 FROM artifact a WHERE a.id = $4 AND a.state = 'open' AND a.job_id IN
  (SELECT lease.job_id FROM lease WHERE {{lease_is_current}} AND lease.cancel = 0))
ON CONFLICT (artifact_id, number) DO NOTHING;

-- name: ArtifactPartsEtags
UPDATE artifact_part SET etag = x.etag
FROM (SELECT CAST(value->>'n' AS BIGINT) AS number, value->>'t' AS etag FROM json_each($1)) x
WHERE artifact_part.artifact_id = $2 AND artifact_part.number = x.number;

-- name: ArtifactSeal
-- Makes verified bytes a candidate: only for the attempt whose lease is current
-- and not being cancelled.
UPDATE artifact SET state = 'sealed', sealed_us = $2, expires_us = $4
WHERE artifact.id = $3 AND artifact.state = 'open' AND (artifact.job_id, artifact.epoch) IN
  (SELECT lease.job_id, lease.epoch FROM lease WHERE {{lease_is_current}} AND lease.cancel = 0);

-- name: ArtifactSeen
-- A sealed or expired generation as a person of the organisation sees it.
SELECT {{artifact_a}}, j.name, (SELECT COUNT(*) FROM artifact_binding b WHERE b.artifact_id = a.id AND b.run_id = a.run_id)
FROM artifact a JOIN job j ON j.id = a.job_id
WHERE a.id = $1 AND a.org_id = $2 AND a.state IN ('sealed', 'expired');

-- name: ArtifactsSeenOfRun
-- What a run made, and what was bound to it from the run it retries.
SELECT {{artifact_a}}, j.name, (SELECT COUNT(*) FROM artifact_binding b WHERE b.artifact_id = a.id AND b.run_id = $1)
FROM artifact a JOIN job j ON j.id = a.job_id
WHERE a.org_id = $2 AND a.state IN ('sealed', 'expired')
  AND a.id IN (SELECT own.id FROM artifact own WHERE own.run_id = $1
    UNION ALL SELECT b.artifact_id FROM artifact_binding b WHERE b.run_id = $1)
ORDER BY j.idx, a.name, a.epoch;

-- name: ArtifactsDue
-- Sealed generations past their time, locked.
SELECT artifact.id FROM artifact WHERE artifact.state = 'sealed' AND artifact.expires_us <= $1
ORDER BY artifact.expires_us LIMIT $2 /*lock skip*/;

-- name: ArtifactsExpire
-- Expires locked generations, except those that an unfinished run made or binds.
UPDATE artifact SET state = 'expired' WHERE artifact.state NOT IN ('open', 'abandoned', 'expired')
  AND artifact.id IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x)
  AND NOT EXISTS (SELECT 1 FROM run r WHERE r.id = artifact.run_id AND r.state <> 'finished')
  AND NOT EXISTS (SELECT 1 FROM artifact_binding b JOIN run r ON r.id = b.run_id
    WHERE b.artifact_id = artifact.id AND r.state <> 'finished')
RETURNING artifact.id;

-- name: ArtifactsDefer
-- What an unfinished run holds is looked at again later.
UPDATE artifact SET expires_us = $2 WHERE artifact.state NOT IN ('open', 'abandoned', 'expired')
  AND artifact.id IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);

-- name: ArtifactsAbandon
-- Sessions whose attempt does not own its job any more.
UPDATE artifact SET state = 'abandoned' WHERE artifact.state = 'open' AND NOT EXISTS
  (SELECT 1 FROM lease l WHERE l.job_id = artifact.job_id AND l.epoch = artifact.epoch);

-- name: ArtifactsUnpurged
SELECT {{session_a}} FROM artifact a WHERE a.state IN ('abandoned', 'expired') AND a.purged_us = 0 AND a.id > $1
ORDER BY a.id LIMIT $2;

-- name: ArtifactPurged
UPDATE artifact SET purged_us = $2 WHERE artifact.id = $1;

-- name: ArtifactPartsForget
DELETE FROM artifact_part WHERE artifact_id = $1;

-- name: ArtifactsByKey
SELECT {{session_a}} FROM artifact a WHERE a.blob_key IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);
