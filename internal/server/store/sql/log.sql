-- Logs: one row per attempt, extents that say where its bytes are, and the
-- segments that hold them. The row of a log is locked before anything about it
-- is decided; completion and expiry take the same lock (LogsEnd), so that
-- nothing is appended behind an end.

-- name: LogsLock
SELECT {{log}} FROM log WHERE (log.job_id, log.epoch) IN
  (SELECT key, CAST(value->>'e' AS BIGINT) FROM json_each($1)) ORDER BY log.job_id, log.epoch /*lock*/;

-- name: LogsOpen
-- Makes the rows of logs that have none. $2 is 0 here: expiry is checked after
-- the lock.
INSERT INTO log (job_id, epoch, org_id, state)
SELECT lease.job_id, lease.epoch, lease.org_id, 'open' FROM lease WHERE {{lease_is_current}} ORDER BY lease.job_id
ON CONFLICT (job_id, epoch) DO NOTHING;

-- name: LeasesCurrent
SELECT lease.job_id FROM lease WHERE {{lease_is_current}};

-- name: LogExtentsFrom
SELECT {{extent}} FROM log_extent WHERE job_id = $1 AND epoch = $2 AND seq >= $3 ORDER BY seq LIMIT $4;

-- name: LogExtentsOver
-- The extents that hold any of the sequence numbers $3 to $4.
SELECT {{extent}} FROM log_extent WHERE job_id = $1 AND epoch = $2 AND seq <= $4
  AND seq >= COALESCE((SELECT MAX(seq) FROM log_extent WHERE job_id = $1 AND epoch = $2 AND seq <= $3), 0) ORDER BY seq;

-- name: LogExtentsInsert
INSERT INTO log_extent (job_id, epoch, seq, last_seq, step, stream, off, length, discarded, at_us, newlines, first_nl, last_nl,
  digest, segment, segment_off)
SELECT value->>'j', CAST(value->>'e' AS BIGINT), CAST(value->>'q' AS BIGINT), CAST(value->>'l' AS BIGINT),
  CAST(value->>'s' AS BIGINT), CAST(value->>'t' AS BIGINT), CAST(value->>'o' AS BIGINT), CAST(value->>'n' AS BIGINT),
  CAST(value->>'d' AS BIGINT), CAST(value->>'a' AS BIGINT), CAST(value->>'nl' AS BIGINT), CAST(value->>'fn' AS BIGINT),
  CAST(value->>'ln' AS BIGINT), value->>'h', $4, CAST(value->>'p' AS BIGINT)
FROM json_each($3) WHERE value->>'j' IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}});

-- name: LogsAdvance
UPDATE log SET bytes = x.bytes, cut = x.cut, extents = x.extents, next_seq = x.next_seq, ahead_seq = x.ahead_seq, streams = x.streams
FROM (SELECT key AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, CAST(value->>'b' AS BIGINT) AS bytes,
  CAST(value->>'c' AS BIGINT) AS cut, CAST(value->>'x' AS BIGINT) AS extents, CAST(value->>'q' AS BIGINT) AS next_seq,
  CAST(value->>'a' AS BIGINT) AS ahead_seq, value->>'s' AS streams FROM json_each($3)) x
WHERE log.job_id = x.job_id AND log.epoch = x.epoch AND log.state NOT IN ('ended', 'sealed', 'expired')
  AND log.job_id IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}});

-- name: LogSegmentInsert
INSERT INTO log_segment (key, size, refs, created_us) VALUES ($1, $2, $3, $4);

-- name: LogsEnd
-- Nothing is appended any more; the first end counts.
INSERT INTO log (job_id, epoch, org_id, state, finals, ended_us)
SELECT value->>'j', CAST(value->>'e' AS BIGINT), value->>'o', 'ended', value->>'f', CAST($2 AS BIGINT) FROM json_each($1) WHERE true
ON CONFLICT (job_id, epoch) DO UPDATE SET state = 'ended', finals = excluded.finals, ended_us = excluded.ended_us
WHERE log.state = 'open';

-- name: LogGet
SELECT {{log}} FROM log WHERE log.job_id = $1 AND log.epoch = $2 AND log.org_id = $3;

-- name: LogsEnded
SELECT {{log}} FROM log WHERE log.state = 'ended' AND log.ended_us <= $1 ORDER BY log.ended_us LIMIT $2;

-- name: LogsSeal
-- Replaces the extents of ended logs by their verified archives; the first one counts.
UPDATE log SET state = 'sealed', lines = x.lines, gap = x.gap, archive_key = x.archive_key, archive_size = x.archive_size,
  index_size = x.index_size, index_digest = x.index_digest, sealed_us = $2
FROM (SELECT value->>'j' AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, CAST(value->>'l' AS BIGINT) AS lines,
  CAST(value->>'g' AS BIGINT) AS gap, value->>'k' AS archive_key, CAST(value->>'s' AS BIGINT) AS archive_size,
  CAST(value->>'i' AS BIGINT) AS index_size, value->>'h' AS index_digest FROM json_each($1)) x
WHERE log.job_id = x.job_id AND log.epoch = x.epoch AND log.state NOT IN ('open', 'sealed', 'expired')
RETURNING log.job_id, log.epoch;

-- name: LogsUnreleased
SELECT log.job_id, log.epoch FROM log WHERE log.state = 'sealed' AND log.extents > 0 LIMIT $1;

-- name: LogExtentsRelease
-- Drops extents of sealed logs.
DELETE FROM log_extent WHERE (job_id, epoch, seq) IN
  (SELECT e.job_id, e.epoch, e.seq FROM log_extent e JOIN log l ON l.job_id = e.job_id AND l.epoch = e.epoch
   WHERE l.state NOT IN ('open', 'ended', 'expired') AND (e.job_id, e.epoch) IN
     (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1)) LIMIT $2)
RETURNING job_id, epoch, segment;

-- name: LogsReleased
UPDATE log SET extents = log.extents - x.n
FROM (SELECT value->>'j' AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, CAST(value->>'n' AS BIGINT) AS n FROM json_each($1)) x
WHERE log.job_id = x.job_id AND log.epoch = x.epoch;

-- name: LogSegmentsUnref
UPDATE log_segment SET refs = log_segment.refs - x.n
FROM (SELECT key AS k, CAST(value->>'n' AS BIGINT) AS n FROM json_each($1)) x WHERE log_segment.key = x.k;

-- name: LogSegmentsFree
SELECT key FROM log_segment WHERE refs = 0 AND created_us < $1 ORDER BY created_us LIMIT $2;

-- name: LogSegmentsDelete
DELETE FROM log_segment WHERE refs < 1 AND log_segment.key IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);

-- name: LogSegmentsKnown
SELECT log_segment.key FROM log_segment WHERE log_segment.key IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);

-- name: LogArchivesKnown
-- The archives that logs name.
SELECT log.archive_key FROM log WHERE (log.job_id, log.epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1)) AND log.archive_key <> '';

-- name: LogsExpire
UPDATE log SET state = 'expired' WHERE log.state = 'sealed' AND log.extents = 0 AND (log.job_id, log.epoch) IN
  (SELECT l.job_id, l.epoch FROM log l WHERE l.state = 'sealed' AND l.sealed_us <= $1 LIMIT $2);

-- name: LogsExpired
SELECT {{log}} FROM log WHERE log.state = 'expired' AND log.archive_key <> '' LIMIT $1;

-- name: LogForget
UPDATE log SET archive_key = '' WHERE log.job_id = $1 AND log.epoch = $2 AND log.state = 'expired';
