package store

import "strings"

// fragments are the shared pieces of statements, written {{name}} in the files.
//
// Where a statement finds rows by a list of keys and asks for their state besides,
// it says which states they must not have: PostgreSQL takes a state that is asked
// for with = for rare, begins with all rows of that state, and keeps the plan.
func fragments() *strings.Replacer {
	return strings.NewReplacer(
		// The fence: the whole tuple, unexpired at $2. Every statement that commits
		// an effect for a runner holds it, so that the check and the effect are one.
		"{{lease_is_current}}", `(lease.job_id, lease.run_id, lease.lease_id, lease.epoch, lease.runner_id, lease.session_id) IN
  (SELECT key, value->>'r', value->>'l', CAST(value->>'e' AS BIGINT), value->>'n', value->>'s' FROM json_each($1))
  AND lease.expires_us > $2`,
		"{{lease}}", `job_id, run_id, org_id, lease_id, runner_id, session_id, epoch, cancel, deadline_us, expires_us`,
		"{{org}}", `id, name, weight, job_limit, admitted, vft, retry_default, audit_seq, audit_hash`,
		"{{run}}", `id, org_id, repo_id, number, parent_id, workflow, path, workflow_digest, source_digest, plan, event,
  commit_sha, ref, message, author, dirty, actor, trust, retry_default, priority, state, conclusion, reason,
  cancel_version, jobs_left, n_failed, n_timed_out, n_infra, n_warn, created_us, started_us, finished_us`,
		"{{job}}", `id, run_id, org_id, idx, name, key, timeout_us, shape_id, prio, chain, allow_failure, operation_id, needs_left,
  state, conclusion, reason, detail, generation, epoch, phase, infra_used, granted_used, exit_code, outputs,
  pinned_from, dead_us, requeued_run, ready_us, started_us, finished_us`,
		"{{job_j}}", `j.id, j.run_id, j.org_id, j.idx, j.name, j.key, j.timeout_us, j.shape_id, j.prio, j.chain, j.allow_failure,
  j.operation_id, j.needs_left, j.state, j.conclusion, j.reason, j.detail, j.generation, j.epoch, j.phase,
  j.infra_used, j.granted_used, j.exit_code, j.outputs, j.pinned_from, j.dead_us, j.requeued_run,
  j.ready_us, j.started_us, j.finished_us`,
		"{{attempt_a}}", `a.job_id, a.epoch, a.run_id, a.org_id, a.runner_id, a.session_id, a.lease_id, a.claim_request, a.state,
  a.phase, a.conclusion, a.reason, a.detail, a.winner, a.evidence, a.exit_code, a.end_request, a.end_digest,
  a.end_answer, a.claimed_us, a.executing_us, a.ended_us`,
		"{{attempt}}", `job_id, epoch, run_id, org_id, runner_id, session_id, lease_id, claim_request, state, phase, conclusion,
  reason, detail, winner, evidence, exit_code, end_request, end_digest, end_answer, claimed_us, executing_us, ended_us`,
		"{{session}}", `s.id, s.org_id, s.runner_id, s.request_id, s.offer_id, s.slots, s.protocol, s.version, s.present,
  s.state, s.opened_us, s.gone_us, r.name, r.status,
  (SELECT COUNT(*) FROM occupancy o WHERE o.runner_id = s.runner_id)`,
		"{{log}}", `log.job_id, log.epoch, log.org_id, log.state, log.bytes, log.cut, log.gap, log.lines, log.extents, log.next_seq,
  log.ahead_seq, log.streams, log.finals, log.archive_key, log.archive_at, log.archive_size, log.index_size, log.index_digest, log.ended_us, log.sealed_us`,
		"{{extent}}", `job_id, epoch, seq, last_seq, step, stream, off, length, discarded, at_us, newlines, first_nl, last_nl, digest,
  segment, segment_off`,
		"{{artifact}}", `id, org_id, run_id, job_id, epoch, name, blob_key, size, digest, files, bytes, state, created_us, expires_us`,
		"{{artifact_a}}", `a.id, a.org_id, a.run_id, a.job_id, a.epoch, a.name, a.blob_key, a.size, a.digest, a.files, a.bytes,
  a.state, a.created_us, a.expires_us`,
		"{{session_a}}", `a.id, a.org_id, a.run_id, a.job_id, a.epoch, a.name, a.blob_key, a.size, a.digest, a.files, a.bytes,
  a.state, a.created_us, a.expires_us, a.request_id, a.request_digest, a.upload, a.part_size, a.trust`,
	)
}
