package artifact_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

func TestAnArtifactGoesFromProducerToConsumerAndNobodyElse(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		consumer := ci.JobSpec{Name: "test", Restore: []ci.ArtifactRestore{{FromJob: "build", Name: "app", Path: "in"}}}
		build := publish("app", "other")
		build.Name = "build"
		_, jobs := w.Run(build, consumer, ci.JobSpec{Name: "nosy"})
		producer := w.Claim(jobs[0])
		content := []byte("the bytes")
		id := w.sealed(producer, "app", content)
		other := w.sealed(producer, "other", []byte("not asked for"))
		test := w.Claim(jobs[1])
		if _, err := w.svc.Download(ctx, w.held(test), id); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("before it is bound: %v", err)
		}
		w.complete(producer, "app", id)
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			return tx.InsertBindings(ctx, []store.NewBinding{{Run: producer.Run, Job: producer.Job, Name: "other", Artifact: other, Org: w.Org}}, w.Now())
		})
		signed, err := w.svc.Download(ctx, w.held(test), id)
		if err != nil {
			t.Fatal(err)
		}
		if code, got := w.get(signed); code != 200 || got != string(content) {
			t.Errorf("download: %d %q", code, got)
		}
		if _, err := w.svc.Download(ctx, w.held(test), other); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("an artifact the job does not restore: %v", err)
		}
		nosy := w.Claim(jobs[2])
		if _, err := w.svc.Download(ctx, w.held(nosy), id); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("a job that restores nothing: %v", err)
		}
		_, elsewhere := w.Run(consumer)
		if _, err := w.svc.Download(ctx, w.held(w.Claim(elsewhere[0])), id); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("another run: %v", err)
		}
		a, err := w.svc.Stat(ctx, w.viewer, id)
		if err != nil || a.Name != "app" || !a.Bound || a.Size != int64(len(content)) || a.Expired || a.JobName != "build" {
			t.Errorf("stat %+v, %v", a, err)
		}
		list, err := w.svc.OfRun(ctx, w.viewer, producer.Run)
		if err != nil || len(list) != 2 {
			t.Errorf("list %+v, %v", list, err)
		}
		// Cancelling: what has not begun does not begin.
		held := w.held(test)
		w.Cancel(test.Job)
		if _, err := w.svc.Download(ctx, held, id); ci.RejectOf(err) != ci.RejectCancelling {
			t.Errorf("while cancelling: %v", err)
		}
	})
}

func TestCase_S47_AnotherTenantLearnsNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		id := w.sealed(w.job("app"), "app", []byte("x"))
		for _, v := range []auth.Viewer{{}, {Org: "org_other"}} {
			_, err1 := w.svc.Stat(t.Context(), v, id)
			_, err2 := w.svc.Content(t.Context(), v, id)
			_, err3 := w.svc.Open(t.Context(), v, id)
			for _, err := range []error{err1, err2, err3} {
				if !errors.Is(err, ci.ErrNotFound) || strings.Contains(err.Error(), "app") {
					t.Errorf("viewer %q: %v", v.Org, err)
				}
			}
			if list, err := w.svc.OfRun(t.Context(), v, "run_x"); err != nil || len(list) != 0 {
				t.Errorf("list %v, %v", list, err)
			}
		}
		for _, id := range []string{"", "art_", "art_0", "../" + id, "x"} {
			if _, err := w.svc.Stat(t.Context(), w.viewer, id); !errors.Is(err, ci.ErrNotFound) {
				t.Errorf("artifact %q: %v", id, err)
			}
		}
	})
}

