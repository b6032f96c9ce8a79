package sim

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Routes that lease calls name to the guard.
const (
	routePhase     = "phase"
	routeComplete  = "complete"
	routeHandOver  = "hand-over"
	routeHeartbeat = "heartbeat"
	routeLog       = "logs"
	routeBegin     = "artifacts"
	routeSign      = "parts"
	routeSeal      = "seal"
	routeDownload  = "download"
)

// runner is one host with a runner on it.
type runner struct {
	w     *world
	name  string
	org   *org
	key   []byte
	slots int
	offer protocol.Offer

	who        engine.Identity
	registered bool
	clock      clock // monotonic
	life       int   // process lives
	alive      bool
	paused     bool
	drained    bool     // an operator wanted it to take nothing new
	asks       int      // how often it was, or wanted itself, to take nothing new
	settled    int      // asks that the latest session has ended
	inbox      []func() // answers that came while it was stopped

	// Of the process life.
	session          ci.SessionID
	openRequest      string
	latest           ci.SessionID // of the runner, as far as this life knows
	opening, saying  bool
	beating          int   // heartbeats under way
	claiming         int   // claims under way
	emptyAt, emptyOf int64 // when a claim found nothing, and how often jobs had become ready
	draining         bool  // leaves when its jobs are done
	leaving          bool  // hands its jobs over
	lastBeat         int64
	works            []*work
	ended            []*box // proven to have ended, to be reported
	left             []*box // of earlier lives, found on the host
}

// box is a sandbox on a host, as it is in truth.
type box struct {
	key     store.AttemptKey
	ref     ci.LeaseRef
	runner  *runner
	alive   bool // something of the attempt still runs
	user    bool // a process of the user was started
	excused bool // an operator or a lie said that it has ended
	retry   *ci.RetryPolicy
}

// work is an attempt in the hands of a runner's process.
type work struct {
	r       *runner
	ticket  *protocol.Ticket
	ref     ci.LeaseRef
	box     *box
	stage   stage
	waiting bool  // for an answer
	trust   int64 // on the runner's clock: until then the lease is trusted
	doneAt  int64
	outcome int // drawn when it was claimed
	cancel  bool

	out     *written
	writes  int   // how often it writes
	flying  int   // log calls under way
	flushBy int64 // when the end of the log is waited for no longer
	restore int   // next artifact to restore
	publish int   // next artifact to upload
	part    int   // 0 begin, 1 sign and send, 2 seal
	id      string
	etag    string
	sealed  map[string]string
	gone    bool
}

type stage int

const (
	stageClaimed stage = iota
	stagePrepared
	stageBuilding
	stageExecuting
	stageRan
	stageFinalising
	stageEnding
)

// hire registers the runners.
func (w *world) hire() error {
	linux := protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}}
	with := func(labels, features []string) protocol.Offer {
		o := linux
		o.Labels, o.Features = labels, features
		return o
	}
	for i, offer := range []protocol.Offer{
		with([]string{labelCommon, labelRare}, nil),
		with([]string{labelCommon}, []string{ci.FeatureImage}),
		with(nil, nil),
		with([]string{labelCommon, labelRare}, []string{ci.FeatureImage}),
	} {
		o := w.orgs[0]
		if i == 3 {
			o = w.orgs[1]
		}
		r := &runner{w: w, name: fmt.Sprintf("r%d", i), org: o, key: make([]byte, 32), slots: 1 + int(w.seed>>i)%2, offer: offer}
		copy(r.key, r.name)
		r.clock = clock{rate: 0.97 + w.rng.Float64()*0.06}
		w.runners = append(w.runners, r)
		r.register()
	}
	return nil
}

func (r *runner) time() int64 { return r.clock.read(r.w.now) }

