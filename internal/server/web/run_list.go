package web

import (
	"net/http"
	"net/url"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// runsPerPage is how many runs a page of the list holds.
const runsPerPage = 40

type runListPage struct {
	Filter RunFilter
	Which  string // the value of the status filter
	Runs   []protocol.RunSummary
	Next   string // address of the following page
	First  string // address of the first page, on any other
	Any    bool   // a filter is set
}

func (s *Site) runList(q *request) error {
	get := q.URL.Query().Get
	p := runListPage{
		Filter: RunFilter{Repo: get("repo"), Commit: get("commit"), After: get("after"), Limit: runsPerPage},
		Which:  get("status"),
	}
	switch w := p.Which; w {
	case "waiting", "running", "cancelling":
		p.Filter.State = ci.State(w)
	case "success", "failed", "timed_out", "cancelled":
		p.Filter.Conclusion = ci.Conclusion(w)
	default:
		p.Which = ""
	}
	p.Any = p.Filter.Repo != "" || p.Filter.Commit != "" || p.Which != ""
	page, err := s.cfg.Reader.Runs(q.Context(), q.viewer, p.Filter)
	if err != nil {
		return err
	}
	p.Runs = page.Items
	address := func(after string) string {
		v := url.Values{}
		for name, value := range map[string]string{"repo": p.Filter.Repo, "commit": p.Filter.Commit, "status": p.Which, "after": after} {
			if value != "" {
				v.Set(name, value)
			}
		}
		if len(v) == 0 {
			return "/runs"
		}
		return "/runs?" + v.Encode()
	}
	if page.Next != "" {
		p.Next = address(page.Next)
	}
	if p.Filter.After != "" {
		p.First = address("")
	}
	return q.show(http.StatusOK, "runs", view{Title: "Runs", Section: "runs", Events: "/events", Data: p})
}
