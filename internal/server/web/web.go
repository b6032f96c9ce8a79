// Package web is the pages for people: server-rendered HTML that works without
// script, made live by one event stream per page and small modules for the log
// viewer and the graph.
//
// It reads through Reader and acts through Actions; every call takes the
// viewer, so what a page can show is decided where the data is. Pages hold no
// inline script or style: the content security policy of Headers forbids both,
// and Trusted Types forbid the modules to make HTML out of text.
package web

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
)

// Reader is what pages read. Every method answers only what the viewer may
// see: an object of another tenant is ci.ErrNotFound. Methods may be called at
// any time by many requests.
type Reader interface {
	// Overview answers what is going on now.
	Overview(ctx context.Context, v auth.Viewer) (Overview, error)
	// Runs answers a page of runs, newest first.
	Runs(ctx context.Context, v auth.Viewer, f RunFilter) (protocol.Page[protocol.RunSummary], error)
	Run(ctx context.Context, v auth.Viewer, id ci.RunID) (protocol.Run, error)
	Job(ctx context.Context, v auth.Viewer, id ci.JobID) (protocol.Job, error)
	Explain(ctx context.Context, v auth.Viewer, id ci.JobID) (protocol.Explanation, error)
	// LogLines answers a window of a job's log, never more than q.Limit lines.
	LogLines(ctx context.Context, v auth.Viewer, id ci.JobID, q LogQuery) (protocol.LogSlice, error)
	// Runners answers all runners, those that are present first.
	Runners(ctx context.Context, v auth.Viewer) ([]protocol.Runner, error)
	// DeadLetters answers a page, newest first.
	DeadLetters(ctx context.Context, v auth.Viewer, after string) (protocol.Page[protocol.DeadLetter], error)
	// Watch answers a channel of hints about the topic until ctx ends; then, or
	// when the source of hints is lost, the channel is closed. It may coalesce and
	// may hint without cause, but a change committed after the call is hinted at
	// in the end. The permission is checked at the call.
	Watch(ctx context.Context, v auth.Viewer, t Topic) (<-chan Hint, error)
}

// Actions is what the forms of the pages do. Each checks that the viewer may.
type Actions interface {
	Cancel(ctx context.Context, v auth.Viewer, id ci.RunID) error
	// Retry answers the new run: the same for the same key, unless that is empty.
	Retry(ctx context.Context, v auth.Viewer, id ci.RunID, failed bool, key string) (ci.RunID, error)
	DrainRunner(ctx context.Context, v auth.Viewer, id ci.RunnerID) error
	// FenceRunner records that the runner's host is dead and frees its occupancy.
	FenceRunner(ctx context.Context, v auth.Viewer, id ci.RunnerID) error
	// RequeueDeadLetter answers the retry run that was made of it.
	RequeueDeadLetter(ctx context.Context, v auth.Viewer, id ci.JobID) (ci.RunID, error)
}

// Auth turns a token into a session and a session into a viewer.
type Auth interface {
	// SignIn answers the session of a valid token; any other token is
	// ci.ErrUnauthorized.
	SignIn(ctx context.Context, token string) (Session, error)
	// Viewer answers who holds a session value: ci.ErrUnauthorized when it is
	// malformed, expired or revoked.
	Viewer(ctx context.Context, session string) (auth.Viewer, error)
	// SignOut ends a session; an unknown one is no error.
	SignOut(ctx context.Context, session string) error
}

// Session is the content of a browser's session cookie.
type Session struct {
	// Value is signed or random text of cookie characters.
	Value string
	// Expires is when the browser drops it; zero means when it closes.
	Expires time.Time
}

// Overview is the first page: what is going on.
type Overview struct {
	// Running runs, oldest start first, and how many there are in all.
	Running      []protocol.RunSummary
	RunningCount int
	// Waiting jobs with the reason, longest wait first, and how many in all.
	Waiting      []WaitingJob
	WaitingCount int
	// Broken runs: the latest finished run of a workflow on its ref failed and the
	// one before succeeded, or nobody has repaired it since. Newest first.
	Broken []BrokenRun
	// Recent finished runs, newest first.
	Recent  []protocol.RunSummary
	Runners FleetCount
	// Empty is set when the viewer's organisation has no run at all.
	Empty bool
}

// WaitingJob is a job that has not started, and its run.
type WaitingJob struct {
	Job protocol.JobSummary
	Run protocol.RunSummary
}

// BrokenRun is a failed run after a good one.
type BrokenRun struct {
	Run protocol.RunSummary
	// LastGood is the latest successful run before; nil when it is not known.
	LastGood *protocol.RunSummary
}

// FleetCount counts runners and slots.
type FleetCount struct {
	Online, Offline, Draining, Fenced int
	Slots, Busy                       int
	DeadLetters                       int
}

// RunFilter selects runs. Zero fields select all.
type RunFilter struct {
	Repo       string // name or ID
	State      ci.State
	Conclusion ci.Conclusion
	Commit     string // prefix of the commit SHA
	After      string // Page.Next of the page before
	Limit      int
}

