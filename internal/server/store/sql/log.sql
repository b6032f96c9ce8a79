-- Logs: one row per attempt, extents that say where its bytes are, and the
-- objects that hold them. The row of a log is locked before anything about it
-- is decided, or made; completion and expiry take the same lock (LogsEnd), so that
-- nothing is appended behind an end.

-- name: LogsLock
SELECT {{log}} FROM log WHERE (log.job_id, log.epoch) IN
  (SELECT key, CAST(value->>'e' AS BIGINT) FROM json_each($1)) ORDER BY log.job_id, log.epoch /*lock*/;

-- name: LogsInsert
-- Makes the rows of logs that have none, with their first bytes. One that is there
-- by now was made, or ended, by another transaction, which this one has waited for:
-- the time is read behind that.
INSERT INTO log (job_id, epoch, org_id, state, bytes, cut, extents, next_seq, ahead_seq, streams)
SELECT key, CAST(value->>'e' AS BIGINT), value->>'o', 'open', CAST(value->>'b' AS BIGINT), CAST(value->>'c' AS BIGINT),
  CAST(value->>'x' AS BIGINT), CAST(value->>'q' AS BIGINT), CAST(value->>'a' AS BIGINT), value->>'s'
FROM json_each($3) WHERE key IN (SELECT lease.job_id FROM lease WHERE {{lease_is_current}}) ORDER BY key
ON CONFLICT (job_id, epoch) DO NOTHING RETURNING /*now*/;

-- name: LeasesCurrent
SELECT lease.job_id FROM lease WHERE {{lease_is_current}};

-- name: LogExtentsFrom
SELECT {{extent}} FROM log_extent WHERE job_id = $1 AND epoch = $2 AND seq >= $3 ORDER BY seq LIMIT $4;

-- name: LogExtentsOf
-- All extents of logs that have few.
SELECT {{extent}} FROM log_extent WHERE (job_id, epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1)) ORDER BY job_id, epoch, seq;

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

-- name: LogObjectsInsert
INSERT INTO log_object (key, size, refs, created_us)
SELECT key, CAST(value->>'s' AS BIGINT), CAST(value->>'n' AS BIGINT), CAST($2 AS BIGINT) FROM json_each($1) WHERE true;

-- name: LogsEnd
-- Nothing is appended any more; the first end counts. Rows that are there come first,
-- as they do for those who append (LogsLock, LogsInsert): else each waits for the other.
INSERT INTO log (job_id, epoch, org_id, state, finals, ended_us)
SELECT x.job_id, x.epoch, x.org_id, 'ended', x.finals, CAST($2 AS BIGINT)
FROM (SELECT value->>'j' AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, value->>'o' AS org_id, value->>'f' AS finals FROM json_each($1)) x
  LEFT JOIN log l ON l.job_id = x.job_id AND l.epoch = x.epoch
WHERE true ORDER BY l.job_id, l.epoch, x.job_id, x.epoch
ON CONFLICT (job_id, epoch) DO UPDATE SET state = 'ended', finals = excluded.finals, ended_us = excluded.ended_us
WHERE log.state = 'open';

-- name: LogGet
SELECT {{log}} FROM log WHERE log.job_id = $1 AND log.epoch = $2 AND log.org_id = $3;

-- name: LogsEnded
SELECT {{log}} FROM log WHERE log.state = 'ended' AND log.ended_us <= $1 ORDER BY log.ended_us LIMIT $2;

-- name: LogsSeal
-- Replaces the extents of ended logs by their verified archives; the first one counts.
UPDATE log SET state = 'sealed', lines = x.lines, gap = x.gap, archive_key = x.archive_key, archive_at = x.archive_at,
  archive_size = x.archive_size, index_size = x.index_size, index_digest = x.index_digest, sealed_us = $2,
  extents = x.extents, releasing = x.releasing
FROM (SELECT value->>'j' AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, CAST(value->>'l' AS BIGINT) AS lines,
  CAST(value->>'g' AS BIGINT) AS gap, value->>'k' AS archive_key, CAST(value->>'p' AS BIGINT) AS archive_at,
  CAST(value->>'s' AS BIGINT) AS archive_size, CAST(value->>'i' AS BIGINT) AS index_size, value->>'h' AS index_digest,
  CAST(value->>'x' AS BIGINT) AS extents, CAST(value->>'r' AS BIGINT) AS releasing FROM json_each($1)) x
WHERE log.job_id = x.job_id AND log.epoch = x.epoch AND log.state NOT IN ('open', 'sealed', 'expired')
RETURNING log.job_id, log.epoch;

-- name: LogsReleasing
SELECT log.job_id, log.epoch FROM log WHERE log.releasing = 1 LIMIT $1;

-- name: LogExtentsRelease
-- Drops extents of sealed logs.
DELETE FROM log_extent WHERE (job_id, epoch, seq) IN
  (SELECT e.job_id, e.epoch, e.seq FROM log_extent e JOIN log l ON l.job_id = e.job_id AND l.epoch = e.epoch
   WHERE l.state NOT IN ('open', 'ended', 'expired') AND (e.job_id, e.epoch) IN
     (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1)) LIMIT $2)
RETURNING job_id, epoch, segment;

-- name: LogsReleased
UPDATE log SET extents = log.extents - x.n, releasing = CASE WHEN log.extents > x.n THEN 1 ELSE 0 END
FROM (SELECT value->>'j' AS job_id, CAST(value->>'e' AS BIGINT) AS epoch, CAST(value->>'n' AS BIGINT) AS n FROM json_each($1)) x
WHERE log.job_id = x.job_id AND log.epoch = x.epoch;

-- name: LogObjectsUnref
UPDATE log_object SET refs = log_object.refs - x.n
FROM (SELECT key AS k, CAST(value->>'n' AS BIGINT) AS n FROM json_each($1)) x WHERE log_object.key = x.k;

-- name: LogObjectsFree
SELECT key FROM log_object WHERE refs = 0 AND created_us < $1 ORDER BY created_us LIMIT $2;

-- name: LogObjectsDelete
DELETE FROM log_object WHERE refs < 1 AND log_object.key IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);

-- name: LogObjectsKnown
SELECT log_object.key FROM log_object WHERE log_object.key IN (SELECT x.k FROM (SELECT key AS k FROM json_each($1)) x);

-- name: LogsExpire
UPDATE log SET state = 'expired' WHERE log.state = 'sealed' AND log.extents = 0 AND (log.job_id, log.epoch) IN
  (SELECT l.job_id, l.epoch FROM log l WHERE l.state = 'sealed' AND l.sealed_us <= $1 LIMIT $2);

-- name: LogsExpired
SELECT {{log}} FROM log WHERE log.state = 'expired' AND log.archive_key <> '' LIMIT $1;

-- name: LogsForget
UPDATE log SET archive_key = '' WHERE log.archive_key <> '' AND log.state NOT IN ('open', 'ended', 'sealed') AND (log.job_id, log.epoch) IN
  (SELECT value->>'j', CAST(value->>'e' AS BIGINT) FROM json_each($1))
RETURNING log.job_id, log.epoch;
