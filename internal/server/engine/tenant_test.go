package engine_test

import (
	"log/slog"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Two tenants' runners make the same offer and claim in one merged transaction:
// each gets its own tenant's job.
func TestAMergedClaimKeepsTenantsApart(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		other, err := w.e.EnsureOrg(w.ctx, "other")
		if err != nil {
			w.t.Fatal(err)
		}
		var repo store.Repo
		w.write(func(tx *store.Tx) (err error) {
			if err = tx.InsertSource(w.ctx, other.ID, store.Source{Digest: digest, BlobKey: "k2", BlobDigest: digest, Size: 1}, 1); err != nil {
				return err
			}
			repo, err = tx.EnsureRepo(w.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), other.ID, "local", "k", "local/y", 1)
			return err
		})
		a, b := w.agent("a", 4), w.agentOf(other.ID, "b", 4)
		var second *protocol.Ticket
		nested := false
		var e *engine.Engine
		e, err = engine.New(w.ctx, engine.Config{
			Store: w.store, Log: slog.New(slog.DiscardHandler), LeaseTTL: ttl,
			Monotonic: func() time.Duration { return time.Duration(w.mono.Load()) * time.Microsecond },
			Gather: func() {
				if nested {
					return
				}
				nested = true
				got, err := e.Claim(w.ctx, b.who, protocol.Claim{Session: b.session, RequestID: "b"})
				if err != nil {
					w.t.Error(err)
				}
				second = got
			},
		})
		if err != nil {
			w.t.Fatal(err)
		}
		w.submit(job("mine"), job("mine too"), job("mine as well"))
		w.e = e
		if _, err := e.Submit(w.ctx, engine.Submission{
			Org: other.ID, Repo: repo.ID, Actor: "x", Source: digest, Trust: ci.TrustTrusted,
			Event: "manual", Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("theirs")}},
		}); err != nil {
			w.t.Fatal(err)
		}
		nested, second = false, nil
		first, err := e.Claim(w.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "a"})
		if err != nil || first == nil || second == nil {
			w.t.Fatalf("claimed %v and %v: %v", first, second, err)
		}
		if first.Job.Name == "theirs" || second.Job.Name != "theirs" {
			w.t.Errorf("tenant one got %q, tenant two got %q", first.Job.Name, second.Job.Name)
		}
		w.check()
	})
}
