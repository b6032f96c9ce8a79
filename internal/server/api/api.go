// Package api is the HTTP surface for runners and for scripts: one table of
// routes, the guard in front of every lease route, problem+json for every error.
// Pages for people are in web.
//
// A handler never sees a lease tuple that the guard has not found current: it is
// given an engine.Held. A route without a row in the table cannot be reached.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/snapshot"
	"forgeci/internal/server/store"
)

// Config is what the API works on; all fields are required.
type Config struct {
	Engine    *engine.Engine
	Auth      *auth.Auth
	Store     *store.Store
	Blob      blob.Store
	Logs      *logs.Service
	Artifacts *artifact.Service
	Snapshots *snapshot.Service
	Reader    *reader.Reader
	Log       *slog.Logger
	// TempDir holds uploads while they are verified.
	TempDir string
	Version string
	// Ready says why the server cannot serve now, nil when it can.
	Ready func(context.Context) error
}

// API serves the routes. It is safe for concurrent use.
type API struct {
	Config
	files *workflowFiles
	repos *store.Reads[ci.RepoID, store.Repo]
}

// New prepares the API; it starts nothing.
func New(c Config) *API {
	a := &API{Config: c, files: newWorkflowFiles()}
	a.repos = store.NewReads(func(ctx context.Context, ids []ci.RepoID) (rs map[ci.RepoID]store.Repo, err error) {
		err = c.Store.Read(ctx, func(tx *store.Tx) error {
			rs, err = tx.Repos(ctx, ids)
			return err
		})
		return rs, err
	})
	return a
}

// Lease says how a lease route treats the tuple.
type Lease string

// Lease modes.
const (
	NoLease         Lease = ""
	LeaseActive     Lease = "active"     // current and its run not cancelling
	LeaseCancelling Lease = "cancelling" // current; also while cancelling
	LeaseBatch      Lease = "batch"      // tuples in the body, each answered by itself
)

// Route is one row of the table. The matrices of tests are generated from it.
type Route struct {
	Pattern    string // method and path of net/http.ServeMux
	Credential auth.Credential
	Lease      Lease
	// In and Out are examples of the documents, nil for raw bodies.
	In, Out any
	Summary string
	handler handler
}

// Name is the route's word in metrics and in the count of rejections.
func (r Route) Name() string { return r.Pattern }

// caller is who asks, as far as the route's credential says.
type caller struct {
	runner engine.Identity
	viewer auth.Viewer
	org    ci.OrgID // of a registration token
	actor  string
	// granted are the labels that the registration token grants.
	granted []string
	held    engine.Held
}

type handler func(w http.ResponseWriter, r *http.Request, c caller) error

// Most bytes of a JSON body.
const maxJSON = 8 << 20

// Handler returns the API on a mux of its own.
func (a *API) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, r := range a.Routes() {
		mux.Handle(r.Pattern, a.serve(r))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { a.noRoute(w, r, protocol.Methods(mux, r)) })
	return mux
}

// noRoute answers what is not in the table; methods are those that the table has
// for the path.
func (a *API) noRoute(w http.ResponseWriter, r *http.Request, methods []string) {
	id := ci.IDSource{}.New(ci.PrefixRequest)
	w.Header().Set(protocol.HeaderRequest, id)
	err := WellFormed(r)
	switch {
	case err != nil:
	case len(methods) > 0:
		w.Header().Set("Allow", strings.Join(methods, ", "))
		err = ci.Errorf(ci.ErrMethod, "%s is answered to %s, not to %s", clip(r.URL.Path, 200), strings.Join(methods, " and "), clip(r.Method, 20))
	default:
		err = ci.Errorf(ci.ErrNotFound, "no route %s %s: /openapi.json lists them all", clip(r.Method, 20), clip(r.URL.Path, 200))
	}
	a.fail(w, r, id, err)
}

