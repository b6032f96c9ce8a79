package sim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
	"forgeci/internal/workflow"
)

// config says what one simulation does.
type config struct {
	seed  uint64
	steps int
	// drop and calm are steps that are left out, and steps without faults.
	drop, calm map[int]bool
	// from is the first step that is left out with all behind it, 0 = none.
	from int
	// history keeps a line per event.
	history bool
	// sabotage, when set, breaks something in a step, to test the simulation.
	sabotage func(*world)
}

// violation is a broken promise; it ends the simulation.
type violation struct {
	invariant string
	detail    string
	step      int
}

func (v *violation) Error() string {
	return fmt.Sprintf("%s broken in step %d: %s", v.invariant, v.step, v.detail)
}

// result is what a simulation came to.
type result struct {
	ran       int            // steps, also those in which everything heals
	drawn     int            // steps in which things go wrong
	kinds     map[string]int // faults by kind
	hash      string
	violation *violation
	lines     []string       // the history
	pairs     map[string]int // state pairs reached
	rejects   map[ci.Reject]int
	events    map[string]int // of sometimes
	merges    int            // transactions that merged several calls
	simulated time.Duration
	busy      bool // stuck: not everything ended in time
}

func (r result) faults() int {
	n := 0
	for _, k := range r.kinds {
		n += k
	}
	return n
}

// org is a tenant as the simulation knows it.
type org struct {
	id    ci.OrgID
	repo  ci.RepoID
	limit int64
	seq   int64 // of the trail, as far as it has been followed
	chain string
}

// node is one server process over the shared database.
type node struct {
	w     *world
	index int
	e     *engine.Engine // nil while it is down
	files *artifact.Service
	logs  *logs.Service
	clock clock // monotonic, of this process
	yield func(struct{}) bool
	swept int64
}

type world struct {
	config
	result
	ctx   context.Context
	store *store.Store
	blobs *memory

	now   int64 // true time, microseconds
	db    clock // the database's
	fair  clock // the faster of true time and the database's without its great jumps
	moved int64 // sum of the shifts that have been stored
	known int64 // the same when the last step had ended
	// commits counts transactions that were stored; movedAt and followedAt are its
	// values when moved was read and when the rows were compared.
	commits, movedAt, followedAt int
	followedDB                   int64   // database time when the rows were last compared
	stamps                       []int64 // database time of each commit

	step int
	rng  *rand.Rand // of the step
	frng *rand.Rand // of the step's faults
	ids  *rand.ChaCha8
	sum  hash.Hash

	plan *fault // what goes wrong in this step's transactions
	// storePlan is what goes wrong with this step's use of the object store.
	storePlan *storeFault
	healing   bool        // the second part: nothing goes wrong any more
	serving   *node       // whose call is being executed
	open      []*inFlight // calls that are being executed, of one node

	orgs    []*org
	nodes   []*node
	runners []*runner
	net     []*call
	calls   int
	mirror  mirror
}

// fault is one thing that goes wrong at one point of the step's transactions.
type fault struct {
	point store.Point
	nth   int
	kind  string
	slow  int64
}

// crash is what a node's end looks like from inside.
type crash struct{}

func newWorld(c config) (*world, error) {
	w := &world{config: c, ctx: context.Background(), sum: sha256.New(), blobs: newMemory()}
	w.result = result{kinds: map[string]int{}, pairs: map[string]int{}, rejects: map[ci.Reject]int{}, events: map[string]int{}}
	var key [32]byte
	copy(key[:], fmt.Sprintf("forgeci simulation %d", c.seed))
	w.ids = rand.NewChaCha8(key)
	w.step = -1
	w.sources()
	w.db = clock{base: epochUS, rate: 1}
	w.fair = w.db
	// The object store has a clock of its own.
	w.blobs.now = func() time.Time { return time.UnixMicro(epochUS + w.now) }
	w.blobs.fail = w.storeFails
	w.mirror = newMirror()
	s, err := store.Open(w.ctx, store.Options{URL: "sqlite::memory:", Now: w.dbNow, Log: quiet(), Fault: w.hook})
	if err != nil {
		return nil, err
	}
	w.store = s
	for i := range 2 + int(c.seed%2) {
		n := &node{w: w, index: i}
		w.nodes = append(w.nodes, n)
		if err := n.start(); err != nil {
			return nil, err
		}
	}
	for i, name := range []string{"default", "other"} {
		o, err := w.nodes[0].e.EnsureOrg(w.ctx, name)
		if err != nil {
			return nil, err
		}
		m := &org{id: o.ID}
		if i == 0 && c.seed%3 == 0 {
			m.limit = 1 + int64(c.seed%4)
		}
		w.orgs = append(w.orgs, m)
		err = s.Write(w.ctx, func(tx *store.Tx) error {
			if m.limit > 0 {
				if err := tx.SetOrgLimits(w.ctx, m.id, 1, m.limit); err != nil {
					return err
				}
			}
			repo, err := tx.EnsureRepo(w.ctx, ci.RepoID(w.newID(ci.PrefixRepo)), m.id, "local", "k", "local/x", w.dbNow())
			if err != nil {
				return err
			}
			m.repo = repo.ID
			return tx.InsertSource(w.ctx, m.id, store.Source{Digest: sourceDigest, BlobKey: "k", BlobDigest: sourceDigest, Size: 1}, w.dbNow())
		})
		if err != nil {
			return nil, err
		}
	}
	return w, w.hire()
}

