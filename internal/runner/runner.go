// Package runner takes jobs from a server and runs them: it polls (poller),
// keeps leases alive (keeper), works on one job at a time in each slot (worker),
// ships its log (shipper) and moves its files (transfer).
//
// Nothing reaches a runner from outside: it asks. What it does for a job it does
// under the job's lease, and it ends the job by itself when it can no longer
// know that the lease is its own.
package runner

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/workspace"
)

// Config configures a Runner. Client, DataDir, Executors, Workspaces and Log
// are required; the zero value of everything else is a good default.
type Config struct {
	// Client reaches the server; its token is not used.
	Client *protocol.Client
	// RegistrationToken registers the runner when it has no credential yet or its
	// credential is refused. Without one, the credential in DataDir must do.
	RegistrationToken string
	// DataDir holds key, credential and spools; private to this runner.
	DataDir string
	// Name is shown to people; the default is the host's name.
	Name string
	// Slots is how many jobs run at once; the default is one per processor.
	Slots int
	// Labels and Size are what the runner declares (SPEC decision 13).
	Labels []string
	Size   string
	// Executors are the sandboxes on offer, at most one of each class.
	Executors []executor.Executor
	// Workspaces holds the jobs' directories. The caller closes it after Run.
	Workspaces *workspace.Root
	// JobUser owns what jobs may write; nil means the runner's own user. It is the
	// user that the executors run steps as, and can reach Workspaces.
	JobUser *executor.User
	// Version is the build's version.
	Version string
	// FlushTimeout bounds how long a finished job waits for its log to arrive
	// (SPEC decision 7); the default is 30 s.
	FlushTimeout time.Duration
	// LogDelay and LogChunk are how long and how much output is gathered before
	// it is sent; the defaults are 100 ms and 64 KiB.
	LogDelay time.Duration
	LogChunk int
	// LogSpool is how many bytes of one job's output wait on disk while the
	// server does not take them; the default is 256 MiB.
	LogSpool int64
	// MinFree is how much disk must be free to take a job; the default is 256 MiB.
	MinFree int64
	// KeepSources is how many bytes of sources are kept for other jobs; the default
	// is 1 GiB. They go when the disk is needed.
	KeepSources int64
	Log         *slog.Logger
}

// Runner runs jobs of one server.
type Runner struct {
	cfg    Config
	log    *slog.Logger
	server *link
	id     *identity
	keeper *keeper
	poller *poller
	// sources of earlier jobs.
	sources *sources

	draining, stopping chan struct{} // closed by Drain and Stop
	drain, stop        func()

	mu sync.Mutex
	// guarded by mu
	terminated []protocol.AttemptRef // to be reported with the next session
	alive      []protocol.AttemptRef // claimed, and not proven to have ended here
	records    []ci.LeaseRef         // of an earlier process, to be forgotten then
}

