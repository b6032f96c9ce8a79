package api

import (
	"context"
	"net/http"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
)

// artifactRoutes are the lease routes of artifact transfer.
func (a *API) artifactRoutes() []Route {
	const r = auth.Runner
	return []Route{
		{protocol.RouteNewArtifact, r, LeaseActive, protocol.NewArtifact{}, protocol.ArtifactSession{}, "open an upload session", a.newArtifact},
		{protocol.RouteSignParts, r, LeaseActive, protocol.SignParts{}, protocol.SignedParts{}, "ask for upload addresses", a.signParts},
		{protocol.RouteSealArtifact, r, LeaseActive, protocol.SealArtifact{}, nil, "verify and seal an upload", a.sealArtifact},
		{protocol.RouteRestoreArtifact, r, LeaseActive, nil, protocol.SignedURL{}, "ask for a download address of a bound artifact", a.restoreArtifact},
	}
}

func (a *API) newArtifact(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.NewArtifact](w, r, false)
	if err != nil {
		return err
	}
	got, err := a.Artifacts.Begin(r.Context(), c.held, req, engine.Digest(req))
	if err != nil {
		return a.refused(c, protocol.RouteNewArtifact, err)
	}
	return writeJSON(w, http.StatusOK, got)
}

// storedSession answers a repeat of newArtifact after the lease has ended.
func (a *API) storedSession(ctx context.Context, who engine.Identity, ref ci.LeaseRef, body []byte) (any, bool, error) {
	req, err := decodeBytes[protocol.NewArtifact](body, false)
	if err != nil {
		return nil, false, err
	}
	return a.Artifacts.StoredSession(ctx, who, ref, req, engine.Digest(req))
}

func (a *API) signParts(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.SignParts](w, r, false)
	if err != nil {
		return err
	}
	got, err := a.Artifacts.Sign(r.Context(), c.held, r.PathValue("artifact_id"), req.Parts)
	if err != nil {
		return a.refused(c, protocol.RouteSignParts, err)
	}
	return writeJSON(w, http.StatusOK, got)
}

func (a *API) sealArtifact(w http.ResponseWriter, r *http.Request, c caller) error {
	req, err := decode[protocol.SealArtifact](w, r, false)
	if err != nil {
		return err
	}
	if err := a.Artifacts.Seal(r.Context(), c.held, r.PathValue("artifact_id"), req.Parts); err != nil {
		return a.refused(c, protocol.RouteSealArtifact, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) restoreArtifact(w http.ResponseWriter, r *http.Request, c caller) error {
	got, err := a.Artifacts.Download(r.Context(), c.held, r.PathValue("artifact_id"))
	if err != nil {
		return a.refused(c, protocol.RouteRestoreArtifact, err)
	}
	return writeJSON(w, http.StatusOK, got)
}
