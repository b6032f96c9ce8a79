package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// busy lets runners claim and complete until stop is closed.
func (w *world) busy(e *engine.Engine, runners int, stop <-chan struct{}) *sync.WaitGroup {
	var wg sync.WaitGroup
	for i := range runners {
		a := w.agent(fmt.Sprintf("busy-%d", i), 2)
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				ticket, err := e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: fmt.Sprint(n), Wait: ci.Duration(20 * time.Millisecond)})
				if err != nil {
					w.t.Errorf("claim: %v", err)
					return
				}
				if ticket == nil {
					continue
				}
				held, err := e.Hold(w.ctx, a.who, ticket.Lease, "complete", engine.ActiveOnly)
				if err != nil {
					w.t.Errorf("hold: %v", err)
					return
				}
				if _, err := e.Complete(w.ctx, held, success()); err != nil {
					w.t.Errorf("complete: %v", err)
					return
				}
			}
		})
	}
	return &wg
}

// Runs are made while runners finish jobs of the same repository, and one
// transaction in twenty is a deadlock's victim: none of them is dropped.
func TestCase_DB_01_NoRunIsLostToADeadlock(t *testing.T) {
	t.Parallel()
	for name, url := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var armed atomic.Bool
			w := newFaultyWorld(t, url(t), func(p store.Point) error {
				if armed.Load() && p == store.PointCommit && rand.IntN(20) == 0 {
					return store.ErrSerialization
				}
				return nil
			})
			go w.e.Run(w.ctx)
			stop := make(chan struct{})
			busy := w.busy(w.e, 20, stop)
			armed.Store(true)
			const events, workflows = 50, 4
			var mu sync.Mutex
			ids := map[ci.RunID]bool{}
			var wg sync.WaitGroup
			for event := range events {
				wg.Go(func() {
					for k := range workflows {
						id, err := w.e.Submit(w.ctx, engine.Submission{
							Org: w.org, Repo: w.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted,
							Event: "manual", Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("a"), job("b", "a")}},
							IdempotencyKey: fmt.Sprintf("%d-%d", event, k), RequestDigest: "d",
						})
						if err != nil {
							w.t.Errorf("submit: %v", err)
							continue
						}
						mu.Lock()
						ids[id] = true
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			for id := range ids {
				w.eventually(func() bool { return w.run(id).State == ci.StateFinished })
				w.wantRun(id, ci.StateFinished, ci.ConclusionSuccess, "")
			}
			armed.Store(false)
			close(stop)
			busy.Wait()
			numbers := map[int64]bool{}
			for id := range ids {
				numbers[w.run(id).Number] = true
			}
			if len(ids) != events*workflows || len(numbers) != len(ids) {
				w.t.Errorf("%d runs with %d numbers, want %d", len(ids), len(numbers), events*workflows)
			}
			w.check()
		})
	}
}

// SQLite with many writers, readers and one that holds its transaction open: no
// call ends with a lock error and nothing is lost.
func TestCase_DB_04_SQLiteIsNeverLockedForACaller(t *testing.T) {
	t.Parallel()
	w := newWorld(t, databases()["sqlite"](t))
	go w.e.Run(w.ctx)
	stop := make(chan struct{})
	busy := w.busy(w.e, 10, stop)
	var readers sync.WaitGroup
	readers.Go(func() { // a snapshot that stays open
		err := w.store.Read(w.ctx, func(tx *store.Tx) error {
			if _, err := tx.JobsByState(w.ctx); err != nil {
				return err
			}
			<-stop
			return nil
		})
		if err != nil {
			t.Errorf("the long reader: %v", err)
		}
	})
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := w.store.Read(w.ctx, func(tx *store.Tx) error {
					_, err := tx.ReadRuns(w.ctx, w.org, store.RunFilter{Limit: 50})
					return err
				})
				if err != nil {
					t.Errorf("listing: %v", err)
					return
				}
			}
		})
	}
	var mu sync.Mutex
	var ids []ci.RunID
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			id, err := w.e.Submit(w.ctx, engine.Submission{
				Org: w.org, Repo: w.repo, Actor: "hook", Source: digest, Trust: ci.TrustTrusted,
				Event: "manual", Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("j")}},
			})
			if err != nil {
				t.Errorf("submit: %v", err)
				return
			}
			mu.Lock()
			ids = append(ids, id)
			mu.Unlock()
		})
	}
	wg.Wait()
	for _, id := range ids {
		w.eventually(func() bool { return w.run(id).State == ci.StateFinished })
	}
	close(stop)
	busy.Wait()
	readers.Wait()
	if len(ids) != 100 {
		t.Errorf("%d runs exist, want 100", len(ids))
	}
	w.check()
}

// eventually waits for what running loops bring about.
func (w *world) eventually(ok func() bool) {
	w.t.Helper()
	for range 3000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	w.t.Fatal("it did not happen in 30 s")
}

// A database that is away is a typed error, and nothing is half done.
func TestADatabaseThatIsAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	for name, url := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var away atomic.Bool
			w := newFaultyWorld(t, url(t), func(p store.Point) error {
				if away.Load() && p == store.PointCommitted {
					return ci.Errorf(ci.ErrUnavailable, "the connection broke")
				}
				return nil
			})
			id := w.submit(job("j"))
			a := w.agent("a", 1)
			ref := a.mustClaim().Lease
			held := a.hold(ref)
			away.Store(true)
			if _, err := w.e.Complete(w.ctx, held, success()); !errors.Is(err, ci.ErrUnavailable) {
				t.Fatalf("a commit whose outcome is unknown: %v", err)
			}
			away.Store(false)
			// It was stored: the repeat resolves it.
			if _, err := w.e.Complete(w.ctx, held, success()); err != nil {
				t.Errorf("the repeat: %v", err)
			}
			w.wantJob(id, "j", ci.StateFinished, ci.ConclusionSuccess, "")
			w.check()
		})
	}
}

// newFaultyWorld is newWorld over a store whose transactions fail as fault says.
func newFaultyWorld(t *testing.T, url string, fault func(store.Point) error) *world {
	t.Helper()
	return newWorldOver(t, store.Options{URL: url, Fault: fault})
}
