package s3_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/blobtest"
	"forgeci/internal/blob/s3"
	"forgeci/internal/ci"
	"forgeci/internal/testkit"
)

// between returns a store whose requests go through middle, which may pass them
// on to the real service.
func between(t *testing.T, middle func(w http.ResponseWriter, r *http.Request, pass http.Handler)) *s3.Store {
	t.Helper()
	cfg := testkit.S3(t)
	real := url.URL{Scheme: "http", Host: cfg.Endpoint}
	proxy := &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
		// The signature covers the host that the client knows.
		p.SetURL(&real)
		p.Out.Host = p.In.Host
	}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { middle(w, r, proxy) }))
	t.Cleanup(server.Close)
	cfg.Endpoint = strings.TrimPrefix(server.URL, "http://")
	store, err := s3.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func put(ctx context.Context, s blob.Store, key string, data []byte) error {
	return s.PutNew(ctx, key, bytes.NewReader(data), int64(len(data)), sha256.Sum256(data))
}

// RELIABILITY R25: an answer that is lost after the object was stored is not a
// failure, whichever call looks again; and an answer that says 412 about our own
// first try is not a conflict.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1000, 6 << 20} {
		var lose atomic.Int64
		store := between(t, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method != http.MethodPut || lose.Add(-1) < 0 {
				pass.ServeHTTP(w, r)
				return
			}
			pass.ServeHTTP(httptest.NewRecorder(), r)
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_ = conn.Close()
		})
		lose.Store(1)
		data := blobtest.Bytes(size, "lost")
		if err := put(t.Context(), store, "lost/x", data); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		lose.Store(1)
		other := blobtest.Bytes(size, "other")
		if err := put(t.Context(), store, "lost/x", other); !errors.Is(err, ci.ErrConflict) {
			t.Errorf("%d bytes: error %v, want ErrConflict", size, err)
		}
	}
}

// RELIABILITY R25: answers of 500 and 503 are ErrUnavailable in the end, and
// nothing is stored.
func TestStorm(t *testing.T) {
	t.Parallel()
	var storm atomic.Bool
	store := between(t, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if storm.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		pass.ServeHTTP(w, r)
	})
	if err := put(t.Context(), store, "a/before", []byte("x")); err != nil {
		t.Fatal(err)
	}
	up, err := store.NewUpload(t.Context(), "a/up", 1, sha256.Sum256([]byte("x")))
	if err != nil {
		t.Fatal(err)
	}
	storm.Store(true)
	ctx, x := t.Context(), sha256.Sum256([]byte("x"))
	var wg sync.WaitGroup
	for what, call := range map[string]func() error{
		"PutNew":    func() error { return put(ctx, store, "a/new", []byte("x")) },
		"Open":      func() error { _, err := store.Open(ctx, "a/before", 0, -1); return err },
		"Stat":      func() error { _, err := store.Stat(ctx, "a/before"); return err },
		"List":      func() error { _, err := store.List(ctx, "", "", 10); return err },
		"NewUpload": func() error { _, err := store.NewUpload(ctx, "a/y", 1, x); return err },
		"Parts":     func() error { _, err := store.Parts(ctx, up); return err },
		"PartURL":   func() error { _, err := store.PartURL(ctx, up, 1, 1, x, time.Minute); return err },
		"Uploads":   func() error { _, err := store.Uploads(ctx, ""); return err },
		"Delete":    func() error { return store.Delete(ctx, "a/before") },
		"Abort":     func() error { return store.Abort(ctx, up) },
		"Seal":      func() error { return store.Seal(ctx, up, []blob.Part{{Number: 1, Size: 1, SHA256: x}}) },
	} {
		wg.Go(func() {
			if err := call(); !errors.Is(err, ci.ErrUnavailable) {
				t.Errorf("%s: error %v, want ErrUnavailable", what, err)
			}
		})
	}
	wg.Wait()
	storm.Store(false)
	infos, err := store.List(t.Context(), "", "", 10)
	if err != nil || len(infos) != 1 || infos[0].Key != "a/before" {
		t.Errorf("after the storm: %v, %v", infos, err)
	}
}

// RELIABILITY R25: a body that ends too early is an error, not a short object.
func TestTruncatedBody(t *testing.T) {
	t.Parallel()
	var cut atomic.Bool
	store := between(t, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method != http.MethodGet || !cut.Load() {
			pass.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		pass.ServeHTTP(rec, r)
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
	})
	data := blobtest.Bytes(100_000, "cut")
	if err := put(t.Context(), store, "a/x", data); err != nil {
		t.Fatal(err)
	}
	cut.Store(true)
	r, err := store.Open(t.Context(), "a/x", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadAll(r); !errors.Is(err, ci.ErrUnavailable) {
		t.Errorf("error %v, want ErrUnavailable", err)
	}
}

// A lost answer of Seal, and parts that the service lost, are told apart.
func TestSealAfterFaults(t *testing.T) {
	t.Parallel()
	var lose atomic.Bool
	store := between(t, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method != http.MethodPost || !lose.Load() {
			pass.ServeHTTP(w, r)
			return
		}
		pass.ServeHTTP(httptest.NewRecorder(), r)
		w.WriteHeader(http.StatusGatewayTimeout)
	})
	data := blobtest.Bytes(1<<20, "seal")
	up, err := store.NewUpload(t.Context(), "a/x", int64(len(data)), sha256.Sum256(data))
	if err != nil {
		t.Fatal(err)
	}
	req, err := store.PartURL(t.Context(), up, 1, int64(len(data)), sha256.Sum256(data), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), req.Method, req.URL, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range req.Header {
		r.Header.Set(k, v)
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("part: %v, %v", resp, err)
	}
	_ = resp.Body.Close()
	parts, err := store.Parts(t.Context(), up)
	if err != nil {
		t.Fatal(err)
	}
	lose.Store(true)
	if err := store.Seal(t.Context(), up, parts); err != nil {
		t.Errorf("Seal with lost answers: %v", err)
	}
	info, err := store.Stat(t.Context(), "a/x")
	if err != nil || info.Size != int64(len(data)) {
		t.Errorf("Stat: %+v, %v", info, err)
	}
}

// Open says what is wrong with a configuration.
func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	good := testkit.S3(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	away := l.Addr().String()
	_ = l.Close()
	for name, c := range map[string]struct {
		change func(c *s3.Config)
		kind   ci.Kind
	}{
		"bucket":   {func(c *s3.Config) { c.Bucket = "no-such-bucket" }, ci.ErrNotFound},
		"secret":   {func(c *s3.Config) { c.SecretKey = "wrong" }, ci.ErrUnavailable},
		"away":     {func(c *s3.Config) { c.Endpoint = away }, ci.ErrUnavailable},
		"endpoint": {func(c *s3.Config) { c.Endpoint = "http://not a host/" }, ci.ErrInvalid},
		"prefix":   {func(c *s3.Config) { c.Prefix = "a//b" }, ci.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := good
			c.change(&cfg)
			if _, err := s3.Open(t.Context(), cfg); !errors.Is(err, c.kind) {
				t.Errorf("error %v, want %s", err, c.kind)
			}
		})
	}
}
