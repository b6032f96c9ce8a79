package api

import (
	"context"
	"io"
	"net/http"
	"strconv"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// runnerRoutes are the routes of runners, lease routes among them.
func (a *API) runnerRoutes() []Route {
	const r = auth.Runner
	return []Route{
		{protocol.RouteRegister, auth.Registration, NoLease, protocol.Register{}, protocol.Registered{}, "register a runner", a.register},
		{protocol.RouteOpenSession, r, NoLease, protocol.OpenSession{}, protocol.SessionOpened{}, "open a session", a.openSession},
		{protocol.RouteClaim, r, NoLease, protocol.Claim{}, protocol.Ticket{}, "wait for a job", a.claim},
		{protocol.RouteOccupancy, r, NoLease, protocol.Occupancy{}, nil, "report attempts that have ended", a.occupancy},
		{protocol.RouteDrain, r, NoLease, protocol.Drain{}, nil, "take nothing new", a.drain},
		{protocol.RouteWatch, r, NoLease, protocol.Watch{}, protocol.Watched{}, "wait for a reason to renew at once", a.watch},
		{protocol.RouteHeartbeat, r, LeaseBatch, protocol.Heartbeat{}, protocol.HeartbeatReply{}, "renew all leases", a.heartbeat},
		{protocol.RoutePhase, r, LeaseActive, protocol.SetPhase{}, nil, "record a phase and steps", a.phase},
		{protocol.RouteAppendLog, r, LeaseCancelling, nil, protocol.LogReply{}, "append to the log", a.appendLog},
		{protocol.RouteComplete, r, LeaseCancelling, protocol.Complete{}, protocol.Completed{}, "report the result", a.complete},
		{protocol.RouteHandOver, r, LeaseActive, protocol.HandOver{}, protocol.Completed{}, "give the job back", a.handOver},
		{protocol.RouteFetchSource, r, LeaseActive, nil, nil, "read the source snapshot", a.fetchSource},
	}
}

// storedAnswers are the routes whose answer outlives the lease.
func (a *API) storedAnswers() map[string]func(context.Context, engine.Identity, ci.LeaseRef, []byte) (any, bool, error) {
	end := func(digest func([]byte) (request, digest string, err error)) func(context.Context, engine.Identity, ci.LeaseRef, []byte) (any, bool, error) {
		return func(ctx context.Context, who engine.Identity, ref ci.LeaseRef, body []byte) (any, bool, error) {
			request, sum, err := digest(body)
			if err != nil {
				return nil, false, err
			}
			return a.Engine.StoredAnswer(ctx, who, ref, request, sum)
		}
	}
	return map[string]func(context.Context, engine.Identity, ci.LeaseRef, []byte) (any, bool, error){
		protocol.RouteComplete: end(func(b []byte) (string, string, error) {
			v, err := decodeBytes[protocol.Complete](b, false)
			return v.RequestID, engine.Digest(v), err
		}),
		protocol.RouteHandOver: end(func(b []byte) (string, string, error) {
			v, err := decodeBytes[protocol.HandOver](b, false)
			return v.RequestID, engine.Digest(v), err
		}),
		protocol.RouteNewArtifact: a.storedSession,
	}
}

func (a *API) register(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Register](w, r, false)
	if err != nil {
		return err
	}
	if !protocol.ValidToken(req.Credential, protocol.TokenRunner) {
		return &ci.Error{Kind: ci.ErrInvalid, Detail: "credential: a token of the runner's own making is needed", Fields: []ci.FieldError{{
			Pointer: "/credential", Detail: "it begins with " + string(protocol.TokenRunner) + "_",
		}}}
	}
	id, err := a.Engine.Register(r.Context(), c.org, c.actor, c.granted, req, auth.Hash(req.Credential))
	if err != nil {
		return err
	}
	a.Auth.Forget()
	return writeJSON(w, http.StatusOK, protocol.Registered{Runner: id, Credential: req.Credential})
}

