package web_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/html"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/web"
	"forgeci/internal/server/web/storybook"
)

var update = flag.Bool("update", false, "rewrite the golden files") //nolint:gochecknoglobals // a test flag

func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// get answers a request to a handler, signed in unless a cookie says otherwise.
func get(t *testing.T, h http.Handler, path string, change ...func(*http.Request)) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, path, http.NoBody)
	r.AddCookie(&http.Cookie{Name: "forgeci", Value: "sample-session"})
	for _, c := range change {
		c(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// routed serves the routes of a site.
func routed(site *web.Site) http.Handler {
	mux := http.NewServeMux()
	for _, r := range site.Routes() {
		mux.Handle(r.Mux(), r.Handler)
	}
	return mux
}

func TestPagesLookAsTheyDid(t *testing.T) {
	t.Parallel()
	version := regexp.MustCompile(`/static/[0-9a-f]{12}/`)
	for _, p := range storybook.Pages() {
		t.Run(p.Name, func(t *testing.T) {
			t.Parallel()
			w, err := p.Render(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			got := version.ReplaceAllString(w.Body.String(), "/static/VERSION/")
			if strings.Contains(got, "ZgotmplZ") || strings.Contains(got, "<no value>") {
				t.Error("a template got a value that it cannot show")
			}
			if p.Name == "run-large" { // too large to read; its graph has tests of its own
				return
			}
			file := filepath.Join("testdata", "golden", p.Name+".html")
			if *update {
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatalf("%v; write it with: go test ./internal/server/web -update", err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", file, diff)
			}
		})
	}
}

// TestFirstPageIsSmallAndFast holds UI-1: 60 kB with everything that it loads,
// before compression, in 100 ms of the server's time.
func TestFirstPageIsSmallAndFast(t *testing.T) {
	t.Parallel()
	h := storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), "0.1.0")
	w := get(t, h, "/")
	total := w.Body.Len()
	for _, m := range regexp.MustCompile(`"(/static/[^"]+)"`).FindAllStringSubmatch(w.Body.String(), -1) {
		total += get(t, h, m[1]).Body.Len()
	}
	prefix := regexp.MustCompile(`/static/[0-9a-f]{12}/`).FindString(w.Body.String())
	total += get(t, h, prefix+"stream.js").Body.Len() // imported by live.js
	if total > 60_000 {
		t.Errorf("the first page and all it loads are %d bytes, want at most 60,000", total)
	}
	start := time.Now()
	const n = 20
	for range n {
		get(t, h, "/")
	}
	if each := time.Since(start) / n; each > 100*time.Millisecond {
		t.Errorf("the first page takes %v, want at most 100 ms", each)
	}
}

func TestEveryRouteSendsTheSecurityHeaders(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	for _, secure := range []bool{false, true} {
		site := web.New(web.Config{Reader: book, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now, Secure: secure})
		for _, route := range site.Routes() {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			r := httptest.NewRequestWithContext(ctx, route.Method, "/", http.NoBody)
			w := httptest.NewRecorder()
			route.Handler.ServeHTTP(w, r)
			cancel()
			h := w.Header()
			for name, want := range map[string]string{
				"Content-Security-Policy":    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
				"X-Content-Type-Options":     "nosniff",
				"Referrer-Policy":            "no-referrer",
				"Cross-Origin-Opener-Policy": "same-origin",
			} {
				if got := h.Get(name); got != want {
					t.Errorf("%s %s: %s is %q, want %q", route.Method, route.Pattern, name, got, want)
				}
			}
			if got := h.Get("Strict-Transport-Security") != ""; got != secure {
				t.Errorf("%s %s: HSTS %v with secure %v", route.Method, route.Pattern, got, secure)
			}
			if h.Get("Cache-Control") == "" {
				t.Errorf("%s %s: no Cache-Control", route.Method, route.Pattern)
			}
		}
	}
}

func TestRoutesNeedASessionUnlessOpen(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	site := web.New(web.Config{Reader: book, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now})
	for _, route := range site.Routes() {
		for _, cookie := range []string{"", "forged"} {
			r := httptest.NewRequest(route.Method, "/somewhere?x=1", http.NoBody)
			if cookie != "" {
				r.AddCookie(&http.Cookie{Name: "forgeci", Value: cookie})
			}
			w := httptest.NewRecorder()
			route.Handler.ServeHTTP(w, r)
			switch {
			case route.Open:
				if w.Code == http.StatusUnauthorized && route.Pattern != "/signin" {
					t.Errorf("%s %s is open and answers %d", route.Method, route.Pattern, w.Code)
				}
			case route.Method == http.MethodGet && route.Pattern != "/events":
				if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/signin?next=%2Fsomewhere%3Fx%3D1" {
					t.Errorf("%s %s without a session: %d to %q", route.Method, route.Pattern, w.Code, w.Header().Get("Location"))
				}
			case w.Code != http.StatusUnauthorized:
				t.Errorf("%s %s without a session: %d, want 401", route.Method, route.Pattern, w.Code)
			}
		}
	}
	if did := slices.DeleteFunc(book.Did(), func(s string) bool { return s == "sign out" }); len(did) > 0 {
		t.Errorf("without a session it did %q", did)
	}
}

func post(t *testing.T, h http.Handler, path string, form url.Values, change ...func(*http.Request)) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.AddCookie(&http.Cookie{Name: "forgeci", Value: "sample-session"})
	for _, c := range change {
		c(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestSignInSetsACookieThatNoScriptReads(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	const loopback, secure = "forgeci=sample-session; Path=/; HttpOnly; SameSite=Lax", "__Host-forgeci=sample-session; Path=/; HttpOnly; Secure; SameSite=Lax"
	for _, c := range []struct {
		url    string
		secure bool
		want   string
	}{
		{"", false, loopback},
		{"http://ci.example.com", false, loopback},
		{"", true, secure},
		{"https://ci.example.com/", false, secure}, // a proxy in front encrypts
	} {
		site := web.New(web.Config{Reader: book, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now, URL: c.url, Secure: c.secure})
		mux := http.NewServeMux()
		for _, r := range site.Routes() {
			mux.Handle(r.Mux(), r.Handler)
		}
		w := post(t, mux, "/signin", url.Values{"token": {storybook.Token}, "next": {"/runs?status=failed"}})
		if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/runs?status=failed" {
			t.Errorf("signing in answers %d to %q", w.Code, w.Header().Get("Location"))
		}
		if got := w.Header().Get("Set-Cookie"); got != c.want {
			t.Errorf("cookie %q, want %q", got, c.want)
		}
		w = post(t, mux, "/signin", url.Values{"token": {"wrong"}})
		if w.Code != http.StatusUnauthorized || w.Header().Get("Set-Cookie") != "" || !strings.Contains(w.Body.String(), "not the admin token") {
			t.Errorf("a wrong token answers %d with cookie %q", w.Code, w.Header().Get("Set-Cookie"))
		}
		if strings.Contains(w.Body.String(), `value="wrong"`) {
			t.Error("the page repeats the token")
		}
	}
}

func TestPagesNameTheAddressOfTheServer(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Data{}, storybook.Now)
	for _, c := range []struct {
		url    string
		secure bool
		want   string
	}{
		{"", false, "http://example.com"},
		{"", true, "https://example.com"},
		{"https://ci.example.com/", false, "https://ci.example.com"}, // a proxy in front encrypts
	} {
		site := web.New(web.Config{Reader: book, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now, URL: c.url, Secure: c.secure})
		w := get(t, routed(site), "/runners", func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "__Host-forgeci", Value: storybook.Session}) })
		if body := w.Body.String(); !strings.Contains(body, "--server "+c.want+" --token") {
			t.Errorf("%q, secure %v: the page does not name %s: %d %s", c.url, c.secure, c.want, w.Code, body)
		}
	}
}

