package reader_test

import (
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/engine"
)

func contains(w *world, text string, parts ...string) {
	w.t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			w.t.Errorf("%q does not say %q", text, p)
		}
	}
}

func (w *world) retry(id ci.RunID) ci.RunID {
	w.t.Helper()
	return must(w, func() (ci.RunID, error) {
		return w.e.Retry(w.ctx, engine.RetryRequest{Org: w.Org, Actor: "tester", Run: id, Failed: true})
	})
}

// held returns the name of the one job that a runner holds.
func (w *world) held(a *agent) string {
	w.t.Helper()
	doc := w.runner(a)
	if len(doc.Running) != 1 {
		w.t.Fatalf("%s holds %+v", doc.Name, doc.Running)
	}
	return doc.Running[0].Name
}

// The history of a job is in the order in which it happened, names runners by
// their names, and the summary says in a sentence what it comes to.
func TestAnExplanationTellsTheWholeStoryInOrder(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		spec := job("j")
		spec.Retry = &ci.RetryPolicy{Max: 1, On: []ci.Reason{ci.ReasonRunnerLost}, Line: 7}
		id := w.submit(spec, job("behind", "j"))
		contains(w, w.explain(id, "j").Summary, "j has not started: no runner is online")
		a := w.agent("a", 1)
		a.start()
		contains(w, w.explain(id, "j").Summary, "j is running (attempt 1, phase executing) on a.")
		w.lose()
		contains(w, w.explain(id, "j").Summary, "j has not started: ", "Attempt 1 was lost 0s ago and is not proven to have ended", "`forgeci runner fence a`")
		w.pass(10 * time.Second)
		b := w.agent("b", 1)
		w.sweep()
		b.end(b.start(), failed)
		e := w.explain(id, "j")
		contains(w, e.Summary, "j ended: failed after 2 attempts: step 1 (s) ended with exit code 3. Attempt 1 was lost 10s ago")
		var got []string
		last := time.Time{}
		for _, h := range e.History {
			if h.At.Before(last) {
				w.t.Errorf("%s %s is told after what happened later", h.At, h.Action)
			}
			last = h.At
			who := h.ActorName
			if who == "" {
				who = h.Actor
			}
			got = append(got, who+" "+h.Action)
		}
		want := "a claimed, a phase, server attempt_ended, server requeued, b claimed, b phase, b attempt_ended"
		if s := strings.Join(got, ", "); s != want {
			w.t.Errorf("history: %s\nwant     %s", s, want)
		}
		contains(w, w.explain(id, "behind").Summary, "behind ended: skipped: ")
	})
}

// A job whose runner has missed a renewal says so before it is taken for lost. A
// renewal that another node has heard counts.
func TestAnExplanationSaysThatTheRunnerIsSilent(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		ref := a.start()
		silent := func() bool { return strings.Contains(w.explain(id, "j").Summary, "was last heard of") }
		w.pass(ttl/2 - time.Second)
		if silent() {
			w.t.Error("silent before half a TTL")
		}
		w.pass(time.Second)
		contains(w, w.explain(id, "j").Summary, " a was last heard of 30s ago; after 1m of silence it is taken for lost.")
		node, _ := w.node()
		if _, err := node.Renew(w.ctx, a.who, a.session, []ci.LeaseRef{ref}); err != nil {
			w.t.Fatal(err)
		}
		if silent() {
			w.t.Error("silent although another node has heard of it")
		}
	})
}

// What an aborted job did outside is uncertain, and every summary says so.
func TestAnAbortedJobIsShownAsUncertain(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		w.agent("a", 1).start()
		w.lose()
		if j := w.job(id, "j"); !j.Uncertain || j.Conclusion != ci.ConclusionAborted {
			w.t.Errorf("%+v", j.JobSummary)
		}
		e := w.explain(id, "j")
		contains(w, e.Summary, "j was aborted and what it did outside is uncertain: runner_lost in phase executing; `retry: {max: 1, on: [runner_lost]}`")
		if len(e.Unproven) != 1 || !e.Unproven[0].Lost {
			w.t.Errorf("its attempt is not proven to have ended, and it says %+v", e.Unproven)
		}
	})
}

// A refused report is part of the story.
func TestARefusedReportIsPartOfTheStory(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		id := w.submit(job("j"))
		a := w.agent("a", 1)
		ref := a.start()
		w.lose()
		if _, err := w.e.Hold(w.ctx, a.who, ref, "complete", engine.ActiveOnly); err == nil {
			w.t.Fatal("a lost lease is held")
		}
		if err := w.e.FlushRejections(w.ctx); err != nil {
			w.t.Fatal(err)
		}
		h := w.explain(id, "j").History
		if last := h[len(h)-1]; last.Action != "rejected" || last.ActorName != "a" || last.Epoch != 1 {
			w.t.Errorf("the last entry is %+v", last)
		}
	})
}
