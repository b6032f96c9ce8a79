package reader

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// Runners returns a page of runners by ID.
func (r *Reader) Runners(ctx context.Context, v auth.Viewer, after string, limit int) (protocol.Page[protocol.Runner], error) {
	page := protocol.Page[protocol.Runner]{Items: []protocol.Runner{}}
	n := pageSize(limit)
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		page.Next = ""
		rows, err := tx.ReadRunners(ctx, v.Org, ci.RunnerID(after), n+1)
		if err != nil {
			return err
		}
		if len(rows) > n {
			rows = rows[:n]
			page.Next = string(rows[n-1].ID)
		}
		page.Items, err = r.runners(ctx, tx, v, rows)
		return err
	})
	return page, err
}

// AllRunners returns every runner: those that are present first, each part by ID.
func (r *Reader) AllRunners(ctx context.Context, v auth.Viewer) ([]protocol.Runner, error) {
	var out []protocol.Runner
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		rows, err := tx.ReadRunners(ctx, v.Org, "", math.MaxInt32)
		if err != nil {
			return err
		}
		slices.SortStableFunc(rows, func(a, b store.RunnerView) int { return cmp.Compare(b.Present, a.Present) })
		out, err = r.runners(ctx, tx, v, rows)
		return err
	})
	return out, err
}

func (r *Reader) runners(ctx context.Context, tx *store.Tx, v auth.Viewer, rows []store.RunnerView) ([]protocol.Runner, error) {
	occupants, err := tx.ReadOccupancy(ctx, v.Org)
	if err != nil {
		return nil, err
	}
	held := map[ci.RunnerID][]store.Occupant{}
	for _, o := range occupants {
		held[o.Runner] = append(held[o.Runner], o)
	}
	now, err := tx.Now(ctx)
	if err != nil {
		return nil, err
	}
	docs := make([]protocol.Runner, 0, len(rows))
	for _, row := range rows {
		doc, err := r.runner(row, held[row.ID], now)
		if err != nil {
			return nil, err
		}
		docs = append(docs, doc)
	}
	return docs, nil
}

// Runner returns one runner.
func (r *Reader) Runner(ctx context.Context, v auth.Viewer, id ci.RunnerID) (protocol.Runner, error) {
	after := ""
	for {
		page, err := r.Runners(ctx, v, after, MaxPage)
		if err != nil {
			return protocol.Runner{}, err
		}
		for _, doc := range page.Items {
			if doc.ID == id {
				return doc, nil
			}
		}
		if page.Next == "" {
			return protocol.Runner{}, notFound("runner", id)
		}
		after = page.Next
	}
}

func (r *Reader) runner(row store.RunnerView, held []store.Occupant, now int64) (protocol.Runner, error) {
	doc := protocol.Runner{ID: row.ID, Name: row.Name, Slots: int(row.Slots), Version: row.Version, CreatedAt: at(row.CreatedUS)}
	switch {
	case row.Status == "fenced":
		doc.Status = "fenced"
	case row.Present == 0:
		doc.Status = "offline"
	case row.Status == "draining" || row.State == "draining":
		doc.Status = "draining"
	default:
		doc.Status = "online"
	}
	if row.Offer != "" {
		var o policy.Offer
		if err := json.Unmarshal([]byte(row.Offer), &o); err != nil {
			return doc, err
		}
		doc.Offer = protocol.Offer{OS: o.OS, Arch: o.Arch, Size: o.Size, Isolation: o.Isolation, Labels: o.Labels, Features: o.Features}
	}
	var expires int64
	for _, o := range held {
		expires = max(expires, o.ExpiresUS)
		doc.Running = append(doc.Running, protocol.HeldJob{Job: o.Job, Name: o.Name, Epoch: o.Epoch, Quarantined: o.Quarantined != 0})
		if o.Quarantined != 0 {
			doc.Quarantined++
		}
	}
	seen := max(row.OpenedUS, row.GoneUS)
	if ago, sure, ok := r.silence(row.ID, expires, now); ok && row.Present != 0 {
		seen = now - ago.Microseconds()
		if sure && ago >= r.engine.LeaseTTL/2 && row.Status != "fenced" {
			silent := ci.Duration(ago)
			doc.Silent = &silent
		}
	}
	doc.LastSeen = maybe(seen)
	return doc, nil
}

// silence returns how long ago a present runner was heard of: at this node, or by
// the renewal of a lease that expires at an instant, if it has one. It is sure
// unless the runner may have talked to another node meanwhile.
func (r *Reader) silence(id ci.RunnerID, expiresUS, now int64) (ago time.Duration, sure, ok bool) {
	ok, ago, sure = r.engine.Online(id)
	if expiresUS > 0 {
		renewed := time.Duration(now-expiresUS)*time.Microsecond + r.engine.LeaseTTL
		ago, sure = max(min(ago, renewed), 0), true
	}
	return ago, sure, ok
}

// DeadLetters returns a page of dead letters, newest first.
func (r *Reader) DeadLetters(ctx context.Context, v auth.Viewer, after string, limit int) (protocol.Page[protocol.DeadLetter], error) {
	page := protocol.Page[protocol.DeadLetter]{Items: []protocol.DeadLetter{}}
	n := pageSize(limit)
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		rows, err := tx.ReadDeadLetters(ctx, v.Org, ci.JobID(after), n+1)
		if err != nil {
			return err
		}
		page.Items, page.Next = page.Items[:0], ""
		if len(rows) > n {
			rows = rows[:n]
			page.Next = string(rows[n-1].Job)
		}
		for _, d := range rows {
			page.Items = append(page.Items, protocol.DeadLetter{
				Job: d.Job, Name: d.Name, Run: d.Run, Repo: d.Repo,
				Attempts: d.Epoch, Reason: d.Reason, Detail: d.Detail, At: at(d.DeadUS), Requeued: d.Requeued,
			})
		}
		return nil
	})
	return page, err
}
