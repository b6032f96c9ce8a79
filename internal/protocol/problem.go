package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
)

const problemType = "urn:forgeci:error:"

// Status returns the HTTP status of an error kind, and 500 for a word that is
// not one. Server and client share the mapping; the kind itself travels in the
// problem's type, so that kinds with one status stay apart.
func Status(k ci.Kind) int {
	switch k {
	case ci.ErrIncompatible:
		return http.StatusBadRequest
	case ci.ErrInvalid, ci.ErrDigest, ci.ErrUnsafe:
		return http.StatusUnprocessableEntity
	case ci.ErrUnauthorized:
		return http.StatusUnauthorized
	case ci.ErrForbidden:
		return http.StatusForbidden
	case ci.ErrNotFound:
		return http.StatusNotFound
	case ci.ErrMethod:
		return http.StatusMethodNotAllowed
	case ci.ErrConflict, ci.ErrLeaseLost:
		return http.StatusConflict
	case ci.ErrRunEnded, ci.ErrGone:
		return http.StatusGone
	case ci.ErrTooLarge:
		return http.StatusRequestEntityTooLarge
	case ci.ErrRateLimited:
		return http.StatusTooManyRequests
	case ci.ErrUnavailable:
		return http.StatusServiceUnavailable
	case ci.ErrInternal:
		return http.StatusInternalServerError
	default:
		return http.StatusInternalServerError
	}
}

// ProblemFrom renders err for the caller. instance is the request's ID. What is
// not a *ci.Error, and what is of kind ErrInternal, becomes a fixed text: the
// cause belongs in the server's log only.
func ProblemFrom(err error, instance string) Problem {
	var e *ci.Error
	if !errors.As(err, &e) || e.Kind == ci.ErrInternal || Status(e.Kind) == http.StatusInternalServerError {
		return Problem{
			Type: problemType + string(ci.ErrInternal), Title: "internal error",
			Status: http.StatusInternalServerError, Instance: instance,
			Detail: "the server met an error of its own; its log has the cause under this request's ID",
		}
	}
	return Problem{
		Type: problemType + string(e.Kind), Title: strings.ReplaceAll(string(e.Kind), "_", " "),
		Status: Status(e.Kind), Detail: e.Detail, Instance: instance,
		Reject: e.Reject, Errors: e.Fields,
		RetryAfter: retrySeconds(e.RetryAfter),
	}
}

// retrySeconds rounds up, so that nobody comes back too early.
func retrySeconds(d time.Duration) int {
	return int((d + time.Second - 1) / time.Second)
}

// WriteProblem answers with the problem of err: status, Content-Type, Retry-After
// and, for 401, WWW-Authenticate. Nothing must have been written to w before.
func WriteProblem(w http.ResponseWriter, err error, instance string) {
	p := ProblemFrom(err, instance)
	h := w.Header()
	h.Set("Content-Type", MediaProblem)
	h.Set("Cache-Control", "no-store")
	h.Del("Content-Length")
	h.Del("Content-Encoding")
	if p.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(p.RetryAfter))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="forgeci"`)
	}
	w.WriteHeader(p.Status)
	// An error means that the caller has gone; there is nobody left to tell.
	_ = json.NewEncoder(w).Encode(p)
}

// errorFrom turns an answer that is not a success into a *ci.Error. body is the
// answer's beginning.
func errorFrom(resp *http.Response, body []byte) *ci.Error {
	var p Problem
	if json.Unmarshal(body, &p) == nil {
		if e := p.err(resp.StatusCode); e != nil {
			e.RetryAfter = max(e.RetryAfter, retryAfter(resp.Header))
			return e
		}
	}
	// Not our server's answer: a proxy, an object store, or another program.
	e := &ci.Error{
		Kind:       kindOfStatus(resp.StatusCode),
		Detail:     fmt.Sprintf("%s answered %s without ForgeCI's explanation", resp.Request.URL.Host, resp.Status),
		RetryAfter: retryAfter(resp.Header),
	}
	return e
}

// err returns the error that the problem, which came with a status, was made from;
// nil if it is none of ours.
func (p Problem) err(status int) *ci.Error {
	kind, ok := strings.CutPrefix(p.Type, problemType)
	if !ok || kind == "" {
		return nil
	}
	e := &ci.Error{Kind: ci.Kind(kind), Reject: p.Reject, Detail: p.Detail, Fields: p.Errors, RetryAfter: seconds(p.RetryAfter)}
	if Status(e.Kind) == http.StatusInternalServerError && e.Kind != ci.ErrInternal {
		e.Kind = kindOfStatus(status) // a kind of a later version
	}
	if e.Kind == ci.ErrInternal && p.Instance != "" {
		e.Detail += " (request " + p.Instance + ")"
	}
	return e
}

func kindOfStatus(status int) ci.Kind {
	switch status {
	case http.StatusUnauthorized:
		return ci.ErrUnauthorized
	case http.StatusForbidden:
		return ci.ErrForbidden
	case http.StatusNotFound, http.StatusMethodNotAllowed:
		return ci.ErrNotFound
	case http.StatusConflict, http.StatusPreconditionFailed:
		return ci.ErrConflict
	case http.StatusGone:
		return ci.ErrGone
	case http.StatusRequestEntityTooLarge:
		return ci.ErrTooLarge
	case http.StatusTooManyRequests:
		return ci.ErrRateLimited
	case http.StatusRequestTimeout:
		return ci.ErrUnavailable
	default:
		if status >= 500 {
			return ci.ErrUnavailable
		}
		return ci.ErrInvalid
	}
}

// retryAfter reads the header in its form of seconds, bounded to an hour.
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil {
		return 0
	}
	return seconds(n)
}

// seconds bounds what another program asks to wait: at most an hour.
func seconds(n int) time.Duration { return time.Duration(min(max(n, 0), 3600)) * time.Second }
