package histories

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// finish brings everything to its end, nothing going wrong any more: late leases
// run out, slots are reported, what is ready succeeds. A history in which that is
// not possible is stuck.
func (h *history) finish() error {
	c := &caller{history: h, client: 8, rng: newRand(h.seed, 99), sure: true}
	c.submit()
	c.w.pass(ttl + time.Second)
	if err := c.work(0); err != nil {
		return err
	}
	for n := 1; n < len(h.retried); n++ {
		if h.retried[n] {
			c.retry(n)
		}
	}
	for n := 1; n < len(h.retried); n++ {
		if err := c.work(n); err != nil {
			return err
		}
	}
	for n := range h.known {
		c.look(n, true)
		c.look(n, false)
	}
	return nil
}

// work serves until a run has finished.
func (c *caller) work(n int) error {
	id := c.made(n)
	if id == "" {
		return nil
	}
	for range 60 {
		var r store.Run
		err := c.w.store.Read(c.w.ctx, func(tx *store.Tx) (err error) {
			r, _, err = tx.Run(c.w.ctx, id)
			return err
		})
		if err != nil || r.State == ci.StateFinished {
			return err
		}
		c.w.pass(8 * time.Second)
		for range c.nodes {
			c.sweep()
		}
		for i, host := range c.hosts {
			c.runner = i
			c.terminated(host.refs...)
			for range c.slots {
				before := len(host.refs)
				c.claim(false)
				if len(host.refs) == before {
					break
				}
				ok := protocol.Complete{
					RequestID: "done", Conclusion: ci.ConclusionSuccess, SourceDigest: sourceDigest,
					Evidence: protocol.Evidence{Terminated: true, How: "cgroup"},
				}
				c.report(host.refs[before], ok)
			}
		}
	}
	return fmt.Errorf("run %s does not end", id)
}

// facts are what the database says about a finished history.
type facts struct {
	attempts map[store.AttemptKey]store.Attempt
	claims   map[store.ClaimKey]store.Attempt
	trail    []store.Audit
	ended    map[store.AttemptKey]store.Audit
	sessions map[string]store.Session // by runner and request
}

func (h *history) facts() (f facts, err error) {
	ctx := h.w.ctx
	f.attempts, f.claims = map[store.AttemptKey]store.Attempt{}, map[store.ClaimKey]store.Attempt{}
	f.ended, f.sessions = map[store.AttemptKey]store.Audit{}, map[string]store.Session{}
	copy(h.ids, h.known[:])
	err = h.w.store.Read(ctx, func(tx *store.Tx) error {
		if f.trail, err = tx.AuditAfter(ctx, h.org, 0, 100_000); err != nil {
			return err
		}
		for n, id := range h.ids {
			if id == "" {
				continue
			}
			js, err := tx.JobsOfRun(ctx, id)
			if err != nil {
				return err
			}
			for i, j := range js {
				h.where[j.ID] = place{n, i}
				as, err := tx.AttemptsOfJob(ctx, j.ID)
				if err != nil {
					return err
				}
				for _, a := range as {
					f.attempts[store.AttemptKey{Job: a.Job, Epoch: a.Epoch}] = a
					f.claims[store.ClaimKey{Session: a.Session, Request: a.ClaimRequest}] = a
				}
			}
		}
		for _, o := range h.ops {
			if o.in.kind != doOpen {
				continue
			}
			s, ok, err := tx.SessionByRequest(ctx, h.runnerIDs[o.in.runner], o.in.request)
			if err != nil {
				return err
			}
			if ok {
				f.sessions[openKey(o.in)] = s
			}
		}
		return nil
	})
	for _, a := range f.trail {
		if a.Action == "attempt_ended" {
			f.ended[store.AttemptKey{Job: a.Job, Epoch: a.Epoch}] = a
		}
	}
	return f, err
}

func openKey(in input) string { return fmt.Sprint(in.runner, " ", in.request) }

// contradictions are what the trail alone shows to be wrong: a run that nobody
// asked for, time that goes back under a job's locks.
func (h *history) contradictions(f facts) (bad []string) {
	last := map[ci.JobID]int64{}
	for _, a := range f.trail {
		if a.Action == "run_created" && !slices.Contains(h.ids, a.Run) {
			bad = append(bad, fmt.Sprintf("run %s was made out of nothing", a.Run))
		}
		if a.Job == "" || a.Action == "rejected" {
			continue
		}
		if a.AtUS < last[a.Job] {
			bad = append(bad, fmt.Sprintf("job %s: %s %d at %s, behind something at %s", a.Job, a.Action, a.Epoch, clockText(a.AtUS), clockText(last[a.Job])))
		}
		last[a.Job] = a.AtUS
	}
	return bad
}

