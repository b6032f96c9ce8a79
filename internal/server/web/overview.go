package web

import (
	"net/http"
	"strings"
)

type overviewPage struct {
	Overview
	Headline string
	Server   string // this server's address, for commands
}

func (s *Site) overview(q *request) error {
	o, err := s.cfg.Reader.Overview(q.Context(), q.viewer)
	if err != nil {
		return err
	}
	return q.show(http.StatusOK, "overview", view{
		Title: "Overview", Section: "overview", Events: "/events?fleet=1",
		Data: overviewPage{o, headline(o), q.server()},
	})
}

// headline says in one sentence what is going on.
func headline(o Overview) string {
	var parts []string
	if n := len(o.Broken); n > 0 {
		parts = append(parts, plural(n, "workflow is broken", "workflows are broken"))
	}
	if o.RunningCount > 0 {
		parts = append(parts, plural(o.RunningCount, "run in progress", "runs in progress"))
	}
	if o.WaitingCount > 0 {
		parts = append(parts, plural(o.WaitingCount, "job waiting", "jobs waiting"))
	}
	switch {
	case o.Empty:
		return "Nothing has run here yet"
	case len(parts) == 0:
		return "All quiet"
	}
	text := strings.Join(parts, ", ")
	return text
}
