package protocol_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

const testToken = "fca_secret"

var testLease = ci.LeaseRef{ //nolint:gochecknoglobals // a constant that Go cannot write as one
	Run: "run_1", Job: "job_1", Runner: "rnr_1", Session: "ses_1", Lease: "lse_1", Epoch: 3,
}

func newClient(t *testing.T, url string, change ...func(*protocol.ClientConfig)) *protocol.Client {
	t.Helper()
	cfg := protocol.ClientConfig{BaseURL: url, Token: testToken, Version: "1.2.3"}
	for _, f := range change {
		f(&cfg)
	}
	c, err := protocol.NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func answer(t *testing.T, w http.ResponseWriter, v any) {
	t.Helper()
	w.Header().Set("Content-Type", protocol.MediaJSON)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		t.Error(err)
	}
}

// Every kind, reject reason, field and pause survives the wire.
func TestProblem_survives_the_wire(t *testing.T) {
	t.Parallel()
	kinds := []ci.Kind{
		ci.ErrInvalid, ci.ErrUnauthorized, ci.ErrForbidden, ci.ErrNotFound, ci.ErrConflict, ci.ErrLeaseLost,
		ci.ErrRunEnded, ci.ErrGone, ci.ErrTooLarge, ci.ErrRateLimited, ci.ErrUnavailable, ci.ErrDigest,
		ci.ErrUnsafe, ci.ErrIncompatible, ci.ErrMethod,
	}
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			sent := &ci.Error{
				Kind: kind, Reject: ci.RejectEpoch, Detail: "what and what to do", RetryAfter: 1500 * time.Millisecond,
				Fields: []ci.FieldError{{File: "a.yaml", Line: 3, Column: 7, Detail: "no"}, {Pointer: "/x", Detail: "bad"}},
			}
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				protocol.WriteProblem(w, fmt.Errorf("complete: %w", sent.WithCause(errors.New("secret cause"))), "req_7")
			})
			err := newClient(t, s.URL).SetPhase(t.Context(), testLease, protocol.SetPhase{})
			var got *ci.Error
			if !errors.As(err, &got) || !errors.Is(err, kind) {
				t.Fatalf("got %v, want a *ci.Error of kind %s", err, kind)
			}
			if got.Detail != sent.Detail || got.Reject != sent.Reject || len(got.Fields) != 2 ||
				got.Fields[0] != sent.Fields[0] || got.Fields[1] != sent.Fields[1] {
				t.Errorf("got %+v, want %+v", got, sent)
			}
			if got.RetryAfter != 2*time.Second {
				t.Errorf("RetryAfter %s: want 1.5 s rounded up to 2 s", got.RetryAfter)
			}
			if strings.Contains(err.Error(), "secret cause") {
				t.Errorf("the cause crossed the wire: %v", err)
			}
		})
	}
}

// What is not typed, and what is internal, shows the request's ID and nothing else.
func TestProblem_keeps_causes_to_itself(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		errors.New("dial db at 10.0.0.1: password wrong"),
		ci.Errorf(ci.ErrInternal, "password wrong"),
		ci.Errorf(ci.Kind("novel"), "password wrong"),
	} {
		p := protocol.ProblemFrom(err, "req_9")
		if p.Status != 500 || p.Instance != "req_9" || strings.Contains(fmt.Sprint(p), "password") {
			t.Errorf("%v: got %+v", err, p)
		}
		w := httptest.NewRecorder()
		protocol.WriteProblem(w, err, "req_9")
		if w.Code != 500 || w.Header().Get("Content-Type") != protocol.MediaProblem ||
			strings.Contains(w.Body.String(), "password") {
			t.Errorf("%v: wrote %d %s", err, w.Code, w.Body)
		}
	}
}

