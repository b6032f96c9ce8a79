package runner

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// poller asks for jobs, only while a slot is free. Idle, it holds one long
// poll. When that brings a job there may be more: it asks with more calls at
// once, which the server answers immediately, until one comes back empty.
type poller struct {
	server *link
	id     *identity
	log    *slog.Logger
	ids    ci.IDSource
	hello  func() protocol.OpenSession // what the runner offers, and what it proved to have ended
	opened func(said protocol.OpenSession, got protocol.SessionOpened)
	start  func(claimed) // runs a job; the poller is told by done
	ready  func(context.Context) error
	// drained is called when the server asks an idle runner to drain; may be called often.
	drained func()
	done    chan struct{} // a job's slot is free

	free    int // slots without a job or a poll; owned by run
	busy    int // slots with a job; owned by run
	session atomic.Pointer[protocol.SessionOpened]
}

// claimed is a job that this runner owns.
type claimed struct {
	ticket  *protocol.Ticket
	granted time.Time // at the earliest
	limits  protocol.SessionOpened
	// unwanted is set when the ticket came after the runner was told to drain.
	unwanted bool
}

const (
	maxPolls    = 8 // calls at once while there is work
	pollHold    = 30 * time.Second
	settleLimit = 5 * time.Second // for what must be said before the process ends
)

// run asks for jobs until ctx is done, which means drain, or the server refuses
// this runner for good. It returns when all slots are free again.
func (p *poller) run(ctx context.Context) error {
	err := p.ask(ctx)
	for p.busy > 0 {
		<-p.done
		p.busy--
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // it was told to stop
	}
	return err
}

func (p *poller) ask(ctx context.Context) error {
	var wait backoff
	for ctx.Err() == nil {
		said, opened, err := p.open(ctx)
		if err != nil {
			return err
		}
		p.session.Store(&opened)
		p.opened(said, opened)
		began := time.Now()
		err = p.claims(ctx, opened)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to stop
		}
		p.log.WarnContext(ctx, "session ended: opening another", slog.Any("error", err))
		if time.Since(began) > time.Minute {
			wait.reset()
		}
		if pause(ctx, wait.delay(err)) != nil {
			return nil //nolint:nilerr // it was told to stop
		}
	}
	return nil
}

// open opens a session, registering first where that is needed. It repeats
// until the server answers; what a repeat cannot cure is returned.
func (p *poller) open(ctx context.Context) (hello protocol.OpenSession, opened protocol.SessionOpened, err error) {
	hello = p.hello()
	hello.RequestID = p.ids.New(ci.PrefixRequest)
	var wait backoff
	refusals := 0
	for {
		have := p.id.current()
		err = error(ci.Errorf(ci.ErrUnauthorized, "no credential"))
		if have.Credential != "" {
			try, cancel := context.WithTimeout(ctx, callLimit)
			hello.At = time.Now()
			opened, err = p.server.call().OpenSession(try, hello)
			cancel()
			switch {
			case err == nil && opened.Session != "":
				return hello, opened, nil
			case err == nil && opened.Latest != hello.After:
				hello.After = opened.Latest
				continue
			case err == nil:
				err = ci.Errorf(ci.ErrUnavailable, "the server opens no session and says no reason")
			}
		}
		if errors.Is(err, ci.ErrUnauthorized) && refusals < 3 {
			if have.Credential != "" {
				refusals++
			}
			if err = p.id.renew(ctx, have.Credential); err == nil {
				continue
			}
			if errors.Is(err, ci.ErrUnauthorized) {
				return hello, opened, err
			}
		}
		if ctx.Err() != nil {
			return hello, opened, context.Cause(ctx)
		}
		if errors.Is(err, ci.ErrUnauthorized) || !transient(err) {
			return hello, opened, err
		}
		d := wait.delay(err)
		p.log.WarnContext(ctx, "the server does not answer", slog.Duration("again_in", d), slog.Any("error", err))
		if stopped := pause(ctx, d); stopped != nil {
			return hello, opened, stopped
		}
	}
}

// answer is what one poll brought.
type answer struct {
	ticket *protocol.Ticket
	asked  time.Time // start of the first request
	early  bool      // an empty answer that came long before the poll's time
	err    error
}