// New checks the configuration and reads or makes the runner's identity in the
// data directory. It starts nothing and asks the server nothing.
func New(cfg Config) (*Runner, error) {
	switch {
	case cfg.Client == nil || cfg.DataDir == "" || cfg.Log == nil || cfg.Workspaces == nil:
		return nil, errors.New("runner: Client, DataDir, Workspaces and Log are required")
	case len(cfg.Executors) == 0:
		return nil, ci.Errorf(ci.ErrInvalid, "a runner needs at least one executor")
	case cfg.Slots < 0:
		return nil, ci.Errorf(ci.ErrInvalid, "slots: %d is not a number of jobs", cfg.Slots)
	}
	if cfg.Slots == 0 {
		cfg.Slots = runtime.NumCPU()
	}
	if cfg.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return nil, ci.Errorf(ci.ErrInvalid, "this host has no name: name the runner").WithCause(err)
		}
		cfg.Name = host
	}
	def(&cfg.FlushTimeout, 30*time.Second)
	def(&cfg.LogDelay, defaultLogDelay)
	def(&cfg.LogChunk, defaultLogChunk)
	def(&cfg.LogSpool, defaultLogSpool)
	def(&cfg.MinFree, defaultMinFree)
	def(&cfg.KeepSources, defaultSources)
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "the data directory %s cannot be made", cfg.DataDir).WithCause(err)
	}
	if cfg.JobUser != nil {
		if err := cfg.Workspaces.Reachable(cfg.JobUser); err != nil {
			return nil, err
		}
	}
	r := &Runner{cfg: cfg, log: cfg.Log, server: newLink(cfg.Client)}
	id, err := openIdentity(cfg.DataDir, cfg.RegistrationToken, cfg.Name, cfg.Labels, r.server)
	if err != nil {
		return nil, err
	}
	r.id = id
	if r.sources, err = openSources(cfg.DataDir, cfg.KeepSources); err != nil {
		return nil, err
	}
	r.draining, r.stopping = make(chan struct{}), make(chan struct{})
	r.drain = sync.OnceFunc(func() { close(r.draining) })
	r.stop = sync.OnceFunc(func() { close(r.stopping) })
	asked := sync.OnceFunc(func() {
		r.log.Info("draining: the server asks for it")
		r.Drain()
	})
	r.keeper = newKeeper(r.server, id, r.log, asked)
	r.poller = &poller{
		server: r.server, id: id, log: r.log, free: cfg.Slots, done: make(chan struct{}, cfg.Slots),
		hello: r.hello, opened: r.opened, ready: r.ready, drained: asked,
	}
	return r, nil
}

func def[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// Drain makes the runner take nothing new; Run returns when the running jobs
// have ended. It may be called at any time and more than once.
func (r *Runner) Drain() { r.drain() }

// Stop ends the running jobs too (SIGTERM, grace, SIGKILL) and hands them over.
func (r *Runner) Stop() {
	r.drain()
	r.stop()
}

// Run works until it is drained, stopped or refused by the server, and returns
// when every job, process and goroutine of it has ended: nil after a drain or
// stop, else why the server will not have this runner. The end of ctx is Stop.
func (r *Runner) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.Stop)()
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	polling, drained := context.WithCancel(life)
	defer drained()
	working, stopped := context.WithCancelCause(life)
	defer stopped(nil)
	if err := r.sweep(life); err != nil {
		return err
	}
	var always, jobs sync.WaitGroup
	always.Go(func() { r.keeper.run(life) })
	always.Go(func() { r.keeper.listen(life) })
	always.Go(func() { after(life, r.draining, drained) })
	always.Go(func() { after(life, r.stopping, func() { stopped(causeStop) }) })
	r.poller.start = func(c claimed) {
		r.lives(c.ticket.Lease)
		jobs.Go(func() {
			defer func() { r.poller.done <- struct{}{} }()
			r.work(life, working, c)
		})
	}
	err := r.poller.run(polling)
	jobs.Wait()
	for _, e := range r.cfg.Executors {
		e.Close()
	}
	if session := r.poller.session.Load(); session != nil && err == nil {
		r.poller.tell(life, session.Session, true)
	}
	end()
	always.Wait()
	if err != nil {
		return err
	}
	r.log.InfoContext(ctx, "runner ended")
	return nil
}

// after calls f once the signal is given, unless ctx ends first.
func after(ctx context.Context, signal <-chan struct{}, f func()) {
	select {
	case <-signal:
		f()
	case <-ctx.Done():
	}
}

// sweep ends what an earlier process of this runner left behind and notes it for
// the first session.
func (r *Runner) sweep(ctx context.Context) error {
	for _, e := range r.cfg.Executors {
		if err := e.Check(ctx); err != nil {
			return ci.Errorf(ci.ErrUnavailable, "executor %s cannot work here", e.Class()).WithCause(err)
		}
		ended, err := e.Sweep(ctx)
		if err != nil {
			return ci.Errorf(ci.ErrUnavailable, "executor %s: leftovers of an earlier runner cannot be ended", e.Class()).WithCause(err)
		}
		r.ended(ended...)
	}
	// Nothing of any earlier attempt is left: all that are recorded have ended.
	for _, a := range r.cfg.Workspaces.Attempts() {
		r.ended(protocol.AttemptRef{Job: a.Lease.Job, Epoch: a.Lease.Epoch})
		r.records = append(r.records, a.Lease)
	}
	if err := r.sweepFiles(); err != nil {
		return err
	}
	return r.cfg.Workspaces.Sweep(ctx)
}

