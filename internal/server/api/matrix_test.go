package api

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/snapshot"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// The ownership matrix: every lease route under every way in which a tuple can
// be wrong. Rows are the routes of the table, so that a new lease route without
// a row here fails; columns are the ways; each cell sends a request that the
// exact tuple would have had accepted, and proves that it is refused with the
// right word and that no row of any table has changed.

const (
	matrixTTL    = time.Minute
	matrixDigest = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
)

// stage is one server over one real database, with a leased job and its neighbours.
type stage struct {
	t      testing.TB
	ctx    context.Context
	now    atomic.Int64
	mono   atomic.Int64
	store  *store.Store
	engine *engine.Engine
	api    *API
	mux    http.Handler

	org, otherOrg           ci.OrgID
	tokens                  map[string]string // by runner name
	ids                     map[string]engine.Identity
	sessions                map[string]ci.SessionID
	lease, sibling, foreign ci.LeaseRef
	artifact                string // being uploaded under lease, all parts are there
	restorable              string // what the job of lease restores
	abroad                  string // what the other tenant's first job made
	repos                   map[ci.OrgID]ci.RepoID
	admin, registration     string
	n                       int
}

func newStage(t testing.TB, url string, routes func(*API) []Route) *stage {
	t.Helper()
	s := &stage{t: t, ctx: t.Context(), tokens: map[string]string{}, ids: map[string]engine.Identity{}, sessions: map[string]ci.SessionID{}, repos: map[ci.OrgID]ci.RepoID{}}
	s.now.Store(time.Now().UnixMicro())
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError}))
	var err error
	if s.store, err = store.Open(s.ctx, store.Options{URL: url, Now: s.now.Load, Log: log}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.store.Close() })
	blobs, err := fs.Open(t.TempDir(), fs.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s.engine, err = engine.New(s.ctx, engine.Config{
		Store: s.store, Log: log, LeaseTTL: matrixTTL, InfraBudget: 1,
		Monotonic: func() time.Duration { return time.Duration(s.mono.Load()) * time.Microsecond },
		EvalIf:    func(string, engine.Condition) (bool, error) { return true, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	people := auth.New(s.store, make([]byte, 32), log, func() time.Time { return time.UnixMicro(s.now.Load()) })
	lg := logs.New(logs.Config{Store: s.store, Blob: blobs, Log: log})
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() { defer close(stopped); _ = lg.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-stopped })
	af := artifact.New(artifact.Config{Store: s.store, Blob: blobs, Log: log})
	s.api = New(Config{
		Engine: s.engine, Auth: people, Store: s.store, Blob: blobs, Logs: lg, Artifacts: af, Snapshots: snapshot.New(snapshot.Config{Store: s.store, Blob: blobs, Log: log}),
		Reader: reader.New(s.store, s.engine, af), Log: log, TempDir: t.TempDir(), Ready: s.store.Ping,
	})
	mux := http.NewServeMux()
	for _, r := range routes(s.api) {
		mux.Handle(r.Pattern, s.api.serve(r))
	}
	s.mux = mux
	s.fill(blobs)
	return s
}

func (s *stage) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// fill makes two tenants, three runners and the leases.
func (s *stage) fill(blobs *fs.Store) {
	for _, name := range []string{"default", "other"} {
		org, err := s.engine.EnsureOrg(s.ctx, name)
		s.must(err)
		s.must(s.store.Write(s.ctx, func(tx *store.Tx) error {
			return tx.InsertSource(s.ctx, org.ID, store.Source{Digest: matrixDigest, BlobKey: "source", BlobDigest: matrixDigest, Size: 6}, 1)
		}))
		if name == "default" {
			s.org = org.ID
		} else {
			s.otherOrg = org.ID
		}
	}
	s.must(blobs.PutNew(s.ctx, "source", strings.NewReader("source"), 6, sha256.Sum256([]byte("source"))))
	s.admin, s.registration = protocol.NewToken(protocol.TokenAdmin), protocol.NewToken(protocol.TokenRegistration)
	s.must(s.store.Write(s.ctx, func(tx *store.Tx) error {
		for kind, token := range map[string]string{"admin": s.admin, "registration": s.registration} {
			err := tx.InsertCredential(s.ctx, store.Credential{ID: kind, Org: s.org, Kind: kind, Actor: kind}, auth.Hash(token))
			if err != nil {
				return err
			}
		}
		return nil
	}))
	s.runner("a", s.org)
	s.runner("b", s.org)
	s.runner("c", s.otherOrg)
	s.submit(s.org)
	s.restorable = s.produce("a")
	s.lease, s.sibling = s.claim("a"), s.claim("a")
	s.submit(s.otherOrg)
	s.abroad = s.produce("c")
	s.foreign = s.claim("c")
	s.phase("a", s.lease)
	s.phase("a", s.sibling)
	s.artifact = s.upload("a", s.lease, "out")
}

func (s *stage) runner(name string, org ci.OrgID) {
	token := protocol.NewToken(protocol.TokenRunner)
	id, err := s.engine.Register(s.ctx, org, "test", nil, protocol.Register{Name: name, PublicKey: []byte(strings.Repeat(name, 32))}, auth.Hash(token))
	s.must(err)
	s.tokens[name], s.ids[name] = token, engine.Identity{Runner: id, Org: org}
	opened, err := s.engine.OpenSession(s.ctx, s.ids[name], protocol.OpenSession{
		RequestID: "1", Protocol: 1, Slots: 4,
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
	})
	s.must(err)
	s.sessions[name] = opened.Session
}

// submit starts a run: a job that makes what the next one restores, and its
// sibling.
func (s *stage) submit(org ci.OrgID) ci.RunID {
	var repo store.Repo
	s.must(s.store.Write(s.ctx, func(tx *store.Tx) (err error) {
		repo, err = tx.EnsureRepo(s.ctx, ci.RepoID(ci.IDSource{}.New(ci.PrefixRepo)), org, "local", "k", "local/x", 1)
		return err
	}))
	s.repos[org] = repo.ID
	plan := ci.Plan{Workflow: "w", Path: ".forgeci.yaml"}
	for _, n := range []string{"first", "main", "sibling"} {
		spec := ci.JobSpec{
			Name: n, Key: n, Steps: []ci.StepSpec{{Name: "s", Run: "true"}}, Timeout: ci.DefaultJobTimeout,
			Publish: []ci.ArtifactPublish{{Name: "out", Paths: []string{"out"}, Optional: true}, {Name: "more", Paths: []string{"more"}, Optional: true}},
		}
		if n != "first" {
			spec.Needs, spec.Restore = []string{"first"}, []ci.ArtifactRestore{{FromJob: "first", Name: "out", Path: "in"}}
		}
		plan.Jobs = append(plan.Jobs, spec)
	}
	id, err := s.engine.Submit(s.ctx, engine.Submission{Org: org, Repo: repo.ID, Actor: "test", Plan: plan, Source: matrixDigest, Trust: ci.TrustTrusted, Event: "manual"})
	s.must(err)
	return id
}

func (s *stage) claim(name string) ci.LeaseRef {
	s.n++
	ticket, err := s.engine.Claim(s.ctx, s.ids[name], protocol.Claim{Session: s.sessions[name], RequestID: fmt.Sprint(s.n)})
	s.must(err)
	if ticket == nil {
		s.t.Fatal("nothing to claim for " + name)
	}
	return ticket.Lease
}

func (s *stage) hold(name string, ref ci.LeaseRef) engine.Held {
	h, err := s.engine.Hold(s.ctx, s.ids[name], ref, "test", engine.ActiveOnly)
	s.must(err)
	return h
}

func (s *stage) phase(name string, ref ci.LeaseRef) {
	s.must(s.engine.SetPhase(s.ctx, s.hold(name, ref), protocol.SetPhase{RequestID: "p", Phase: ci.PhaseExecuting}))
}

// produce runs the first job, which binds an artifact, and returns that.
func (s *stage) produce(name string) string {
	ref := s.claim(name)
	s.phase(name, ref)
	id := s.upload(name, ref, "out")
	s.must(s.api.Artifacts.Seal(s.ctx, s.hold(name, ref), id, artifactParts()))
	s.end(name, ref, map[string]string{"out": id})
	return id
}

// The one artifact that is uploaded anywhere here.
const artifactBytes = "artifact"

func artifactDigest() string {
	sum := sha256.Sum256([]byte(artifactBytes))
	return "sha256:" + hex.EncodeToString(sum[:])
}

func artifactParts() []protocol.ArtifactPart {
	return []protocol.ArtifactPart{{Number: 1, Size: int64(len(artifactBytes)), Digest: artifactDigest()}}
}

// upload opens a session and sends all of its parts.
func (s *stage) upload(name string, ref ci.LeaseRef, as string) string {
	h := s.hold(name, ref)
	got, err := s.api.Artifacts.Begin(s.ctx, h, protocol.NewArtifact{
		RequestID: "up", Name: as, Size: int64(len(artifactBytes)), Digest: artifactDigest(), Files: 1, Bytes: 8,
	}, "digest")
	s.must(err)
	signed, err := s.api.Artifacts.Sign(s.ctx, h, got.ID, artifactParts())
	s.must(err)
	req := httptest.NewRequestWithContext(s.ctx, signed.URLs[0].Method, signed.URLs[0].URL, strings.NewReader(artifactBytes))
	for k, v := range signed.URLs[0].Header {
		req.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	s.api.Blob.(*fs.Store).Handler(nil).ServeHTTP(w, req)
	if w.Code > 299 {
		s.t.Fatalf("upload: %d %s", w.Code, w.Body)
	}
	return got.ID
}

// settle waits until the logs of ended attempts are sealed: until then rows
// change by themselves.
func (s *stage) settle(ended ...ci.LeaseRef) []string {
	for _, ref := range ended {
		s.api.Logs.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	}
	rows := s.dump()
	for strings.Contains(strings.Join(rows, "\n"), "state=ended") && s.ctx.Err() == nil {
		time.Sleep(10 * time.Millisecond)
		rows = s.dump()
	}
	return rows
}

// request is one call that the exact tuple would have had accepted.
type matrixRequest struct {
	method, path string
	body         []byte
	media        string
	lease        *ci.LeaseRef // header; nil = in the body
}

func jsonRequest(method, path string, v any, lease ci.LeaseRef) matrixRequest {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return matrixRequest{method: method, path: path, body: b, media: protocol.MediaJSON, lease: &lease}
}

// matrixRows render the request of each lease route for a tuple. A lease route
// that has no row fails TestEveryLeaseRouteHasARow.
func matrixRows(s *stage) map[string]func(ci.LeaseRef) matrixRequest {
	at := func(route string, values ...string) (string, string) { return protocol.Endpoint(route, values...) }
	return map[string]func(ci.LeaseRef) matrixRequest{
		protocol.RouteHeartbeat: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteHeartbeat)
			r := jsonRequest(m, p, protocol.Heartbeat{Session: s.sessions["a"], Leases: []ci.LeaseRef{l}}, l)
			r.lease = nil
			return r
		},
		protocol.RoutePhase: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RoutePhase)
			return jsonRequest(m, p, protocol.SetPhase{
				RequestID: "x", Phase: ci.PhaseFinalising,
				Steps: []protocol.StepUpdate{{Index: 0, Name: "s", State: ci.StateRunning}},
			}, l)
		},
		protocol.RouteAppendLog: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteAppendLog)
			return matrixRequest{
				method: m, path: p, media: protocol.MediaBytes, lease: &l,
				body: protocol.AppendChunk(nil, protocol.Chunk{Step: 0, Stream: protocol.Stdout, Sequence: 1, Data: []byte("stale\n")}),
			}
		},
		protocol.RouteComplete: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteComplete)
			return jsonRequest(m, p, success("x", nil), l)
		},
		protocol.RouteHandOver: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteHandOver)
			return jsonRequest(m, p, protocol.HandOver{
				RequestID: "x", Reason: ci.ReasonRunnerShutdown,
				Evidence: protocol.Evidence{Terminated: true, How: "cgroup"},
			}, l)
		},
		protocol.RouteFetchSource: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteFetchSource)
			return matrixRequest{method: m, path: p, lease: &l}
		},
		protocol.RouteNewArtifact: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteNewArtifact)
			return jsonRequest(m, p, protocol.NewArtifact{RequestID: "new", Name: "more", Size: int64(len(artifactBytes)), Digest: artifactDigest(), Files: 1, Bytes: 8}, l)
		},
		protocol.RouteSignParts: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteSignParts, s.artifact)
			return jsonRequest(m, p, protocol.SignParts{Parts: artifactParts()}, l)
		},
		protocol.RouteSealArtifact: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteSealArtifact, s.artifact)
			return jsonRequest(m, p, protocol.SealArtifact{Parts: artifactParts()}, l)
		},
		protocol.RouteRestoreArtifact: func(l ci.LeaseRef) matrixRequest {
			m, p := at(protocol.RouteRestoreArtifact, s.restorable)
			return matrixRequest{method: m, path: p, lease: &l}
		},
	}
}

