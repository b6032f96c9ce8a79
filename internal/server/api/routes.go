package api

import (
	"net/http"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
)

// Routes is the whole table.
func (a *API) Routes() []Route {
	routes := append(a.runnerRoutes(), a.artifactRoutes()...)
	routes = append(routes, a.peopleRoutes()...)
	return append(routes,
		Route{protocol.RouteHealth, auth.None, NoLease, nil, nil, "is the process alive", a.health},
		Route{protocol.RouteReady, auth.None, NoLease, nil, nil, "can it serve", a.ready},
		Route{protocol.RouteMetrics, auth.None, NoLease, nil, nil, "metrics", a.metrics},
		Route{protocol.RouteOpenAPI, auth.None, NoLease, nil, nil, "this API", a.openAPI},
	)
}

func (a *API) health(w http.ResponseWriter, _ *http.Request, _ caller) error {
	return writeJSON(w, http.StatusOK, map[string]string{"status": "ok", "version": a.Version})
}

func (a *API) ready(w http.ResponseWriter, r *http.Request, _ caller) error {
	if err := a.Ready(r.Context()); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "not ready: %s", ci.KindOf(err)).WithCause(err)
	}
	return writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
}
