package protocol

import (
	"time"

	"forgeci/internal/ci"
)

// The documents of the REST API for people and scripts. Instants are RFC 3339
// in UTC with microseconds, absent when they have not happened. Lists are pages:
// {"items": […], "next": "cursor"}; next is absent on the last page.

// Page is one page of a list.
type Page[T any] struct {
	Items []T `json:"items"`
	// Next is passed back as ?after= to get the following page.
	Next string `json:"next,omitempty"`
}

// Repo is a repository.
type Repo struct {
	ID   ci.RepoID `json:"id"`
	Name string    `json:"name"` // owner/name, "local/hello" for a checkout without a code host
}

// EnsureLocalRepo is the body of POST /v1/repos: the repository of a local
// checkout, made on first use and keyed by Key within the caller's organisation.
type EnsureLocalRepo struct {
	Name string `json:"name"` // base name of the checkout's root
	Key  string `json:"key"`  // SHA-256 hex of the root's absolute path and host name
}

// Snapshot answers PUT /v1/repos/{repo_id}/sources/{digest}, whose raw body is
// the snapshot archive, and GET of the same path.
type Snapshot struct {
	Digest string `json:"digest"` // canonical manifest digest, "sha256:hex"
	Blob   string `json:"blob"`   // digest of the archive's bytes
	Size   int64  `json:"size"`
	Files  int    `json:"files"`
	Bytes  int64  `json:"bytes"` // sum of file sizes
}

// CreateRun is the body of POST /v1/repos/{repo_id}/workflow-runs. An
// Idempotency-Key header makes a repeat return the same run.
type CreateRun struct {
	WorkflowPath string `json:"workflow_path"`
	// Snapshot is the digest of an uploaded source. Exactly one of Snapshot and
	// CommitSHA selects the source; CommitSHA beside a Snapshot describes it.
	Snapshot  string            `json:"snapshot,omitempty"`
	CommitSHA string            `json:"commit_sha,omitempty"`
	Ref       string            `json:"ref,omitempty"` // description only
	Message   string            `json:"message,omitempty"`
	Author    string            `json:"author,omitempty"`
	Dirty     bool              `json:"dirty,omitempty"` // the tree differs from the commit
	Inputs    map[string]string `json:"inputs,omitempty"`
	// Jobs, when set, runs only these jobs (keys) and what they need.
	Jobs []string `json:"jobs,omitempty"`
}

// RunCreated answers CreateRun with 202.
type RunCreated struct {
	RunID ci.RunID `json:"run_id"`
	URL   string   `json:"url"` // of the run's page
}

// RetryRun is the body of POST /v1/workflow-runs/{run_id}/retry: a new run with
// the same pinned definition and source.
type RetryRun struct {
	// Failed pins the results of successful jobs and recreates the others with
	// everything that depends on them.
	Failed bool `json:"failed,omitempty"`
}

// RunSummary is a run in a list.
type RunSummary struct {
	ID         ci.RunID      `json:"id"`
	Number     int64         `json:"number"` // counts up per repository
	Repo       Repo          `json:"repo"`
	Workflow   string        `json:"workflow"`
	Path       string        `json:"path"`
	Event      string        `json:"event"` // manual, retry, push, …
	State      ci.State      `json:"state"`
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
	Reason     ci.Reason     `json:"reason,omitempty"`
	// Warnings is set when an allowed failure happened: passed with warnings.
	Warnings   bool       `json:"warnings,omitempty"`
	CommitSHA  string     `json:"commit_sha,omitempty"`
	Ref        string     `json:"ref,omitempty"`
	Message    string     `json:"message,omitempty"`
	Author     string     `json:"author,omitempty"`
	Dirty      bool       `json:"dirty,omitempty"`
	Actor      string     `json:"actor"` // who asked for it
	Trust      ci.Trust   `json:"trust"`
	ParentRun  ci.RunID   `json:"parent_run,omitempty"`
	CreatedAt  time.Time  `json:"created_at"`
	StartedAt  *time.Time `json:"started_at,omitempty"`
	FinishedAt *time.Time `json:"finished_at,omitempty"`
	// Jobs counts the run's jobs by state or, when finished, by conclusion.
	Jobs map[string]int `json:"jobs"`
}

