package runner

import (
	"sync/atomic"
	"time"

	"forgeci/internal/protocol"
)

// Time limits of one try of a call.
const (
	callLimit = 15 * time.Second
	sendLimit = 30 * time.Second // of a call with a body of up to a MiB
	// firstLimit is enough for any call that is answered from the database. Tries
	// that follow get more, since a server may also be slow.
	firstLimit = 5 * time.Second
	// slowLink is how fast a body is sent at least, bytes a second.
	slowLink = 64 << 10
)

// limits bounds the tries of a call: the first, and the longest; each try that
// was cut off by its limit gives twice as long to the next.
type limits struct{ first, most time.Duration }

// quick are the limits of a call that changes some rows. A connection that is
// dead without anybody having said so costs the first of them only.
func quick() limits { return limits{firstLimit, callLimit} }

// sending are the limits of a call with a body of the size.
func sending(size int) limits {
	return limits{min(firstLimit+time.Duration(size)*time.Second/slowLink, sendLimit), sendLimit}
}

// always is the same limit for every try.
func always(d time.Duration) limits { return limits{d, d} }

// next is the limit after a try that was cut off.
func (l limits) next() limits { return limits{min(2*l.first, l.most), l.most} }

// link is the way to the server with the credential of the moment: a runner
// whose credential is refused registers again while its jobs go on.
type link struct {
	base    *protocol.Client
	current atomic.Pointer[protocol.Client]
}

func newLink(base *protocol.Client) *link {
	l := &link{base: base}
	l.current.Store(base)
	return l
}

// use makes all further calls carry the credential.
func (l *link) use(credential string) { l.current.Store(l.base.WithToken(credential)) }

// freshen makes the next call open a connection of its own: those that lie idle
// may be dead.
func (l *link) freshen() { l.base.CloseIdle() }

// call returns the client to make a call with.
func (l *link) call() *protocol.Client { return l.current.Load() }
