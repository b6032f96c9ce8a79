package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/testkit"
)

func bothDatabases(t *testing.T, f func(*testing.T, *stage)) {
	t.Helper()
	for name, url := range map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/m.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, newStage(t, url(t), all))
		})
	}
}

// ask sends what a route's own caller might, with the lease that it holds.
func (s *stage) ask(route Route, path string, body []byte) (int, protocol.Problem) {
	s.t.Helper()
	method, pattern, _ := strings.Cut(route.Pattern, " ")
	if path == "" {
		path = strings.ReplaceAll(wildcards(pattern), "sha256:0", matrixDigest)
	}
	token := map[auth.Credential]string{auth.Registration: s.registration, auth.Runner: s.tokens["a"], auth.Person: s.admin, auth.Admin: s.admin}[route.Credential]
	r := matrixRequest{method: method, path: path, body: body, media: protocol.MediaJSON}
	if route.Lease == LeaseActive || route.Lease == LeaseCancelling {
		r.lease = &s.lease
	}
	status, b := s.send(token, r)
	var p protocol.Problem
	if status >= 400 {
		if err := json.Unmarshal(b, &p); err != nil || p.Status != status || p.Detail == "" || p.Instance == "" {
			s.t.Errorf("%s %s: %d %s: not a problem document that says what is wrong", route.Pattern, clip(string(body), 200), status, b)
		}
		// Names of packages and statements are ours alone.
		if leak := regexp.MustCompile(`protocol\.|\bci\.[A-Z]|json: |SQLSTATE|sqlite|pgx|\.go\b|goroutine`).FindString(fmt.Sprint(p.Detail, p.Errors)); leak != "" {
			s.t.Errorf("%s %s: %+v: shows %q", route.Pattern, clip(string(body), 200), p, leak)
		}
	}
	return status, p
}

// Every string of every document that reaches the database, with a NUL in it, is
// refused by its place, on both databases, and nothing is stored.
func TestNoStringOfARequestMayHoldANUL(t *testing.T) {
	t.Parallel()
	bothDatabases(t, func(t *testing.T, s *stage) {
		before := s.dump()
		fields := 0
		for _, route := range s.api.Routes() {
			if route.In == nil {
				continue
			}
			for _, place := range leaves(reflect.TypeOf(route.In), "") {
				fields++
				status, p := s.ask(route, "", withNUL(t, route.In, place))
				if status != http.StatusUnprocessableEntity || len(p.Errors) != 1 || p.Errors[0].Pointer != place {
					t.Errorf("%s, NUL at %s: %d %+v", route.Pattern, place, status, p)
				}
			}
		}
		if fields < 60 {
			t.Errorf("only %d strings were tried", fields)
		}
		if after := s.dump(); !slices.Equal(before, after) {
			t.Error("a refused request changed the database")
		}
	})
}

// leaves lists the JSON pointers of the strings of a document, in which every
// list has one element and every map the key "k".
func leaves(t reflect.Type, at string) []string {
	var out []string
	switch {
	case t == reflect.TypeFor[time.Time](), t == reflect.TypeFor[ci.Duration](), t == reflect.TypeFor[[]byte]():
		return nil // their text has a form of its own
	case t.Kind() == reflect.String:
		return []string{at}
	case t.Kind() == reflect.Pointer:
		return leaves(t.Elem(), at)
	case t.Kind() == reflect.Slice:
		return leaves(t.Elem(), at+"/0")
	case t.Kind() == reflect.Map:
		return leaves(t.Elem(), at+"/k")
	case t.Kind() == reflect.Struct:
		for field := range t.Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			out = append(out, leaves(field.Type, at+"/"+name)...)
		}
	}
	return out
}

// withNUL renders a document of which only the string at the place is set.
func withNUL(t *testing.T, in any, place string) []byte {
	t.Helper()
	parts := strings.Split(strings.TrimPrefix(place, "/"), "/")
	var v any = "a\x00b"
	for _, p := range slices.Backward(parts) {
		if p == "0" {
			v = []any{v}
		} else {
			v = map[string]any{p: v}
		}
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, reflect.New(reflect.TypeOf(in)).Interface()); err != nil {
		t.Fatalf("the test's own document for %s: %v", place, err)
	}
	return b
}

