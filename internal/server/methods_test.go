package server_test

import (
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server"
	"forgeci/internal/server/api"
	"forgeci/internal/server/web"
)

// addresses returns the methods of each path of the patterns, wildcards filled;
// where there is GET there is HEAD.
func addresses(patterns []string) map[string][]string {
	all := map[string][]string{}
	for _, p := range patterns {
		method, path, _ := strings.Cut(p, " ")
		path = regexp.MustCompile(`\{\w+\}`).ReplaceAllString(strings.TrimSuffix(path, "{$}"), "x1")
		all[path] = append(all[path], method)
		if method == http.MethodGet {
			all[path] = append(all[path], http.MethodHead)
		}
	}
	return all
}

// Every address says which methods it takes when it is asked with another, and
// what is at no address says so: a program gets problem+json, a person a page.
// Nothing of it needs a credential, and nothing of it is an answer of the
// library's own.
func TestWrongMethodsAndAddressesAreAnsweredInKind(t *testing.T) {
	t.Parallel()
	s, err := server.New(t.Context(), server.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(start(t, s))

	var machine, people []string
	for _, r := range (&api.API{}).Routes() {
		machine = append(machine, r.Pattern)
	}
	for _, r := range web.New(web.Config{}).Routes() {
		if r.Method != "" {
			people = append(people, r.Mux())
		}
	}
	methods := []string{
		http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch,
		http.MethodDelete, http.MethodOptions, http.MethodTrace, "BREW", "get",
	}
	wrong := 0
	check := func(media, method, path string, status int, allow []string) {
		wrong++
		resp, body := answer(t, method, s.URL()+path)
		got := strings.Split(resp.Header.Get("Allow"), ", ")
		slices.Sort(got)
		if len(allow) == 0 {
			allow = []string{""}
		}
		slices.Sort(allow)
		if resp.StatusCode != status || !slices.Equal(got, allow) || !strings.HasPrefix(resp.Header.Get("Content-Type"), media) {
			t.Errorf("%s %s: %d %s, Allow %v; want %d %s, Allow %v", method, path,
				resp.StatusCode, resp.Header.Get("Content-Type"), got, status, media, allow)
			return
		}
		if media != protocol.MediaProblem || method == http.MethodHead {
			return
		}
		var p protocol.Problem
		kind := map[int]ci.Kind{404: ci.ErrNotFound, 405: ci.ErrMethod}[status]
		if err := json.Unmarshal(body, &p); err != nil || p.Status != status || !strings.HasSuffix(p.Type, ":"+string(kind)) || p.Detail == "" {
			t.Errorf("%s %s: %v %s", method, path, err, body)
		}
	}
	for _, side := range []struct {
		media     string
		addresses map[string][]string
		nowhere   []string
	}{
		{protocol.MediaProblem, addresses(machine), []string{
			"/v1", "/v1/", "/v1/nothing", "/v1/jobs", "/v1/jobs/", "/v1/jobs/x1/nothing", "/v1/runner/claim/", "/v1/workflow-runs/x1/cancel/now",
		}},
		{"text/html", addresses(people), []string{
			"/nothing", "/v2/jobs", "/jobs", "/runs/", "/runs/x1/nothing", "/runs/x1/cancel/", "/static", "/healthz/", "/openapi.jso", "/metrics/x",
		}},
	} {
		for _, path := range slices.Sorted(maps.Keys(side.addresses)) {
			for _, m := range methods {
				if allow := side.addresses[path]; !slices.Contains(allow, m) {
					check(side.media, m, path, http.StatusMethodNotAllowed, slices.Clone(allow))
				}
			}
		}
		for _, path := range side.nowhere {
			for _, m := range methods {
				check(side.media, m, path, http.StatusNotFound, nil)
			}
		}
	}
	if wrong < 400 {
		t.Errorf("only %d pairs of method and address were asked", wrong)
	}
}

func answer(t *testing.T, method, url string) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, body
}
