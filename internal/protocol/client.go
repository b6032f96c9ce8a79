package protocol

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
)

// Bounds of the client.
const (
	maxJSON    = 32 << 20 // an answer that is a document
	maxProblem = 1 << 20

	defaultCallTimeout  = 30 * time.Second
	defaultStallTimeout = 60 * time.Second
	pollMargin          = 15 * time.Second // over the time a poll may be held
	maxRedirects        = 5
	// snapshotWait is how much longer than any stream the answer to a snapshot may
	// take, whose files the server unpacks and hashes before it says that it has them.
	snapshotWait = 10 * time.Minute
)

// ClientConfig configures a Client. BaseURL is required.
type ClientConfig struct {
	// BaseURL of the server: http or https, host, and a path prefix if a proxy adds one.
	BaseURL string
	// Token is sent as Authorization: Bearer to that server and to nobody else.
	Token string
	// HTTP makes the requests; nil means a client of its own with NewTransport.
	// Its CheckRedirect is not used, its Timeout must be zero.
	HTTP *http.Client
	// Version of this build, for the User-Agent.
	Version string
	// CallTimeout bounds a call that answers a document; 0 means 30 s. A long
	// poll gets the time it asked for on top.
	CallTimeout time.Duration
	// StallTimeout ends a stream that moves no byte for so long; 0 means 60 s.
	StallTimeout time.Duration
}

// Client speaks to one ForgeCI server. Every error it returns is a *ci.Error:
// the kind that the server named, or ErrUnavailable when no answer of a server
// came back (then it is not known whether the call had its effect; all calls of
// runners may be repeated). It is safe for concurrent use.
type Client struct {
	base         *url.URL
	token        string
	http         *http.Client
	userAgent    string
	callTimeout  time.Duration
	stallTimeout time.Duration
}

// NewTransport returns a transport with bounded dialling and idle connections,
// HTTP/2 where TLS offers it, and the proxy of the process environment.
func NewTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dialer.DialContext,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   10 * time.Second,
		MaxIdleConns:          64,
		MaxIdleConnsPerHost:   64,
		IdleConnTimeout:       50 * time.Second, // below the usual 60 s cut-off of proxies
		ExpectContinueTimeout: time.Second,
	}
}

// NewClient returns a client; nothing is sent yet. A base URL that is not a
// plain http(s) address is ErrInvalid.
func NewClient(cfg ClientConfig) (*Client, error) {
	base, err := url.Parse(cfg.BaseURL)
	if err != nil || base.Host == "" || (base.Scheme != "http" && base.Scheme != "https") ||
		base.RawQuery != "" || base.Fragment != "" || base.User != nil {
		shown := cfg.BaseURL
		if _, host, secret := strings.Cut(shown, "@"); secret {
			shown = "…@" + host // what is before it may be a password
		}
		return nil, ci.Errorf(ci.ErrInvalid,
			"server address %q: write it like http://127.0.0.1:8300 or https://ci.example.com", shown)
	}
	if strings.ContainsFunc(cfg.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, ci.Errorf(ci.ErrUnauthorized, "the token holds a space, a line break or a character that no token has")
	}
	base.Path = strings.TrimRight(base.Path, "/")
	base.RawPath = ""
	hc := http.Client{Transport: NewTransport()}
	if cfg.HTTP != nil {
		hc = *cfg.HTTP
	}
	hc.CheckRedirect = checkRedirect
	c := &Client{
		base: base, token: cfg.Token, http: &hc, userAgent: "forgeci",
		callTimeout: cfg.CallTimeout, stallTimeout: cfg.StallTimeout,
	}
	if cfg.Version != "" {
		c.userAgent += "/" + cfg.Version
	}
	if c.callTimeout == 0 {
		c.callTimeout = defaultCallTimeout
	}
	if c.stallTimeout == 0 {
		c.stallTimeout = defaultStallTimeout
	}
	return c, nil
}

// WithToken returns a client for the same server, over the same connections,
// with another credential.
func (c *Client) WithToken(token string) *Client {
	d := *c
	d.token = token
	return &d
}

// BaseURL returns the server's address without a trailing slash.
func (c *Client) BaseURL() string { return c.base.String() }

