-- Attempts, leases, sessions, occupancy. Statements that act for a runner take
-- the lease tuples as $1 and the time as $2 and hold {{lease_is_current}}.

-- name: LeasesLock
SELECT {{lease}} FROM lease WHERE job_id IN (SELECT key FROM json_each($1)) ORDER BY job_id /*lock*/;

-- name: LeaseGet
SELECT {{lease}} FROM lease WHERE job_id = $1;

-- name: LeasesNow
SELECT {{lease}}, /*now*/ FROM lease WHERE job_id IN (SELECT key FROM json_each($1));

-- name: LeasesRenew
UPDATE lease SET expires_us = $3 WHERE {{lease_is_current}} RETURNING job_id, cancel;

-- name: LeasesFence
-- Ends leases for their holders: what is not deleted was not current.
DELETE FROM lease WHERE {{lease_is_current}};

-- name: LeasesEnd
-- Ends leases against their holders (expiry, fencing): exact epochs only.
DELETE FROM lease WHERE (job_id, lease_id, epoch) IN
  (SELECT key, value->>'l', CAST(value->>'e' AS BIGINT) FROM json_each($1)) RETURNING job_id;

-- name: LeasesInsert
INSERT INTO lease (job_id, run_id, org_id, lease_id, runner_id, session_id, epoch, deadline_us, expires_us)
SELECT key, value->>'r', value->>'o', value->>'l', value->>'n', value->>'s', CAST(value->>'e' AS BIGINT),
  CAST(value->>'d' AS BIGINT), CAST($2 AS BIGINT)
FROM json_each($1) WHERE true;

-- name: LeasesCancel
UPDATE lease SET cancel = 1 WHERE job_id IN (SELECT key FROM json_each($1)) RETURNING session_id;

-- name: LeasesDeadline
-- The server's own limit on a phase of an attempt (timeout + grace + TTL).
UPDATE lease SET deadline_us = (SELECT CAST(x.value->>'d' AS BIGINT) FROM json_each($1) x WHERE x.key = lease.job_id)
WHERE {{lease_is_current}};

-- name: LeasesExpired
SELECT {{lease}} FROM lease WHERE expires_us <= $1 OR (deadline_us > 0 AND deadline_us <= $1) LIMIT $2;

-- name: LeasesOfSession
SELECT {{lease}} FROM lease WHERE session_id = $1 ORDER BY job_id;

-- name: LeasesOfRunner
SELECT {{lease}} FROM lease WHERE session_id IN (SELECT id FROM session WHERE runner_id = $1) ORDER BY job_id;

-- name: LeasesShift
-- Later by $1, none later than $2; what runs out between $3 and $2 was made or
-- renewed behind the jump, and the limit of its phase with it.
UPDATE lease SET expires_us = CASE WHEN expires_us + $1 < $2 THEN expires_us + $1 ELSE $2 END,
  deadline_us = CASE WHEN deadline_us = 0 THEN 0 WHEN expires_us > $2 THEN deadline_us - (expires_us - $2)
    WHEN expires_us > $3 THEN deadline_us ELSE deadline_us + $1 END
WHERE CAST($1 AS BIGINT) > 0 OR expires_us > $2;

-- name: LeasesLongest
SELECT COALESCE(MAX(expires_us), 0) FROM lease;

-- name: LeasesShorten
-- Leases that would live longer than any is given: the clock was set back while
-- no server looked.
-- The limit of its phase was as far off as the lease.
UPDATE lease SET expires_us = $2, deadline_us = CASE WHEN deadline_us > 0 THEN deadline_us - (expires_us - $2) ELSE 0 END
WHERE expires_us > $1;

-- name: AttemptsInsert
INSERT INTO attempt (job_id, epoch, run_id, org_id, runner_id, session_id, lease_id, claim_request, state, phase, claimed_us)
SELECT key, CAST(value->>'e' AS BIGINT), value->>'r', value->>'o', value->>'n', value->>'s', value->>'l', value->>'q',
  'running', 'claimed', CAST($2 AS BIGINT)
FROM json_each($1) WHERE true;

-- name: AttemptGet
SELECT {{attempt}} FROM attempt WHERE job_id = $1 AND epoch = $2;

-- name: AttemptByLease
SELECT {{attempt}} FROM attempt WHERE lease_id = $1;

-- name: AttemptsByClaim
SELECT {{attempt}} FROM attempt WHERE (session_id, claim_request) IN
  (SELECT value->>'s', value->>'q' FROM json_each($1));