// However many runners have come and gone, those that are there are shown, and all
// are counted.
func TestThePageOfRunnersShowsAllThatAreThere(t *testing.T) {
	t.Parallel()
	var d storybook.Data
	for i := range 700 {
		r := protocol.Runner{ID: ci.RunnerID(fmt.Sprintf("rnr_%03d", i)), Name: fmt.Sprintf("runner-%03d", i), Status: "offline", Slots: 1}
		if i < 250 { // they come first
			r.Status = "online"
		}
		d.Runners = append(d.Runners, r)
	}
	d.Runners[699].Running = []protocol.HeldJob{{Job: "job_a", Name: "a", Epoch: 1, Quarantined: true}}
	body := get(t, storybook.New(d, storybook.Now).Handler(logger(t), ""), "/runners").Body.String()
	for _, want := range []string{"250 runners online", "runner-000", "runner-249", "runner-699", "449 more runners are away"} {
		if !strings.Contains(body, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	if strings.Contains(body, "runner-300") {
		t.Error("the page shows runners that are away beyond the bound")
	}
}

func TestNextStaysOnThisSite(t *testing.T) {
	t.Parallel()
	h := storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), "")
	for next, want := range map[string]string{
		"/runs": "/runs", "/jobs/x?from=2": "/jobs/x?from=2", "": "/", "//evil.example": "/", "https://evil.example/": "/",
		"/\\evil.example": "/", "javascript:x()": "/", "/\t/evil.example": "/", "runs": "/", "/%zz": "/", "/x\r\nSet-Cookie: a=b": "/",
	} {
		for _, path := range []string{"/signin", "/theme"} {
			w := post(t, h, path, url.Values{"token": {storybook.Token}, "theme": {"dark"}, "next": {next}})
			if got := w.Header().Get("Location"); got != want {
				t.Errorf("%s with next %q leads to %q, want %q", path, next, got, want)
			}
		}
	}
}

