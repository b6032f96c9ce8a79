package runner

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// hurried returns a context that ends after the limit, or sooner once the
// runner is being stopped.
func hurried(ctx, working context.Context, limit, stopping time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	release := context.AfterFunc(working, func() {
		t := time.AfterFunc(stopping, cancel)
		context.AfterFunc(ctx, func() { t.Stop() })
	})
	return ctx, func() { release(); cancel() }
}

// Time limits of reporting.
const (
	tellLimit   = 24 * time.Hour  // of the result; the lease is over sooner
	stopFlush   = 5 * time.Second // of the log, when the runner is being stopped
	stopTell    = 15 * time.Second
	stopRemove  = 5 * time.Second
	vacateLimit = 5 * time.Minute // of telling that a lost attempt has ended
	removeLimit = time.Hour       // of the workspace
)

// report flushes the log and tells the server how the attempt ended. It repeats
// until it is answered or the lease is lost.
func (w *worker) report(lease, life, working context.Context, res result) {
	if !w.evidence.Terminated {
		w.log.ErrorContext(lease, "the runner stops although processes of the job may be left")
		return
	}
	w.flush(lease, working)
	if res.lost || lease.Err() != nil {
		w.log.WarnContext(lease, "attempt abandoned", slog.Any("cause", context.Cause(lease)))
		w.vacate(life, working)
		return
	}
	if len(res.detail) > maxDetail {
		res.detail = strings.ToValidUTF8(res.detail[:maxDetail], "")
	}
	err := w.tell(lease, life, working, res)
	if ci.RejectOf(err) == ci.RejectCancelling && res.conclusion != ci.ConclusionCancelled {
		// The job was cancelled before its result was in: only this is accepted.
		res = ended(causeCancelled)
		err = w.tell(lease, life, working, res)
	} else if err != nil && !w.refused(err) && lease.Err() == nil && res.conclusion == ci.ConclusionSuccess {
		// The server holds the lease for ours and will not have the success.
		res = failed(ci.ReasonInternal, err)
		err = w.tell(lease, life, working, res)
	}
	if err != nil {
		w.log.WarnContext(lease, "result not accepted", slog.Any("error", err))
		w.vacate(life, working)
		return
	}
	w.log.InfoContext(lease, "job ended", slog.String("conclusion", string(res.conclusion)), slog.String("reason", string(res.reason)),
		slog.String("handed_over", string(res.handOver)), slog.Duration("after", time.Since(w.began)))
	w.forget()
}

func (w *worker) refused(err error) bool {
	_, refused := verdict(err)
	return refused
}

// flush waits, for a bounded time, until the log has arrived. What has not is a
// loss marker in the log, never a failed job (SPEC decision 7).
func (w *worker) flush(lease, working context.Context) {
	ctx, cancel := hurried(lease, working, w.r.cfg.FlushTimeout, stopFlush)
	defer cancel()
	if !w.ship.flush(ctx) && lease.Err() == nil {
		w.log.WarnContext(lease, "the end of the log did not arrive")
	}
}

// tell completes the attempt or hands it over, under one request ID. When the
// lease is over before an answer came, the same request is made once more: what
// was committed is answered also then.
func (w *worker) tell(lease, life, working context.Context, res result) error {
	id := w.r.poller.ids.New(ci.PrefixRequest)
	call := w.complete(id, res)
	if res.handOver != "" {
		call = w.giveBack(id, res)
	}
	ctx, cancelTell := hurried(lease, working, tellLimit, stopTell)
	defer cancelTell()
	err := insist(ctx, quick(), call)
	if ctx.Err() == nil {
		return err
	}
	once, cancel := context.WithTimeout(life, settleLimit)
	defer cancel()
	if again := call(once); again == nil {
		return nil
	}
	return err
}

func (w *worker) complete(id string, res result) func(context.Context) error {
	in := protocol.Complete{
		RequestID: id, Conclusion: res.conclusion, Reason: res.reason, Detail: res.detail, ExitCode: res.exitCode,
		Evidence: w.evidence, SourceDigest: w.verified, Steps: w.endedSteps(), Streams: w.ship.ends(),
		Duration: ci.Duration(max(time.Since(w.began), 0)),
	}
	if res.conclusion == ci.ConclusionSuccess {
		in.Outputs, in.Artifacts = w.outputs, w.artifacts
	}
	return func(ctx context.Context) error {
		_, err := w.r.server.call().Complete(ctx, w.lease, in)
		return err
	}
}

func (w *worker) giveBack(id string, res result) func(context.Context) error {
	in := protocol.HandOver{
		RequestID: id, Reason: res.handOver, Detail: res.detail, Evidence: w.evidence,
		Steps: w.endedSteps(), Streams: w.ship.ends(),
	}
	return func(ctx context.Context) error { return w.r.server.call().HandOver(ctx, w.lease, in) }
}

// endedSteps returns the steps as they are in the end: what never began is skipped.
func (w *worker) endedSteps() []protocol.StepUpdate {
	out := append([]protocol.StepUpdate(nil), w.steps...)
	for i := range out {
		switch out[i].State {
		case ci.StateFinished:
		case ci.StateRunning:
			out[i].State, out[i].Conclusion, out[i].Reason = ci.StateFinished, ci.ConclusionFailed, ci.ReasonInternal
		default:
			out[i].State, out[i].Conclusion = ci.StateFinished, ci.ConclusionSkipped
		}
	}
	return out
}

// vacate tells the server that an attempt whose lease is gone has ended here, so
// that its capacity is free again. What cannot be told now is told with the next
// session.
func (w *worker) vacate(life, working context.Context) {
	ref := protocol.AttemptRef{Job: w.lease.Job, Epoch: w.lease.Epoch}
	w.r.ended(ref)
	ctx, cancel := hurried(life, working, vacateLimit, settleLimit)
	defer cancel()
	err := insist(ctx, quick(), func(ctx context.Context) error {
		session := w.r.poller.session.Load()
		if session == nil {
			return errors.New("no session")
		}
		return w.r.server.call().Occupancy(ctx, protocol.Occupancy{
			Session: session.Session, Terminated: []protocol.AttemptRef{ref},
		})
	})
	if err != nil {
		w.log.WarnContext(ctx, "the end of the attempt could not be reported", slog.Any("error", err))
		return
	}
	w.r.reported(ref)
	w.forget()
}

// forget removes the durable record of an attempt whose end the server knows.
func (w *worker) forget() {
	if w.dir == nil {
		return
	}
	if err := w.r.cfg.Workspaces.End(w.lease); err != nil {
		w.log.Warn("the attempt's record cannot be removed", slog.Any("error", err))
	}
}

// leave removes the job's files, unless processes of it may be left: then the
// next start of the runner does.
func (w *worker) leave(life, working context.Context) {
	if err := w.ship.spool.remove(); err != nil {
		w.log.WarnContext(life, "the log's spool cannot be removed", slog.Any("error", err))
	}
	if w.dir == nil || !w.evidence.Terminated {
		return
	}
	ctx, cancel := hurried(life, working, removeLimit, stopRemove)
	defer cancel()
	if err := w.dir.Remove(ctx); err != nil {
		w.log.WarnContext(life, "the workspace cannot be removed", slog.Any("error", err))
	}
}
