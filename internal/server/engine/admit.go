package engine

import (
	"context"
	"maps"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// readyJob is a job that becomes ready in this transaction.
type readyJob struct {
	job *store.Job
	due int64 // backoff ends; 0 = now
}

// makeReady notes a job as ready: settle queues it.
func (t *txn) makeReady(j *store.Job, due int64) {
	j.State = ci.StateReady
	j.Conclusion, j.Reason, j.Phase = "", "", ""
	j.Generation++
	t.ready = append(t.ready, readyJob{j, due})
}

// releaseAdmission gives a tenant's opened or running job back.
func (t *txn) releaseAdmission(org ci.OrgID, n int64) {
	if n == 0 {
		return
	}
	if t.release == nil {
		t.release = map[ci.OrgID]int64{}
	}
	t.release[org] += n
}

// reopenFor asks settle to look for held jobs of an organisation.
func (t *txn) reopenFor(org ci.OrgID) {
	if t.reopen == nil {
		t.reopen = map[ci.OrgID]bool{}
	}
	t.reopen[org] = true
}

// wake counts jobs that polls should hear of.
func (t *txn) wake(org ci.OrgID, shape string) {
	if t.wakes == nil {
		t.wakes = map[claimable]int{}
	}
	t.wakes[claimable{org, shape}]++
}

// How many held jobs of a tenant one transaction opens at most.
const openMost = 512

// settle applies what the transaction collected, under the organisations' locks,
// the last in the order: admission (a job is opened only while its tenant has
// quota and a live runner serves its shape), virtual time, the audit chain.
func (t *txn) settle(ctx context.Context) error {
	orgs := map[ci.OrgID]bool{}
	for _, r := range t.ready {
		orgs[r.job.Org] = true
	}
	for o := range t.release {
		orgs[o] = true
	}
	for o := range t.reopen {
		orgs[o] = true
	}
	for _, a := range t.audits {
		orgs[a.Org] = true
	}
	if len(orgs) == 0 {
		return nil
	}
	ids := make([]ci.OrgID, 0, len(orgs))
	for o := range orgs {
		ids = append(ids, o)
	}
	locked, err := t.LockOrgs(ctx, ids)
	if err != nil {
		return err
	}
	now, err := t.lockedNow(ctx)
	if err != nil {
		return err
	}
	byID := make(map[ci.OrgID]*store.Org, len(locked))
	for i := range locked {
		byID[locked[i].ID] = &locked[i]
	}
	for o, n := range t.release {
		byID[o].Admitted -= n
	}
	if err := t.enqueue(ctx, byID, now); err != nil {
		return err
	}
	for o, org := range byID {
		if t.reopen[o] || org.JobLimit > 0 && t.release[o] > 0 {
			if err := t.openHeld(ctx, org, now); err != nil {
				return err
			}
		}
	}
	var entries []store.Audit
	for _, o := range sortedOrgs(byID) {
		var own []store.Audit
		for _, a := range t.audits {
			if a.Org == o.ID {
				own = append(own, a)
			}
		}
		entries = append(entries, chain(o, own, now)...)
	}
	if len(entries) > 0 {
		if err := t.InsertAudit(ctx, entries); err != nil {
			return err
		}
	}
	return t.UpdateOrgs(ctx, locked)
}

func sortedOrgs(m map[ci.OrgID]*store.Org) []*store.Org {
	out := make([]*store.Org, 0, len(m))
	for _, o := range m {
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b *store.Org) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return out
}

// vftCost is the virtual time that one job costs a tenant of weight 1.
const vftCost = 1 << 20

// enqueue gives ready jobs their place: by priority, then the tenant's virtual
// finish time, in the order of the longest remaining chain: also of those that wait,
// as far as they are of the same run (overtake).
func (t *txn) enqueue(ctx context.Context, orgs map[ci.OrgID]*store.Org, now int64) error {
	if len(t.ready) == 0 {
		return nil
	}
	slices.SortStableFunc(t.ready, func(a, b readyJob) int { return int(b.job.Chain - a.job.Chain) })
	rows := make([]store.NewQueued, 0, len(t.ready))
	for _, r := range t.ready {
		j, org := r.job, orgs[r.job.Org]
		// A tenant that was idle does not save up: it starts at the present.
		org.VFT = max(org.VFT, t.e.fleet.virtualTime()) + vftCost/org.Weight
		open := false
		switch {
		case r.due > now:
			t.e.dueAt(r.due - now)
		case !t.e.fleet.serves(j.Org, j.Shape):
		case org.JobLimit > 0:
			t.reopenFor(j.Org) // the best of all that are held gets the place
		default:
			open = true
			org.Admitted++
			t.wake(j.Org, j.Shape)
		}
		rows = append(rows, store.NewQueued{
			Queued: store.Queued{Job: j.ID, Run: j.Run, Org: j.Org, Prio: j.Prio, VFT: org.VFT, Generation: j.Generation},
			Shape:  j.Shape, Open: open, DueUS: r.due,
		})
	}
	if err := t.overtake(ctx, rows); err != nil {
		return err
	}
	return t.Enqueue(ctx, rows)
}

// overtake lets jobs with a longer chain behind them than others of their run that
// wait go first: each is placed before the first of those. Another run's jobs wait
// for no more than that one job longer. rows are those of t.ready.
func (t *txn) overtake(ctx context.Context, rows []store.NewQueued) error {
	runs := map[ci.RunID]bool{}
	for _, r := range t.ready {
		if r.job.Chain > 1 {
			runs[r.job.Run] = true
		}
	}
	if len(runs) == 0 {
		return nil
	}
	places, err := t.QueuePlaces(ctx, slices.Sorted(maps.Keys(runs)))
	if err != nil || len(places) == 0 {
		return err
	}
	for i := len(rows) - 1; i >= 0; i-- { // the shortest chain first
		j, row := t.ready[i].job, &rows[i]
		for _, p := range places {
			if p.Run == j.Run && p.Shape == j.Shape && p.Prio == j.Prio && p.Chain < j.Chain {
				row.VFT = min(row.VFT, p.VFT-1)
			}
		}
		places = append(places, store.QueuePlace{Run: j.Run, Shape: j.Shape, Prio: j.Prio, Chain: j.Chain, VFT: row.VFT})
	}
	return nil
}

// openHeld opens held jobs of a tenant as far as its quota reaches.
func (t *txn) openHeld(ctx context.Context, org *store.Org, now int64) error {
	room := int64(openMost)
	if org.JobLimit > 0 {
		room = min(room, org.JobLimit-org.Admitted)
	}
	if room <= 0 {
		return nil
	}
	held, err := t.LockHeld(ctx, org.ID, now, now+policy.MaxBackoff.Microseconds(), int(room))
	if err != nil || len(held) == 0 {
		return err
	}
	ids := make([]ci.JobID, len(held))
	for i, h := range held {
		ids[i] = ci.JobID(h[0])
		t.wake(org.ID, h[1])
	}
	org.Admitted += int64(len(held))
	if len(held) == openMost {
		t.e.poke() // there may be more
	}
	return t.OpenQueued(ctx, ids)
}
