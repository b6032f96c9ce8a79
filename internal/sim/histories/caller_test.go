package histories

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// callsEach is how many calls each of the eight goroutines makes.
const callsEach = 14

// caller is one goroutine with calls to make.
type caller struct {
	*history
	client int
	runner int
	rng    *rand.Rand
	sure   bool // does not give up
}

// live lets eight goroutines call for a while, and things go wrong.
func (h *history) live() {
	h.w.wrong.Store(true)
	defer h.w.wrong.Store(false)
	var all sync.WaitGroup
	for i := range 8 {
		c := &caller{history: h, client: i, runner: i % runners, rng: rand.New(rand.NewPCG(h.seed, uint64(i)+2))}
		if i == 0 {
			c.submit() // the others find it, now or later
		}
		all.Go(func() {
			for range callsEach {
				if i < 2*runners {
					c.asRunner()
				} else {
					c.asPerson()
				}
			}
		})
	}
	all.Wait()
}

// ctx is a caller's patience: most have it.
func (c *caller) ctx() (context.Context, context.CancelFunc) {
	if c.sure || c.rng.IntN(100) >= 4 {
		return context.WithCancel(c.w.ctx)
	}
	return context.WithTimeout(c.w.ctx, time.Duration(c.rng.Int64N(int64(3*time.Millisecond))))
}

func (c *caller) engine() *engine.Engine { return c.node(c.rng.IntN(2)) }

// request makes a request ID.
func (c *caller) request(word string) string { return fmt.Sprintf("%s%d", word, c.calls.Add(1)) }

// call records a call; one whose answer was lost is made again later with the
// same request.
func (c *caller) call(in input, f func(context.Context, *engine.Engine) (output, error), then func(*caller, output)) {
	in.runner = c.runner
	var once func(*caller)
	once = func(c *caller) {
		ctx, cancel := c.ctx()
		e := c.engine()
		out := c.record(c.client, in, func() (output, error) { return f(ctx, e) })
		cancel()
		if then != nil {
			then(c, out)
		}
		if out.unknown || c.rng.IntN(12) == 0 {
			c.mu.Lock()
			h := c.hosts[in.runner]
			if len(h.again) < 6 {
				h.again = append(h.again, once)
			}
			c.mu.Unlock()
		}
	}
	once(c)
}

// lease returns one of the leases that the runner was given, the late ones most
// of all, seldom another runner's.
func (c *caller) lease() (ci.LeaseRef, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	refs := c.hosts[c.runner].refs
	if c.rng.IntN(40) == 0 {
		refs = c.hosts[(c.runner+1)%runners].refs
	}
	if len(refs) == 0 {
		return ci.LeaseRef{}, false
	}
	n := min(len(refs), 2)
	if c.rng.IntN(5) == 0 {
		n = len(refs)
	}
	return refs[len(refs)-1-c.rng.IntN(n)], true
}

func (c *caller) asRunner() {
	c.mu.Lock()
	host := c.hosts[c.runner]
	var again func(*caller)
	if len(host.again) > 0 && c.rng.IntN(2) == 0 {
		again = host.again[0]
		host.again = host.again[1:]
	}
	c.mu.Unlock()
	if again != nil {
		again(c)
		return
	}
	ref, ok := c.lease()
	switch n := c.rng.IntN(100); {
	case !ok || n < 25:
		c.claim(c.rng.IntN(6) == 0)
	case n < 40:
		c.renew()
	case n < 62:
		c.phase(ref)
	case n < 84:
		c.complete(ref)
	case n < 89:
		c.handOver(ref)
	case n < 96:
		c.terminated(ref)
	default:
		c.open()
	}
}

func (c *caller) asPerson() {
	switch n := c.rng.IntN(100); {
	case n < 10:
		c.submit()
	case n < 35:
		c.w.pass([]time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second, 8 * time.Second, 20 * time.Second, 61 * time.Second}[c.rng.IntN(6)])
	case n < 55:
		c.sweep()
	case n < 80:
		c.look(c.rng.IntN(3), c.rng.IntN(3) > 0)
	case n < 85:
		c.cancel(c.rng.IntN(3))
	case n < 97:
		c.retry(1 + c.rng.IntN(2))
	default:
		c.restart(c.rng.IntN(2))
	}
}

func (c *caller) submit() {
	c.call(input{kind: doSubmit}, func(ctx context.Context, e *engine.Engine) (output, error) {
		id, err := e.Submit(ctx, engine.Submission{
			Org: c.org, Repo: c.repo, Actor: "people", Source: sourceDigest, Trust: ci.TrustTrusted,
			Event: "manual", Plan: c.plan, IdempotencyKey: "main", RequestDigest: "main",
		})
		return output{run: id}, err
	}, found(0))
}

