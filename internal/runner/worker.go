package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/workspace"
)

// worker works on one job under one lease: it prepares, executes, tears down,
// publishes and reports. Every phase is committed on the server before the
// worker acts on it, so that an earlier phase proves that nothing of the user's
// ran (SPEC decision 1).
type worker struct {
	r      *Runner
	ticket *protocol.Ticket
	lease  ci.LeaseRef
	held   *held
	owned  context.Context // as long as the lease; not of a call
	// working lasts until the runner is told to stop; not of a call.
	working context.Context
	log     *slog.Logger
	ship    *shipper
	system  *logStream // the runner's own lines about the attempt
	began   time.Time

	// notes are the runner's own lines about each step, made when needed.
	notes []*logStream

	dir      *workspace.Dir
	transfer *transfer
	// changeable and fixed are the environment of all steps.
	changeable, fixed []ci.KeyValue
	box               executor.Sandbox
	// verified is the manifest digest of the source that was materialised.
	verified  string
	steps     []protocol.StepUpdate
	evidence  protocol.Evidence
	outputs   map[string]string
	artifacts map[string]string
}

// result is how the attempt ends.
type result struct {
	conclusion ci.Conclusion
	reason     ci.Reason
	detail     string
	exitCode   *int
	// handOver, when set, gives the job back instead of concluding it.
	handOver ci.Reason
	// lost says that the lease is not ours any more: there is nobody to report to.
	lost bool
}

const maxDetail = 4 << 10

func failed(reason ci.Reason, err error) result {
	return result{conclusion: ci.ConclusionFailed, reason: reason, detail: err.Error()}
}

// because returns how the attempt ends when something could not be done: for the
// reason given, or for what ended the context.
func because(ctx context.Context, reason ci.Reason, err error) result {
	if ctx.Err() != nil {
		return ended(context.Cause(ctx))
	}
	return failed(reason, err)
}

// ended returns how the attempt ends when its context did.
func ended(err error) result {
	var why cause
	errors.As(err, &why)
	switch why {
	case causeLost, causeDeadline:
		return result{lost: true, detail: why.Error()}
	case causeCancelled:
		return result{conclusion: ci.ConclusionCancelled, reason: ci.ReasonCancelled, detail: why.Error()}
	case causeStop:
		return result{handOver: ci.ReasonRunnerShutdown, detail: why.Error()}
	case causeTimeout:
		return result{conclusion: ci.ConclusionTimedOut, reason: ci.ReasonTimeout, detail: err.Error()}
	default:
		return result{conclusion: ci.ConclusionFailed, reason: ci.ReasonInternal, detail: err.Error()}
	}
}

// work runs a claimed job to its end. When it returns nothing of the job is left
// on this host, or the runner was stopped and could not get rid of it.
func (r *Runner) work(life, working context.Context, c claimed) {
	t := c.ticket
	lease, lose := context.WithCancelCause(life)
	defer lose(nil)
	job, stop := context.WithCancelCause(lease)
	defer stop(nil)
	defer context.AfterFunc(working, func() { stop(context.Cause(working)) })()
	ttl := t.LeaseTTL.Std()
	if ttl <= 0 {
		ttl = c.limits.LeaseTTL.Std()
	}
	w := &worker{
		r: r, ticket: t, lease: t.Lease, owned: lease, working: working, began: time.Now(),
		held: &held{lease: t.Lease, ttl: ttl, lose: lose, stop: stop},
		log: r.log.With(slog.String(keyRun, string(t.Lease.Run)), slog.String(keyJob, string(t.Lease.Job)),
			slog.Int64(keyAttempt, t.Lease.Epoch)),
		evidence: protocol.Evidence{Terminated: true, How: "nothing started"},
		outputs:  map[string]string{}, artifacts: map[string]string{},
	}
	for i, step := range t.Job.Steps {
		w.steps = append(w.steps, protocol.StepUpdate{Index: i, Name: step.Name, State: ci.StateWaiting})
	}
	defer func() {
		if w.evidence.Terminated {
			r.buried(w.lease)
		}
	}()
	w.log.InfoContext(job, "job claimed", slog.String("name", t.Job.Name), slog.String("repo", t.Run.Repo))
	if err := r.keeper.hold(lease, w.held, c.granted); err != nil {
		w.log.WarnContext(job, "the claimed lease is not ours", slog.Any("error", err))
		w.vacate(life, working)
		return
	}
	defer r.keeper.release(w.held)

	w.ship = newShipper(shipping{
		limit: c.limits.LogLimit, delay: r.cfg.LogDelay, chunk: r.cfg.LogChunk,
		memory: defaultLogMemory, spool: r.cfg.LogSpool, inFlight: defaultLogInFlight,
	}, filepath.Join(r.cfg.DataDir, "log-"+string(t.Lease.Lease)+".spool"), w.log,
		func(ctx context.Context, body []byte) (protocol.LogReply, error) {
			return r.server.call().AppendLog(ctx, t.Lease, body)
		}, w.act)
	w.system = w.ship.stream(protocol.StepSystem, protocol.System)
	shipping, enough := context.WithCancel(lease)
	var ship sync.WaitGroup
	ship.Go(func() { w.ship.run(shipping) })
	defer context.AfterFunc(job, w.ship.relent)()

	res := w.guarded(func() result { return w.perform(job, c.unwanted) })
	w.terminate(job, life, working)
	if w.publishes(res) && job.Err() == nil {
		res = w.guarded(func() result { return w.finalise(job, res) })
	}
	w.report(lease, life, working, res)
	enough()
	ship.Wait()
	w.leave(life, working)
}