func (r *runner) register() {
	w := r.w
	req := protocol.Register{Name: r.name, PublicKey: r.key, Labels: r.offer.Labels}
	r.alive = true
	life := r.life
	w.send(&call{route: "register", text: r.name, exec: func(n *node) (any, error) {
		// Each answer has a credential of its own.
		hash := sha256.Sum256(fmt.Appendf(nil, "%s %d", r.name, w.calls+w.step))
		return n.e.Register(w.ctx, r.org.id, "registration", []string{"*"}, req, hex.EncodeToString(hash[:])+w.newID(ci.PrefixToken))
	}, truth: func(rep any) {
		if r.registered && r.who.Runner != rep.(ci.RunnerID) {
			w.bad("same request, same answer", "runner %s is %s and %s", r.name, r.who.Runner, rep)
		}
	}, done: func(rep any, err error) {
		if err != nil {
			w.bad("typed refusals", "register: %v", err)
		}
		r.who = engine.Identity{Runner: rep.(ci.RunnerID), Org: r.org.id}
		r.registered = true
		_ = life
	}})
}

// think lets the runner's process act.
func (r *runner) think() {
	w := r.w
	if !r.alive || r.paused || !r.registered {
		return
	}
	for len(r.inbox) > 0 {
		f := r.inbox[0]
		r.inbox = r.inbox[1:]
		f()
	}
	for _, k := range slices.Clone(r.works) {
		if !k.gone && r.time() >= k.trust {
			w.tell("%s stops %s by itself", r.name, short(k.ref.Job))
			w.saw(evStopsItself)
			k.drop()
		}
	}
	if r.session == "" && r.claiming == 0 && !r.draining {
		r.open()
	}
	if len(r.works) > 0 && r.time()-r.lastBeat >= ci.RenewEvery(ttl).Microseconds() {
		r.beat()
	}
	r.report()
	for _, k := range slices.Clone(r.works) {
		if !k.gone {
			k.next()
		}
	}
	switch {
	case r.draining && len(r.works) == 0 && r.claiming == 0 && r.session == "":
		r.end()
	case r.draining && len(r.works) == 0 && r.claiming == 0:
		r.drain(true)
	case !r.draining && r.session != "" && r.busy()+r.claiming < r.slots && !r.polling():
		r.claim()
	}
}

// polling reports whether a long poll found nothing and nothing has happened since
// that would wake it. While things go wrong a runner asks at any time.
func (r *runner) polling() bool {
	return r.w.healing && r.emptyAt == r.w.now && r.emptyOf == r.w.mirror.readied
}

// busy counts the slots that the process knows to be taken.
func (r *runner) busy() int { return len(r.works) }

func (r *runner) open() {
	w := r.w
	if r.opening {
		return
	}
	r.opening = true
	if r.openRequest == "" {
		r.openRequest = w.newID(ci.PrefixRequest)
	}
	req := protocol.OpenSession{RequestID: r.openRequest, Protocol: protocol.Version, Slots: r.slots, Offer: r.offer, After: r.latest}
	var told []*box
	for _, b := range r.left {
		if !b.alive {
			told = append(told, b)
			req.Terminated = append(req.Terminated, protocol.AttemptRef{Job: b.key.Job, Epoch: b.key.Epoch})
		}
	}
	req.Swept = true
	asks := 0
	for _, k := range r.works {
		req.Alive = append(req.Alive, protocol.AttemptRef{Job: k.ref.Job, Epoch: k.ref.Epoch})
	}
	for _, b := range append(slices.Clone(r.left), r.ended...) {
		if b.alive {
			req.Alive = append(req.Alive, protocol.AttemptRef{Job: b.key.Job, Epoch: b.key.Epoch})
		}
	}
	w.send(&call{route: "session", text: fmt.Sprintf("%s ended=%d swept=%v alive=%d", r.name, len(told), req.Swept, len(req.Alive)), from: r, stored: true, exec: func(n *node) (any, error) {
		asks = r.asks
		got, err := n.e.OpenSession(w.ctx, r.who, req)
		return got, err
	}, truth: func(rep any) {
		w.read(func(tx *store.Tx) error {
			got := rep.(protocol.SessionOpened)
			if got.Session == "" {
				return nil
			}
			s, ok, err := tx.Session(w.ctx, got.Session)
			if err == nil && (!ok || s.Runner != r.who.Runner) {
				w.bad("what is answered is stored", "session %v", rep)
			}
			return err
		})
	}, done: func(rep any, err error) {
		r.opening = false
		if err != nil {
			w.bad("typed refusals", "open session: %v", err)
		}
		got := rep.(protocol.SessionOpened)
		if got.Session == "" { // another session of the runner is later than the one named
			r.latest = got.Latest
			r.open()
			return
		}
		r.session, r.latest, r.openRequest = got.Session, got.Session, ""
		r.settled = asks
		if len(r.works) > 0 {
			w.saw(evTwoSessions)
		}
		r.left = slices.DeleteFunc(r.left, func(b *box) bool { return slices.Contains(told, b) })
	}})
}

