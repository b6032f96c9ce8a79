package artifact_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// world is an artifact service over a real database and a local directory whose
// signed URLs are served.
type world struct {
	*storetest.World
	t      testing.TB
	blob   *fs.Store
	http   *httptest.Server
	svc    *artifact.Service
	guard  *engine.Engine
	viewer auth.Viewer
	cfg    artifact.Config
	// during runs while the store seals an upload, before it becomes visible;
	// after when it has.
	during, after func()
}

// sealing is the store with the test's hooks.
type sealing struct {
	*fs.Store
	w *world
}

func (s sealing) Seal(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	if during := s.w.during; during != nil {
		s.w.during = nil
		during()
	}
	err := s.Store.Seal(ctx, up, parts)
	if after := s.w.after; after != nil {
		s.w.after = nil
		after()
	}
	return err
}

func each(t *testing.T, run func(*testing.T, *world)) {
	t.Helper()
	storetest.Each(t, testkit.Postgres, func(t *testing.T, w *storetest.World) { run(t, newWorld(t, w)) })
}

func newWorld(t testing.TB, sw *storetest.World) *world {
	t.Helper()
	// The store's clock goes with the database's, as files are dated by the machine.
	shift := atomic.Int64{}
	shift.Store(time.Now().UnixMicro() - sw.Now())
	sw.Advance(time.Duration(shift.Load()) * time.Microsecond)
	dir, err := fs.Open(t.TempDir(), fs.Options{Now: func() time.Time { return time.UnixMicro(sw.Now()) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	mux := http.NewServeMux()
	mux.Handle("/", dir.Handler(func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, err.Error(), http.StatusForbidden)
	}))
	w := &world{World: sw, t: t, blob: dir, http: httptest.NewServer(mux), viewer: auth.Viewer{Org: sw.Org}}
	t.Cleanup(w.http.Close)
	w.guard, err = engine.New(t.Context(), engine.Config{
		Store: sw.Store, Log: sw.Log,
		Monotonic: func() time.Duration { return time.Duration(sw.Now()) * time.Microsecond },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.cfg = artifact.Config{Store: sw.Store, Blob: sealing{dir, w}, Log: sw.Log}
	w.svc = artifact.New(w.cfg)
	return w
}

func (w *world) held(ref ci.LeaseRef) engine.Held {
	w.t.Helper()
	h, err := w.guard.Hold(w.t.Context(), engine.Identity{Runner: ref.Runner, Org: w.Org}, ref, "artifact", engine.ActiveOnly)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

func publish(names ...string) ci.JobSpec {
	var s ci.JobSpec
	for _, n := range names {
		s.Publish = append(s.Publish, ci.ArtifactPublish{Name: n, Paths: []string{n}})
	}
	return s
}

// job returns a running attempt of a new job that may publish the names.
func (w *world) job(names ...string) ci.LeaseRef {
	_, jobs := w.Run(publish(names...))
	return w.Claim(jobs[0])
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func describe(name, request string, content []byte) (protocol.NewArtifact, string) {
	in := protocol.NewArtifact{RequestID: request, Name: name, Size: int64(len(content)), Digest: digestOf(content), Files: 1, Bytes: int64(len(content))}
	return in, "body of " + request + in.Digest
}

// put sends a part as a runner would.
func (w *world) put(to protocol.SignedURL, b []byte) int {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), to.Method, w.http.URL+to.URL, bytes.NewReader(b))
	if err != nil {
		w.t.Fatal(err)
	}
	for k, v := range to.Header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode
}

func (w *world) get(from protocol.SignedURL) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), from.Method, w.http.URL+from.URL, http.NoBody)
	if err != nil {
		w.t.Fatal(err)
	}
	for k, v := range from.Header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode, string(b)
}

func one(content []byte) []protocol.ArtifactPart {
	return []protocol.ArtifactPart{{Number: 1, Size: int64(len(content)), Digest: digestOf(content)}}
}

// upload opens a session and sends its only part; it is not sealed.
func (w *world) upload(ref ci.LeaseRef, name string, content []byte) string {
	w.t.Helper()
	ctx := w.t.Context()
	in, body := describe(name, "req-"+name, content)
	s, err := w.svc.Begin(ctx, w.held(ref), in, body)
	if err != nil {
		w.t.Fatal(err)
	}
	signed, err := w.svc.Sign(ctx, w.held(ref), s.ID, one(content))
	if err != nil {
		w.t.Fatal(err)
	}
	if code := w.put(signed.URLs[0], content); code/100 != 2 {
		w.t.Fatalf("PUT: %d", code)
	}
	return s.ID
}

// sealed uploads and seals.
func (w *world) sealed(ref ci.LeaseRef, name string, content []byte) string {
	w.t.Helper()
	id := w.upload(ref, name, content)
	if err := w.svc.Seal(w.t.Context(), w.held(ref), id, one(content)); err != nil {
		w.t.Fatal(err)
	}
	return id
}

// complete ends an attempt and binds an artifact to its job in the run.
func (w *world) complete(ref ci.LeaseRef, name, id string) {
	w.t.Helper()
	w.End(ref, func(ctx context.Context, tx *store.Tx) error {
		return tx.InsertBindings(ctx, []store.NewBinding{{Run: ref.Run, Job: ref.Job, Name: name, Artifact: id, Org: w.Org}}, w.Now())
	})
}

func (w *world) collect() {
	w.t.Helper()
	if err := w.svc.Collect(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) objects() []string {
	w.t.Helper()
	infos, err := w.blob.List(w.t.Context(), "artifacts/", "", 1000)
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, in := range infos {
		out = append(out, in.Key[strings.LastIndexByte(in.Key, '/')+1:])
	}
	return out
}

func (w *world) uploads() int {
	w.t.Helper()
	ups, err := w.blob.Uploads(w.t.Context(), "artifacts/")
	if err != nil {
		w.t.Fatal(err)
	}
	return len(ups)
}