// guarded is the one recover of a job.
func (w *worker) guarded(f func() result) (res result) {
	defer func() {
		if p := recover(); p != nil {
			w.log.Error("defect of the runner", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			res = failed(ci.ReasonInternal, fmt.Errorf("a defect of the runner ended the job; its log says more"))
		}
	}()
	return f()
}

// call makes a lease call until it is answered; a refusal of the lease ends the
// job at once.
func (w *worker) call(ctx context.Context, f func(context.Context) error) error {
	err := insist(ctx, quick(), f)
	if why, refused := verdict(err); refused {
		w.act(why)
	}
	return err
}

// act ends the job because the server refused a call for its lease.
func (w *worker) act(why cause) {
	if why == causeCancelled {
		w.held.stop(why)
		return
	}
	w.held.lose(why)
}

func (w *worker) setPhase(ctx context.Context, in protocol.SetPhase) error {
	in.RequestID = w.r.poller.ids.New(ci.PrefixRequest)
	return w.call(ctx, func(ctx context.Context) error {
		return w.r.server.call().SetPhase(ctx, w.lease, in)
	})
}

// perform takes the job up to the end of its last step.
func (w *worker) perform(job context.Context, unwanted bool) result {
	if unwanted {
		return result{handOver: ci.ReasonRunnerShutdown, detail: "the job was given to a runner that is shutting down"}
	}
	box, err := w.admit()
	if err != nil {
		return result{handOver: ci.ReasonRunnerRefused, detail: err.Error()}
	}
	if err := w.setPhase(job, protocol.SetPhase{Phase: ci.PhasePreparing}); err != nil {
		return because(job, ci.ReasonPrepare, err)
	}
	if res, ok := w.prepared(job, box); !ok {
		w.system.line("preparation failed: " + res.detail)
		return res
	}
	return w.execute(job)
}

// prepared prepares, bounded by the job's time limit: a preparation that hangs
// must not outlive it. It returns how the attempt ends when that fails.
func (w *worker) prepared(job context.Context, with executor.Executor) (result, bool) {
	ctx, cancel := w.limited(job)
	defer cancel()
	err := w.prepare(ctx, with)
	if err == nil {
		return result{}, true
	}
	res := because(ctx, ci.ReasonPrepare, err)
	if errors.Is(err, errArtifactMissing) && ctx.Err() == nil {
		res.reason = ci.ReasonArtifactMissing
	}
	return res, false
}

// limited bounds a part of the job by the job's time limit.
func (w *worker) limited(job context.Context) (context.Context, context.CancelFunc) {
	d := w.timeout()
	return context.WithTimeoutCause(job, d, limit{cause: causeTimeout, whose: "the job's time limit", after: d})
}

func (w *worker) timeout() time.Duration {
	if d := w.ticket.Job.Timeout.Std(); d > 0 {
		return d
	}
	return ci.DefaultJobTimeout.Std()
}

func (w *worker) grace() time.Duration {
	if d := w.ticket.Grace.Std(); d > 0 {
		return d
	}
	return ci.DefaultGrace
}

// admit decides for itself whether this runner runs the job (SPEC EX-9), and
// with which executor.
func (w *worker) admit() (executor.Executor, error) {
	need := w.ticket.Job.RunsOn
	hello := w.r.hello()
	switch {
	case need.OS != "" && need.OS != hello.Offer.OS, need.Arch != "" && need.Arch != hello.Offer.Arch:
		return nil, ci.Errorf(ci.ErrConflict, "the job needs %s/%s, this runner is %s/%s",
			need.OS, need.Arch, hello.Offer.OS, hello.Offer.Arch)
	case len(need.Features) > 0:
		return nil, ci.Errorf(ci.ErrConflict, "this runner has no %s", strings.Join(need.Features, ", "))
	case w.ticket.Job.Image != nil:
		return nil, ci.Errorf(ci.ErrConflict, "this runner runs no images")
	}
	for _, e := range w.r.cfg.Executors {
		if need.Isolation != "" && e.Class() != need.Isolation {
			continue
		}
		if w.ticket.Run.Trust != ci.TrustTrusted && e.Class() == ci.IsolationProcess {
			continue
		}
		return e, nil
	}
	return nil, ci.Errorf(ci.ErrConflict, "this runner has no isolation class for a %s run that needs %q (it has %v)",
		w.ticket.Run.Trust, string(need.Isolation), hello.Offer.Isolation)
}

// terminate ends every process of the job and keeps the evidence. It repeats
// until nothing is left; a runner that is being stopped gives up after a while
// and leaves the rest to the sweep of its next start.
func (w *worker) terminate(job, life, working context.Context) {
	const triesAfterStop = 5
	var wait backoff
	for tries := 0; w.box != nil; {
		evidence, err := w.box.Close(job)
		w.evidence = evidence
		if err == nil && evidence.Terminated {
			w.box = nil
			break
		}
		w.log.ErrorContext(job, "the job's processes cannot be ended", slog.Any("error", err), slog.String("how", evidence.How))
		if working.Err() != nil {
			if tries++; tries == triesAfterStop {
				return
			}
		}
		if pause(life, wait.delay(nil)) != nil {
			return
		}
	}
	if n := w.evidence.Killed; n > 0 {
		w.system.line(fmt.Sprintf("%d processes outlived their step and were ended", n))
	}
}

// publishes says whether outputs are to be sent: those of a success are bound,
// those of a failure are there for people to read (SPEC decision 8).
func (w *worker) publishes(res result) bool {
	if len(w.ticket.Job.Publish) == 0 || w.dir == nil || !w.evidence.Terminated {
		return false
	}
	return slices.Contains([]ci.Reason{ci.ReasonNone, ci.ReasonExit, ci.ReasonTimeout, ci.ReasonOutputInvalid}, res.reason) &&
		res.handOver == "" && !res.lost && w.verified != ""
}

// finalise freezes and sends the outputs.
func (w *worker) finalise(job context.Context, res result) result {
	if err := w.setPhase(job, protocol.SetPhase{Phase: ci.PhaseFinalising, Steps: w.steps}); err != nil {
		return because(job, ci.ReasonInternal, err)
	}
	ctx, cancel := w.limited(job)
	defer cancel()
	success := res.conclusion == ci.ConclusionSuccess
	for _, out := range w.ticket.Job.Publish {
		id, err := w.publish(ctx, out)
		switch {
		case err == nil && id == "":
		case err == nil && success:
			w.artifacts[out.Name] = id
		case err == nil:
		case ctx.Err() != nil:
			if success || job.Err() != nil {
				return ended(context.Cause(ctx))
			}
			return res
		default:
			w.system.line(fmt.Sprintf("artifact %s: %v", out.Name, err))
			if success {
				w.artifacts = nil
				return failed(outputReason(err), fmt.Errorf("artifact %s: %w", out.Name, err))
			}
		}
	}
	return res
}

// outputReason says whether an output that cannot be published is the job's
// fault or not.
func outputReason(err error) ci.Reason {
	if errors.Is(err, errOutputMissing) {
		return ci.ReasonOutputMissing
	}
	switch ci.KindOf(err) {
	case ci.ErrInvalid, ci.ErrUnsafe, ci.ErrTooLarge, ci.ErrConflict:
		return ci.ReasonOutputInvalid
	default:
		return ci.ReasonInternal
	}
}
