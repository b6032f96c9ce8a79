package testkit

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP proxy on a loopback port that breaks connections on request.
// It carries anything; only Break and CutReply look into what it carries, which
// must then be HTTP/1.1 or PostgreSQL's protocol in the clear. Its methods may be
// called from any goroutine. It ends with the test.
type Proxy struct {
	target   string
	commits  bool // it carries PostgreSQL's protocol
	listener net.Listener
	done     chan struct{} // closed at the end
	running  sync.WaitGroup

	mu      sync.Mutex
	stalled [2]bool               // by direction; guarded by mu
	passed  int                   // requests, or commits, so far; guarded by mu
	refuses bool                  // guarded by mu
	delay   time.Duration         // guarded by mu
	changed chan struct{}         // closed and replaced at every change; guarded by mu
	open    map[*proxied]struct{} // guarded by mu
	cuts    []*cut                // guarded by mu
}

// cut is an order to break a connection at one request or one commit.
type cut struct {
	match func(*http.Request) bool // nil: any
	at    Moment
	do    func()
	left  int // requests still to come, this one included
	done  chan struct{}
}

// Moment is where in the life of a request a connection breaks.
type Moment int

// Moments.
const (
	// Before is when nothing of the request has been passed on.
	Before Moment = iota
	// After is when the reply has come and nothing of it has been passed on.
	After
)

// Directions of a proxy.
const (
	toServer = iota
	toClient
)

// NewProxy starts a proxy to a TCP address.
func NewProxy(t testing.TB, target string) *Proxy { t.Helper(); return newProxy(t, target, false) }

// NewPostgresProxy starts a proxy to a PostgreSQL server that counts commits in
// place of HTTP requests.
func NewPostgresProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	return newProxy(t, target, true)
}

func newProxy(t testing.TB, target string, commits bool) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("start proxy: %v", err)
	}
	p := &Proxy{target: target, commits: commits, listener: l, done: make(chan struct{}), changed: make(chan struct{}), open: map[*proxied]struct{}{}}
	p.running.Go(p.accept)
	t.Cleanup(func() {
		close(p.done)
		l.Close()
		p.Reset()
		p.running.Wait()
	})
	return p
}

// Addr returns the proxy's own TCP address.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL returns the address as the URL of an HTTP server.
func (p *Proxy) URL() string { return "http://" + p.Addr() }

// Stall partitions the two sides: connections stay open, nothing arrives on
// either side, the end of a connection included. What was sent meanwhile
// arrives after Heal, as TCP would send it again. New connections seem to open.
func (p *Proxy) Stall() { p.set(func() { p.stalled = [2]bool{true, true} }) }

// StallToServer partitions one way: the server's bytes arrive, the client's do
// not.
func (p *Proxy) StallToServer() { p.set(func() { p.stalled[toServer] = true }) }

// StallToClient partitions the other way.
func (p *Proxy) StallToClient() { p.set(func() { p.stalled[toClient] = true }) }

// Refuse resets every new connection; open ones go on.
func (p *Proxy) Refuse() { p.set(func() { p.refuses = true }) }

// Delay holds everything back by d in each direction, in order; a round trip
// takes 2d longer. Throughput is not limited.
func (p *Proxy) Delay(d time.Duration) { p.set(func() { p.delay = d }) }

// Heal undoes every Stall, Refuse and Delay. Connections that HalfOpen or Reset broke
// stay broken.
func (p *Proxy) Heal() { p.set(func() { p.stalled, p.refuses, p.delay = [2]bool{}, false, 0 }) }

func (p *Proxy) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	close(p.changed)
	p.changed = make(chan struct{})
}

// Reset breaks every open connection on both sides with a TCP reset.
func (p *Proxy) Reset() {
	for _, c := range p.connections() {
		c.reset()
	}
}

// HalfOpen makes every open connection a dead one that looks alive to both
// sides: whatever is sent on it is lost for ever. New connections work.
func (p *Proxy) HalfOpen() {
	for _, c := range p.connections() {
		c.lose()
	}
}

func (p *Proxy) connections() []*proxied {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*proxied
	for c := range p.open {
		all = append(all, c)
	}
	return all
}

// CutReply loses the reply to the nth request from now (1 is the next) that
// match accepts, a nil match accepts all: the server gets the request whole and
// answers, the client gets a reset connection in place of the answer. match
// sees method, URL and headers, no body. The channel is closed when it has
// happened. Each call is one order; orders count independently.
func (p *Proxy) CutReply(n int, match func(*http.Request) bool) <-chan struct{} {
	return p.Break(n, After, match, nil)
}

// Break is CutReply for either moment. When the moment has come it first calls
// do, if there is one, then resets the connection on both sides. On a proxy of
// PostgreSQL it counts commits and match must be nil.
func (p *Proxy) Break(n int, at Moment, match func(*http.Request) bool, do func()) <-chan struct{} {
	c := &cut{match: match, at: at, do: do, left: n, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts = append(p.cuts, c)
	return c.done
}

// Forget drops the orders whose request has not come, and returns how many they
// were.
func (p *Proxy) Forget() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.cuts)
	p.cuts = nil
	return n
}

// Passed returns how many requests or, on a proxy of PostgreSQL, commits have
// come to it.
func (p *Proxy) Passed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.passed
}

// takeCut counts a request, or a commit if there is none, and returns the order
// that is due for it.
func (p *Proxy) takeCut(r *http.Request) *cut {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.passed++
	for i, c := range p.cuts {
		if c.match != nil && !c.match(r) {
			continue
		}
		if c.left--; c.left == 0 {
			p.cuts = append(p.cuts[:i:i], p.cuts[i+1:]...)
			return c
		}
	}
	return nil
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.mu.Lock()
		refuses := p.refuses
		p.mu.Unlock()
		if refuses {
			resetConn(client)
			continue
		}
		p.running.Go(func() { p.serve(client) })
	}
}