// events adds to the recorded calls what the database knows of them, leaves out
// calls that did not happen, and adds what the server did by itself.
func (h *history) events(f facts) []porcupine.Operation {
	end := h.w.clock.Load()
	var all []porcupine.Operation
	for _, o := range h.ops {
		if o.out.unknown {
			o.out.high, o.out.err, o.out.reject, o.ret = end, "", "", math.MaxInt64
			if !h.happened(f, &o) {
				continue
			}
		}
		h.stamp(f, &o)
		o.in.call, o.out.ret = o.call, o.ret
		all = append(all, porcupine.Operation{ClientId: o.client, Input: o.in, Call: o.call, Output: o.out, Return: o.ret})
	}
	for key, a := range f.ended {
		if a.Actor != "server" {
			continue
		}
		at := f.attempts[key]
		all = append(all, porcupine.Operation{
			ClientId: 9,
			Input:    input{kind: doExpire, ref: at.Ref(), result: protocol.Complete{Reason: at.Reason}},
			Output:   output{at: a.AtUS, high: end}, Call: 0, Return: math.MaxInt64,
		})
	}
	slices.SortStableFunc(all, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	return all
}

// happened decides about a call whose answer was lost: false says that it
// changed nothing, and what is known of its answer is filled in.
func (h *history) happened(f facts, o *operation) bool {
	key := store.AttemptKey{Job: o.in.ref.Job, Epoch: o.in.ref.Epoch}
	known := func(action, detail string, run ci.RunID) bool {
		return slices.ContainsFunc(f.trail, func(a store.Audit) bool {
			return a.Action == action && (detail == "" || a.Detail == detail) && a.Run == run && a.Job == key.Job && a.Epoch == key.Epoch
		})
	}
	switch o.in.kind {
	case doLook, doLookRun:
		return false
	case doClaim:
		a, ok := f.claims[store.ClaimKey{Session: o.in.session, Request: o.in.request}]
		ref := a.Ref()
		o.out.ref = &ref
		return ok && a.ClaimedUS >= o.in.low
	case doComplete, doHandOver:
		a := f.attempts[key]
		if a.EndRequest != o.in.request || a.EndDigest != o.in.digest || f.ended[key].AtUS < o.in.low || h.runnerIDs[o.in.runner] != a.Runner {
			return false
		}
		return json.Unmarshal([]byte(a.EndAnswer), &o.out.done) == nil
	case doOpen:
		s, ok := f.sessions[openKey(o.in)]
		o.out.session = s.ID
		return ok && s.OpenedUS >= o.in.low
	case doPhase:
		return known("phase", string(o.in.phase), o.in.ref.Run)
	case doCancel:
		return known("cancel", "", h.ids[o.in.run])
	case doRetry:
		return h.ids[o.in.run] != ""
	default:
		return true
	}
}

// stamp adds the instant that an accepted call stored.
func (h *history) stamp(f facts, o *operation) {
	at := int64(0)
	switch o.in.kind {
	case doClaim:
		at = f.claims[store.ClaimKey{Session: o.in.session, Request: o.in.request}].ClaimedUS
	case doComplete, doHandOver:
		key := store.AttemptKey{Job: o.in.ref.Job, Epoch: o.in.ref.Epoch}
		if f.attempts[key].EndRequest == o.in.request {
			at = f.ended[key].AtUS
		}
	case doOpen:
		at = f.sessions[openKey(o.in)].OpenedUS
	default:
	}
	if at >= o.in.low && at <= o.out.high && o.out.err == "" {
		o.out.at = at
	}
}

// tell renders a history and the trail; done are the operations that an order was found for.
func (h *history) tell(f facts, all []porcupine.Operation, done map[int]bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, start it again with -args -seed %d -histories 1 (the order of calls is not the same each time)\n", h.seed, h.seed)
	for _, j := range h.jobs {
		fmt.Fprintf(&b, "job %s needs %v always %t allow_failure %t retry %+v\n", j.name, j.needs, j.always, j.allow, j.retry)
	}
	for id, p := range h.where {
		fmt.Fprintf(&b, "%s is job %s of run %d\n", short(id), h.jobs[p.job].name, p.run)
	}
	for i, o := range all {
		mark := "  "
		if done != nil && !done[i] {
			mark = "! "
		}
		ret := fmt.Sprint(o.Return)
		if o.Return == math.MaxInt64 {
			ret = "∞"
		}
		fmt.Fprintf(&b, "%s%3d..%-4s client %d: %v: %v\n", mark, o.Call, ret, o.ClientId, o.Input, o.Output)
	}
	for _, a := range f.trail {
		if a.Action != "rejected" {
			fmt.Fprintf(&b, "  %d at %s: %s %s %s#%d %s\n", a.Seq, clockText(a.AtUS), a.Actor, a.Action, short(a.Job), a.Epoch, a.Detail)
		}
	}
	return b.String()
}

// leave ends the history's nodes and sessions.
func (h *history) leave() {
	ctx := context.WithoutCancel(h.w.ctx)
	for _, host := range h.hosts {
		if host != nil && len(h.nodes) > 0 && host.session != "" {
			_ = h.nodes[0].e.DrainSession(ctx, host.who, protocol.Drain{Session: host.session, Gone: true})
		}
	}
	for _, n := range h.nodes {
		n.end()
	}
}