// way is one way in which a tuple can be wrong.
type way struct {
	name   string
	spoil  func(s *stage) (token string, ref ci.LeaseRef)
	status int
	reject ci.Reject
	// taken says that this way does not spoil the route (while cancelling, logs
	// are accepted).
	taken func(Route) bool
}

func never(Route) bool { return false }

// ways are the columns.
func ways() []way {
	tuple := func(change func(s *stage, r *ci.LeaseRef)) func(*stage) (string, ci.LeaseRef) {
		return func(s *stage) (string, ci.LeaseRef) {
			r := s.lease
			change(s, &r)
			return s.tokens["a"], r
		}
	}
	return []way{
		{"wrong run", tuple(func(s *stage, r *ci.LeaseRef) { r.Run = s.foreign.Run }), 409, ci.RejectRun, never},
		{"wrong job", tuple(func(s *stage, r *ci.LeaseRef) { r.Job = s.sibling.Job }), 409, ci.RejectJob, never},
		{"job of another tenant", tuple(func(s *stage, r *ci.LeaseRef) { r.Job = s.foreign.Job }), 404, "", never},
		{"wrong runner", tuple(func(s *stage, r *ci.LeaseRef) { r.Runner = s.ids["b"].Runner }), 409, ci.RejectRunner, never},
		{"another runner's credential", func(s *stage) (string, ci.LeaseRef) { return s.tokens["b"], s.lease }, 409, ci.RejectRunner, never},
		{"another runner's credential and name", func(s *stage) (string, ci.LeaseRef) {
			r := s.lease
			r.Runner = s.ids["b"].Runner
			return s.tokens["b"], r
		}, 409, ci.RejectRunner, never},
		{"another runner's credential, name and session", func(s *stage) (string, ci.LeaseRef) {
			r := s.lease
			r.Runner, r.Session = s.ids["b"].Runner, s.sessions["b"]
			return s.tokens["b"], r
		}, 409, ci.RejectRunner, never},
		{"another tenant's runner", func(s *stage) (string, ci.LeaseRef) { return s.tokens["c"], s.lease }, 404, "", never},
		{"wrong session", tuple(func(s *stage, r *ci.LeaseRef) { r.Session = s.sessions["b"] }), 409, ci.RejectSession, never},
		{"wrong lease", tuple(func(_ *stage, r *ci.LeaseRef) { r.Lease = "lse_1_00000000000000000000000000" }), 409, ci.RejectLease, never},
		{"lease of a sibling", tuple(func(s *stage, r *ci.LeaseRef) { r.Lease = s.sibling.Lease }), 409, ci.RejectJob, never},
		{"wrong epoch", tuple(func(_ *stage, r *ci.LeaseRef) { r.Epoch = 999 }), 409, ci.RejectEpoch, never},
		{"expired", func(s *stage) (string, ci.LeaseRef) {
			s.now.Add(matrixTTL.Microseconds() + 1)
			s.mono.Add(matrixTTL.Microseconds() + 1)
			return s.tokens["a"], s.lease
		}, 409, ci.RejectExpired, never},
		{"cancelling", func(s *stage) (string, ci.LeaseRef) {
			s.must(s.engine.Cancel(s.ctx, s.org, "test", s.lease.Run))
			return s.tokens["a"], s.lease
		}, 409, ci.RejectCancelling, func(r Route) bool { return r.Pattern == protocol.RouteAppendLog || r.Lease == LeaseBatch }},
		{"ended attempt", func(s *stage) (string, ci.LeaseRef) {
			s.end("a", s.lease, nil)
			return s.tokens["a"], s.lease
		}, 409, ci.RejectEnded, never},
		{"ended run", func(s *stage) (string, ci.LeaseRef) {
			s.end("a", s.lease, nil)
			s.end("a", s.sibling, nil)
			return s.tokens["a"], s.lease
		}, 410, ci.RejectRunEnded, never},
		{"after a new epoch", func(s *stage) (string, ci.LeaseRef) {
			s.now.Add(matrixTTL.Microseconds() + 1)
			s.mono.Add(matrixTTL.Microseconds() + 1)
			s.must(s.engine.Sweep(s.ctx, true))
			return s.tokens["a"], s.lease
		}, 410, ci.RejectRunEnded, never},
	}
}