func (r *runner) claim() {
	w := r.w
	r.claiming++
	began := r.time()
	readied := w.mirror.readied
	req := protocol.Claim{Session: r.session, RequestID: w.newID(ci.PrefixRequest)}
	var given *ci.LeaseRef
	w.send(&call{
		route: "claim", text: r.name + " " + short(req.RequestID), from: r, merges: true, may: []ci.Kind{ci.ErrConflict},
		exec: func(n *node) (any, error) {
			t, err := n.e.Claim(w.ctx, r.who, req)
			if t == nil {
				return (*protocol.Ticket)(nil), err
			}
			return t, err
		}, truth: func(rep any) {
			t := rep.(*protocol.Ticket)
			if t == nil {
				if given != nil && w.live(*given) {
					w.bad("same request, same answer", "claim %s gave %v and now nothing", req.RequestID, *given)
				}
				return
			}
			if given != nil {
				w.saw(evLateClaim)
			}
			if given != nil && *given != t.Lease {
				w.bad("same request, same answer", "claim %s gave %v and %v", req.RequestID, *given, t.Lease)
			}
			given = &t.Lease
			w.checkTicket(r, t)
		}, done: func(rep any, err error) {
			r.claiming--
			if err != nil {
				if !r.draining && r.session == req.Session { // it cannot cure that with the session it has
					r.session = ""
				}
				return
			}
			if t := rep.(*protocol.Ticket); t != nil {
				r.take(t, began)
			} else {
				r.emptyAt, r.emptyOf = w.now, readied
			}
		},
	})
}

// take begins an attempt: trust counts from the start of the request.
func (r *runner) take(t *protocol.Ticket, began int64) {
	w := r.w
	b := &box{key: store.AttemptKey{Job: t.Lease.Job, Epoch: t.Lease.Epoch}, ref: t.Lease, runner: r, retry: t.Job.Retry}
	w.mirror.boxes = append(w.mirror.boxes, b)
	k := &work{r: r, ticket: t, ref: t.Lease, box: b, outcome: w.rng.IntN(100), sealed: map[string]string{}}
	k.out = w.output(t.Lease, r.org.id)
	k.writes = w.rng.IntN(6)
	k.trusted(began)
	r.works = append(r.works, k)
}

func (k *work) trusted(began int64) {
	k.trust = max(k.trust, began+(ttl-ci.LeaseMargin(ttl)).Microseconds())
}

// drop stops an attempt whose lease is not the runner's any more.
func (k *work) drop() {
	k.gone = true
	k.box.alive = false
	k.r.works = slices.DeleteFunc(k.r.works, func(o *work) bool { return o == k })
	k.r.ended = append(k.r.ended, k.box)
}

// finish forgets an attempt whose end was accepted.
func (k *work) finish() {
	k.gone = true
	k.box.alive = false
	k.r.works = slices.DeleteFunc(k.r.works, func(o *work) bool { return o == k })
}

// beat sends one heartbeat for each session that has leases, normally one.
func (r *runner) beat() {
	if r.beating > 0 {
		return
	}
	r.lastBeat = r.time()
	of := map[ci.SessionID][]*work{}
	for _, k := range r.works {
		of[k.ref.Session] = append(of[k.ref.Session], k)
	}
	for _, session := range keysOf(of) {
		r.beatFor(session, of[session])
	}
}