func TestBeginSaysTheSameAgainAndRefusesTheRest(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app", "doc")
		in, body := describe("app", "r1", []byte("content"))
		first, err := w.svc.Begin(ctx, w.held(ref), in, body)
		if err != nil {
			t.Fatal(err)
		}
		again, err := w.svc.Begin(ctx, w.held(ref), in, body)
		if err != nil || again.ID != first.ID || again.PartSize != first.PartSize {
			t.Errorf("repeat: %+v, %v", again, err)
		}
		if _, err := w.svc.Begin(ctx, w.held(ref), in, "another body"); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("same request, another body: %v", err)
		}
		for name, edit := range map[string]func(*protocol.NewArtifact){
			"not declared":   func(a *protocol.NewArtifact) { a.Name = "secret" },
			"traversal":      func(a *protocol.NewArtifact) { a.Name = "../app" },
			"no request":     func(a *protocol.NewArtifact) { a.RequestID = "" },
			"empty":          func(a *protocol.NewArtifact) { a.Size = 0 },
			"no files":       func(a *protocol.NewArtifact) { a.Files = 0 },
			"too large":      func(a *protocol.NewArtifact) { a.Size = 1 << 50 },
			"digest":         func(a *protocol.NewArtifact) { a.Digest = "md5:00" },
			"digest, upper":  func(a *protocol.NewArtifact) { a.Digest = strings.ToUpper(a.Digest) },
			"negative bytes": func(a *protocol.NewArtifact) { a.Bytes = -1 },
		} {
			bad := in
			bad.RequestID = "r-bad"
			bad.Name = "doc"
			edit(&bad)
			if s, err := w.svc.Begin(ctx, w.held(ref), bad, "b"); err == nil || ci.KindOf(err) == ci.ErrInternal {
				t.Errorf("%s: %+v, %v", name, s, err)
			}
		}
		if n := w.uploads(); n != 1 {
			t.Errorf("%d uploads are open; one session is", n)
		}
		held := w.held(ref)
		w.Cancel(ref.Job)
		doc, docBody := describe("doc", "r2", []byte("x"))
		if _, err := w.svc.Begin(ctx, held, doc, docBody); ci.RejectOf(err) != ci.RejectCancelling {
			t.Errorf("while cancelling: %v", err)
		}
		if _, err := w.svc.Sign(ctx, held, first.ID, one([]byte("content"))); ci.RejectOf(err) != ci.RejectCancelling {
			t.Errorf("sign while cancelling: %v", err)
		}
		if err := w.svc.Seal(ctx, held, first.ID, one([]byte("content"))); err == nil {
			t.Error("sealed while cancelling")
		}
		if n := w.uploads(); n != 1 {
			t.Errorf("%d uploads are open after refusals", n)
		}
	})
}

func TestCase_ART_02_TheFirstOfANameStaysAndAnotherAttemptIsFree(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		spec := publish("report")
		spec.Name = "leg (a)"
		_, jobs := w.Run(spec)
		first := w.Claim(jobs[0])
		one := w.sealed(first, "report", []byte("first"))
		in, body := describe("report", "again", []byte("second"))
		_, err := w.svc.Begin(ctx, w.held(first), in, body)
		if !errors.Is(err, ci.ErrConflict) || !strings.Contains(err.Error(), "report") || !strings.Contains(err.Error(), "leg (a)") {
			t.Errorf("the same name again: %v", err)
		}
		w.End(first, func(context.Context, *store.Tx) error { return nil })
		second := w.Claim(jobs[0])
		two := w.sealed(second, "report", []byte("second, longer"))
		for id, want := range map[string]string{one: "first", two: "second, longer"} {
			r, err := w.svc.Open(ctx, w.viewer, id)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(r)
			_ = r.Close()
			if string(b) != want {
				t.Errorf("%s holds %q", id, b)
			}
		}
	})
}

func TestCase_S48_NothingChangesWhatIsSealed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app")
		content := []byte("authentic")
		in, body := describe("app", "r", content)
		s, err := w.svc.Begin(ctx, w.held(ref), in, body)
		if err != nil {
			t.Fatal(err)
		}
		signed, err := w.svc.Sign(ctx, w.held(ref), s.ID, one(content))
		if err != nil {
			t.Fatal(err)
		}
		if code := w.put(signed.URLs[0], []byte("malicious")); code/100 == 2 {
			t.Error("other bytes of the same length were taken")
		}
		if _, err := w.svc.Sign(ctx, w.held(ref), s.ID, one([]byte("malicious"))); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("other bytes for a known part: %v", err)
		}
		if err := w.svc.Seal(ctx, w.held(ref), s.ID, one(content)); err == nil {
			t.Error("sealed before anything was uploaded")
		}
		if code := w.put(signed.URLs[0], content); code/100 != 2 {
			t.Fatalf("PUT %d", code)
		}
		if again, err := w.svc.Begin(ctx, w.held(ref), in, body); err != nil || len(again.Stored) != 1 || again.Stored[0].Number != 1 {
			t.Errorf("resumed session: %+v, %v", again, err)
		}
		for range 2 {
			if err := w.svc.Seal(ctx, w.held(ref), s.ID, one(content)); err != nil {
				t.Fatal(err)
			}
		}
		w.put(signed.URLs[0], content)
		if _, err := w.svc.Sign(ctx, w.held(ref), s.ID, one(content)); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("a URL for a sealed session: %v", err)
		}
		if again, err := w.svc.Begin(ctx, w.held(ref), in, body); err != nil || !again.Sealed {
			t.Errorf("a repeat after sealing: %+v, %v", again, err)
		}
		r, err := w.svc.Open(ctx, w.viewer, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if b, _ := io.ReadAll(r); string(b) != string(content) {
			t.Errorf("sealed bytes %q", b)
		}
	})
}

