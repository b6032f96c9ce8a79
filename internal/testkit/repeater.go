package testkit

import (
	"bytes"
	"context"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Repeater is an HTTP proxy that behaves as a bad network with impatient clients
// does: requests are held back, so that they overtake each other, and each is
// sent again some time later, when the world has moved on. The answers to
// repeats go nowhere. Long polls are repeated, too. It ends with the test.
type Repeater struct {
	server *httptest.Server
	client *http.Client
	target *url.URL

	mu       sync.Mutex
	random   *rand.Rand     // guarded by mu
	hold     time.Duration  // guarded by mu
	later    time.Duration  // guarded by mu
	repeats  sync.WaitGroup // Add under mu
	all      []repeat       // everything that passed; guarded by mu
	repeated map[string]int // by method and path; guarded by mu
}

// repeat is a request that can be sent again.
type repeat struct {
	method string
	url    string
	header http.Header
	body   []byte
}

// NewRepeater starts a repeater to the HTTP server at a TCP address. It holds
// each request back for up to hold and sends it again after up to later; the
// same seed makes the same choices.
func NewRepeater(t testing.TB, target string, seed uint64, hold, later time.Duration) *Repeater {
	t.Helper()
	r := &Repeater{
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}, Timeout: 2 * time.Minute},
		target: &url.URL{Scheme: "http", Host: target},
		random: rand.New(rand.NewPCG(seed, 0)), hold: hold, later: later, repeated: map[string]int{},
	}
	forward := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(r.target); p.Out.Host = p.In.Host },
		Transport:     r.client.Transport,
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		req.Body = io.NopCloser(bytes.NewReader(body))
		hold := r.take(ctx, repeat{method: req.Method, url: req.URL.RequestURI(), header: req.Header.Clone(), body: body})
		select {
		case <-time.After(hold):
		case <-req.Context().Done():
			panic(http.ErrAbortHandler)
		}
		forward.ServeHTTP(w, req)
	}))
	t.Cleanup(func() {
		cancel()
		r.mu.Lock()
		r.later = 0 // nothing is repeated any more
		r.mu.Unlock()
		r.repeats.Wait()
		r.server.CloseClientConnections()
		r.server.Close()
		r.client.CloseIdleConnections()
	})
	return r
}

// URL returns the repeater's address.
func (r *Repeater) URL() string { return r.server.URL }

// take plans the repeat of a request and returns how long to hold it back.
func (r *Repeater) take(ctx context.Context, it repeat) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, it)
	if r.later > 0 {
		after := time.Duration(r.random.Int64N(int64(r.later)))
		r.repeats.Go(func() {
			select {
			case <-time.After(after):
				r.send(ctx, it)
			case <-ctx.Done():
			}
		})
	}
	return time.Duration(r.random.Int64N(int64(r.hold) + 1))
}

// send makes a request once more and drops the answer.
func (r *Repeater) send(ctx context.Context, it repeat) {
	req, err := http.NewRequestWithContext(ctx, it.method, r.target.String()+it.url, bytes.NewReader(it.body))
	if err != nil {
		return
	}
	req.Header = it.header.Clone()
	r.mu.Lock()
	r.repeated[it.method+" "+req.URL.Path]++
	r.mu.Unlock()
	resp, err := r.client.Do(req)
	if err != nil {
		return // the server is away, or the test over
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// Replay sends everything that has ever passed once more, in an order that has
// nothing to do with the first, and returns how much it was. Long polls are left
// out by skip.
func (r *Repeater) Replay(ctx context.Context, skip func(path string) bool) int {
	r.mu.Lock()
	all := make([]repeat, 0, len(r.all))
	for _, i := range r.random.Perm(len(r.all)) {
		if u, err := url.Parse(r.all[i].url); err == nil && !skip(u.Path) {
			all = append(all, r.all[i])
		}
	}
	r.mu.Unlock()
	work := make(chan repeat)
	var senders sync.WaitGroup
	for range 8 {
		senders.Go(func() {
			for it := range work {
				r.send(ctx, it)
			}
		})
	}
	for _, it := range all {
		work <- it
	}
	close(work)
	senders.Wait()
	return len(all)
}

// Repeated returns how often requests were sent again, by method and path.
func (r *Repeater) Repeated() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.repeated)
}
