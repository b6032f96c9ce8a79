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
)

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

// call returns the client to make a call with.
func (l *link) call() *protocol.Client { return l.current.Load() }
