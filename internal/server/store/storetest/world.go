// Package storetest sets up databases for tests of the rooms around the store:
// both engines, and the rows that a job under a lease consists of, made by the
// store's own statements.
package storetest

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Each runs a test on SQLite and on PostgreSQL, in parallel; postgres gives the
// URL of an empty database (testkit.Postgres).
func Each(t *testing.T, postgres func(testing.TB) string, run func(t *testing.T, w *World)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		run(t, SQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		run(t, New(t, postgres(t)))
	})
}

// SQLite returns a world in a database file of its own.
func SQLite(t testing.TB) *World { return New(t, "sqlite:"+filepath.Join(t.TempDir(), "forgeci.db")) }

// World is a database with one organisation, repository, runner and session. Its
// clock is the database's time; it stands still unless Advance moves it.
type World struct {
	Store   *store.Store
	URL     string // of the database
	Org     ci.OrgID
	Repo    ci.RepoID
	Runner  ci.RunnerID
	Session ci.SessionID
	Log     *slog.Logger

	t     testing.TB
	ids   ci.IDSource
	now   atomic.Int64
	fault atomic.Pointer[func(store.Point) error]
}

// TTL is how long the world's leases live.
const TTL = time.Minute

// New opens the database and fills it.
func New(t testing.TB, url string) *World {
	t.Helper()
	w := &World{t: t, URL: url, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	w.now.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro())
	s, err := store.Open(t.Context(), store.Options{URL: url, Now: w.now.Load, Log: w.Log, Fault: func(p store.Point) error {
		if f := w.fault.Load(); f != nil {
			return (*f)(p)
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	w.Store = s
	w.Session = ci.SessionID(w.ids.New(ci.PrefixSession))
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		now := w.now.Load()
		org, err := tx.EnsureOrg(ctx, ci.OrgID(w.ids.New(ci.PrefixOrg)), "main", now)
		if err != nil {
			return err
		}
		w.Org = org.ID
		repo, err := tx.EnsureRepo(ctx, ci.RepoID(w.ids.New(ci.PrefixRepo)), w.Org, "local", "key", "local/demo", now)
		if err != nil {
			return err
		}
		w.Repo = repo.ID
		runner, err := tx.EnsureRunner(ctx, store.Runner{ID: ci.RunnerID(w.ids.New(ci.PrefixRunner)), Org: w.Org, Name: "r", PublicKey: "k", Granted: "[]"}, now)
		if err != nil {
			return err
		}
		w.Runner = runner.ID
		if _, err := tx.InsertOffer(ctx, "offer", "{}", now); err != nil {
			return err
		}
		if _, err := tx.InsertShape(ctx, "shape", "{}", now); err != nil {
			return err
		}
		return tx.InsertSession(ctx, store.Session{
			ID: w.Session, Org: w.Org, Runner: w.Runner, RequestID: "q", Offer: "offer",
			Slots: 100, Protocol: 1, Version: "test", OpenedUS: now,
		})
	})
	return w
}

// Now returns the database's time, microseconds.
func (w *World) Now() int64 { return w.now.Load() }

// Advance moves the database's time.
func (w *World) Advance(d time.Duration) { w.now.Add(d.Microseconds()) }

// Fail asks f at each point of each transaction from now on.
func (w *World) Fail(f func(store.Point) error) { w.fault.Store(&f) }

// FailOnce makes the next transaction that comes to a point fail there. It
// returns whether one has.
func (w *World) FailOnce(at store.Point) (failed func() bool) {
	var done atomic.Bool
	f := func(p store.Point) error {
		if p == at && done.CompareAndSwap(false, true) {
			return ci.Errorf(ci.ErrUnavailable, "the database is away")
		}
		return nil
	}
	w.Fail(f)
	return done.Load
}

// Write runs fn in a transaction; an error fails the test.
func (w *World) Write(fn func(context.Context, *store.Tx) error) {
	w.t.Helper()
	ctx := w.t.Context()
	if err := w.Store.Write(ctx, func(tx *store.Tx) error { return fn(ctx, tx) }); err != nil {
		w.t.Fatal(err)
	}
}

// Run makes a running run of jobs that wait; each needs the one before it.
func (w *World) Run(specs ...ci.JobSpec) (store.Run, []ci.JobID) {
	w.t.Helper()
	ids := make([]ci.JobID, len(specs))
	var run store.Run
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		numbers, err := tx.NextRunNumbers(ctx, map[ci.RepoID]int64{w.Repo: 1})
		if err != nil {
			return err
		}
		run = store.Run{
			ID: ci.RunID(w.ids.New(ci.PrefixRun)), Org: w.Org, Repo: w.Repo, Number: numbers[w.Repo], Workflow: "w", Path: ".forgeci.yaml",
			WorkflowDigest: "d", SourceDigest: "s", Plan: "{}", Event: "manual", Actor: "tester", Trust: ci.TrustTrusted,
			JobsLeft: int64(len(specs)), CreatedUS: w.now.Load(),
		}
		if err := tx.InsertRuns(ctx, []store.Run{run}, run.CreatedUS); err != nil {
			return err
		}
		var jobs []store.NewJob
		var needs [][2]ci.JobID
		for i, spec := range specs {
			ids[i] = ci.JobID(w.ids.New(ci.PrefixJob))
			text, err := json.Marshal(spec)
			if err != nil {
				return err
			}
			name := spec.Name
			if name == "" {
				name = fmt.Sprintf("job-%d", i)
			}
			key := spec.Key
			if key == "" {
				key = name
			}
			jobs = append(jobs, store.NewJob{Spec: string(text), Job: store.Job{
				ID: ids[i], Run: run.ID, Org: run.Org, Index: int64(i), Name: name, Key: key, TimeoutUS: spec.Timeout.Std().Microseconds(), Shape: "shape",
				Chain: 1, OperationID: string(ids[i]), State: ci.StateWaiting,
			}})
			if i > 0 {
				needs = append(needs, [2]ci.JobID{ids[i-1], ids[i]})
			}
		}
		if err := tx.InsertJobs(ctx, jobs, needs); err != nil {
			return err
		}
		return tx.StartRuns(ctx, []ci.RunID{run.ID}, w.now.Load())
	})
	return run, ids
}

