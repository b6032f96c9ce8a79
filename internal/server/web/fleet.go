package web

import (
	"net/http"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

type runnerRow struct {
	protocol.Runner
	// Squares is one entry per slot and per job beyond the slots: the key of how it
	// stands (free, busy, quarantined).
	Squares []slot
	// Look is the key of shape and colour, Word what the runner is good for.
	Look, Word string
	CanDrain   bool
	CanFence   bool
}

type slot struct {
	Key string
	Job *protocol.HeldJob
}

type runnerPage struct {
	Runners []runnerRow
	Count   FleetCount
	Server  string
	// More is how many that are away or fenced are not shown.
	More int
}

// shownRunners is how many runners a page shows; those that are present are all shown.
const shownRunners = 200

func (s *Site) runnerList(q *request) error {
	list, err := s.cfg.Reader.Runners(q.Context(), q.viewer)
	if err != nil {
		return err
	}
	p := runnerPage{Server: q.server()}
	for _, r := range list {
		if here := r.Status == "online" || r.Status == "draining"; here || len(p.Runners) < shownRunners || len(r.Running) > 0 {
			p.Runners = append(p.Runners, newRunnerRow(r))
		} else {
			p.More++
		}
		switch r.Status {
		case "online":
			p.Count.Online++
			p.Count.Slots += r.Slots
			p.Count.Busy += len(r.Running)
		case "draining":
			p.Count.Draining++
		case "fenced":
			p.Count.Fenced++
		default:
			p.Count.Offline++
		}
	}
	return q.show(http.StatusOK, "runners", view{Title: "Runners", Section: "runners", Events: "/events?fleet=1", Data: p})
}

func newRunnerRow(r protocol.Runner) runnerRow {
	row := runnerRow{
		Runner: r, CanDrain: r.Status == "online",
		CanFence: r.Status != "fenced" && (r.Status != "online" || r.Quarantined > 0 || r.Silent != nil),
		Look:     r.Status, Word: r.Status,
	}
	if r.Silent != nil {
		row.Word = "silent for " + duration(r.Silent.Std())
		if r.Status == "online" {
			row.Look = "silent"
		} else {
			row.Word = r.Status + ", " + row.Word
		}
	}
	for i := range r.Running {
		key := "busy"
		if r.Running[i].Quarantined {
			key = "quarantined"
		}
		row.Squares = append(row.Squares, slot{key, &r.Running[i]})
	}
	for r.Status == "online" && len(row.Squares) < r.Slots {
		row.Squares = append(row.Squares, slot{Key: "free"})
	}
	return row
}

func (s *Site) runnerDrain(q *request) error {
	if err := s.cfg.Actions.DrainRunner(q.Context(), q.viewer, ci.RunnerID(q.PathValue("runner_id"))); err != nil {
		return err
	}
	return q.back("/runners")
}

func (s *Site) runnerFence(q *request) error {
	if q.form("dead") != "1" {
		return ci.Errorf(ci.ErrInvalid, "Fencing says that the runner's host is dead. Tick the box to say that you know it is, then send the form again.")
	}
	if err := s.cfg.Actions.FenceRunner(q.Context(), q.viewer, ci.RunnerID(q.PathValue("runner_id"))); err != nil {
		return err
	}
	return q.back("/runners")
}

type deadLetterPage struct {
	Items []protocol.DeadLetter
	Next  string
}

func (s *Site) deadLetterList(q *request) error {
	page, err := s.cfg.Reader.DeadLetters(q.Context(), q.viewer, q.URL.Query().Get("after"))
	if err != nil {
		return err
	}
	return q.show(http.StatusOK, "deadletters", view{
		Title: "Dead letters", Section: "deadletters", Events: "/events?fleet=1",
		Data: deadLetterPage{page.Items, page.Next},
	})
}

func (s *Site) deadLetterRequeue(q *request) error {
	id, err := s.cfg.Actions.RequeueDeadLetter(q.Context(), q.viewer, ci.JobID(q.PathValue("job_id")))
	if err != nil {
		return err
	}
	return q.back("/runs/" + string(id))
}
