package system

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"
)

// network joins the machines: connections in memory that can go wrong.
type network struct {
	tell func(format string, a ...any)

	mu     sync.Mutex
	rng    *rand.Rand // guarded by mu
	server *listener  // nil while none listens
	links  []*link
	away   map[string]fate // machines that are cut off
	calm   bool            // nothing goes wrong
	count  map[string]int  // of what went wrong
}

// fate is how a machine is cut off.
type fate int

const (
	refused   fate = iota + 1 // connections end and cannot be made
	swallowed                 // what is sent is lost and nobody is told
)

func newNetwork(rng *rand.Rand, tell func(string, ...any)) *network {
	return &network{rng: rng, tell: tell, away: map[string]fate{}, count: map[string]int{}}
}

// listener is where one life of the server takes its connections.
type listener struct {
	net    *network
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (n *network) listen() *listener {
	l := &listener{net: n, conns: make(chan net.Conn), closed: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server = l
	return l
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }

// link is one connection: two pipes with the wire between them.
type link struct {
	from   string
	client net.Conn // the wire's end of the client's pipe
	server net.Conn // nil when it leads nowhere
	plan   plan

	mu    sync.Mutex
	holed bool
}

// plan is what goes wrong with a connection: after so many bytes in a direction
// it is cut or swallows the rest. -1: never.
type plan struct {
	up, down int
	hole     bool
	late     time.Duration // most, of each piece
}

func (l *link) swallows() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holed
}

func (l *link) hole() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holed = true
}

func (l *link) close() {
	_ = l.client.Close()
	if l.server != nil {
		_ = l.server.Close()
	}
}

// dialer makes a machine's connections; whatever the address is, they lead to
// the server.
func (n *network) dialer(from string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		own, wire := net.Pipe()
		l := &link{from: from, client: wire, plan: plan{up: -1, down: -1}}
		n.mu.Lock()
		to := n.server
		how := n.away[from]
		if !n.calm && from != people {
			l.plan = n.draw()
		}
		if how == swallowed {
			to, l.holed = nil, true
		}
		n.mu.Unlock()
		if how == refused || to == nil && how != swallowed {
			_ = own.Close()
			return nil, errors.New("connection refused")
		}
		if to != nil {
			var theirs net.Conn
			l.server, theirs = net.Pipe()
			select {
			case to.conns <- theirs:
			case <-to.closed:
				_, _, _ = own.Close(), l.server.Close(), theirs.Close()
				return nil, errors.New("connection refused")
			case <-ctx.Done():
				_, _, _ = own.Close(), l.server.Close(), theirs.Close()
				return nil, ctx.Err()
			}
			go n.carry(l, l.server, l.client, l.plan.down)
		}
		n.mu.Lock()
		n.links = append(n.links, l)
		n.mu.Unlock()
		go n.carry(l, l.client, l.server, l.plan.up)
		return own, nil
	}
}

// people is the machine from which the test looks: nothing goes wrong with its
// connections but what befalls the server.
const people = "people"

func (n *network) draw() plan {
	p := plan{up: -1, down: -1}
	r := n.rng
	after := r.IntN(100 << r.IntN(8)) // mostly in the first requests
	switch k := r.IntN(100); {
	case k < 15:
		p.up = after
	case k < 30:
		p.down = after
	case k < 37:
		p.up, p.hole = after, true
	case k < 45:
		p.down, p.hole = after, true
	}
	switch k := r.IntN(100); {
	case k < 20:
		p.late = 200 * time.Millisecond
	case k < 24:
		p.late = 4 * time.Second
	}
	return p
}

// carry takes bytes from one end to the other until one is closed.
func (n *network) carry(l *link, from, to net.Conn, most int) {
	defer func() {
		if l.swallows() {
			_ = from.Close() // the other end hears nothing
			return
		}
		l.close()
	}()
	b := make([]byte, 16<<10)
	for {
		k, err := from.Read(b)
		if err != nil {
			return
		}
		if l.plan.late > 0 {
			pass(n.upTo(l.plan.late))
		}
		if most >= 0 {
			if most -= k; most < 0 {
				k += most
				n.wrong(l)
				if !l.plan.hole {
					if k > 0 && to != nil {
						_, _ = to.Write(b[:k])
					}
					return
				}
				l.hole()
				most = -1
			}
		}
		if to == nil || l.swallows() {
			continue
		}
		if _, err := to.Write(b[:k]); err != nil {
			return
		}
	}
}

func (n *network) upTo(most time.Duration) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Duration(n.rng.Int64N(int64(most)))
}

func (n *network) wrong(l *link) {
	what := "connection cut"
	if l.plan.hole {
		what = "connection swallows"
	}
	n.fault(what)
	n.tell("%s: %s", l.from, what)
}

// fault counts something that went wrong.
func (n *network) fault(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.count[what]++
}

// cutOff cuts a machine off; 0 joins it again. Connections that swallowed are
// ended then.
func (n *network) cutOff(machine string, how fate) {
	n.mu.Lock()
	n.away[machine] = how
	var hit []*link
	n.links = slices.DeleteFunc(n.links, func(l *link) bool {
		mine := l.from == machine
		if mine {
			hit = append(hit, l)
		}
		return mine && how != swallowed
	})
	n.mu.Unlock()
	for _, l := range hit {
		if how == swallowed {
			l.hole()
		} else {
			l.close()
		}
	}
}

// down ends every connection; nobody listens any more.
func (n *network) down() {
	n.mu.Lock()
	links := n.links
	n.links, n.server = nil, nil
	n.mu.Unlock()
	for _, l := range links {
		l.close()
	}
}

// mute lets every connection swallow what the server still says.
func (n *network) mute() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		l.hole()
	}
}

// heal repairs everything.
func (n *network) heal() {
	n.mu.Lock()
	n.calm = true
	n.away = map[string]fate{}
	links := n.links
	n.links = nil
	n.mu.Unlock()
	for _, l := range links {
		l.close()
	}
}
