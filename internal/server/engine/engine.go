// Package engine is the only writer of runs, jobs and attempts. Each use case is
// one file and one transaction: Submit, Claim, Renew, SetPhase, Complete,
// HandOver, Cancel, Expire, Retry, and what concerns runners' sessions.
//
// What it guarantees, whatever crashes, is delayed, repeated or races:
//   - a job has at most one current lease and at most one winning attempt;
//   - the epoch of a job only rises, and nothing is accepted under another epoch
//     than the current one;
//   - whatever is answered with success is committed;
//   - an attempt whose runner is lost is decided by phase and policy, never by a
//     guess (SPEC decision 1).
//
// Rows are locked in the order session, run, queue, lease, job, org; the
// database's time is read after the locks; decisions are asked of the pure
// packages dag and policy.
package engine

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/dag"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// Config is what an Engine needs.
type Config struct {
	Store *store.Store
	Log   *slog.Logger
	// IDs makes identifiers.
	IDs ci.IDSource
	// LeaseTTL is the one timing that is set; at least ci.MinLeaseTTL.
	LeaseTTL time.Duration
	// InfraBudget is how many attempts infrastructure may end; 0 means 3.
	InfraBudget int
	// Grace is the time from SIGTERM to SIGKILL; 0 means ci.DefaultGrace.
	Grace time.Duration
	// LogLimit bounds the log of an attempt in bytes; 0 means 1 GiB and a bit.
	LogLimit int64
	// Keep is how long callers' idempotency keys and ended sessions are kept at
	// least; 0 means DefaultKeep.
	Keep time.Duration
	// Alone says that no other node works on the database: none is listened to.
	Alone bool
	// Jitter returns a number in [0, 1); nil means math/rand.
	Jitter func() float64
	// Monotonic is a clock that never jumps, to notice jumps of the database's
	// clock; nil means this process's monotonic clock.
	Monotonic func() time.Duration
	// EvalIf evaluates a job's condition.
	EvalIf func(expr string, c Condition) (bool, error)
	// URL is where people reach the server, for links.
	URL string
	// Gather, when set and Run is not running, is called when a request of a hot
	// use case has been handed over and before all that have been are applied in
	// one transaction: the simulation, which has one thread, makes other calls in
	// it, so that merges are reached too. nil: each call is applied at once.
	Gather func()
}

// Condition is what a job's if may look at.
type Condition struct {
	Needs  map[string]dag.Result
	Inputs map[string]string
	Matrix []ci.KeyValue
}

// Engine runs the use cases. It is safe for concurrent use.
type Engine struct {
	Config
	incarnation string
	writer      *writer
	leases      *store.Reads[ci.JobID, leaseAt]
	sessions    *store.Reads[ci.SessionID, store.Session]
	looks       *store.Reads[look, bool]
	tickets     *store.Reads[ci.JobID, store.Ticket]
	renewals    *renewals
	hub         *hub
	fleet       *fleet
	clock       *clockGuard
	rejects     *rejects
	nodes       *nodes
	kick        chan struct{} // the sweep has something to look at now
}

// DefaultLogLimit bounds the log of one attempt.
const DefaultLogLimit = 2 << 30

// New prepares an engine over an open store: it makes the installation's rows on
// first use and loads what sessions are present. It starts nothing: calls work
// at once, each in its own transaction; Run adds merging and the sweep.
func New(ctx context.Context, c Config) (*Engine, error) {
	if c.LeaseTTL == 0 {
		c.LeaseTTL = ci.DefaultLeaseTTL
	}
	if c.LeaseTTL < ci.MinLeaseTTL {
		return nil, ci.Errorf(ci.ErrInvalid, "lease TTL %s is below the least of %s", c.LeaseTTL, ci.MinLeaseTTL)
	}
	if c.InfraBudget == 0 {
		c.InfraBudget = ci.DefaultInfraBudget
	}
	if c.Grace == 0 {
		c.Grace = ci.DefaultGrace
	}
	if c.LogLimit == 0 {
		c.LogLimit = DefaultLogLimit
	}
	if c.Keep == 0 {
		c.Keep = DefaultKeep
	}
	if c.Jitter == nil {
		c.Jitter = rand.Float64
	}
	if c.Monotonic == nil {
		start := time.Now()
		c.Monotonic = func() time.Duration { return time.Since(start) }
	}
	e := &Engine{Config: c, hub: newHub(), fleet: newFleet(c.Monotonic), rejects: newRejects(), kick: make(chan struct{}, 1)}
	e.clock = &clockGuard{ttl: c.LeaseTTL, mono: c.Monotonic}
	e.writer = newWriter(e)
	e.nodes = newNodes(e)
	e.leases, e.sessions = store.NewReads(e.leasesNow), store.NewReads(e.sessionsNow)
	e.looks, e.tickets = store.NewReads(e.claimable), store.NewReads(e.ticketRows)
	e.renewals = newRenewals(e)
	err := c.Store.Write(ctx, func(tx *store.Tx) error {
		if err := tx.InsertMeta(ctx, metaIncarnation, "1"); err != nil {
			return err
		}
		if err := tx.InsertMeta(ctx, metaShapes, ""); err != nil {
			return err
		}
		inc, err := tx.Meta(ctx, metaIncarnation)
		e.incarnation = inc
		return err
	})
	if err != nil {
		return nil, err
	}
	return e, e.loadFleet(ctx)
}

// metaIncarnation counts restores of the database from a backup.
const metaIncarnation = "incarnation"

// metaShapes is the row under which new shapes and new offers meet.
const metaShapes = "shapes"

// Incarnation is part of lease IDs and object keys; it rises when the database
// is restored from a backup.
func (e *Engine) Incarnation() string { return e.incarnation }