func TestFormsFromElsewhereAreRefused(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	h := book.Handler(logger(t), "")
	w := post(t, h, "/runs/"+string(storybook.RunningRun)+"/cancel", nil, func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") })
	if w.Code != http.StatusForbidden || len(book.Did()) > 0 {
		t.Errorf("a form of another site: %d, did %q", w.Code, book.Did())
	}
}

func TestFormsDoWhatTheySay(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	h := book.Handler(logger(t), "")
	post(t, h, "/runs/run_a/cancel", nil)
	post(t, h, "/runs/run_a/retry", nil)
	post(t, h, "/runs/run_a/retry", url.Values{"failed": {"1"}})
	post(t, h, "/runners/rnr_a/drain", nil)
	if w := post(t, h, "/runners/rnr_a/fence", nil); w.Code != http.StatusBadRequest {
		t.Errorf("fencing without the box ticked: %d, want 400", w.Code)
	}
	post(t, h, "/runners/rnr_a/fence", url.Values{"dead": {"1"}})
	if w := post(t, h, "/deadletters/"+string(storybook.AbortedJob)+"/requeue", nil); w.Header().Get("Location") != "/runs/"+string(storybook.AbortedRun) {
		t.Errorf("requeue leads to %q", w.Header().Get("Location"))
	}
	post(t, h, "/signout", nil)
	want := []string{
		"admin cancel run_a", "admin retry run_a false", "admin retry run_a true", "admin drain rnr_a", "admin fence rnr_a",
		"admin requeue " + string(storybook.AbortedJob), "sign out",
	}
	if diff := cmp.Diff(want, book.Did()); diff != "" {
		t.Errorf("did (-want +got):\n%s", diff)
	}
}

// However often its buttons are pressed, a page makes one run of each.
func TestAPageMakesOneRetryOfManyClicks(t *testing.T) {
	t.Parallel()
	book := storybook.New(storybook.Sample(), storybook.Now)
	h := book.Handler(logger(t), "")
	page := get(t, h, "/runs/"+string(storybook.AbortedRun)).Body.String()
	token := regexp.MustCompile(`<input type="hidden" name="page" value="(\d+)">`).FindAllStringSubmatch(page, -1)
	if len(token) != 2 {
		t.Fatalf("%d of 2 forms have a key:\n%s", len(token), page)
	}
	form := url.Values{"page": {token[0][1]}}
	post(t, h, "/runs/run_a/retry", form)
	post(t, h, "/runs/run_a/retry", form)
	form.Set("failed", "1")
	post(t, h, "/runs/run_a/retry", form)
	did := book.Did()
	if len(did) != 3 || !strings.Contains(did[0], " as page ") || did[0] != did[1] || did[2] == strings.Replace(did[0], "run_a false", "run_a true", 1) {
		t.Errorf("retries %q: the first two want one key, the third another", did)
	}
	form.Set("page", "x")
	if w := post(t, h, "/runs/run_a/retry", form); w.Code != http.StatusBadRequest || len(book.Did()) != 3 {
		t.Errorf("a made-up key: %d", w.Code)
	}
}

// broken is a reader whose every answer is one error.
type broken struct {
	*storybook.Book
	err error
}

func (b broken) Overview(context.Context, auth.Viewer) (web.Overview, error) {
	return web.Overview{}, b.err
}

func TestErrorPagesTellWhatIsForVisitorsOnly(t *testing.T) {
	t.Parallel()
	cause := errors.New("password=hunter2 at 10.0.0.3")
	for kind, status := range map[ci.Kind]int{
		ci.ErrInvalid: 400, ci.ErrForbidden: 403, ci.ErrNotFound: 404, ci.ErrConflict: 409, ci.ErrGone: 410, ci.ErrTooLarge: 413,
		ci.ErrRateLimited: 429, ci.ErrUnavailable: 503, ci.ErrInternal: 500, "": 500,
	} {
		var err error = ci.Errorf(kind, "say <this>").WithCause(cause)
		if kind == "" {
			err = cause
		}
		book := storybook.New(storybook.Sample(), storybook.Now)
		site := web.New(web.Config{Reader: broken{book, err}, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now})
		w := get(t, site.Routes()[0].Handler, "/")
		body := w.Body.String()
		if w.Code != status {
			t.Errorf("%s: status %d, want %d", kind, w.Code, status)
		}
		if strings.Contains(body, "hunter2") {
			t.Errorf("%s: the page tells the cause", kind)
		}
		if told := strings.Contains(body, "say &lt;this&gt;"); told != (status != 500) {
			t.Errorf("%s: the detail is told: %v", kind, told)
		}
	}
}

func TestAnEarlierAttemptIsShownWithItsOwnSteps(t *testing.T) {
	t.Parallel()
	d := storybook.Sample()
	job := d.Jobs[storybook.FailedJob]
	job.Attempt[0].StepList = []protocol.Step{{Index: 0, Name: "the first try", State: ci.StateFinished, Conclusion: ci.ConclusionAborted}}
	h := storybook.New(d, storybook.Now).Handler(logger(t), "")
	for attempt, want := range map[string]string{"1": "the first try", "2": "upload the report", "": "upload the report"} {
		for _, fragment := range []string{"", "&fragment=1"} {
			body := get(t, h, "/jobs/"+string(job.ID)+"?attempt="+attempt+fragment).Body.String()
			_, list, _ := strings.Cut(body, `<ol class="steps">`)
			list, _, _ = strings.Cut(list, "</ol>")
			if !strings.Contains(list, want) || strings.Contains(list, "the first try") != (attempt == "1") {
				t.Errorf("attempt %q%s has the steps %s", attempt, fragment, list)
			}
		}
	}
}

// damaged is a source whose logs cannot be read.
type damaged struct {
	web.Reader
	err error
}

func (d damaged) LogLines(context.Context, auth.Viewer, ci.JobID, web.LogQuery) (protocol.LogSlice, error) {
	return protocol.LogSlice{}, d.err
}

func TestALogThatCannotBeReadLeavesTheJobsPage(t *testing.T) {
	t.Parallel()
	b := storybook.New(storybook.Sample(), storybook.Now)
	for _, kind := range []ci.Kind{ci.ErrNotFound, ci.ErrGone, ci.ErrUnavailable, ci.ErrDigest} {
		var log bytes.Buffer
		site := web.New(web.Config{
			Reader: damaged{b, ci.Errorf(kind, "this log is not as it was")}, Actions: b, Auth: b,
			Log: slog.New(slog.NewTextHandler(&log, nil)), Now: storybook.Now,
		})
		w := get(t, routed(site), "/jobs/"+string(storybook.FailedJob))
		if body := w.Body.String(); w.Code != http.StatusOK || !strings.Contains(body, "this log is not as it was") || !strings.Contains(body, "Ownership") {
			t.Errorf("%s: %d %s", kind, w.Code, body)
		}
		if said, want := log.String() != "", kind == ci.ErrUnavailable || kind == ci.ErrDigest; said != want {
			t.Errorf("%s: the server's log holds %q", kind, &log)
		}
	}
}

func TestThemeIsInTheFirstBytes(t *testing.T) {
	t.Parallel()
	h := storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), "")
	w := get(t, h, "/", func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "forgeci_theme", Value: "dark"}) })
	if !strings.HasPrefix(w.Body.String(), "<!doctype html>\n<html lang=\"en\" data-theme=\"dark\">") {
		t.Errorf("page begins with %.80q", w.Body.String())
	}
	w = get(t, h, "/", func(r *http.Request) { r.Header.Add("Cookie", "forgeci_theme=dark\"onload=x()") })
	if strings.Contains(w.Body.String(), "onload") {
		t.Error("a forged theme reaches the page")
	}
}

