package engine_test

import (
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Submissions that meet are one transaction, and each has its own answer.
func TestMergedSubmissionsAreAnsweredOneByOne(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		var second store.Repo
		w.write(func(tx *store.Tx) (err error) {
			second, err = tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), w.org, "local", "k2", "local/y", 1)
			return err
		})
		of := func(repo ci.RepoID, key string, jobs ...ci.JobSpec) engine.Submission {
			return engine.Submission{
				Org: w.org, Repo: repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted, Event: "manual",
				Plan: ci.Plan{Workflow: "w", Path: ".forgeci.yaml", Digest: "d", Jobs: jobs}, IdempotencyKey: key, RequestDigest: "of " + key,
			}
		}
		all := []engine.Submission{
			of(w.repo, "", job("a"), job("b", "a")), of(w.repo, "once", job("a")), of(w.repo, "once", job("a")), of(w.repo, "other", job("a")),
			of(second.ID, "once", job("a")), of("rpo_none", "", job("a")), of(w.repo, "", job("a")), of(w.repo, "once", job("a")),
		}
		all[6].Source = "sha256:none"
		all[7].RequestDigest = "something else"
		ids, errs := make([]ci.RunID, len(all)), make([]error, len(all))
		var e *engine.Engine
		next := 0
		var err error
		e, err = engine.New(w.ctx, engine.Config{
			Store: w.store, Log: slog.New(slog.DiscardHandler), LeaseTTL: ttl,
			Monotonic: func() time.Duration { return time.Duration(w.mono.Load()) * time.Microsecond },
			Gather: func() {
				if i := next; i < len(all) {
					next++
					ids[i], errs[i] = e.Submit(w.ctx, all[i])
				}
			},
		})
		if err != nil {
			w.t.Fatal(err)
		}
		next = 1
		ids[0], errs[0] = e.Submit(w.ctx, all[0])
		for i, want := range []ci.Kind{"", "", "", "", "", ci.ErrNotFound, ci.ErrNotFound, ci.ErrConflict} {
			if want == "" && (errs[i] != nil || ids[i] == "") || want != "" && !errors.Is(errs[i], want) {
				w.t.Errorf("submission %d: %q, %v, want %q", i, ids[i], errs[i], want)
			}
		}
		if ids[1] != ids[2] || ids[1] == ids[3] || ids[4] == ids[1] {
			w.t.Errorf("runs %v: the second and third are one request, the others are not", ids)
		}
		made := map[string]bool{}
		for _, i := range []int{0, 1, 3, 4} {
			r := w.run(ids[i])
			made[string(r.Repo)+" "+strconv.FormatInt(r.Number, 10)] = true
			w.wantJob(ids[i], "a", ci.StateReady, "", "")
		}
		w.wantJob(ids[0], "b", ci.StateWaiting, "", "")
		for _, want := range []string{string(w.repo) + " 1", string(w.repo) + " 2", string(w.repo) + " 3", string(second.ID) + " 1"} {
			if !made[want] {
				w.t.Errorf("numbers %v, want %s", made, want)
			}
		}
		w.check()
	})
}
