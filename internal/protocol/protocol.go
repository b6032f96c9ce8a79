// Package protocol is what a runner and the server say to each other: routes,
// messages, the framing of logs, the text of tokens, and the typed client.
//
// Messages are JSON over HTTP; streams (logs, source, artifacts) are raw
// bodies. Every lease route carries the whole ownership tuple in the
// Forgeci-Lease header (ci.LeaseRef.String) and the runner's credential in
// Authorization: Bearer. Every call may be repeated after a lost reply; a
// request that changes something carries a request ID for that.
package protocol

import (
	"time"

	"forgeci/internal/ci"
)

// Version is the protocol that this build speaks. Each change adds a line.
//
//	1  2026-11-29  first version
const Version = 1

// MinVersion is the oldest runner protocol that this server accepts.
const MinVersion = 1

// Headers.
const (
	HeaderLease   = "Forgeci-Lease"
	HeaderVersion = "Forgeci-Protocol"
	HeaderRequest = "Forgeci-Request" // request ID of a repeatable call
)

// Register is the body of POST /v1/runner/register (registration token). A
// repeat with the same public key gives the same runner and a fresh credential.
type Register struct {
	Name string `json:"name"`
	// PublicKey is the runner's Ed25519 key, made and kept in its data
	// directory; it identifies the runner across restarts.
	PublicKey []byte   `json:"public_key"`
	Labels    []string `json:"labels,omitempty"`
	// Credential is what the runner will show from then on, a new token of
	// TokenRunner that it has made. The same one again changes nothing, however
	// late it comes: one that was replaced meanwhile does not come back.
	Credential string `json:"credential"`
}

// Registered answers Register.
type Registered struct {
	Runner     ci.RunnerID `json:"runner"`
	Credential string      `json:"credential"`
}

// Offer is what a runner offers to jobs.
type Offer struct {
	OS        string         `json:"os"`
	Arch      string         `json:"arch"`
	Size      string         `json:"size,omitempty"`
	Isolation []ci.Isolation `json:"isolation"`
	// Labels are what the runner declares; the server's grants override them.
	Labels   []string `json:"labels,omitempty"`
	Features []string `json:"features,omitempty"`
}

// OpenSession is the body of POST /v1/runner/session.
type OpenSession struct {
	RequestID string `json:"request_id"`
	Protocol  int    `json:"protocol"`
	Version   string `json:"version"` // of the runner's build
	Slots     int    `json:"slots"`
	Offer     Offer  `json:"offer"`
	// Terminated names attempts of earlier sessions whose sandbox the runner has
	// proven to have ended.
	Terminated []AttemptRef `json:"terminated,omitempty"`
	// Swept says more: of all attempts that the server ever gave to this runner,
	// also of those it never learned of because the reply was lost, nothing is left
	// but those in Alive.
	Swept bool         `json:"swept,omitempty"`
	Alive []AttemptRef `json:"alive,omitempty"`
	// After is the runner's latest session. With another one nothing is opened, and
	// the answer names it: a request of an earlier process life that was long on its
	// way ends nothing of a later one.
	After ci.SessionID `json:"after,omitempty"`
	// At is the runner's wall clock, to report a large difference.
	At time.Time `json:"at"`
}

// SessionOpened answers OpenSession.
type SessionOpened struct {
	// Session is empty when none was opened: ask again after Latest.
	Session  ci.SessionID `json:"session,omitempty"`
	Latest   ci.SessionID `json:"latest,omitempty"`
	LeaseTTL ci.Duration  `json:"lease_ttl"`
	// Limits the runner keeps to.
	LogLimit int64 `json:"log_limit"` // bytes per attempt
	// ClockDiffers is set when the runner's clock is far from the server's.
	ClockDiffers ci.Duration `json:"clock_differs,omitempty"`
}

// AttemptRef names an attempt.
type AttemptRef struct {
	Job   ci.JobID `json:"job"`
	Epoch int64    `json:"epoch"`
}

// Claim is the body of POST /v1/runner/claim.
type Claim struct {
	Session ci.SessionID `json:"session"`
	// RequestID makes a repeat after a lost reply return the same lease.
	RequestID string      `json:"request_id"`
	Wait      ci.Duration `json:"wait"` // how long the server may hold the poll
}

