package reader_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

const (
	ttl    = 60 * time.Second
	digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
)

// world is a database that a real engine writes and the reader reads; the test
// owns its clock.
type world struct {
	t     *testing.T
	ctx   context.Context
	store *store.Store
	now   *atomic.Int64 // microseconds, of the database and of every node
	n     int
	// Of the tenant that most tests are about.
	e *engine.Engine
	r *reader.Reader
	tenant
}

// tenant is an organisation with a repository and somebody who looks.
type tenant struct {
	auth.Viewer
	repo ci.RepoID
}

// onBoth runs a test on SQLite and PostgreSQL.
func onBoth(t *testing.T, f func(w *world)) {
	t.Helper()
	for name, url := range map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/forgeci.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(newWorld(t, url(t)))
		})
	}
}

func newWorld(t *testing.T, url string) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), now: &atomic.Int64{}}
	w.now.Store(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixMicro())
	s, err := store.Open(w.ctx, store.Options{URL: url, Now: w.now.Load, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	w.store = s
	w.e, w.r = w.node()
	w.tenant = w.newTenant("default")
	return w
}

// node is a server node over the database.
func (w *world) node() (*engine.Engine, *reader.Reader) {
	w.t.Helper()
	e, err := engine.New(w.ctx, engine.Config{
		Store: w.store, Log: slog.New(slog.DiscardHandler), LeaseTTL: ttl, Jitter: func() float64 { return 0 },
		Monotonic: func() time.Duration { return time.Duration(w.now.Load()) * time.Microsecond },
		// Runs are made a millisecond apart (submitAs), so that their IDs have an order.
		IDs:    ci.IDSource{Now: func() time.Time { return time.UnixMicro(w.now.Load()) }},
		EvalIf: func(expr string, _ engine.Condition) (bool, error) { return expr == "always()", nil },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	files := artifact.New(artifact.Config{Store: w.store, Log: slog.New(slog.DiscardHandler)})
	return e, reader.New(w.store, e, files)
}

func (w *world) newTenant(name string) tenant {
	w.t.Helper()
	org, err := w.e.EnsureOrg(w.ctx, name)
	if err != nil {
		w.t.Fatal(err)
	}
	t := tenant{Viewer: auth.Viewer{Org: org.ID, Actor: name, Admin: true}}
	t.repo = w.ensureRepo(t, name)
	w.write(func(tx *store.Tx) error {
		return tx.InsertSource(w.ctx, org.ID, store.Source{Digest: digest, BlobKey: name, BlobDigest: digest, Size: 1}, w.now.Load())
	})
	return t
}

// newRepo returns the tenant with another repository.
func (w *world) newRepo(name string) tenant { return tenant{w.Viewer, w.ensureRepo(w.tenant, name)} }

func (w *world) ensureRepo(t tenant, name string) (id ci.RepoID) {
	w.t.Helper()
	w.write(func(tx *store.Tx) error {
		repo, err := tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), t.Org, "local", name, "local/"+name, w.now.Load())
		id = repo.ID
		return err
	})
	return id
}

func (w *world) write(f func(*store.Tx) error) {
	w.t.Helper()
	if err := w.store.Write(w.ctx, f); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) pass(d time.Duration) { w.now.Add(d.Microseconds()) }

func (w *world) sweep() {
	w.t.Helper()
	if err := w.e.Sweep(w.ctx, true); err != nil {
		w.t.Fatal(err)
	}
}

// lose lets the runners' leases expire.
func (w *world) lose() {
	w.t.Helper()
	w.pass(ttl + time.Second)
	w.sweep()
}

func job(name string, needs ...string) ci.JobSpec {
	return ci.JobSpec{Name: name, Key: name, Needs: needs, Steps: []ci.StepSpec{{Name: "s", Run: "true"}}, Timeout: ci.DefaultJobTimeout}
}

func (w *world) submit(jobs ...ci.JobSpec) ci.RunID { return w.submitAs(w.tenant, "", jobs...) }

// submitAs makes a run of a tenant; commit is also what its branch is named after.
func (w *world) submitAs(t tenant, commit string, jobs ...ci.JobSpec) ci.RunID {
	w.t.Helper()
	w.pass(time.Millisecond)
	id, err := w.e.Submit(w.ctx, engine.Submission{
		Org: t.Org, Repo: t.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted, Event: "manual", CommitSHA: commit,
		Plan: ci.Plan{Workflow: "w", Path: ".forgeci.yaml", Digest: "d", Jobs: jobs, Inputs: map[string]string{"suite": "full"}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// agent is a runner.
type agent struct {
	w       *world
	e       *engine.Engine
	who     engine.Identity
	session ci.SessionID
	labels  []string
}

func (w *world) agent(name string, slots int, labels ...string) *agent {
	return w.agentOf(w.tenant, name, slots, labels...)
}

func (w *world) agentOf(t tenant, name string, slots int, labels ...string) *agent {
	w.t.Helper()
	key := make([]byte, 32)
	copy(key, name)
	id, err := w.e.Register(w.ctx, t.Org, "tester", []string{"*"}, protocol.Register{Name: name, PublicKey: key}, string(t.Org)+name)
	if err != nil {
		w.t.Fatal(err)
	}
	a := &agent{w: w, e: w.e, who: engine.Identity{Runner: id, Org: t.Org}, labels: labels}
	a.open(slots)
	return a
}

func (a *agent) open(slots int, ended ...protocol.AttemptRef) {
	a.w.t.Helper()
	got, err := a.e.OpenSession(a.w.ctx, a.who, protocol.OpenSession{
		RequestID: a.w.request(), Protocol: 1, Slots: slots, Version: "0.1.0", Terminated: ended, After: a.session,
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}, Labels: a.labels},
	})
	if err != nil || got.Session == "" {
		a.w.t.Fatalf("%+v, %v", got, err)
	}
	a.session = got.Session
}

func (w *world) request() string { w.n++; return fmt.Sprintf("req-%08d", w.n) }

func (a *agent) claim() ci.LeaseRef {
	a.w.t.Helper()
	got, err := a.e.Claim(a.w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: a.w.request()})
	if err != nil || got == nil {
		a.w.t.Fatalf("nothing to claim: %v", err)
	}
	return got.Lease
}

// start claims and begins to execute.
func (a *agent) start() ci.LeaseRef {
	a.w.t.Helper()
	ref := a.claim()
	a.phase(ref, protocol.SetPhase{Phase: ci.PhaseExecuting})
	return ref
}

func (a *agent) held(ref ci.LeaseRef) engine.Held {
	a.w.t.Helper()
	h, err := a.e.Hold(a.w.ctx, a.who, ref, "test", engine.WhileCancelling)
	if err != nil {
		a.w.t.Fatal(err)
	}
	return h
}

func (a *agent) phase(ref ci.LeaseRef, req protocol.SetPhase) {
	a.w.t.Helper()
	req.RequestID = a.w.request()
	if err := a.e.SetPhase(a.w.ctx, a.held(ref), req); err != nil {
		a.w.t.Fatal(err)
	}
}

func (a *agent) renew(refs ...ci.LeaseRef) {
	a.w.t.Helper()
	if _, err := a.e.Renew(a.w.ctx, a.who, a.session, refs); err != nil {
		a.w.t.Fatal(err)
	}
}

// end completes an attempt; change makes it something other than a success.
func (a *agent) end(ref ci.LeaseRef, change ...func(*protocol.Complete)) {
	a.w.t.Helper()
	req := protocol.Complete{
		RequestID: a.w.request(), Conclusion: ci.ConclusionSuccess, SourceDigest: digest,
		Evidence: protocol.Evidence{Terminated: true, How: "cgroup"},
	}
	for _, c := range change {
		c(&req)
	}
	if _, err := a.e.Complete(a.w.ctx, a.held(ref), req); err != nil {
		a.w.t.Fatal(err)
	}
}

func failed(req *protocol.Complete) {
	exit := 3
	req.Conclusion, req.Reason, req.ExitCode, req.Detail = ci.ConclusionFailed, ci.ReasonExit, &exit, "step 1 (s) ended with exit code 3"
}

// Reads of the tenant that must succeed.

func (w *world) run(id ci.RunID) protocol.Run {
	w.t.Helper()
	return must(w, func() (protocol.Run, error) { return w.r.Run(w.ctx, w.Viewer, id) })
}

func (w *world) jobID(run ci.RunID, name string) ci.JobID {
	w.t.Helper()
	for _, j := range w.run(run).JobList {
		if j.Name == name {
			return j.ID
		}
	}
	w.t.Fatalf("run %s has no job %s", run, name)
	return ""
}

func (w *world) job(run ci.RunID, name string) protocol.Job {
	w.t.Helper()
	id := w.jobID(run, name)
	return must(w, func() (protocol.Job, error) { return w.r.Job(w.ctx, w.Viewer, id) })
}

func (w *world) explain(run ci.RunID, name string) protocol.Explanation {
	w.t.Helper()
	id := w.jobID(run, name)
	return must(w, func() (protocol.Explanation, error) { return w.r.Explain(w.ctx, w.Viewer, id) })
}

func (w *world) runner(a *agent) protocol.Runner {
	w.t.Helper()
	return must(w, func() (protocol.Runner, error) { return w.r.Runner(w.ctx, w.Viewer, a.who.Runner) })
}

func must[T any](w *world, read func() (T, error)) T {
	w.t.Helper()
	v, err := read()
	if err != nil {
		w.t.Fatal(err)
	}
	return v
}