// serve wraps a route: request ID, credential, guard, error mapping.
func (a *API) serve(route Route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := ci.IDSource{}.New(ci.PrefixRequest)
		w.Header().Set(protocol.HeaderRequest, id)
		start := time.Now()
		err := a.answer(route, w, r)
		if err != nil {
			a.fail(w, r, id, err)
		}
		a.Log.DebugContext(r.Context(), "request", "request", id, "route", route.Pattern, "took", time.Since(start), "error", err)
	})
}

func (a *API) answer(route Route, w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler {
				panic(p)
			}
			a.Log.ErrorContext(r.Context(), "request panicked", "route", route.Pattern, "panic", p, "stack", stack())
			err = ci.Errorf(ci.ErrInternal, "panic")
		}
	}()
	if err := WellFormed(r); err != nil {
		return err
	}
	c, err := a.identify(route, r)
	if err != nil {
		return err
	}
	if route.Lease == LeaseActive || route.Lease == LeaseCancelling {
		done, err := a.guard(route, w, r, &c)
		if done || err != nil {
			return err
		}
	}
	return route.handler(w, r, c)
}

func (a *API) identify(route Route, r *http.Request) (c caller, err error) {
	switch route.Credential {
	case auth.None:
	case auth.Registration:
		c.org, c.actor, c.granted, err = a.Auth.RegistrationOf(r)
	case auth.Runner:
		c.runner, err = a.Auth.RunnerOf(r)
	case auth.Person:
		c.viewer, err = a.Auth.ViewerOf(r, false)
	case auth.Admin:
		c.viewer, err = a.Auth.ViewerOf(r, true)
	default:
		err = errors.New("api: route without a credential: " + route.Pattern)
	}
	return c, err
}

// guard proves the lease. A refused repeat of a request whose answer is stored
// gets that answer.
func (a *API) guard(route Route, w http.ResponseWriter, r *http.Request, c *caller) (done bool, err error) {
	ref, err := ci.ParseLeaseRef(r.Header.Get(protocol.HeaderLease))
	if err != nil {
		return false, err
	}
	access := engine.ActiveOnly
	if route.Lease == LeaseCancelling {
		access = engine.WhileCancelling
	}
	var answer any
	held, done, err := a.Engine.HoldOr(r.Context(), c.runner, ref, route.Name(), access, func() (found bool, err error) {
		stored, ok := a.storedAnswers()[route.Pattern]
		if !ok {
			return false, nil
		}
		body, err := readBody(w, r)
		if err != nil {
			return false, err
		}
		answer, found, err = stored(r.Context(), c.runner, ref, body)
		return found, err
	})
	if err != nil {
		return false, err
	}
	if done {
		return true, writeJSON(w, http.StatusOK, answer)
	}
	c.held = held
	return false, nil
}

// refused returns err; a refusal by the store of what the guard has let through is
// counted and audited as one of the guard's. The engine does so for its own calls.
func (a *API) refused(c caller, route string, err error) error {
	a.Engine.Refused(c.held, route, err)
	return err
}

func (a *API) fail(w http.ResponseWriter, r *http.Request, id string, err error) {
	kind := ci.KindOf(err)
	switch {
	case errors.Is(err, context.Canceled) && r.Context().Err() != nil:
		return // the caller has gone
	case kind == ci.ErrInternal:
		a.Log.ErrorContext(r.Context(), "request failed", "request", id, "method", r.Method, "path", r.URL.Path, "error", err)
	case kind == ci.ErrUnavailable || kind == ci.ErrDigest:
		a.Log.WarnContext(r.Context(), "request refused", "request", id, "method", r.Method, "path", r.URL.Path, "error", err)
	}
	protocol.WriteProblem(w, err, id)
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", protocol.MediaJSON)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, err = w.Write(b)
	if err != nil {
		return nil //nolint:nilerr // the caller has gone
	}
	return nil
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxJSON))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, ci.Errorf(ci.ErrTooLarge, "the body is over the limit of %d bytes", maxJSON)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, errTooSlow().WithCause(err)
	case err != nil:
		return nil, ci.Errorf(ci.ErrInvalid, "the body was cut after %d bytes", len(b)).WithCause(err)
	}
	return b, nil
}
