package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// stepsPerSeed is how many steps go wrong before everything heals; a seed in which
// too little has gone wrong by then goes on.
const (
	stepsPerSeed  = 320
	fewestSteps   = 300
	fewestFaults  = 20
	longestFactor = 4
)

// simulate runs one simulation to its end or to the first broken promise.
func simulate(c config) (r result) {
	w, err := newWorld(c)
	if err != nil {
		return result{violation: &violation{invariant: "model", detail: err.Error()}}
	}
	defer func() {
		if p := recover(); p != nil {
			v, ok := p.(*violation)
			if !ok {
				panic(p)
			}
			w.violation = v
			w.tell("BROKEN %s: %s", v.invariant, v.detail)
		}
		w.result.hash = w.traceHash()
		w.simulated = time.Duration(w.now) * time.Microsecond
		r = w.result
		if err := w.close(); err != nil && r.violation == nil {
			r.violation = &violation{invariant: "model", detail: err.Error()}
		}
	}()
	for w.step = 0; w.step < c.steps || w.tooShort(); w.step++ {
		if c.drop[w.step] || c.from > 0 && w.step >= c.from {
			continue
		}
		w.sources()
		w.pass(w.stepTime())
		w.sweepDue()
		w.act()
		if w.sabotage != nil {
			w.sabotage(w)
		}
		w.follow()
		w.ran++
		if w.step%25 == 24 {
			w.full()
		}
	}
	w.drawn = w.step
	w.heal()
	w.finally()
	return w.result
}

// tooShort reports whether a seed that is run whole goes on: a seed that is being
// cut down has the length that it had.
func (w *world) tooShort() bool {
	whole := w.config.drop == nil && w.config.calm == nil && w.config.from == 0 && w.config.steps >= fewestSteps
	return whole && w.step < longestFactor*w.config.steps && (w.ran < fewestSteps || w.faults() < fewestFaults)
}

// act does the step's one thing.
func (w *world) act() {
	r := w.rng
	w.plan, w.storePlan = w.drawFault(), w.drawStoreFault()
	defer func() { w.plan, w.storePlan = nil, nil }()
	if w.step == 0 || w.step == 40 {
		w.submit(w.orgs[0])
	}
	net := w.arriving()
	switch n := r.IntN(100); {
	case n < 52 && len(net) > 0:
		i := 0
		if r.IntN(3) == 0 {
			i = r.IntN(len(net)) // out of order
		}
		w.deliver(net[i])
	case n < 60 && len(net) > 1:
		var batch []*call
		for _, i := range r.Perm(len(net)) {
			if net[i].merges && len(batch) < 5 {
				batch = append(batch, net[i])
			}
		}
		if len(batch) > 0 {
			w.deliverBatch(batch)
		}
	case n < 78:
		for range 3 {
			w.runners[r.IntN(len(w.runners))].think()
		}
	case n < 83:
		w.sweep(w.up(r))
	case n < 86:
		w.tend(w.up(r))
	case n < 87:
		w.peruse(w.up(r))
	case n < 92:
		w.operate()
	case n < 94 && !w.calm[w.step]:
		w.lie()
	case n < 99 && !w.calm[w.step]:
		w.disturb()
	default:
		for _, rn := range w.runners {
			rn.think()
		}
	}
}

// sweepDue lets nodes sweep that have not for long: each does so by itself.
func (w *world) sweepDue() {
	for _, n := range w.nodes {
		if n.e != nil && w.now-n.swept > ttlUS/4 {
			w.sweep(n)
			w.follow()
		}
	}
}

func (w *world) sweep(n *node) {
	n.swept = w.now
	var err error
	w.tell("sweep of node %d", n.index)
	if n.serve(func() { err = n.e.Sweep(w.ctx, true) }) {
		return
	}
	if err != nil && ci.KindOf(err) != ci.ErrUnavailable {
		w.bad("no defect", "sweep: %v", err)
	}
}

// disturb makes something go wrong that is no fault of a transaction.
func (w *world) disturb() {
	r := w.frng
	rn := w.runners[r.IntN(len(w.runners))]
	n := w.nodes[r.IntN(len(w.nodes))]
	fault := func(kind string, f func()) {
		w.wrong(kind)
		w.tell("fault: %s (%s, node %d)", kind, rn.name, n.index)
		f()
	}
	opening := slices.DeleteFunc(slices.Clone(w.runners), func(r *runner) bool { return !r.alive || !r.opening })
	switch k := r.IntN(24); {
	case k < 3 && rn.alive:
		fault("runner crash", func() {
			rn.sentIsLate(func() bool { return r.IntN(2) == 0 })
			rn.end()
			if r.IntN(3) == 0 { // the host went down with it
				for _, b := range rn.left {
					b.alive = false
				}
			}
		})
	case (k == 23 || k == 3) && len(opening) > 0: // a supervisor starts it again at once
		rn = opening[r.IntN(len(opening))]
		fault("runner crash while it opens a session", func() {
			rn.sentIsLate(func() bool { return true })
			rn.end()
			rn.begin(r.IntN(3) > 0)
			rn.think()
		})
	case k < 8 && !rn.alive:
		fault("runner restart", func() { rn.begin(r.IntN(3) > 0) })
	case k < 10 && rn.alive:
		fault("runner paused or resumed", func() { rn.paused = !rn.paused })
	case (k < 11 || k == 21 || k == 22) && rn.alive && rn.session != "":
		fault("runner drains", func() {
			rn.draining = true
			rn.leaving = r.IntN(4) > 0
			rn.drain(false)
		})
	case k < 14:
		fault("node stopped or started", func() {
			if n.e == nil {
				w.restart(n)
			} else {
				n.stop()
			}
		})
	case k < 17:
		delta := []int64{ttlUS * 2, -ttlUS * 2, 3600 * second, -3600 * second, 24 * 3600 * second}[r.IntN(5)]
		fault("the database's clock jumps", func() { w.jump(delta) })
	case k < 18:
		delta := r.Int64N(ttlUS/4) - ttlUS/8
		fault("the database's clock is set a little", func() {
			w.db.jump(w.now, delta)
			w.fair.jump(w.now, max(delta, 0))
		})
	case k == 20 && rn.alive && rn.session != "" && !rn.draining: // its credential was replaced, say
		fault("runner's polls are refused", func() { rn.session = "" })
	case k < 20:
		rate := []float64{0.5, 0.9, 1, 1, 1.1, 1.9}[r.IntN(6)]
		fault("the database's clock changes its rate", func() {
			w.tell("  to %.1f", rate)
			w.db.setRate(w.now, rate)
			w.fair.setRate(w.now, max(rate, 1))
		})
	default:
		fault("time passes", func() { w.pass(r.Int64N(2 * ttlUS)) })
	}
}

