package sim

import (
	"encoding/json"
	"iter"
	"slices"
	"strconv"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// call is one request on its way to any node, with what happens to its answer.
type call struct {
	id    int
	route string
	text  string
	who   engine.Identity
	ref   *ci.LeaseRef // for lease routes
	// request is the ID under which a repeat is known, where the route has one.
	request string

	from *runner // nil: an operator
	life int     // process life of the runner that sent it

	exec func(*node) (any, error)
	// truth compares an answer with the database.
	truth func(any)
	// done is what the sender makes of an answer.
	done func(any, error)
	// lie says that the sender breaks the protocol: these kinds of refusal are
	// expected, and no success.
	lie []ci.Kind
	// may lists refusals that an honest sender can meet here, beside the usual.
	may []ci.Kind
	// stored: the answer outlives the lease.
	stored bool
	// ends: the call ends its attempt.
	ends bool
	// merges: the call goes through the merging writer.
	merges bool
	// cancelling: the route is open while the run is cancelling.
	cancelling bool

	sent  int64 // when, for what is dropped in the end
	first any   // the first good answer
	ok    bool
	late  bool // on a slow way: arrives when the sender's next life has its session
	ghost bool // a duplicate on its way: nobody waits for its answer
	tries int
}

// send puts a call on the network.
func (w *world) send(c *call) {
	w.calls++
	c.id, c.sent = w.calls, w.now
	if c.from != nil {
		c.life = c.from.life
	}
	w.net = append(w.net, c)
	w.tell("send #%d %s %s", c.id, c.route, c.text)
}

// inFlight is a call that is being executed, with what the database held when it
// was last not being overtaken.
type inFlight struct {
	c      *call
	before snapshot
}

// overtake lets other nodes act while the executed calls wait for the database.
func (w *world) overtake() {
	waiting, busy := w.open, w.serving
	var others []*node
	for _, n := range w.nodes {
		if n != busy && n.e != nil {
			others = append(others, n)
		}
	}
	if len(others) == 0 {
		return
	}
	w.open, w.serving = nil, nil
	r := w.frng
	w.pass(r.Int64N(ttlUS / 2))
	for range 1 + r.IntN(3) {
		n := others[r.IntN(len(others))]
		if n.e == nil {
			continue
		}
		if r.IntN(3) == 0 {
			w.sweep(n)
		} else {
			for _, rn := range w.runners {
				rn.think()
			}
			var free []*call
			for _, c := range w.arriving() {
				if !slices.ContainsFunc(waiting, func(f *inFlight) bool { return f.c == c }) {
					free = append(free, c)
				}
			}
			if len(free) > 0 {
				w.deliverTo(n, free[r.IntN(len(free))])
			}
		}
		w.follow()
	}
	w.open, w.serving = waiting, busy
	for _, f := range waiting {
		f.before = w.before(f.c)
	}
}

// arrives reports whether a call can arrive now.
func (c *call) arrives() bool { return !c.late || c.life != c.from.life && c.from.session != "" }

// arriving returns the calls that can arrive now.
func (w *world) arriving() []*call {
	return slices.DeleteFunc(slices.Clone(w.net), func(c *call) bool { return !c.arrives() })
}

// sawLate counts calls of an earlier process life that arrive after the next one
// has begun in the server's eyes.
func (w *world) sawLate(c *call) {
	if c.from == nil || c.life == c.from.life || c.from.session == "" {
		return
	}
	w.saw(evEarlierLife)
	if c.route == "session" {
		w.saw(evEarlierSession)
	}
}

// deliver brings a call to a node and, unless something goes wrong, its answer back.
func (w *world) deliver(c *call) { w.deliverTo(w.up(w.rng), c) }

func (w *world) deliverTo(n *node, c *call) {
	f := &inFlight{c, w.before(c)}
	var rep any
	var err error
	c.tries++
	if w.drops(c) {
		return
	}
	w.sawLate(c)
	w.open = append(w.open, f)
	crashed := n.serve(func() { rep, err = c.exec(n) })
	w.open = slices.DeleteFunc(w.open, func(o *inFlight) bool { return o == f })
	if crashed {
		w.tell("#%d %s %s: no answer", c.id, c.route, c.text)
		return // sent again later
	}
	w.answer(c, f.before, rep, err)
}

// drops decides whether the request is lost on its way: it is sent again later.
func (w *world) drops(c *call) bool {
	if w.healing || w.calm[w.step] || w.frng.IntN(100) >= 3 {
		return false
	}
	w.wrong("request lost")
	w.tell("#%d %s: request lost", c.id, c.route)
	return true
}

// answer judges an answer and takes it to the sender.
func (w *world) answer(c *call, before snapshot, rep any, err error) {
	w.tell("#%d %s %s: %s", c.id, c.route, c.text, say(rep, err))
	w.judge(c, before, rep, err)
	if c.ghost {
		w.forget(c)
		return
	}
	r := w.frng
	faulty := !w.healing && !w.calm[w.step]
	switch {
	case ci.KindOf(err) == ci.ErrUnavailable && err != nil:
		return // asked for: the same again
	case faulty && r.IntN(100) < 5:
		w.wrong("reply lost")
		w.tell("  fault: reply lost")
		return // stays: the sender repeats it
	case faulty && r.IntN(100) < 4:
		w.wrong("duplicate")
		w.tell("  fault: duplicate on its way")
		twin := *c
		twin.ghost, twin.done = true, nil
		w.net = append(w.net, &twin)
	}
	w.forget(c)
	if c.done == nil {
		return
	}
	if c.from == nil {
		c.done(rep, err)
		return
	}
	switch {
	case c.life != c.from.life || !c.from.alive:
		w.tell("  nobody waits for it")
	case c.from.paused:
		c.from.inbox = append(c.from.inbox, func() { c.done(rep, err) })
	default:
		c.done(rep, err)
	}
}

func (w *world) forget(c *call) {
	if i := slices.Index(w.net, c); i >= 0 {
		w.net = slices.Delete(w.net, i, i+1)
	}
}

func say(rep any, err error) string {
	if err != nil {
		if r := ci.RejectOf(err); r != ci.RejectNone {
			return "refused: " + string(r)
		}
		return string(ci.KindOf(err)) + ": " + err.Error()
	}
	if t, ok := rep.(*protocol.Ticket); ok && t != nil {
		rep = []any{t.Lease, t.Job.Name, t.Needs, t.Restore}
	}
	text, err := json.Marshal(rep)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// deliverBatch brings several calls to one node, which applies them as one merge.
func (w *world) deliverBatch(cs []*call) {
	n := w.up(w.rng)
	type parked struct {
		*inFlight
		next func() (struct{}, bool)
		stop func()
		rep  any
		err  error
		done bool
	}
	var all []*parked
	for _, c := range cs {
		c.tries++
		if !w.drops(c) {
			w.sawLate(c)
			p := &parked{inFlight: &inFlight{c, w.before(c)}}
			all = append(all, p)
			w.open = append(w.open, p.inFlight)
		}
	}
	w.tell("merge of %d at node %d", len(all), n.index)
	crashed := false
	advance := func(p *parked) {
		if n.serve(func() {
			if _, more := p.next(); !more {
				p.done = true
			}
		}) {
			crashed = true
		}
	}
	for _, p := range all {
		if crashed {
			break
		}
		p.next, p.stop = iter.Pull(func(yield func(struct{}) bool) {
			n.yield = yield
			p.rep, p.err = p.c.exec(n)
			n.yield = nil
		})
		advance(p)
	}
	waiting := 0
	for _, p := range all {
		if !p.done {
			waiting++
		}
	}
	if waiting > 1 {
		w.merges++
		w.saw(evMerge)
	}
	for _, p := range all {
		for !p.done && !crashed {
			advance(p)
		}
	}
	for _, p := range all {
		if p.stop != nil {
			n.serve(p.stop)
		}
	}
	w.open = nil
	// Who was answered before the node ended has been answered.
	for _, p := range all {
		p.before.batch = true
		if p.done {
			w.answer(p.c, p.before, p.rep, p.err)
		}
	}
}

// snapshot is what the database held when a call came.
type snapshot struct {
	lease   store.Lease
	held    bool
	attempt store.Attempt
	made    bool
	moved   int64
	at      int64 // database time
	commits int   // transactions stored before
	batch   bool  // it is executed with others
	session bool  // an upload session of the request was there
}

func (w *world) before(c *call) snapshot {
	s := snapshot{moved: w.moved, at: w.dbNow(), commits: w.commits}
	if c.ref == nil {
		return s
	}
	key := store.AttemptKey{Job: c.ref.Job, Epoch: c.ref.Epoch}
	if w.commits == w.followedAt { // the mirror is what the database holds
		if l := w.mirror.leases[c.ref.Job]; l != nil {
			s.lease, s.held = l.row, true
		}
		s.attempt, s.made = w.mirror.attempts[key]
	} else {
		w.read(func(tx *store.Tx) (err error) {
			if s.lease, s.held, err = tx.Lease(w.ctx, c.ref.Job); err != nil {
				return err
			}
			s.attempt, s.made, err = tx.Attempt(w.ctx, c.ref.Job, c.ref.Epoch)
			return err
		})
	}
	if c.route == routeBegin {
		w.read(func(tx *store.Tx) (err error) {
			_, s.session, err = tx.ArtifactByRequest(w.ctx, key, c.request)
			return err
		})
	}
	return s
}

// judge compares an answer with what the protocol allows.
func (w *world) judge(c *call, s snapshot, rep any, err error) {
	w.shifted()
	if err != nil {
		w.judgeRefusal(c, s, err)
		return
	}
	if c.lie != nil {
		w.bad("I3 fencing", "#%d %s was accepted: %s", c.id, c.route, c.text)
	}
	if c.ref != nil {
		w.judgeLease(c, s)
	}
	if c.ok && c.stored {
		switch {
		case c.ends && !s.held:
			w.saw(evLateRepeat)
		case c.route == "session":
			w.saw(evLateSession)
		case c.route == "submit":
			w.saw(evSubmitTwice)
		}
	}
	if opened, ok := rep.(protocol.SessionOpened); ok && opened.Session == "" {
		return // nothing was opened: the same request goes on to ask
	}
	if c.ok && c.stored && say(c.first, nil) != say(rep, nil) {
		w.bad("same request, same answer", "#%d %s: %s, before it was %s", c.id, c.route, say(rep, nil), say(c.first, nil))
	}
	// A runner that is told its latest session was given none: it asks again with
	// the same request, and a late repeat of this call may find what that one opened.
	told, opens := rep.(protocol.SessionOpened)
	if !c.ok && (!opens || told.Session != "") {
		c.ok, c.first = true, rep
	}
	if c.truth != nil {
		c.truth(rep)
	}
}

// shifted learns by how much all deadlines have been moved.
func (w *world) shifted() {
	if w.movedAt == w.commits {
		return
	}
	w.movedAt = w.commits
	w.read(func(tx *store.Tx) error {
		text, err := tx.Meta(w.ctx, "clock_shift_us")
		if err != nil || text == "" {
			return err
		}
		w.moved, err = strconv.ParseInt(text, 10, 64)
		return err
	})
}

func (w *world) judgeRefusal(c *call, s snapshot, err error) {
	kind := ci.KindOf(err)
	if kind == ci.ErrInternal {
		w.bad("no defect", "#%d %s %s: %v", c.id, c.route, c.text, err)
	}
	if r := ci.RejectOf(err); r != ci.RejectNone {
		w.rejects[r]++
	} else if kind == ci.ErrNotFound {
		w.rejects[ci.RejectNotFound]++
	}
	if kind == ci.ErrUnavailable {
		return
	}
	if c.lie != nil {
		if !slices.Contains(c.lie, kind) && kind != ci.ErrLeaseLost && kind != ci.ErrRunEnded {
			w.bad("typed refusals", "#%d %s (%s) was refused as %s: %v", c.id, c.route, c.text, kind, err)
		}
		return
	}
	if kind == ci.ErrLeaseLost || kind == ci.ErrRunEnded {
		if c.ok && c.stored && c.ends {
			w.bad("same request, same answer", "#%d %s was answered %s and is now refused: %v", c.id, c.route, say(c.first, nil), err)
		}
		if c.ref != nil && w.current(c, s) && s.moved == w.moved {
			w.bad("the holder is heard", "#%d %s %s holds the lease and was refused: %v", c.id, c.route, c.text, err)
		}
		return
	}
	if !slices.Contains(c.may, kind) {
		w.bad("typed refusals", "#%d %s %s was refused as %s: %v", c.id, c.route, c.text, kind, err)
	}
}

// current reports whether the call's tuple was and is that of the live lease.
func (w *world) current(c *call, s snapshot) bool {
	return s.held && s.lease.Ref() == *c.ref && c.who.Runner == c.ref.Runner && s.lease.ExpiresUS > w.dbNow() && w.live(*c.ref) &&
		(s.lease.Cancel == 0 || c.cancelling) && !s.ended()
}

// live reports whether the tuple's lease is there now.
func (w *world) live(ref ci.LeaseRef) (ok bool) {
	w.read(func(tx *store.Tx) error {
		l, found, err := tx.Lease(w.ctx, ref.Job)
		ok = found && l.Ref() == ref && l.ExpiresUS > w.dbNow()
		return err
	})
	return ok
}

func (s snapshot) ended() bool { return s.made && s.attempt.State == ci.StateFinished }

// acceptedAt is the database's time when what an accepted call has done was
// stored, or when one that stores nothing came to the guard; the answer may have
// taken longer, and gives what the guard allowed then.
func (w *world) acceptedAt(s snapshot) int64 {
	switch {
	case w.commits == s.commits:
		return s.at
	case s.batch: // one of them, at the earliest the first
		return w.stamps[s.commits]
	default:
		return w.stamps[w.commits-1]
	}
}

// judgeLease requires that an accepted call held the lease, or repeats one that did.
func (w *world) judgeLease(c *call, s snapshot) {
	repeat := s.made && c.ends && s.attempt.Ref() == *c.ref && s.attempt.EndRequest == c.request
	if repeat || s.session {
		return
	}
	switch {
	case !s.held:
		w.bad("I3 fencing", "#%d %s %s was accepted without a lease", c.id, c.route, c.text)
	case s.lease.Ref() != *c.ref:
		w.bad("I3 fencing", "#%d %s was accepted under %v, the lease is %v", c.id, c.route, *c.ref, s.lease.Ref())
	case repaired(s.lease.ExpiresUS, w.moved-s.moved) <= w.acceptedAt(s):
		w.bad("I3 fencing", "#%d %s %s was accepted under an expired lease", c.id, c.route, c.text)
	case s.lease.Cancel != 0 && !c.cancelling:
		w.bad("LP-2", "#%d %s %s was accepted while cancelling", c.id, c.route, c.text)
	}
}
