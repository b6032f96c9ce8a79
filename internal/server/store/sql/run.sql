-- Runs, jobs and their order.

-- name: RunsInsert
INSERT INTO run (id, org_id, repo_id, number, parent_id, workflow, path, workflow_digest, source_digest, plan, event,
  commit_sha, ref, message, author, dirty, actor, trust, retry_default, priority, state, jobs_left, created_us)
SELECT key, value->>'org', value->>'repo', CAST(value->>'number' AS BIGINT), value->>'parent', value->>'workflow',
  value->>'path', value->>'digest', value->>'source', value->>'plan', value->>'event', value->>'commit', value->>'ref',
  value->>'message', value->>'author', CAST(value->>'dirty' AS BIGINT), value->>'actor', value->>'trust',
  value->>'retry', CAST(value->>'priority' AS BIGINT), 'waiting', CAST(value->>'jobs_left' AS BIGINT), CAST($2 AS BIGINT)
FROM json_each($1) WHERE true;

-- name: RunGet
SELECT {{run}} FROM run WHERE id = $1;

-- name: TicketsGet
-- What runners are told of their jobs and their runs; all of it is there, and a
-- LEFT JOIN keeps PostgreSQL from beginning with another table than job.
SELECT j.id, r.org_id, r.number, r.parent_id, r.workflow, r.path, r.plan, r.event, r.commit_sha, r.ref, r.message, r.author, r.trust,
  p.name, s.digest, s.blob_digest, s.size, j.operation_id, j.spec
FROM job j LEFT JOIN run r ON r.id = j.run_id LEFT JOIN repo p ON p.id = r.repo_id
  LEFT JOIN source s ON s.org_id = r.org_id AND s.digest = r.source_digest
WHERE j.id IN (SELECT key FROM json_each($1));

-- name: RunsGet
SELECT {{run}} FROM run WHERE id IN (SELECT key FROM json_each($1));

-- name: RunsLock
-- Locks the runs in order; every decision about what is next happens under it.
SELECT {{run}} FROM run WHERE id IN (SELECT key FROM json_each($1)) ORDER BY id /*lock*/;

-- name: RunsUpdate
UPDATE run SET state = x.state, conclusion = x.conclusion, reason = x.reason, cancel_version = x.cancel_version,
  jobs_left = x.jobs_left, n_failed = x.n_failed, n_timed_out = x.n_timed_out, n_infra = x.n_infra, n_warn = x.n_warn,
  started_us = x.started_us, finished_us = x.finished_us
FROM (SELECT key AS id, value->>'state' AS state, value->>'conclusion' AS conclusion, value->>'reason' AS reason,
  CAST(value->>'cancel_version' AS BIGINT) AS cancel_version, CAST(value->>'jobs_left' AS BIGINT) AS jobs_left,
  CAST(value->>'n_failed' AS BIGINT) AS n_failed, CAST(value->>'n_timed_out' AS BIGINT) AS n_timed_out,
  CAST(value->>'n_infra' AS BIGINT) AS n_infra, CAST(value->>'n_warn' AS BIGINT) AS n_warn,
  CAST(value->>'started_us' AS BIGINT) AS started_us, CAST(value->>'finished_us' AS BIGINT) AS finished_us,
  value->>'was_state' AS was_state, CAST(value->>'was_cancel' AS BIGINT) AS was_cancel
  FROM json_each($1)) x
WHERE run.id = x.id AND run.state = x.was_state AND run.cancel_version = x.was_cancel;

-- name: RunsStarted
-- A claim starts its run; a run that is cancelling keeps its state.
-- A run that another transaction holds is passed over: that one, or the next, does it.
UPDATE run SET state = 'running', started_us = $2 WHERE id IN (
  SELECT r.id FROM run r WHERE r.id IN (SELECT key FROM json_each($1)) AND CASE r.state WHEN 'waiting' THEN 1 ELSE 0 END > 0 /*lock skip*/);

-- name: JobsInsert
INSERT INTO job (id, run_id, org_id, idx, name, key, spec, timeout_us, shape_id, prio, chain, allow_failure, operation_id, needs_left,
  state, conclusion, reason, outputs, pinned_from, finished_us, generation, ready_us)