// A NUL or bytes that are not UTF-8, wherever an address may hold them, are
// refused before anything reads them: a database refuses the one or the other.
func TestNoAddressMayHoldWhatADatabaseRefuses(t *testing.T) {
	t.Parallel()
	bothDatabases(t, func(t *testing.T, s *stage) {
		for _, route := range s.api.Routes() {
			_, pattern, _ := strings.Cut(route.Pattern, " ")
			var paths []string
			for _, bad := range []string{"%00", "a%00b", "%ff", "%c3%28", "%ed%a0%80"} {
				for _, wild := range regexp.MustCompile(`\{\w+\}`).FindAllString(pattern, -1) {
					paths = append(paths, wildcards(strings.Replace(pattern, wild, bad, 1)))
				}
				for _, name := range []string{"after", "repo", "commit", "state", "q", "stream", "x"} {
					paths = append(paths, wildcards(pattern)+"?"+name+"="+bad, wildcards(pattern)+"?"+bad+"="+name)
				}
			}
			paths = append(paths, wildcards(pattern)+"?a=%zz", wildcards(pattern)+"?a;b")
			for _, path := range paths {
				if status, p := s.ask(route, path, []byte("{}")); status != http.StatusUnprocessableEntity {
					t.Errorf("%s: %d %+v", path, status, p)
				}
			}
		}
	})
}

// A body of any wrong shape is the caller's error, told in words of JSON; never
// a defect of the server, and never taken.
func TestBodiesOfWrongShapesAreRefusedInWordsOfJSON(t *testing.T) {
	t.Parallel()
	shapes := map[string]string{
		"empty": "", "space": "  ", "array": "[]", "string": `"x"`, "number": "1", "true": "true", "cut": `{"a":`, "two": "{} {}",
		"trailing": "{}]", "deep": strings.Repeat("[", 100_000), "deep object": strings.Repeat(`{"a":`, 20_000),
		"deep and closed": strings.Repeat(`{"a":`, 11_000) + "1" + strings.Repeat("}", 11_000),
		"not UTF-8":       "{\"a\":\"\xff\"}", "byte order mark": "\xef\xbb\xbf{}", "binary": "\x00\x01", "gzip": "\x1f\x8b\x08",
		"single quotes": "{'a':1}", "comment": "{/**/}",
	}
	for _, k := range []string{
		"request_id", "protocol", "slots", "name", "failed", "jobs", "inputs", "offer", "steps", "evidence", "leases",
		"terminated", "size", "parts", "session", "wait", "at", "public_key", "key",
	} {
		for i, v := range []string{`{"a":[]}`, `[[]]`, `1e999999`, `-1e30`, `123456789012345678901234567890`, `1.5`, `"\ud800"`, `[null,{}]`} {
			shapes[fmt.Sprint(k, i)] = fmt.Sprintf(`{%q:%s}`, k, v)
		}
	}
	bothDatabases(t, func(t *testing.T, s *stage) {
		for _, route := range s.api.Routes() {
			if route.In == nil {
				continue
			}
			for name, body := range shapes {
				switch status, p := s.ask(route, "", []byte(body)); {
				case status >= 500:
					t.Errorf("%s, %s: %d %+v", route.Pattern, name, status, p)
				case status < 400 && route.Lease != LeaseActive: // an empty phase report is none of anything
					t.Errorf("%s, %s: taken with %d", route.Pattern, name, status)
				}
			}
		}
	})
}

// A person's document in which a key comes twice, at any depth, is refused: one
// of the two would silently not count.
func TestAKeyThatComesTwiceIsRefused(t *testing.T) {
	t.Parallel()
	for body, place := range map[string]string{
		`{"failed":true,"failed":false}`:               "/failed",
		`{"failed":true,"\u0066ailed":false}`:          "/failed",
		`{"inputs":{"a":"1","b":"2","a":"3"}}`:         "/inputs/a",
		`{"inputs":{"a/b~c":"1","a/b~c":"2"}}`:         "/inputs/a~1b~0c",
		`{"jobs":["a","a"],"inputs":{},"jobs":["b"]} `: "/jobs",
	} {
		type document struct {
			Failed bool              `json:"failed"`
			Inputs map[string]string `json:"inputs"`
			Jobs   []string          `json:"jobs"`
		}
		_, err := decodeBytes[document]([]byte(body), true)
		var e *ci.Error
		if ci.KindOf(err) != ci.ErrInvalid || !asError(err, &e) || len(e.Fields) != 1 || e.Fields[0].Pointer != place {
			t.Errorf("%s: %v, want %s", body, err, place)
		}
	}
}

func asError(err error, e **ci.Error) bool {
	known, ok := err.(*ci.Error) //nolint:errorlint // as it is returned
	*e = known
	return ok
}

// An encoded body is refused before a byte of it is unfolded.
func TestEncodedBodiesAreRefused(t *testing.T) {
	t.Parallel()
	for _, e := range []string{"gzip", "deflate", "br", "zstd", "gzip, gzip", "x"} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/repos", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Encoding", e)
		if err := WellFormed(r); ci.KindOf(err) != ci.ErrInvalid {
			t.Errorf("%s: %v", e, err)
		}
	}
}

