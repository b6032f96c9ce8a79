package storybook

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Page is one page of the storybook.
type Page struct {
	Name string // of its file, without ending
	Path string // its address on the site
	Data func() Data
	// Anonymous pages are seen by somebody who is not signed in.
	Anonymous bool
}

// Pages lists one address for every page and every state worth looking at.
func Pages() []Page {
	empty := func() Data { return Data{} }
	large := func() Data {
		d := Sample()
		d.Runs = append([]protocol.Run{LargeRun()}, d.Runs...)
		return d
	}
	return []Page{
		{Name: "overview", Path: "/", Data: Sample},
		{Name: "overview-empty", Path: "/", Data: empty},
		{Name: "runs", Path: "/runs", Data: Sample},
		{Name: "runs-filtered", Path: "/runs?repo=local%2Fwebsite&status=failed", Data: Sample},
		{Name: "runs-none", Path: "/runs?commit=ffff", Data: Sample},
		{Name: "run-running", Path: "/runs/" + string(RunningRun), Data: Sample},
		{Name: "run-failed", Path: "/runs/" + string(FailedRun), Data: Sample},
		{Name: "run-aborted", Path: "/runs/" + string(AbortedRun), Data: Sample},
		{Name: "run-queued", Path: "/runs/" + string(QueuedRun), Data: Sample},
		{Name: "run-large", Path: "/runs/" + string(LargeRun().ID), Data: large},
		{Name: "job-live", Path: "/jobs/" + string(LiveJob), Data: Sample},
		{Name: "job-failed", Path: "/jobs/" + string(FailedJob), Data: Sample},
		{Name: "job-aborted", Path: "/jobs/" + string(AbortedJob), Data: Sample},
		{Name: "job-waiting", Path: "/jobs/" + string(WaitingJob), Data: Sample},
		{Name: "job-colours", Path: "/jobs/" + string(ColourJob), Data: Sample},
		{Name: "job-search", Path: "/jobs/" + string(FailedJob) + "?q=rounds", Data: Sample},
		{Name: "runners", Path: "/runners", Data: Sample},
		{Name: "runners-none", Path: "/runners", Data: empty},
		{Name: "deadletters", Path: "/deadletters", Data: Sample},
		{Name: "deadletters-none", Path: "/deadletters", Data: empty},
		{Name: "signin", Path: "/signin", Data: Sample, Anonymous: true},
		{Name: "not-found", Path: "/runs/run_01nothing", Data: Sample},
	}
}

// LargeRun is a run of 500 jobs with a matrix of 256.
func LargeRun() protocol.Run {
	r := run("run_01sample00000000000000000large", 133, engine(), "everything", 0)
	r.State = ci.StateRunning
	var jobs []protocol.JobSummary
	for p := range 4 {
		parent := fmt.Sprintf("area-%d", p)
		jobs = append(jobs, job("", parent, parent))
		for c := range 60 {
			child := fmt.Sprintf("area-%d-part-%02d", p, c)
			jobs = append(jobs, job("", child, child, parent))
		}
	}
	for i := range 256 {
		j := job("", "matrix", fmt.Sprintf("matrix (%d)", i), "area-0")
		if i < 100 {
			j = done(j, sampleOK, 0, 0, 0)
		}
		jobs = append(jobs, j)
	}
	return finish(r, jobs...)
}

// Request returns a request for a page as its visitor sends it.
func (p Page) Request() *http.Request {
	r := httptest.NewRequest(http.MethodGet, p.Path, nil)
	if !p.Anonymous {
		r.AddCookie(&http.Cookie{Name: "forgeci", Value: session})
	}
	return r
}

// Render returns the HTML of a page.
func (p Page) Render() *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	New(p.Data(), Now).Handler(slog.New(slog.DiscardHandler), "0.1.0").ServeHTTP(w, p.Request())
	return w
}

// Write renders all pages into a directory, to be looked at as files: with the
// style, without what needs a server.
func Write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	seen := map[string]bool{}
	site := New(Sample(), Now).Handler(slog.New(slog.DiscardHandler), "0.1.0")
	for _, p := range Pages() {
		html := p.Render().Body.String()
		for _, part := range strings.Split(html, `"`) {
			if !strings.HasPrefix(part, "/static/") || seen[part] {
				continue
			}
			seen[part] = true
			w := httptest.NewRecorder()
			site.ServeHTTP(w, httptest.NewRequest(http.MethodGet, part, nil))
			name := filepath.Join(dir, filepath.FromSlash(part))
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(name, w.Body.Bytes(), 0o644); err != nil {
				return err
			}
		}
		html = strings.ReplaceAll(html, `"/static/`, `"static/`)
		if err := os.WriteFile(filepath.Join(dir, p.Name+".html"), []byte(html), 0o644); err != nil {
			return fmt.Errorf("write page %s: %w", p.Name, err)
		}
	}
	return nil
}