SELECT key, value->>'run', value->>'org', CAST(value->>'idx' AS BIGINT), value->>'name', value->>'key', value->>'spec',
  CAST(value->>'timeout' AS BIGINT), value->>'shape', CAST(value->>'prio' AS BIGINT), CAST(value->>'chain' AS BIGINT), CAST(value->>'allow' AS BIGINT), value->>'op',
  CAST(value->>'needs' AS BIGINT), value->>'state', value->>'conclusion', value->>'reason', value->>'outputs',
  value->>'pinned', CAST(value->>'finished' AS BIGINT), CAST(value->>'generation' AS BIGINT), CAST(value->>'ready' AS BIGINT)
FROM json_each($1) WHERE true;

-- name: NeedsInsert
INSERT INTO job_need (need_id, job_id) SELECT value->>'n', value->>'j' FROM json_each($1) WHERE true;

-- name: JobGet
SELECT {{job}} FROM job WHERE id = $1;

-- name: JobsGet
SELECT {{job}} FROM job WHERE id IN (SELECT key FROM json_each($1));

-- name: JobsLock
SELECT {{job}} FROM job WHERE id IN (SELECT key FROM json_each($1)) ORDER BY id /*lock*/;

-- name: JobsOfRun
SELECT {{job}} FROM job WHERE run_id = $1 ORDER BY idx;

-- name: JobsOfRunLock
SELECT {{job}} FROM job WHERE run_id = $1 AND state <> 'finished' ORDER BY id /*lock*/;

-- name: JobSpecs
SELECT id, spec FROM job WHERE id IN (SELECT key FROM json_each($1));

-- name: JobsUpdate
-- Writes back rows that this transaction has locked; a row that changed since is not touched.
UPDATE job SET state = x.state, conclusion = x.conclusion, reason = x.reason, detail = x.detail,
  generation = x.generation, epoch = x.epoch, phase = x.phase, infra_used = x.infra_used, granted_used = x.granted_used,
  exit_code = x.exit_code, outputs = x.outputs, dead_us = x.dead_us, requeued_run = x.requeued_run,
  ready_us = x.ready_us, started_us = x.started_us, finished_us = x.finished_us
FROM (SELECT key AS id, value->>'state' AS state, value->>'conclusion' AS conclusion, value->>'reason' AS reason,
  value->>'detail' AS detail, CAST(value->>'generation' AS BIGINT) AS generation, CAST(value->>'epoch' AS BIGINT) AS epoch,
  value->>'phase' AS phase, CAST(value->>'infra_used' AS BIGINT) AS infra_used,
  CAST(value->>'granted_used' AS BIGINT) AS granted_used, CAST(value->>'exit_code' AS BIGINT) AS exit_code,
  value->>'outputs' AS outputs, CAST(value->>'dead_us' AS BIGINT) AS dead_us, value->>'requeued_run' AS requeued_run,
  CAST(value->>'ready_us' AS BIGINT) AS ready_us, CAST(value->>'started_us' AS BIGINT) AS started_us,
  CAST(value->>'finished_us' AS BIGINT) AS finished_us,
  value->>'was_state' AS was_state, CAST(value->>'was_epoch' AS BIGINT) AS was_epoch
  FROM json_each($1)) x
WHERE job.id = x.id AND job.state = x.was_state AND job.epoch = x.was_epoch;

-- name: NeedsDone
-- Counts finished needs down; each need of a job is counted once.
UPDATE job SET needs_left = needs_left - x.n
FROM (SELECT job_id, COUNT(*) AS n FROM job_need WHERE need_id IN (SELECT key FROM json_each($1)) GROUP BY job_id) x
WHERE job.id = x.job_id AND job.state NOT IN ('ready', 'running', 'cancelling', 'finished')
RETURNING job.id, job.needs_left;

-- name: NeedsOf
-- The jobs that the given jobs need, with what came of them.
SELECT n.job_id, j.id, j.key, j.name, j.state, j.conclusion, j.allow_failure, j.outputs
FROM job_need n JOIN job j ON j.id = n.need_id
WHERE n.job_id IN (SELECT key FROM json_each($1)) ORDER BY n.job_id, j.idx;

-- name: ShapeInsert
INSERT INTO shape (id, requirements, created_us) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING;

-- name: ShapesAll
SELECT id, requirements FROM shape;

-- name: OfferInsert
INSERT INTO offer (id, offer, created_us) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING;

-- name: OffersAll
SELECT id, offer FROM offer;

