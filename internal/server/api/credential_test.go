package api

import (
	"net/http"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
)

// The route × credential table: every route is asked with every kind of
// credential that exists. Only the one that its row names gets past the door.
func TestRouteCredentialTable(t *testing.T) {
	t.Parallel()
	s := newStage(t, "sqlite:"+t.TempDir()+"/m.db", all)
	revoked := protocol.NewToken(protocol.TokenAdmin) // of no installation
	credentials := map[string]string{
		"none": "", "admin": s.admin, "registration": s.registration, "runner": s.tokens["a"],
		"unknown": revoked, "malformed": "fca_short", "another tenant's runner": s.tokens["c"],
	}
	opens := map[auth.Credential][]string{
		auth.None:         {"none", "admin", "registration", "runner", "unknown", "malformed", "another tenant's runner"},
		auth.Registration: {"registration"},
		auth.Runner:       {"runner", "another tenant's runner"},
		auth.Person:       {"admin"},
		auth.Admin:        {"admin"},
	}
	for _, route := range s.api.Routes() {
		may, ok := opens[route.Credential]
		if !ok {
			t.Errorf("%s: no row for credential %q", route.Pattern, route.Credential)
		}
		method, path, _ := strings.Cut(route.Pattern, " ")
		for name, token := range credentials {
			status, body := s.send(token, matrixRequest{method: method, path: wildcards(path), media: protocol.MediaJSON, body: []byte("{}")})
			refused := status == http.StatusUnauthorized || status == http.StatusForbidden
			allowed := false
			for _, m := range may {
				allowed = allowed || m == name
			}
			if refused == allowed {
				t.Errorf("%s with %s: %d %s", route.Pattern, name, status, body)
			}
		}
	}
}

// wildcards fills a path with identifiers of nothing.
func wildcards(path string) string {
	return strings.NewReplacer("{repo_id}", "repo_0", "{digest}", "sha256:0", "{run_id}", "run_0", "{job_id}", "job_0",
		"{artifact_id}", "art_0", "{runner_id}", "rnr_0").Replace(path)
}

// A person's routes of one tenant show nothing of another: whatever is named by
// an ID there is found under the tenant's own ID and not under the other's.
func TestAnotherTenantSeesNothing(t *testing.T) {
	t.Parallel()
	s := newStage(t, "sqlite:"+t.TempDir()+"/m.db", all)
	s.end("a", s.lease, nil) // event streams of what has ended end by themselves
	s.end("a", s.sibling, nil)
	dead := func(name string) ci.LeaseRef { // a dead letter
		ref := s.claim(name)
		_, err := s.engine.Complete(s.ctx, s.hold(name, ref), protocol.Complete{
			RequestID: "dead", Conclusion: ci.ConclusionFailed, Reason: ci.ReasonPrepare, Evidence: protocol.Evidence{Terminated: true, How: "nothing started"},
		})
		s.must(err)
		s.settle(ref)
		return ref
	}
	s.submit(s.org)
	s.produce("a")
	mine, others := dead("a"), dead("c")
	own := strings.NewReplacer("{run_id}", string(s.lease.Run), "{job_id}", string(mine.Job),
		"{runner_id}", string(s.ids["a"].Runner), "{repo_id}", string(s.repos[s.org]), "{digest}", matrixDigest, "{artifact_id}", s.restorable)
	foreign := strings.NewReplacer("{run_id}", string(others.Run), "{job_id}", string(others.Job),
		"{runner_id}", string(s.ids["c"].Runner), "{repo_id}", string(s.repos[s.otherOrg]), "{digest}", matrixDigest, "{artifact_id}", s.abroad)
	for _, route := range s.api.Routes() {
		if route.Credential != auth.Person && route.Credential != auth.Admin || !strings.Contains(route.Pattern, "{") {
			continue
		}
		method, path, _ := strings.Cut(route.Pattern, " ")
		ask := func(path string) (int, []byte) {
			return s.send(s.admin, matrixRequest{method: method, path: path, media: protocol.MediaJSON, body: []byte("{}")})
		}
		if status, body := ask(foreign.Replace(path)); status != http.StatusNotFound {
			t.Errorf("%s of another tenant: %d %s, want 404", route.Pattern, status, body)
		}
		if status, body := ask(own.Replace(path)); status == http.StatusNotFound {
			t.Errorf("%s of the own tenant: %d %s", route.Pattern, status, body)
		}
	}
}
