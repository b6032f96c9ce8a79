package web

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/web/graph"
)

// manyLegs is from how many legs on a matrix is folded in the list.
const manyLegs = 6

type runPage struct {
	protocol.Run
	Status    status
	Headline  string
	Because   string // why, beyond the headline
	Groups    []jobGroup
	Graph     *drawing
	CanCancel bool
	CanRetry  bool
	CanFailed bool // something to retry from
	Uncertain bool
}

// jobGroup is a job of the workflow: one job, or all legs of a matrix.
type jobGroup struct {
	Key    string
	Needs  []string
	Jobs   []jobRow
	Matrix bool
	Folded bool
	Status status
	Counts []segment
	Bar    timeBar
}

// jobRow is a job with its place in the run's time.
type jobRow struct {
	protocol.JobSummary
	Status status
	Why    string // what is to be said beside the status
	Bar    timeBar
}

// timeBar shows when something queued and ran, in per mille of the run's time.
type timeBar struct {
	QueueX, QueueW, RunX, RunW int
	Key                        string
	Words                      string // the same as text
}

// drawing is the graph as the template writes it.
type drawing struct {
	Width, Height int
	Nodes         []drawnNode
	Edges         []graph.Edge
}

type drawnNode struct {
	graph.Box
	Group jobGroup
	Href  string
	Name  string // shortened to fit
	Below string // second line
}

func (s *Site) runShow(q *request) error {
	run, err := s.cfg.Reader.Run(q.Context(), q.viewer, ci.RunID(q.PathValue("run_id")))
	if err != nil {
		return err
	}
	p := newRunPage(run, s.cfg.Now())
	title := fmt.Sprintf("%s #%d", run.Workflow, run.Number)
	return q.show(http.StatusOK, "run", view{
		Title: p.Status.Word + ": " + title, Section: "runs",
		Events: "/events?run=" + string(run.ID), Data: p,
	})
}

func newRunPage(run protocol.Run, now time.Time) runPage {
	p := runPage{
		Run: run, Status: runStatus(run.RunSummary),
		CanCancel: run.State == ci.StateWaiting || run.State == ci.StateRunning,
		CanRetry:  run.State == ci.StateFinished,
	}
	end := now
	if run.FinishedAt != nil {
		end = *run.FinishedAt
	}
	at := map[string]int{}
	for _, j := range run.JobList {
		row := newJobRow(j, run.CreatedAt, end, now)
		p.Uncertain = p.Uncertain || j.Uncertain
		if j.State == ci.StateFinished && !j.Conclusion.Succeeded() && j.Conclusion != ci.ConclusionSkipped {
			p.CanFailed = p.CanRetry
		}
		i, ok := at[j.Key]
		if !ok {
			i = len(p.Groups)
			at[j.Key] = i
			p.Groups = append(p.Groups, jobGroup{Key: j.Key, Needs: j.Needs})
		}
		p.Groups[i].Jobs = append(p.Groups[i].Jobs, row)
	}
	for i := range p.Groups {
		p.Groups[i].sum()
	}
	p.Headline = p.headline(now)
	switch p.Reason { // the others say no more than the headline does
	case ci.ReasonNone, ci.ReasonJobFailed, ci.ReasonCancelled:
	default:
		if p.Conclusion != ci.ConclusionSuccess && !strings.Contains(p.Headline, reasonText(p.Reason)) {
			p.Because = reasonText(p.Reason)
		}
	}
	p.Graph = draw(p.Groups, now)
	return p
}

func newJobRow(j protocol.JobSummary, from, to, now time.Time) jobRow {
	r := jobRow{JobSummary: j, Status: jobStatus(j)}
	switch {
	case j.Waiting != nil && j.Waiting.Code == "needs" && len(j.Needs) > 0: // said by the needs
	case j.Waiting != nil:
		r.Why = waitText(j.Waiting, now)
	case j.Detail != "":
		r.Why = j.Detail
	case j.Reason != ci.ReasonNone:
		r.Why = reasonText(j.Reason)
	case j.State == ci.StateRunning && j.Phase != "" && j.Phase != ci.PhaseExecuting:
		r.Why = phaseText(j.Phase)
	}
	r.Bar = newTimeBar(j, r.Status, from, to)
	return r
}

func newTimeBar(j protocol.JobSummary, s status, from, to time.Time) timeBar {
	total := max(to.Sub(from), time.Millisecond)
	place := func(t time.Time) int {
		return int(min(max(1000*t.Sub(from)/total, 0), 1000))
	}
	b := timeBar{Key: s.Key}
	stop := to
	if j.FinishedAt != nil {
		stop = *j.FinishedAt
	}
	var words []string
	if j.ReadyAt != nil {
		until := stop
		if j.StartedAt != nil {
			until = *j.StartedAt
		}
		b.QueueX = place(*j.ReadyAt)
		b.QueueW = max(place(until)-b.QueueX, 0)
		words = append(words, "queued "+duration(until.Sub(*j.ReadyAt)))
	}
	if j.StartedAt != nil {
		b.RunX = min(place(*j.StartedAt), 995)
		b.RunW = max(place(stop)-b.RunX, 5)
		words = append(words, "ran "+duration(stop.Sub(*j.StartedAt)))
	}
	b.Words = strings.Join(words, ", ")
	return b
}

