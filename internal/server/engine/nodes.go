package engine

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// nodes is the line to the other server nodes on the same database: what this one
// has committed and they may be waiting for. Everything said is a hint that saves
// somebody the rest of a sweep's interval; nothing depends on its arrival. A node
// that hears of no other says nothing but that it is there.
type nodes struct {
	e *Engine

	mu sync.Mutex
	// Guarded by mu.
	self      string                   // set when the line is opened first
	heard     map[string]time.Duration // when each node was heard of last, this one too
	pending   hints                    // not told yet
	interrupt context.CancelFunc       // ends the wait for a message; nil while nothing waits
}

// hints is what is told, and heard, at once.
type hints struct {
	// Node is who tells; that alone says that it is there.
	Node string `json:"n,omitempty"`
	// Jobs became claimable, and the node has too few polls of its own for them.
	Jobs []jobsHint `json:"j,omitempty"`
	// Sessions have a reason to renew at once, and do not wait for it at the node.
	Sessions []ci.SessionID `json:"s,omitempty"`
	// Runs have changed.
	Runs []runHint `json:"r,omitempty"`
	// Fleet says that there is a new session.
	Fleet bool `json:"f,omitempty"`
}

type jobsHint struct {
	Org   ci.OrgID `json:"o"`
	Shape string   `json:"s"`
	N     int      `json:"n"`
}

type runHint struct {
	Org ci.OrgID `json:"o"`
	Run ci.RunID `json:"r"`
}

func (h hints) items() int {
	n := len(h.Jobs) + len(h.Sessions) + len(h.Runs)
	if h.Fleet {
		n++
	}
	return n
}

const (
	// hintsMost bounds what waits to be told; what is more is left to the sweep.
	hintsMost = 4096
	// messageItems is how many items a message has at most, each of up to 90 bytes.
	messageItems = 80
	lineRetry    = time.Second
	lineTimeout  = 5 * time.Second
)

func newNodes(e *Engine) *nodes { return &nodes{e: e, heard: map[string]time.Duration{}} }

// tell hands hints over to be told while the caller goes on. When no other node is
// known it does nothing.
func (n *nodes) tell(h hints) {
	if h.items() == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.others(n.e.Monotonic()) || n.pending.items()+h.items() > hintsMost {
		return
	}
	p := &n.pending
	p.Jobs, p.Sessions, p.Runs = append(p.Jobs, h.Jobs...), append(p.Sessions, h.Sessions...), append(p.Runs, h.Runs...)
	p.Fleet = p.Fleet || h.Fleet
	if n.interrupt != nil {
		n.interrupt()
	}
}

// others reports whether another node was heard of lately. mu is held.
func (n *nodes) others(now time.Duration) bool {
	for id, at := range n.heard {
		if id != n.self && now-at <= n.silence() {
			return true
		}
	}
	return false
}

// silence is how long nothing may be heard of a node that is there.
func (n *nodes) silence() time.Duration { return 3 * ci.SweepEvery(n.e.LeaseTTL) }

// run keeps a line open until ctx ends.
func (n *nodes) run(ctx context.Context) {
	n.mu.Lock()
	n.self = n.e.IDs.New("node")
	n.mu.Unlock()
	for ctx.Err() == nil {
		if err := n.serve(ctx); err != nil && ctx.Err() == nil {
			n.e.Log.WarnContext(ctx, "the line to other nodes is broken; meanwhile sweeps find what they would tell", "error", err)
			pause(ctx, lineRetry)
		}
	}
}

