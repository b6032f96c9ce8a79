package logs_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// endAll ends logs and has them sealed by one round.
func (w *world) endAll(refs []ci.LeaseRef) {
	w.t.Helper()
	var keys []store.AttemptKey
	for _, ref := range refs {
		w.end(ref)
		keys = append(keys, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	}
	w.svc.Ended(keys...)
}

func (w *world) waitAllSealed(refs []ci.LeaseRef) {
	w.t.Helper()
	for _, ref := range refs {
		w.eventually("log is sealed", func() bool { return w.row(ref).State == store.LogSealed })
	}
}

// The archives of small logs that end together share an object, until the last of
// them has expired.
func TestSmallArchivesShareAnObject(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		var refs []ci.LeaseRef
		text := func(i int) string { return fmt.Sprintf("this is what job %d says\nin two lines\n", i) }
		for i := range 20 {
			ref := w.job()
			var wr writer
			w.append(ref, wr.chunk(0, protocol.Stdout, text(i)))
			refs = append(refs, ref)
		}
		silent := w.job()
		w.endAll(append(refs, silent))
		w.waitAllSealed(append(refs, silent))
		objects := w.objects("logs/archives/")
		if len(objects) != 1 {
			t.Errorf("%d objects for %d small archives", len(objects), len(refs))
		}
		w.svc = w.restart() // nothing is remembered
		for i, ref := range refs {
			if l := w.row(ref); l.ArchiveKey != objects[0] || l.Extents != 0 {
				t.Errorf("log %d is in %q with %d extents left", i, l.ArchiveKey, l.Extents)
			}
			if got := w.raw(query(ref)); got != text(i) {
				t.Errorf("log %d is %q", i, got)
			}
			if got := w.lines(query(ref)); len(got.Lines) != 2 {
				t.Errorf("log %d has %d lines", i, len(got.Lines))
			}
		}
		w.Advance(80 * 24 * time.Hour)
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := w.raw(query(refs[7])); got != text(7) {
			t.Errorf("while it is kept the log is %q", got)
		}
		w.Advance(20 * 24 * time.Hour)
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := w.svc.Raw(t.Context(), w.viewer, query(refs[7])); !errors.Is(err, ci.ErrGone) {
			t.Errorf("an expired log: %v", err)
		}
		if left := w.objects("logs/"); len(left) != 0 {
			t.Errorf("objects left after retention: %q", left)
		}
	})
}

// A log that ended later is kept longer, and so is what it shares an object with;
// what has expired is not shown for that.
func TestAnObjectStaysForTheLastOfItsLogs(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		a, b := w.job(), w.job()
		var wa, wb writer
		w.append(a, wa.chunk(0, protocol.Stdout, "a\n"))
		w.append(b, wb.chunk(0, protocol.Stdout, "b\n"))
		w.endAll([]ci.LeaseRef{a, b})
		w.waitAllSealed([]ci.LeaseRef{a, b})
		err := w.Store.Write(t.Context(), func(tx *store.Tx) error {
			n, err := tx.ExpireLogs(t.Context(), w.Now(), 1)
			if err == nil && n != 1 {
				t.Errorf("%d logs expired", n)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		w.Advance(time.Hour)
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := len(w.objects("logs/archives/")); n != 1 {
			t.Fatalf("%d objects while one of two logs is kept", n)
		}
		kept, gone := a, b
		if w.row(a).State == store.LogExpired {
			kept, gone = b, a
		}
		if got := w.raw(query(kept)); got != "a\n" && got != "b\n" {
			t.Errorf("the log that is kept is %q", got)
		}
		if _, err := w.svc.Raw(t.Context(), w.viewer, query(gone)); !errors.Is(err, ci.ErrGone) {
			t.Errorf("the log that is not kept: %v", err)
		}
	})
}

// What an organisation's logs share an object with is its own.
func TestNoObjectHoldsArchivesOfTwoOrganisations(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		var refs []ci.LeaseRef
		orgs := []ci.OrgID{w.Org, "org_other"}
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			_, err := tx.EnsureOrg(ctx, orgs[1], "other", w.Now())
			return err
		})
		for i := range 6 {
			w.Org = orgs[i%2]
			ref := w.job()
			var wr writer
			w.append(ref, wr.chunk(0, protocol.Stdout, "x\n"))
			w.end(ref)
			refs = append(refs, ref)
		}
		var keys []store.AttemptKey
		for _, ref := range refs {
			keys = append(keys, store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
		}
		w.svc.Ended(keys...)
		held := map[string]ci.OrgID{}
		for i, ref := range refs {
			w.viewer.Org = orgs[i%2]
			w.eventually("log is sealed", func() bool { return w.row(ref).State == store.LogSealed })
			key := w.row(ref).ArchiveKey
			if of := held[key]; of != "" && of != orgs[i%2] {
				t.Errorf("object %s holds archives of two organisations", key)
			}
			held[key] = orgs[i%2]
		}
		if len(held) != 2 {
			t.Errorf("%d objects for two organisations", len(held))
		}
	})
}