// end completes a job and waits for its log to be sealed.
func (s *stage) end(name string, ref ci.LeaseRef, artifacts map[string]string) {
	_, err := s.engine.Complete(s.ctx, s.hold(name, ref), success("end", artifacts))
	s.must(err)
	s.settle(ref)
}

func success(request string, artifacts map[string]string) protocol.Complete {
	return protocol.Complete{
		RequestID: request, Conclusion: ci.ConclusionSuccess, SourceDigest: matrixDigest,
		Evidence: protocol.Evidence{Terminated: true, How: "cgroup"}, Artifacts: artifacts,
	}
}

func (s *stage) send(token string, r matrixRequest) (int, []byte) {
	req := httptest.NewRequestWithContext(s.ctx, r.method, r.path, bytes.NewReader(r.body))
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if r.media != "" {
		req.Header.Set("Content-Type", r.media)
	}
	if r.lease != nil {
		req.Header.Set(protocol.HeaderLease, r.lease.String())
	}
	w := httptest.NewRecorder()
	s.mux.ServeHTTP(w, req)
	b, _ := io.ReadAll(w.Body)
	return w.Code, b
}

// dump is every row but those that count and record refusals.
func (s *stage) dump() []string {
	s.must(s.engine.FlushRejections(s.ctx))
	rows, err := s.store.Dump(s.ctx, "audit", "rejection", "org.audit_seq", "org.audit_hash",
		"session.present", "session.gone_us") // whether a runner is heard of is no effect on a job
	s.must(err)
	return rows
}

