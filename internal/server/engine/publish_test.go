package engine_test

import (
	"errors"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// generation inserts an upload session of an attempt, sealed or not.
func (w *world) generation(ref ci.LeaseRef, id, name string, seal bool) {
	w.t.Helper()
	w.write(func(tx *store.Tx) error {
		now := w.now.Load()
		ok, err := tx.InsertArtifact(w.ctx, ref, store.ArtifactSession{
			RequestID: id, Upload: "{}", PartSize: 8 << 20, Trust: ci.TrustTrusted, Artifact: store.Artifact{
				ID: id, Org: w.org, Run: ref.Run, Job: ref.Job, Epoch: ref.Epoch, Name: name, BlobKey: "artifacts/" + id, Size: 1, Digest: digest, Files: 1,
			},
		}, now)
		if err == nil && seal {
			ok, err = tx.SealArtifact(w.ctx, ref, id, now, now+1e12)
		}
		if err == nil && !ok {
			w.t.Errorf("artifact %s: the lease is not current", id)
		}
		return err
	})
}

// A success brings every artifact that it must publish, sealed by this attempt;
// anything else is refused and changes nothing, and what is bound is exactly that.
func TestASuccessBindsWhatItMustPublishAndNothingElse(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		build := job("build")
		build.Publish = []ci.ArtifactPublish{{Name: "app", Paths: []string{"app"}}, {Name: "doc", Paths: []string{"doc"}, Optional: true}}
		build.Retry = &ci.RetryPolicy{Max: 1, Exit: []int{75}}
		id := w.submit(build)
		a := w.agent("a", 1)
		first := a.mustClaim().Lease
		w.generation(first, "art_of_the_first", "app", true)
		a.complete(first, failure(75))
		ref := w.backoff(a).Lease
		w.generation(ref, "art_app", "app", false)
		for what, names := range map[string]map[string]string{
			"missing":                     nil,
			"not sealed":                  {"app": "art_app"},
			"made up":                     {"app": "art_nothing"},
			"sealed by an earlier try":    {"app": "art_of_the_first"},
			"optional, without the other": {"doc": "art_app"},
		} {
			req := success()
			req.Artifacts = names
			if _, err := w.e.Complete(w.ctx, a.hold(ref), req); !errors.Is(err, ci.ErrConflict) {
				w.t.Errorf("a success with its artifact %s: %v, want conflict", what, err)
			}
			w.wantJob(id, "build", ci.StateRunning, "", "")
		}
		w.write(func(tx *store.Tx) error {
			_, err := tx.SealArtifact(w.ctx, ref, "art_app", w.now.Load(), w.now.Load()+1e12)
			return err
		})
		req := success()
		req.Artifacts = map[string]string{"app": "art_app"}
		a.complete(ref, req)
		w.wantJob(id, "build", ci.StateFinished, ci.ConclusionSuccess, "")
		var bound []store.Binding
		w.write(func(tx *store.Tx) (err error) {
			bound, err = tx.BindingsOfRun(w.ctx, id)
			return err
		})
		if len(bound) != 1 || bound[0].Name != "app" || bound[0].Artifact.ID != "art_app" {
			w.t.Errorf("bound: %+v", bound)
		}
		w.check()
	})
}

// The stored answer of an ended attempt is for the runner that ended it, under the
// exact tuple.
func TestAStoredAnswerIsForItsOwnerOnly(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		w.submit(job("j"))
		a, b := w.agent("a", 1), w.agent("b", 1)
		ref := a.mustClaim().Lease
		req := success()
		want := a.complete(ref, req)
		if got, ok, err := w.e.StoredAnswer(w.ctx, a.who, ref, req.RequestID, engine.Digest(req)); err != nil || !ok || got != want {
			w.t.Errorf("its owner: %+v %v %v", got, ok, err)
		}
		stranger := engine.Identity{Runner: a.who.Runner, Org: "org_other"}
		another := ref
		another.Lease = "lse_1_00000000000000000000000000"
		for what, ask := range map[string]func() (protocol.Completed, bool, error){
			"another runner": func() (protocol.Completed, bool, error) {
				return w.e.StoredAnswer(w.ctx, b.who, ref, req.RequestID, engine.Digest(req))
			},
			"another tenant": func() (protocol.Completed, bool, error) {
				return w.e.StoredAnswer(w.ctx, stranger, ref, req.RequestID, engine.Digest(req))
			},
			"another lease": func() (protocol.Completed, bool, error) {
				return w.e.StoredAnswer(w.ctx, a.who, another, req.RequestID, engine.Digest(req))
			},
			"another request": func() (protocol.Completed, bool, error) {
				return w.e.StoredAnswer(w.ctx, a.who, ref, "other", engine.Digest(req))
			},
		} {
			if got, ok, err := ask(); ok || err != nil {
				w.t.Errorf("%s was answered %+v, %v", what, got, err)
			}
		}
		if _, _, err := w.e.StoredAnswer(w.ctx, a.who, ref, req.RequestID, engine.Digest(failure(1))); !errors.Is(err, ci.ErrConflict) {
			w.t.Errorf("the same request with another result: %v, want conflict", err)
		}
	})
}
