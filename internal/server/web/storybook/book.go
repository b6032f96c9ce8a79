// Package storybook shows every page of the site with sample data, without a
// server behind it: to look at, to test, and to compare after a change. Its
// Book is a whole source of data for package web, kept in memory.
package storybook

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/web"
)

// Token is the admin token that the book accepts at the sign-in page.
const Token = "sample-token"

// Session is the value of a session cookie that the book accepts.
const Session = "sample-session"

// Book holds what the pages show. It is safe for concurrent use; change it
// through Edit.
type Book struct {
	mu       sync.Mutex
	now      func() time.Time
	data     Data
	watchers map[chan web.Hint]web.Topic
	did      []string
}

// Data is the content of a book.
type Data struct {
	Runs    []protocol.Run // newest first
	Jobs    map[ci.JobID]protocol.Job
	Stories map[ci.JobID]protocol.Explanation
	Runners []protocol.Runner
	Letters []protocol.DeadLetter
	Logs    map[ci.JobID]*Log
	// LastGood is the run before a broken one.
	LastGood map[ci.RunID]protocol.RunSummary
}

// New returns a book of the data, at the time that now tells.
func New(data Data, now func() time.Time) *Book {
	return &Book{data: data, now: now, watchers: map[chan web.Hint]web.Topic{}}
}

// Handler returns the site over the book, with the routes of the API that the
// pages' modules use.
func (b *Book) Handler(log *slog.Logger, version string) http.Handler {
	site := web.New(web.Config{Reader: b, Actions: b, Auth: b, Log: log, Now: b.now, Version: version})
	mux := http.NewServeMux()
	for _, r := range site.Routes() {
		mux.Handle(r.Mux(), r.Handler)
	}
	mux.Handle(protocol.RouteJobLogLines, site.Headers(http.HandlerFunc(b.serveLines)))
	mux.Handle(protocol.RouteJobLogEvents, site.Headers(http.HandlerFunc(b.serveEvents)))
	mux.Handle(protocol.RouteJobLog, site.Headers(http.HandlerFunc(b.serveRaw)))
	return http.NewCrossOriginProtection().Handler(mux)
}

// Edit changes the data and hints at the change to all who watch.
func (b *Book) Edit(f func(*Data)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.data)
	for c := range b.watchers {
		select {
		case c <- web.Hint{}:
		default: // a hint is already there
		}
	}
}

// Did lists the actions that were asked for, in order.
func (b *Book) Did() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.did)
}

// Watching returns how many watch for hints now.
func (b *Book) Watching() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.watchers)
}

// Overview implements web.Reader.
func (b *Book) Overview(context.Context, auth.Viewer) (web.Overview, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := web.Overview{Empty: len(b.data.Runs) == 0}
	for _, r := range b.data.Runs {
		switch {
		case r.State == ci.StateRunning || r.State == ci.StateCancelling:
			o.RunningCount++
			o.Running = append(o.Running, r.RunSummary)
		case r.State == ci.StateFinished && len(o.Recent) < 8:
			o.Recent = append(o.Recent, r.RunSummary)
		}
		if good, ok := b.data.LastGood[r.ID]; ok {
			o.Broken = append(o.Broken, web.BrokenRun{Run: r.RunSummary, LastGood: &good})
		}
		for _, j := range r.JobList {
			if j.Waiting != nil && j.State != ci.StateFinished && j.Waiting.Code != "needs" {
				o.WaitingCount++
				if len(o.Waiting) < 10 {
					o.Waiting = append(o.Waiting, web.WaitingJob{Job: j, Run: r.RunSummary})
				}
			}
		}
	}
	for _, r := range b.data.Runners {
		switch r.Status {
		case "online":
			o.Runners.Online++
			o.Runners.Slots += r.Slots
			o.Runners.Busy += len(r.Running)
		case "draining":
			o.Runners.Draining++
		case "fenced":
			o.Runners.Fenced++
		default:
			o.Runners.Offline++
		}
	}
	o.Runners.DeadLetters = len(b.data.Letters)
	return o, nil
}

// Runs implements web.Reader.
func (b *Book) Runs(_ context.Context, _ auth.Viewer, f web.RunFilter) (protocol.Page[protocol.RunSummary], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var page protocol.Page[protocol.RunSummary]
	skip := f.After != ""
	for _, r := range b.data.Runs {
		if skip {
			skip = string(r.ID) != f.After
			continue
		}
		if f.Repo != "" && r.Repo.Name != f.Repo && string(r.Repo.ID) != f.Repo || f.State != "" && r.State != f.State ||
			f.Conclusion != "" && r.Conclusion != f.Conclusion || !strings.HasPrefix(r.CommitSHA, f.Commit) {
			continue
		}
		if len(page.Items) == f.Limit {
			page.Next = string(page.Items[len(page.Items)-1].ID)
			break
		}
		page.Items = append(page.Items, r.RunSummary)
	}
	return page, nil
}