// serve carries one connection until both directions have ended.
func (p *Proxy) serve(client net.Conn) {
	c := &proxied{proxy: p, client: client, lost: make(chan struct{}), closed: make(chan struct{})}
	p.mu.Lock()
	p.open[c] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.open, c)
		p.mu.Unlock()
		c.close()
	}()
	select {
	case <-p.done: // accepted on the last breath, after the others were reset
		return
	default:
	}
	if !p.gate(c, toServer, time.Time{}) {
		return
	}
	server, err := net.DialTimeout("tcp", p.target, 10*time.Second)
	if err != nil || !c.attach(server) {
		resetConn(client)
		return
	}
	var both sync.WaitGroup
	scan := (&requestScanner{seen: c.request}).scan
	if p.commits {
		scan = (&commitScanner{seen: func() bool { return c.request(nil) }}).scan
	}
	both.Go(func() { c.carry(client, server, toServer, scan) })
	both.Go(func() { c.carry(server, client, toClient, c.reply) })
	both.Wait()
}

// gate waits until the given time has come and the proxy lets bytes pass in the
// direction. It returns false when the connection is over.
func (p *Proxy) gate(c *proxied, direction int, at time.Time) bool {
	for {
		p.mu.Lock()
		stalled, changed := p.stalled[direction], p.changed
		p.mu.Unlock()
		var due <-chan time.Time
		wait := time.Until(at)
		if !stalled && wait <= 0 {
			return true
		}
		if !stalled {
			due = time.After(wait)
		}
		select {
		case <-changed:
		case <-due:
		case <-c.closed:
			return false
		case <-p.done:
			return false
		}
	}
}

// proxied is one connection through the proxy.
type proxied struct {
	proxy  *Proxy
	client net.Conn
	lost   chan struct{} // closed by HalfOpen
	closed chan struct{} // closed when the connection is over

	mu     sync.Mutex
	server net.Conn // nil until dialled; guarded by mu
	over   bool     // closed is closed; guarded by mu
	dead   bool     // lost is closed; guarded by mu
	cut    *cut     // the reply that comes next is lost; guarded by mu
}

// attach adds the server's side, unless the connection has ended meanwhile.
func (c *proxied) attach(server net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		server.Close()
		return false
	}
	c.server = server
	return true
}

func (c *proxied) lose() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.dead {
		c.dead = true
		close(c.lost)
	}
}

func (c *proxied) close() { c.finish(func(conn net.Conn) { conn.Close() }) }
func (c *proxied) reset() { c.finish(resetConn) }

func (c *proxied) finish(end func(net.Conn)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	c.over = true
	close(c.closed)
	end(c.client)
	if c.server != nil {
		end(c.server)
	}
}

// resetConn closes with a reset in place of an orderly end.
func resetConn(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0) //nolint:errcheck // the connection is thrown away
	}
	conn.Close()
}

// packet is what one read brought, and when it may be passed on. The last one
// of a direction carries the end.
type packet struct {
	data []byte
	at   time.Time
	end  error
}

// carry passes on one direction, in order. look sees each piece before it is
// passed on and says whether it may be.
func (c *proxied) carry(from, to net.Conn, direction int, look func([]byte) bool) {
	packets := make(chan packet, 64)
	var reading sync.WaitGroup
	reading.Go(func() { c.read(from, packets) })
	defer reading.Wait()
	for pk := range packets {
		if !c.proxy.gate(c, direction, pk.at) {
			return
		}
		select {
		case <-c.lost:
			if pk.end != nil {
				<-c.closed // the end is lost, too: nobody learns of it
				return
			}
			continue
		default:
		}
		switch {
		case pk.end == nil:
			if !look(pk.data) {
				return
			}
			if _, err := to.Write(pk.data); err != nil {
				c.reset()
				return
			}
		case errors.Is(pk.end, io.EOF):
			if tcp, ok := to.(*net.TCPConn); ok {
				tcp.CloseWrite() // the other side has ended already
			}
		default:
			c.reset()
		}
	}
}

func (c *proxied) read(from net.Conn, packets chan<- packet) {
	defer close(packets)
	for {
		buffer := make([]byte, 32<<10)
		n, err := from.Read(buffer)
		c.proxy.mu.Lock()
		at := time.Now().Add(c.proxy.delay)
		c.proxy.mu.Unlock()
		for _, pk := range []packet{{data: buffer[:n], at: at}, {at: at, end: err}} {
			if len(pk.data) == 0 && pk.end == nil {
				continue
			}
			select {
			case packets <- pk:
			case <-c.closed:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// request is called with the head of each request before any of it is passed
// on, and says whether it may be.
func (c *proxied) request(r *http.Request) bool {
	due := c.proxy.takeCut(r)
	switch {
	case due == nil:
		return true
	case due.at == Before:
		c.carryOut(due)
		return false
	}
	c.mu.Lock()
	c.cut = due
	c.mu.Unlock()
	return true
}

// reply lets a piece of a reply pass, or carries out the order to lose it.
func (c *proxied) reply([]byte) bool {
	c.mu.Lock()
	due := c.cut
	c.mu.Unlock()
	if due == nil {
		return true
	}
	c.carryOut(due)
	return false
}

func (c *proxied) carryOut(due *cut) {
	if due.do != nil {
		due.do()
	}
	c.reset()
	close(due.done)
}