// claims keeps polls open until ctx is done or the session is refused, and
// returns when none is open.
func (p *poller) claims(ctx context.Context, session protocol.SessionOpened) error {
	var (
		answers = make(chan answer)
		open    int
		width   = 1
		refused error
		calm    backoff // between empty answers that came too early
		resume  = time.NewTimer(0)
		hold    = min(pollHold, session.LeaseTTL.Std()/2)
		told    = sync.OnceFunc(func() { p.tell(ctx, session.Session, false) })
	)
	defer resume.Stop()
	<-resume.C
	paused := false
	for {
		for ctx.Err() == nil && refused == nil && !paused && open < width && p.free > 0 {
			wait := hold
			if open > 0 {
				wait = 0
			}
			open, p.free = open+1, p.free-1
			idle := p.busy == 0
			go func() {
				a := p.poll(ctx, session.Session, wait, told)
				if idle && a.early {
					p.attend(ctx, session.Session)
				}
				answers <- a
			}()
		}
		if open == 0 && (ctx.Err() != nil || refused != nil) {
			if ctx.Err() != nil {
				told()
			}
			return refused
		}
		drain := ctx.Done()
		if ctx.Err() != nil {
			drain = nil // the open polls are settling
		}
		select {
		case <-drain:
		case <-resume.C:
			paused = false
		case <-p.done:
			p.free, p.busy = p.free+1, p.busy-1
		case a := <-answers:
			open--
			switch {
			case a.ticket != nil:
				p.busy++
				width = min(2*width, maxPolls)
				calm.reset()
				p.start(claimed{ticket: a.ticket, granted: a.asked, limits: session, unwanted: ctx.Err() != nil})
			case a.err != nil:
				p.free++
				refused = a.err
			default:
				p.free++
				width = 1
				if !a.early {
					calm.reset()
				} else if open == 0 && !paused {
					paused = true
					resume.Reset(calm.delay(nil))
				}
			}
		}
	}
}

// poll asks for one job. A lost reply is asked for again under the same request
// ID, so that a job the server gave is never left behind; that also holds when
// the runner is told to drain meanwhile: then the server is told first, and the
// last repeat does not wait.
func (p *poller) poll(ctx context.Context, session ci.SessionID, hold time.Duration, told func()) answer {
	in := protocol.Claim{Session: session, RequestID: p.ids.New(ci.PrefixRequest), Wait: ci.Duration(hold)}
	if p.ready(ctx) != nil {
		return answer{}
	}
	a := answer{asked: time.Now()}
	var wait backoff
	for ctx.Err() == nil {
		start := time.Now()
		try, cancel := context.WithTimeout(ctx, hold+callLimit)
		a.ticket, a.err = p.server.call().Claim(try, in)
		cancel()
		switch {
		case a.err == nil:
			a.early = a.ticket == nil && hold > 0 && time.Since(start) < hold/2
			return a
		case errors.Is(a.err, ci.ErrUnauthorized) || !transient(a.err):
			// Also when a lease was given and is over: its slot counts as taken until
			// the next session says that nothing of it is here.
			return a
		}
		if ctx.Err() == nil {
			_ = pause(ctx, wait.delay(a.err))
		}
	}
	told()
	settle, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	in.Wait = 0
	a.err = insist(settle, quick(), func(ctx context.Context) (err error) {
		a.ticket, err = p.server.call().Claim(ctx, in)
		return err
	})
	return a
}

// attend asks whether an operator wants this runner to drain. With a lease its
// heartbeat says so; an idle runner has none, and asks when a poll is answered with
// nothing before its time: that is how the server answers one that is to drain.
func (p *poller) attend(ctx context.Context, session ci.SessionID) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	reply, err := p.server.call().Heartbeat(ctx, protocol.Heartbeat{Session: session, Leases: []ci.LeaseRef{}})
	if err == nil && reply.Drain { // what an error says, the next poll hears too
		p.drained()
	}
}

// tell tells the server that this session takes nothing new, or with gone that
// it is over. It is a courtesy: the server finds out by itself.
func (p *poller) tell(ctx context.Context, session ci.SessionID, gone bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	err := insist(ctx, quick(), func(ctx context.Context) error {
		return p.server.call().Drain(ctx, protocol.Drain{Session: session, Gone: gone})
	})
	if err != nil {
		p.log.WarnContext(ctx, "the server was not told of the drain", slog.Any("error", err))
	}
}
