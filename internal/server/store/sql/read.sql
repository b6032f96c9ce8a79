-- What people read. Every statement takes the viewer's organisation.

-- name: ReadRuns
SELECT {{run}}, repo_name FROM (
  SELECT r.*, p.name AS repo_name FROM run r JOIN repo p ON p.id = r.repo_id
  WHERE r.org_id = $1 AND ($2 = '' OR r.id < $2)
    AND ($3 = '' OR p.name = $3 OR p.id = $3)
    AND ($4 = '' OR r.state = $4) AND ($5 = '' OR r.conclusion = $5)
    AND ($6 = '' OR substr(r.commit_sha, 1, length($6)) = $6)
  ORDER BY r.id DESC LIMIT $7) x ORDER BY id DESC;

-- name: ReadRun
SELECT {{run}}, repo_name FROM (
  SELECT r.*, p.name AS repo_name FROM run r JOIN repo p ON p.id = r.repo_id WHERE r.org_id = $1 AND r.id = $2) x;

-- name: ReadActiveRuns
SELECT {{run}}, repo_name FROM (
  SELECT r.*, p.name AS repo_name FROM run r JOIN repo p ON p.id = r.repo_id
  WHERE r.org_id = $1 AND r.finished_us = 0 AND r.state <> 'waiting' ORDER BY r.id LIMIT $2) x ORDER BY id;

-- name: ReadActiveCount
SELECT COUNT(*) FROM run WHERE org_id = $1 AND finished_us = 0 AND state <> 'waiting';

-- name: ReadJobCounts
SELECT run_id, state, conclusion, COUNT(*) FROM job WHERE run_id IN (SELECT key FROM json_each($1))
GROUP BY run_id, state, conclusion;

-- name: ReadJobs
SELECT {{job_j}}, j.spec, COALESCE(r.name, ''), COALESCE(q.open, -1), COALESCE(q.due_us, 0),
  COALESCE(q.prio, 0), COALESCE(q.vft, 0)
FROM job j
LEFT JOIN attempt a ON a.job_id = j.id AND a.epoch = j.epoch
LEFT JOIN runner r ON r.id = a.runner_id
LEFT JOIN queue q ON q.job_id = j.id
WHERE j.org_id = $1 AND j.run_id = $2 ORDER BY j.idx;

-- name: ReadJob
SELECT {{job_j}}, j.spec, COALESCE(r.name, ''), COALESCE(q.open, -1), COALESCE(q.due_us, 0),
  COALESCE(q.prio, 0), COALESCE(q.vft, 0)
FROM job j
LEFT JOIN attempt a ON a.job_id = j.id AND a.epoch = j.epoch
LEFT JOIN runner r ON r.id = a.runner_id
LEFT JOIN queue q ON q.job_id = j.id
WHERE j.org_id = $1 AND j.id = $2;

-- name: ReadReadyJobs
SELECT {{job_j}}, j.spec, '', q.open, q.due_us, q.prio, q.vft
FROM queue q JOIN job j ON j.id = q.job_id WHERE q.org_id = $1 ORDER BY j.ready_us, j.id LIMIT $2;

-- name: ReadReadyCount
SELECT COUNT(*) FROM queue WHERE org_id = $1;

-- name: ReadPosition
SELECT COUNT(*) FROM queue WHERE org_id = $5 AND shape_id = $1 AND open = 1
  AND (prio < $2 OR prio = $2 AND (vft < $3 OR vft = $3 AND job_id < $4));

-- name: ReadShapeServed
-- Present sessions that serve a shape, and those of them that take jobs.
SELECT COUNT(*), COUNT(CASE WHEN s.state = 'open' AND r.status = 'active' THEN 1 END)
FROM offer_shape os JOIN session s ON s.offer_id = os.offer_id AND s.present = 1 AND s.org_id = $2
JOIN runner r ON r.id = s.runner_id
WHERE os.shape_id = $1;

-- name: ReadSessionsPresent
SELECT COUNT(*) FROM session WHERE org_id = $1 AND present = 1;