// A store that copies for longer than its caller waits comes to an end all the same,
// and the caller's next try finds it.
func TestASealGoesOnWhenItsCallerHasHungUp(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app")
		held := w.held(ref)
		content := bytes.Repeat([]byte("0123456789abcdef"), 9<<16) // two parts: the store copies them
		in, body := describe("app", "r", content)
		s, err := w.svc.Begin(ctx, held, in, body)
		if err != nil {
			t.Fatal(err)
		}
		chunks := [][]byte{content[:s.PartSize], content[s.PartSize:]}
		var parts []protocol.ArtifactPart
		for i, b := range chunks {
			parts = append(parts, protocol.ArtifactPart{Number: i + 1, Size: int64(len(b)), Digest: digestOf(b)})
		}
		signed, err := w.svc.Sign(ctx, held, s.ID, parts)
		if err != nil {
			t.Fatal(err)
		}
		for i, b := range chunks {
			if code := w.put(signed.URLs[i], b); code/100 != 2 {
				t.Fatalf("PUT: %d", code)
			}
		}
		call, hangUp := context.WithCancel(ctx)
		again := make(chan error, 1)
		w.during = func() {
			hangUp()
			go func() { again <- w.svc.Seal(ctx, held, s.ID, parts) }()
		}
		if err := w.svc.Seal(call, held, s.ID, parts); err != nil {
			t.Errorf("what the store had begun ended with its caller: %v", err)
		}
		if err := <-again; err != nil {
			t.Errorf("the next try: %v", err)
		}
		if got := w.objects(); len(got) != 1 || w.uploads() != 0 {
			t.Errorf("objects %q, %d uploads", got, w.uploads())
		}
	})
}

func TestASessionBelongsToItsAttempt(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref, stranger := w.job("app"), w.job("app")
		content := []byte("x")
		id := w.upload(ref, "app", content)
		if _, err := w.svc.Sign(ctx, w.held(stranger), id, one(content)); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("sign by another job: %v", err)
		}
		if err := w.svc.Seal(ctx, w.held(stranger), id, one(content)); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("seal by another job: %v", err)
		}
		held := w.held(ref)
		w.End(ref, func(context.Context, *store.Tx) error { return nil })
		next := w.Claim(ref.Job)
		if err := w.svc.Seal(ctx, held, id, one(content)); !errors.Is(err, ci.ErrLeaseLost) {
			t.Errorf("late seal: %v", err)
		}
		if err := w.svc.Seal(ctx, w.held(next), id, one(content)); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("seal by the next attempt: %v", err)
		}
		if _, err := w.svc.Stat(ctx, w.viewer, id); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("an unsealed artifact is shown: %v", err)
		}
		for _, bad := range [][]protocol.ArtifactPart{
			nil,
			{{Number: 0, Size: 1, Digest: digestOf(content)}},
			{{Number: 2, Size: 1, Digest: digestOf(content)}},
			{{Number: 1, Size: 2, Digest: digestOf(content)}},
			append(one(content), one(content)...),
		} {
			nid := w.upload2(next, content)
			if _, err := w.svc.Sign(ctx, w.held(next), nid, bad); !errors.Is(err, ci.ErrInvalid) {
				t.Errorf("parts %+v: %v", bad, err)
			}
		}
	})
}

// upload2 opens the attempt's session, or finds it.
func (w *world) upload2(ref ci.LeaseRef, content []byte) string {
	w.t.Helper()
	in, body := describe("app", "r2", content)
	s, err := w.svc.Begin(w.t.Context(), w.held(ref), in, body)
	if err != nil {
		w.t.Fatal(err)
	}
	return s.ID
}