func TestPagesAreCompressedForWhoTakesIt(t *testing.T) {
	t.Parallel()
	h := storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), "")
	plain := get(t, h, "/runs").Body.String()
	w := get(t, h, "/runs", func(r *http.Request) { r.Header.Set("Accept-Encoding", "gzip, br") })
	z, err := gzip.NewReader(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	unpacked, err := io.ReadAll(z)
	if err != nil || string(unpacked) != plain {
		t.Errorf("compressed page differs, %v", err)
	}
}

func TestAssetsNeverChangeUnderTheirAddress(t *testing.T) {
	t.Parallel()
	h := storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), "")
	prefix := regexp.MustCompile(`/static/[0-9a-f]{12}/`).FindString(get(t, h, "/").Body.String())
	for _, name := range []string{"style.css", "ansi.css", "live.js", "log.js", "stream.js", "ansi.js", "icon.svg"} {
		w := get(t, h, prefix+name)
		if w.Code != http.StatusOK || w.Header().Get("Cache-Control") != "public, max-age=31536000, immutable" {
			t.Errorf("%s: %d, %q", name, w.Code, w.Header().Get("Cache-Control"))
		}
		if old := get(t, h, "/static/000000000000/"+name); strings.Contains(old.Header().Get("Cache-Control"), "immutable") {
			t.Errorf("%s under another version may be kept for ever", name)
		}
	}
	if w := get(t, h, prefix+"nothing.js"); w.Code != http.StatusNotFound {
		t.Errorf("unknown asset: %d", w.Code)
	}
}

