package engine

import (
	"context"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// hub wakes long polls and watchers of runs. Wake-ups are hints: whoever waits
// also asks again by itself.
type hub struct {
	mu      sync.Mutex
	polls   map[*poll]bool
	watches map[*watch]bool
	// Of sessions: who waits for a reason to renew, and what nobody waited for.
	waiting map[ci.SessionID]chan struct{}
	unheard map[ci.SessionID]bool
	closed  bool
	closing chan struct{} // closed with it
}

type poll struct {
	org   ci.OrgID
	offer string
	claim store.ClaimKey
	woken chan claimable // capacity 1; the zero value is no hint
	deaf  bool           // guarded by hub.mu: its session cannot take a job now
}

// claimable names jobs that polls should hear of: a tenant's, of one shape. It is
// the hint that such a job is there, which goes from one poll to the next until one
// has looked for it.
type claimable struct {
	org   ci.OrgID
	shape string
}

type watch struct {
	org ci.OrgID
	run ci.RunID // "" = all of the organisation
	ch  chan ci.RunID
}

func newHub() *hub {
	return &hub{polls: map[*poll]bool{}, watches: map[*watch]bool{}, waiting: map[ci.SessionID]chan struct{}{}, unheard: map[ci.SessionID]bool{}, closing: make(chan struct{})}
}

// listen adds a poll. stop takes it out again and returns the hint that it had and
// did not look for, which somebody else waits for: pass it on.
func (h *hub) listen(org ci.OrgID, offer string, claim store.ClaimKey) (p *poll, stop func() claimable) {
	p = &poll{org: org, offer: offer, claim: claim, woken: make(chan claimable, 1)}
	h.mu.Lock()
	h.polls[p] = true
	if h.closed {
		p.woken <- claimable{} // the server is stopping: nobody waits any more
	}
	h.mu.Unlock()
	return p, func() claimable {
		h.mu.Lock()
		delete(h.polls, p)
		h.mu.Unlock()
		select {
		case hint := <-p.woken:
			return hint
		default:
			return claimable{}
		}
	}
}

// passOn gives a hint that was not looked for to another poll of whatever offer, at
// another node if there is none here. The zero value is no hint.
func (e *Engine) passOn(hint claimable) {
	if hint == (claimable{}) {
		return
	}
	if left := e.hub.wake(hint, e.fleet.offersOf(hint.shape), 1); left > 0 {
		e.nodes.tell(hints{Jobs: []jobsHint{{hint.org, hint.shape, left}}})
	}
}

// deafen takes a poll out of the hearing, because its session cannot take a job
// now, having no free slot; hear brings it back.
func (h *hub) deafen(p *poll) {
	h.mu.Lock()
	p.deaf = true
	h.mu.Unlock()
}

func (h *hub) hear(p *poll) {
	h.mu.Lock()
	p.deaf = false
	h.mu.Unlock()
}

// granted wakes the other polls of the same claim: who asked again because a
// connection broke gets the answer that went to the broken one.
func (h *hub) granted(claim store.ClaimKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.polls {
		if p.claim != claim {
			continue
		}
		select {
		case p.woken <- claimable{}:
		default:
		}
	}
}

// wake wakes up to n polls of the tenant's runners with one of the offers, those that
// serve the shape, and returns how many polls there were too few.
func (h *hub) wake(hint claimable, offers map[string]bool, n int) (left int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.polls {
		if n <= 0 {
			return 0
		}
		if p.deaf || p.org != hint.org || !offers[p.offer] {
			continue
		}
		select {
		case p.woken <- hint:
			n--
		default:
		}
	}
	return n
}

func (h *hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.closed = true
		close(h.closing)
	}
	for p := range h.polls {
		select {
		case p.woken <- claimable{}:
		default:
		}
	}
	for id, ch := range h.waiting {
		close(ch)
		delete(h.waiting, id)
	}
	for w := range h.watches {
		close(w.ch)
		delete(h.watches, w)
	}
}

// StopPolls answers open polls with nothing to do and ends watches: the server
// is stopping, and clients come back to another node or to its successor.
func (e *Engine) StopPolls() { e.hub.wakeAll() }

// Stopping is closed by StopPolls: whatever would last for ever ends.
func (e *Engine) Stopping() <-chan struct{} { return e.hub.closing }

// WatchRuns returns a channel of hints that a run of the organisation changed (""
// watches all of them). A slow reader loses hints, never blocks anybody; stop
// ends it. The channel is closed when the server stops.
func (e *Engine) WatchRuns(org ci.OrgID, id ci.RunID) (changes <-chan ci.RunID, stop func()) {
	w := &watch{org: org, run: id, ch: make(chan ci.RunID, 64)}
	e.hub.mu.Lock()
	if e.hub.closed {
		close(w.ch)
	} else {
		e.hub.watches[w] = true
	}
	e.hub.mu.Unlock()
	return w.ch, func() {
		e.hub.mu.Lock()
		delete(e.hub.watches, w)
		e.hub.mu.Unlock()
	}
}

func (h *hub) runChanged(org ci.OrgID, id ci.RunID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches {
		if w.org == org && (w.run == "" || w.run == id) {
			select {
			case w.ch <- id:
			default:
			}
		}
	}
}

// Polls counts the long polls that wait.
func (e *Engine) Polls() int {
	e.hub.mu.Lock()
	defer e.hub.mu.Unlock()
	return len(e.hub.polls)
}

// signal gives sessions a reason to renew at once, and lets their polls look again:
// one of a runner that is to drain is answered. It is a hint: a session that misses
// it learns the same at its next heartbeat. Those that nobody waits for at this node
// are returned.
func (h *hub) signal(sessions map[ci.SessionID]bool) (absent []ci.SessionID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.polls {
		if sessions[p.claim.Session] {
			select {
			case p.woken <- claimable{}:
			default:
			}
		}
	}
	for id := range sessions {
		if ch, ok := h.waiting[id]; ok {
			close(ch)
			delete(h.waiting, id)
			continue
		}
		absent = append(absent, id)
		if len(h.unheard) < unheardMost {
			h.unheard[id] = true
		}
	}
	return absent
}

// keepUnheard drops the hints for sessions that will not come for them. comes is
// asked under the lock. LOCK ORDER: hub, then fleet.
func (h *hub) keepUnheard(comes func(ci.SessionID) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.unheard {
		if !comes(id) {
			delete(h.unheard, id)
		}
	}
}

// unheardMost bounds the hints that wait for sessions that may never ask.
const unheardMost = 10_000

// Watch waits until a lease of the session is to be cancelled or its runner to
// drain, at most req.Wait; true asks for a heartbeat at once. A later Watch of a
// session takes the place of an earlier one.
func (e *Engine) Watch(ctx context.Context, who Identity, req protocol.Watch) (bool, error) {
	if err := e.ownSession(ctx, who, req.Session); err != nil {
		return false, err
	}
	h := e.hub
	h.mu.Lock()
	if h.unheard[req.Session] || h.closed {
		said := h.unheard[req.Session]
		delete(h.unheard, req.Session)
		h.mu.Unlock()
		return said, nil
	}
	ch := make(chan struct{})
	h.waiting[req.Session] = ch
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		if h.waiting[req.Session] == ch {
			delete(h.waiting, req.Session)
		}
		h.mu.Unlock()
	}()
	limit := time.NewTimer(min(max(req.Wait.Std(), 0), MaxPoll))
	defer limit.Stop()
	select {
	case <-ch:
		return !h.isClosed(), nil
	case <-limit.C:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
