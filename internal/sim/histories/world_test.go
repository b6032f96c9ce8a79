package histories

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// start is what the database's clock shows at first.
const start = 1_800_000_000_000_000

const sourceDigest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

// world is one database whose clock the histories own, one after the other.
type world struct {
	t     *testing.T
	ctx   context.Context
	store *store.Store
	clock atomic.Int64
	wrong atomic.Bool // transactions fail now and then
	log   *slog.Logger
	made  int
}

func newWorld(t *testing.T, url string) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), log: slog.New(slog.DiscardHandler)}
	w.clock.Store(start)
	s, err := store.Open(w.ctx, store.Options{URL: url, Now: w.clock.Load, Log: w.log, MaxConns: 12, Fault: w.fault})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	w.store = s
	return w
}

// fault lets transactions fail: not stored, stored all the same, to be run again,
// and lets them hold their locks for a while.
func (w *world) fault(p store.Point) error {
	if !w.wrong.Load() {
		return nil
	}
	away := func(percent int) error {
		if rand.IntN(1000) >= percent*10 {
			return nil
		}
		return ci.Errorf(ci.ErrUnavailable, "the database is not available; try again")
	}
	switch p {
	case store.PointRead:
		if rand.IntN(3) == 0 {
			return away(1)
		}
	case store.PointBegin:
		return away(1)
	case store.PointCommit:
		switch n := rand.IntN(100); {
		case n < 5:
			return store.ErrSerialization
		case n < 20:
			hold(time.Duration(rand.Int64N(int64(2 * time.Millisecond))))
		}
		return away(2)
	case store.PointCommitted:
		return away(2)
	}
	return nil
}

func hold(d time.Duration) { <-time.After(d) }

// pass lets time pass, for the database and for every server.
func (w *world) pass(d time.Duration) { w.clock.Add(d.Microseconds()) }

// node is one server process over the database.
type node struct {
	e    *engine.Engine
	stop context.CancelFunc
	done chan struct{}
}

func (w *world) node() (*node, error) {
	e, err := engine.New(w.ctx, engine.Config{
		Store: w.store, Log: w.log, LeaseTTL: ttl, InfraBudget: budget, Grace: grace, Jitter: func() float64 { return 0 },
		Monotonic: func() time.Duration { return time.Duration(w.clock.Load()-start) * time.Microsecond },
		EvalIf:    func(expr string, _ engine.Condition) (bool, error) { return expr == "always()", nil },
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(w.ctx)
	n := &node{e: e, stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(n.done)
		e.Run(ctx)
	}()
	return n, nil
}

func (n *node) end() {
	n.stop()
	<-n.done
}

// operation is one entry of a history that is being recorded.
type operation struct {
	client    int
	in        input
	out       output
	call, ret int64
}

// history is one tenant's life, while it is being recorded.
type history struct {
	*spec
	w    *world
	seed uint64
	org  ci.OrgID
	repo ci.RepoID
	plan ci.Plan

	seq   atomic.Int64
	calls atomic.Int64 // numbers requests

	mu      sync.Mutex
	nodes   []*node
	ops     []operation
	hosts   [runners]*host
	retried [3]bool // somebody asked for that retry run
	known   [3]ci.RunID
}

// host is a runner as its goroutines know it; guarded by history.mu.
type host struct {
	who     engine.Identity
	session ci.SessionID
	claims  []protocol.Claim
	refs    []ci.LeaseRef // leases that it was given
	again   []func(*caller)
}

// newHistory makes a tenant with its runners and their first sessions.
func (w *world) newHistory(seed uint64) (*history, error) {
	w.made++
	rng := rand.New(rand.NewPCG(seed, 1))
	h := &history{spec: drawSpec(rng), w: w, seed: seed}
	for range 2 {
		n, err := w.node()
		if err != nil {
			return h, err
		}
		h.nodes = append(h.nodes, n)
	}
	e := h.nodes[0].e
	org, err := e.EnsureOrg(w.ctx, fmt.Sprintf("org%d", w.made))
	if err != nil {
		return h, err
	}
	h.org = org.ID
	err = w.store.Write(w.ctx, func(tx *store.Tx) error {
		repo, err := tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), h.org, "local", "k", "local/x", w.clock.Load())
		if err != nil {
			return err
		}
		h.repo = repo.ID
		return tx.InsertSource(w.ctx, h.org, store.Source{Digest: sourceDigest, BlobKey: "k", BlobDigest: sourceDigest, Size: 1}, w.clock.Load())
	})
	if err != nil {
		return h, err
	}
	for i := range h.hosts {
		name := fmt.Sprintf("r%d-%d", w.made, i)
		key := sha256.Sum256([]byte(name))
		id, err := e.Register(w.ctx, h.org, "people", []string{"*"}, protocol.Register{Name: name, PublicKey: key[:]}, hex.EncodeToString(key[:]))
		if err != nil {
			return h, err
		}
		h.hosts[i] = &host{who: engine.Identity{Runner: id, Org: h.org}}
		opened, err := h.nodes[i%2].e.OpenSession(w.ctx, h.hosts[i].who, h.opening("first"))
		if err != nil {
			return h, err
		}
		h.hosts[i].session = opened.Session
		h.first[i], h.runnerIDs[i] = opened.Session, id
	}
	for _, sp := range h.jobs {
		j := ci.JobSpec{
			Name: sp.name, Key: sp.name, Steps: []ci.StepSpec{{Name: "s", Run: "true"}}, Timeout: ci.Duration(sp.timeout),
			Retry: sp.retry, AllowFailure: sp.allow,
		}
		if sp.always {
			j.If = "always()"
		}
		for _, n := range sp.needs {
			j.Needs = append(j.Needs, h.jobs[n].name)
		}
		h.plan.Jobs = append(h.plan.Jobs, j)
	}
	h.plan.Workflow, h.plan.Path, h.plan.Digest = "w", ".forgeci.yaml", "d"
	return h, nil
}