// payloads are the texts of UI-02.
func payloads() string {
	return "<script>x()</script><img src=x onerror=x()>\"><svg/onload=x()>'javascript:x(){{7*7}}${7*7}</title></textarea><!--\u202e\u200b\x00" + strings.Repeat("\u0301", 100)
}

// hostile returns the sample with the payloads in every field of text.
func hostile() storybook.Data {
	d := storybook.Sample()
	seen := map[uintptr]bool{}
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.String:
			if v.CanSet() && v.Type() == reflect.TypeFor[string]() {
				v.SetString(payloads())
			}
		case reflect.Pointer:
			if v.IsNil() || seen[v.Pointer()] || v.Type() == reflect.TypeFor[*storybook.Log]() {
				return
			}
			seen[v.Pointer()] = true
			fill(v.Elem())
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[time.Time]() {
				return
			}
			for i := range v.NumField() {
				if v.Type().Field(i).IsExported() {
					fill(v.Field(i))
				}
			}
		case reflect.Slice:
			for i := range v.Len() {
				fill(v.Index(i))
			}
		case reflect.Map:
			for _, k := range v.MapKeys() {
				e := reflect.New(v.Type().Elem()).Elem()
				e.Set(v.MapIndex(k))
				fill(e)
				if v.Type().Elem().Kind() != reflect.Int { // counts keep their words
					v.SetMapIndex(k, e)
				}
			}
		default:
		}
	}
	for i := range d.Runs {
		d.Runs[i].Inputs = map[string]string{payloads(): "x"}
	}
	fill(reflect.ValueOf(&d).Elem())
	// What addresses a page keeps its place; statuses keep their meaning.
	sample := storybook.Sample()
	for i := range d.Runs {
		for j := range d.Runs[i].JobList {
			d.Runs[i].JobList[j].Key = sample.Runs[i].JobList[j].Key + payloads()
			d.Runs[i].JobList[j].Needs = nil
			for _, n := range sample.Runs[i].JobList[j].Needs {
				d.Runs[i].JobList[j].Needs = append(d.Runs[i].JobList[j].Needs, n+payloads())
			}
		}
	}
	for i := range d.Runners {
		d.Runners[i].Status = sample.Runners[i].Status
	}
	for id, log := range d.Logs {
		if id != storybook.LongJob {
			d.Logs[id] = storybook.Live().Append(0, protocol.Stdout, payloads()+"\n\x1b[31m"+payloads()+"\x1b]8;;javascript:x()\x07link\x1b]8;;\x07\n", 0).Seal()
		}
		_ = log
	}
	return d
}

