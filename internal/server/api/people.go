package api

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/store"
)

// peopleRoutes are the routes of people and scripts.
func (a *API) peopleRoutes() []Route {
	const p, admin = auth.Person, auth.Admin
	return []Route{
		{protocol.RouteEnsureLocalRepo, p, NoLease, protocol.EnsureLocalRepo{}, protocol.Repo{}, "find or make the repository of a local checkout", a.ensureLocalRepo},
		{protocol.RouteGetSnapshot, p, NoLease, nil, protocol.Snapshot{}, "ask for a source snapshot", a.getSnapshot},
		{protocol.RoutePutSnapshot, p, NoLease, nil, protocol.Snapshot{}, "upload a source snapshot", a.putSnapshot},
		{protocol.RouteCreateRun, p, NoLease, protocol.CreateRun{}, protocol.RunCreated{}, "start a run", a.createRun},
		{protocol.RouteListRuns, p, NoLease, nil, protocol.Page[protocol.RunSummary]{}, "list runs, newest first", a.listRuns},
		{protocol.RouteGetRun, p, NoLease, nil, protocol.Run{}, "read a run", a.getRun},
		{protocol.RouteCancelRun, p, NoLease, nil, protocol.RunSummary{}, "cancel a run", a.cancelRun},
		{protocol.RouteRetryRun, p, NoLease, protocol.RetryRun{}, protocol.RunCreated{}, "retry a run as a new run", a.retryRun},
		{protocol.RouteRunEvents, p, NoLease, nil, nil, "follow a run (server-sent events)", a.runEvents},
		{protocol.RouteGetJob, p, NoLease, nil, protocol.Job{}, "read a job", a.getJob},
		{protocol.RouteExplainJob, p, NoLease, nil, protocol.Explanation{}, "read a job's ownership history", a.explainJob},
		{protocol.RouteJobLog, p, NoLease, nil, nil, "read a job's log, byte for byte", a.jobLog},
		{protocol.RouteJobLogLines, p, NoLease, nil, protocol.LogSlice{}, "read a window of lines of a job's log", a.jobLogLines},
		{protocol.RouteJobLogEvents, p, NoLease, nil, nil, "follow a job's log (server-sent events)", a.jobLogEvents},
		{protocol.RouteGetArtifact, p, NoLease, nil, protocol.Artifact{}, "read what is known of an artifact", a.getArtifact},
		{protocol.RouteArtifactContent, p, NoLease, nil, nil, "read an artifact's archive", a.artifactContent},
		{protocol.RouteListRunners, p, NoLease, nil, protocol.Page[protocol.Runner]{}, "list runners", a.listRunners},
		{protocol.RouteDrainRunner, admin, NoLease, nil, protocol.Runner{}, "let a runner finish and take nothing new", a.drainRunner},
		{protocol.RouteFenceRunner, admin, NoLease, nil, protocol.Runner{}, "declare a runner's host dead", a.fenceRunner},
		{protocol.RouteListDeadLetters, p, NoLease, nil, protocol.Page[protocol.DeadLetter]{}, "list dead letters", a.listDeadLetters},
		{protocol.RouteRequeue, admin, NoLease, nil, protocol.RunCreated{}, "retry the run of a dead letter", a.requeue},
	}
}

func (a *API) ensureLocalRepo(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.EnsureLocalRepo](w, r, true)
	if err != nil {
		return err
	}
	name := strings.TrimSpace(req.Name)
	if name == "" || len(name) > 128 || strings.ContainsAny(name, "/\x00\n\r\t") {
		return ci.Errorf(ci.ErrInvalid, "name %q: 1 to 128 characters without slashes are expected", clip(name, 60))
	}
	if b, err := hex.DecodeString(req.Key); err != nil || len(b) != 32 {
		return ci.Errorf(ci.ErrInvalid, "key: the hex of a SHA-256 is expected")
	}
	var repo store.Repo
	err = a.Store.Write(r.Context(), func(tx *store.Tx) error {
		now, err := tx.Now(r.Context())
		if err != nil {
			return err
		}
		repo, err = tx.EnsureRepo(r.Context(), ci.RepoID(a.Engine.IDs.New(ci.PrefixRepo)), c.viewer.Org, "local", req.Key, "local/"+name, now)
		return err
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, protocol.Repo{ID: repo.ID, Name: repo.Name})
}

// repo returns the repository of the path, if the viewer may see it.
func (a *API) repo(ctx context.Context, r *http.Request, c caller) (store.Repo, error) {
	id := ci.RepoID(r.PathValue("repo_id"))
	repo, ok, err := a.repos.Get(ctx, id)
	if err == nil && (!ok || repo.Org != c.viewer.Org) {
		err = ci.Errorf(ci.ErrNotFound, "no repository %s", clip(string(id), 60))
	}
	return repo, err
}

