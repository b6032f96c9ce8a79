-- The first schema. One text for SQLite and PostgreSQL: TEXT becomes
-- TEXT COLLATE "C" and BYTES becomes BYTEA on PostgreSQL, BYTES becomes BLOB on
-- SQLite; a line that begins with "--pg:" is run on PostgreSQL only.
-- Instants are microseconds since 1970 in the database's time, 0 = not yet.
-- The organisation is part of every row that a person can reach.

--pg: CREATE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql VOLATILE AS 'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint';

CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
);

CREATE TABLE org (
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  weight BIGINT NOT NULL DEFAULT 1 CHECK (weight > 0),
  job_limit BIGINT NOT NULL DEFAULT 0,          -- opened + running jobs; 0 = no limit
  admitted BIGINT NOT NULL DEFAULT 0 CHECK (admitted >= 0),
  vft BIGINT NOT NULL DEFAULT 0,                -- virtual finish time of the last job made ready
  retry_default TEXT NOT NULL DEFAULT '',
  audit_seq BIGINT NOT NULL DEFAULT 0,
  audit_hash TEXT NOT NULL DEFAULT '',
  created_us BIGINT NOT NULL
);

CREATE TABLE repo (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL REFERENCES org (id),
  host TEXT NOT NULL,                           -- code host instance; 'local' for checkouts
  host_key TEXT NOT NULL,                       -- identity at the host, never its name
  name TEXT NOT NULL,
  retry_default TEXT NOT NULL DEFAULT '',
  last_number BIGINT NOT NULL DEFAULT 0,
  created_us BIGINT NOT NULL,
  UNIQUE (org_id, host, host_key)
);

CREATE TABLE credential (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL REFERENCES org (id),
  kind TEXT NOT NULL CHECK (kind IN ('admin', 'registration', 'runner')),
  hash TEXT NOT NULL UNIQUE,                    -- SHA-256 of the token text, hex
  actor TEXT NOT NULL,
  runner_id TEXT NOT NULL DEFAULT '',
  created_us BIGINT NOT NULL,
  expires_us BIGINT NOT NULL DEFAULT 0,
  revoked_us BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX credential_runner ON credential (runner_id) WHERE runner_id <> '';

CREATE TABLE source (
  org_id TEXT NOT NULL REFERENCES org (id),
  digest TEXT NOT NULL,                         -- canonical manifest
  blob_key TEXT NOT NULL,
  blob_digest TEXT NOT NULL,
  size BIGINT NOT NULL,
  files BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  created_us BIGINT NOT NULL,
  used_us BIGINT NOT NULL,                      -- about when it was last asked for
  kept BIGINT NOT NULL DEFAULT 0,               -- 1 = a run is known to name it: it stays, as runs do
  PRIMARY KEY (org_id, digest)
);
CREATE INDEX source_unkept ON source (used_us) WHERE kept = 0;

-- Hard requirements and offers are interned: a claim joins two small sets.
CREATE TABLE shape (
  id TEXT PRIMARY KEY,
  requirements TEXT NOT NULL,
  created_us BIGINT NOT NULL
);
CREATE TABLE offer (
  id TEXT PRIMARY KEY,
  offer TEXT NOT NULL,
  created_us BIGINT NOT NULL
);
CREATE TABLE offer_shape (
  offer_id TEXT NOT NULL REFERENCES offer (id),
  shape_id TEXT NOT NULL REFERENCES shape (id),
  PRIMARY KEY (offer_id, shape_id)
);
CREATE INDEX offer_shape_shape ON offer_shape (shape_id);

CREATE TABLE runner (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL REFERENCES org (id),
  name TEXT NOT NULL,
  public_key TEXT NOT NULL,                     -- hex
  granted TEXT NOT NULL DEFAULT '[]',           -- labels the registration grants
  status TEXT NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'draining', 'fenced')),
  session_id TEXT NOT NULL DEFAULT '',          -- its latest session
  created_us BIGINT NOT NULL,
  UNIQUE (org_id, public_key)
);

