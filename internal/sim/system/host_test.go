package system

import (
	"context"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"forgeci/internal/protocol"
	"forgeci/internal/runner"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/workspace"
	"forgeci/internal/server"
)

// The installation's settings.
const (
	ttl        = 10 * time.Second
	infraMost  = 3
	retriesMax = 2
)

// client makes a client of the server on a machine.
func (w *world) client(machine, token string) *protocol.Client {
	transport := protocol.NewTransport()
	transport.Proxy, transport.DialContext = nil, w.net.dialer(machine)
	w.transports = append(w.transports, transport)
	c, err := protocol.NewClient(protocol.ClientConfig{BaseURL: "http://server", Token: token, HTTP: &http.Client{Transport: transport}})
	w.must(err)
	return c
}

// serve starts the server over its directory.
func (w *world) serve() {
	s, err := server.New(context.Background(), server.Config{
		DataDir: w.dir("server"), Listener: w.net.listen(), Database: w.database, LeaseTTL: ttl, Log: w.log("server"),
		Alone: true,                                           // a line is read from the kernel, which stops the bubble's clock
		Now:   func() int64 { return time.Now().UnixMicro() }, // PostgreSQL's own clock is outside the bubble
	})
	w.must(err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-s.Started()
	w.tokens.admin, w.tokens.registration = s.Tokens()
	w.stopServer = func() {
		stop()
		if err := <-done; err != nil {
			w.broken("the server ends with %v", err)
		}
	}
	w.tell("the server starts")
}

// halt stops the server; hard, its callers hear nothing any more.
func (w *world) halt(hard bool) {
	w.tell("the server stops, hard: %t", hard)
	if hard {
		w.net.mute()
	}
	w.stopServer()
	w.net.down()
}

// host is a machine with a runner.
type host struct {
	w     *world
	name  string
	slots int

	mu      sync.Mutex
	stopped []time.Time // when it was told to give up what it had

	runner *runner.Runner
	ended  chan error
	root   *workspace.Root
}

// start begins a process life of the runner.
func (h *host) start() {
	w := h.w
	root, err := workspace.Open(filepath.Join(w.dir(h.name), "jobs"), w.log(h.name))
	w.must(err)
	r, err := runner.New(runner.Config{
		Client: w.client(h.name, ""), RegistrationToken: w.registration, DataDir: filepath.Join(w.dir(h.name), "data"),
		Name: h.name, Slots: h.slots, Executors: []executor.Executor{&fake{scripts: w.scripts, host: h.name}},
		Workspaces: root, MinFree: 1, FlushTimeout: 20 * time.Minute, Log: w.log(h.name),
	})
	w.must(err)
	h.root, h.runner, h.ended = root, r, make(chan error, 1)
	w.tell("%s starts", h.name)
	go func() { h.ended <- r.Run(context.Background()) }()
}

// stop ends the runner: it hands over what it has, or finishes it.
func (h *host) stop(drain bool) {
	h.w.tell("%s stops, drain: %t", h.name, drain)
	if drain {
		h.runner.Drain()
		select {
		case err := <-h.ended:
			h.over(err)
			return
		case <-time.After(40 * time.Second): // somebody gets impatient
		}
	}
	h.mu.Lock()
	h.stopped = append(h.stopped, time.Now())
	h.mu.Unlock()
	h.runner.Stop()
	h.over(<-h.ended)
}

func (h *host) over(err error) {
	if err != nil {
		h.w.broken("%s: the runner ends with %v", h.name, err)
	}
	h.w.must(h.root.Close())
	h.w.tell("%s has stopped", h.name)
}

// gaveUp reports whether the runner was told to stop between two instants.
func (h *host) gaveUp(from, to time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, at := range h.stopped {
		if !at.Before(from) && !at.After(to) {
			return true
		}
	}
	return false
}