// CloseIdle closes connections that are not in use.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

// checkRedirect follows reads only, never from https to http, and leaves every
// credential behind when the host or port changes.
func checkRedirect(req *http.Request, via []*http.Request) error {
	first := via[0]
	switch {
	case len(via) >= maxRedirects:
		return ci.Errorf(ci.ErrUnavailable, "%s redirects without end", first.URL.Host)
	case first.Method != http.MethodGet:
		return ci.Errorf(ci.ErrInvalid, "%s redirects to %s: use that address as the server",
			first.URL.Host, req.URL.Scheme+"://"+req.URL.Host)
	case first.URL.Scheme == "https" && req.URL.Scheme != "https":
		return ci.Errorf(ci.ErrUnsafe, "%s redirects from https to http: refused", first.URL.Host)
	}
	if req.URL.Host != first.URL.Host || req.URL.Scheme != first.URL.Scheme {
		for _, h := range []string{"Authorization", HeaderLease, "Cookie", "Referer"} {
			req.Header.Del(h)
		}
	}
	return nil
}

// call describes one request.
type call struct {
	route  string
	values []string
	query  url.Values
	header http.Header
	lease  *ci.LeaseRef
	in     any    // JSON body
	raw    []byte // raw body, instead of in
	// wait is how much longer than usual the answer may take, once the body is sent:
	// because the server holds it on purpose, or has much to do.
	wait time.Duration
	// repeat allows one repetition when no server answered.
	repeat bool
}

// newRequest builds a request with this server's credential.
func (c *Client) newRequest(ctx context.Context, rq call, body io.Reader) (*http.Request, error) {
	method, path := Endpoint(rq.route, rq.values...)
	u := *c.base
	decoded, err := url.PathUnescape(path)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "address %q is malformed", path)
	}
	u.Path, u.RawPath = c.base.Path+decoded, c.base.EscapedPath()+path
	u.RawQuery = rq.query.Encode()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "request %s %s cannot be built", method, path).WithCause(err)
	}
	maps.Copy(req.Header, rq.header)
	req.Header.Set("User-Agent", c.userAgent)
	req.Header.Set(HeaderVersion, strconv.Itoa(Version))
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if rq.lease != nil {
		req.Header.Set(HeaderLease, rq.lease.String())
	}
	return req, nil
}

// do makes a call that answers a document into out (nil: the answer's body is
// read and dropped) and returns the status.
func (c *Client) do(ctx context.Context, rq call, out any) (int, error) {
	status, err := c.once(ctx, rq, out)
	if err == nil || !rq.repeat || !errors.Is(err, ci.ErrUnavailable) || ctx.Err() != nil {
		return status, err
	}
	pause := 250 * time.Millisecond
	var e *ci.Error
	if errors.As(err, &e) && e.RetryAfter > 0 {
		pause = min(e.RetryAfter, 5*time.Second)
	}
	if sleep(ctx, pause) != nil {
		return status, err
	}
	return c.once(ctx, rq, out)
}

func (c *Client) once(ctx context.Context, rq call, out any) (int, error) {
	body := rq.raw
	header := rq.header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Accept", MediaJSON)
	switch {
	case rq.in != nil:
		b, err := json.Marshal(rq.in)
		if err != nil {
			return 0, ci.Errorf(ci.ErrInternal, "request cannot be encoded").WithCause(err)
		}
		body = b
		header.Set("Content-Type", MediaJSON)
	case rq.raw != nil:
		header.Set("Content-Type", MediaBytes)
	}
	rq.header = header
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout+rq.wait)
	defer cancel()
	req, err := c.newRequest(ctx, rq, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	resp, err := c.http.Do(req) //nolint:bodyclose // drain closes it
	if err != nil {
		return 0, unreachable(req.URL, err)
	}
	defer drain(resp.Body)
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return resp.StatusCode, readError(resp)
	}
	if out == nil || resp.StatusCode == http.StatusNoContent {
		return resp.StatusCode, nil
	}
	return resp.StatusCode, c.decode(resp, out)
}

