package server

import (
	"context"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/web"
)

// pages is what the pages read.
type pages struct {
	*reader.Reader
	logs   *logs.Service
	engine *engine.Engine
}

var _ web.Reader = pages{}

// Overview implements web.Reader.
func (p pages) Overview(ctx context.Context, v auth.Viewer) (web.Overview, error) {
	o, err := p.Reader.Overview(ctx, v)
	if err != nil {
		return web.Overview{}, err
	}
	out := web.Overview{
		Running: o.Running, RunningCount: o.RunningCount, WaitingCount: o.WaitingCount, Recent: o.Recent, Empty: o.Empty,
		Runners: web.FleetCount{
			Online: o.Runners.Online, Offline: o.Runners.Offline, Draining: o.Runners.Draining, Fenced: o.Runners.Fenced,
			Slots: o.Runners.Slots, Busy: o.Runners.Busy, DeadLetters: o.DeadLetters,
		},
	}
	for _, w := range o.Waiting {
		out.Waiting = append(out.Waiting, web.WaitingJob{Job: w.Job, Run: w.Run})
	}
	for _, b := range o.Broken {
		out.Broken = append(out.Broken, web.BrokenRun{Run: b.Run, LastGood: b.LastGood})
	}
	return out, nil
}

// Runs implements web.Reader.
func (p pages) Runs(ctx context.Context, v auth.Viewer, f web.RunFilter) (protocol.Page[protocol.RunSummary], error) {
	return p.Reader.Runs(ctx, v, reader.RunFilter(f))
}

// LogLines implements web.Reader.
func (p pages) LogLines(ctx context.Context, v auth.Viewer, id ci.JobID, q web.LogQuery) (protocol.LogSlice, error) {
	return p.logs.Lines(ctx, v, logs.Query{Job: id, Epoch: q.Attempt, Step: q.Step, From: q.From, Tail: int64(q.Tail), Limit: q.Limit, Search: q.Query})
}

// Runners implements web.Reader.
func (p pages) Runners(ctx context.Context, v auth.Viewer) ([]protocol.Runner, error) {
	return p.AllRunners(ctx, v)
}

// DeadLetters implements web.Reader.
func (p pages) DeadLetters(ctx context.Context, v auth.Viewer, after string) (protocol.Page[protocol.DeadLetter], error) {
	return p.Reader.DeadLetters(ctx, v, after, 0)
}

// Watch implements web.Reader.
func (p pages) Watch(ctx context.Context, v auth.Viewer, t web.Topic) (<-chan web.Hint, error) {
	run := t.Run
	if t.Job != "" {
		job, err := p.Job(ctx, v, t.Job)
		if err != nil {
			return nil, err
		}
		run = job.Run.ID
	}
	if run != "" {
		if _, err := p.Summary(ctx, v, run); err != nil {
			return nil, err
		}
	}
	changes, stop := p.engine.WatchRuns(v.Org, run)
	look := time.Duration(0)
	if t.Fleet {
		look = fleetLook
	}
	return hints(ctx, changes, stop, look), nil
}

// fleetLook is how often a page of the fleet is told to look: runners come, fall
// silent and go without a run that changes, and nothing is written for it.
const fleetLook = 5 * time.Second

// hints passes changes on until ctx or the changes end, and with a time to look one
// of its own each time.
func hints(ctx context.Context, changes <-chan ci.RunID, stop func(), look time.Duration) <-chan web.Hint {
	out := make(chan web.Hint)
	go func() {
		defer close(out)
		defer stop()
		var due <-chan time.Time
		if look > 0 {
			t := time.NewTicker(look)
			defer t.Stop()
			due = t.C
		}
		for {
			var hint web.Hint
			select {
			case <-ctx.Done():
				return
			case id, ok := <-changes:
				if !ok {
					return
				}
				hint.Run = id
			case <-due:
			}
			select {
			case out <- hint:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// actions is what the forms do.
type actions struct{ engine *engine.Engine }

var _ web.Actions = actions{}

// Cancel implements web.Actions.
func (a actions) Cancel(ctx context.Context, v auth.Viewer, id ci.RunID) error {
	return a.engine.Cancel(ctx, v.Org, v.Actor, id)
}

// Retry implements web.Actions.
func (a actions) Retry(ctx context.Context, v auth.Viewer, id ci.RunID, failed bool, key string) (ci.RunID, error) {
	return a.engine.Retry(ctx, engine.RetryRequest{
		Org: v.Org, Actor: v.Actor, Run: id, Failed: failed,
		IdempotencyKey: key, RequestDigest: engine.Digest([]any{id, failed}),
	})
}

// DrainRunner implements web.Actions.
func (a actions) DrainRunner(ctx context.Context, v auth.Viewer, id ci.RunnerID) error {
	if err := admin(v); err != nil {
		return err
	}
	return a.engine.DrainRunner(ctx, v.Org, v.Actor, id)
}

// FenceRunner implements web.Actions.
func (a actions) FenceRunner(ctx context.Context, v auth.Viewer, id ci.RunnerID) error {
	if err := admin(v); err != nil {
		return err
	}
	return a.engine.FenceRunner(ctx, v.Org, v.Actor, id)
}

// RequeueDeadLetter implements web.Actions.
func (a actions) RequeueDeadLetter(ctx context.Context, v auth.Viewer, id ci.JobID) (ci.RunID, error) {
	if err := admin(v); err != nil {
		return "", err
	}
	return a.engine.Requeue(ctx, v.Org, v.Actor, id)
}

func admin(v auth.Viewer) error {
	if !v.Admin {
		return ci.Errorf(ci.ErrForbidden, "this needs an admin credential")
	}
	return nil
}

// signIn is the pages' way to sessions.
type signIn struct{ auth *auth.Auth }

var _ web.Auth = signIn{}

// SignIn implements web.Auth.
func (s signIn) SignIn(ctx context.Context, token string) (web.Session, error) {
	value, expires, err := s.auth.SignIn(ctx, token)
	return web.Session{Value: value, Expires: expires}, err
}

// Viewer implements web.Auth.
func (s signIn) Viewer(ctx context.Context, session string) (auth.Viewer, error) {
	return s.auth.Viewer(ctx, session)
}

// SignOut implements web.Auth: a session ends with its cookie, or with the token
// that it was made of.
func (s signIn) SignOut(context.Context, string) error { return nil }
