package protocol

import (
	"net/http"
	"net/url"
	"strings"
)

// Routes are patterns of net/http.ServeMux: method, space, path with wildcards.
// Server and client share them, so that neither can speak of a route that the
// other does not know.

// Routes of runners. Register takes the registration token, all others the
// runner's credential. Those under "lease" also need HeaderLease.
const (
	RouteRegister    = "POST /v1/runner/register"
	RouteOpenSession = "POST /v1/runner/session"
	RouteClaim       = "POST /v1/runner/claim"
	RouteOccupancy   = "POST /v1/runner/occupancy"
	RouteDrain       = "POST /v1/runner/drain"
	// RouteWatch is a long poll beside the heartbeats: 200 says that one should
	// come at once, 204 that nothing happened.
	RouteWatch = "POST /v1/runner/watch"

	// Lease routes. Heartbeat carries its leases in the body.
	RouteHeartbeat    = "POST /v1/runner/heartbeat"
	RoutePhase        = "POST /v1/runner/phase"
	RouteAppendLog    = "POST /v1/runner/logs"
	RouteComplete     = "POST /v1/runner/complete"
	RouteHandOver     = "POST /v1/runner/hand-over"
	RouteFetchSource  = "GET /v1/runner/source"
	RouteNewArtifact  = "POST /v1/runner/artifacts"
	RouteSignParts    = "POST /v1/runner/artifacts/{artifact_id}/parts"
	RouteSealArtifact = "POST /v1/runner/artifacts/{artifact_id}/seal"
	// RouteRestoreArtifact answers a SignedURL of a bound artifact of the run.
	RouteRestoreArtifact = "GET /v1/runner/artifacts/{artifact_id}"
)

// Routes of people and scripts.
const (
	RouteEnsureLocalRepo = "POST /v1/repos"
	RouteGetSnapshot     = "GET /v1/repos/{repo_id}/sources/{digest}"
	RoutePutSnapshot     = "PUT /v1/repos/{repo_id}/sources/{digest}"
	RouteCreateRun       = "POST /v1/repos/{repo_id}/workflow-runs"
	// RouteListRuns takes ?repo= (name or ID), ?state=, ?conclusion=, ?commit=,
	// ?limit= and ?after=; newest first.
	RouteListRuns  = "GET /v1/workflow-runs"
	RouteGetRun    = "GET /v1/workflow-runs/{run_id}"
	RouteCancelRun = "POST /v1/workflow-runs/{run_id}/cancel"
	RouteRetryRun  = "POST /v1/workflow-runs/{run_id}/retry"
	// RouteRunEvents is SSE: an event "run" with a RunSummary at once and at
	// every coarse change of the run or of one of its jobs; the last one says
	// finished. Events are hints: what counts is what RouteGetRun answers.
	RouteRunEvents  = "GET /v1/workflow-runs/{run_id}/events"
	RouteGetJob     = "GET /v1/jobs/{job_id}"
	RouteExplainJob = "GET /v1/jobs/{job_id}/explain"
	// RouteJobLog answers the log's bytes as they were written, in archive order:
	// ?attempt= (latest), ?step= (index from 0; StepSystem), ?stream=, ?tail=
	// (lines). Headers HeaderLog… describe it.
	RouteJobLog = "GET /v1/jobs/{job_id}/logs"
	// RouteJobLogLines takes ?attempt=, ?step=, ?from= (line number), ?limit=,
	// ?tail= and ?q= (substring).
	RouteJobLogLines = "GET /v1/jobs/{job_id}/logs/lines"
	// RouteJobLogEvents is SSE: of one attempt, events "log" (LogEvent) and as the last
	// one "sealed" (LogSealedEvent), or "problem" (Problem) when asking again would
	// not mend the stream. It takes ?attempt=, ?step=,
	// ?tail= (it begins with so many lines), and ?after= or Last-Event-ID, which count
	// for more than the tail.
	RouteJobLogEvents    = "GET /v1/jobs/{job_id}/logs/events"
	RouteGetArtifact     = "GET /v1/artifacts/{artifact_id}"
	RouteArtifactContent = "GET /v1/artifacts/{artifact_id}/content"
	RouteListRunners     = "GET /v1/runners"
	RouteDrainRunner     = "POST /v1/runners/{runner_id}/drain"
	RouteFenceRunner     = "POST /v1/runners/{runner_id}/fence"
	RouteListDeadLetters = "GET /v1/deadletters"
	// RouteRequeue makes a retry run of a dead letter and answers RunCreated.
	RouteRequeue = "POST /v1/deadletters/{job_id}/requeue"

	// Routes without a credential.
	RouteHealth  = "GET /healthz"
	RouteReady   = "GET /readyz"
	RouteMetrics = "GET /metrics"
	RouteOpenAPI = "GET /openapi.json"
)

// Headers of people's routes.
const (
	// HeaderIdempotencyKey makes a repeat of CreateRun and RetryRun return the
	// same run; its scope is the caller and the repository.
	HeaderIdempotencyKey = "Idempotency-Key"
	// HeaderLogEpoch names the attempt whose log RouteJobLog answers.
	HeaderLogEpoch = "Forgeci-Log-Epoch"
	// HeaderLogSealed is "true" when nothing will be added to the log.
	HeaderLogSealed = "Forgeci-Log-Sealed"
	// HeaderLogTruncated is "true" when the answer does not hold everything that
	// was asked for: the attempt went over its limit, or the log has a gap.
	HeaderLogTruncated = "Forgeci-Log-Truncated"
	// HeaderLogLines and HeaderLogTotal count the lines answered and the lines
	// that the selection (attempt, step, stream) holds.
	HeaderLogLines = "Forgeci-Log-Lines"
	HeaderLogTotal = "Forgeci-Log-Total"
)

// Media types.
const (
	MediaJSON     = "application/json"
	MediaProblem  = "application/problem+json"
	MediaBytes    = "application/octet-stream"
	MediaEvents   = "text/event-stream"
	MediaSnapshot = "application/zstd"
)

// Methods lists, in order of the alphabet, the methods for which mux has a route
// at the request's path; routes for every method do not count.
func Methods(mux *http.ServeMux, r *http.Request) []string {
	var methods []string
	for _, m := range []string{http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodPatch, http.MethodPost, http.MethodPut} {
		_, pattern := mux.Handler(&http.Request{Method: m, Host: r.Host, URL: r.URL})
		if strings.Contains(pattern, " ") {
			methods = append(methods, m)
		}
	}
	return methods
}

// Endpoint fills the wildcards of a route from left to right with escaped
// values and returns method and path. Too few or too many values are a defect
// of the caller and panic.
func Endpoint(route string, values ...string) (method, path string) {
	method, path, _ = strings.Cut(route, " ")
	for _, v := range values {
		open := strings.IndexByte(path, '{')
		shut := strings.IndexByte(path, '}')
		if open < 0 || shut < open {
			panic("protocol: too many values for route " + route) // a defect of the caller
		}
		path = path[:open] + url.PathEscape(v) + path[shut+1:]
	}
	if strings.Contains(path, "{") {
		panic("protocol: too few values for route " + route) // a defect of the caller
	}
	return method, path
}