func (r *runner) beatFor(session ci.SessionID, works []*work) {
	w := r.w
	r.beating++
	began := r.time()
	refs := make([]ci.LeaseRef, len(works))
	for i, k := range works {
		refs[i] = k.ref
	}
	var arrived int64
	asked, asks := false, 0
	w.send(&call{route: routeHeartbeat, text: fmt.Sprintf("%s %d leases", r.name, len(refs)), from: r, exec: func(n *node) (any, error) {
		arrived, asks = w.dbNow(), r.asks
		asked = asks > r.settled
		return n.e.Renew(w.ctx, r.who, session, refs)
	}, truth: func(rep any) {
		w.checkRenewed(refs, rep.(protocol.HeartbeatReply), arrived)
		if rep.(protocol.HeartbeatReply).Drain && !asked && r.asks == asks {
			w.bad("nobody leaves unasked", "heartbeat: %s is told to drain", r.name)
		}
	}, may: []ci.Kind{ci.ErrNotFound}, done: func(rep any, err error) {
		r.beating--
		if err != nil {
			return
		}
		for i, a := range rep.(protocol.HeartbeatReply).Leases {
			k := works[i]
			if k.gone {
				continue
			}
			switch a.Answer {
			case protocol.LeaseGone:
				k.drop()
			case protocol.LeaseCancel:
				k.trusted(began)
				k.stop()
			default:
				k.trusted(began)
			}
		}
		if rep.(protocol.HeartbeatReply).Drain {
			r.draining = true
		}
	}})
}

// stop ends what runs because the run was cancelled.
func (k *work) stop() {
	if k.stage < stageEnding {
		k.cancel = true
		k.box.alive = false
	}
}

func (r *runner) report() {
	w := r.w
	if r.saying || r.session == "" {
		return
	}
	told := slices.Clone(r.ended)
	for _, b := range r.left {
		if !b.alive {
			told = append(told, b)
		}
	}
	if len(told) == 0 {
		return
	}
	r.saying = true
	req := protocol.Occupancy{Session: r.session}
	for _, b := range told {
		req.Terminated = append(req.Terminated, protocol.AttemptRef{Job: b.key.Job, Epoch: b.key.Epoch})
	}
	w.send(&call{route: "occupancy", text: fmt.Sprintf("%s %d", r.name, len(told)), from: r, may: []ci.Kind{ci.ErrNotFound}, exec: func(n *node) (any, error) {
		return nil, n.e.Occupancy(w.ctx, r.who, req)
	}, done: func(_ any, err error) {
		r.saying = false
		if err != nil {
			return
		}
		gone := func(b *box) bool { return slices.Contains(told, b) }
		r.ended = slices.DeleteFunc(r.ended, gone)
		r.left = slices.DeleteFunc(r.left, gone)
	}})
}

func (r *runner) drain(gone bool) {
	w := r.w
	req := protocol.Drain{Session: r.session, Gone: gone}
	w.send(&call{route: "drain", text: fmt.Sprintf("%s gone=%v", r.name, gone), from: r, may: []ci.Kind{ci.ErrNotFound}, exec: func(n *node) (any, error) {
		defer r.ask()()
		return nil, n.e.DrainSession(w.ctx, r.who, req)
	}})
	if gone { // the process ends; a supervisor starts it again some time
		r.end()
	}
}

// ask counts a wish that the runner take nothing new: from before it is heard until
// behind it, so that a session that is opened meanwhile may end it or not.
func (r *runner) ask() (heard func()) {
	r.asks++
	return func() { r.asks++ }
}

// end ends the runner's process; sandboxes go on until somebody kills them.
func (r *runner) end() {
	r.life++
	r.alive, r.paused = false, false
	r.inbox = nil
	for _, k := range r.works {
		k.gone = true
		k.box.alive = k.box.alive && k.box.user // preparation ends with the process
		r.left = append(r.left, k.box)
	}
	r.left = append(r.left, r.ended...)
	r.works, r.ended = nil, nil
	r.session, r.latest, r.openRequest = "", "", ""
	r.opening, r.saying, r.draining, r.leaving, r.beating, r.claiming = false, false, false, false, 0, 0
}