// refusals is what is counted, and how much is audited, of each reason.
func (s *stage) refusals() map[string]int64 {
	s.must(s.engine.FlushRejections(s.ctx))
	n := map[string]int64{}
	s.must(s.store.Read(s.ctx, func(tx *store.Tx) error {
		rs, err := tx.Rejections(s.ctx)
		for _, r := range rs {
			n["counted "+string(r.Reason)] += r.N
		}
		for _, org := range []ci.OrgID{s.org, s.otherOrg} {
			if err != nil {
				break
			}
			var entries []store.Audit
			entries, err = tx.AuditAfter(s.ctx, org, 0, 10_000)
			for _, e := range entries {
				if _, reason, ok := strings.Cut(e.Detail, ": "); ok && e.Action == "rejected" {
					n["audited "+reason]++
				}
			}
		}
		return err
	}))
	return n
}

// rejections is how many refusals are counted.
func (s *stage) rejections() (n int64) {
	for what, m := range s.refusals() {
		if strings.HasPrefix(what, "counted ") {
			n += m
		}
	}
	return n
}

// noted says what is wrong with the record of one refusal, "" when nothing is.
func (s *stage) noted(before map[string]int64, reason ci.Reject) string {
	want := maps.Clone(before)
	want["counted "+string(reason)]++
	want["audited "+string(reason)]++
	if got := s.refusals(); !maps.Equal(got, want) {
		return fmt.Sprintf("%v were counted and audited, want %v", got, want)
	}
	return ""
}

