package web

import (
	"embed"
	"fmt"
	"html/template"
	"io"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

//go:embed templates
var templateFiles embed.FS

// pages holds one template set per page: the frame, the shared pieces, the page.
type pages struct {
	sets map[string]*sync.Pool // of *timed
}

// timed is a template set whose functions look at its own clock, so that a page
// shows one instant throughout. One request at a time uses it.
type timed struct {
	set *template.Template
	now time.Time
}

func parsePages(a *assets) *pages {
	base := template.New("frame").Funcs(functions(a, new(timed)))
	base = template.Must(base.ParseFS(templateFiles, "templates/frame.html", "templates/pieces.html"))
	names, err := templateFiles.ReadDir("templates")
	if err != nil {
		panic("web: " + err.Error())
	}
	p := &pages{sets: map[string]*sync.Pool{}}
	for _, e := range names {
		name := strings.TrimSuffix(e.Name(), ".html")
		if name == "frame" || name == "pieces" {
			continue
		}
		parsed := template.Must(template.Must(base.Clone()).ParseFS(templateFiles, "templates/"+e.Name()))
		p.sets[name] = &sync.Pool{New: func() any {
			t := &timed{set: template.Must(parsed.Clone())}
			t.set.Funcs(functions(a, t))
			return t
		}}
	}
	return p
}

// render writes a page, or only its main part, as seen at now.
func (p *pages) render(w io.Writer, name string, fragment bool, v view, now time.Time) error {
	pool, ok := p.sets[name]
	if !ok {
		return fmt.Errorf("render: no page %q", name)
	}
	t, ok := pool.Get().(*timed)
	if !ok {
		panic("web: a pool of pages holds something else")
	}
	defer pool.Put(t)
	t.now = now
	entry := "frame.html"
	if fragment {
		entry = "fragment"
	}
	if err := t.set.ExecuteTemplate(w, entry, v); err != nil {
		return fmt.Errorf("render %s: %w", name, err)
	}
	return nil
}

// functions are what templates can call.
func functions(a *assets, clock *timed) template.FuncMap {
	return template.FuncMap{
		"ago":  func(t time.Time) string { return ago(t, clock.now) },
		"wait": func(w *protocol.WaitReason) string { return waitText(w, clock.now) },
		"took": func(from, to *time.Time) string {
			d, ok := span(from, to, clock.now)
			if !ok {
				return ""
			}
			return duration(d)
		},

		"asset":       a.URL,
		"status":      statusOf,
		"runStatus":   runStatus,
		"jobCounts":   jobCounts,
		"countStatus": countStatus,
		"reason":      reasonText,
		"size":        size,
		"plural":      plural,
		"grouped":     grouped,
		"int64":       func(n int) int64 { return int64(n) },
		"int":         func(n int64) int { return int(n) },
		"short":       shortHash,
		"subject":     subject,
		"cut":         cut,
		"join":        strings.Join,
		"bar":         bar,
		"statuses": func() []string {
			return []string{"waiting", "running", "cancelling", "success", "failed", "timed_out", "cancelled"}
		},
		"iso":     func(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) },
		"full":    func(t time.Time) string { return t.UTC().Format("Mon 2 Jan 2006, 15:04:05 UTC") },
		"deref":   func(t *time.Time) time.Time { return *t },
		"failing": func(code *int) bool { return code != nil && *code != 0 },
		"std":     func(d *ci.Duration) string { return duration(d.Std()) },
		"add":     func(a, b int) int { return a + b },
		"sub":     func(a, b int) int { return a - b },
		"phase":   phaseText,
		"rawLog": func(id ci.JobID, epoch int64) string {
			_, path := protocol.Endpoint(protocol.RouteJobLog, string(id))
			return fmt.Sprintf("%s?attempt=%d", path, epoch)
		},
		"artifactURL": func(id string) string {
			_, path := protocol.Endpoint(protocol.RouteArtifactContent, id)
			return path
		},
	}
}

// segment is a part of a run's bar.
type segment struct {
	Key   string
	Count int
	X, W  float64 // in percent
}

// bar splits a run's bar by how many jobs are in which state.
func bar(jobs map[string]int) []segment {
	total := 0
	for _, n := range jobs {
		total += n
	}
	var out []segment
	x := 0.0
	for _, key := range keysInOrder() {
		if n := jobs[key]; n > 0 {
			w := 100 * float64(n) / float64(total)
			out = append(out, segment{key, n, x, w})
			x += w
		}
	}
	return out
}

func phaseText(p ci.Phase) string {
	switch p {
	case ci.PhaseClaimed:
		return "claimed"
	case ci.PhasePreparing:
		return "preparing the workspace"
	case ci.PhaseBuilding:
		return "building the image"
	case ci.PhaseExecuting:
		return "executing"
	case ci.PhaseFinalising:
		return "saving outputs"
	}
	return string(p)
}
