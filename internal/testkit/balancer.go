package testkit

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"
)

// Balancer is what stands before the nodes of a server: an HTTP proxy that gives
// each call to one of those that say they are ready, in turn. It asks them 50
// times a second and repeats nothing: a call that meets a node which has just
// gone is answered 502, as balancers do. It ends with the test.
type Balancer struct {
	server *httptest.Server
	nodes  []string

	mu   sync.Mutex
	away map[string]bool // nodes that were not ready when they were last asked; guarded by mu
	next int             // guarded by mu
	lost int             // guarded by mu
}

// NewBalancer starts a balancer before the HTTP servers at some TCP addresses.
func NewBalancer(t testing.TB, nodes ...string) *Balancer {
	t.Helper()
	b := &Balancer{nodes: nodes, away: map[string]bool{}}
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: b.pick()})
			p.Out.Host = p.In.Host
		},
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, _ error) {
			b.mu.Lock()
			b.lost++
			b.mu.Unlock()
			b.ask(r.URL.Host)
			w.WriteHeader(http.StatusBadGateway)
		},
	}
	b.server = httptest.NewServer(proxy)
	done := make(chan struct{})
	var asking sync.WaitGroup
	for _, node := range nodes {
		asking.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for {
				b.ask(node)
				select {
				case <-done:
					return
				case <-tick.C:
				}
			}
		})
	}
	t.Cleanup(func() {
		close(done)
		asking.Wait()
		b.server.CloseClientConnections()
		b.server.Close()
		transport.CloseIdleConnections()
	})
	return b
}

// URL returns the balancer's address as the URL of an HTTP server.
func (b *Balancer) URL() string { return b.server.URL }

// Lost returns how many calls met a node that had gone.
func (b *Balancer) Lost() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lost
}

// WaitReady waits until the balancer has seen that all nodes are ready. It fails
// the test after a minute.
func (b *Balancer) WaitReady(t testing.TB) {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		b.mu.Lock()
		away := slices.DeleteFunc(slices.Clone(b.nodes), func(node string) bool { return !b.away[node] })
		b.mu.Unlock()
		if len(away) == 0 {
			return
		}
		select {
		case <-limit:
			t.Fatalf("not ready: %v", away)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ask learns whether a node is ready.
func (b *Balancer) ask(node string) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	resp, err := client.Get("http://" + node + "/readyz")
	if err == nil {
		_ = resp.Body.Close()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.away[node] = err != nil || resp.StatusCode != http.StatusOK
}

// pick returns the node whose turn it is: a ready one, if there is one.
func (b *Balancer) pick() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range b.nodes {
		b.next++
		if node := b.nodes[b.next%len(b.nodes)]; !b.away[node] {
			return node
		}
	}
	return b.nodes[b.next%len(b.nodes)]
}
