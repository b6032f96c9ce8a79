package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// fleet is what this node knows of sessions without asking the database: which
// offers are present, which shapes they serve and when a session was last heard
// of. It is a hint: the database decides, and every sweep refreshes it.
type fleet struct {
	mono func() time.Duration

	mu       sync.Mutex
	sessions map[ci.SessionID]presence
	shapes   map[string]map[string]bool // offer -> shapes it serves
	known    map[string]bool            // shapes this node has seen
	live     map[claimable]int          // present sessions that serve a tenant's shape
	vtime    int64                      // virtual time of the last claimed job
}

type presence struct {
	org    ci.OrgID
	offer  string
	seen   time.Duration // last sign of life, also as another node has it
	heard  time.Duration // last sign of life at this node, 0 = none
	doubt  int64         // when a node began to doubt it, database time; 0 = not
	beat   time.Duration // last heartbeat, 0 = none
	polls  int
	runner ci.RunnerID
	stray  bool // this node hears of it, and the database does not call it present
}

func newFleet(mono func() time.Duration) *fleet {
	return &fleet{
		mono: mono, sessions: map[ci.SessionID]presence{}, shapes: map[string]map[string]bool{},
		known: map[string]bool{}, live: map[claimable]int{},
	}
}

// loadFleet reads the present sessions, offers and shapes.
func (e *Engine) loadFleet(ctx context.Context) error {
	return e.Store.Read(ctx, func(tx *store.Tx) error {
		return e.refreshFleet(ctx, tx)
	})
}

func (e *Engine) refreshFleet(ctx context.Context, tx *store.Tx) error {
	if err := e.followClock(ctx, tx); err != nil {
		return err
	}
	sessions, err := tx.PresentSessions(ctx)
	if err != nil {
		return err
	}
	served, err := tx.ServedShapes(ctx)
	if err != nil {
		return err
	}
	shapes, err := tx.Shapes(ctx)
	if err != nil {
		return err
	}
	serve := map[string]map[string]bool{}
	for _, p := range served {
		if serve[p[0]] == nil {
			serve[p[0]] = map[string]bool{}
		}
		serve[p[0]][p[1]] = true
	}
	known := make(map[string]bool, len(shapes))
	for _, s := range shapes {
		known[s.ID] = true
	}
	e.fleet.replace(sessions, serve, known, e.heardWithin())
	return nil
}

// heardWithin is how long ago a session may have been heard of that is not doubted:
// two sweeps before the end of a TTL.
func (e *Engine) heardWithin() time.Duration { return e.LeaseTTL - 2*ci.SweepEvery(e.LeaseTTL) }

// replace takes over what the database says. Sessions that this node has heard of
// within d are not forgotten when the database does not call them present: they are
// strays until it is asked whether they have ended.
func (f *fleet) replace(sessions []store.Session, serve map[string]map[string]bool, known map[string]bool, d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.mono()
	next := make(map[ci.SessionID]presence, len(sessions))
	for _, s := range sessions {
		p, known := f.sessions[s.ID]
		if !known {
			p.seen = now // unknown until now: give it a full TTL
		}
		if p.doubt > 0 && s.GoneUS == 0 {
			p.seen = now // another node has heard of it
		}
		p.org, p.offer, p.runner, p.doubt, p.stray = s.Org, s.Offer, s.Runner, s.GoneUS, false
		next[s.ID] = p
	}
	for id, p := range f.sessions {
		if _, present := next[id]; !present && p.hears(now, d) {
			p.doubt, p.stray = 0, true
			next[id] = p
		}
	}
	f.sessions, f.shapes, f.known = next, serve, known
	f.recount()
}

func (f *fleet) recount() {
	f.live = map[claimable]int{}
	for _, p := range f.sessions {
		if p.stray {
			continue
		}
		for shape := range f.shapes[p.offer] {
			f.live[claimable{p.org, shape}]++
		}
	}
}

// serves reports whether a present session of the tenant serves the shape.
func (f *fleet) serves(org ci.OrgID, shape string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.live[claimable{org, shape}] > 0
}

// offersOf returns the offers that serve a shape.
func (f *fleet) offersOf(shape string) map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]bool{}
	for offer, shapes := range f.shapes {
		if shapes[shape] {
			out[offer] = true
		}
	}
	return out
}

// seen notes that a session was heard of; known is false when this node does not
// think it present.
func (f *fleet) seen(id ci.SessionID, beat bool) (known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.sessions[id]
	if !ok {
		return false
	}
	p.hear(f.mono())
	if beat {
		p.beat = p.seen
	}
	f.sessions[id] = p
	return !p.stray
}

// polling counts open long polls of a session and returns how many there are.
func (f *fleet) polling(id ci.SessionID, delta int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.sessions[id]
	if ok {
		p.polls = max(p.polls+delta, 0) // it may have been forgotten and found again meanwhile
		p.hear(f.mono())
		f.sessions[id] = p
	}
	return p.polls
}

func (p *presence) hear(now time.Duration) { p.seen, p.heard = now, max(now, 1) }

// hears reports whether this node hears of the session, or did within d.
func (p *presence) hears(now, d time.Duration) bool {
	return p.polls > 0 || p.heard > 0 && now-p.heard <= d
}

