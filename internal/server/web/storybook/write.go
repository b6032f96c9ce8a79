package storybook

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
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
		{Name: "run-warnings", Path: "/runs/" + string(WarningRun), Data: Sample},
		{Name: "run-cancelling", Path: "/runs/" + string(StuckRun), Data: Sample},
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
		{Name: "no-page", Path: "/no/such/page", Data: Sample},
		{Name: "no-page-anonymous", Path: "/no/such/page", Data: Sample, Anonymous: true},
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
func (p Page) Request(ctx context.Context) (*http.Request, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Path, http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Host = "127.0.0.1:8080"
	r.RequestURI = p.Path
	if !p.Anonymous {
		r.AddCookie(&http.Cookie{Name: "forgeci", Value: Session})
	}
	return r, nil
}

// Response is an answer kept in memory.
type Response struct {
	Status int
	Body   bytes.Buffer
	header http.Header
}

// Header implements http.ResponseWriter.
func (r *Response) Header() http.Header {
	if r.header == nil {
		r.header = http.Header{}
	}
	return r.header
}

// WriteHeader implements http.ResponseWriter.
func (r *Response) WriteHeader(status int) { r.Status = status }

// Write implements http.ResponseWriter.
func (r *Response) Write(b []byte) (int, error) {
	if r.Status == 0 {
		r.Status = http.StatusOK
	}
	return r.Body.Write(b)
}

// Render answers the page from its sample data.
func (p Page) Render(ctx context.Context) (*Response, error) {
	r, err := p.Request(ctx)
	if err != nil {
		return nil, err
	}
	w := new(Response)
	New(p.Data(), Now).Handler(slog.New(slog.DiscardHandler), "0.1.0").ServeHTTP(w, r)
	return w, nil
}

// Write renders all pages into a directory, to be looked at as files: with the
// style, without what needs a server.
func Write(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	seen := map[string]bool{}
	site := New(Sample(), Now).Handler(slog.New(slog.DiscardHandler), "0.1.0")
	for _, p := range Pages() {
		page, err := p.Render(ctx)
		if err != nil {
			return fmt.Errorf("render page %s: %w", p.Name, err)
		}
		html := page.Body.String()
		for part := range strings.SplitSeq(html, `"`) {
			if !strings.HasPrefix(part, "/static/") || seen[part] {
				continue
			}
			seen[part] = true
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, part, http.NoBody)
			if err != nil {
				return err
			}
			w := new(Response)
			site.ServeHTTP(w, r)
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