// Run is a run with its jobs.
type Run struct {
	RunSummary
	SourceDigest   string            `json:"source_digest"`
	WorkflowDigest string            `json:"workflow_digest"`
	Inputs         map[string]string `json:"inputs,omitempty"`
	// Unproven, in a run that is being cancelled, is what it waits for.
	Unproven  []Unproven   `json:"unproven,omitempty"`
	JobList   []JobSummary `json:"job_list"`
	Artifacts []Artifact   `json:"artifacts,omitempty"`
}

// Unproven is an attempt whose end is not proven: its processes may still run.
type Unproven struct {
	Job        ci.JobID    `json:"job"`
	Name       string      `json:"name"`
	Epoch      int64       `json:"epoch"`
	Runner     ci.RunnerID `json:"runner"`
	RunnerName string      `json:"runner_name"`
	// Lost says that the runner holds no lease any more; it has to come back and
	// report the end, or an operator fences it.
	Lost bool `json:"lost,omitempty"`
	// Since is when the attempt was lost or, while it is not, claimed.
	Since time.Time `json:"since"`
}

// JobSummary is a job in its run.
type JobSummary struct {
	ID         ci.JobID      `json:"id"`
	Index      int           `json:"index"`
	Name       string        `json:"name"`
	Key        string        `json:"key"`
	Needs      []string      `json:"needs,omitempty"` // keys
	State      ci.State      `json:"state"`
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
	Reason     ci.Reason     `json:"reason,omitempty"`
	Detail     string        `json:"detail,omitempty"`
	// Waiting says why a waiting or ready job has not started.
	Waiting      *WaitReason `json:"waiting,omitempty"`
	AllowFailure bool        `json:"allow_failure,omitempty"`
	// Uncertain marks an aborted job: it may or may not have had effects outside.
	Uncertain  bool       `json:"uncertain,omitempty"`
	Attempts   int64      `json:"attempts"` // the current epoch
	Phase      ci.Phase   `json:"phase,omitempty"`
	Runner     string     `json:"runner,omitempty"` // name
	ExitCode   *int       `json:"exit_code,omitempty"`
	ReadyAt    *time.Time `json:"ready_at,omitempty"`
	StartedAt  *time.Time `json:"started_at,omitempty"` // of the current attempt's execution
	FinishedAt *time.Time `json:"finished_at,omitempty"`
	// PinnedFrom is the job of the retried run whose result was taken over.
	PinnedFrom ci.JobID `json:"pinned_from,omitempty"`
}

// WaitReason says why a job has not started.
type WaitReason struct {
	// Code: needs, no_runner_online, no_matching_runner, runners_draining,
	// runners_busy, quota, backoff.
	Code   string     `json:"code"`
	Detail string     `json:"detail"`
	Needs  []string   `json:"needs,omitempty"`
	Until  *time.Time `json:"until,omitempty"`
	// Position in its class's order, from 1, when it only waits for a free runner.
	Position int `json:"position,omitempty"`
}

// Job is a job with its attempts and steps.
type Job struct {
	JobSummary
	Run      RunSummary        `json:"run"`
	Spec     ci.JobSpec        `json:"spec"`
	Outputs  map[string]string `json:"outputs,omitempty"`
	Attempt  []Attempt         `json:"attempt_list"`
	StepList []Step            `json:"steps"` // of the latest attempt
}

// StepsOf returns the steps of an attempt; 0 means the latest.
func (j Job) StepsOf(epoch int64) []Step {
	if epoch == 0 || epoch == j.Attempts {
		return j.StepList
	}
	for _, a := range j.Attempt {
		if a.Epoch == epoch {
			return a.StepList
		}
	}
	return nil
}

