package reader

import (
	"context"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

// Overview is what is going on in an organisation.
type Overview struct {
	Running      []protocol.RunSummary
	RunningCount int
	Waiting      []Waiting
	WaitingCount int
	Broken       []Broken
	Recent       []protocol.RunSummary
	Runners      Fleet
	DeadLetters  int
	Empty        bool
}

// Fleet counts all runners, and what of the slots of those online is in use.
type Fleet struct {
	Online, Offline, Draining, Fenced int
	Slots, Busy                       int
}

// Waiting is a job that has not started, with its run.
type Waiting struct {
	Job protocol.JobSummary
	Run protocol.RunSummary
}

// Broken is the latest run of a workflow on its ref, which failed.
type Broken struct {
	Run      protocol.RunSummary
	LastGood *protocol.RunSummary
}

// How much the overview shows, and how far back it looks for broken workflows.
const (
	overviewRows    = 10
	overviewHistory = 200
)

// Overview answers what is going on now.
func (r *Reader) Overview(ctx context.Context, v auth.Viewer) (Overview, error) {
	var out Overview
	err := r.store.Read(ctx, func(tx *store.Tx) error {
		out = Overview{}
		active, n, err := tx.ReadActiveRuns(ctx, v.Org, overviewRows)
		if err != nil {
			return err
		}
		out.RunningCount = int(n)
		if out.Running, err = summaries(ctx, tx, active); err != nil {
			return err
		}
		if err := out.waiting(ctx, tx, v); err != nil {
			return err
		}
		finished, err := tx.ReadRuns(ctx, v.Org, store.RunFilter{State: ci.StateFinished, Limit: overviewHistory})
		if err != nil {
			return err
		}
		out.broken(finished)
		if out.Recent, err = summaries(ctx, tx, finished[:min(len(finished), overviewRows)]); err != nil {
			return err
		}
		dead, err := tx.ReadDeadCount(ctx, v.Org)
		out.DeadLetters = int(dead)
		out.Empty = n == 0 && len(finished) == 0 && out.WaitingCount == 0
		if err != nil {
			return err
		}
		fleet, err := tx.ReadFleet(ctx, v.Org)
		for _, f := range fleet {
			out.Runners.add(f)
		}
		return err
	})
	return out, err
}

// add counts the runners of a status. Only the slots of those online can be used, so
// only what uses them is counted.
func (f *Fleet) add(v store.FleetView) {
	n := int(v.Runners)
	switch v.Status {
	case "online":
		f.Online, f.Slots, f.Busy = n, int(v.Slots), int(v.Busy)
	case "draining":
		f.Draining = n
	case "fenced":
		f.Fenced = n
	default:
		f.Offline = n
	}
}

func (o *Overview) waiting(ctx context.Context, tx *store.Tx, v auth.Viewer) error {
	ready, n, err := tx.ReadReadyJobs(ctx, v.Org, overviewRows)
	if err != nil {
		return err
	}
	o.WaitingCount = int(n)
	w := newWaits(tx, v.Org, nil)
	for _, j := range ready {
		doc, err := jobSummary(ctx, j, w)
		if err != nil {
			return err
		}
		run, err := readSummary(ctx, tx, v, j.Run)
		if err != nil {
			return err
		}
		o.Waiting = append(o.Waiting, Waiting{Job: doc, Run: run})
	}
	return nil
}

// broken finds workflows whose latest finished run on a ref failed.
func (o *Overview) broken(finished []store.RunView) {
	type line struct {
		repo      ci.RepoID
		path, ref string
	}
	latest := map[line]int{}    // index into o.Broken, -1 when the latest was fine
	repaired := map[line]bool{} // a good run before it has been found
	for _, run := range finished {
		k := line{run.Repo, run.Path, run.Ref}
		bad := run.Conclusion == ci.ConclusionFailed || run.Conclusion == ci.ConclusionTimedOut
		at, seen := latest[k]
		switch {
		case !seen && bad && len(o.Broken) < overviewRows:
			latest[k] = len(o.Broken)
			o.Broken = append(o.Broken, Broken{Run: summary(run, nil)})
		case !seen && run.Conclusion != ci.ConclusionCancelled:
			latest[k] = -1
		case seen && at >= 0 && !repaired[k] && run.Conclusion == ci.ConclusionSuccess:
			s := summary(run, nil)
			o.Broken[at].LastGood = &s
			repaired[k] = true
		}
	}
}
