package engine_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// world is one engine over one real database whose clock the test owns.
type world struct {
	t     *testing.T
	ctx   context.Context
	store *store.Store
	e     *engine.Engine
	now   *atomic.Int64 // database time
	mono  *atomic.Int64 // monotonic, microseconds
	org   ci.OrgID
	repo  ci.RepoID
	n     int
}

const ttl = 60 * time.Second

// databases are the two engines that every promise holds on.
func databases() map[string]func(*testing.T) string {
	return map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/forgeci.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	}
}

// onBoth runs a test on SQLite and PostgreSQL.
func onBoth(t *testing.T, f func(w *world)) {
	t.Helper()
	for name, url := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(newWorld(t, url(t)))
		})
	}
}

func newWorld(t *testing.T, url string) *world {
	t.Helper()
	return newWorldOver(t, store.Options{URL: url})
}

func newWorldOver(t *testing.T, o store.Options) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), now: &atomic.Int64{}, mono: &atomic.Int64{}}
	w.now.Store(1_800_000_000_000_000)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	o.Now, o.Log, o.MaxConns = w.now.Load, log, 8
	s, err := store.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	w.store = s
	w.e = w.engine(log)
	org, err := w.e.EnsureOrg(w.ctx, "default")
	if err != nil {
		t.Fatal(err)
	}
	w.org = org.ID
	w.write(func(tx *store.Tx) error {
		repo, err := tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), w.org, "local", "k", "local/x", w.now.Load())
		w.repo = repo.ID
		if err != nil {
			return err
		}
		return tx.InsertSource(w.ctx, w.org, store.Source{Digest: digest, BlobKey: "k", BlobDigest: digest, Size: 1}, w.now.Load())
	})
	return w
}

const digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