CREATE TABLE session (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL REFERENCES org (id),
  runner_id TEXT NOT NULL REFERENCES runner (id),
  request_id TEXT NOT NULL,
  offer_id TEXT NOT NULL REFERENCES offer (id),
  slots BIGINT NOT NULL CHECK (slots > 0),
  protocol BIGINT NOT NULL,
  version TEXT NOT NULL,
  present BIGINT NOT NULL DEFAULT 1,            -- 1 while it polls or renews, at whatever node
  state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'draining', 'ended')),
  opened_us BIGINT NOT NULL,
  gone_us BIGINT NOT NULL DEFAULT 0,            -- while present: doubted by a node since
  UNIQUE (runner_id, request_id)
);
CREATE INDEX session_present ON session (offer_id) WHERE present = 1;
CREATE INDEX session_offer ON session (offer_id);
CREATE INDEX session_ended ON session (gone_us) WHERE state = 'ended';

CREATE TABLE run (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL REFERENCES org (id),
  repo_id TEXT NOT NULL REFERENCES repo (id),
  number BIGINT NOT NULL,
  parent_id TEXT NOT NULL DEFAULT '',
  workflow TEXT NOT NULL,
  path TEXT NOT NULL,
  workflow_digest TEXT NOT NULL,
  source_digest TEXT NOT NULL,
  plan TEXT NOT NULL,                           -- ci.Plan without its jobs, JSON
  event TEXT NOT NULL,
  commit_sha TEXT NOT NULL DEFAULT '',
  ref TEXT NOT NULL DEFAULT '',
  message TEXT NOT NULL DEFAULT '',
  author TEXT NOT NULL DEFAULT '',
  dirty BIGINT NOT NULL DEFAULT 0,
  actor TEXT NOT NULL,
  trust TEXT NOT NULL CHECK (trust IN ('trusted', 'untrusted')),
  retry_default TEXT NOT NULL DEFAULT '',       -- frozen policy of repository or organisation
  priority BIGINT NOT NULL DEFAULT 0,
  state TEXT NOT NULL,
  conclusion TEXT NOT NULL DEFAULT '',
  reason TEXT NOT NULL DEFAULT '',
  cancel_version BIGINT NOT NULL DEFAULT 0,
  jobs_left BIGINT NOT NULL CHECK (jobs_left >= 0),
  n_failed BIGINT NOT NULL DEFAULT 0,
  n_timed_out BIGINT NOT NULL DEFAULT 0,
  n_infra BIGINT NOT NULL DEFAULT 0,
  n_warn BIGINT NOT NULL DEFAULT 0,
  created_us BIGINT NOT NULL,
  started_us BIGINT NOT NULL DEFAULT 0,
  finished_us BIGINT NOT NULL DEFAULT 0,
  UNIQUE (repo_id, number),
  CHECK ((state = 'finished') = (finished_us > 0)),
  CHECK ((state IN ('waiting', 'running', 'cancelling') AND conclusion = '')
      OR (state = 'finished' AND conclusion IN ('success', 'failed', 'timed_out', 'cancelled', 'skipped')))
);
CREATE INDEX run_org ON run (org_id, id);
CREATE INDEX run_source ON run (org_id, source_digest);
CREATE INDEX run_active ON run (org_id, id) WHERE finished_us = 0;