// Claim makes the next attempt of a job with a lease of TTL.
func (w *World) Claim(job ci.JobID) ci.LeaseRef {
	w.t.Helper()
	var ref ci.LeaseRef
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		jobs, err := tx.LockJobs(ctx, []ci.JobID{job})
		if err != nil {
			return err
		}
		j := jobs[0]
		if j.State != ci.StateReady {
			j.State = ci.StateReady
			if err := tx.UpdateJobs(ctx, []*store.Job{&j}); err != nil {
				return err
			}
		}
		j.Epoch++
		j.State = ci.StateRunning
		if err := tx.UpdateJobs(ctx, []*store.Job{&j}); err != nil {
			return err
		}
		ref = ci.LeaseRef{Run: j.Run, Job: job, Runner: w.Runner, Session: w.Session, Lease: ci.LeaseID(w.ids.New(ci.PrefixLease)), Epoch: j.Epoch}
		return tx.InsertAttempts(ctx, []store.NewAttempt{{Ref: ref, Org: w.Org, ClaimRequest: w.ids.New(ci.PrefixRequest)}}, w.now.Load(),
			w.now.Load()+TTL.Microseconds())
	})
	return ref
}

// Renew extends a current lease to d from now.
func (w *World) Renew(ref ci.LeaseRef, d time.Duration) {
	w.t.Helper()
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		_, err := tx.RenewLeases(ctx, []ci.LeaseRef{ref}, w.now.Load(), w.now.Load()+d.Microseconds())
		return err
	})
}

// Cancel asks the holder of a job's lease to stop.
func (w *World) Cancel(job ci.JobID) {
	w.t.Helper()
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		_, err := tx.CancelLeases(ctx, []ci.JobID{job})
		return err
	})
}

// End ends an attempt's lease in the transaction that also runs also, and makes
// its job ready for another.
func (w *World) End(ref ci.LeaseRef, also func(context.Context, *store.Tx) error) {
	w.t.Helper()
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		ls, err := tx.LockLeases(ctx, []ci.JobID{ref.Job})
		if err != nil {
			return err
		}
		if err := tx.EndLeases(ctx, ls); err != nil {
			return err
		}
		return also(ctx, tx)
	})
}

// FinishRun marks a run as finished.
func (w *World) FinishRun(id ci.RunID) {
	w.t.Helper()
	w.Write(func(ctx context.Context, tx *store.Tx) error {
		runs, err := tx.LockRuns(ctx, []ci.RunID{id})
		if err != nil {
			return err
		}
		runs[0].State, runs[0].Conclusion, runs[0].FinishedUS = ci.StateFinished, ci.ConclusionSuccess, w.now.Load()
		return tx.UpdateRuns(ctx, []*store.Run{&runs[0]})
	})
}