// LogQuery selects lines of a job's log.
type LogQuery struct {
	// Attempt is the epoch; 0 means the latest.
	Attempt int64
	// Step, when set, selects the lines of one step; numbers stay those of the attempt.
	Step *int
	// From is the number of the first line wanted, from 1.
	From int64
	// Tail, when positive, wants the last lines instead.
	Tail  int
	Limit int
	// Query, when set, selects the lines that contain it, from From on.
	Query string
}

// Topic is what a page watches. The zero value means all the viewer may see,
// coarsely: a hint for each run that changes.
type Topic struct {
	Run ci.RunID
	Job ci.JobID
	// Fleet adds runners and dead letters: a hint every few seconds.
	Fleet bool
}

// Hint says that something changed. What it is now is for the reader to ask.
type Hint struct {
	Run ci.RunID `json:"run,omitempty"`
}

// Config is what the pages are made of. Reader, Actions, Auth and Log are required.
type Config struct {
	Reader  Reader
	Actions Actions
	Auth    Auth
	Log     *slog.Logger
	// Now tells the time for ages on pages; nil means time.Now.
	Now func() time.Time
	// Version is shown in the footer.
	Version string
	// URL is where people reach the pages; empty means where each visitor does.
	URL string
	// Secure says that browsers reach the pages by HTTPS: the session cookie then
	// has the __Host- prefix and Secure, and answers carry HSTS. It goes without
	// saying when URL begins with https://. Without it, which
	// is for loopback, the cookie has neither, since not every browser takes a
	// Secure cookie from http://127.0.0.1.
	Secure bool
	// Heartbeat is the time between signs of life on an event stream; 0 means 5 s.
	Heartbeat time.Duration
}

// Route is one route of the pages. The server registers it and gives it a row
// in its table of credentials.
type Route struct {
	// Method and Pattern together are a pattern of net/http.ServeMux; the route of
	// what is at no other address has no method.
	Method, Pattern string
	// Open routes need no session: assets, signing in and out, the theme.
	Open bool
	// Admin routes act on the fleet.
	Admin   bool
	Handler http.Handler
}

// Mux returns the route's pattern for http.ServeMux.
func (r Route) Mux() string { return strings.TrimSpace(r.Method + " " + r.Pattern) }

// Site is the pages. It is safe for concurrent use.
type Site struct {
	cfg    Config
	pages  *pages
	assets *assets
	mux    *http.ServeMux // of all routes
}

// New returns the pages. Templates and assets are part of the binary and
// checked by tests; New cannot fail.
func New(cfg Config) *Site {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	if u, err := url.Parse(cfg.URL); err == nil && u.Scheme == "https" {
		cfg.Secure = true
	}
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = 5 * time.Second
	}
	a := loadAssets()
	s := &Site{cfg: cfg, assets: a, pages: parsePages(a), mux: http.NewServeMux()}
	for _, r := range s.Routes() {
		s.mux.Handle(r.Mux(), r.Handler)
	}
	return s
}

// Routes lists every route of the pages, wrapped in Headers. POST routes rely
// on http.CrossOriginProtection around the server's mux.
func (s *Site) Routes() []Route {
	routes := []Route{
		{Method: http.MethodGet, Pattern: "/{$}", Handler: s.page(s.overview)},
		{Method: http.MethodGet, Pattern: "/runs", Handler: s.page(s.runList)},
		{Method: http.MethodGet, Pattern: "/runs/{run_id}", Handler: s.page(s.runShow)},
		{Method: http.MethodPost, Pattern: "/runs/{run_id}/cancel", Handler: s.page(s.runCancel)},
		{Method: http.MethodPost, Pattern: "/runs/{run_id}/retry", Handler: s.page(s.runRetry)},
		{Method: http.MethodGet, Pattern: "/jobs/{job_id}", Handler: s.page(s.jobShow)},
		{Method: http.MethodGet, Pattern: "/runners", Handler: s.page(s.runnerList)},
		{Method: http.MethodPost, Pattern: "/runners/{runner_id}/drain", Admin: true, Handler: s.page(s.runnerDrain)},
		{Method: http.MethodPost, Pattern: "/runners/{runner_id}/fence", Admin: true, Handler: s.page(s.runnerFence)},
		{Method: http.MethodGet, Pattern: "/deadletters", Handler: s.page(s.deadLetterList)},
		{Method: http.MethodPost, Pattern: "/deadletters/{job_id}/requeue", Admin: true, Handler: s.page(s.deadLetterRequeue)},
		{Method: http.MethodGet, Pattern: "/events", Handler: http.HandlerFunc(s.events)},
		{Method: http.MethodGet, Pattern: "/signin", Open: true, Handler: s.open(s.signInForm)},
		{Method: http.MethodPost, Pattern: "/signin", Open: true, Handler: s.open(s.signIn)},
		{Method: http.MethodPost, Pattern: "/signout", Open: true, Handler: s.open(s.signOut)},
		{Method: http.MethodPost, Pattern: "/theme", Open: true, Handler: s.open(s.theme)},
		{Method: http.MethodGet, Pattern: "/static/{version}/{file}", Open: true, Handler: s.assets},
		{Pattern: "/", Open: true, Handler: s.open(s.nothing)},
		{Method: http.MethodGet, Pattern: "/favicon.ico", Open: true, Handler: http.HandlerFunc(s.assets.favicon)},
	}
	for i := range routes {
		routes[i].Handler = s.Headers(routes[i].Handler)
	}
	return routes
}
