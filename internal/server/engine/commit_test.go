package engine_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// What is answered with success is committed: when a commit fails the caller is
// told so, whether the database has stored it or not, and the repeat is right in
// both cases.
func TestNothingIsAnsweredThatIsNotCommitted(t *testing.T) {
	t.Parallel()
	calls := map[string]func(*agent, engine.Held) (any, error){
		"claim": func(a *agent, _ engine.Held) (any, error) {
			got, err := a.w.e.Claim(a.w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "again"})
			if err != nil {
				return nil, err
			}
			return got.Lease.Epoch, nil
		},
		"heartbeat": func(a *agent, held engine.Held) (any, error) {
			got, err := a.w.e.Renew(a.w.ctx, a.who, a.session, []ci.LeaseRef{held.Ref()})
			if err != nil {
				return nil, err
			}
			return got.Leases[0].Answer, nil
		},
		"phase": func(a *agent, held engine.Held) (any, error) {
			return nil, a.w.e.SetPhase(a.w.ctx, held, protocol.SetPhase{RequestID: "p", Phase: ci.PhaseExecuting})
		},
		"result": func(a *agent, held engine.Held) (any, error) {
			return a.w.e.Complete(a.w.ctx, held, success())
		},
	}
	want := map[string]any{
		"claim": int64(1), "heartbeat": protocol.LeaseRenewed, "phase": nil,
		"result": protocol.Completed{State: ci.StateFinished, Conclusion: ci.ConclusionSuccess},
	}
	for _, point := range []store.Point{store.PointCommit, store.PointCommitted} {
		for name, call := range calls {
			t.Run(string(point)+"/"+name, func(t *testing.T) {
				t.Parallel()
				var fails atomic.Bool
				w := newWorldOver(t, store.Options{URL: databases()["sqlite"](t), Fault: func(p store.Point) error {
					if p == point && fails.CompareAndSwap(true, false) {
						return ci.Errorf(ci.ErrUnavailable, "the database is away")
					}
					return nil
				}})
				id := w.submit(job("held"), job("free"))
				a := w.agent("a", 2)
				ref := a.mustClaim().Lease
				held := a.hold(ref)
				rows := func() [4]any {
					var l store.Lease
					w.write(func(tx *store.Tx) (err error) {
						l, _, err = tx.Lease(w.ctx, ref.Job)
						return err
					})
					mine := w.job(id, "held")
					return [4]any{w.job(id, "free").State, l.ExpiresUS, mine.Phase, mine.State}
				}
				w.pass(time.Second)
				before := rows()
				fails.Store(true)
				if got, err := call(a, held); !errors.Is(err, ci.ErrUnavailable) {
					t.Fatalf("answered %v, %v, and the commit had failed", got, err)
				}
				if changed := rows() != before; changed != (point == store.PointCommitted) {
					t.Errorf("stored: %v", changed)
				}
				if got, err := call(a, held); err != nil || got != want[name] {
					t.Errorf("the repeat: %v, %v, want %v", got, err, want[name])
				}
				w.check()
			})
		}
	}
}