// Attempt is one execution of a job.
type Attempt struct {
	Epoch      int64         `json:"epoch"`
	Lease      ci.LeaseID    `json:"lease"`
	Runner     ci.RunnerID   `json:"runner"`
	RunnerName string        `json:"runner_name"`
	Session    ci.SessionID  `json:"session"`
	Phase      ci.Phase      `json:"phase"`
	State      ci.State      `json:"state"` // running, cancelling, finished
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
	Reason     ci.Reason     `json:"reason,omitempty"`
	Detail     string        `json:"detail,omitempty"`
	// Winner marks the attempt whose result the job took.
	Winner bool `json:"winner,omitempty"`
	// Evidence says how termination was proven; empty while it is not.
	Evidence   string     `json:"evidence,omitempty"`
	ExitCode   *int       `json:"exit_code,omitempty"`
	ClaimedAt  time.Time  `json:"claimed_at"`
	ExecutedAt *time.Time `json:"executed_at,omitempty"`
	EndedAt    *time.Time `json:"ended_at,omitempty"`
	LogSealed  bool       `json:"log_sealed"`
	LogBytes   int64      `json:"log_bytes"`
	LogGap     bool       `json:"log_gap,omitempty"`
	LogCut     bool       `json:"log_truncated,omitempty"`
	// StepList is set in a Job only.
	StepList []Step `json:"steps,omitempty"`
}

// Step is one step of an attempt.
type Step struct {
	Index      int           `json:"index"`
	Name       string        `json:"name"`
	State      ci.State      `json:"state"`
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
	Reason     ci.Reason     `json:"reason,omitempty"`
	ExitCode   *int          `json:"exit_code,omitempty"`
	Signal     string        `json:"signal,omitempty"`
	Duration   *ci.Duration  `json:"duration,omitempty"`
}

// Artifact is a bound artifact of a run.
type Artifact struct {
	ID        string     `json:"id"`
	Run       ci.RunID   `json:"run"`
	Job       ci.JobID   `json:"job"`
	JobName   string     `json:"job_name"`
	Epoch     int64      `json:"epoch"`
	Name      string     `json:"name"`
	Size      int64      `json:"size"` // of the stored archive
	Digest    string     `json:"digest"`
	Files     int        `json:"files"`
	Bytes     int64      `json:"bytes"`
	Bound     bool       `json:"bound"` // false: output of an attempt that did not win; for people only
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	Expired   bool       `json:"expired,omitempty"`
}

// Runner is a registered runner.
type Runner struct {
	ID       ci.RunnerID `json:"id"`
	Name     string      `json:"name"`
	Status   string      `json:"status"` // online, offline, draining, fenced
	Offer    Offer       `json:"offer"`
	Slots    int         `json:"slots"`
	Version  string      `json:"version"`
	Running  []HeldJob   `json:"running,omitempty"`
	LastSeen *time.Time  `json:"last_seen,omitempty"`
	// Silent is how long a runner that is online or draining has not been heard
	// of, once that is half a lease TTL. After a whole one it is offline.
	Silent *ci.Duration `json:"silent_for,omitempty"`
	// Quarantined counts attempts whose sandbox is not proven to have ended.
	Quarantined int       `json:"quarantined,omitempty"`
	CreatedAt   time.Time `json:"created_at"`
}

// HeldJob is a job that occupies a slot.
type HeldJob struct {
	Job         ci.JobID `json:"job"`
	Name        string   `json:"name"`
	Epoch       int64    `json:"epoch"`
	Quarantined bool     `json:"quarantined,omitempty"`
}

// DeadLetter is a job that infrastructure made fail.
type DeadLetter struct {
	Job      ci.JobID  `json:"job"`
	Name     string    `json:"name"`
	Run      ci.RunID  `json:"run"`
	Repo     string    `json:"repo"`
	Attempts int64     `json:"attempts"`
	Reason   ci.Reason `json:"reason"`
	Detail   string    `json:"detail"`
	At       time.Time `json:"at"`
	// Requeued is the retry run that was made of it.
	Requeued ci.RunID `json:"requeued,omitempty"`
}