-- name: ShapesServed
-- What the offers of present sessions serve; offers that nobody makes any more stay out.
SELECT os.offer_id, os.shape_id FROM offer_shape os
WHERE os.offer_id IN (SELECT s.offer_id FROM session s WHERE s.present = 1);

-- name: OfferShapeInsert
INSERT INTO offer_shape (offer_id, shape_id) SELECT value->>'o', value->>'s' FROM json_each($1) WHERE true
ON CONFLICT (offer_id, shape_id) DO NOTHING;

-- name: QueueInsert
INSERT INTO queue (job_id, run_id, shape_id, org_id, prio, vft, generation, open, due_us)
SELECT key, value->>'run', value->>'shape', value->>'org', CAST(value->>'prio' AS BIGINT), CAST(value->>'vft' AS BIGINT),
  CAST(value->>'generation' AS BIGINT), CAST(value->>'open' AS BIGINT), CAST(value->>'due' AS BIGINT)
FROM json_each($1) WHERE true;

-- name: QueuePlaces
-- Where in the queue runs have jobs: the first place for each shape, priority and chain.
SELECT q.run_id, q.shape_id, q.prio, j.chain, MIN(q.vft) FROM queue q JOIN job j ON j.id = q.job_id
WHERE q.run_id IN (SELECT key FROM json_each($1)) GROUP BY q.run_id, q.shape_id, q.prio, j.chain;

-- name: QueueShapes
-- The shapes of an offer that have something of the tenant to claim. EXISTS would
-- be made a join that reads the whole queue.
SELECT os.shape_id FROM offer_shape os
WHERE os.offer_id = $1 AND (SELECT 1 FROM queue q WHERE q.org_id = $2 AND q.shape_id = os.shape_id AND q.open = 1 LIMIT 1) = 1;

-- name: QueueHeads
SELECT job_id, run_id, org_id, prio, vft, generation FROM queue
WHERE org_id = $2 AND shape_id = $1 AND open = 1 ORDER BY prio, vft, job_id LIMIT $3 /*lock skip*/;

-- name: QueueTake
DELETE FROM queue WHERE job_id IN (SELECT key FROM json_each($1));

-- name: QueueTakeRun
DELETE FROM queue WHERE run_id = $1 RETURNING job_id, open;

-- name: QueueHeld
-- What may be opened now: due, and some live session can serve its shape. A
-- backoff that ends behind $4 is longer than any: the clock was set back.
SELECT q.job_id, q.shape_id FROM queue q
WHERE q.org_id = $1 AND q.open = 0 AND (q.due_us <= $2 OR q.due_us > $4)
  AND EXISTS (SELECT 1 FROM offer_shape os JOIN session s ON s.offer_id = os.offer_id AND s.present = 1 AND s.org_id = q.org_id
              WHERE os.shape_id = q.shape_id)
ORDER BY q.prio, q.vft, q.job_id LIMIT $3 /*lock skip*/;

-- name: QueueHeldOrgs
-- An organisation with its quota used up has nothing to open; looked up by the
-- organisations, so that the length of the queue does not matter.
SELECT o.id FROM org o WHERE (o.job_limit = 0 OR o.admitted < o.job_limit)
  AND EXISTS (SELECT 1 FROM queue q WHERE q.org_id = o.id AND q.open = 0 AND (q.due_us <= $1 OR q.due_us > $2));

-- name: QueueNextDue
SELECT COALESCE(MIN(due_us), 0) FROM queue WHERE open = 0 AND due_us > $1;

-- name: QueueOpen
UPDATE queue SET open = 1 WHERE job_id IN (SELECT key FROM json_each($1)) AND open <> 1;

-- name: QueueClose
-- Shapes that no live session serves any more give their admission back.
UPDATE queue SET open = 0 WHERE open = 1 AND NOT EXISTS (
  SELECT 1 FROM offer_shape os JOIN session s ON s.offer_id = os.offer_id AND s.present = 1 AND s.org_id = queue.org_id
  WHERE os.shape_id = queue.shape_id)
RETURNING org_id;

-- name: QueueOpenCounts
SELECT org_id, shape_id, COUNT(*) FROM queue WHERE open = 1 GROUP BY org_id, shape_id;

-- name: QueueShift
-- A backoff that ends between $2 and $3 began behind the jump.
UPDATE queue SET due_us = due_us + $1 WHERE due_us > 0 AND NOT (due_us > $2 AND due_us <= $3);