// sum derives what a group shows from its jobs.
func (g *jobGroup) sum() {
	g.Matrix = len(g.Jobs) > 1 || g.Jobs[0].Name != g.Jobs[0].Key
	g.Folded = len(g.Jobs) >= manyLegs
	counts := map[string]int{}
	for _, j := range g.Jobs {
		counts[j.Status.Key]++
	}
	g.Counts = bar(counts)
	if len(g.Jobs) == 1 {
		g.Status = g.Jobs[0].Status
		g.Bar = g.Jobs[0].Bar
		return
	}
	// What went wrong shows first, then what is under way.
	for _, key := range []string{"failed", "timed_out", "aborted", "running", "cancelling", "ready", "waiting", "cancelled", "warned", "success", "cached", "skipped"} {
		if counts[key] > 0 {
			g.Status = countStatus(key)
			break
		}
	}
	g.Bar = g.Jobs[0].Bar
	for _, j := range g.Jobs[1:] {
		g.Bar.join(j.Bar)
	}
	g.Bar.Key = g.Status.Key
	g.Bar.Words = ""
}

// join widens a bar so that it covers another one too.
func (b *timeBar) join(o timeBar) {
	widen := func(x, w *int, ox, ow int) {
		if ow == 0 {
			return
		}
		if *w == 0 {
			*x, *w = ox, ow
			return
		}
		right := max(*x+*w, ox+ow)
		*x = min(*x, ox)
		*w = right - *x
	}
	widen(&b.QueueX, &b.QueueW, o.QueueX, o.QueueW)
	widen(&b.RunX, &b.RunW, o.RunX, o.RunW)
}

// headline says in words how the run stands.
func (p *runPage) headline(now time.Time) string {
	total := len(p.JobList)
	switch p.State {
	case ci.StateWaiting:
		return "Queued for " + duration(now.Sub(p.CreatedAt))
	case ci.StateRunning:
		over := 0
		for _, j := range p.JobList {
			if j.State == ci.StateFinished {
				over++
			}
		}
		return fmt.Sprintf("Running, %d of %s done", over, plural(total, "job", "jobs"))
	case ci.StateCancelling:
		return "Cancelling, until every job is proven to have ended"
	case ci.StateReady, ci.StateFinished:
	}
	took := ""
	if d, ok := span(p.StartedAt, p.FinishedAt, now); ok {
		took = " after " + duration(d)
	}
	var bad []string
	for _, j := range p.JobList {
		switch j.Conclusion {
		case ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted:
			if !j.AllowFailure {
				bad = append(bad, j.Name)
			}
		case ci.ConclusionSuccess, ci.ConclusionCached, ci.ConclusionCancelled, ci.ConclusionSkipped:
		}
	}
	head := p.Status.Word + took
	switch {
	case p.Conclusion == ci.ConclusionSuccess || p.Conclusion == ci.ConclusionCancelled:
		return head
	case len(bad) == 1:
		return head + " in " + bad[0]
	case len(bad) > 1:
		return fmt.Sprintf("%s in %s and %s", head, bad[0], plural(len(bad)-1, "other job", "other jobs"))
	case p.Reason != ci.ReasonNone:
		return head + ": " + reasonText(p.Reason)
	}
	return head
}

// draw lays out the groups; a run of one job has no graph.
func draw(groups []jobGroup, now time.Time) *drawing {
	if len(groups) < 2 {
		return nil
	}
	nodes := make([]graph.Node, len(groups))
	for i, g := range groups {
		nodes[i] = graph.Node{ID: g.Key, Needs: g.Needs}
	}
	l := graph.Lay(nodes)
	d := &drawing{Width: l.Width, Height: l.Height, Edges: l.Edges}
	for i, b := range l.Boxes {
		g := groups[i]
		n := drawnNode{Box: b, Group: g, Name: fit(g.Key, 21)}
		if len(g.Jobs) == 1 {
			j := g.Jobs[0]
			n.Name = fit(j.Name, 21)
			n.Href = "/jobs/" + string(j.ID)
			n.Below = strings.TrimSuffix(g.Status.Word, ", allowed") // the shape says it
			if t, ok := span(j.StartedAt, j.FinishedAt, now); ok && (j.State == ci.StateRunning || j.State == ci.StateFinished) {
				n.Below += " · " + duration(t)
			}
		} else {
			n.Href = "#" + groupID(g)
			var parts []string
			for _, c := range g.Counts {
				parts = append(parts, fmt.Sprintf("%d %s", c.Count, strings.ToLower(countStatus(c.Key).Word)))
			}
			n.Below = fit(strings.Join(parts, ", "), 23)
		}
		d.Nodes = append(d.Nodes, n)
	}
	return d
}

// groupID is the element ID of a group in the list: the ID of its first job, so
// that no text of a workflow gets into it.
func groupID(g jobGroup) string { return "g-" + string(g.Jobs[0].ID) }

// ID returns the group's element ID.
func (g jobGroup) ID() string { return groupID(g) }

func (s *Site) runCancel(q *request) error {
	id := ci.RunID(q.PathValue("run_id"))
	if err := s.cfg.Actions.Cancel(q.Context(), q.viewer, id); err != nil {
		return err
	}
	return q.back("/runs/" + string(id))
}

// runRetry makes one run of however many clicks on one page.
func (s *Site) runRetry(q *request) error {
	run, failed, key := ci.RunID(q.PathValue("run_id")), q.form("failed") == "1", ""
	if page := q.form("page"); page != "" {
		if len(page) > 40 || strings.Trim(page, "0123456789") != "" {
			return ci.Errorf(ci.ErrInvalid, "The form is not one of this page. Load the page again.")
		}
		key = fmt.Sprintf("page %s %s %v", page, run, failed)
	}
	id, err := s.cfg.Actions.Retry(q.Context(), q.viewer, run, failed, key)
	if err != nil {
		return err
	}
	return q.back("/runs/" + string(id))
}