func TestPartsAreSentInOnePlan(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app")
		content := bytes.Repeat([]byte("0123456789abcdef"), 1<<20) // 16 MiB: two parts
		in, body := describe("app", "r", content)
		s, err := w.svc.Begin(ctx, w.held(ref), in, body)
		if err != nil {
			t.Fatal(err)
		}
		var parts []protocol.ArtifactPart
		for n := 0; n*int(s.PartSize) < len(content); n++ {
			b := content[n*int(s.PartSize) : min(len(content), (n+1)*int(s.PartSize))]
			p := protocol.ArtifactPart{Number: n + 1, Size: int64(len(b)), Digest: digestOf(b)}
			signed, err := w.svc.Sign(ctx, w.held(ref), s.ID, []protocol.ArtifactPart{p})
			if err != nil {
				t.Fatal(err)
			}
			if code := w.put(signed.URLs[0], b); code/100 != 2 {
				t.Fatalf("PUT %d", code)
			}
			parts = append(parts, p)
		}
		if err := w.svc.Seal(ctx, w.held(ref), s.ID, parts[:1]); !errors.Is(err, ci.ErrInvalid) {
			t.Errorf("sealed without its last part: %v", err)
		}
		if err := w.svc.Seal(ctx, w.held(ref), s.ID, []protocol.ArtifactPart{parts[1], parts[0]}); err != nil {
			t.Errorf("sealed in another order: %v", err)
		}
		if got := blob.PartSize(100 << 30); got != 128<<20 || (100<<30)/got != 800 {
			t.Errorf("100 GiB go in parts of %d", got)
		}
	})
}

func TestCase_ART_05_AnExpiredArtifactSaysSinceWhenAndItsBytesGo(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		spec := publish("app")
		spec.Publish[0].Retention = ci.Duration(time.Second)
		_, jobs := w.Run(spec)
		ref := w.Claim(jobs[0])
		content := bytes.Repeat([]byte("slow "), 100_000)
		id := w.sealed(ref, "app", content)
		w.complete(ref, "app", id)
		w.FinishRun(ref.Run)
		w.Advance(500 * time.Millisecond)
		slow, err := w.svc.Open(ctx, w.viewer, id)
		if err != nil {
			t.Fatal(err)
		}
		defer slow.Close()
		if _, err := io.ReadFull(slow, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		w.Advance(1500 * time.Millisecond)
		check := func(when string) {
			if _, err := w.svc.Content(ctx, w.viewer, id); !errors.Is(err, ci.ErrGone) || !strings.Contains(err.Error(), "expired at 20") {
				t.Errorf("%s: %v", when, err)
			}
			list, err := w.svc.OfRun(ctx, w.viewer, ref.Run)
			if err != nil || len(list) != 1 || !list[0].Expired {
				t.Errorf("%s: list %+v, %v", when, list, err)
			}
		}
		check("before it is collected")
		w.collect()
		check("afterwards")
		if left := w.objects(); len(left) != 0 {
			t.Errorf("bytes left: %q", left)
		}
		if rest, err := io.ReadAll(slow); err != nil || len(rest) != len(content)-10 {
			t.Errorf("the slow reader got %d bytes, %v", len(rest)+10, err)
		}
		// A retry cannot bind it any more.
		retry, _ := w.Run(publish("app"))
		err = w.Store.Write(ctx, func(tx *store.Tx) error {
			return tx.InsertBindings(ctx, []store.NewBinding{{Run: retry.ID, Job: ref.Job, Name: "app", Artifact: id, Org: w.Org}}, w.Now())
		})
		if !errors.Is(err, ci.ErrGone) {
			t.Errorf("bound after it was deleted: %v", err)
		}
	})
}

func TestCase_RERUN_01_WhatAnUnfinishedRunNeedsIsKept(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		build := publish("bin")
		build.Name = "build"
		_, jobs := w.Run(build)
		ref := w.Claim(jobs[0])
		id := w.sealed(ref, "bin", []byte("bytes"))
		w.complete(ref, "bin", id)
		w.Advance(60 * 24 * time.Hour)
		w.collect()
		if len(w.objects()) != 1 {
			t.Fatal("deleted under the run that made it")
		}
		w.FinishRun(ref.Run)
		// The retry pins it.
		deploy := ci.JobSpec{Name: "publish", Restore: []ci.ArtifactRestore{{FromJob: "build", Name: "bin", Path: "bin"}}}
		retry, retried := w.Run(build, deploy)
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			return tx.InsertBindings(ctx, []store.NewBinding{{Run: retry.ID, Job: retried[0], Name: "bin", Artifact: id, Org: w.Org}}, w.Now())
		})
		w.Advance(2 * time.Hour)
		w.collect()
		consumer := w.Claim(retried[1])
		signed, err := w.svc.Download(ctx, w.held(consumer), id)
		if err != nil {
			t.Fatal(err)
		}
		if _, got := w.get(signed); got != "bytes" {
			t.Errorf("the retry reads %q", got)
		}
		// A whole retry has none of it.
		_, fresh := w.Run(build, deploy)
		if _, err := w.svc.Download(ctx, w.held(w.Claim(fresh[1])), id); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("an older run's artifact: %v", err)
		}
		w.FinishRun(retry.ID)
		w.Advance(2 * time.Hour)
		w.collect()
		if left := w.objects(); len(left) != 0 {
			t.Errorf("left when nobody needs it: %q", left)
		}
	})
}