// cell runs one cell and says what is wrong with it, "" when nothing is.
func (s *stage) cell(route Route, w way, token string, ref ci.LeaseRef) string {
	row, ok := matrixRows(s)[route.Pattern]
	if !ok {
		return "no row"
	}
	before, noted := s.dump(), s.refusals()
	status, body := s.send(token, row(ref))
	after := s.dump()
	if !slices.Equal(before, after) {
		return "rows changed:\n" + diff(before, after)
	}
	if route.Lease == LeaseBatch && token != s.tokens["c"] { // to another tenant there is no such session either
		return s.batchCell(w, status, body, noted)
	}
	var p protocol.Problem
	if err := json.Unmarshal(body, &p); err != nil || status != w.status || p.Reject != w.reject {
		return fmt.Sprintf("answered %d %s, want %d %s: %s", status, p.Reject, w.status, w.reject, body)
	}
	return s.noted(noted, cmp.Or(w.reject, ci.RejectNotFound))
}

// batchCell checks the answer that a heartbeat gives to one spoilt lease: the
// same word as elsewhere, for this lease alone.
func (s *stage) batchCell(w way, status int, body []byte, noted map[string]int64) string {
	want := protocol.HeartbeatLease{Answer: protocol.LeaseGone, Reject: cmp.Or(w.reject, ci.RejectNotFound)}
	var reply protocol.HeartbeatReply
	err := json.Unmarshal(body, &reply)
	if err != nil || status != http.StatusOK || len(reply.Leases) != 1 || reply.Leases[0] != want {
		return fmt.Sprintf("answered %d %s, want %+v", status, body, want)
	}
	return s.noted(noted, want.Reject)
}

