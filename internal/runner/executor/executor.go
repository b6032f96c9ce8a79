// Package executor runs the steps of one job in a sandbox and proves that
// nothing of it is left.
//
// An Executor is a class of isolation; executortest is the suite that every
// executor passes: the job's environment contract.
package executor

import (
	"context"
	"errors"
	"io"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Executor makes sandboxes of one isolation class.
type Executor interface {
	// Class is the isolation class this executor offers.
	Class() ci.Isolation
	// Check says whether the executor can work here; its error is shown to the operator.
	Check(ctx context.Context) error
	// Open makes the sandbox of one job. No user code runs before Sandbox.Run.
	Open(ctx context.Context, job Job) (Sandbox, error)
	// Sweep ends and removes what crashed runners with this data directory left
	// behind and returns the attempts it proved to have ended. It touches nothing
	// of a live runner. When the error is nil, nothing of any earlier attempt is
	// left, also of those that are not returned because their sandbox had been
	// closed, or never opened.
	Sweep(ctx context.Context) ([]protocol.AttemptRef, error)
	// Close ends and removes what the executor keeps between jobs. Every sandbox is
	// closed, and none is opened any more.
	Close()
}

// Job describes the sandbox to make.
type Job struct {
	Lease ci.LeaseRef
	// Workspace is the job's directory with the source in it, Home and Tmp its
	// HOME and TMPDIR; all absolute, private to the job, made by the caller.
	Workspace, Home, Tmp string
	// Steps is a directory for the executor's own files of each step (scripts),
	// which the job may read and not change; empty means Tmp.
	Steps string
	// Grace is the time from SIGTERM to SIGKILL.
	Grace time.Duration
	// Owned lasts as long as the lease; nil means for ever. Once it is done, what of
	// the job still runs is ended within Grace(Owned, Grace), also when it is being
	// ended with more time already: another runner may be given the job.
	Owned context.Context //nolint:containedctx // of the job, not of a call
}

// Lost is closed when the job is not this runner's any more.
func (j Job) Lost() <-chan struct{} {
	if j.Owned == nil {
		return nil
	}
	return j.Owned.Done()
}

// Sandbox is where the steps of one job run, one after the other. Its methods
// wait for each other: to stop a step, end the context of its Run, then Close.
type Sandbox interface {
	// Run runs one step and returns when its main process has ended, its output
	// is read or the drain grace is over. When ctx is done the step's processes
	// get SIGTERM, after Grace(ctx, Job.Grace) SIGKILL, and Run returns; processes
	// that earlier steps left in the background stay. The error is never for a
	// failing command: ci.ErrInvalid, ci.ErrTooLarge and ci.ErrUnsafe say that the
	// step cannot be run as it is written, every other kind is a failure of the
	// sandbox, after which only Close is of use.
	Run(ctx context.Context, step Step) (Result, error)
	// Close ends every process of the job (SIGTERM, grace, SIGKILL; daemonised
	// grandchildren too) and removes the sandbox. Its evidence says terminated
	// only when nothing is left. It may be called again to try again. A ctx that
	// is done, before or during the call, does not stop it: it only shortens the
	// grace to Grace(ctx, Job.Grace).
	Close(ctx context.Context) (protocol.Evidence, error)
}

// Step is one command to run.
type Step struct {
	Index int
	// Script is run by the shell: "sh" (sh -e), "bash" (bash --noprofile --norc
	// -e -o pipefail); empty means bash where there is one, else sh.
	Script, Shell string
	// Dir is the working directory, absolute, inside the workspace.
	Dir string
	// Env is the whole environment in order; later entries win. Nothing of the
	// runner's environment is added but what the contract lists.
	Env []ci.KeyValue
	// Stdout and Stderr get the output, each from one goroutine. A Write that
	// blocks blocks the step; an error discards what follows. No Write begins after
	// Run has returned; one that still blocks when Run is cancelled may go on.
	Stdout, Stderr io.Writer
}

// Result is how a step's main process ended.
type Result struct {
	ExitCode int    // 128+signal when a signal ended it
	Signal   string // "SIGKILL", empty when it exited
	// Duration is monotonic.
	Duration time.Duration
	// Leaked says that a background process still held the output when the drain
	// grace was over. What it writes later is read and discarded until Close.
	Leaked bool
	// Line is the line of the script that failed under errexit, from 1; 0 when the
	// shell cannot tell.
	Line int
}

// Grace returns the time from SIGTERM to SIGKILL once ctx is done: own, or less
// when the cause of ctx has a method Grace that says so. A job whose lease is
// lost must be gone sooner than one that is cancelled.
func Grace(ctx context.Context, own time.Duration) time.Duration {
	var hurry interface{ Grace() time.Duration }
	if errors.As(context.Cause(ctx), &hurry) {
		return min(own, hurry.Grace())
	}
	return own
}