func TestCase_S49_ATrustedRunDoesNotEatWhatAnUntrustedOneMade(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app")
		in := store.ArtifactSession{RequestID: "r", Upload: "{}", PartSize: 8 << 20, Trust: ci.TrustUntrusted, Artifact: store.Artifact{
			ID: "art_untrusted", Org: w.Org, Run: ref.Run, Job: ref.Job, Epoch: ref.Epoch, Name: "app", BlobKey: "artifacts/x", Size: 1, Digest: "d", Files: 1,
		}}
		consumer := ci.JobSpec{Name: "deploy", Restore: []ci.ArtifactRestore{{FromJob: "build", Name: "app"}}}
		run, jobs := w.Run(ci.JobSpec{Name: "build"}, consumer)
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			if _, err := tx.InsertArtifact(ctx, ref, in, w.Now()); err != nil {
				return err
			}
			if _, err := tx.SealArtifact(ctx, ref, in.ID, w.Now(), w.Now()+1e9); err != nil {
				return err
			}
			return tx.InsertBindings(ctx, []store.NewBinding{{Run: run.ID, Job: jobs[0], Name: "app", Artifact: in.ID, Org: w.Org}}, w.Now())
		})
		if _, err := w.svc.Download(ctx, w.held(w.Claim(jobs[1])), in.ID); !errors.Is(err, ci.ErrForbidden) {
			t.Errorf("download: %v", err)
		}
	})
}

func TestLeftoversAreCollected(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		ref := w.job("app")
		w.upload(ref, "app", []byte("never sealed"))
		if _, err := w.blob.NewUpload(ctx, "artifacts/x/0/art_nobody", 1, [32]byte{}); err != nil {
			t.Fatal(err)
		}
		w.collect()
		if n := w.uploads(); n != 2 {
			t.Errorf("%d uploads; both may still be in use", n)
		}
		w.End(ref, func(context.Context, *store.Tx) error { return nil })
		w.collect()
		if n := w.uploads(); n != 1 {
			t.Errorf("%d uploads after the attempt's end", n)
		}
		w.Advance(24 * time.Hour)
		w.collect()
		if n := w.uploads(); n != 0 {
			t.Errorf("%d uploads after a day", n)
		}
		if left := w.objects(); len(left) != 0 {
			t.Errorf("objects %q", left)
		}
	})
}

// stubborn is a store that cannot delete one object nor read one upload.
type stubborn struct {
	*fs.Store
	key string
}

func (s stubborn) Delete(ctx context.Context, key string) error {
	if key == s.key {
		return ci.Errorf(ci.ErrUnavailable, "stubborn")
	}
	return s.Store.Delete(ctx, key)
}

func (s stubborn) Uploads(ctx context.Context, prefix string) ([]blob.Upload, error) {
	ups, err := s.Store.Uploads(ctx, prefix)
	return ups, errors.Join(err, ci.Errorf(ci.ErrDigest, "damaged"))
}

// What cannot be deleted or read is reported and keeps nothing else.
func TestOneFailureStopsNoCollection(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		for _, name := range []string{"1", "2", "3"} {
			if err := w.blob.PutNew(ctx, "artifacts/"+name, bytes.NewReader(nil), 0, sha256.Sum256(nil)); err != nil {
				t.Fatal(err)
			}
			if _, err := w.blob.NewUpload(ctx, "artifacts/up"+name, 1, [32]byte{}); err != nil {
				t.Fatal(err)
			}
		}
		w.Advance(13 * time.Hour)
		cfg := w.cfg
		cfg.Blob = stubborn{w.blob, "artifacts/1"}
		if err := artifact.New(cfg).Collect(ctx); !errors.Is(err, ci.ErrUnavailable) || !errors.Is(err, ci.ErrDigest) {
			t.Errorf("error %v, want both failures", err)
		}
		if left := w.objects(); len(left) != 1 || left[0] != "1" || w.uploads() != 0 {
			t.Errorf("left: %q and %d uploads", left, w.uploads())
		}
		w.collect()
		if left := w.objects(); len(left) != 0 {
			t.Errorf("left when it can be deleted: %q", left)
		}
	})
}