// found keeps the ID of a run that was made.
func found(n int) func(*caller, output) {
	return func(c *caller, out output) {
		if out.unknown || out.run == "" {
			return
		}
		c.mu.Lock()
		c.known[n] = out.run
		c.mu.Unlock()
	}
}

// made returns the ID of a run that somebody knows of.
func (c *caller) made(n int) ci.RunID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[n]
}

func (c *caller) claim(repeat bool) {
	c.mu.Lock()
	host := c.hosts[c.runner]
	req := protocol.Claim{Session: host.session, RequestID: c.request("c")}
	if repeat && len(host.claims) > 0 {
		req = host.claims[c.rng.IntN(len(host.claims))]
	} else {
		host.claims = append(host.claims, req)
	}
	c.mu.Unlock()
	c.call(input{kind: doClaim, session: req.Session, request: req.RequestID}, func(ctx context.Context, e *engine.Engine) (output, error) {
		ticket, err := e.Claim(ctx, host.who, req)
		if err != nil || ticket == nil {
			return output{}, err
		}
		return output{ref: &ticket.Lease}, nil
	}, func(c *caller, out output) {
		if out.ref == nil && !c.sure {
			hold(time.Duration(c.rng.Int64N(int64(time.Millisecond)))) // others make something of it
		}
		c.mu.Lock()
		if out.ref != nil && !slices.Contains(host.refs, *out.ref) {
			host.refs = append(host.refs, *out.ref)
		}
		c.mu.Unlock()
	})
}

func (c *caller) renew() {
	c.mu.Lock()
	host := c.hosts[c.runner]
	session := host.session
	refs := slices.Clone(host.refs[max(0, len(host.refs)-3):])
	c.mu.Unlock()
	c.call(input{kind: doRenew, session: session, refs: refs}, func(ctx context.Context, e *engine.Engine) (output, error) {
		reply, err := e.Renew(ctx, host.who, session, refs)
		var out output
		for _, l := range reply.Leases {
			out.answers = append(out.answers, l.Answer)
		}
		return out, err
	}, nil)
}

func (c *caller) phase(ref ci.LeaseRef) {
	phase := []ci.Phase{ci.PhasePreparing, ci.PhaseBuilding, ci.PhaseExecuting, ci.PhaseExecuting, ci.PhaseFinalising}[c.rng.IntN(5)]
	who := c.hosts[c.runner].who
	c.call(input{kind: doPhase, ref: ref, phase: phase}, func(ctx context.Context, e *engine.Engine) (output, error) {
		held, err := e.Hold(ctx, who, ref, "phase", engine.ActiveOnly)
		if err != nil {
			return output{}, err
		}
		return output{}, e.SetPhase(ctx, held, protocol.SetPhase{RequestID: "p", Phase: phase})
	}, nil)
}

// results are what runners report.
func (c *caller) result() protocol.Complete {
	r := protocol.Complete{SourceDigest: sourceDigest, Evidence: protocol.Evidence{Terminated: true, How: "cgroup"}}
	exit := 1
	switch c.rng.IntN(8) {
	case 0, 1, 2:
		r.Conclusion = ci.ConclusionSuccess
	case 3:
		r.Conclusion, r.Reason, r.ExitCode = ci.ConclusionFailed, ci.ReasonExit, &exit
	case 4:
		exit = 75
		r.Conclusion, r.Reason, r.ExitCode = ci.ConclusionFailed, ci.ReasonExit, &exit
	case 5:
		r.Conclusion, r.Reason = ci.ConclusionTimedOut, ci.ReasonTimeout
	case 6:
		r.Conclusion, r.Reason = ci.ConclusionFailed, ci.ReasonPrepare
	default:
		r.Conclusion, r.Reason = ci.ConclusionCancelled, ci.ReasonUser
	}
	return r
}

func (c *caller) complete(ref ci.LeaseRef) {
	r := c.result()
	r.RequestID = "done"
	if c.rng.IntN(4) == 0 {
		r.RequestID = "other"
	}
	c.report(ref, r)
}

func (c *caller) report(ref ci.LeaseRef, r protocol.Complete) {
	who := c.hosts[c.runner].who
	digest := engine.Digest(r)
	in := input{kind: doComplete, ref: ref, request: r.RequestID, digest: digest, result: r}
	c.call(in, func(ctx context.Context, e *engine.Engine) (output, error) {
		var out output
		held, repeated, err := e.HoldOr(ctx, who, ref, "complete", engine.WhileCancelling, func() (ok bool, err error) {
			out.done, ok, err = e.StoredAnswer(ctx, who, ref, r.RequestID, digest)
			return ok, err
		})
		if err == nil && !repeated {
			out.done, err = e.Complete(ctx, held, r)
		}
		return out, err
	}, nil)
}