-- name: AttemptsGet
SELECT {{attempt}} FROM attempt WHERE (job_id, epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: AttemptsOfJob
SELECT {{attempt}} FROM attempt WHERE job_id = $1 ORDER BY epoch;

-- name: AttemptsPhase
-- Records phases under the lease; a phase only goes forward.
UPDATE attempt SET phase = x.phase,
  preparing_us = CASE WHEN x.phase = 'preparing' THEN $2 ELSE preparing_us END,
  building_us = CASE WHEN x.phase = 'building' THEN $2 ELSE building_us END,
  executing_us = CASE WHEN x.phase = 'executing' THEN $2 ELSE executing_us END,
  finalising_us = CASE WHEN x.phase = 'finalising' THEN $2 ELSE finalising_us END
FROM (SELECT key AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, value->>'p' AS phase FROM json_each($1)) x
WHERE attempt.job_id = x.job_id AND attempt.epoch = x.epoch
  AND attempt.job_id IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}});

-- name: JobsPhase
UPDATE job SET phase = x.phase, started_us = CASE WHEN x.phase = 'executing' THEN $2 ELSE started_us END
FROM (SELECT key AS id, value->>'p' AS phase FROM json_each($1)) x
WHERE job.id = x.id AND job.id IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}});

-- name: AttemptsEnd
UPDATE attempt SET state = x.state, conclusion = x.conclusion, reason = x.reason, detail = x.detail, winner = x.winner,
  evidence = x.evidence, exit_code = x.exit_code, end_request = x.end_request, end_digest = x.end_digest,
  end_answer = x.end_answer, ended_us = x.ended_us
FROM (SELECT key AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, value->>'state' AS state,
  value->>'conclusion' AS conclusion, value->>'reason' AS reason, value->>'detail' AS detail,
  CAST(value->>'winner' AS BIGINT) AS winner, value->>'evidence' AS evidence,
  CAST(value->>'exit_code' AS BIGINT) AS exit_code, value->>'end_request' AS end_request,
  value->>'end_digest' AS end_digest, value->>'end_answer' AS end_answer, CAST(value->>'ended_us' AS BIGINT) AS ended_us
  FROM json_each($1)) x
WHERE attempt.job_id = x.job_id AND attempt.epoch = x.epoch AND attempt.state <> 'finished';

-- name: AttemptEvidence
UPDATE attempt SET evidence = $3 WHERE job_id = $1 AND epoch = $2 AND evidence = '';

-- name: AttemptsCancelling
UPDATE attempt SET state = 'cancelling'
WHERE state NOT IN ('cancelling', 'finished') AND (job_id, epoch) IN
  (SELECT key, CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: StepsUpsert
-- Step records ($3) of attempts whose lease is current; a finished step does not change.
INSERT INTO step (job_id, epoch, idx, name, state, conclusion, reason, exit_code, signal, duration_us)
SELECT value->>'j', CAST(value->>'e' AS BIGINT), CAST(value->>'i' AS BIGINT), value->>'n', value->>'st', value->>'c',
  value->>'r', CAST(value->>'x' AS BIGINT), value->>'sg', CAST(value->>'d' AS BIGINT)
FROM json_each($3) WHERE value->>'j' IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}})
ON CONFLICT (job_id, epoch, idx) DO UPDATE SET name = excluded.name, state = excluded.state,
  conclusion = excluded.conclusion, reason = excluded.reason, exit_code = excluded.exit_code,
  signal = excluded.signal, duration_us = excluded.duration_us
WHERE step.state <> 'finished';

-- name: StepsOf
SELECT idx, name, state, conclusion, reason, exit_code, signal, duration_us FROM step
WHERE job_id = $1 AND epoch = $2 ORDER BY idx;

-- name: OccupancyInsert
INSERT INTO occupancy (job_id, epoch, org_id, runner_id, since_us)
SELECT key, CAST(value->>'e' AS BIGINT), value->>'o', value->>'n', CAST($2 AS BIGINT) FROM json_each($1) WHERE true;

-- name: OccupancyRelease
DELETE FROM occupancy WHERE (job_id, epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: OccupancyReleaseOwn
-- A runner reports ends of its own attempts only.
DELETE FROM occupancy WHERE runner_id = $2 AND (job_id, epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1)) RETURNING job_id, epoch;

-- name: OccupancyReleaseRunner
DELETE FROM occupancy WHERE runner_id = $1 RETURNING job_id, epoch;

