package runner

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/workspace"
	"forgeci/internal/source"
)

// controlPlane is a server as far as runners see it: leases with a TTL in its
// own time, request IDs, logs by chunk, artifacts in parts. It speaks HTTP.
type controlPlane struct {
	t   testing.TB
	ttl time.Duration
	// fault, when set, may take a request: "lost" handles it and drops the reply,
	// "away" drops it before it is handled, a number answers with that status.
	fault func(route string, nth int) string

	mu       sync.Mutex
	calls    map[string]int
	seen     []string // routes in order
	tokens   map[string]bool
	register int
	sessions int
	current  ci.SessionID
	drained  bool
	gone     bool
	hello    []protocol.OpenSession
	queue    []*protocol.Ticket
	byClaim  map[string]*protocol.Ticket
	jobs     map[ci.JobID]*fakeJob
	wake     chan struct{}
	blobs    map[string][]byte
	reported []protocol.AttemptRef
	held     map[string]bool // routes whose requests wait
	release  chan struct{}
	limit    int64
	differs  time.Duration // what sessions are told of the runner's clock
	partSize int64
	askDrain bool
	hidden   *protocol.Ticket // granted by a test, not taken from the queue
	polling  string           // request ID of the latest poll that is held
	hints    chan struct{}    // a cancel that no watch has heard of
}

// fakeJob is one attempt as the server knows it.
type fakeJob struct {
	lease     ci.LeaseRef
	expires   time.Time
	leased    bool
	cancel    bool
	phases    []ci.Phase
	steps     map[int]protocol.StepUpdate
	chunks    map[int64]protocol.Chunk
	at        []time.Time
	complete  *protocol.Complete
	completed int // requests
	doneID    string
	handOver  *protocol.HandOver
	ended     chan struct{}
	uploads   map[string]*fakeUpload
	refusals  int
}

type fakeUpload struct {
	in     protocol.NewArtifact
	parts  map[int][]byte
	sealed bool
	puts   int
}

func newControlPlane(t testing.TB, ttl time.Duration) *controlPlane {
	return &controlPlane{
		t: t, ttl: ttl, calls: map[string]int{}, tokens: map[string]bool{}, byClaim: map[string]*protocol.Ticket{},
		jobs: map[ci.JobID]*fakeJob{}, wake: make(chan struct{}), blobs: map[string][]byte{},
		held: map[string]bool{}, release: make(chan struct{}), partSize: 5 << 20, hints: make(chan struct{}, 1),
	}
}

const registrationToken = "fcr_registration"

// add queues a job over the given source files.
func (s *controlPlane) add(job ci.JobSpec, files map[string]string, change ...func(*protocol.Ticket)) *fakeJob {
	s.t.Helper()
	dir := s.t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
			s.t.Fatal(err)
		}
	}
	blob, digest := snapshot(s.t, dir)
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.jobs) + 1
	s.blobs[digestOf(blob)] = blob
	job.Name = cmp.Or(job.Name, fmt.Sprintf("job%d", n))
	job.Key = cmp.Or(job.Key, job.Name)
	for i := range job.Steps {
		job.Steps[i].Name = cmp.Or(job.Steps[i].Name, fmt.Sprintf("step %d", i+1))
	}
	ticket := &protocol.Ticket{
		Lease:    ci.LeaseRef{Run: ci.RunID(fmt.Sprintf("run_%d", n)), Job: ci.JobID(fmt.Sprintf("job_%d", n)), Lease: ci.LeaseID(fmt.Sprintf("lse_%d", n)), Epoch: 1},
		LeaseTTL: ci.Duration(s.ttl), Job: job,
		Run:         protocol.RunInfo{Number: int64(n), Repo: "local/hello", Workflow: "ci", Path: ".forgeci.yaml", Event: "manual", Trust: ci.TrustTrusted},
		Source:      protocol.Source{Digest: digest, Blob: digestOf(blob), Size: int64(len(blob))},
		OperationID: fmt.Sprintf("op%d", n), Grace: ci.Duration(time.Second),
	}
	for _, c := range change {
		c(ticket)
	}
	j := &fakeJob{
		lease: ticket.Lease, steps: map[int]protocol.StepUpdate{}, chunks: map[int64]protocol.Chunk{},
		ended: make(chan struct{}), uploads: map[string]*fakeUpload{},
	}
	s.jobs[ticket.Lease.Job] = j
	s.queue = append(s.queue, ticket)
	close(s.wake)
	s.wake = make(chan struct{})
	return j
}

