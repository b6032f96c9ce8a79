package engine_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
)

// busy lets runners claim, work and complete until stop is closed.
func (w *world) busy(e *engine.Engine, runners int, stop <-chan struct{}, work ...func(engine.Held) error) *sync.WaitGroup {
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
				for _, f := range work {
					if err := f(held); err != nil {
						w.t.Errorf("work: %v", err)
						return
					}
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

// SQLite with many writers and readers, logs that are written, one who holds a
// snapshot open from outside, and transactions that read first and write later: no
// call ends with a lock error and nothing is lost.
func TestCase_DB_04_SQLiteIsNeverLockedForACaller(t *testing.T) {
	t.Parallel()
	url := databases()["sqlite"](t)
	w := newWorld(t, url)
	blobs, err := fs.Open(t.TempDir(), fs.Options{})
	if err != nil {
		t.Fatal(err)
	}
	log := logs.New(logs.Config{Store: w.store, Blob: blobs, Log: slog.New(slog.DiscardHandler), Temp: t.TempDir()})
	ctx, cancel := context.WithCancel(w.ctx)
	logged := make(chan struct{})
	go func() { defer close(logged); _ = log.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-logged })
	go w.e.Run(w.ctx)
	stop := make(chan struct{})
	var written atomic.Int64
	busy := w.busy(w.e, 10, stop, func(h engine.Held) error {
		for n := range int64(3) {
			body := protocol.AppendChunk(nil, protocol.Chunk{Stream: protocol.Stdout, Sequence: n + 1, Offset: n * 5, Data: []byte("line\n")})
			if _, err := log.AppendBody(w.ctx, h, bytes.NewReader(body), int64(len(body))); err != nil {
				return err
			}
			written.Add(1)
		}
		return nil
	})
	var readers sync.WaitGroup
	outside, err := sql.Open("sqlite", "file:"+strings.TrimPrefix(url, "sqlite:"))
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	snapshot, err := outside.BeginTx(w.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := func() (n int) {
		if err := snapshot.QueryRowContext(w.ctx, "SELECT COUNT(*) FROM run").Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
	held := seen()
	var upgrades int64
	readers.Go(func() {
		for ; ; upgrades++ {
			select {
			case <-stop:
				return
			default:
			}
			// It reads, others commit, and then it writes what it has read.
			err := w.store.Read(w.ctx, func(tx *store.Tx) error {
				if _, err := tx.ReadRuns(w.ctx, w.org, store.RunFilter{Limit: 50}); err != nil {
					return err
				}
				return w.store.Write(w.ctx, func(tx *store.Tx) error {
					runs, err := tx.ReadRuns(w.ctx, w.org, store.RunFilter{Limit: 50})
					if err != nil {
						return err
					}
					_, err = tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), w.org, "local", fmt.Sprint(upgrades), fmt.Sprint("local/", len(runs)), 1)
					return err
				})
			})
			if err != nil {
				t.Errorf("one that reads and then writes: %v", err)
				return
			}
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
	if now := seen(); now != held {
		t.Errorf("the snapshot was not held: %d runs, then %d", held, now)
	}
	if err := snapshot.Rollback(); err != nil {
		t.Error(err)
	}
	close(stop)
	busy.Wait()
	readers.Wait()
	if written.Load() < 300 || upgrades == 0 {
		t.Errorf("%d pieces of logs and %d late writes, want 3 of each job and some", written.Load(), upgrades)
	}
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