// jump sets the database's clock.
func (w *world) jump(delta int64) {
	w.tell("  by %d s", delta/second)
	w.db.jump(w.now, delta)
	if w.mirror.fresh { // made under either of two clocks
		w.mirror.excuse()
	}
	w.mirror.pending = true
	for _, n := range w.nodes {
		if n.e != nil {
			return
		}
	}
	w.mirror.excuse() // nobody was there to notice
}

// heal stops all faults and demands that everything ends: within three TTLs and
// the time that the jobs themselves and their backoffs take.
func (w *world) heal() {
	w.healing = true
	w.sources()
	w.tell("everything heals")
	w.db.setRate(w.now, 1)
	w.fair.setRate(w.now, 1)
	for _, n := range w.nodes {
		if n.e == nil {
			w.restart(n)
		}
		n.clock.setRate(w.now, 1)
	}
	for _, r := range w.runners {
		r.clock.setRate(w.now, 1)
		r.paused = false
		for _, k := range r.works {
			k.doneAt = min(k.doneAt, w.now)
		}
		for _, b := range r.left {
			b.alive = false
		}
	}
	const jobTime, backoff = 45 * second, 20 * second
	left := int64(0)
	for _, j := range w.mirror.jobs {
		if j.State != ci.StateFinished {
			left += 1 + ci.DefaultInfraBudget
		}
	}
	for _, c := range w.net {
		if c.route == "submit" || c.route == "retry" || c.route == "requeue" {
			left += 12 * (1 + ci.DefaultInfraBudget)
		}
	}
	deadline := w.now + 3*ttlUS + left*(jobTime+backoff)
	for {
		for _, r := range w.runners {
			if r.drained { // it works again when it opens a new session
				r.end()
			}
			if !r.alive {
				r.begin(true)
			}
		}
		w.quiet()
		if w.settled() {
			break
		}
		if w.now > deadline {
			w.stuck()
		}
		w.pass(ci.SweepEvery(ttl).Microseconds())
		for _, n := range w.nodes {
			w.sweep(n)
		}
		w.tend(w.nodes[0])
		w.follow()
	}
}

// quiet lets everything happen that can happen now.
func (w *world) quiet() {
	for range 200 {
		for _, r := range w.runners {
			r.think()
		}
		if len(w.net) == 0 {
			return
		}
		idle := true
		for _, c := range w.arriving() {
			if c.route != "claim" || c.from.life != c.life {
				idle = false
			}
			w.deliver(c)
			w.follow()
			w.ran++
		}
		if idle && !w.claimed() {
			return
		}
	}
}

func (w *world) claimed() bool {
	for _, r := range w.runners {
		for _, k := range r.works {
			if !k.waiting && (k.stage != stageExecuting || w.now >= k.doneAt) {
				return true
			}
		}
	}
	return false
}

// settled reports whether everything that can end has; what nobody can run is
// cancelled, as a person would.
func (w *world) settled() bool {
	m := &w.mirror
	done := true
	for _, id := range m.runOrder {
		run := m.runs[id]
		if run.State == ci.StateFinished {
			continue
		}
		done = false
		hopeless := run.State != ci.StateCancelling
		for _, j := range m.jobs {
			if j.Run == id && j.State != ci.StateFinished && j.State != ci.StateWaiting {
				spec := m.specs[j.ID]
				hopeless = hopeless && j.State == ci.StateReady && slices.Contains(spec.RunsOn.Labels, labelNobody)
			}
		}
		if hopeless {
			w.tell("run %s has jobs that nobody can run", short(id))
			for _, o := range w.orgs {
				if o.id == run.Org {
					w.cancel(o, id)
				}
			}
			w.quiet()
		}
	}
	return done && len(m.leases) == 0 && len(m.occupied) == 0
}

// stuck names what did not end.
func (w *world) stuck() {
	var what []string
	for _, id := range w.mirror.jobOrder {
		if j := w.mirror.jobs[id]; j.State != ci.StateFinished {
			what = append(what, fmt.Sprintf("job %s %s is %s (%s) epoch %d phase %s needs %v", j.Name, id, j.State, j.Detail, j.Epoch, j.Phase,
				w.mirror.specs[id].RunsOn))
		}
	}
	for _, o := range w.mirror.occupied {
		what = append(what, fmt.Sprintf("a slot of %s is taken by %s/%d (quarantined %d)", o.Runner, o.Job, o.Epoch, o.Quarantined))
	}
	for _, l := range w.mirror.leases {
		what = append(what, fmt.Sprintf("lease %v", l.row.Ref()))
	}
	w.busy = true
	slices.Sort(what)
	w.bad("everything ends", "%s", strings.Join(what, "; "))
}