// HistoryEvent is one line of a job's ownership history (forgeci explain).
type HistoryEvent struct {
	At    time.Time `json:"at"`
	Actor string    `json:"actor"`
	// ActorName is the name of an actor that is a runner of one of the attempts.
	ActorName string `json:"actor_name,omitempty"`
	Action    string `json:"action"`
	Epoch     int64  `json:"epoch,omitempty"`
	Detail    string `json:"detail,omitempty"`
}

// Explanation answers GET /v1/jobs/{job_id}/explain.
type Explanation struct {
	Job     JobSummary `json:"job"`
	Summary string     `json:"summary"`
	// Unproven lists the attempts of the job whose end is not proven.
	Unproven []Unproven     `json:"unproven,omitempty"`
	History  []HistoryEvent `json:"history"`
}

// LogEvent is the data of an SSE "log" event of GET /v1/jobs/{job_id}/logs/events.
// The event's id is a cursor: Last-Event-ID or ?after= resumes behind it.
type LogEvent struct {
	Epoch  int64  `json:"epoch"`
	Step   int    `json:"step"` // StepSystem for what belongs to no step
	Stream string `json:"stream"`
	Offset int64  `json:"offset"` // in the stream
	At     int64  `json:"at"`     // microseconds since the attempt's start
	// Data is base64 of the bytes. Absent when Discarded or Lost is set.
	Data []byte `json:"data,omitempty"`
	// Discarded bytes were dropped here under the attempt's limits.
	Discarded int64 `json:"discarded,omitempty"`
	// Lost bytes never arrived: a gap.
	Lost int64 `json:"lost,omitempty"`
}

// LogSealedEvent is the data of the SSE "sealed" event, the last of an attempt:
// nothing follows it, and without it a closed connection is only a dropped one.
type LogSealedEvent struct {
	Epoch      int64         `json:"epoch"`
	Bytes      int64         `json:"bytes"`
	Lines      int64         `json:"lines"`
	Truncated  bool          `json:"truncated,omitempty"`
	Gap        bool          `json:"gap,omitempty"`
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
}

// LogSlice answers GET /v1/jobs/{job_id}/logs/lines: a window of lines.
type LogSlice struct {
	Epoch int64     `json:"epoch"`
	Lines []LogLine `json:"lines"`
	// Total is the number of lines known so far; First the number of the first
	// line returned, from 1.
	First     int64 `json:"first"`
	Total     int64 `json:"total"`
	Truncated bool  `json:"truncated"` // the answer does not hold everything asked for
	Sealed    bool  `json:"sealed"`
	Next      int64 `json:"next,omitempty"` // ?from= of the following window
	// Cursor, in an answer that reaches the end of a log that is not sealed, is
	// the ?after= with which the log's events go on right behind this answer.
	Cursor string `json:"cursor,omitempty"`
}

// LogLine is one line of a log as text: invalid UTF-8 is replaced by U+FFFD,
// control characters are kept for the viewer to interpret.
type LogLine struct {
	Number int64  `json:"n"` // from 1 in the attempt
	Step   int    `json:"step"`
	Stream string `json:"stream"`
	At     int64  `json:"at"`
	Text   string `json:"text"`
	// Cut is how many bytes of the line are left out of Text.
	Cut int64 `json:"cut,omitempty"`
	// Open marks a line whose end has not been written yet: the next bytes of its
	// step and stream belong to it.
	Open bool `json:"open,omitempty"`
	// Lost and Discarded count bytes of the stream that are missing before this
	// line: a gap, and what the attempt's limits dropped.
	Lost      int64 `json:"lost,omitempty"`
	Discarded int64 `json:"discarded,omitempty"`
}

// Problem is application/problem+json (RFC 9457) with ForgeCI's extensions.
type Problem struct {
	Type   string `json:"type"` // urn:forgeci:error:<kind>
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	// Instance is the request's ID, to find it in the server's log.
	Instance string          `json:"instance,omitempty"`
	Reject   ci.Reject       `json:"reject,omitempty"`
	Errors   []ci.FieldError `json:"errors,omitempty"`
	// RetryAfter is in seconds, as in the header.
	RetryAfter int `json:"retry_after,omitempty"`
}