// EnsureOrg makes the organisation of an installation without users.
func (e *Engine) EnsureOrg(ctx context.Context, name string) (store.Org, error) {
	var org store.Org
	err := e.Store.Write(ctx, func(tx *store.Tx) error {
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		org, err = tx.EnsureOrg(ctx, ci.OrgID(e.IDs.New(ci.PrefixOrg)), name, now)
		return err
	})
	return org, err
}

// Run owns the engine's goroutines (the merging writer, renewals, the sweep, the
// tidying, the line to other nodes) and
// returns when ctx is done and all have ended. Calls that wait then get
// ErrUnavailable.
func (e *Engine) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { e.writer.run(ctx) })
	wg.Go(func() { e.renewals.run(ctx) })
	wg.Go(func() { e.sweepLoop(ctx) })
	wg.Go(func() { e.tidyLoop(ctx) })
	if !e.Alone && e.Store.HasLines() {
		wg.Go(func() { e.nodes.run(ctx) })
	}
	wg.Wait()
	e.hub.wakeAll()
}

// txn is a transaction with the effects that are applied at its end, under the
// organisations' locks, and after its commit.
type txn struct {
	*store.Tx
	e   *Engine
	now int64 // set by e.lockedNow

	audits  []store.Audit
	release map[ci.OrgID]int64 // admissions to give back
	ready   []readyJob
	reopen  map[ci.OrgID]bool     // look for held jobs
	wakes   map[claimable]int     // jobs that became claimable
	signals map[ci.SessionID]bool // sessions with a reason to renew at once
	lines   []func()              // log lines, written after commit
	shapes  map[string]bool       // interned by this transaction
	runs    map[ci.RunID]ci.OrgID // changed runs, told to watchers after commit
}

// transact runs fn as one transaction of the engine's own.
func (e *Engine) transact(ctx context.Context, fn func(context.Context, *txn) error) error {
	r := &request{alone: fn, done: make(chan struct{})}
	return e.writer.do(ctx, r)
}

// commit runs fn in a transaction, applies its collected effects and, after the
// commit, wakes polls and writes log lines.
func (e *Engine) commit(ctx context.Context, fn func(*txn) error) error {
	for {
		var t *txn
		err := e.Store.Write(ctx, func(tx *store.Tx) error {
			t = &txn{Tx: tx, e: e}
			if err := fn(t); err != nil {
				return err
			}
			return t.settle(ctx)
		})
		if jump, ok := asClockJump(err); ok {
			if err := e.shiftClock(ctx, jump); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		var elsewhere hints
		e.knowShapes(ctx, t.wakes)
		for c, n := range t.wakes {
			if left := e.hub.wake(c, e.fleet.offersOf(c.shape), n); left > 0 {
				elsewhere.Jobs = append(elsewhere.Jobs, jobsHint{c.org, c.shape, left})
			}
		}
		for id, org := range t.runs {
			e.hub.runChanged(org, id)
			elsewhere.Runs = append(elsewhere.Runs, runHint{org, id})
		}
		elsewhere.Sessions = e.hub.signal(t.signals)
		e.nodes.tell(elsewhere)
		for _, line := range t.lines {
			line()
		}
		return nil
	}
}

// knowTimeout bounds what is spent on a hint: without it, a sweep finds the jobs.
const knowTimeout = time.Second

// knowShapes learns who serves jobs whose shapes another node has made.
func (e *Engine) knowShapes(ctx context.Context, jobs map[claimable]int) {
	for c := range jobs {
		if !e.fleet.knows(c.shape) {
			ctx, cancel := context.WithTimeout(ctx, knowTimeout)
			defer cancel()
			if err := e.loadFleet(ctx); err != nil {
				e.Log.DebugContext(ctx, "a sweep will find who serves new jobs", "error", err)
			}
			return
		}
	}
}

// lockedNow reads the database's time for the transaction; call it when the
// locks are held.
func (t *txn) lockedNow(ctx context.Context) (int64, error) {
	if t.now != 0 {
		return t.now, nil
	}
	now, err := t.e.clock.read(ctx, t.Tx)
	if err != nil {
		return 0, err
	}
	t.now = now
	return now, nil
}

func (t *txn) changedRun(org ci.OrgID, id ci.RunID) {
	if t.runs == nil {
		t.runs = map[ci.RunID]ci.OrgID{}
	}
	t.runs[id] = org
}

// signal gives sessions a reason to renew at once, after the commit.
func (t *txn) signal(sessions ...ci.SessionID) {
	if t.signals == nil {
		t.signals = map[ci.SessionID]bool{}
	}
	for _, id := range sessions {
		t.signals[id] = true
	}
}

// say writes a log line after the commit.
func (t *txn) say(msg string, args ...any) {
	log := t.e.Log
	t.lines = append(t.lines, func() { log.Info(msg, args...) }) //nolint:sloglint // its callers give constants
}

// budget is the infrastructure budget.
func (e *Engine) retryPolicy(spec ci.JobSpec, run store.Run) *ci.RetryPolicy {
	if spec.Retry != nil {
		return spec.Retry
	}
	return decodeRetry(run.RetryDefault)
}

func used(j *store.Job) policy.Used {
	return policy.Used{Infra: int(j.InfraUsed), Granted: int(j.GrantedUsed)}
}

func (e *Engine) ttlUS() int64 { return e.LeaseTTL.Microseconds() }

// newLeaseID makes a lease ID of this incarnation.
func (e *Engine) newLeaseID() ci.LeaseID {
	return ci.LeaseID(e.IDs.New(ci.PrefixLease + "_" + e.incarnation))
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
