package testkit

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
)

// NewGateway starts an HTTP proxy to the server at a TCP address and returns its
// URL. handle sees each request; forward answers it as the server does. It ends
// with the test.
func NewGateway(t testing.TB, target string, handle func(w http.ResponseWriter, r *http.Request, forward http.Handler)) string {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: target})
			p.Out.Host = p.In.Host // signatures name it
		},
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handle(w, r, proxy) }))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		transport.CloseIdleConnections()
	})
	return server.URL
}

// Answer is what a server answered, held back.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Ask has forward answer a request and returns the answer without passing it on.
// It panics with http.ErrAbortHandler when the server breaks off.
func Ask(r *http.Request, forward http.Handler) Answer {
	rec := httptest.NewRecorder()
	forward.ServeHTTP(rec, r)
	return Answer{Status: rec.Code, Header: rec.Header(), Body: rec.Body.Bytes()}
}

// Pass passes an answer on.
func (a Answer) Pass(w http.ResponseWriter) {
	maps.Copy(w.Header(), a.Header)
	w.WriteHeader(a.Status)
	_, _ = io.Copy(w, bytes.NewReader(a.Body)) // the client may have gone
}