// Run implements web.Reader.
func (b *Book) Run(_ context.Context, _ auth.Viewer, id ci.RunID) (protocol.Run, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.data.Runs {
		if r.ID == id {
			return r, nil
		}
	}
	return protocol.Run{}, ci.Errorf(ci.ErrNotFound, "There is no run %s, or you may not see it.", id)
}

// Job implements web.Reader.
func (b *Book) Job(_ context.Context, _ auth.Viewer, id ci.JobID) (protocol.Job, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if j, ok := b.data.Jobs[id]; ok {
		return j, nil
	}
	return protocol.Job{}, ci.Errorf(ci.ErrNotFound, "There is no job %s, or you may not see it.", id)
}

// Explain implements web.Reader.
func (b *Book) Explain(_ context.Context, _ auth.Viewer, id ci.JobID) (protocol.Explanation, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.Stories[id], nil
}

// LogLines implements web.Reader.
func (b *Book) LogLines(_ context.Context, _ auth.Viewer, id ci.JobID, q web.LogQuery) (protocol.LogSlice, error) {
	b.mu.Lock()
	l := b.data.Logs[id]
	b.mu.Unlock()
	if l == nil {
		return protocol.LogSlice{}, ci.Errorf(ci.ErrGone, "The log of this job is no longer kept.")
	}
	return l.Lines(q), nil
}

// Runners implements web.Reader.
func (b *Book) Runners(context.Context, auth.Viewer) ([]protocol.Runner, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.Runners, nil
}

// DeadLetters implements web.Reader.
func (b *Book) DeadLetters(context.Context, auth.Viewer, string) (protocol.Page[protocol.DeadLetter], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return protocol.Page[protocol.DeadLetter]{Items: b.data.Letters}, nil
}

// Watch implements web.Reader.
func (b *Book) Watch(ctx context.Context, _ auth.Viewer, t web.Topic) (<-chan web.Hint, error) {
	c := make(chan web.Hint, 1)
	b.mu.Lock()
	b.watchers[c] = t
	b.mu.Unlock()
	context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.watchers, c)
		close(c)
	})
	return c, nil
}

func (b *Book) note(words ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.did = append(b.did, strings.Join(words, " "))
}

// Cancel implements web.Actions.
func (b *Book) Cancel(_ context.Context, v auth.Viewer, id ci.RunID) error {
	b.note(v.Actor, "cancel", string(id))
	return nil
}

// Retry implements web.Actions.
func (b *Book) Retry(_ context.Context, v auth.Viewer, id ci.RunID, failed bool, key string) (ci.RunID, error) {
	note := []string{v.Actor, "retry", string(id), strconv.FormatBool(failed)}
	if key != "" {
		note = append(note, "as "+key)
	}
	b.note(note...)
	return id, nil
}

// DrainRunner implements web.Actions.
func (b *Book) DrainRunner(_ context.Context, v auth.Viewer, id ci.RunnerID) error {
	b.note(v.Actor, "drain", string(id))
	return nil
}

// FenceRunner implements web.Actions.
func (b *Book) FenceRunner(_ context.Context, v auth.Viewer, id ci.RunnerID) error {
	b.note(v.Actor, "fence", string(id))
	return nil
}

// RequeueDeadLetter implements web.Actions.
func (b *Book) RequeueDeadLetter(_ context.Context, v auth.Viewer, id ci.JobID) (ci.RunID, error) {
	b.note(v.Actor, "requeue", string(id))
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.IndexFunc(b.data.Letters, func(l protocol.DeadLetter) bool { return l.Job == id })
	if i < 0 {
		return "", ci.Errorf(ci.ErrNotFound, "There is no dead letter of job %s.", id)
	}
	return cmp.Or(b.data.Letters[i].Requeued, b.data.Letters[i].Run), nil
}

// SignIn implements web.Auth.
func (b *Book) SignIn(_ context.Context, token string) (web.Session, error) {
	if token != Token {
		return web.Session{}, ci.Errorf(ci.ErrUnauthorized, "This is not the admin token of this server.")
	}
	return web.Session{Value: Session}, nil
}

// Viewer implements web.Auth.
func (b *Book) Viewer(_ context.Context, value string) (auth.Viewer, error) {
	if value != Session {
		return auth.Viewer{}, ci.Errorf(ci.ErrUnauthorized, "Your session has ended. Sign in again.")
	}
	return auth.Viewer{Org: "org_sample", Actor: "admin", Admin: true}, nil
}

// SignOut implements web.Auth.
func (b *Book) SignOut(context.Context, string) error {
	b.note("sign out")
	return nil
}