func (a *API) openSession(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.OpenSession](w, r, false)
	if err != nil {
		return err
	}
	got, err := a.Engine.OpenSession(r.Context(), c.runner, req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, got)
}

func (a *API) claim(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Claim](w, r, false)
	if err != nil {
		return err
	}
	ticket, err := a.Engine.Claim(r.Context(), c.runner, req)
	if err != nil {
		return err
	}
	if ticket == nil {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return writeJSON(w, http.StatusOK, ticket)
}

func (a *API) occupancy(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Occupancy](w, r, false)
	if err != nil {
		return err
	}
	if err := a.Engine.Occupancy(r.Context(), c.runner, req); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) drain(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Drain](w, r, false)
	if err != nil {
		return err
	}
	if err := a.Engine.DrainSession(r.Context(), c.runner, req); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) watch(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Watch](w, r, false)
	if err != nil {
		return err
	}
	renew, err := a.Engine.Watch(r.Context(), c.runner, req)
	if err != nil {
		return err
	}
	if !renew {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return writeJSON(w, http.StatusOK, protocol.Watched{Renew: true})
}

func (a *API) heartbeat(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Heartbeat](w, r, false)
	if err != nil {
		return err
	}
	reply, err := a.Engine.Renew(r.Context(), c.runner, req.Session, req.Leases)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, reply)
}

func (a *API) phase(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.SetPhase](w, r, false)
	if err != nil {
		return err
	}
	if err := a.Engine.SetPhase(r.Context(), c.held, req); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) appendLog(w http.ResponseWriter, r *http.Request, c caller) error {
	reply, err := a.Logs.AppendBody(r.Context(), c.held, http.MaxBytesReader(w, r.Body, protocol.MaxLogBody+1), r.ContentLength)
	if err != nil {
		return a.refused(c, protocol.RouteAppendLog, err)
	}
	return writeJSON(w, http.StatusOK, reply)
}

func (a *API) complete(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.Complete](w, r, false)
	if err != nil {
		return err
	}
	got, err := a.Engine.Complete(r.Context(), c.held, req)
	if err != nil {
		return err
	}
	ref := c.held.Ref()
	a.Logs.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	return writeJSON(w, http.StatusOK, got)
}

func (a *API) handOver(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.HandOver](w, r, false)
	if err != nil {
		return err
	}
	got, err := a.Engine.HandOver(r.Context(), c.held, req)
	if err != nil {
		return err
	}
	ref := c.held.Ref()
	a.Logs.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	return writeJSON(w, http.StatusOK, got)
}

// fetchSource streams the snapshot of the lease's run.
func (a *API) fetchSource(w http.ResponseWriter, r *http.Request, c caller) error {
	var src store.Source
	err := a.Store.Read(r.Context(), func(tx *store.Tx) error {
		run, ok, err := tx.Run(r.Context(), c.held.Ref().Run)
		if err != nil {
			return err
		}
		if !ok {
			return ci.Errorf(ci.ErrNotFound, "no run %s", c.held.Ref().Run)
		}
		src, ok, err = tx.Source(r.Context(), c.held.Org(), run.SourceDigest)
		if err == nil && !ok {
			err = ci.Errorf(ci.ErrGone, "the source of the run has been deleted")
		}
		return err
	})
	if err != nil {
		return err
	}
	body, err := a.Blob.Open(r.Context(), src.BlobKey, 0, -1)
	if err != nil {
		return err
	}
	return a.sendBody(w, body, src.Size, protocol.MediaSnapshot)
}

// sendBody answers with a whole object of size bytes and closes it. A body that
// ends early breaks the connection, so that it cannot be taken for a whole one.
func (a *API) sendBody(w http.ResponseWriter, body io.ReadCloser, size int64, media string) error {
	defer func() { _ = body.Close() }()
	w.Header().Set("Content-Type", media)
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	w.WriteHeader(http.StatusOK)
	if n, err := io.Copy(w, body); err != nil || n != size {
		a.Log.Warn("an object was not sent whole", "sent", n, "size", size, "error", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}