CREATE TABLE job (
  id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL REFERENCES run (id),
  org_id TEXT NOT NULL,
  idx BIGINT NOT NULL,
  name TEXT NOT NULL,
  key TEXT NOT NULL,
  spec TEXT NOT NULL,                           -- ci.JobSpec, JSON
  timeout_us BIGINT NOT NULL,                   -- of it: its time limit
  shape_id TEXT NOT NULL REFERENCES shape (id),
  prio BIGINT NOT NULL,                         -- lower runs first
  chain BIGINT NOT NULL,                        -- longest chain of jobs behind it, itself included
  allow_failure BIGINT NOT NULL DEFAULT 0,
  operation_id TEXT NOT NULL,
  needs_left BIGINT NOT NULL CHECK (needs_left >= 0),
  state TEXT NOT NULL,
  conclusion TEXT NOT NULL DEFAULT '',
  reason TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  generation BIGINT NOT NULL DEFAULT 0,         -- rises at every return to ready
  epoch BIGINT NOT NULL DEFAULT 0,              -- attempts so far: the fencing token
  phase TEXT NOT NULL DEFAULT '',
  infra_used BIGINT NOT NULL DEFAULT 0,         -- attempts that infrastructure ended
  granted_used BIGINT NOT NULL DEFAULT 0,       -- further attempts that retry.on granted
  exit_code BIGINT,
  outputs TEXT NOT NULL DEFAULT '',
  pinned_from TEXT NOT NULL DEFAULT '',
  dead_us BIGINT NOT NULL DEFAULT 0,            -- dead letter since
  requeued_run TEXT NOT NULL DEFAULT '',
  ready_us BIGINT NOT NULL DEFAULT 0,
  started_us BIGINT NOT NULL DEFAULT 0,
  finished_us BIGINT NOT NULL DEFAULT 0,
  UNIQUE (run_id, idx),
  UNIQUE (run_id, name),
  CHECK ((state IN ('waiting', 'ready', 'running', 'cancelling') AND conclusion = '')
      OR (state = 'finished' AND conclusion IN
          ('success', 'failed', 'timed_out', 'cancelled', 'aborted', 'skipped', 'cached')))
);
CREATE INDEX job_dead ON job (org_id, id) WHERE dead_us > 0;

CREATE TABLE job_need (
  need_id TEXT NOT NULL REFERENCES job (id),
  job_id TEXT NOT NULL REFERENCES job (id),
  PRIMARY KEY (need_id, job_id)
);
CREATE INDEX job_need_job ON job_need (job_id);

-- One row per execution of a job, for ever.
CREATE TABLE attempt (
  job_id TEXT NOT NULL REFERENCES job (id),
  epoch BIGINT NOT NULL,
  run_id TEXT NOT NULL,
  org_id TEXT NOT NULL,
  runner_id TEXT NOT NULL,
  session_id TEXT NOT NULL,
  lease_id TEXT NOT NULL UNIQUE,
  claim_request TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('running', 'cancelling', 'finished')),
  phase TEXT NOT NULL,
  conclusion TEXT NOT NULL DEFAULT '',
  reason TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  winner BIGINT NOT NULL DEFAULT 0,
  evidence TEXT NOT NULL DEFAULT '',
  exit_code BIGINT,
  end_request TEXT NOT NULL DEFAULT '',
  end_digest TEXT NOT NULL DEFAULT '',
  end_answer TEXT NOT NULL DEFAULT '',
  claimed_us BIGINT NOT NULL,
  preparing_us BIGINT NOT NULL DEFAULT 0,
  building_us BIGINT NOT NULL DEFAULT 0,
  executing_us BIGINT NOT NULL DEFAULT 0,
  finalising_us BIGINT NOT NULL DEFAULT 0,
  ended_us BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (job_id, epoch),
  UNIQUE (session_id, claim_request)
);

-- One narrow row per live lease. No index on the expiry: the sweep scans.
CREATE TABLE lease (
  job_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  org_id TEXT NOT NULL,
  lease_id TEXT NOT NULL,
  runner_id TEXT NOT NULL,
  session_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  cancel BIGINT NOT NULL DEFAULT 0,
  deadline_us BIGINT NOT NULL DEFAULT 0,        -- from the phase's begin: job timeout + grace + TTL
  expires_us BIGINT NOT NULL
);
CREATE INDEX lease_session ON lease (session_id);

CREATE TABLE step (
  job_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  idx BIGINT NOT NULL,
  name TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('running', 'finished')),
  conclusion TEXT NOT NULL DEFAULT '',
  reason TEXT NOT NULL DEFAULT '',
  exit_code BIGINT,
  signal TEXT NOT NULL DEFAULT '',
  duration_us BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (job_id, epoch, idx)
);

-- Ready jobs. The row is the durable dispatch event; wake-ups are hints beside it.
CREATE TABLE queue (
  job_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  shape_id TEXT NOT NULL,
  org_id TEXT NOT NULL,
  prio BIGINT NOT NULL,
  vft BIGINT NOT NULL,
  generation BIGINT NOT NULL,
  open BIGINT NOT NULL,                         -- 1 = admitted: may be claimed
  due_us BIGINT NOT NULL DEFAULT 0              -- backoff: not to be opened before
);
CREATE INDEX queue_open ON queue (org_id, shape_id, prio, vft, job_id) WHERE open = 1;
CREATE INDEX queue_held ON queue (org_id, prio, vft, job_id) WHERE open = 0;
CREATE INDEX queue_run ON queue (run_id);