// Answers that are not our server's are classified by their status alone.
func TestClient_foreign_answers(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]ci.Kind{
		400: ci.ErrInvalid, 401: ci.ErrUnauthorized, 403: ci.ErrForbidden, 404: ci.ErrNotFound, 405: ci.ErrNotFound,
		408: ci.ErrUnavailable, 409: ci.ErrConflict, 410: ci.ErrGone, 412: ci.ErrConflict, 413: ci.ErrTooLarge,
		418: ci.ErrInvalid, 429: ci.ErrRateLimited, 500: ci.ErrUnavailable, 502: ci.ErrUnavailable,
		503: ci.ErrUnavailable, 504: ci.ErrUnavailable,
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "7")
				w.WriteHeader(status)
				fmt.Fprint(w, "<html>proxy says no</html>")
			})
			err := newClient(t, s.URL).SetPhase(t.Context(), testLease, protocol.SetPhase{})
			var e *ci.Error
			if !errors.As(err, &e) || e.Kind != want || e.RetryAfter != 7*time.Second {
				t.Errorf("got %#v, want kind %s", err, want)
			}
		})
	}
	t.Run("a page with 200", func(t *testing.T) {
		t.Parallel()
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>log in</html>") })
		if _, err := newClient(t, s.URL).Run(t.Context(), "run_1"); !errors.Is(err, ci.ErrIncompatible) {
			t.Errorf("got %v, want incompatible", err)
		}
	})
	t.Run("a document without end", func(t *testing.T) {
		t.Parallel()
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"id":"`)
			block := strings.Repeat("a", 1<<20)
			for range 40 {
				if _, err := io.WriteString(w, block); err != nil {
					return
				}
			}
		})
		if _, err := newClient(t, s.URL).Run(t.Context(), "run_1"); !errors.Is(err, ci.ErrTooLarge) {
			t.Errorf("got %v, want too_large", err)
		}
	})
}

// No server: unavailable, the cancelled context stays visible, and no address's
// query or credential gets into the text.
func TestClient_no_server(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	c := newClient(t, "http://"+addr)
	_, err = c.Heartbeat(t.Context(), protocol.Heartbeat{})
	if !errors.Is(err, ci.ErrUnavailable) || !strings.Contains(err.Error(), addr) {
		t.Errorf("refused connection: got %v", err)
	}
	hang := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil { // only then is the context watched
			t.Error(err)
		}
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	_, err = newClient(t, hang.URL).Run(ctx, "run_1")
	if !errors.Is(err, ci.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: got %v", err)
	}
	short := newClient(t, hang.URL, func(c *protocol.ClientConfig) { c.CallTimeout = 30 * time.Millisecond })
	_, err = short.Heartbeat(t.Context(), protocol.Heartbeat{})
	if !errors.Is(err, ci.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("timed out: got %v", err)
	}
	_, err = c.Download(t.Context(), protocol.SignedURL{Method: "GET", URL: "http://" + addr + "/x?X-Amz-Signature=topsecret"})
	if !errors.Is(err, ci.ErrUnavailable) || strings.Contains(err.Error(), "topsecret") {
		t.Errorf("signed address: got %v", err)
	}
}

// A read is repeated once when no server answered; a call of a runner is not,
// because its loop decides that.
func TestClient_repeats_reads_once(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1)%2 == 1 {
			protocol.WriteProblem(w, ci.Errorf(ci.ErrUnavailable, "restarting"), "")
			return
		}
		answer(t, w, protocol.Run{RunSummary: protocol.RunSummary{ID: "run_1"}})
	})
	c := newClient(t, s.URL)
	if run, err := c.Run(t.Context(), "run_1"); err != nil || run.ID != "run_1" || calls.Load() != 2 {
		t.Errorf("read: got %v, %v after %d calls", run.ID, err, calls.Load())
	}
	if _, err := c.Complete(t.Context(), testLease, protocol.Complete{}); !errors.Is(err, ci.ErrUnavailable) || calls.Load() != 3 {
		t.Errorf("complete: got %v after %d calls", err, calls.Load())
	}
}