// epochUS is when every simulation begins, by the clocks that tell a date.
const epochUS = 1_800_000_000_000_000

const sourceDigest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func (w *world) close() error { return w.store.Close() }

// sources sets the step's random sources: what one step draws does not depend on
// whether another is left out.
func (w *world) sources() {
	w.rng = rand.New(rand.NewPCG(w.seed, uint64(w.step)+1))
	w.frng = rand.New(rand.NewPCG(^w.seed, uint64(w.step)+1))
}

func (w *world) dbNow() int64 { return w.db.read(w.now) }

func (w *world) newID(prefix string) string { return w.idSource().New(prefix) }

func (w *world) idSource() ci.IDSource {
	return ci.IDSource{Now: func() time.Time { return time.UnixMicro(w.dbNow()) }, Rand: w.ids}
}

// pass lets time pass on all clocks.
func (w *world) pass(us int64) { w.now += us }

// tell adds an event to the history and to the trace.
func (w *world) tell(format string, a ...any) {
	line := fmt.Sprintf("%4d %9.3fs ", w.step, float64(w.now)/1e6) + fmt.Sprintf(format, a...)
	_, _ = io.WriteString(w.sum, line+"\n")
	if w.history {
		w.lines = append(w.lines, line)
	}
}

// bad ends the simulation.
func (w *world) bad(invariant, format string, a ...any) {
	panic(&violation{invariant: invariant, detail: fmt.Sprintf(format, a...), step: w.step})
}

// must ends the simulation when the model itself cannot go on.
func (w *world) must(err error) {
	if err != nil {
		w.bad("model", "%v", err)
	}
}

// wrong counts a fault.
func (w *world) wrong(kind string) { w.kinds[kind]++ }

// hook is what the database does at a point of a transaction.
func (w *world) hook(p store.Point) error {
	if p == store.PointCommitted {
		w.commits++
		w.stamps = append(w.stamps, w.dbNow())
	}
	f := w.plan
	if f == nil || w.serving == nil || f.point != p {
		return nil
	}
	if f.nth--; f.nth > 0 {
		return nil
	}
	w.plan = nil
	w.wrong(f.kind)
	w.tell("  fault: %s at %s", f.kind, p)
	switch f.kind {
	case "crash before commit", "crash behind commit", "crash":
		panic(crash{})
	case "lock wait":
		w.pass(f.slow)
		return nil
	case "overtaken":
		w.overtake()
		return nil
	case "deadlock":
		return store.ErrSerialization
	default:
		return ci.Errorf(ci.ErrUnavailable, "the database is not available; try again")
	}
}

// drawFault decides what goes wrong with the step's transactions.
func (w *world) drawFault() *fault {
	r := w.frng
	if w.healing || w.calm[w.step] || r.IntN(100) >= 17 {
		return nil
	}
	f := &fault{nth: 1 + r.IntN(3)}
	switch r.IntN(13) {
	default:
		f.point, f.kind = store.PointBegin, "overtaken"
	case 0, 1:
		f.point, f.kind = store.PointCommit, "failed, not stored"
	case 2, 3:
		f.point, f.kind = store.PointCommitted, "failed, but stored"
	case 4:
		f.point, f.kind = store.PointCommit, "deadlock"
	case 5:
		f.point, f.kind, f.slow = store.PointBegin, "lock wait", r.Int64N(ttlUS*3/2)
		if f.slow > ttlUS/2 && r.IntN(2) == 0 {
			f.slow /= 8
		}
	case 6:
		f.point, f.kind = store.PointRead, "read failed"
	case 7:
		f.point, f.kind = store.PointBegin, "crash"
	case 8:
		f.point, f.kind = store.PointCommit, "crash before commit"
	case 9:
		f.point, f.kind = store.PointCommitted, "crash behind commit"
	}
	switch {
	case f.kind == "overtaken": // what comes behind the first has no promise of its own
		f.nth = 1
	case f.point != store.PointRead:
		f.nth = 1 + r.IntN(2)
	}
	return f
}

