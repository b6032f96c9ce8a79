package reader

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// Codes of protocol.WaitReason.
const (
	waitNeeds    = "needs"
	waitNoRunner = "no_runner_online"
	waitNoMatch  = "no_matching_runner"
	waitDrain    = "runners_draining"
	waitBusy     = "runners_busy"
	waitQuota    = "quota"
	waitBackoff  = "backoff"
)

// waits finds why jobs of one organisation have not started; what it learns of
// shapes is asked once.
type waits struct {
	tx     *store.Tx
	org    ci.OrgID
	jobs   []store.JobView
	served map[string]store.Served // by shape
}

func newWaits(tx *store.Tx, org ci.OrgID, jobs []store.JobView) *waits {
	return &waits{tx: tx, org: org, jobs: jobs, served: map[string]store.Served{}}
}

// reason says exactly why a job has not started, nil when it has.
func (w *waits) reason(ctx context.Context, j store.JobView, spec ci.JobSpec) (*protocol.WaitReason, error) {
	switch j.State {
	case ci.StateWaiting:
		return w.needs(spec), nil
	case ci.StateReady:
	default:
		return nil, nil
	}
	s, known := w.served[j.Shape]
	if !known {
		var err error
		if s, err = w.tx.ReadServed(ctx, w.org, j.Shape); err != nil {
			return nil, err
		}
		w.served[j.Shape] = s
	}
	now, err := w.tx.Now(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case j.DueUS > now:
		return &protocol.WaitReason{
			Code: waitBackoff, Until: maybe(j.DueUS),
			Detail: "next attempt at " + at(j.DueUS).Format("15:04:05 MST") + ": " + j.Detail,
		}, nil
	case s.Present == 0:
		return &protocol.WaitReason{Code: waitNoRunner, Detail: "no runner is online (needs " + policy.Describe(spec.RunsOn) + ")"}, nil
	case s.Serving == 0:
		return &protocol.WaitReason{Code: waitNoMatch, Detail: "no runner that is online offers " + policy.Describe(spec.RunsOn)}, nil
	case s.Open == 0:
		return &protocol.WaitReason{Code: waitDrain, Detail: "all matching runners are draining: they take no more jobs"}, nil
	}
	if j.Open == 0 { // else it is about to be opened
		org, _, err := w.tx.Org(ctx, w.org)
		if err != nil {
			return nil, err
		}
		if org.JobLimit > 0 && org.Admitted >= org.JobLimit {
			return &protocol.WaitReason{Code: waitQuota, Detail: fmt.Sprintf("the organisation's limit of running jobs (%d) is reached", org.JobLimit)}, nil
		}
	}
	n, err := w.tx.ReadPosition(ctx, j)
	if err != nil {
		return nil, err
	}
	return &protocol.WaitReason{
		Code: waitBusy, Position: int(n) + 1,
		Detail: fmt.Sprintf("all matching runners are busy; position %d", n+1),
	}, nil
}

// needs lists the needed jobs that have not finished, by key until all legs have.
func (w *waits) needs(spec ci.JobSpec) *protocol.WaitReason {
	var open []string
	for _, key := range spec.Needs {
		for _, j := range w.jobs {
			if j.Key == key && j.State != ci.StateFinished && !slices.Contains(open, key) {
				open = append(open, key)
			}
		}
	}
	return &protocol.WaitReason{Code: waitNeeds, Needs: open, Detail: "waits for " + strings.Join(open, ", ")}
}
