package engine

import (
	"sync"

	"forgeci/internal/ci"
)

// hub wakes long polls and watchers of runs. Wake-ups are hints: whoever waits
// also asks again by itself.
type hub struct {
	mu      sync.Mutex
	polls   map[*poll]bool
	watches map[*watch]bool
	closed  bool
}

type poll struct {
	offer string
	woken chan struct{} // capacity 1
}

type watch struct {
	run ci.RunID // "" = all
	ch  chan ci.RunID
}

func newHub() *hub { return &hub{polls: map[*poll]bool{}, watches: map[*watch]bool{}} }

func (h *hub) listen(offer string) (p *poll, stop func()) {
	p = &poll{offer: offer, woken: make(chan struct{}, 1)}
	h.mu.Lock()
	h.polls[p] = true
	h.mu.Unlock()
	return p, func() {
		h.mu.Lock()
		delete(h.polls, p)
		h.mu.Unlock()
		select {
		case <-p.woken: // the hint was meant for somebody: pass it on
			h.wake(map[string]bool{offer: true}, 1)
		default:
		}
	}
}

// wake wakes up to n polls of the offers.
func (h *hub) wake(offers map[string]bool, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.polls {
		if n <= 0 {
			return
		}
		if !offers[p.offer] {
			continue
		}
		select {
		case p.woken <- struct{}{}:
			n--
		default:
		}
	}
}

func (h *hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for p := range h.polls {
		select {
		case p.woken <- struct{}{}:
		default:
		}
	}
}

// WatchRuns returns a channel of hints that a run changed ("" watches all runs).
// A slow reader loses hints, never blocks anybody; stop ends it.
func (e *Engine) WatchRuns(id ci.RunID) (changes <-chan ci.RunID, stop func()) {
	w := &watch{run: id, ch: make(chan ci.RunID, 64)}
	e.hub.mu.Lock()
	e.hub.watches[w] = true
	e.hub.mu.Unlock()
	return w.ch, func() {
		e.hub.mu.Lock()
		delete(e.hub.watches, w)
		e.hub.mu.Unlock()
	}
}

func (h *hub) runChanged(id ci.RunID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches {
		if w.run == "" || w.run == id {
			select {
			case w.ch <- id:
			default:
			}
		}
	}
}