func (c *caller) handOver(ref ci.LeaseRef) {
	who := c.hosts[c.runner].who
	req := protocol.HandOver{RequestID: "over", Reason: ci.ReasonRunnerShutdown, Evidence: protocol.Evidence{Terminated: true, How: "cgroup"}}
	digest := engine.Digest(req)
	in := input{kind: doHandOver, ref: ref, request: req.RequestID, digest: digest, result: protocol.Complete{Reason: req.Reason}}
	c.call(in, func(ctx context.Context, e *engine.Engine) (output, error) {
		var out output
		held, repeated, err := e.HoldOr(ctx, who, ref, "hand-over", engine.ActiveOnly, func() (ok bool, err error) {
			out.done, ok, err = e.StoredAnswer(ctx, who, ref, req.RequestID, digest)
			return ok, err
		})
		if err == nil && !repeated {
			out.done, err = e.HandOver(ctx, held, req)
		}
		return out, err
	}, nil)
}

func (c *caller) terminated(refs ...ci.LeaseRef) {
	c.mu.Lock()
	host := c.hosts[c.runner]
	session := host.session
	c.mu.Unlock()
	req := protocol.Occupancy{Session: session}
	for _, r := range refs {
		req.Terminated = append(req.Terminated, protocol.AttemptRef{Job: r.Job, Epoch: r.Epoch})
	}
	c.call(input{kind: doOccupied, session: session, refs: refs}, func(ctx context.Context, e *engine.Engine) (output, error) {
		return output{}, e.Occupancy(ctx, host.who, req)
	}, nil)
}

func (c *caller) open() {
	host := c.hosts[c.runner]
	req := c.opening(c.request("o"))
	c.mu.Lock()
	req.After = host.session
	c.mu.Unlock()
	if c.rng.IntN(5) == 0 {
		req.After = c.first[c.runner]
	}
	c.call(input{kind: doOpen, session: req.After, request: req.RequestID}, func(ctx context.Context, e *engine.Engine) (output, error) {
		got, err := e.OpenSession(ctx, host.who, req)
		return output{session: got.Session, latest: got.Latest}, err
	}, func(c *caller, out output) {
		c.mu.Lock()
		if heard := cmp.Or(out.session, out.latest); heard != "" {
			host.session = heard
		}
		c.mu.Unlock()
	})
}

func (c *caller) cancel(n int) {
	id := c.made(n)
	if id == "" {
		return
	}
	c.call(input{kind: doCancel, run: n}, func(ctx context.Context, e *engine.Engine) (output, error) {
		return output{}, e.Cancel(ctx, c.org, "people", id)
	}, nil)
}

func (c *caller) retry(n int) {
	id := c.made(0)
	if id == "" {
		return
	}
	c.mu.Lock()
	c.retried[n] = true
	c.mu.Unlock()
	key := fmt.Sprintf("retry%d", n)
	c.call(input{kind: doRetry, run: n}, func(ctx context.Context, e *engine.Engine) (output, error) {
		fresh, err := e.Retry(ctx, engine.RetryRequest{
			Org: c.org, Actor: "people", Run: id, Failed: c.retries[n-1], IdempotencyKey: key, RequestDigest: key,
		})
		return output{run: fresh}, err
	}, found(n))
}

func (c *caller) sweep() {
	e := c.engine()
	in := input{kind: doSweep, low: c.w.clock.Load()}
	call := c.seq.Add(1)
	if e.Sweep(c.w.ctx, true) != nil {
		return // it promised nothing
	}
	c.mu.Lock()
	c.ops = append(c.ops, operation{c.client, in, output{high: c.w.clock.Load()}, call, c.seq.Add(1)})
	c.mu.Unlock()
}

// look reads the jobs of a run, or the run itself, in one statement.
func (c *caller) look(n int, jobs bool) {
	id := c.made(n)
	if id == "" {
		return
	}
	if !jobs {
		c.call(input{kind: doLookRun, run: n}, func(ctx context.Context, _ *engine.Engine) (out output, err error) {
			err = c.w.store.Read(ctx, func(tx *store.Tx) error {
				r, _, err := tx.Run(ctx, id)
				out.state, out.concl, out.reason = r.State, r.Conclusion, r.Reason
				return err
			})
			return out, err
		}, nil)
		return
	}
	c.call(input{kind: doLook, run: n}, func(ctx context.Context, _ *engine.Engine) (out output, err error) {
		err = c.w.store.Read(ctx, func(tx *store.Tx) error {
			js, err := tx.JobsOfRun(ctx, id)
			for _, j := range js {
				v := jobView{j.State, j.Conclusion, j.Reason, j.Epoch, ""}
				if j.State == ci.StateRunning {
					v.phase = j.Phase
				}
				out.jobs = append(out.jobs, v)
			}
			return err
		})
		return out, err
	}, nil)
}