func TestClient_base_url(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "127.0.0.1:8300", "ftp://h", "http://", "http://u:p@h", "http://h/?x=1", "http://h/#f", "http://[::1"} {
		if _, err := protocol.NewClient(protocol.ClientConfig{BaseURL: bad}); !errors.Is(err, ci.ErrInvalid) {
			t.Errorf("%q: got %v, want invalid", bad, err)
		}
	}
	var paths []string
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		paths = append(paths, r.URL.EscapedPath())
		answer(t, w, struct{}{})
	})
	c := newClient(t, s.URL+"/ci/")
	if _, err := c.Run(t.Context(), "a/../b?c#d%{x}"); err != nil {
		t.Fatal(err)
	}
	if want := "/ci/v1/workflow-runs/a%2F..%2Fb%3Fc%23d%25%7Bx%7D"; paths[0] != want {
		t.Errorf("path %q, want %q: a value must stay one segment", paths[0], want)
	}
}

// Credentials go to the server that was named and to nobody else.
func TestClient_redirects_leave_credentials_behind(t *testing.T) {
	t.Parallel()
	seen := make(chan http.Header, 4)
	other := serve(t, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Clone()
		fmt.Fprint(w, "bytes")
	})
	var to atomic.Value
	to.Store(other.URL + "/object?sig=1")
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/here" {
			seen <- r.Header.Clone()
			fmt.Fprint(w, "bytes")
			return
		}
		http.Redirect(w, r, to.Load().(string), http.StatusTemporaryRedirect)
	})
	c := newClient(t, s.URL)

	body, err := c.FetchSource(t.Context(), testLease)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(body); err != nil || string(b) != "bytes" {
		t.Errorf("read %q, %v", b, err)
	}
	body.Close()
	h := <-seen
	for _, k := range []string{"Authorization", protocol.HeaderLease, "Referer", "Cookie"} {
		if v := h.Get(k); v != "" {
			t.Errorf("another host got %s: %s", k, v)
		}
	}

	to.Store("/here")
	if body, err = c.FetchSource(t.Context(), testLease); err != nil {
		t.Fatal(err)
	}
	body.Close()
	if h := <-seen; h.Get("Authorization") != "Bearer "+testToken {
		t.Error("a redirect on the same host lost the credential")
	}

	if _, err := c.Complete(t.Context(), testLease, protocol.Complete{}); !errors.Is(err, ci.ErrInvalid) {
		t.Errorf("a redirected POST: got %v, want a refusal that names the address", err)
	}
}