// sentIsLate puts what the process has sent on a slow way: it arrives when the
// next life has its session.
func (r *runner) sentIsLate(is func() bool) {
	for _, c := range r.w.net {
		if c.from == r && c.life == r.life && is() {
			c.late = true
		}
	}
}

// begin starts the process again. clean: it kills what it finds of its earlier lives.
func (r *runner) begin(clean bool) {
	r.alive = true
	r.clock = clock{at: r.w.now, rate: r.clock.rate}
	r.lastBeat = 0

	if clean {
		for _, b := range r.left {
			b.alive = false
		}
	}
}

// lease builds a call of a lease route.
func (k *work) lease(route, text string, exec func(*node, engine.Held) (any, error)) *call {
	w := k.r.w
	c := &call{route: route, text: k.r.name + " " + short(k.ref.Job) + fmt.Sprintf("/%d ", k.ref.Epoch) + text, who: k.r.who, ref: &k.ref, from: k.r}
	access := engine.ActiveOnly
	if route == routeComplete || route == routeLog {
		access, c.cancelling = engine.WhileCancelling, true
	}
	c.exec = func(n *node) (any, error) { return w.leaseCall(n, k.r.who, k.ref, route, access, nil, exec) }
	return c
}

// leaseCall does what the server's route does: guard, stored answer, use case.
func (w *world) leaseCall(n *node, who engine.Identity, ref ci.LeaseRef, route string, access engine.Access,
	stored func(*node) (any, bool, error), exec func(*node, engine.Held) (any, error),
) (any, error) {
	held, refusal := n.e.Hold(w.ctx, who, ref, route, access)
	if refusal == nil {
		return exec(n, held)
	}
	if stored == nil || !errors.Is(refusal, ci.ErrLeaseLost) && !errors.Is(refusal, ci.ErrRunEnded) {
		return nil, refusal
	}
	answer, found, err := stored(n)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, refusal
	}
	return answer, nil
}

// sent sends the call and lets the attempt wait for its answer.
func (k *work) sent(c *call, done func(any)) {
	k.waiting = true
	c.done = func(rep any, err error) {
		k.waiting = false
		if k.gone {
			return
		}
		if err != nil {
			switch {
			case ci.RejectOf(err) == ci.RejectCancelling:
				k.stop()
			case ci.KindOf(err) == ci.ErrLeaseLost, ci.KindOf(err) == ci.ErrRunEnded:
				k.drop()
			}
			return
		}
		done(rep)
	}
	k.r.w.send(c)
}

func (k *work) phase(p ci.Phase, done func()) {
	w := k.r.w
	req := protocol.SetPhase{RequestID: w.newID(ci.PrefixRequest), Phase: p}
	if p == ci.PhaseExecuting {
		req.Steps = []protocol.StepUpdate{{Index: 0, Name: "one", State: ci.StateRunning}}
	}
	c := k.lease(routePhase, string(p), func(n *node, held engine.Held) (any, error) { return p, n.e.SetPhase(w.ctx, held, req) })
	c.merges = true
	// A repeat that comes late finds the attempt further on.
	c.may = []ci.Kind{ci.ErrConflict}
	c.truth = func(any) {
		w.read(func(tx *store.Tx) error {
			a, _, err := tx.Attempt(w.ctx, k.ref.Job, k.ref.Epoch)
			if err == nil && a.Phase.Order() < p.Order() {
				w.bad("what is answered is stored", "phase %s of %s: the attempt is in %s", p, k.ref.Job, a.Phase)
			}
			return err
		})
	}
	k.sent(c, func(any) { done() })
}

// user starts the first or another process of the user.
func (k *work) user() {
	if k.cancel || k.r.time() >= k.trust { // not any more
		return
	}
	if !k.box.user {
		k.box.user = true
		k.r.w.userCode(k)
	}
}