// serve tells and listens until the line breaks or ctx ends.
func (n *nodes) serve(ctx context.Context) error {
	line, err := n.e.Store.OpenLine(ctx)
	if err != nil {
		return err
	}
	defer line.Close(context.WithoutCancel(ctx))
	// What was not heard of before.
	if err := errors.Join(n.e.loadFleet(ctx), n.e.wakeOpen(ctx)); err != nil {
		return err
	}
	every := ci.SweepEvery(n.e.LeaseTTL)
	var hello, came time.Duration // when to say again that this node is there; when that last came back
	came = n.e.Monotonic()
	for ctx.Err() == nil {
		now := n.e.Monotonic()
		if now-came > n.silence() {
			return errDeaf
		}
		out := n.take()
		if now >= hello {
			out, hello = append(out, hints{}), now+every
		}
		if err := n.say(ctx, line, out); err != nil {
			return err
		}
		h, err := n.listen(ctx, line, hello-now)
		if err != nil {
			return err
		}
		switch known := n.note(h.Node, n.e.Monotonic()); {
		case h.Node == "":
		case h.Node == n.self:
			came = n.e.Monotonic()
		default:
			if !known {
				hello = 0 // it does not know this one either
			}
			if err := n.follow(ctx, h); err != nil {
				return err
			}
		}
	}
	return nil
}

// errDeaf ends a line on which a node does not hear itself.
var errDeaf = errors.New("nothing comes back on it")

// take returns what is to be told, in messages.
func (n *nodes) take() (out []hints) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pending
	n.pending = hints{}
	for p.items() > 0 {
		h := hints{Fleet: p.Fleet}
		p.Fleet = false
		room := messageItems
		h.Jobs, p.Jobs, room = part(p.Jobs, room)
		h.Sessions, p.Sessions, room = part(p.Sessions, room)
		h.Runs, p.Runs, _ = part(p.Runs, room)
		out = append(out, h)
	}
	return out
}

func part[T any](all []T, most int) (first, rest []T, room int) {
	k := min(len(all), most)
	return all[:k], all[k:], most - k
}

func (n *nodes) say(ctx context.Context, line *store.Line, out []hints) error {
	for _, h := range out {
		h.Node = n.self
		b, err := json.Marshal(h)
		if err != nil {
			return err
		}
		limited, cancel := context.WithTimeout(ctx, lineTimeout)
		err = line.Tell(limited, string(b))
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// listen waits for a message, until there is something to tell, and at most for d.
func (n *nodes) listen(ctx context.Context, line *store.Line, d time.Duration) (h hints, err error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	n.mu.Lock()
	if n.pending.items() > 0 {
		cancel()
	}
	n.interrupt = cancel
	n.mu.Unlock()
	message, ok, err := line.Wait(ctx)
	n.mu.Lock()
	n.interrupt = nil
	n.mu.Unlock()
	if err != nil || !ok {
		return hints{}, err
	}
	if json.Unmarshal([]byte(message), &h) != nil {
		return hints{}, nil // of another version, or of nobody
	}
	return h, nil
}

// note notes that a node is there, and reports whether that was known.
func (n *nodes) note(id string, now time.Duration) (known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for other, at := range n.heard {
		if now-at > n.silence() {
			delete(n.heard, other)
		}
	}
	if id == "" {
		return true
	}
	_, known = n.heard[id]
	n.heard[id] = now
	return known
}

// follow does what hints suggest.
func (n *nodes) follow(ctx context.Context, h hints) error {
	e := n.e
	strange := func(j jobsHint) bool { return !e.fleet.knows(j.Shape) }
	if h.Fleet || slices.ContainsFunc(h.Jobs, strange) {
		if err := e.loadFleet(ctx); err != nil {
			return err
		}
	}
	for _, j := range h.Jobs {
		e.hub.wake(claimable{j.Org, j.Shape}, e.fleet.offersOf(j.Shape), j.N)
	}
	for _, r := range h.Runs {
		e.hub.runChanged(r.Org, r.Run)
	}
	if len(h.Sessions) > 0 {
		said := make(map[ci.SessionID]bool, len(h.Sessions))
		for _, id := range h.Sessions {
			said[id] = true
		}
		e.hub.signal(said)
	}
	return nil
}