// strays returns the sessions that this node hears of and the database does not call
// present: they have ended, or were taken for gone while this node could not say
// that it hears of them.
func (f *fleet) strays() (ids []ci.SessionID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, p := range f.sessions {
		if p.stray {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// present reports whether this node thinks a session present.
func (f *fleet) present(id ci.SessionID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.sessions[id]
	return ok
}

// doubts returns what this node has to say of sessions: those that others doubt
// and that it has heard of within d, those that have been silent for longer than
// d, and those of them that are doubted already.
func (f *fleet) doubts(d time.Duration) (heard, fresh, doubted []ci.SessionID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.mono()
	for id, p := range f.sessions {
		switch {
		case p.stray:
		case p.hears(now, d):
			if p.doubt > 0 {
				heard = append(heard, id)
			}
		case p.doubt > 0:
			doubted = append(doubted, id)
		case now-p.seen > d:
			fresh = append(fresh, id)
		}
	}
	return heard, fresh, doubted
}

// beatWithin reports whether the session sent a heartbeat within d.
func (f *fleet) beatWithin(id ci.SessionID, d time.Duration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.sessions[id]
	return ok && p.beat > 0 && f.mono()-p.beat <= d
}

// online reports whether a session of the runner is present, how long ago it was
// last heard of, and whether that was at this node.
func (f *fleet) online(id ci.RunnerID) (ok bool, ago time.Duration, here bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.sessions {
		if p.runner == id {
			if p.polls > 0 {
				return true, 0, true
			}
			return true, f.mono() - p.seen, p.heard > 0
		}
	}
	return false, 0, false
}

func (f *fleet) add(s store.Session, shapes map[string]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if shapes != nil {
		f.shapes[s.Offer] = shapes
	}
	p := f.sessions[s.ID] // its polls stay counted
	p.org, p.offer, p.runner, p.stray = s.Org, s.Offer, s.Runner, false
	p.hear(f.mono())
	f.sessions[s.ID] = p
	f.recount()
}

func (f *fleet) remove(id ci.SessionID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.sessions, id)
	f.recount()
}

// knows reports whether this node has seen the shape; another one may have made it.
func (f *fleet) knows(shape string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.known[shape]
}

// addShape makes a shape known with the offers that serve it.
func (f *fleet) addShape(id string, offers []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known[id] = true
	for _, o := range offers {
		if f.shapes[o] == nil {
			f.shapes[o] = map[string]bool{}
		}
		f.shapes[o][id] = true
	}
	f.recount()
}

func (f *fleet) virtualTime() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.vtime
}

func (f *fleet) claimed(vft int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.vtime = max(f.vtime, vft)
}

// intern returns the ID of a value's canonical JSON.
func intern(prefix string, v any) (id, text string) {
	b, err := json.Marshal(v)
	if err != nil {
		panic("engine: " + err.Error()) // plain data only
	}
	sum := sha256.Sum256(b)
	return prefix + "_" + hex.EncodeToString(sum[:10]), string(b)
}

// internShape stores a job's requirements and joins them with the offers that
// meet them.
func (t *txn) internShape(ctx context.Context, need ci.Requirements, now int64) (string, error) {
	id, text := intern("shp", need)
	if t.shapes[id] {
		return id, nil
	}
	if t.shapes == nil {
		t.shapes = map[string]bool{}
	}
	t.shapes[id] = true
	fresh, err := t.InsertShape(ctx, id, text, now)
	if err != nil || !fresh && t.e.fleet.knows(id) {
		return id, err
	}
	// A shape and an offer that are new at the same time must see each other.
	if _, err := t.LockMeta(ctx, metaShapes); err != nil {
		return "", err
	}
	offers, err := t.Offers(ctx)
	if err != nil {
		return "", err
	}
	var pairs [][2]string
	var serving []string
	for _, o := range offers {
		var offer policy.Offer
		if err := json.Unmarshal([]byte(o.JSON), &offer); err != nil {
			return "", err
		}
		if policy.Mismatch(need, offer) == "" {
			pairs = append(pairs, [2]string{o.ID, id})
			serving = append(serving, o.ID)
		}
	}
	t.e.fleet.addShape(id, serving)
	return id, t.JoinOffersShapes(ctx, pairs)
}

// internOffer stores what a session offers and joins it with the shapes it meets.
func (t *txn) internOffer(ctx context.Context, offer policy.Offer, now int64) (string, map[string]bool, error) {
	id, text := intern("ofr", offer)
	// Under the lock, since an offer that is there already may be being collected.
	if _, err := t.LockMeta(ctx, metaShapes); err != nil {
		return "", nil, err
	}
	if _, err := t.InsertOffer(ctx, id, text, now); err != nil {
		return "", nil, err
	}
	shapes, err := t.Shapes(ctx)
	if err != nil {
		return "", nil, err
	}
	served := map[string]bool{}
	var pairs [][2]string
	for _, s := range shapes {
		var need ci.Requirements
		if err := json.Unmarshal([]byte(s.JSON), &need); err != nil {
			return "", nil, err
		}
		if policy.Mismatch(need, offer) == "" {
			served[s.ID] = true
			pairs = append(pairs, [2]string{id, s.ID})
		}
	}
	return id, served, t.JoinOffersShapes(ctx, pairs)
}