// next does what comes next for an attempt, unless it waits for an answer.
func (k *work) next() {
	w := k.r.w
	if k.waiting {
		return
	}
	spec := k.ticket.Job
	switch {
	case k.cancel && k.stage < stageEnding:
		k.complete(protocol.Complete{Conclusion: ci.ConclusionCancelled, Reason: ci.ReasonCancelled})
		return
	case k.r.leaving && k.stage < stageRan:
		k.handOver(ci.ReasonRunnerShutdown)
		return
	}
	if k.hangs() {
		return
	}
	switch k.stage { //nolint:exhaustive // it has ended then
	case stageClaimed:
		if k.outcome == 99 {
			k.handOver(ci.ReasonRunnerRefused)
			return
		}
		k.phase(ci.PhasePreparing, func() {
			k.stage = stagePrepared
			k.box.alive = !k.cancel
		})
	case stagePrepared:
		switch {
		case k.outcome >= 96 && !w.healing:
			k.box.alive = false
			k.complete(protocol.Complete{Conclusion: ci.ConclusionFailed, Reason: ci.ReasonPrepare})
		case k.restore < len(k.ticket.Restore):
			k.download()
		case slices.Contains(spec.RunsOn.Features, ci.FeatureImage):
			k.phase(ci.PhaseBuilding, func() { k.stage = stageBuilding; k.user() })
		default:
			k.executing()
		}
	case stageBuilding:
		k.executing()
	case stageExecuting:
		if k.writes > 0 && k.flying < 3 && !k.out.gone {
			k.writes--
			k.log()
			return
		}
		if w.now >= k.doneAt {
			k.box.alive = false
			k.stage = stageRan
			k.flushBy = w.now + w.rng.Int64N(30*second)
			k.next()
		}
	case stageRan:
		if k.flushed() {
			k.result()
		}
	case stageFinalising:
		k.upload()
	}
}

func (k *work) executing() {
	w := k.r.w
	k.phase(ci.PhaseExecuting, func() {
		k.stage = stageExecuting
		k.user()
		k.doneAt = w.now + int64(k.outcome%40)*second
		if k.outcome == 95 && !w.healing {
			k.doneAt = math.MaxInt64 // it hangs, and its runner keeps no time limit
		}
	})
}

// hangs reports whether the attempt hangs before its commands. Its runner keeps no
// time limit, and renews.
func (k *work) hangs() bool {
	return !k.r.w.healing && (k.stage == stageClaimed && k.outcome == 93 || k.stage == stagePrepared && k.outcome == 94)
}

// result says how the commands ended.
func (k *work) result() {
	exit := func(n int) *int { return &n }
	switch o := k.outcome; {
	case o < 64:
		k.phase(ci.PhaseFinalising, func() { k.stage = stageFinalising })
	case o < 76:
		k.complete(protocol.Complete{Conclusion: ci.ConclusionFailed, Reason: ci.ReasonExit, ExitCode: exit(1)})
	case o < 84:
		k.complete(protocol.Complete{Conclusion: ci.ConclusionFailed, Reason: ci.ReasonExit, ExitCode: exit(75)})
	case o < 90:
		k.complete(protocol.Complete{Conclusion: ci.ConclusionTimedOut, Reason: ci.ReasonTimeout})
	case o < 92:
		k.complete(protocol.Complete{Conclusion: ci.ConclusionFailed, Reason: ci.ReasonInternal})
	default:
		k.phase(ci.PhaseFinalising, func() { k.stage = stageFinalising })
	}
}

func (k *work) success() protocol.Complete {
	c := protocol.Complete{Conclusion: ci.ConclusionSuccess, SourceDigest: k.ticket.Source.Digest, Artifacts: k.sealed}
	for _, name := range k.ticket.Job.Outputs {
		c.Outputs = map[string]string{name: fmt.Sprint(k.outcome % 3)}
	}
	return c
}

