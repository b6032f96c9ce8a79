package protocol

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
)

// Whatever refuses a call, the caller gets an error of one of the kinds it knows
// what to do about, with a wait that is neither negative nor for ever.
func FuzzProblem(f *testing.F) {
	f.Add(409, "", []byte(`{"type":"urn:forgeci:error:lease_lost","title":"lease lost","status":409,"reject":"wrong_epoch"}`))
	f.Add(503, "7", []byte(`{"type":"urn:forgeci:error:unavailable","retry_after":4000000000,"errors":[{"pointer":"/a"}]}`))
	f.Add(429, "", []byte(`{"type":"urn:forgeci:error:rate_limited","retry_after":-9223372036854775808}`))
	f.Add(400, "", []byte(`{"type":"urn:forgeci:error:of_a_later_version"}`))
	f.Add(502, "-1", []byte("<html>bad gateway"))
	f.Fuzz(func(t *testing.T, status int, wait string, body []byte) {
		r, err := http.NewRequest(http.MethodGet, "http://server.test/", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		e := errorFrom(&http.Response{StatusCode: status, Status: http.StatusText(status), Request: r, Header: http.Header{"Retry-After": {wait}}}, body)
		switch e.Kind {
		case ci.ErrNotFound, ci.ErrConflict, ci.ErrInvalid, ci.ErrForbidden, ci.ErrUnauthorized, ci.ErrLeaseLost, ci.ErrRunEnded, ci.ErrRateLimited,
			ci.ErrUnavailable, ci.ErrTooLarge, ci.ErrUnsafe, ci.ErrDigest, ci.ErrGone, ci.ErrIncompatible, ci.ErrMethod, ci.ErrInternal:
		default:
			t.Errorf("%d: nobody knows the kind %q", status, e.Kind)
		}
		if e.RetryAfter < 0 || e.RetryAfter > time.Hour {
			t.Errorf("%d: try again in %v", status, e.RetryAfter)
		}
		if strings.TrimSpace(e.Detail) == "" && len(e.Fields) == 0 && e.Kind == "" {
			t.Errorf("%d: says nothing", status)
		}
	})
}