// decode reads an answer that is a document.
func (c *Client) decode(resp *http.Response, out any) error {
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxJSON+1))
	if err != nil {
		return unreachable(resp.Request.URL, err)
	}
	if len(b) > maxJSON {
		return ci.Errorf(ci.ErrTooLarge, "%s answered more than %d MiB", c.base.Host, maxJSON>>20)
	}
	if err := json.Unmarshal(b, out); err != nil {
		return ci.Errorf(ci.ErrIncompatible,
			"%s answered something that is not ForgeCI's: is it the server's address, and of a fitting version?",
			c.base).WithCause(err)
	}
	return nil
}

// stream makes a call whose answer is a raw body. Sending and reading both end
// with ErrUnavailable when no byte moves for the stall timeout; between the two
// the server gets rq.wait on top. The caller closes the body.
func (c *Client) stream(ctx context.Context, rq call, body io.Reader, size int64) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := newStall(c.stallTimeout, cancel)
	if body != nil {
		body = &stallReader{r: body, watch: watch, left: size, wait: rq.wait}
	}
	req, err := c.newRequest(ctx, rq, body)
	if err != nil {
		watch.end()
		return nil, err
	}
	if body != nil {
		req.ContentLength = size
	}
	return c.send(req, watch)
}

func (c *Client) send(req *http.Request, watch *stall) (*http.Response, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		watch.end()
		return nil, unreachable(req.URL, causeOf(req.Context(), err))
	}
	watch.touch()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		err := readError(resp)
		drain(resp.Body)
		watch.end()
		return nil, err
	}
	resp.Body = &streamBody{rc: resp.Body, watch: watch, req: req}
	return resp, nil
}

// stall cancels a context when touch is not called for its timeout.
type stall struct {
	timeout time.Duration
	timer   *time.Timer
	cancel  context.CancelCauseFunc
	ended   atomic.Bool
}

func newStall(d time.Duration, cancel context.CancelCauseFunc) *stall {
	return &stall{timeout: d, cancel: cancel, timer: time.AfterFunc(d, func() {
		cancel(ci.Errorf(ci.ErrUnavailable, "no byte moved for over %s", d))
	})}
}

func (s *stall) touch() { s.allow(0) }

// allow is touch with more time until the next one.
func (s *stall) allow(more time.Duration) {
	if !s.ended.Load() {
		s.timer.Reset(s.timeout + more)
	}
}

func (s *stall) end() {
	s.ended.Store(true)
	s.timer.Stop()
	s.cancel(context.Canceled)
}

type stallReader struct {
	r     io.Reader
	watch *stall
	left  int64         // bytes that are still to be sent
	wait  time.Duration // for the answer, when all are
}

func (s *stallReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if s.left -= int64(n); s.left > 0 {
		s.watch.touch()
	} else {
		s.watch.allow(s.wait)
	}
	return n, err
}

type streamBody struct {
	rc    io.ReadCloser
	watch *stall
	req   *http.Request
}

func (b *streamBody) Read(p []byte) (int, error) {
	n, err := b.rc.Read(p)
	b.watch.touch()
	if err != nil && !errors.Is(err, io.EOF) {
		err = unreachable(b.req.URL, causeOf(b.req.Context(), err))
	}
	return n, err
}

func (b *streamBody) Close() error {
	err := b.rc.Close()
	b.watch.end()
	return err
}

// causeOf prefers the reason for which a context was cancelled.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// unreachable is the error of a call that no server answered. A typed error
// below (a refused redirect) stays what it is; a cancelled context stays visible
// to errors.Is.
func unreachable(u *url.URL, err error) error {
	if typed, ok := errors.AsType[*ci.Error](err); ok {
		return typed
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err // the address stands in the detail, without its query
	}
	return ci.Errorf(ci.ErrUnavailable, "no answer from %s", u.Host).WithCause(err)
}

func readError(resp *http.Response) error {
	// A cut explanation is still better than none.
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	return errorFrom(resp, b)
}

// drain reads a little of what is left, so that the connection can be used again.
func drain(rc io.ReadCloser) {
	_, _ = io.Copy(io.Discard, io.LimitReader(rc, 64<<10))
	_ = rc.Close()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return fmt.Errorf("wait: %w", context.Cause(ctx))
	case <-t.C:
		return nil
	}
}