-- Physical occupancy: a slot is taken until termination is proven or the host is fenced.
CREATE TABLE occupancy (
  job_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  org_id TEXT NOT NULL,
  runner_id TEXT NOT NULL,
  quarantined BIGINT NOT NULL DEFAULT 0,
  since_us BIGINT NOT NULL,
  PRIMARY KEY (job_id, epoch)
);
CREATE INDEX occupancy_runner ON occupancy (runner_id);

CREATE TABLE idempotency (
  org_id TEXT NOT NULL,
  caller TEXT NOT NULL,
  scope TEXT NOT NULL,
  key TEXT NOT NULL,
  digest TEXT NOT NULL,
  run_id TEXT NOT NULL,
  created_us BIGINT NOT NULL,
  PRIMARY KEY (org_id, caller, scope, key)
);
CREATE INDEX idempotency_old ON idempotency (created_us);

CREATE TABLE outbox (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL,
  kind TEXT NOT NULL,
  subject TEXT NOT NULL,
  payload TEXT NOT NULL,
  created_us BIGINT NOT NULL
);

-- Append-only, a hash chain per organisation: hash = SHA-256(previous hash, fields).
CREATE TABLE audit (
  org_id TEXT NOT NULL,
  seq BIGINT NOT NULL,
  at_us BIGINT NOT NULL,
  actor TEXT NOT NULL,
  action TEXT NOT NULL,
  run_id TEXT NOT NULL DEFAULT '',
  job_id TEXT NOT NULL DEFAULT '',
  epoch BIGINT NOT NULL DEFAULT 0,
  object TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  hash TEXT NOT NULL,
  PRIMARY KEY (org_id, seq)
);
CREATE INDEX audit_job ON audit (job_id, seq) WHERE job_id <> '';

-- Logs: bytes are in the blob store, rows index them. One row per attempt that
-- wrote something or has ended.
CREATE TABLE log (
  job_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  org_id TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'ended', 'sealed', 'expired')),
  bytes BIGINT NOT NULL DEFAULT 0,              -- stored
  cut BIGINT NOT NULL DEFAULT 0,                -- bytes discarded under limits
  gap BIGINT NOT NULL DEFAULT 0,                -- bytes that never arrived; known when sealed
  lines BIGINT NOT NULL DEFAULT 0,              -- known when sealed
  extents BIGINT NOT NULL DEFAULT 0 CHECK (extents >= 0), -- rows in log_extent
  next_seq BIGINT NOT NULL DEFAULT 1,           -- every sequence number before it is stored
  ahead_seq BIGINT NOT NULL DEFAULT 1,          -- behind the highest sequence number stored
  streams TEXT NOT NULL DEFAULT '{}',           -- durable contiguous length by "step.stream"
  finals TEXT NOT NULL DEFAULT '{}',            -- length the runner declared at the end, likewise
  archive_key TEXT NOT NULL DEFAULT '',         -- the object that holds the archive, among others or alone
  archive_at BIGINT NOT NULL DEFAULT 0,         -- where it begins in that object
  archive_size BIGINT NOT NULL DEFAULT 0,
  index_size BIGINT NOT NULL DEFAULT 0,         -- of the index at the archive's end
  index_digest TEXT NOT NULL DEFAULT '',        -- SHA-256 of the index, hex
  ended_us BIGINT NOT NULL DEFAULT 0,
  sealed_us BIGINT NOT NULL DEFAULT 0,
  releasing BIGINT NOT NULL DEFAULT 0,          -- 1 = sealed, and some of its extents are still to be dropped
  PRIMARY KEY (job_id, epoch)
);
CREATE INDEX log_unsealed ON log (ended_us) WHERE state = 'ended';
CREATE INDEX log_releasing ON log (sealed_us) WHERE releasing = 1;
CREATE INDEX log_kept ON log (sealed_us) WHERE state = 'sealed';
CREATE INDEX log_expired ON log (job_id) WHERE state = 'expired' AND archive_key <> '';

