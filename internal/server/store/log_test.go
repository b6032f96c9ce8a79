package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// firstBytes are what makes a log's row.
func firstBytes(ref ci.LeaseRef, org ci.OrgID) (store.Log, store.LogExtent) {
	stream := store.LogStream{Stream: protocol.Stdout}
	l := store.Log{
		Job: ref.Job, Epoch: ref.Epoch, Org: org, State: store.LogOpen, Bytes: 2, Extents: 1, NextSeq: 2, AheadSeq: 2,
		Streams: map[store.LogStream]int64{stream: 2},
	}
	return l, store.LogExtent{Job: ref.Job, Epoch: ref.Epoch, Seq: 1, LastSeq: 1, Stream: stream, Length: 2, FirstNL: 1, LastNL: 1, Newlines: 1}
}

// Where the first bytes of a log wait for another transaction, the lease may run out
// meanwhile: they are not stored then, though it was current before.
func TestNoLogBeginsBehindTheEndOfItsLease(t *testing.T) {
	t.Parallel()
	storetest.Each(t, testkit.Postgres, func(t *testing.T, w *storetest.World) {
		_, jobs := w.Run(ci.JobSpec{}, ci.JobSpec{})
		late, good := w.Claim(jobs[0]), w.Claim(jobs[1])
		w.Renew(good, time.Hour)
		key := store.AttemptKey{Job: late.Job, Epoch: late.Epoch}
		ctx := t.Context()
		appends := func(refs ...ci.LeaseRef) error {
			return w.Store.Write(ctx, func(tx *store.Tx) error {
				now := w.Now()
				current, err := tx.CurrentLeases(ctx, refs, now)
				if err != nil {
					return err
				}
				var logs []store.Log
				var es []store.LogExtent
				for _, ref := range refs {
					if !current[ref.Job] {
						return ci.Rejected(ci.RejectExpired)
					}
					l, e := firstBytes(ref, w.Org)
					logs, es = append(logs, l), append(es, e)
				}
				w.Advance(2 * storetest.TTL) // it waits
				return tx.AppendLogs(ctx, refs, nil, logs, es, "segment", 4, now)
			})
		}
		if err := appends(good, late); ci.RejectOf(err) != ci.RejectExpired {
			t.Errorf("bytes of a lease that ran out while they waited: %v", err)
		}
		err := w.Store.Read(ctx, func(tx *store.Tx) error {
			if _, ok, err := tx.Log(ctx, w.Org, key); ok || err != nil {
				t.Errorf("a log was made: %v", err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := appends(good); err != nil {
			t.Errorf("bytes of a current lease: %v", err)
		}
	})
}

// The end of an attempt and its first bytes, on two nodes at once: the end waits for
// the bytes or the bytes find the log ended; in no order is anything appended behind it.
func TestFirstBytesAndTheEndMeet(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := storetest.New(t, url)
	_, jobs := w.Run(ci.JobSpec{}, ci.JobSpec{})
	ctx := t.Context()
	for i, commits := range []bool{true, false} {
		ref := w.Claim(jobs[i])
		ended, answered, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		undo := errors.New("undone")
		go func() {
			defer close(answered)
			tries := 0
			done <- w.Store.Write(ctx, func(tx *store.Tx) error {
				if tries++; tries == 1 {
					<-ended
				}
				now := w.Now()
				logs, err := tx.LockLogs(ctx, []ci.LeaseRef{ref})
				if err != nil {
					return err
				}
				current, err := tx.CurrentLeases(ctx, []ci.LeaseRef{ref}, now)
				if err != nil {
					return err
				}
				if !current[ref.Job] || len(logs) > 0 {
					return ci.Rejected(ci.RejectEnded)
				}
				l, e := firstBytes(ref, w.Org)
				return tx.AppendLogs(ctx, []ci.LeaseRef{ref}, nil, []store.Log{l}, []store.LogExtent{e}, "segment-"+string(ref.Job), 2, now)
			})
		}()
		err := w.Store.Write(ctx, func(tx *store.Tx) error {
			ls, err := tx.LockLeases(ctx, []ci.JobID{ref.Job})
			if err != nil {
				return err
			}
			if err := tx.EndLeases(ctx, ls); err != nil {
				return err
			}
			if err := tx.EndLogs(ctx, []store.LogEnd{{Job: ref.Job, Epoch: ref.Epoch, Org: w.Org}}, w.Now()); err != nil {
				return err
			}
			if _, err := tx.LockLogs(ctx, []ci.LeaseRef{ref}); err != nil { // what was put off is sent with it
				return err
			}
			close(ended)
			testkit.AwaitLockWait(t, url, answered)
			select {
			case <-answered:
				t.Error("the bytes were answered before the end was")
			default:
			}
			if !commits {
				return undo
			}
			return nil
		})
		if commits == (err != nil) || err != nil && !errors.Is(err, undo) {
			t.Fatal(err)
		}
		if err := <-done; commits != (ci.RejectOf(err) == ci.RejectEnded) || !commits && err != nil {
			t.Errorf("end committed: %t; bytes: %v", commits, err)
		}
		err = w.Store.Read(context.WithoutCancel(ctx), func(tx *store.Tx) error {
			l, ok, err := tx.Log(ctx, w.Org, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
			if want := (map[bool]int64{false: 2})[commits]; err != nil || !ok || l.Bytes != want || (l.State == store.LogEnded) != commits {
				t.Errorf("end committed: %t; log %+v %t %v", commits, l, ok, err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The end of many attempts at once meets first bytes of one and further bytes of
// another: one waits for the other, and neither has to be run again.
func TestTheEndOfLogsAndFirstBytesMakeNoDeadlock(t *testing.T) {
	t.Parallel()
	url := testkit.Postgres(t)
	w := storetest.New(t, url)
	ctx := t.Context()
	_, jobs := w.Run(ci.JobSpec{}, ci.JobSpec{})
	silent, spoke := w.Claim(jobs[0]), w.Claim(jobs[1])
	begin := func(tx *store.Tx, ref ci.LeaseRef) error {
		l, e := firstBytes(ref, w.Org)
		return tx.AppendLogs(ctx, []ci.LeaseRef{ref}, nil, []store.Log{l}, []store.LogExtent{e}, "segment-"+string(ref.Job), 2, w.Now())
	}
	w.Write(func(_ context.Context, tx *store.Tx) error { return begin(tx, spoke) })
	locked, ends, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	appends, done := 0, make(chan error, 1)
	go func() {
		done <- w.Store.Write(ctx, func(tx *store.Tx) error {
			if _, err := tx.LockLogs(ctx, []ci.LeaseRef{silent, spoke}); err != nil {
				return err
			}
			if appends++; appends == 1 {
				close(locked)
				<-ends
				testkit.AwaitLockWait(t, url, ended)
			}
			return begin(tx, silent)
		})
	}()
	<-locked
	tries := 0
	w.Write(func(_ context.Context, tx *store.Tx) error {
		if tries++; tries == 1 {
			close(ends)
		}
		return tx.EndLogs(ctx, []store.LogEnd{
			{Job: silent.Job, Epoch: silent.Epoch, Org: w.Org}, {Job: spoke.Job, Epoch: spoke.Epoch, Org: w.Org},
		}, w.Now())
	})
	close(ended)
	if err := <-done; err != nil || appends != 1 || tries != 1 {
		t.Errorf("the bytes were tried %d times, the end %d times: %v", appends, tries, err)
	}
}
