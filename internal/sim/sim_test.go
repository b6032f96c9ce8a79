package sim

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
)

// stepsPerSeed is how many steps go wrong before everything heals.
const stepsPerSeed = 340

func TestMain(m *testing.M) {
	flag.Int("seeds", 30, "how many seeds TestSeeds runs")
	flag.Uint64("seed", 1, "the first seed")
	flag.Bool("history", false, "print the history of the first seed")
	flag.Int("shrink", 200, "how many simulations may be spent on cutting the first failing seed down")
	flag.String("summary", "", "file for the one JSON object that TestSeeds comes to")
	flag.Parse()
	os.Exit(m.Run())
}

func setting[T any](name string) T {
	v, _ := flag.Lookup(name).Value.(flag.Getter).Get().(T)
	return v
}

func hexSum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

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
	for w.step = 0; w.step < c.steps; w.step++ {
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
	w.heal()
	w.finally()
	return w.result
}

// act does the step's one thing.
func (w *world) act() {
	r := w.rng
	w.plan = w.drawFault()
	defer func() { w.plan = nil }()
	if w.step == 0 || w.step == 40 {
		w.submit(w.orgs[0])
	}
	switch n := r.IntN(100); {
	case n < 52 && len(w.net) > 0:
		i := 0
		if r.IntN(3) == 0 {
			i = r.IntN(len(w.net)) // out of order
		}
		w.deliver(w.net[i])
	case n < 60 && len(w.net) > 1:
		var batch []*call
		for _, i := range r.Perm(len(w.net)) {
			if w.net[i].merges && len(batch) < 5 {
				batch = append(batch, w.net[i])
			}
		}
		if len(batch) > 0 {
			w.deliverBatch(batch)
		}
	case n < 78:
		for range 3 {
			w.runners[r.IntN(len(w.runners))].think()
		}
	case n < 86:
		w.sweep(w.up(r))
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
	switch k := r.IntN(22); {
	case k < 3 && rn.alive:
		fault("runner crash", func() {
			rn.end()
			if r.IntN(3) == 0 { // the host went down with it
				for _, b := range rn.left {
					b.alive = false
				}
			}
		})
	case k < 8 && !rn.alive:
		fault("runner restart", func() { rn.begin(r.IntN(3) > 0) })
	case k < 10 && rn.alive:
		fault("runner paused or resumed", func() { rn.paused = !rn.paused })
	case k < 11 && rn.alive && rn.session != "":
		fault("runner drains", func() {
			rn.draining = true
			rn.leaving = r.IntN(2) == 0
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
	w.jumps = append(w.jumps, delta)
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
	w.step = w.steps
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
				r.drained = false
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
		w.pass(3 * second)
		for _, n := range w.nodes {
			w.sweep(n)
		}
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
		for _, c := range slices.Clone(w.net) {
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

func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// summary is the last line of `make sim`.
type summary struct {
	Seeds      int      `json:"seeds"`
	Steps      int      `json:"steps"`
	Faults     int      `json:"faults"`
	Violations int      `json:"violations"`
	Stuck      int      `json:"stuck"`
	Distinct   int      `json:"distinct_traces"`
	Pairs      []string `json:"state_pairs_reached"`
	Rejects    []string `json:"reject_reasons_reached"`
	Speed      float64  `json:"simulated_s_per_cpu_s"`
	PerSeed    float64  `json:"cpu_ms_per_seed"`
	Merges     int      `json:"merges"`
}

func TestSeeds(t *testing.T) {
	seeds, first := setting[int]("seeds"), setting[uint64]("seed")
	var sum summary
	traces := map[string]bool{}
	pairs, rejects, kinds := map[string]int{}, map[ci.Reject]int{}, map[string]int{}
	var simulated time.Duration
	began := cpu()
	for i := range seeds {
		c := config{seed: first + uint64(i), steps: stepsPerSeed, history: i == 0 && setting[bool]("history")}
		r := simulate(c)
		sum.Seeds++
		sum.Steps += r.ran
		sum.Faults += r.faults()
		sum.Merges += r.merges
		traces[r.hash] = true
		simulated += r.simulated
		for k, n := range r.pairs {
			pairs[k] += n
		}
		for k, n := range r.rejects {
			rejects[k] += n
		}
		for k, n := range r.kinds {
			kinds[k] += n
		}
		for _, line := range r.lines {
			t.Log(line)
		}
		if r.violation != nil {
			sum.Violations++
			if r.busy {
				sum.Stuck++
			}
			t.Errorf("seed %d: %v", c.seed, r.violation)
			if n := setting[int]("shrink"); sum.Violations == 1 && n > 0 {
				report(t, c, r, n)
			}
		}
	}
	used := cpu() - began
	sum.Distinct = len(traces)
	for k := range pairs {
		sum.Pairs = append(sum.Pairs, k)
	}
	for k := range rejects {
		sum.Rejects = append(sum.Rejects, string(k))
	}
	slices.Sort(sum.Pairs)
	slices.Sort(sum.Rejects)
	sum.Speed = simulated.Seconds() / used.Seconds()
	sum.PerSeed = float64(used.Milliseconds()) / float64(seeds)
	t.Log(kinds)
	line, err := json.Marshal(sum)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(string(line))
	if name := setting[string]("summary"); name != "" {
		if err := os.WriteFile(name, append(line, '\n'), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// report shrinks a failing seed and prints what is left of it.
func report(t *testing.T, c config, r result, budget int) {
	t.Helper()
	small, again := shrink(c, r.violation, budget)
	t.Logf("seed %d is cut down to %d steps and %d faults: %v", c.seed, again.ran, again.faults(), again.violation)
	var kept []int
	for i := range small.steps {
		if !small.drop[i] && (small.from == 0 || i < small.from) {
			kept = append(kept, i)
		}
	}
	t.Logf("its steps: %v", kept)
	for _, line := range again.lines {
		t.Log(line)
	}
}