CREATE TABLE log_extent (
  job_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  seq BIGINT NOT NULL,                          -- attempt-wide, of its first chunk
  last_seq BIGINT NOT NULL,                     -- of its last chunk
  step BIGINT NOT NULL,
  stream BIGINT NOT NULL,
  off BIGINT NOT NULL,
  length BIGINT NOT NULL,
  discarded BIGINT NOT NULL DEFAULT 0,          -- bytes dropped in this place; length is 0 then
  at_us BIGINT NOT NULL,
  newlines BIGINT NOT NULL,
  first_nl BIGINT NOT NULL,                     -- position of the first newline, -1 when there is none
  last_nl BIGINT NOT NULL,
  digest TEXT NOT NULL,                         -- SHA-256 of its bytes, unpadded base64
  segment TEXT NOT NULL,
  segment_off BIGINT NOT NULL,
  PRIMARY KEY (job_id, epoch, seq)
);

-- Objects that hold bytes of logs: segments of group-committed chunks, referred to
-- by their extents, and archives, referred to by their logs.
CREATE TABLE log_object (
  key TEXT PRIMARY KEY,
  size BIGINT NOT NULL,
  refs BIGINT NOT NULL CHECK (refs >= 0),
  created_us BIGINT NOT NULL
);
CREATE INDEX log_object_free ON log_object (created_us) WHERE refs = 0;

-- Artifacts: a generation is a candidate of one attempt; a binding makes it the job's.
CREATE TABLE artifact (
  id TEXT PRIMARY KEY,
  org_id TEXT NOT NULL,
  run_id TEXT NOT NULL,
  job_id TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  name TEXT NOT NULL,
  request_id TEXT NOT NULL,
  request_digest TEXT NOT NULL,
  blob_key TEXT NOT NULL UNIQUE,
  upload TEXT NOT NULL DEFAULT '',              -- blob.Upload, JSON
  part_size BIGINT NOT NULL,
  size BIGINT NOT NULL,
  digest TEXT NOT NULL,
  files BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  trust TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'abandoned', 'expired')),
  created_us BIGINT NOT NULL,
  sealed_us BIGINT NOT NULL DEFAULT 0,
  expires_us BIGINT NOT NULL DEFAULT 0,
  purged_us BIGINT NOT NULL DEFAULT 0,          -- its bytes are known to be gone
  UNIQUE (job_id, epoch, name),
  UNIQUE (job_id, epoch, request_id)
);
CREATE INDEX artifact_run ON artifact (run_id);
CREATE INDEX artifact_open ON artifact (id) WHERE state = 'open';
CREATE INDEX artifact_sealed ON artifact (expires_us) WHERE state = 'sealed';
CREATE INDEX artifact_unpurged ON artifact (id) WHERE state IN ('abandoned', 'expired') AND purged_us = 0;

CREATE TABLE artifact_part (
  artifact_id TEXT NOT NULL REFERENCES artifact (id),
  number BIGINT NOT NULL,
  size BIGINT NOT NULL,
  digest TEXT NOT NULL,
  etag TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (artifact_id, number)
);

CREATE TABLE artifact_binding (
  run_id TEXT NOT NULL,
  job_id TEXT NOT NULL,
  name TEXT NOT NULL,
  artifact_id TEXT NOT NULL REFERENCES artifact (id),
  org_id TEXT NOT NULL,
  created_us BIGINT NOT NULL,
  PRIMARY KEY (run_id, job_id, name)
);
CREATE INDEX artifact_binding_artifact ON artifact_binding (artifact_id);

-- Refused lease calls, by reason: stale_result_rejected and its kin.
CREATE TABLE rejection (
  org_id TEXT NOT NULL,
  route TEXT NOT NULL,
  reason TEXT NOT NULL,
  n BIGINT NOT NULL,
  PRIMARY KEY (org_id, route, reason)
);

--pg: ALTER TABLE lease SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
--pg: ALTER TABLE queue SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
--pg: ALTER TABLE job SET (fillfactor = 80);
--pg: ALTER TABLE attempt SET (fillfactor = 80);
--pg: ALTER TABLE run SET (fillfactor = 70);
--pg: ALTER TABLE org SET (fillfactor = 50);