func (k *work) complete(req protocol.Complete) {
	w := k.r.w
	k.stage = stageEnding
	k.box.alive = false
	req.RequestID = w.newID(ci.PrefixRequest)
	req.Evidence = protocol.Evidence{Terminated: true, How: "cgroup"}
	req.Streams = k.out.finals()
	k.end(routeComplete, string(req.Conclusion), req.RequestID, engine.Digest(req), func(n *node, held engine.Held) (any, error) {
		got, err := n.e.Complete(w.ctx, held, req)
		if err == nil {
			n.logs.Ended(store.AttemptKey{Job: k.ref.Job, Epoch: k.ref.Epoch})
		}
		return got, err
	}, func() {
		// Cancellation came first: the attempt ends as cancelled.
		k.cancel = true
		k.complete(protocol.Complete{Conclusion: ci.ConclusionCancelled, Reason: ci.ReasonCancelled})
	})
}

func (k *work) handOver(reason ci.Reason) {
	w := k.r.w
	k.stage = stageEnding
	k.box.alive = false
	req := protocol.HandOver{RequestID: w.newID(ci.PrefixRequest), Reason: reason, Evidence: protocol.Evidence{Terminated: true, How: "cgroup"}}
	k.end(routeHandOver, string(reason), req.RequestID, engine.Digest(req), func(n *node, held engine.Held) (any, error) {
		got, err := n.e.HandOver(w.ctx, held, req)
		if err == nil {
			n.logs.Ended(store.AttemptKey{Job: k.ref.Job, Epoch: k.ref.Epoch})
		}
		return got, err
	}, func() {
		k.cancel = true
		k.complete(protocol.Complete{Conclusion: ci.ConclusionCancelled, Reason: ci.ReasonCancelled})
	})
}

// end sends how the attempt ended until it is answered.
func (k *work) end(route, text, request, digest string, exec func(*node, engine.Held) (any, error), cancelled func()) {
	w := k.r.w
	c := k.lease(route, text, exec)
	access := engine.ActiveOnly
	if route == routeComplete {
		access = engine.WhileCancelling
	}
	c.exec = func(n *node) (any, error) {
		return w.leaseCall(n, k.r.who, k.ref, route, access, func(n *node) (any, bool, error) {
			return wrap(n.e.StoredAnswer(w.ctx, k.r.who, k.ref, request, digest))
		}, exec)
	}
	c.cancelling = text == string(ci.ConclusionCancelled)
	c.request, c.stored, c.ends, c.merges = request, true, true, true
	// An artifact may have expired, a cancelled run may not be cancelling any more.
	c.may = []ci.Kind{ci.ErrGone}
	c.truth = func(rep any) { w.checkEnd(k.ref, request, rep.(protocol.Completed)) }
	k.sent(c, func(any) { k.finish() })
	done := c.done
	c.done = func(rep any, err error) {
		if !k.gone && err != nil && ci.RejectOf(err) == ci.RejectCancelling {
			if route == routeComplete {
				w.saw(evCancelFirst)
			} else {
				w.saw(evHandOverLate)
			}
			k.waiting = false
			cancelled()
			return
		}
		done(rep, err)
	}
}

func wrap(answer protocol.Completed, ok bool, err error) (any, bool, error) { return answer, ok, err }

// download restores the next artifact and verifies it: what arrives is what the
// winner of the producer made.
func (k *work) download() {
	w := k.r.w
	want := k.ticket.Restore[k.restore]
	c := k.lease(routeDownload, want.Name, func(n *node, held engine.Held) (any, error) {
		return n.files.Download(w.ctx, held, want.ID)
	})
	k.sent(c, func(rep any) {
		w.damageDownload()
		data, _, err := w.blobs.request(w.ctx, "GET", rep.(protocol.SignedURL).URL, nil)
		if err != nil || int64(len(data)) != want.Size || "sha256:"+hexSum(data) != want.Digest {
			w.saw(evRestoreAgain)
			return // asked for again
		}
		w.checkRestored(k, want, data)
		w.saw(evRestored)
		k.restore++
	})
}

// checkRestored requires the bytes of the attempt that won.
func (w *world) checkRestored(k *work, want protocol.RestoreArtifact, data []byte) {
	w.read(func(tx *store.Tx) error {
		a, ok, err := tx.ArtifactSession(w.ctx, k.r.org.id, want.ID)
		if err != nil || !ok {
			w.bad("VE-5", "job %s restored artifact %s, which is not there: %v", k.ref.Job, want.ID, err)
		}
		maker, _, err := tx.Attempt(w.ctx, a.Job, a.Epoch)
		if text := artifactText(want.Name, maker.Lease); maker.Winner == 0 || text != string(data) {
			w.bad("VE-5", "job %s restored %q; attempt %d of %s made %q, winner %d", k.ref.Job, data, a.Epoch, a.Job, text, maker.Winner)
		}
		return err
	})
}