func diff(a, b []string) string {
	var out strings.Builder
	for _, l := range a {
		if !slices.Contains(b, l) {
			out.WriteString("- " + l + "\n")
		}
	}
	for _, l := range b {
		if !slices.Contains(a, l) {
			out.WriteString("+ " + l + "\n")
		}
	}
	return out.String()
}

func all(a *API) []Route { return a.Routes() }

func leaseRoutes(routes []Route) []Route {
	return slices.DeleteFunc(slices.Clone(routes), func(r Route) bool { return r.Lease == NoLease })
}

func TestEveryLeaseRouteHasARow(t *testing.T) {
	t.Parallel()
	rows := matrixRows(&stage{sessions: map[string]ci.SessionID{}})
	routes := leaseRoutes((&API{}).Routes())
	for _, r := range routes {
		if rows[r.Pattern] == nil {
			t.Errorf("lease route %s has no row in the ownership matrix", r.Pattern)
		}
	}
	if len(rows) != len(routes) {
		t.Errorf("%d rows for %d lease routes", len(rows), len(routes))
	}
}

func TestOwnershipMatrix(t *testing.T) {
	t.Parallel()
	for name, url := range map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/m.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	} {
		for _, w := range ways() {
			t.Run(name+"/"+w.name, func(t *testing.T) {
				t.Parallel()
				// Refused calls change nothing, so one stage serves all routes.
				s := newStage(t, url(t), all)
				token, ref := w.spoil(s)
				for _, route := range leaseRoutes(s.api.Routes()) {
					if w.taken(route) {
						continue
					}
					if bad := s.cell(route, w, token, ref); bad != "" {
						t.Errorf("%s: %s", route.Pattern, bad)
					}
				}
			})
		}
	}
}