// sweepFiles removes bytes that an earlier process had under way in the data
// directory. The lock of the workspaces keeps any other process out of it.
func (r *Runner) sweepFiles() error {
	for _, pattern := range []string{"fetch-*", "artifact-*", "log-*.spool*", ".new-*"} {
		left, err := filepath.Glob(filepath.Join(r.cfg.DataDir, pattern))
		for i := 0; err == nil && i < len(left); i++ {
			err = os.Remove(left[i])
		}
		if err != nil {
			return ci.Errorf(ci.ErrUnavailable, "leftovers of an earlier runner cannot be removed from %s", r.cfg.DataDir).WithCause(err)
		}
	}
	return nil
}

// ended notes attempts whose sandbox is proven to have ended and whose end the
// server has not confirmed.
func (r *Runner) ended(attempts ...protocol.AttemptRef) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range attempts {
		if !slices.Contains(r.terminated, a) {
			r.terminated = append(r.terminated, a)
		}
	}
}

// reported forgets an attempt whose end the server knows.
func (r *Runner) reported(attempt protocol.AttemptRef) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.terminated = slices.DeleteFunc(r.terminated, func(a protocol.AttemptRef) bool { return a == attempt })
}

// lives notes a claimed attempt before anything is done for it, so that no session
// that is opened from now on rules it out.
func (r *Runner) lives(lease ci.LeaseRef) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.alive = append(r.alive, protocol.AttemptRef{Job: lease.Job, Epoch: lease.Epoch})
}

// buried forgets an attempt of which nothing is left and that was reported, or is
// to be reported as ended.
func (r *Runner) buried(lease ci.LeaseRef) {
	ref := protocol.AttemptRef{Job: lease.Job, Epoch: lease.Epoch}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.alive = slices.DeleteFunc(r.alive, func(a protocol.AttemptRef) bool { return a == ref })
}

// hello is what the runner says when it opens a session: what it offers, and
// what is left here of all that it was ever given. The sweep at the start ended
// everything of earlier processes; attempts of this one are alive until their
// worker has proven their end.
func (r *Runner) hello() protocol.OpenSession {
	offer := protocol.Offer{OS: runtime.GOOS, Arch: runtime.GOARCH, Size: r.cfg.Size, Labels: r.cfg.Labels}
	for _, e := range r.cfg.Executors {
		offer.Isolation = append(offer.Isolation, e.Class())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return protocol.OpenSession{
		Protocol: protocol.Version, Version: r.cfg.Version, Slots: r.cfg.Slots, Offer: offer,
		Terminated: slices.Clone(r.terminated), Swept: true, Alive: slices.Clone(r.alive),
	}
}

// opened forgets what the new session has reported.
func (r *Runner) opened(said protocol.OpenSession, s protocol.SessionOpened) {
	r.mu.Lock()
	records := r.records
	r.records = nil
	r.terminated = slices.DeleteFunc(r.terminated, func(a protocol.AttemptRef) bool { return slices.Contains(said.Terminated, a) })
	r.mu.Unlock()
	for _, lease := range records {
		if err := r.cfg.Workspaces.End(lease); err != nil {
			r.log.Warn("the record of an ended attempt cannot be removed", slog.Any("error", err))
		}
	}
	r.log.Info("session opened", slog.String(keyRunner, string(r.id.current().Runner)),
		slog.String("session", string(s.Session)), slog.Int("slots", r.cfg.Slots), slog.Duration("lease_ttl", s.LeaseTTL.Std()))
	if d := s.ClockDiffers.Std(); d != 0 {
		r.log.Warn("this host's clock differs from the server's; leases do not depend on it, certificates and builds do",
			slog.Duration("by", d))
	}
}