-- name: ReadAttempts
SELECT {{attempt_a}}, COALESCE(r.name, ''), COALESCE(l.state, ''), COALESCE(l.bytes, 0), COALESCE(l.gap, 0), COALESCE(l.cut, 0)
FROM attempt a LEFT JOIN runner r ON r.id = a.runner_id LEFT JOIN log l ON l.job_id = a.job_id AND l.epoch = a.epoch
WHERE a.org_id = $1 AND a.job_id = $2 ORDER BY a.epoch;

-- name: ReadRunners
SELECT r.id, r.name, r.status, r.created_us, COALESCE(s.slots, 0), COALESCE(s.version, ''), COALESCE(s.present, 0),
  COALESCE(s.state, ''), COALESCE(s.opened_us, 0), COALESCE(s.gone_us, 0), COALESCE(o.offer, '')
FROM runner r
LEFT JOIN session s ON s.id = (SELECT MAX(s2.id) FROM session s2 WHERE s2.runner_id = r.id)
LEFT JOIN offer o ON o.id = s.offer_id
WHERE r.org_id = $1 AND r.id > $2 ORDER BY r.id LIMIT $3;

-- name: ReadFleet
-- How many runners are in each status, and the slots and attempts of those.
SELECT f.status, COUNT(*), CAST(SUM(f.slots) AS BIGINT), CAST(SUM(f.busy) AS BIGINT)
FROM (
  SELECT CASE WHEN r.status = 'fenced' THEN 'fenced' WHEN COALESCE(s.present, 0) = 0 THEN 'offline'
      WHEN r.status = 'draining' OR s.state = 'draining' THEN 'draining' ELSE 'online' END AS status,
    COALESCE(s.slots, 0) AS slots, COALESCE(o.n, 0) AS busy
  FROM runner r
  LEFT JOIN session s ON s.id = (SELECT MAX(s2.id) FROM session s2 WHERE s2.runner_id = r.id)
  LEFT JOIN (SELECT runner_id, COUNT(*) AS n FROM occupancy WHERE org_id = $1 GROUP BY runner_id) o ON o.runner_id = r.id
  WHERE r.org_id = $1) f
GROUP BY f.status;

-- name: ReadOccupancy
SELECT o.runner_id, o.job_id, o.epoch, o.quarantined, j.name, COALESCE(l.expires_us, 0)
FROM occupancy o JOIN job j ON j.id = o.job_id
LEFT JOIN lease l ON l.job_id = o.job_id AND l.epoch = o.epoch
WHERE o.org_id = $1 ORDER BY o.runner_id, o.since_us, o.job_id;

-- name: ReadUnproven
-- What of a run may still run, oldest first, with when it was lost or claimed.
SELECT o.job_id, j.name, o.epoch, o.runner_id, r.name, o.quarantined, COALESCE((
  SELECT MIN(a.at_us) FROM audit a
  WHERE a.job_id = o.job_id AND a.job_id <> '' AND a.epoch = o.epoch AND a.action = 'attempt_ended'), o.since_us),
  COALESCE(l.expires_us, 0)
FROM job j JOIN occupancy o ON o.job_id = j.id JOIN runner r ON r.id = o.runner_id
LEFT JOIN lease l ON l.job_id = o.job_id AND l.epoch = o.epoch
WHERE j.org_id = $1 AND j.run_id = $2 ORDER BY o.since_us, o.job_id, o.epoch;

-- name: ReadDeadLetters
SELECT j.id, j.name, j.run_id, p.name, j.epoch, j.reason, j.detail, j.dead_us, j.requeued_run
FROM job j JOIN run r ON r.id = j.run_id JOIN repo p ON p.id = r.repo_id
WHERE j.org_id = $1 AND j.dead_us > 0 AND ($2 = '' OR j.id < $2) ORDER BY j.id DESC LIMIT $3;

-- name: ReadDeadCount
SELECT COUNT(*) FROM job WHERE org_id = $1 AND dead_us > 0 AND requeued_run = '';

-- name: ReadQueueByState
-- By the unfinished runs: finished jobs are many and are not looked at.
SELECT j.state, COUNT(*) FROM run r JOIN job j ON j.run_id = r.id
WHERE r.finished_us = 0 AND j.state <> 'finished' GROUP BY j.state;
