-- Rows that must not exist: each statement returns a sentence per finding.

-- name: CheckRunningHasLease
SELECT 'job ' || id || ' is running without a lease of its epoch' FROM job j WHERE j.state = 'running'
  AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.job_id = j.id AND l.epoch = j.epoch AND l.run_id = j.run_id);

-- name: CheckLeaseHasJob
SELECT 'lease ' || l.lease_id || ' belongs to no running or cancelling job' FROM lease l
  WHERE NOT EXISTS (SELECT 1 FROM job j WHERE j.id = l.job_id AND j.epoch = l.epoch AND j.state IN ('running', 'cancelling'));

-- name: CheckLeaseHasAttempt
SELECT 'lease ' || l.lease_id || ' is not that of its attempt' FROM lease l
  WHERE NOT EXISTS (SELECT 1 FROM attempt a WHERE a.job_id = l.job_id AND a.epoch = l.epoch AND a.lease_id = l.lease_id
    AND a.state <> 'finished');

-- name: CheckReadyIsQueued
SELECT 'job ' || id || ' is ready and not in the queue in its generation' FROM job j WHERE j.state = 'ready'
  AND NOT EXISTS (SELECT 1 FROM queue q WHERE q.job_id = j.id AND q.generation = j.generation);

-- name: CheckQueuedIsReady
SELECT 'queue holds ' || q.job_id || ', which is not ready' FROM queue q
  WHERE NOT EXISTS (SELECT 1 FROM job j WHERE j.id = q.job_id AND j.state = 'ready');

-- name: CheckAdmitted
SELECT 'organisation ' || o.id || ' admitted ' || o.admitted || ', has ' || x.n FROM org o JOIN (
  SELECT o2.id, (SELECT COUNT(*) FROM queue q WHERE q.org_id = o2.id AND q.open = 1)
    + (SELECT COUNT(*) FROM lease l WHERE l.org_id = o2.id) AS n FROM org o2) x ON x.id = o.id
  WHERE o.admitted <> x.n;

-- name: CheckJobsLeft
SELECT 'run ' || r.id || ' counts ' || r.jobs_left || ' jobs left, has ' || x.n FROM run r JOIN (
  SELECT r2.id, (SELECT COUNT(*) FROM job j WHERE j.run_id = r2.id AND j.state <> 'finished') AS n FROM run r2) x ON x.id = r.id
  WHERE r.jobs_left <> x.n;

-- name: CheckRunFinished
SELECT 'run ' || id || ' has no job left and is ' || state FROM run
WHERE (jobs_left = 0) <> (state = 'finished') AND NOT (jobs_left = 0 AND state = 'cancelling'
  AND EXISTS (SELECT 1 FROM occupancy o JOIN job j ON j.id = o.job_id WHERE j.run_id = run.id));

-- name: CheckCancelledProven
SELECT 'job ' || j.id || ' of run ' || r.id || ' is cancelled, and its attempt ' || o.epoch || ' may still run'
FROM occupancy o JOIN job j ON j.id = o.job_id JOIN run r ON r.id = j.run_id
WHERE j.conclusion = 'cancelled' OR r.conclusion = 'cancelled';

-- name: CheckNeedsLeft
SELECT 'job ' || j.id || ' counts ' || j.needs_left || ' needs left, has ' || x.n FROM job j JOIN (
  SELECT j2.id, (SELECT COUNT(*) FROM job_need n JOIN job d ON d.id = n.need_id WHERE n.job_id = j2.id AND d.state <> 'finished') AS n
  FROM job j2) x ON x.id = j.id
  WHERE j.state = 'waiting' AND j.needs_left <> x.n;

-- name: CheckWaitingWaits
SELECT 'job ' || id || ' waits for nothing' FROM job WHERE state = 'waiting' AND needs_left = 0;

-- name: CheckOneWinner
SELECT 'job ' || job_id || ' has ' || COUNT(*) || ' winners' FROM attempt WHERE winner = 1 GROUP BY job_id HAVING COUNT(*) > 1;

-- name: CheckWinnerIsLast
SELECT 'job ' || j.id || ' was won by epoch ' || a.epoch || ' of ' || j.epoch FROM attempt a JOIN job j ON j.id = a.job_id
  WHERE a.winner = 1 AND a.epoch <> j.epoch;

-- name: CheckSuccessHasWinner
SELECT 'job ' || j.id || ' succeeded without a winning attempt' FROM job j WHERE j.conclusion = 'success' AND j.pinned_from = ''
  AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.job_id = j.id AND a.winner = 1 AND a.conclusion = 'success');

-- name: CheckEpochs
SELECT 'job ' || j.id || ' has epoch ' || j.epoch || ' and other attempts' FROM job j
  WHERE j.epoch <> (SELECT COUNT(*) FROM attempt a WHERE a.job_id = j.id);

-- name: CheckBoundIsSealed
SELECT 'binding of ' || b.job_id || ' ' || b.name || ' names an artifact that is ' || a.state FROM artifact_binding b
  JOIN artifact a ON a.id = b.artifact_id WHERE a.state NOT IN ('sealed', 'expired');

-- name: CheckBoundByWinner
SELECT 'binding of ' || b.job_id || ' ' || b.name || ' names an artifact of a losing attempt' FROM artifact_binding b
  JOIN artifact a ON a.id = b.artifact_id
  WHERE NOT EXISTS (SELECT 1 FROM attempt t WHERE t.job_id = a.job_id AND t.epoch = a.epoch AND t.winner = 1);

-- name: CheckStartedAfterNeeds
SELECT 'job ' || j.id || ' started before ' || d.id || ' finished' FROM job j JOIN job_need n ON n.job_id = j.id
  JOIN job d ON d.id = n.need_id WHERE j.state IN ('ready', 'running', 'cancelling') AND d.state <> 'finished';

-- name: CheckLogObjects
SELECT 'log object ' || x.k || ' counts ' || SUM(x.refs) || ' references, has ' || SUM(x.n) FROM (
  SELECT key AS k, refs, 0 AS n FROM log_object
  UNION ALL SELECT segment, 0, 1 FROM log_extent
  UNION ALL SELECT archive_key, 0, 1 FROM log WHERE archive_key <> '') x
GROUP BY x.k HAVING SUM(x.refs) <> SUM(x.n);

-- name: CheckLogExtents
SELECT 'log of attempt ' || x.epoch || ' of job ' || x.job_id || ' counts ' || SUM(x.extents) || ' extents, has ' || SUM(x.n) FROM (
  SELECT job_id, epoch, extents, 0 AS n FROM log
  UNION ALL SELECT job_id, epoch, 0, 1 FROM log_extent) x
GROUP BY x.job_id, x.epoch HAVING SUM(x.extents) <> SUM(x.n);

-- name: CheckLogReleased
SELECT 'log of attempt ' || epoch || ' of job ' || job_id || ' is ' || state || ' with ' || extents || ' extents'
FROM log WHERE (state IN ('sealed', 'expired') AND extents > 0) <> (releasing = 1);

-- name: CheckOpenLogHasLease
SELECT 'log of attempt ' || epoch || ' of job ' || job_id || ' is open and has no lease' FROM log
WHERE state = 'open' AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.job_id = log.job_id AND l.epoch = log.epoch);