// engine makes another server node over the same database.
func (w *world) engine(log *slog.Logger) *engine.Engine {
	e, err := engine.New(w.ctx, engine.Config{
		Store: w.store, Log: log, LeaseTTL: ttl, Jitter: func() float64 { return 0 },
		Monotonic: func() time.Duration { return time.Duration(w.mono.Load()) * time.Microsecond },
		EvalIf:    func(expr string, c engine.Condition) (bool, error) { return expr == "always()", nil },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

func (w *world) write(f func(*store.Tx) error) {
	w.t.Helper()
	if err := w.store.Write(w.ctx, f); err != nil {
		w.t.Fatal(err)
	}
}

// pass lets time pass on all clocks.
func (w *world) pass(d time.Duration) {
	w.now.Add(d.Microseconds())
	w.mono.Add(d.Microseconds())
}

func job(name string, needs ...string) ci.JobSpec {
	return ci.JobSpec{Name: name, Key: name, Needs: needs, Steps: []ci.StepSpec{{Name: "s", Run: "true"}}, Timeout: ci.DefaultJobTimeout}
}

func (w *world) submit(jobs ...ci.JobSpec) ci.RunID {
	w.t.Helper()
	id, err := w.e.Submit(w.ctx, engine.Submission{
		Org: w.org, Repo: w.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted,
		Event: "manual", Plan: ci.Plan{Workflow: "w", Path: ".forgeci.yaml", Digest: "d", Jobs: jobs},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// agent is a registered runner with a session.
type agent struct {
	w       *world
	who     engine.Identity
	session ci.SessionID
	labels  []string // declared when it opens a session
}

func (w *world) agent(name string, slots int) *agent { return w.agentOf(w.org, name, slots) }

// agentWith is a runner that declares labels.
func (w *world) agentWith(name string, slots int, labels ...string) *agent {
	w.t.Helper()
	a := w.agent(name, slots)
	a.labels = labels
	a.open(slots)
	return a
}

func (w *world) agentOf(org ci.OrgID, name string, slots int) *agent {
	w.t.Helper()
	w.n++
	key := make([]byte, 32)
	copy(key, name)
	id, err := w.e.Register(w.ctx, org, "tester", []string{"*"}, protocol.Register{Name: name, PublicKey: key}, name+string(rune('a'+w.n)))
	if err != nil {
		w.t.Fatal(err)
	}
	a := &agent{w: w, who: engine.Identity{Runner: id, Org: org}}
	a.open(slots)
	return a
}

func (a *agent) open(slots int, terminated ...protocol.AttemptRef) {
	a.w.t.Helper()
	a.w.n++
	got, err := a.w.e.OpenSession(a.w.ctx, a.who, protocol.OpenSession{
		RequestID: itoa(a.w.n), Protocol: 1, Slots: slots,
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}, Labels: a.labels}, Terminated: terminated,
		After: a.session,
	})
	if err != nil {
		a.w.t.Fatal(err)
	}
	a.session = got.Session
}

func itoa(n int) string {
	return "req-" + string(rune('A'+n/26/26%26)) + string(rune('A'+n/26%26)) + string(rune('A'+n%26))
}

// claim asks once; nil when there is nothing.
func (a *agent) claim() *protocol.Ticket {
	a.w.t.Helper()
	a.w.n++
	t, err := a.w.e.Claim(a.w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: itoa(a.w.n)})
	if err != nil {
		a.w.t.Fatal(err)
	}
	return t
}

func (a *agent) mustClaim() *protocol.Ticket {
	a.w.t.Helper()
	t := a.claim()
	if t == nil {
		a.w.t.Fatal("nothing to claim")
	}
	return t
}

func (a *agent) hold(ref ci.LeaseRef) engine.Held {
	a.w.t.Helper()
	h, err := a.w.e.Hold(a.w.ctx, a.who, ref, "test", engine.WhileCancelling)
	if err != nil {
		a.w.t.Fatal(err)
	}
	return h
}

func (a *agent) phase(ref ci.LeaseRef, p ci.Phase) {
	a.w.t.Helper()
	if err := a.w.e.SetPhase(a.w.ctx, a.hold(ref), protocol.SetPhase{RequestID: "p", Phase: p}); err != nil {
		a.w.t.Fatal(err)
	}
}

func success() protocol.Complete {
	return protocol.Complete{
		RequestID: "done", Conclusion: ci.ConclusionSuccess, SourceDigest: digest,
		Evidence: protocol.Evidence{Terminated: true, How: "cgroup"},
	}
}

func failure(exit int) protocol.Complete {
	c := success()
	c.Conclusion, c.Reason, c.ExitCode = ci.ConclusionFailed, ci.ReasonExit, &exit
	return c
}

func (a *agent) complete(ref ci.LeaseRef, req protocol.Complete) protocol.Completed {
	a.w.t.Helper()
	got, err := a.w.e.Complete(a.w.ctx, a.hold(ref), req)
	if err != nil {
		a.w.t.Fatal(err)
	}
	return got
}

func (w *world) run(id ci.RunID) (r store.Run) {
	w.t.Helper()
	w.write(func(tx *store.Tx) (err error) {
		r, _, err = tx.Run(w.ctx, id)
		return err
	})
	return r
}

func (w *world) job(run ci.RunID, name string) store.Job {
	w.t.Helper()
	for _, j := range w.jobs(run) {
		if j.Name == name {
			return j
		}
	}
	w.t.Fatalf("no job %s", name)
	return store.Job{}
}

func (w *world) jobs(run ci.RunID) (js []store.Job) {
	w.t.Helper()
	w.write(func(tx *store.Tx) (err error) {
		js, err = tx.JobsOfRun(w.ctx, run)
		return err
	})
	return js
}

func (w *world) wantRun(id ci.RunID, s ci.State, c ci.Conclusion, reason ci.Reason) {
	w.t.Helper()
	if r := w.run(id); r.State != s || r.Conclusion != c || r.Reason != reason {
		w.t.Errorf("run is %s/%s (%s), want %s/%s (%s)", r.State, r.Conclusion, r.Reason, s, c, reason)
	}
}

func (w *world) wantJob(run ci.RunID, name string, s ci.State, c ci.Conclusion, reason ci.Reason) {
	w.t.Helper()
	if j := w.job(run, name); j.State != s || j.Conclusion != c || j.Reason != reason {
		w.t.Errorf("job %s is %s/%s (%s: %s), want %s/%s (%s)", name, j.State, j.Conclusion, j.Reason, j.Detail, s, c, reason)
	}
}