// What a runner reports cannot break a constraint of the database or fill it.
func TestReportsOutOfBoundsAreRefusedByTheirPlace(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	good := `"request_id":"r","conclusion":"failed","evidence":{"terminated":true,"how":"scan"}`
	bothDatabases(t, func(t *testing.T, s *stage) {
		before := s.dump()
		for _, c := range []struct{ route, body, place string }{
			{protocol.RoutePhase, `{"phase":"bogus"}`, "/phase"},
			{protocol.RoutePhase, `{"steps":[{"index":0,"state":"bogus"}]}`, "/steps/0/state"},
			{protocol.RoutePhase, `{"steps":[{"index":-1,"state":"running"}]}`, "/steps/0/index"},
			{protocol.RoutePhase, `{"steps":[{"index":0,"state":"running"},{"index":4611686018427387904,"state":"running"}]}`, "/steps/1/index"},
			{protocol.RoutePhase, `{"steps":[{"index":0,"state":"finished","conclusion":"` + long + `"}]}`, "/steps/0/conclusion"},
			{protocol.RoutePhase, `{"steps":[{"index":0,"state":"finished","reason":"` + long + `"}]}`, "/steps/0/reason"},
			{protocol.RouteComplete, `{` + good + `,"steps":[{"index":0,"state":"bogus"}]}`, "/steps/0/state"},
			{protocol.RouteComplete, `{` + good + `,"streams":[{"step":0,"stream":9,"length":1}]}`, "/streams/0/stream"},
			{protocol.RouteComplete, `{` + good + `,"streams":[{"step":0,"stream":1,"length":-1}]}`, "/streams/0/length"},
			{protocol.RouteComplete, `{` + good + `,"streams":[{"step":99999,"stream":1,"length":1}]}`, "/streams/0/step"},
			{protocol.RouteComplete, `{` + good + `,"reason":"` + long + `"}`, "/reason"},
			{protocol.RouteComplete, `{` + good + `,"reason":"a b"}`, "/reason"},
			{protocol.RouteComplete, `{"request_id":"r","conclusion":"failed","evidence":{"terminated":true,"how":"` + long + `"}}`, "/evidence/how"},
			{protocol.RouteComplete, `{"request_id":"r","conclusion":"failed"}`, "/evidence/terminated"},
			{protocol.RouteComplete, `{"request_id":"r","conclusion":"skipped"}`, "/conclusion"},
			{protocol.RouteHandOver, `{"request_id":"r","reason":"runner_shutdown","evidence":{"terminated":true,"how":"x"},"steps":[{"index":0,"state":"bogus"}]}`, "/steps/0/state"},
			{protocol.RouteHandOver, `{"request_id":"r","reason":"x","evidence":{"terminated":true,"how":"x"}}`, "/reason"},
			{protocol.RouteHeartbeat, `{"session":"` + string(s.lease.Session) + `","leases":[{"run":"x","job":"y","epoch":1}]}`, "/leases/0"},
			{protocol.RouteHeartbeat, `{"session":"` + string(s.lease.Session) + `","leases":[{"lease":"` + long + `","epoch":-1}]}`, "/leases/0"},
			{protocol.RouteOccupancy, `{"session":"` + string(s.lease.Session) + `","terminated":[{"job":"x","epoch":1}]}`, "/terminated/0"},
			{protocol.RouteOpenSession, `{"request_id":"r","protocol":1,"slots":1,"terminated":[{"job":"job_0","epoch":0}]}`, "/terminated/0"},
			{protocol.RouteOpenSession, `{"request_id":"r","protocol":1,"slots":1,"offer":{"os":"` + long + `"}}`, "/offer/os"},
			{protocol.RouteOpenSession, `{"request_id":"r","protocol":1,"slots":1,"offer":{"labels":["ok","` + long + `"]}}`, "/offer/labels/1"},
			{protocol.RouteOpenSession, `{"request_id":"r","protocol":1,"slots":1,"offer":{"labels":["a\nb"]}}`, "/offer/labels/0"},
			{protocol.RouteOpenSession, `{"request_id":"r","protocol":1,"slots":1,"offer":{"isolation":[""]}}`, "/offer/isolation/0"},
			{protocol.RouteRegister, `{"name":"a\u001b[31m","public_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","credential":"` + protocol.NewToken(protocol.TokenRunner) + `"}`, "/name"},
			{protocol.RouteRegister, `{"name":"a","public_key":"AAAA","credential":"` + protocol.NewToken(protocol.TokenRunner) + `"}`, "/public_key"},
			{protocol.RouteRegister, `{"name":"a","public_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","credential":"fcn_guessed"}`, "/credential"},
		} {
			i := slices.IndexFunc(s.api.Routes(), func(r Route) bool { return r.Pattern == c.route })
			status, p := s.ask(s.api.Routes()[i], "", []byte(c.body))
			if status != http.StatusUnprocessableEntity || len(p.Errors) != 1 || p.Errors[0].Pointer != c.place || len(p.Detail) > 400 {
				t.Errorf("%s, want %s: %d %+v", c.route, c.place, status, p)
			}
		}
		if after := s.dump(); !slices.Equal(before, after) {
			t.Error("a refused report changed the database")
		}
	})
}