// Ticket answers Claim with 200; 204 means nothing to do yet.
type Ticket struct {
	Lease    ci.LeaseRef `json:"lease"`
	LeaseTTL ci.Duration `json:"lease_ttl"`
	Job      ci.JobSpec  `json:"job"`
	Run      RunInfo     `json:"run"`
	Source   Source      `json:"source"`
	// OperationID is FORGECI_OPERATION_ID up to the step: equal in all attempts.
	OperationID string            `json:"operation_id"`
	Restore     []RestoreArtifact `json:"restore,omitempty"`
	// Needs are the results of direct needs, by key, for the steps' environment.
	Needs map[string]NeedResult `json:"needs,omitempty"`
	Grace ci.Duration           `json:"grace"`
}

// NeedResult is what a job knows of a job it needs.
type NeedResult struct {
	Conclusion ci.Conclusion     `json:"conclusion"`
	Outputs    map[string]string `json:"outputs,omitempty"`
}

// RunInfo is what a job knows of its run (the CI_* variables).
type RunInfo struct {
	Number    int64    `json:"number"`
	Repo      string   `json:"repo"` // owner/name
	Workflow  string   `json:"workflow"`
	Path      string   `json:"path"`
	Event     string   `json:"event"`
	CommitSHA string   `json:"commit_sha,omitempty"`
	Ref       string   `json:"ref,omitempty"`
	Message   string   `json:"message,omitempty"`
	Author    string   `json:"author,omitempty"`
	ParentRun ci.RunID `json:"parent_run,omitempty"`
	URL       string   `json:"url,omitempty"`
	Trust     ci.Trust `json:"trust"`
	// Inputs of a manual run.
	Inputs map[string]string `json:"inputs,omitempty"`
}

// Source names the snapshot to fetch and the manifest it must have.
type Source struct {
	// Digest is the canonical manifest digest, "sha256:hex".
	Digest string `json:"digest"`
	// Blob is the digest of the compressed archive, and Size its length in bytes.
	Blob string `json:"blob"`
	Size int64  `json:"size"`
}