// idempotencyKey reads the caller's key of a repeatable request, "" for none.
func idempotencyKey(r *http.Request) (string, error) {
	key := r.Header.Get(protocol.HeaderIdempotencyKey)
	if len(key) > 255 || !storable(key) {
		return "", ci.Errorf(ci.ErrInvalid, "%s: at most 255 characters of UTF-8 are expected", protocol.HeaderIdempotencyKey)
	}
	return key, nil
}

// Most bytes of a Git reference's name.
const maxRef = 1024

func isHexDigits(s string) bool { return strings.Trim(s, "0123456789abcdefABCDEF") == "" }

func (a *API) createRun(w http.ResponseWriter, r *http.Request, c caller) error {
	ctx := r.Context()
	req, err := decode[protocol.CreateRun](w, r, true)
	if err != nil {
		return err
	}
	repo, err := a.repo(ctx, r, c)
	if err != nil {
		return err
	}
	switch {
	case len(req.CommitSHA) > 64 || req.CommitSHA != "" && !isHexDigits(req.CommitSHA):
		return &ci.Error{Kind: ci.ErrInvalid, Detail: "commit_sha is not one", Fields: []ci.FieldError{{Pointer: "/commit_sha", Detail: "40 or 64 characters of hex are expected"}}}
	case len(req.Ref) > maxRef:
		return &ci.Error{Kind: ci.ErrInvalid, Detail: "ref is too long", Fields: []ci.FieldError{{Pointer: "/ref", Detail: "at most " + strconv.Itoa(maxRef) + " bytes are expected"}}}
	case req.WorkflowPath == "":
		return &ci.Error{Kind: ci.ErrInvalid, Detail: "workflow_path is needed", Fields: []ci.FieldError{{Pointer: "/workflow_path", Detail: "is empty"}}}
	case req.Snapshot == "":
		return &ci.Error{
			Kind: ci.ErrInvalid, Detail: "snapshot is needed: upload the source first; this server cannot fetch commits",
			Fields: []ci.FieldError{{Pointer: "/snapshot", Detail: "is empty"}},
		}
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return err
	}
	plan, err := a.plan(ctx, c.viewer.Org, req)
	if err != nil {
		return err
	}
	id, err := a.Engine.Submit(ctx, engine.Submission{
		Org: c.viewer.Org, Repo: repo.ID, Actor: c.viewer.Actor, Plan: plan,
		Source: req.Snapshot, Trust: ci.TrustTrusted, Event: "manual", CommitSHA: req.CommitSHA, Ref: req.Ref, Message: req.Message,
		Author: req.Author, Dirty: req.Dirty, IdempotencyKey: key, RequestDigest: engine.Digest(req),
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, protocol.RunCreated{RunID: id, URL: a.Engine.RunURL(id)})
}

func (a *API) listRuns(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	limit, err := intParam(q.Get, "limit", reader.DefaultPage, 1, reader.MaxPage)
	if err != nil {
		return err
	}
	state, conclusion := ci.State(q.Get("state")), ci.Conclusion(q.Get("conclusion"))
	if state != "" && !slices.Contains(states(), state) {
		return ci.Errorf(ci.ErrInvalid, "?state=%s: one of %s is expected", clip(string(state), 40), words(states()))
	}
	if conclusion != "" && !slices.Contains(conclusions(), conclusion) {
		return ci.Errorf(ci.ErrInvalid, "?conclusion=%s: one of %s is expected", clip(string(conclusion), 40), words(conclusions()))
	}
	page, err := a.Reader.Runs(r.Context(), c.viewer, reader.RunFilter{
		Repo: q.Get("repo"), State: state,
		Conclusion: conclusion, Commit: q.Get("commit"), After: q.Get("after"), Limit: int(limit),
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, page)
}

func states() []ci.State {
	return []ci.State{ci.StateWaiting, ci.StateReady, ci.StateRunning, ci.StateCancelling, ci.StateFinished}
}

func conclusions() []ci.Conclusion {
	return []ci.Conclusion{
		ci.ConclusionSuccess, ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionCancelled,
		ci.ConclusionAborted, ci.ConclusionSkipped, ci.ConclusionCached,
	}
}

// words lists what may be given, for an error.
func words[T ~string](all []T) string {
	out := make([]string, len(all))
	for i, w := range all {
		out[i] = string(w)
	}
	return strings.Join(out, ", ")
}

func runID(r *http.Request) ci.RunID { return ci.RunID(r.PathValue("run_id")) }
func jobID(r *http.Request) ci.JobID { return ci.JobID(r.PathValue("job_id")) }

func (a *API) getRun(w http.ResponseWriter, r *http.Request, c caller) error {
	doc, err := a.Reader.Run(r.Context(), c.viewer, runID(r))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

func (a *API) cancelRun(w http.ResponseWriter, r *http.Request, c caller) error {
	cancelErr := a.Engine.Cancel(r.Context(), c.viewer.Org, c.viewer.Actor, runID(r))
	if cancelErr != nil && !errors.Is(cancelErr, ci.ErrConflict) {
		return cancelErr
	}
	doc, err := a.Reader.Summary(r.Context(), c.viewer, runID(r))
	if err != nil {
		return err
	}
	if cancelErr != nil && doc.Conclusion != ci.ConclusionCancelled {
		return cancelErr
	}
	return writeJSON(w, http.StatusOK, doc)
}

func (a *API) retryRun(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.RetryRun](w, r, true)
	if err != nil {
		return err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return err
	}
	id, err := a.Engine.Retry(r.Context(), engine.RetryRequest{
		Org: c.viewer.Org, Actor: c.viewer.Actor, Run: runID(r), Failed: req.Failed,
		IdempotencyKey: key, RequestDigest: engine.Digest([]any{runID(r), req}),
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, protocol.RunCreated{RunID: id, URL: a.Engine.RunURL(id)})
}

func (a *API) getJob(w http.ResponseWriter, r *http.Request, c caller) error {
	doc, err := a.Reader.Job(r.Context(), c.viewer, jobID(r))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

func (a *API) explainJob(w http.ResponseWriter, r *http.Request, c caller) error {
	doc, err := a.Reader.Explain(r.Context(), c.viewer, jobID(r))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

func (a *API) getArtifact(w http.ResponseWriter, r *http.Request, c caller) error {
	doc, err := a.Artifacts.Stat(r.Context(), c.viewer, r.PathValue("artifact_id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

// artifactContent answers an artifact's archive as a download that no browser
// renders; a bucket's bytes do not pass through the server.
func (a *API) artifactContent(w http.ResponseWriter, r *http.Request, c caller) error {
	ctx, id := r.Context(), r.PathValue("artifact_id")
	doc, err := a.Artifacts.Stat(ctx, c.viewer, id)
	if err != nil {
		return err
	}
	at, err := a.Artifacts.Content(ctx, c.viewer, id)
	if err != nil {
		return err
	}
	if strings.HasPrefix(at.URL, "http") {
		w.Header().Set("Cache-Control", "no-store")
		http.Redirect(w, r, at.URL, http.StatusTemporaryRedirect)
		return nil
	}
	body, err := a.Artifacts.Open(ctx, c.viewer, id)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Disposition", `attachment; filename="`+safeName(doc.Name)+`.tar.zst"`)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	return a.sendBody(w, body, doc.Size, protocol.MediaSnapshot)
}

// safeName keeps what every file system and header takes.
func safeName(s string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.' {
			return c
		}
		return '_'
	}, s)
}

func (a *API) listRunners(w http.ResponseWriter, r *http.Request, c caller) error {
	page, err := a.Reader.Runners(r.Context(), c.viewer, r.URL.Query().Get("after"), 0)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, page)
}

func (a *API) drainRunner(w http.ResponseWriter, r *http.Request, c caller) error {
	return a.actOnRunner(w, r, c, a.Engine.DrainRunner)
}

func (a *API) fenceRunner(w http.ResponseWriter, r *http.Request, c caller) error {
	return a.actOnRunner(w, r, c, a.Engine.FenceRunner)
}

func (a *API) actOnRunner(w http.ResponseWriter, r *http.Request, c caller, act func(context.Context, ci.OrgID, string, ci.RunnerID) error) error {
	id := ci.RunnerID(r.PathValue("runner_id"))
	if err := act(r.Context(), c.viewer.Org, c.viewer.Actor, id); err != nil {
		return err
	}
	doc, err := a.Reader.Runner(r.Context(), c.viewer, id)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

func (a *API) listDeadLetters(w http.ResponseWriter, r *http.Request, c caller) error {
	page, err := a.Reader.DeadLetters(r.Context(), c.viewer, r.URL.Query().Get("after"), 0)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, page)
}

func (a *API) requeue(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := a.Engine.Requeue(r.Context(), c.viewer.Org, c.viewer.Actor, jobID(r))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, protocol.RunCreated{RunID: id, URL: a.Engine.RunURL(id)})
}