func TestCase_UI_02_MarkupInEveryFieldIsText(t *testing.T) {
	t.Parallel()
	for _, p := range storybook.Pages() {
		if p.Name == "run-large" {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			t.Parallel()
			h := storybook.New(hostile(), storybook.Now).Handler(logger(t), payloads())
			r, err := p.Request(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			body := w.Body.String()
			for _, c := range []string{"\u202e", "\u200b", "\x00"} {
				if strings.Contains(body, c) {
					t.Errorf("the page holds %q as it is", c)
				}
			}
			if !strings.Contains(body, "⟨U+202E⟩") {
				t.Error("the page does not name the direction control")
			}
			if strings.Contains(body, "49") && strings.Contains(body, ">49<") {
				t.Error("an expression was evaluated")
			}
			checkTree(t, body)
		})
	}
}

// checkTree fails when the page, parsed as browsers do, has a script that is not
// an asset, a handler, a style, or a link that is no path or https address.
func checkTree(t *testing.T, body string) {
	t.Helper()
	tree, err := html.Parse(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for n := range tree.Descendants() {
		if n.Type == html.TextNode && strings.Contains(n.Data, "<script>x()</script><img src=x onerror=x()>\"><svg/onload=x()>'javascript:x(){{7*7}}${7*7}</title>") {
			found = true
		}
		if n.Type == html.CommentNode {
			t.Errorf("comment %q", n.Data)
		}
		if n.Type != html.ElementNode {
			continue
		}
		if n.Data == "img" || n.Data == "style" || n.Data == "iframe" || n.Data == "object" {
			t.Errorf("element %s", n.Data)
		}
		for _, a := range n.Attr {
			if strings.HasPrefix(a.Key, "on") && a.Key != "open" || a.Key == "style" {
				t.Errorf("attribute %s of %s", a.Key, n.Data)
			}
			if a.Key == "href" || a.Key == "src" || a.Key == "action" {
				local := strings.HasPrefix(a.Val, "/") && !strings.HasPrefix(a.Val, "//") || strings.HasPrefix(a.Val, "#")
				if !local {
					t.Errorf("%s of %s leads to %q", a.Key, n.Data, a.Val)
				}
			}
			if n.Data == "script" && a.Key == "src" && !strings.HasPrefix(a.Val, "/static/") {
				t.Errorf("script from %q", a.Val)
			}
		}
		if n.Data == "script" && n.FirstChild != nil {
			t.Errorf("script with text %q", n.FirstChild.Data)
		}
	}
	if !found {
		t.Error("the payload is not there as literal text")
	}
}

func TestCase_UI_03_PageOfALargeRun(t *testing.T) {
	t.Parallel()
	d := storybook.Sample()
	d.Runs = append(d.Runs, hugeRun())
	h := storybook.New(d, storybook.Now).Handler(logger(t), "")
	start := time.Now()
	w := get(t, h, "/runs/"+string(hugeRun().ID))
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("a run of 2,000 jobs takes %v, want under 2 s", took)
	}
	body := w.Body.String()
	var boxes, rows int
	tree, err := html.Parse(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for n := range tree.Descendants() {
		for _, a := range n.Attr {
			switch {
			case n.Data == "rect" && a.Key == "class" && a.Val == "box":
				boxes++
			case n.Data == "li" && a.Key == "id" && strings.HasPrefix(a.Val, "j-"):
				rows++
			}
		}
	}
	if boxes != 5+100+1639+1 {
		t.Errorf("%d boxes, want one for each job and one for the matrix, 1745", boxes)
	}
	if rows != 2000 {
		t.Errorf("%d rows in the list, want 2000", rows)
	}
	counts := `<span class="s-success">56 Succeeded</span> <span class="s-waiting">200 Waiting</span>`
	if !strings.Contains(body, "56 succeeded, 200") || !strings.Contains(body, counts) {
		t.Error("the matrix does not say its counts")
	}
}

// hugeRun has 2,000 jobs: a tree and a matrix of 256.
func hugeRun() protocol.Run {
	r := storybook.LargeRun()
	r.ID = "run_01huge"
	r.JobList = nil
	add := func(key, name string, needs ...string) {
		r.JobList = append(r.JobList, protocol.JobSummary{
			ID: ci.JobID(fmt.Sprintf("job_01huge%d", len(r.JobList))), Key: key, Name: name, Needs: needs, State: ci.StateWaiting,
		})
	}
	for p := range 5 {
		add(fmt.Sprint("p", p), fmt.Sprint("p", p))
		for c := range 20 {
			add(fmt.Sprintf("p%d-%d", p, c), strings.Repeat("long ", 40), fmt.Sprint("p", p))
		}
	}
	for i := range 1639 {
		add(fmt.Sprint("leaf", i), fmt.Sprint("leaf", i), fmt.Sprintf("p%d-%d", i%5, i%20))
	}
	for i := range 256 {
		add("matrix", fmt.Sprintf("matrix (%d)", i), "p0")
		if i < 56 {
			last := &r.JobList[len(r.JobList)-1]
			last.State, last.Conclusion = ci.StateFinished, ci.ConclusionSuccess
		}
	}
	return r
}

// stream is a response writer that hands out what is flushed.
type stream struct {
	header http.Header
	out    chan string
	buf    bytes.Buffer
}

func (s *stream) Header() http.Header              { return s.header }
func (s *stream) WriteHeader(int)                  {}
func (s *stream) Write(b []byte) (int, error)      { return s.buf.Write(b) }
func (s *stream) SetWriteDeadline(time.Time) error { return nil }
func (s *stream) FlushError() error {
	s.out <- s.buf.String()
	s.buf.Reset()
	return nil
}

func TestCase_UI_04_EventStreamLivesAndEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		book := storybook.New(storybook.Sample(), storybook.Now)
		site := web.New(web.Config{Reader: book, Actions: book, Auth: book, Log: logger(t), Now: storybook.Now})
		var handler http.Handler
		for _, r := range site.Routes() {
			if r.Pattern == "/events" {
				handler = r.Handler
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/events?run=run_a", http.NoBody)
		r.AddCookie(&http.Cookie{Name: "forgeci", Value: "sample-session"})
		w := &stream{header: http.Header{}, out: make(chan string, 100)}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			handler.ServeHTTP(w, r)
		}()
		if first := <-w.out; !strings.Contains(first, "event: change\n") {
			t.Errorf("the stream begins with %q, want a change", first)
		}
		for name, want := range map[string]string{"X-Accel-Buffering": "no", "Cache-Control": "no-store", "Content-Type": "text/event-stream; charset=utf-8"} {
			if got := w.header.Get(name); got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		start := time.Now()
		if beat := <-w.out; !strings.Contains(beat, "event: beat\n") || time.Since(start) > 15*time.Second {
			t.Errorf("after %v: %q, want a sign of life within 15 s", time.Since(start), beat)
		}
		start = time.Now()
		for range 50 { // many changes at once are one event
			book.Edit(func(*storybook.Data) {})
		}
		if change := <-w.out; !strings.Contains(change, "event: change\n") || time.Since(start) > time.Second {
			t.Errorf("after %v: %q, want a change", time.Since(start), change)
		}
		if next := <-w.out; !strings.Contains(next, "event: beat\n") {
			t.Errorf("after one change: %q, want only a sign of life", next)
		}
		start = time.Now()
		cancel()
		<-ended
		synctest.Wait()
		if time.Since(start) > 5*time.Second || book.Watching() != 0 {
			t.Errorf("the stream ended after %v with %d watching", time.Since(start), book.Watching())
		}
	})
}

func TestStorybookWritesEveryPageWithItsStyle(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := storybook.Write(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for _, p := range storybook.Pages() {
		b, err := os.ReadFile(filepath.Join(dir, p.Name+".html"))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range regexp.MustCompile(`"(static/[^"]+)"`).FindAllStringSubmatch(string(b), -1) {
			if _, err := os.Stat(filepath.Join(dir, m[1])); err != nil {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
	}
}