// RestoreArtifact is a resolved binding of a producer.
type RestoreArtifact struct {
	ID     string `json:"id"` // artifact generation
	Name   string `json:"name"`
	Path   string `json:"path"`
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

// Heartbeat is the body of POST /v1/runner/heartbeat: all leases the runner
// holds, in one call.
type Heartbeat struct {
	Session ci.SessionID  `json:"session"`
	Leases  []ci.LeaseRef `json:"leases"`
}

// LeaseAnswer says what became of one lease in a heartbeat.
type LeaseAnswer string

// Answers.
const (
	LeaseRenewed LeaseAnswer = "renewed"
	LeaseCancel  LeaseAnswer = "cancel" // renewed, and the job must be stopped
	LeaseGone    LeaseAnswer = "lost"
)

// HeartbeatReply answers each lease in the order of the request.
type HeartbeatReply struct {
	Leases []HeartbeatLease `json:"leases"`
	// Drain asks the runner to take nothing new, because an operator or the runner
	// itself wanted it: it ends when its jobs have.
	Drain bool `json:"drain,omitempty"`
}

// HeartbeatLease is one answer.
type HeartbeatLease struct {
	Answer LeaseAnswer `json:"answer"`
	Reject ci.Reject   `json:"reject,omitempty"`
}

// SetPhase is the body of POST /v1/runner/phase. Phase may be empty when only
// steps changed; a phase never goes back.
type SetPhase struct {
	RequestID string       `json:"request_id"`
	Phase     ci.Phase     `json:"phase,omitempty"`
	Steps     []StepUpdate `json:"steps,omitempty"`
	// SourceDigest is the manifest digest the runner verified; set with executing.
	SourceDigest string `json:"source_digest,omitempty"`
}

// StepUpdate is one transition of a step record.
type StepUpdate struct {
	Index      int           `json:"index"`
	Name       string        `json:"name"`
	State      ci.State      `json:"state"` // running or finished
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
	Reason     ci.Reason     `json:"reason,omitempty"`
	ExitCode   *int          `json:"exit_code,omitempty"`
	Signal     string        `json:"signal,omitempty"`
	// Duration is monotonic, never negative.
	Duration ci.Duration `json:"duration,omitempty"`
}

// Evidence says how the runner knows that the sandbox has ended.
type Evidence struct {
	// Terminated is true only when no process of the attempt is left.
	Terminated bool `json:"terminated"`
	// How: "cgroup", "subreaper", "scan", or "nothing started".
	How string `json:"how"`
	// Killed is how many processes outlived their step and were killed.
	Killed int `json:"killed,omitempty"`
}

// StreamEnd is the final length of one log stream; a length beyond what the
// server holds becomes a loss marker.
type StreamEnd struct {
	Step   int    `json:"step"`
	Stream Stream `json:"stream"`
	Length int64  `json:"length"`
}

// Complete is the body of POST /v1/runner/complete.
type Complete struct {
	RequestID  string        `json:"request_id"`
	Conclusion ci.Conclusion `json:"conclusion"` // success, failed, timed_out, cancelled
	Reason     ci.Reason     `json:"reason,omitempty"`
	// Detail explains the reason to a person; at most 4 KiB.
	Detail string `json:"detail,omitempty"`
	// ExitCode is that of the step that decided.
	ExitCode *int     `json:"exit_code,omitempty"`
	Evidence Evidence `json:"evidence"`
	// SourceDigest is the manifest digest that the runner verified.
	SourceDigest string            `json:"source_digest,omitempty"`
	Steps        []StepUpdate      `json:"steps,omitempty"`
	Streams      []StreamEnd       `json:"streams,omitempty"`
	Outputs      map[string]string `json:"outputs,omitempty"`
	// Artifacts are the sealed generations to bind, by artifact name.
	Artifacts map[string]string `json:"artifacts,omitempty"`
	Duration  ci.Duration       `json:"duration,omitempty"`
}

// Completed answers Complete.
type Completed struct {
	State      ci.State      `json:"state"`
	Conclusion ci.Conclusion `json:"conclusion,omitempty"`
}

// HandOver is the body of POST /v1/runner/hand-over: the runner gives the job
// back and proves that its sandbox has ended.
type HandOver struct {
	RequestID string       `json:"request_id"`
	Reason    ci.Reason    `json:"reason"` // runner_shutdown or runner_refused
	Detail    string       `json:"detail,omitempty"`
	Evidence  Evidence     `json:"evidence"`
	Steps     []StepUpdate `json:"steps,omitempty"`
	Streams   []StreamEnd  `json:"streams,omitempty"`
}

// Occupancy is the body of POST /v1/runner/occupancy: attempts of this runner,
// also past ones, whose sandbox has ended.
type Occupancy struct {
	Session    ci.SessionID `json:"session"`
	Terminated []AttemptRef `json:"terminated"`
}

// Drain is the body of POST /v1/runner/drain.
type Drain struct {
	Session ci.SessionID `json:"session"`
	// Gone also ends the session: the runner's process is about to exit and
	// holds no lease.
	Gone bool `json:"gone,omitempty"`
}

// Watch is the body of POST /v1/runner/watch. Its answer is a hint, never an
// order: what became of a lease is said by the heartbeat that follows.
type Watch struct {
	Session ci.SessionID `json:"session"`
	Wait    ci.Duration  `json:"wait"` // how long the server may hold the poll
}

// Watched answers Watch with 200.
type Watched struct {
	// Renew asks for a heartbeat at once: a cancel or a drain waits to be told.
	Renew bool `json:"renew"`
}

// LogReply answers a log append: for each stream named in the request, the
// length of the contiguous prefix that is durable.
type LogReply struct {
	Streams []StreamEnd `json:"streams"`
	// Full says that the attempt's limit is reached: discard what follows.
	Full bool `json:"full,omitempty"`
}

// NewArtifact is the body of POST /v1/runner/artifacts.
type NewArtifact struct {
	RequestID string `json:"request_id"`
	Name      string `json:"name"`
	Size      int64  `json:"size"`
	Digest    string `json:"digest"` // sha256:hex of the whole archive
	Files     int    `json:"files"`
	Bytes     int64  `json:"bytes"` // before compression
}

// ArtifactSession answers NewArtifact.
type ArtifactSession struct {
	ID       string `json:"id"`
	PartSize int64  `json:"part_size"`
	// Stored lists parts that the store already holds (a resumed upload).
	Stored []ArtifactPart `json:"stored,omitempty"`
	Sealed bool           `json:"sealed,omitempty"`
}

// ArtifactPart names one part.
type ArtifactPart struct {
	Number int    `json:"number"`
	Size   int64  `json:"size"`
	Digest string `json:"digest"`
	ETag   string `json:"etag,omitempty"`
}

// SignParts is the body of POST /v1/runner/artifacts/{id}/parts: ask for URLs.
type SignParts struct {
	Parts []ArtifactPart `json:"parts"`
}

// SignedURL is a request that the runner may make without its credential.
type SignedURL struct {
	Method string            `json:"method"`
	URL    string            `json:"url"`
	Header map[string]string `json:"header,omitempty"`
}

// SignedParts answers SignParts in the order of the request.
type SignedParts struct {
	URLs []SignedURL `json:"urls"`
}

// SealArtifact is the body of POST /v1/runner/artifacts/{id}/seal.
type SealArtifact struct {
	Parts []ArtifactPart `json:"parts"`
}