// Each runner call reaches its own route with credential, tuple and version.
func TestClient_runner_routes(t *testing.T) {
	t.Parallel()
	type hit struct {
		pattern, auth, lease, version, agent string
		body                                 string
	}
	hits := make(chan hit, 1)
	mux := http.NewServeMux()
	handle := func(route string, out any) {
		mux.HandleFunc(route, func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			hits <- hit{
				r.Pattern, r.Header.Get("Authorization"), r.Header.Get(protocol.HeaderLease),
				r.Header.Get(protocol.HeaderVersion), r.Header.Get("User-Agent"), string(b),
			}
			if out == nil {
				w.WriteHeader(http.StatusNoContent)
				return
			}
			answer(t, w, out)
		})
	}
	handle(protocol.RouteRegister, protocol.Registered{Runner: "rnr_1", Credential: "c"})
	handle(protocol.RouteOpenSession, protocol.SessionOpened{Session: "ses_1"})
	handle(protocol.RouteClaim, nil)
	handle(protocol.RouteHeartbeat, protocol.HeartbeatReply{Leases: []protocol.HeartbeatLease{{Answer: protocol.LeaseRenewed}}})
	handle(protocol.RoutePhase, nil)
	handle(protocol.RouteAppendLog, protocol.LogReply{})
	handle(protocol.RouteComplete, protocol.Completed{State: ci.StateFinished})
	handle(protocol.RouteHandOver, nil)
	handle(protocol.RouteOccupancy, nil)
	handle(protocol.RouteDrain, nil)
	handle(protocol.RouteFetchSource, "source")
	handle(protocol.RouteNewArtifact, protocol.ArtifactSession{ID: "art_1"})
	handle(protocol.RouteSignParts, protocol.SignedParts{URLs: make([]protocol.SignedURL, 1)})
	handle(protocol.RouteSealArtifact, nil)
	handle(protocol.RouteRestoreArtifact, protocol.SignedURL{Method: "GET", URL: "/x"})
	s := serve(t, mux.ServeHTTP)
	c := newClient(t, s.URL)
	ctx, l := t.Context(), testLease

	for _, tc := range []struct {
		route string
		lease bool
		call  func() error
	}{
		{protocol.RouteRegister, false, func() error { _, err := c.Register(ctx, protocol.Register{}); return err }},
		{protocol.RouteOpenSession, false, func() error { _, err := c.OpenSession(ctx, protocol.OpenSession{}); return err }},
		{protocol.RouteClaim, false, func() error {
			ticket, err := c.Claim(ctx, protocol.Claim{})
			if ticket != nil {
				t.Error("204 must give no ticket")
			}
			return err
		}},
		{protocol.RouteHeartbeat, false, func() error {
			_, err := c.Heartbeat(ctx, protocol.Heartbeat{Leases: []ci.LeaseRef{l}})
			return err
		}},
		{protocol.RoutePhase, true, func() error { return c.SetPhase(ctx, l, protocol.SetPhase{}) }},
		{protocol.RouteAppendLog, true, func() error { _, err := c.AppendLog(ctx, l, []byte("FLG1")); return err }},
		{protocol.RouteComplete, true, func() error { _, err := c.Complete(ctx, l, protocol.Complete{}); return err }},
		{protocol.RouteHandOver, true, func() error { return c.HandOver(ctx, l, protocol.HandOver{}) }},
		{protocol.RouteOccupancy, false, func() error { return c.Occupancy(ctx, protocol.Occupancy{}) }},
		{protocol.RouteDrain, false, func() error { return c.Drain(ctx, protocol.Drain{}) }},
		{protocol.RouteFetchSource, true, func() error {
			rc, err := c.FetchSource(ctx, l)
			if err == nil {
				rc.Close()
			}
			return err
		}},
		{protocol.RouteNewArtifact, true, func() error { _, err := c.NewArtifact(ctx, l, protocol.NewArtifact{}); return err }},
		{protocol.RouteSignParts, true, func() error {
			_, err := c.SignParts(ctx, l, "art_1", protocol.SignParts{Parts: make([]protocol.ArtifactPart, 1)})
			return err
		}},
		{protocol.RouteSealArtifact, true, func() error { return c.SealArtifact(ctx, l, "art_1", protocol.SealArtifact{}) }},
		{protocol.RouteRestoreArtifact, true, func() error { _, err := c.RestoreArtifact(ctx, l, "art_1"); return err }},
	} {
		if err := tc.call(); err != nil {
			t.Errorf("%s: %v", tc.route, err)
		}
		h := <-hits
		if h.pattern != tc.route {
			t.Errorf("%s: reached %s", tc.route, h.pattern)
		}
		if h.auth != "Bearer "+testToken || h.version != "1" || h.agent != "forgeci/1.2.3" {
			t.Errorf("%s: credential %q, version %q, agent %q", tc.route, h.auth, h.version, h.agent)
		}
		if want := map[bool]string{true: l.String()}[tc.lease]; h.lease != want {
			t.Errorf("%s: lease %q, want %q", tc.route, h.lease, want)
		}
		if tc.route == protocol.RouteAppendLog && h.body != "FLG1" {
			t.Errorf("log body %q is not raw", h.body)
		}
	}

	if _, err := c.Heartbeat(ctx, protocol.Heartbeat{}); !errors.Is(err, ci.ErrIncompatible) {
		t.Errorf("one answer for no lease: got %v", err)
	}
	<-hits
}