// start begins a process life of the node.
func (n *node) start() error {
	w := n.w
	n.clock = clock{at: w.now, rate: 0.98 + w.rng.Float64()*0.04}
	jitter := rand.New(rand.NewPCG(w.seed, uint64(w.now)+uint64(n.index)))
	e, err := engine.New(w.ctx, engine.Config{
		Store: w.store, Log: quiet(), IDs: w.idSource(), LeaseTTL: ttl,
		Jitter:    jitter.Float64,
		Monotonic: func() time.Duration { return time.Duration(n.clock.read(w.now)) * time.Microsecond },
		EvalIf:    evalIf, Gather: n.gather,
	})
	if err != nil {
		return err
	}
	n.e = e
	n.logs = w.newLogs(n.e.Incarnation(), e.Monotonic, n.gather)
	n.files = artifact.New(artifact.Config{Store: w.store, Blob: w.blobs, Log: quiet(), Incarnation: e.Incarnation(), IDs: w.idSource()})
	return nil
}

func (n *node) stop() { n.e, n.files, n.logs, n.yield = nil, nil, nil, nil }

// gather parks the call that is being executed when it is one of a batch.
func (n *node) gather() {
	y := n.yield
	if y == nil {
		return
	}
	n.yield = nil
	if !y(struct{}{}) {
		panic(crash{})
	}
}

// serve runs f on the node; it reports whether the node ended in it.
func (n *node) serve(f func()) (crashed bool) {
	w := n.w
	was := w.serving
	w.serving = n
	defer func() {
		w.serving = was
		if p := recover(); p != nil {
			was := p
			if merged, ok := p.(*store.Panic); ok {
				was = merged.Value
			}
			if _, ok := was.(crash); !ok {
				panic(p)
			}
			crashed = true
			n.stop()
			w.tell("  node %d ended", n.index)
		}
	}()
	f()
	return false
}

// evalIf is the server's adapter between the engine's conditions and the
// workflow's.
func evalIf(expr string, c engine.Condition) (bool, error) {
	in := workflow.IfContext{Needs: map[string]workflow.Need{}, Inputs: c.Inputs, Matrix: c.Matrix}
	for key, r := range c.Needs {
		in.Needs[key] = workflow.Need{Conclusion: r.Conclusion, Outputs: r.Outputs, AllowFailure: r.Satisfied}
	}
	return workflow.EvalJobIf(expr, in)
}

// up returns a node that is up; it starts one when there is none.
func (w *world) up(r *rand.Rand) *node {
	var live []*node
	for _, n := range w.nodes {
		if n.e != nil {
			live = append(live, n)
		}
	}
	if len(live) == 0 {
		n := w.nodes[r.IntN(len(w.nodes))]
		w.restart(n)
		return n
	}
	return live[r.IntN(len(live))]
}

func (w *world) restart(n *node) {
	was := w.plan
	w.plan = nil
	w.must(n.start())
	w.plan = was
	w.mirror.nodeStarted()
	w.tell("node %d starts", n.index)
}

// read runs fn in a read transaction of the simulation's own.
func (w *world) read(fn func(*store.Tx) error) {
	w.aside(func() { w.must(w.store.Read(w.ctx, fn)) })
}

// aside runs what the simulation does for itself: nothing goes wrong in it.
func (w *world) aside(f func()) {
	was, plan, storePlan := w.serving, w.plan, w.storePlan
	w.serving, w.plan, w.storePlan = nil, nil, nil
	defer func() { w.serving, w.plan, w.storePlan = was, plan, storePlan }()
	f()
}

func (w *world) traceHash() string { return hex.EncodeToString(w.sum.Sum(nil)) }

// short makes identifiers readable in histories.
func short[T ~string](id T) string {
	s := string(id)
	if i := strings.LastIndexByte(s, '_'); i >= 0 && len(s) > i+7 {
		return s[:strings.IndexByte(s, '_')+1] + s[len(s)-6:]
	}
	return s
}