func snapshot(t testing.TB, dir string) ([]byte, string) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	found, err := archive.Walk(t.Context(), root, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	files := slices.DeleteFunc(found.Entries, func(e archive.Entry) bool { return e.Type == archive.Dir })
	var b bytes.Buffer
	if _, err := archive.Pack(t.Context(), &b, root, files, archive.SourceLimits(), 1); err != nil {
		t.Fatal(err)
	}
	digest, err := source.Verify(t.Context(), bytes.NewReader(b.Bytes()), archive.SourceLimits(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), digest
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// handler routes and injects faults.
func (s *controlPlane) handler() http.Handler {
	mux := http.NewServeMux()
	for route, h := range map[string]func(http.ResponseWriter, *http.Request) (any, error){
		protocol.RouteRegister: s.doRegister, protocol.RouteOpenSession: s.doSession, protocol.RouteClaim: s.doClaim,
		protocol.RouteOccupancy: s.doOccupancy, protocol.RouteDrain: s.doDrain, protocol.RouteHeartbeat: s.doHeartbeat, protocol.RouteWatch: s.doWatch,
		protocol.RoutePhase: s.leased(s.doPhase), protocol.RouteAppendLog: s.leased(s.doLog),
		protocol.RouteComplete: s.doComplete, protocol.RouteHandOver: s.leased(s.doHandOver),
		protocol.RouteFetchSource: s.leased(s.doSource), protocol.RouteNewArtifact: s.leased(s.doNewArtifact),
		protocol.RouteSignParts: s.leased(s.doSign), protocol.RouteSealArtifact: s.leased(s.doSeal),
		protocol.RouteRestoreArtifact: s.leased(s.doRestore),
		"PUT /put/{job}/{id}/{n}":     s.doPut, "GET /blob/{digest}": s.doBlob,
	} {
		mux.HandleFunc(route, func(w http.ResponseWriter, r *http.Request) {
			s.mu.Lock()
			s.calls[route]++
			s.seen = append(s.seen, route)
			fault := ""
			if s.fault != nil {
				fault = s.fault(route, s.calls[route])
			}
			wait, release := s.held[route], s.release
			known := s.tokens[strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")]
			s.mu.Unlock()
			if wait {
				select {
				case <-release:
				case <-r.Context().Done():
				}
			}
			if fault == "away" {
				panic(http.ErrAbortHandler)
			}
			var out any
			var err error
			switch {
			case fault != "" && fault != "lost":
				var status int
				_, _ = fmt.Sscan(fault, &status)
				http.Error(w, "injected", status)
				return
			case route != protocol.RouteRegister && !strings.Contains(route, "/put/") && !strings.Contains(route, "/blob/") && !known:
				err = ci.Errorf(ci.ErrUnauthorized, "bad credential")
			default:
				out, err = h(w, r)
			}
			if fault == "lost" {
				panic(http.ErrAbortHandler)
			}
			switch v := out.(type) {
			case nil:
				if err != nil {
					protocol.WriteProblem(w, err, "")
				} else {
					w.WriteHeader(http.StatusNoContent)
				}
			case []byte:
				_, _ = w.Write(v)
			default:
				w.Header().Set("Content-Type", protocol.MediaJSON)
				_ = json.NewEncoder(w).Encode(out)
			}
		})
	}
	return mux
}

func decode[T any](r *http.Request) (v T, err error) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return v, err
	}
	return v, json.Unmarshal(b, &v)
}

func (s *controlPlane) doRegister(_ http.ResponseWriter, r *http.Request) (any, error) {
	if r.Header.Get("Authorization") != "Bearer "+registrationToken {
		return nil, ci.Errorf(ci.ErrUnauthorized, "bad registration token")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.register++
	clear(s.tokens)
	token := fmt.Sprintf("fcn_%d", s.register)
	s.tokens[token] = true
	return protocol.Registered{Runner: "rnr_1", Credential: token}, nil
}

func (s *controlPlane) doSession(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.OpenSession](r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hello = append(s.hello, in)
	s.sessions++
	s.drained, s.askDrain = false, false // a new session takes jobs again
	s.current = ci.SessionID(fmt.Sprintf("ses_%d", s.sessions))
	return protocol.SessionOpened{Session: s.current, LeaseTTL: ci.Duration(s.ttl), LogLimit: s.limit, ClockDiffers: ci.Duration(s.differs)}, nil
}

func (s *controlPlane) doClaim(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.Claim](r)
	if err != nil {
		return nil, err
	}
	timeout := time.NewTimer(in.Wait.Std())
	defer timeout.Stop()
	for {
		s.mu.Lock()
		if in.Session != s.current {
			s.mu.Unlock()
			return nil, ci.Rejected(ci.RejectSession)
		}
		if t := s.byClaim[in.RequestID]; t != nil {
			j := s.jobs[t.Lease.Job]
			ok := j.leased && time.Now().Before(j.expires)
			s.mu.Unlock()
			if !ok {
				return nil, ci.Rejected(ci.RejectExpired)
			}
			return t, nil
		}
		if s.askDrain {
			s.mu.Unlock()
			return nil, nil
		}
		if len(s.queue) > 0 && !s.drained {
			t := s.queue[0]
			s.queue = s.queue[1:]
			s.lend(t, in.RequestID)
			s.mu.Unlock()
			return t, nil
		}
		s.polling = in.RequestID
		wake := s.wake
		s.mu.Unlock()
		select {
		case <-wake:
		case <-timeout.C:
			return nil, nil
		case <-r.Context().Done():
			return nil, nil
		}
	}
}

func (s *controlPlane) lend(t *protocol.Ticket, request string) {
	t.Lease.Runner, t.Lease.Session = "rnr_1", s.current
	j := s.jobs[t.Lease.Job]
	j.lease, j.leased, j.expires = t.Lease, true, time.Now().Add(s.ttl)
	j.phases = append(j.phases, ci.PhaseClaimed)
	s.byClaim[request] = t
}

// addHidden makes a job that no poll brings until the test lends it.
func (s *controlPlane) addHidden(spec ci.JobSpec) *fakeJob {
	drained := s.drained
	s.mu.Lock()
	s.drained = true
	s.mu.Unlock()
	j := s.add(spec, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hidden, s.queue, s.drained = s.queue[0], nil, drained
	return j
}

func (s *controlPlane) doOccupancy(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.Occupancy](r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reported = append(s.reported, in.Terminated...)
	return nil, err
}

func (s *controlPlane) doDrain(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.Drain](r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drained, s.gone = true, s.gone || in.Gone
	return nil, err
}

func (s *controlPlane) doHeartbeat(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.Heartbeat](r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := protocol.HeartbeatReply{Drain: s.askDrain || s.drained && in.Session == s.current}
	for _, l := range in.Leases {
		a := protocol.HeartbeatLease{Answer: protocol.LeaseRenewed}
		err := s.check(l)
		if l.Session != in.Session {
			err = ci.Rejected(ci.RejectSession)
		}
		if err != nil {
			a = protocol.HeartbeatLease{Answer: protocol.LeaseGone, Reject: ci.RejectOf(err)}
		} else {
			s.jobs[l.Job].expires = time.Now().Add(s.ttl)
			if s.jobs[l.Job].cancel {
				a.Answer = protocol.LeaseCancel
			}
		}
		out.Leases = append(out.Leases, a)
	}
	return out, nil
}

// doWatch waits for a hint, which one watch hears.
func (s *controlPlane) doWatch(_ http.ResponseWriter, r *http.Request) (any, error) {
	in, err := decode[protocol.Watch](r)
	if err != nil {
		return nil, err
	}
	timeout := time.NewTimer(in.Wait.Std())
	defer timeout.Stop()
	select {
	case <-s.hints:
		return protocol.Watched{Renew: true}, nil
	case <-timeout.C:
		return nil, nil
	case <-r.Context().Done():
		return nil, nil
	}
}

// cancel cancels a job and hints at it.
func (s *controlPlane) cancel(j *fakeJob) {
	s.mu.Lock()
	j.cancel = true
	s.mu.Unlock()
	select {
	case s.hints <- struct{}{}:
	default:
	}
}

// check is the guard.
func (s *controlPlane) check(l ci.LeaseRef) error {
	j := s.jobs[l.Job]
	switch {
	case j == nil:
		return ci.Errorf(ci.ErrNotFound, "no such job")
	case !j.leased || l != j.lease:
		return ci.Rejected(ci.RejectEnded)
	case !time.Now().Before(j.expires):
		return ci.Rejected(ci.RejectExpired)
	}
	return nil
}

func (s *controlPlane) leased(h func(http.ResponseWriter, *http.Request, *fakeJob) (any, error)) func(http.ResponseWriter, *http.Request) (any, error) {
	return func(w http.ResponseWriter, r *http.Request) (any, error) {
		l, err := ci.ParseLeaseRef(r.Header.Get(protocol.HeaderLease))
		if err != nil {
			return nil, err
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.check(l); err != nil {
			if j := s.jobs[l.Job]; j != nil {
				j.refusals++
			}
			return nil, err
		}
		j := s.jobs[l.Job]
		if j.cancel && !strings.HasSuffix(r.URL.Path, "/logs") && !strings.HasSuffix(r.URL.Path, "/complete") {
			return nil, ci.Rejected(ci.RejectCancelling)
		}
		return h(w, r, j)
	}
}

func (s *controlPlane) doPhase(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	in, err := decode[protocol.SetPhase](r)
	if err != nil {
		return nil, err
	}
	if in.Phase != "" {
		j.phases = append(j.phases, in.Phase)
	}
	for _, up := range in.Steps {
		j.steps[up.Index] = up
	}
	return nil, nil
}

func (s *controlPlane) doLog(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	chunks, err := protocol.DecodeChunks(body)
	if err != nil {
		return nil, err
	}
	var out protocol.LogReply
	named := map[string]bool{}
	for _, c := range chunks {
		c.Data = bytes.Clone(c.Data)
		if old, ok := j.chunks[c.Sequence]; ok && (!bytes.Equal(old.Data, c.Data) || old.Offset != c.Offset) {
			return nil, ci.Errorf(ci.ErrConflict, "chunk %d differs", c.Sequence)
		}
		j.chunks[c.Sequence] = c
		j.at = append(j.at, time.Now())
		key := fmt.Sprint(c.Step, c.Stream)
		if !named[key] {
			named[key] = true
			out.Streams = append(out.Streams, protocol.StreamEnd{Step: c.Step, Stream: c.Stream})
		}
	}
	for i := range out.Streams {
		out.Streams[i].Length = j.contiguous(out.Streams[i].Step, out.Streams[i].Stream)
	}
	return out, nil
}

func (j *fakeJob) stream(step int, stream protocol.Stream) []protocol.Chunk {
	var all []protocol.Chunk
	for _, c := range j.chunks {
		if c.Step == step && c.Stream == stream {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b protocol.Chunk) int { return cmp.Compare(a.Offset, b.Offset) })
	return all
}

func (j *fakeJob) contiguous(step int, stream protocol.Stream) int64 {
	var end int64
	for _, c := range j.stream(step, stream) {
		if c.Offset != end {
			break
		}
		end += c.Len()
	}
	return end
}

// text returns the bytes of one stream; discarded pieces stand as [n].
func (j *fakeJob) text(step int, stream protocol.Stream) string {
	var b strings.Builder
	for _, c := range j.stream(step, stream) {
		b.Write(c.Data)
		if c.Discarded > 0 {
			fmt.Fprintf(&b, "[%d]", c.Discarded)
		}
	}
	return b.String()
}

func (s *controlPlane) doComplete(w http.ResponseWriter, r *http.Request) (any, error) {
	l, err := ci.ParseLeaseRef(r.Header.Get(protocol.HeaderLease))
	if err != nil {
		return nil, err
	}
	in, err := decode[protocol.Complete](r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.jobs[l.Job]
	j.completed++
	if j.doneID == in.RequestID {
		return protocol.Completed{State: ci.StateFinished, Conclusion: in.Conclusion}, nil
	}
	if err := s.check(l); err != nil {
		j.refusals++
		return nil, err
	}
	if j.cancel && in.Conclusion != ci.ConclusionCancelled {
		return nil, ci.Rejected(ci.RejectCancelling)
	}
	if !in.Evidence.Terminated {
		return nil, ci.Errorf(ci.ErrInvalid, "no evidence of termination")
	}
	j.complete, j.doneID, j.leased = &in, in.RequestID, false
	for _, up := range in.Steps {
		j.steps[up.Index] = up
	}
	close(j.ended)
	return protocol.Completed{State: ci.StateFinished, Conclusion: in.Conclusion}, nil
}

func (s *controlPlane) doHandOver(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	in, err := decode[protocol.HandOver](r)
	if err != nil {
		return nil, err
	}
	j.handOver, j.leased = &in, false
	close(j.ended)
	return nil, nil
}

func (s *controlPlane) doSource(w http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	for _, t := range s.byClaim {
		if t.Lease == j.lease {
			return s.blobs[t.Source.Blob], nil
		}
	}
	return nil, ci.Errorf(ci.ErrNotFound, "no source")
}

func (s *controlPlane) doNewArtifact(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	in, err := decode[protocol.NewArtifact](r)
	if err != nil {
		return nil, err
	}
	id := "art_" + strings.TrimPrefix(in.RequestID, "req_")
	u := j.uploads[id]
	if u == nil {
		u = &fakeUpload{in: in, parts: map[int][]byte{}}
		j.uploads[id] = u
	}
	out := protocol.ArtifactSession{ID: id, PartSize: s.partSize, Sealed: u.sealed}
	for n, b := range u.parts {
		out.Stored = append(out.Stored, protocol.ArtifactPart{Number: n, Size: int64(len(b)), Digest: digestOf(b)})
	}
	return out, nil
}

func (s *controlPlane) doSign(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	in, err := decode[protocol.SignParts](r)
	if err != nil {
		return nil, err
	}
	var out protocol.SignedParts
	for _, p := range in.Parts {
		out.URLs = append(out.URLs, protocol.SignedURL{
			Method: http.MethodPut, URL: fmt.Sprintf("put/%s/%s/%d", j.lease.Job, r.PathValue("artifact_id"), p.Number),
		})
	}
	return out, nil
}

func (s *controlPlane) doPut(w http.ResponseWriter, r *http.Request) (any, error) {
	if r.Header.Get("Authorization") != "" || r.Header.Get(protocol.HeaderLease) != "" {
		s.t.Error("a signed request carries a credential")
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.jobs[ci.JobID(r.PathValue("job"))].uploads[r.PathValue("id")]
	var n int
	_, _ = fmt.Sscan(r.PathValue("n"), &n)
	u.parts[n] = b
	u.puts++
	w.Header().Set("ETag", fmt.Sprintf(`"%d"`, n))
	return nil, nil
}

func (s *controlPlane) doSeal(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	in, err := decode[protocol.SealArtifact](r)
	if err != nil {
		return nil, err
	}
	u := j.uploads[r.PathValue("artifact_id")]
	var all []byte
	for i, p := range in.Parts {
		if p.Number != i+1 || digestOf(u.parts[p.Number]) != p.Digest {
			return nil, ci.Errorf(ci.ErrDigest, "part %d", p.Number)
		}
		all = append(all, u.parts[p.Number]...)
	}
	if digestOf(all) != u.in.Digest || int64(len(all)) != u.in.Size {
		return nil, ci.Errorf(ci.ErrDigest, "whole")
	}
	u.sealed = true
	s.blobs[u.in.Digest] = all
	return nil, nil
}

func (s *controlPlane) doRestore(_ http.ResponseWriter, r *http.Request, j *fakeJob) (any, error) {
	digest := r.PathValue("artifact_id")
	if s.blobs[digest] == nil {
		return nil, ci.Errorf(ci.ErrGone, "expired")
	}
	return protocol.SignedURL{Method: http.MethodGet, URL: "blob/" + digest}, nil
}

func (s *controlPlane) doBlob(_ http.ResponseWriter, r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blobs[r.PathValue("digest")], nil
}

func (s *controlPlane) count(route string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[route]
}

// scripted is an executor whose steps are written in Go. A step's script names
// the function; "echo …" needs none.
type scripted struct {
	steps map[string]func(context.Context, executor.Step) executor.Result
	class ci.Isolation
	sweep []protocol.AttemptRef

	mu     sync.Mutex
	opened int
	closed int
	ran    []string
	stuck  int // how many times Close fails to end everything
}

func (e *scripted) Class() ci.Isolation         { return cmp.Or(e.class, ci.IsolationProcess) }
func (e *scripted) Check(context.Context) error { return nil }
func (e *scripted) Close()                      {}
func (e *scripted) Sweep(context.Context) ([]protocol.AttemptRef, error) {
	return e.sweep, nil
}

func (e *scripted) Open(_ context.Context, job executor.Job) (executor.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opened++
	return &scriptedBox{e: e, job: job}, nil
}

func (e *scripted) open() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.opened - e.closed
}

func (e *scripted) scripts() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.ran)
}

type scriptedBox struct {
	e   *scripted
	job executor.Job
}

func (b *scriptedBox) Run(ctx context.Context, step executor.Step) (executor.Result, error) {
	b.e.mu.Lock()
	b.e.ran = append(b.e.ran, step.Script)
	b.e.mu.Unlock()
	start := time.Now()
	var out executor.Result
	if text, ok := strings.CutPrefix(step.Script, "echo "); ok {
		fmt.Fprintln(step.Stdout, text)
	} else if f := b.e.steps[step.Script]; f != nil {
		out = f(ctx, step)
	} else {
		return out, ci.Errorf(ci.ErrInternal, "no script %q", step.Script)
	}
	out.Duration = time.Since(start)
	return out, nil
}

func (b *scriptedBox) Close(context.Context) (protocol.Evidence, error) {
	b.e.mu.Lock()
	defer b.e.mu.Unlock()
	if b.e.stuck > 0 {
		b.e.stuck--
		return protocol.Evidence{How: "scan"}, nil
	}
	b.e.closed++
	return protocol.Evidence{Terminated: true, How: "scan"}, nil
}

// hang is a step that ends only when it is killed, after the grace.
func hang(started chan<- struct{}) func(context.Context, executor.Step) executor.Result {
	return func(ctx context.Context, _ executor.Step) executor.Result {
		if started != nil {
			close(started)
		}
		<-ctx.Done()
		time.Sleep(executor.Grace(ctx, time.Second))
		return executor.Result{ExitCode: 137, Signal: "SIGKILL"}
	}
}

// exit is a step that ends with a code.
func exit(code int) func(context.Context, executor.Step) executor.Result {
	return func(context.Context, executor.Step) executor.Result { return executor.Result{ExitCode: code} }
}

// rig is a runner in front of a fake control plane.
type rig struct {
	t      testing.TB
	server *controlPlane
	exec   *scripted
	config Config
	runner *Runner
	ended  chan error
	// untold is how many attempts' ends the server could not be told.
	untold int
}

func testLog(t testing.TB) *slog.Logger {
	level := slog.LevelDebug
	if _, ok := t.(*testing.B); ok {
		level = slog.LevelError
	}
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: level}))
}