// A signed address gets exactly what was signed and no credential of ours.
func TestClient_signed_addresses(t *testing.T) {
	t.Parallel()
	got := make(chan *http.Request, 1)
	sent := make(chan string, 1)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got <- r
		sent <- string(b)
		w.Header().Set("ETag", `"e"`)
	})
	c := newClient(t, s.URL+"/prefix")
	for _, tc := range []struct{ url, path string }{{"/parts/1?sig=2", "/parts/1"}, {s.URL + "/abs", "/abs"}, {"rel/x", "/prefix/rel/x"}} {
		etag, err := c.Upload(t.Context(), protocol.SignedURL{
			Method: "PUT", URL: tc.url, Header: map[string]string{"X-Sum": "abc"},
		}, io.LimitReader(strings.NewReader("hello"), 5), 5)
		if err != nil || etag != `"e"` {
			t.Fatalf("%s: etag %q, %v", tc.url, etag, err)
		}
		r := <-got
		if r.URL.Path != tc.path || r.Method != "PUT" || r.ContentLength != 5 || r.Header.Get("X-Sum") != "abc" || <-sent != "hello" {
			t.Errorf("%s: got %s %s", tc.url, r.Method, r.URL)
		}
		if r.Header.Get("Authorization") != "" {
			t.Errorf("%s: the credential went along", tc.url)
		}
	}
	if _, err := c.Upload(t.Context(), protocol.SignedURL{Method: "PUT", URL: "/empty"}, strings.NewReader(""), 0); err != nil {
		t.Fatal(err)
	}
	if r := <-got; r.ContentLength != 0 || r.TransferEncoding != nil {
		t.Errorf("an empty part was sent with length %d, %v", r.ContentLength, r.TransferEncoding)
	}
	<-sent
}

// A stream that moves no byte ends as unavailable, one that moves slowly goes on.
func TestClient_stalled_streams(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		flush := http.NewResponseController(w).Flush
		if r.URL.Path == "/slow" {
			for range 6 {
				fmt.Fprint(w, "x")
				if err := flush(); err != nil {
					t.Error(err)
				}
				time.Sleep(40 * time.Millisecond) //nolint:forbidigo // a real connection cannot be virtual
			}
			return
		}
		fmt.Fprint(w, "x")
		if err := flush(); err != nil {
			t.Error(err)
		}
		<-release
	})
	t.Cleanup(func() { close(release) })
	c := newClient(t, s.URL, func(c *protocol.ClientConfig) { c.StallTimeout = 150 * time.Millisecond })
	slow, err := c.Download(t.Context(), protocol.SignedURL{Method: "GET", URL: "/slow"})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(slow); err != nil || string(b) != "xxxxxx" {
		t.Errorf("slow stream: %q, %v", b, err)
	}
	slow.Close()
	body, err := c.FetchSource(t.Context(), testLease)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if _, err := io.ReadAll(body); !errors.Is(err, ci.ErrUnavailable) || !strings.Contains(err.Error(), "no byte moved") {
		t.Errorf("stalled stream: got %v", err)
	}
}

// answers is a server in virtual time: it reads a request's body and answers later.
type answers struct{ after time.Duration }

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil, err
	}
	select {
	case <-time.After(a.after):
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("{}")), Request: r}, nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// A server may take minutes to unpack and hash a snapshot that has been sent; one
// that never answers is given up all the same.
func TestClient_waits_for_the_verification_of_a_snapshot(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]error{5 * time.Minute: nil, time.Hour: ci.ErrUnavailable} {
		synctest.Test(t, func(t *testing.T) {
			c := newClient(t, "http://ci.test", func(c *protocol.ClientConfig) { c.HTTP = &http.Client{Transport: answers{after}} })
			if _, err := c.PutSnapshot(t.Context(), "repo_1", "sha256:0", strings.NewReader("snapshot"), 8); !errors.Is(err, want) {
				t.Errorf("an answer after %s: error %v, want %v", after, err, want)
			}
		})
	}
}

func TestEndpoint(t *testing.T) {
	t.Parallel()
	method, path := protocol.Endpoint(protocol.RouteGetSnapshot, "repo_1", "sha256:ab/c")
	if method != "GET" || path != "/v1/repos/repo_1/sources/sha256:ab%2Fc" {
		t.Errorf("got %s %s", method, path)
	}
	for name, f := range map[string]func(){
		"too few":  func() { protocol.Endpoint(protocol.RouteGetSnapshot, "x") },
		"too many": func() { protocol.Endpoint(protocol.RouteGetRun, "x", "y") },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s values: no panic", name)
				}
			}()
			f()
		}()
	}
}
