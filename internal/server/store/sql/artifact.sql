-- Artifact generations and bindings.

-- name: ArtifactsSealedOf
-- The sealed generations of attempts, by job and epoch.
SELECT {{artifact}} FROM artifact WHERE state = 'sealed' AND (job_id, epoch) IN
  (SELECT key, CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: BindingsInsert
INSERT INTO artifact_binding (run_id, job_id, name, artifact_id, org_id, created_us)
SELECT value->>'r', value->>'j', value->>'n', value->>'a', value->>'o', CAST($2 AS BIGINT) FROM json_each($1) WHERE true;

-- name: BindingsOfRun
SELECT b.job_id, b.name, {{artifact_a}} FROM artifact_binding b JOIN artifact a ON a.id = b.artifact_id
WHERE b.run_id = $1 ORDER BY b.job_id, b.name;