-- name: OccupancyOfRunner
SELECT job_id, epoch FROM occupancy WHERE runner_id = $1 ORDER BY job_id, epoch;

-- name: OccupiedJobs
SELECT DISTINCT job_id FROM occupancy WHERE job_id IN (SELECT key FROM json_each($1));

-- name: RunOccupied
SELECT COUNT(*) FROM occupancy WHERE job_id IN (SELECT id FROM job WHERE run_id = $1);

-- name: OccupancyQuarantine
UPDATE occupancy SET quarantined = 1 WHERE (job_id, epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1));

-- name: RunnerInsert
INSERT INTO runner (id, org_id, name, public_key, granted, created_us) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (org_id, public_key) DO UPDATE SET name = excluded.name, granted = excluded.granted;

-- name: RunnerByKey
SELECT id, org_id, name, public_key, granted, status, session_id FROM runner WHERE org_id = $1 AND public_key = $2;

-- name: RunnerLock
SELECT id, org_id, name, public_key, granted, status, session_id FROM runner WHERE id = $1 /*lock*/;

-- name: RunnerStatus
UPDATE runner SET status = $2 WHERE id = $1;

-- name: SessionInsert
INSERT INTO session (id, org_id, runner_id, request_id, offer_id, slots, protocol, version, opened_us)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- name: RunnerSession
UPDATE runner SET session_id = $2 WHERE id = $1;

-- name: SessionByRequest
SELECT {{session}} FROM session s JOIN runner r ON r.id = s.runner_id WHERE s.runner_id = $1 AND s.request_id = $2;

-- name: SessionsOfRunner
SELECT {{session}} FROM session s JOIN runner r ON r.id = s.runner_id WHERE s.runner_id = $1 AND s.state <> 'ended';

-- name: SessionGet
SELECT {{session}} FROM session s JOIN runner r ON r.id = s.runner_id WHERE s.id = $1;

-- name: SessionsGet
SELECT {{session}} FROM session s JOIN runner r ON r.id = s.runner_id WHERE s.id IN (SELECT key FROM json_each($1));

-- name: SessionsPresent
SELECT {{session}} FROM session s JOIN runner r ON r.id = s.runner_id WHERE s.present = 1;

-- name: SessionsLock
SELECT id FROM session WHERE id IN (SELECT key FROM json_each($1)) ORDER BY id /*lock*/;

-- name: SessionsDoubt
-- A node has not heard of sessions for long: another may have, and says so.
UPDATE session SET gone_us = $2 WHERE present = 1 AND gone_us = 0 AND id IN (SELECT key FROM json_each($1));

-- name: SessionsHeard
UPDATE session SET gone_us = 0 WHERE present = 1 AND gone_us > 0 AND id IN (SELECT key FROM json_each($1));

-- name: SessionsGone
-- Nobody has said that it heard of them since they were doubted: they are gone
-- since they were last heard of.
UPDATE session SET present = 0, gone_us = gone_us - $2 WHERE present = 1 AND gone_us > 0 AND gone_us <= $3
  AND id IN (SELECT key FROM json_each($1)) RETURNING id;

-- name: SessionBack
UPDATE session SET present = 1, gone_us = 0 WHERE id = $1 AND present = 0 AND state <> 'ended';

-- name: SessionDrain
UPDATE session SET state = 'draining' WHERE id = $1 AND state = 'open';

-- name: SessionEnd
UPDATE session SET state = 'ended', present = 0, gone_us = $2 WHERE id = $1 AND state <> 'ended';

-- name: SessionsCollect
-- Ended ones that are not their runner's latest, which a new session has to name,
-- and have no lease left, which is found by its session's runner.
DELETE FROM session WHERE id IN (
  SELECT s.id FROM session s WHERE s.state = 'ended' AND s.gone_us < $1
    AND NOT EXISTS (SELECT 1 FROM runner r WHERE r.id = s.runner_id AND r.session_id = s.id)
    AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.session_id = s.id)
  ORDER BY s.gone_us LIMIT $2 /*lock skip*/);

-- name: OffersUnused
SELECT o.id FROM offer o WHERE o.created_us < $1
  AND NOT EXISTS (SELECT 1 FROM session s WHERE s.offer_id = o.id) ORDER BY o.id LIMIT $2;

-- name: OffersPart
DELETE FROM offer_shape WHERE offer_id IN (SELECT key FROM json_each($1));

-- name: OffersDelete
DELETE FROM offer WHERE id IN (SELECT key FROM json_each($1));
