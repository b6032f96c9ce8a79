package ci

// State says where a run or a job is in its life. Runs and jobs share the
// words; a run is never ready.
type State string

// States, in the order in which they can follow each other.
const (
	// StateWaiting: not all needs are finished (job), or nothing has started (run).
	StateWaiting State = "waiting"
	// StateReady: a job that may be claimed, now or when its backoff or quota allows.
	StateReady State = "ready"
	// StateRunning: a job with an attempt that holds a lease; a run with a started job.
	StateRunning State = "running"
	// StateCancelling: cancellation is recorded, termination of every sandbox is not yet proven.
	StateCancelling State = "cancelling"
	// StateFinished: concluded; nothing about it changes any more.
	StateFinished State = "finished"
)

// Conclusion says how a finished run or job ended. It is empty in every state
// but finished.
type Conclusion string

// Conclusions.
const (
	// ConclusionSuccess: every step succeeded and every required output is bound.
	ConclusionSuccess Conclusion = "success"
	// ConclusionFailed: a step failed, or infrastructure used up the job's budget.
	ConclusionFailed Conclusion = "failed"
	// ConclusionTimedOut: the job's or a step's time limit ended it.
	ConclusionTimedOut Conclusion = "timed_out"
	// ConclusionCancelled: cancelled, and every sandbox is proven to have ended.
	ConclusionCancelled Conclusion = "cancelled"
	// ConclusionAborted: the runner was lost after user code may have run and no
	// policy allows another attempt: what happened outside is uncertain.
	ConclusionAborted Conclusion = "aborted"
	// ConclusionSkipped: its condition did not hold.
	ConclusionSkipped Conclusion = "skipped"
	// ConclusionCached: an earlier result with the same inputs was bound instead.
	ConclusionCached Conclusion = "cached"
)

// Succeeded reports whether dependents that ask for success may start.
func (c Conclusion) Succeeded() bool {
	return c == ConclusionSuccess || c == ConclusionCached
}

// Phase says how far an attempt has come. The server records a phase before the
// runner acts on it, so an earlier phase proves that nothing later has begun.
type Phase string

// Phases, in order.
const (
	PhaseClaimed    Phase = "claimed"
	PhasePreparing  Phase = "preparing"
	PhaseBuilding   Phase = "building"
	PhaseExecuting  Phase = "executing"
	PhaseFinalising Phase = "finalising"
)

// Order returns the position of the phase, from 0; -1 for an unknown word.
func (p Phase) Order() int {
	switch p {
	case PhaseClaimed:
		return 0
	case PhasePreparing:
		return 1
	case PhaseBuilding:
		return 2
	case PhaseExecuting:
		return 3
	case PhaseFinalising:
		return 4
	default:
		return -1
	}
}

// UserCodeMayHaveRun reports whether a process of the user may have been
// started in or before this phase (a Dockerfile RUN, a service, a step).
func (p Phase) UserCodeMayHaveRun() bool { return p.Order() >= PhaseBuilding.Order() }

// Reason is a code beside a state or conclusion that says why.
type Reason string

// Reasons.
const (
	ReasonNone              Reason = ""
	ReasonExit              Reason = "exit"               // a step ended with a non-zero exit code or a signal
	ReasonTimeout           Reason = "timeout"            // a time limit of the workflow ended it
	ReasonRunnerLost        Reason = "runner_lost"        // the lease expired
	ReasonRunnerShutdown    Reason = "runner_shutdown"    // the runner handed the job over while shutting down
	ReasonRunnerRestarted   Reason = "runner_restarted"   // a new session of the runner reported the old attempt ended
	ReasonRunnerRefused     Reason = "runner_refused"     // the runner's own admission refused the job before user code
	ReasonLeaseOmitted      Reason = "lease_omitted"      // the runner's heartbeats left the lease out for a full TTL
	ReasonOverdue           Reason = "overdue"            // the server ended the lease past timeout + grace + TTL
	ReasonPrepare           Reason = "prepare"            // preparation failed: source, workspace, image, restore
	ReasonArtifactMissing   Reason = "artifact_missing"   // a required artifact to restore is not there
	ReasonOutputMissing     Reason = "output_missing"     // a declared output was not produced
	ReasonOutputInvalid     Reason = "output_invalid"     // the output file or a declared output is not acceptable
	ReasonNeeds             Reason = "needs"              // a needed job did not succeed
	ReasonCondition         Reason = "condition"          // the job's if was false
	ReasonConditionError    Reason = "condition_error"    // the job's if could not be evaluated
	ReasonUser              Reason = "user"               // a person asked for it
	ReasonInfrastructure    Reason = "infrastructure"     // the run holds an aborted or dead-lettered job
	ReasonAttemptsExhausted Reason = "attempts_exhausted" // the budget or retry.max was used up by infrastructure
	ReasonPinned            Reason = "pinned"             // result taken over from the run that was retried
	ReasonRunnerFenced      Reason = "runner_fenced"      // an operator declared the runner's host dead
	ReasonJobFailed         Reason = "job_failed"         // a job of the run failed
	ReasonCancelled         Reason = "cancelled"          // the run was cancelled
	ReasonInternal          Reason = "internal"           // the runner met an error of its own
)

// Trust says whose code a run executes.
type Trust string

// Trust levels.
const (
	TrustTrusted   Trust = "trusted"
	TrustUntrusted Trust = "untrusted"
)

// Isolation is a class of sandbox, weakest first: process, sandbox, container,
// gvisor, vm.
type Isolation string

// Isolation classes.
const (
	IsolationProcess   Isolation = "process"
	IsolationSandbox   Isolation = "sandbox"
	IsolationContainer Isolation = "container"
	IsolationGVisor    Isolation = "gvisor"
	IsolationVM        Isolation = "vm"
)