func artifactText(name string, by ci.LeaseID) string {
	return fmt.Sprintf("archive of %s by %s", name, by)
}

// upload uploads the next artifact, and completes when there is none.
func (k *work) upload() {
	w := k.r.w
	if k.publish >= len(k.ticket.Job.Publish) {
		k.complete(k.success())
		return
	}
	p := k.ticket.Job.Publish[k.publish]
	if p.Optional && k.outcome%2 == 0 {
		k.publish++
		k.upload()
		return
	}
	data := []byte(artifactText(p.Name, k.ref.Lease))
	sum := sha256.Sum256(data)
	digest := "sha256:" + hex.EncodeToString(sum[:])
	part := protocol.ArtifactPart{Number: 1, Size: int64(len(data)), Digest: digest, ETag: k.etag}
	switch k.part {
	case 0:
		req := protocol.NewArtifact{RequestID: "up-" + string(k.ref.Lease) + p.Name, Name: p.Name, Size: int64(len(data)), Digest: digest, Files: 1, Bytes: 9}
		exec := func(n *node, held engine.Held) (any, error) {
			return n.files.Begin(w.ctx, held, req, engine.Digest(req))
		}
		c := k.lease(routeBegin, p.Name, exec)
		c.exec = func(n *node) (any, error) {
			return w.leaseCall(n, k.r.who, k.ref, routeBegin, engine.ActiveOnly, func(n *node) (any, bool, error) {
				got, ok, err := n.files.StoredSession(w.ctx, k.r.who, k.ref, req, engine.Digest(req))
				return got, ok, err
			}, exec)
		}
		c.request = req.RequestID
		c.may = []ci.Kind{ci.ErrNotFound} // a repeat finds it abandoned
		id := ""
		c.truth = func(rep any) {
			got := rep.(protocol.ArtifactSession).ID
			if id != "" {
				w.saw(evUploadTwice)
			}
			if id != "" && id != got {
				w.bad("same request, same answer", "upload session %s and %s", id, got)
			}
			id = got
		}
		k.sent(c, func(rep any) { k.id, k.part = rep.(protocol.ArtifactSession).ID, 1 })
	case 1:
		id := k.id
		c := k.lease(routeSign, p.Name, func(n *node, held engine.Held) (any, error) {
			return n.files.Sign(w.ctx, held, id, []protocol.ArtifactPart{part})
		})
		c.may = []ci.Kind{ci.ErrConflict, ci.ErrNotFound} // a late repeat finds it sealed
		k.sent(c, func(rep any) {
			// The bytes go straight to the object store.
			_, etag, err := w.blobs.request(w.ctx, "PUT", rep.(protocol.SignedParts).URLs[0].URL, data)
			if err == nil {
				k.etag, k.part = etag, 2
			}
		})
	default:
		id := k.id
		c := k.lease(routeSeal, p.Name, func(n *node, held engine.Held) (any, error) {
			return "sealed", n.files.Seal(w.ctx, held, id, []protocol.ArtifactPart{part})
		})
		c.may = []ci.Kind{ci.ErrNotFound}
		c.truth = func(any) { w.checkSealed(k, id) }
		k.sent(c, func(any) {
			k.sealed[p.Name] = id
			k.publish, k.part, k.etag = k.publish+1, 0, ""
		})
	}
}

// stepTime is how much time passes before a step.
func (w *world) stepTime() int64 {
	switch n := w.rng.IntN(100); {
	case n < 60:
		return w.rng.Int64N(second)
	case n < 97:
		return w.rng.Int64N(4 * second)
	default:
		return w.rng.Int64N(int64(ttl/time.Microsecond) / 2)
	}
}
