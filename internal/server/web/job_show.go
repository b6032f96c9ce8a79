package web

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/web/ansi"
)

// linesPerPage is how many lines of a log a page without script holds.
const linesPerPage = 200

type jobPage struct {
	protocol.Job
	Status   status
	Headline string
	Why      string
	Story    protocol.Explanation
	// Shown is the attempt whose log is shown; 0 when there is none yet.
	Shown int64
	Steps []protocol.Step // of that attempt
	Log   logWindow
}

// logWindow is the part of the log that the server wrote into the page.
type logWindow struct {
	Lines        []logRow
	First, Total int64
	Sealed       bool
	Query        string
	Live         bool // the attempt may still write
	// Addresses of other windows; empty when there is none.
	Older, Newer, Start, End string
	// More continues a search or a step; Whole leads back to the whole log.
	More, Whole string
	// Part says what is shown when it is not the whole log.
	Part string
	Lost bool // the attempt's log has gaps
	Cut  bool // the attempt went over its limit
	// Trouble says why there is no log.
	Trouble string
}

type logRow struct {
	protocol.LogLine
	Line      ansi.Line
	NewStep   bool
	StepName  string
	Permalink string
}

func (s *Site) jobShow(q *request) error {
	job, err := s.cfg.Reader.Job(q.Context(), q.viewer, ci.JobID(q.PathValue("job_id")))
	if err != nil {
		return err
	}
	story, err := s.cfg.Reader.Explain(q.Context(), q.viewer, job.ID)
	if err != nil {
		return err
	}
	now := s.cfg.Now()
	row := newJobRow(job.JobSummary, job.Run.CreatedAt, now, now)
	p := jobPage{Job: job, Status: row.Status, Why: row.Why, Story: story, Shown: q.number("attempt")}
	p.Headline = p.Status.Word
	if d, ok := span(job.StartedAt, job.FinishedAt, now); ok && job.State == ci.StateFinished {
		p.Headline += " after " + duration(d)
	}
	if p.Shown == 0 && len(job.Attempt) > 0 {
		p.Shown = job.Attempt[len(job.Attempt)-1].Epoch
	}
	p.Steps = job.StepsOf(p.Shown)
	if p.Shown > 0 && !q.fragment() {
		if err := s.window(q, &p); err != nil {
			return err
		}
	}
	v := view{
		Title:   fmt.Sprintf("%s: %s, %s #%d", p.Status.Word, job.Name, job.Run.Workflow, job.Run.Number),
		Section: "runs", Script: "log.js", Style: "ansi.css", Data: p,
	}
	if job.State != ci.StateFinished {
		v.Events = "/events?job=" + string(job.ID)
	}
	return q.show(http.StatusOK, "job", v)
}

// window reads the part of the log that the address asks for: ?from= a line,
// ?q= what to search, and else the end.
func (s *Site) window(q *request, p *jobPage) error {
	ask := LogQuery{Attempt: p.Shown, From: q.number("from"), Limit: linesPerPage, Query: q.URL.Query().Get("q")}
	if step, err := strconv.Atoi(q.URL.Query().Get("step")); err == nil {
		ask.Step = &step
		ask.From = max(ask.From, 1)
	}
	if ask.From == 0 && ask.Query == "" {
		ask.Tail = linesPerPage
	}
	w := &p.Log
	for _, a := range p.Attempt {
		if a.Epoch == p.Shown {
			w.Live = !a.LogSealed
			w.Lost, w.Cut = a.LogGap, a.LogCut
		}
	}
	slice, err := s.cfg.Reader.LogLines(q.Context(), q.viewer, p.ID, ask)
	if err != nil {
		// A log that is away or damaged must not take the job's page with it.
		switch ci.KindOf(err) {
		case ci.ErrUnavailable, ci.ErrDigest:
			s.cfg.Log.WarnContext(q.Context(), "log not shown", "job", p.ID, "attempt", p.Shown, "error", err)
		case ci.ErrNotFound, ci.ErrGone:
		default:
			return err
		}
		w.Trouble = describe(err).Detail
		return nil
	}
	w.First, w.Total, w.Sealed, w.Query = slice.First, slice.Total, slice.Sealed, ask.Query
	at := func(set func(url.Values)) string {
		v := url.Values{"attempt": {strconv.FormatInt(p.Shown, 10)}}
		set(v)
		return "/jobs/" + string(p.ID) + "?" + v.Encode()
	}
	from := func(n int64) string {
		return at(func(v url.Values) { v.Set("from", strconv.FormatInt(n, 10)) }) + "#log"
	}
	w.rows(slice.Lines, p.Steps, func(n int64) string {
		return at(func(v url.Values) { v.Set("from", strconv.FormatInt(max(n-20, 1), 10)) }) + "#L" + strconv.FormatInt(n, 10)
	})
	if ask.Query != "" || ask.Step != nil {
		w.Part = stepPart(ask, p.Steps)
		w.Whole = at(func(url.Values) {}) + "#log"
		if slice.Next > 0 {
			w.More = at(func(v url.Values) {
				if ask.Query != "" {
					v.Set("q", ask.Query)
				}
				if ask.Step != nil {
					v.Set("step", strconv.Itoa(*ask.Step))
				}
				v.Set("from", strconv.FormatInt(slice.Next, 10))
			}) + "#log"
		}
		return nil
	}
	last := slice.First + int64(len(slice.Lines)) - 1
	if slice.First > 1 {
		w.Older, w.Start = from(max(slice.First-linesPerPage, 1)), from(1)
	}
	if last < slice.Total {
		w.Newer, w.End = from(last+1), at(func(url.Values) {})+"#log"
	}
	return nil
}

// stepPart says which part of the log a query selects.
func stepPart(ask LogQuery, steps []protocol.Step) string {
	var parts []string
	if ask.Query != "" {
		parts = append(parts, "lines that contain “"+ask.Query+"”")
	}
	if ask.Step != nil {
		parts = append(parts, "lines of “"+stepName(steps, *ask.Step)+"”")
	}
	return "Only " + strings.Join(parts, " and ") + "."
}

// rows renders lines. A style that a line leaves on stays on for the lines of
// the same step and stream that follow in the window.
func (w *logWindow) rows(lines []protocol.LogLine, steps []protocol.Step, link func(int64) string) {
	type stream struct {
		step int
		name string
	}
	pens := map[stream]*ansi.Renderer{}
	step := protocol.StepSystem - 1
	for _, l := range lines {
		key := stream{l.Step, l.Stream}
		r := pens[key]
		if r == nil {
			r = new(ansi.Renderer)
			pens[key] = r
		}
		row := logRow{LogLine: l, Line: r.Line(l.Text), NewStep: l.Step != step, Permalink: link(l.Number)}
		if row.NewStep {
			step = l.Step
			row.StepName = stepName(steps, l.Step)
		}
		w.Lines = append(w.Lines, row)
	}
}

func stepName(steps []protocol.Step, index int) string {
	for _, s := range steps {
		if s.Index == index {
			return s.Name
		}
	}
	if index == protocol.StepSystem {
		return "Runner"
	}
	return fmt.Sprintf("Step %d", index+1)
}