// listen serves over real loopback connections.
func listen(t testing.TB, s *controlPlane) *protocol.Client {
	t.Helper()
	server := httptest.NewUnstartedServer(s.handler())
	server.Config.ErrorLog = slog.NewLogLogger(testLog(t).Handler(), slog.LevelDebug)
	server.Start()
	t.Cleanup(server.Close)
	transport := protocol.NewTransport()
	t.Cleanup(transport.CloseIdleConnections)
	return client(t, server.URL, transport)
}

func client(t testing.TB, url string, transport *http.Transport) *protocol.Client {
	t.Helper()
	c, err := protocol.NewClient(protocol.ClientConfig{BaseURL: url, HTTP: &http.Client{Transport: transport}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// pipes is a listener of in-memory connections, for virtual time.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	mu     sync.Mutex
	down   bool // refuses connections
	open   []net.Conn
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { close(p.closed); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return nil, errors.New("connection refused")
	}
	a, b := net.Pipe()
	select {
	case p.conns <- b:
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.open = append(p.open, a)
	return a, nil
}

// cut drops every connection and, while down, refuses new ones.
func (p *pipes) cut(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	for _, c := range p.open {
		_ = c.Close()
	}
	p.open = nil
}

func newRig(t testing.TB, s *controlPlane, c *protocol.Client, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, server: s, exec: &scripted{steps: map[string]func(context.Context, executor.Step) executor.Result{}}}
	dir := t.TempDir()
	root, err := workspace.Open(filepath.Join(dir, "jobs"), testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	r.config = Config{
		Client: c, RegistrationToken: registrationToken, DataDir: filepath.Join(dir, "data"), Name: "runner-1", Slots: 2,
		Executors: []executor.Executor{r.exec}, Workspaces: root, MinFree: 1, Log: testLog(t),
	}
	for _, f := range change {
		f(&r.config)
	}
	return r
}

func (r *rig) start() *rig {
	r.t.Helper()
	var err error
	if r.runner, err = New(r.config); err != nil {
		r.t.Fatal(err)
	}
	r.ended = make(chan error, 1)
	go func() { r.ended <- r.runner.Run(context.Background()) }()
	return r
}

// drain ends the runner and checks that it left nothing.
func (r *rig) drain() {
	r.t.Helper()
	r.runner.Drain()
	r.wait()
}

func (r *rig) wait() {
	r.t.Helper()
	r.wait2(2 * time.Minute)
}

func (r *rig) wait2(most time.Duration) {
	r.t.Helper()
	select {
	case err := <-r.ended:
		if err != nil {
			r.t.Errorf("runner ended with %v", err)
		}
	case <-time.After(most):
		r.t.Fatal("the runner does not end")
	}
	if left, err := os.ReadDir(filepath.Join(r.config.Workspaces.Path(), "jobs")); err != nil || len(left) > 0 {
		r.t.Errorf("%d jobs left (%v)", len(left), err)
	}
	if left := r.config.Workspaces.Attempts(); len(left) != r.untold {
		r.t.Errorf("%d attempts left, not %d", len(left), r.untold)
	}
	if n := r.exec.open(); n != 0 {
		r.t.Errorf("%d sandboxes left", n)
	}
	left, err := filepath.Glob(filepath.Join(r.config.DataDir, "*"))
	if err != nil {
		r.t.Error(err)
	}
	for _, f := range left {
		if filepath.Base(f) == "sources" {
			r.whole(f)
			continue
		}
		if base := filepath.Base(f); base != keyFile && base != credentialFile {
			r.t.Errorf("%s is left in the data directory", base)
		}
	}
}

// whole checks that all that is kept of sources is whole.
func (r *rig) whole(dir string) {
	r.t.Helper()
	kept, err := os.ReadDir(dir)
	if err != nil {
		r.t.Error(err)
	}
	for _, e := range kept {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil || strings.ReplaceAll(digestOf(b), ":", "-") != e.Name() {
			r.t.Errorf("kept source %s is not what its name says (%v)", e.Name(), err)
		}
	}
}

func (r *rig) finish(j *fakeJob) {
	r.t.Helper()
	select {
	case <-j.ended:
	case <-time.After(5 * time.Minute):
		r.t.Fatalf("job %s does not end", j.lease.Job)
	}
}

func job(scripts ...string) ci.JobSpec {
	var spec ci.JobSpec
	for _, s := range scripts {
		spec.Steps = append(spec.Steps, ci.StepSpec{Run: s})
	}
	return spec
}

// inBubble runs a test in virtual time, with the runner's HTTP over pipes.
func inBubble(t *testing.T, ttl time.Duration, test func(t *testing.T, s *controlPlane, p *pipes, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, p := newControlPlane(t, ttl), newPipes()
		server := &http.Server{Handler: s.handler(), ErrorLog: slog.NewLogLogger(testLog(t).Handler(), slog.LevelDebug)}
		served := make(chan struct{})
		go func() { defer close(served); _ = server.Serve(p) }()
		transport := protocol.NewTransport()
		transport.Proxy, transport.DialContext = nil, p.dial
		r := newRig(t, s, client(t, "http://server", transport))
		defer func() {
			if r.runner != nil {
				r.runner.Stop() // for a test that has failed
			}
			transport.CloseIdleConnections()
			p.cut(true)
			_ = server.Close()
			<-served
		}()
		test(t, s, p, r)
	})
}