func (sp *spec) opening(request string) protocol.OpenSession {
	return protocol.OpenSession{
		RequestID: request, Protocol: protocol.Version, Slots: sp.slots, Swept: true,
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
	}
}

// drawSpec draws a small workflow: one job, two siblings with one behind them, or
// a chain.
func drawSpec(rng *rand.Rand) *spec {
	sp := &spec{where: map[ci.JobID]place{}, slots: 1 + rng.IntN(2), retries: []bool{rng.IntN(2) == 0, rng.IntN(2) == 0}}
	sp.ids = make([]ci.RunID, 3)
	shape := [][][]int{{nil, nil, {0, 1}}, {nil, nil, {0, 1}}, {nil, {0}}, {nil, nil}, {nil}}[rng.IntN(5)]
	policies := []*ci.RetryPolicy{
		nil, nil,
		{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}, Line: 3},
		{Max: 2, On: []ci.Reason{ci.ReasonRunnerLost, ci.ReasonRunnerShutdown}, Exit: []int{75}, Line: 3},
		{Max: 2, On: []ci.Reason{ci.ReasonTimeout, ci.ReasonPrepare}, Exit: []int{75}, Line: 3},
	}
	for i, needs := range shape {
		sp.jobs = append(sp.jobs, jobSpec{
			name: string(rune('a' + i)), needs: needs, always: needs != nil && rng.IntN(3) == 0,
			allow: rng.IntN(5) == 0, timeout: 30 * time.Second, retry: policies[rng.IntN(len(policies))],
		})
	}
	return sp
}

// node returns one of the servers.
func (h *history) node(n int) *engine.Engine {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes[n%len(h.nodes)].e
}

// restart stops a server while its callers wait, and starts another in its place.
func (h *history) restart(n int) {
	fresh, err := h.w.node()
	if err != nil {
		return // the database is away: the old one goes on
	}
	h.mu.Lock()
	old := h.nodes[n%len(h.nodes)]
	h.nodes[n%len(h.nodes)] = fresh
	h.mu.Unlock()
	old.end()
}

// record makes a call and keeps what went in and out.
func (h *history) record(client int, in input, f func() (output, error)) output {
	call := h.seq.Add(1)
	in.low = h.w.clock.Load()
	out, err := f()
	out.high = h.w.clock.Load()
	ret := h.seq.Add(1)
	if err != nil {
		out = output{err: ci.KindOf(err), reject: ci.RejectOf(err), high: out.high}
		out.unknown = out.err == ci.ErrUnavailable || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
		if out.err == ci.ErrInternal && !out.unknown {
			h.w.t.Errorf("seed %d: %v: %v", h.seed, in, err)
		}
	}
	h.mu.Lock()
	h.ops = append(h.ops, operation{client, in, out, call, ret})
	h.mu.Unlock()
	return out
}