// unguarded are the routes without the guard: what the header says is taken for
// a lease that is held, whatever it says.
func unguarded(a *API) []Route {
	routes := a.Routes()
	for i, r := range routes {
		if r.Lease != LeaseActive && r.Lease != LeaseCancelling {
			continue // of a heartbeat each lease is judged in its transaction
		}
		routes[i].Lease = NoLease
		routes[i].handler = func(w http.ResponseWriter, req *http.Request, c caller) error {
			ref, err := ci.ParseLeaseRef(req.Header.Get(protocol.HeaderLease))
			if err != nil {
				return err
			}
			c.held = unjudged(ref, c.runner.Org)
			return r.handler(w, req, c)
		}
	}
	return routes
}

// unjudged makes what only the guard can make.
func unjudged(ref ci.LeaseRef, org ci.OrgID) (h engine.Held) {
	set := func(field string, v any) {
		f := reflect.ValueOf(&h).Elem().FieldByName(field)
		reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().Set(reflect.ValueOf(v))
	}
	set("ref", ref)
	set("org", org)
	return h
}

// Without the guard every cell of a route that only reads turns red. A route with
// an effect is refused all the same, counted and audited, and changes nothing, for
// the fence stands in the statements that commit the effect. What no statement can know is whose
// credential came with the tuple: there every route turns red.
func TestTheMatrixNoticesAMissingGuard(t *testing.T) {
	t.Parallel()
	for _, w := range ways() {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, "sqlite:"+t.TempDir()+"/m.db", unguarded)
			token, ref := w.spoil(s)
			for _, route := range leaseRoutes(s.api.Routes()) {
				// The store itself asks for the lease again before it gives an address.
				reads := strings.HasPrefix(route.Pattern, http.MethodGet) && route.Pattern != protocol.RouteRestoreArtifact
				switch {
				case route.Lease == LeaseBatch || w.taken(route):
				case token == s.tokens["b"] && ref.Runner != s.ids["b"].Runner:
					one := newStage(t, "sqlite:"+t.TempDir()+"/m.db", unguarded)
					token, ref := w.spoil(one)
					if one.cell(route, w, token, ref) == "" {
						t.Errorf("%s: the cell is green without the guard", route.Pattern)
					}
				case reads:
					if s.cell(route, w, token, ref) == "" {
						t.Errorf("%s: the cell is green without the guard", route.Pattern)
					}
				case token != s.tokens["c"]:
					if bad := s.fenced(route, token, ref); bad != "" {
						t.Errorf("%s: %s", route.Pattern, bad)
					}
				}
			}
		})
	}
}

// fenced says how a call that nobody has judged got past the store, "" when it
// was refused as a lease that is not current and no row has changed.
func (s *stage) fenced(route Route, token string, ref ci.LeaseRef) string {
	before, was := s.dump(), s.refusals()
	status, body := s.send(token, matrixRows(s)[route.Pattern](ref))
	if after := s.dump(); !slices.Equal(before, after) {
		return "rows changed:\n" + diff(before, after)
	}
	var p protocol.Problem
	switch err := json.Unmarshal(body, &p); {
	case err == nil && status == http.StatusNotFound:
	case err == nil && status == protocol.Status(ci.Rejected(p.Reject).Kind) && p.Reject != ci.RejectNone:
		return s.noted(was, p.Reject)
	default:
		return fmt.Sprintf("answered %d %s", status, body)
	}
	return ""
}

// A job is completed by its owner alone: with the right runner and epoch under
// another lease ID the result is refused, so is it with the right lease ID under
// another epoch; the same result under the exact tuple makes the job a success.
// The database says so, whether or not the guard was asked before.
func TestOnlyTheExactTupleCompletesAJob(t *testing.T) {
	t.Parallel()
	for name, url := range map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/m.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	} {
		for guard, routes := range map[string]func(*API) []Route{"guarded": all, "unguarded": unguarded} {
			t.Run(name+"/"+guard, func(t *testing.T) {
				t.Parallel()
				s := newStage(t, url(t), routes)
				otherLease, otherEpoch := s.lease, s.lease
				otherLease.Lease = "lse_1_00000000000000000000000000"
				otherEpoch.Epoch = 999
				for _, try := range []struct {
					ref    ci.LeaseRef
					status int
					reject ci.Reject
					state  ci.State
					ended  ci.Conclusion
				}{
					{otherLease, http.StatusConflict, ci.RejectLease, ci.StateRunning, ""},
					{otherEpoch, http.StatusConflict, ci.RejectEpoch, ci.StateRunning, ""},
					{s.lease, http.StatusOK, "", ci.StateFinished, ci.ConclusionSuccess},
				} {
					status, body := s.send(s.tokens["a"], matrixRows(s)[protocol.RouteComplete](try.ref))
					var p protocol.Problem
					if err := json.Unmarshal(body, &p); err != nil || status != try.status || p.Reject != try.reject {
						t.Errorf("%s was answered %d %s, want %d %s", try.ref, status, body, try.status, try.reject)
					}
					var job store.Job
					s.must(s.store.Read(s.ctx, func(tx *store.Tx) (err error) {
						job, _, err = tx.Job(s.ctx, s.lease.Job)
						return err
					}))
					if job.State != try.state || job.Conclusion != try.ended {
						t.Errorf("behind %s the job is %s %s, want %s %s", try.ref, job.State, job.Conclusion, try.state, try.ended)
					}
				}
			})
		}
	}
}

// The exact tuple is accepted, so that the refusals of the matrix mean something;
// with the guard and without it.
func TestTheExactTupleIsAccepted(t *testing.T) {
	t.Parallel()
	for name, routes := range map[string]func(*API) []Route{"guarded": all, "unguarded": unguarded} {
		for _, route := range leaseRoutes((&API{}).Routes()) {
			t.Run(name+"/"+route.Pattern, func(t *testing.T) {
				t.Parallel()
				s := newStage(t, "sqlite:"+t.TempDir()+"/m.db", routes)
				status, body := s.send(s.tokens["a"], matrixRows(s)[route.Pattern](s.lease))
				if status < 200 || status > 299 {
					t.Errorf("answered %d %s", status, body)
				}
			})
		}
	}
}

// A repeat of a committed request after the lease's end gets the same answer and
// is no refusal; the same request ID with another body is one.
func TestARepeatIsNotCountedAsARefusal(t *testing.T) {
	t.Parallel()
	for _, route := range []string{protocol.RouteComplete, protocol.RouteHandOver} {
		t.Run(route, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, "sqlite:"+t.TempDir()+"/m.db", all)
			first := matrixRows(s)[route](s.lease)
			status, answer := s.send(s.tokens["a"], first)
			if status != http.StatusOK {
				t.Fatalf("answered %d %s", status, answer)
			}
			before := s.settle()
			again, same := s.send(s.tokens["a"], first)
			if again != status || !bytes.Equal(same, answer) {
				t.Errorf("the repeat was answered %d %s, the first %d %s", again, same, status, answer)
			}
			if got := diff(before, s.dump()); got != "" {
				t.Errorf("the repeat changed %s", got)
			}
			if n := s.rejections(); n != 0 {
				t.Errorf("the repeat was counted as %d refusals", n)
			}
			other := first
			other.body = bytes.Replace(first.body, []byte(`"cgroup"`), []byte(`"scan"`), 1)
			if status, body := s.send(s.tokens["a"], other); status != http.StatusConflict {
				t.Errorf("another body under the same request ID was answered %d %s", status, body)
			}
			s.dump() // writes what is counted
			if n := s.rejections(); n != 1 {
				t.Errorf("another body under the same request ID was counted as %d refusals", n)
			}
		})
	}
}
