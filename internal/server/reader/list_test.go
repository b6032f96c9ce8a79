package reader_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/reader"
)

// Following next from page to page shows every item once and in order, whatever
// is added meanwhile; the last page has no next.
func TestPagesShowEveryItemOnce(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		var runs, dead []string
		for i := range 7 {
			id := w.deadLetter(fmt.Sprint("dead ", i))
			runs = append(runs, string(id))
			dead = append(dead, string(w.jobID(id, fmt.Sprint("dead ", i))))
		}
		for range 7 {
			runs = append(runs, string(w.submit(job("j"))))
		}
		var fleet []string
		page := must(w, func() (protocol.Page[protocol.Runner], error) { return w.r.Runners(w.ctx, w.Viewer, "", 0) })
		for _, r := range page.Items {
			fleet = append(fleet, string(r.ID))
		}
		if len(fleet) != 7 || page.Next != "" {
			w.t.Fatalf("%d runners, next %q", len(fleet), page.Next)
		}
		slices.Reverse(runs)
		slices.Reverse(dead)
		var added []string // newest first
		for _, limit := range []int{1, 2, 3, 7, 13, 14, 15, 100} {
			before := added
			pages(w, "runs", limit, append(slices.Clone(before), runs...), func(after string) (protocol.Page[protocol.RunSummary], error) {
				if after != "" {
					// Newer than what has been shown: it moves nothing.
					added = append([]string{string(w.submit(job("new")))}, added...)
				}
				return w.r.Runs(w.ctx, w.Viewer, reader.RunFilter{After: after, Limit: limit})
			}, func(r protocol.RunSummary) string { return string(r.ID) })
			pages(w, "dead letters", limit, dead, func(after string) (protocol.Page[protocol.DeadLetter], error) {
				return w.r.DeadLetters(w.ctx, w.Viewer, after, limit)
			}, func(d protocol.DeadLetter) string { return string(d.Job) })
			pages(w, "runners", limit, fleet, func(after string) (protocol.Page[protocol.Runner], error) {
				return w.r.Runners(w.ctx, w.Viewer, after, limit)
			}, func(r protocol.Runner) string { return string(r.ID) })
		}
	})
}

func pages[T any](w *world, what string, limit int, want []string, read func(after string) (protocol.Page[T], error), id func(T) string) {
	w.t.Helper()
	var got []string
	for after := ""; ; {
		page, err := read(after)
		if err != nil {
			w.t.Fatal(err)
		}
		if len(page.Items) > limit || len(page.Items) < limit && page.Next != "" {
			w.t.Errorf("%s by %d: a page of %d with next %q", what, limit, len(page.Items), page.Next)
		}
		for _, it := range page.Items {
			got = append(got, id(it))
		}
		if after = page.Next; after == "" {
			break
		}
		if len(got) > 2*len(want) {
			w.t.Fatalf("%s by %d: the pages do not end", what, limit)
		}
	}
	if !slices.Equal(got, want) {
		w.t.Errorf("%s by %d:\n got %v\nwant %v", what, limit, got, want)
	}
}

// A page holds 50 items unless it is asked for more, and never more than 200; an
// empty one is a list, not null.
func TestPagesAreBounded(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		read := func(limit int) []protocol.RunSummary {
			page := must(w, func() (protocol.Page[protocol.RunSummary], error) {
				return w.r.Runs(w.ctx, w.Viewer, reader.RunFilter{Limit: limit})
			})
			return page.Items
		}
		if got := read(0); got == nil || len(got) != 0 {
			w.t.Errorf("no runs are %#v, want an empty list", got)
		}
		if got := must(w, func() (protocol.Page[protocol.Runner], error) { return w.r.Runners(w.ctx, w.Viewer, "", 0) }); got.Items == nil {
			w.t.Error("no runners are null")
		}
		if got := must(w, func() (protocol.Page[protocol.DeadLetter], error) { return w.r.DeadLetters(w.ctx, w.Viewer, "", 0) }); got.Items == nil {
			w.t.Error("no dead letters are null")
		}
		for range reader.MaxPage + 1 {
			w.submit(job("j"))
		}
		for limit, want := range map[int]int{
			0: reader.DefaultPage, -1: reader.DefaultPage, 1: 1, 51: 51, reader.MaxPage: reader.MaxPage, reader.MaxPage + 1: reader.MaxPage, 1 << 40: reader.MaxPage,
		} {
			if got := len(read(limit)); got != want {
				w.t.Errorf("a page of %d holds %d, want %d", limit, got, want)
			}
		}
	})
}

// A cursor is a place in the order, not an item: it holds when what it was taken
// from is not there, and one that nobody has given out selects what is behind it.
func TestACursorNeedsNoItem(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		first := w.submit(job("j"))
		for after, want := range map[string]int{
			string(first): 0, string(first) + "0": 1, "zzz": 1, "\x01": 0, "a": 0, strings.Repeat("z", 1000): 1, "run_'; DROP TABLE run; --": 0, "%": 0,
		} {
			page, err := w.r.Runs(w.ctx, w.Viewer, reader.RunFilter{After: after})
			if err != nil || len(page.Items) != want || page.Next != "" {
				w.t.Errorf("after %.40q: %d runs, next %q, %v; want %d", after, len(page.Items), page.Next, err, want)
			}
		}
	})
}

// Each filter selects by itself and with others; what matches nothing is an empty
// list. A commit is found by a beginning of it, and no character of a filter is a
// wildcard.
func TestFiltersSelectRuns(t *testing.T) {
	t.Parallel()
	onBoth(t, func(w *world) {
		second := w.newRepo("second")
		a := w.agent("a", 4)
		failedRun := w.submitAs(w.tenant, "aaaa000000000000000000000000000000000001", job("bad"))
		a.end(a.start(), failed)
		good := w.submitAs(w.tenant, "aaaa000000000000000000000000000000000002", job("good"))
		a.end(a.start())
		running := w.submitAs(second, "bbbb000000000000000000000000000000000003", job("long"))
		a.start()
		queued := w.submitAs(second, "", job("next"))
		for name, c := range map[string]struct {
			filter reader.RunFilter
			want   []ci.RunID
		}{
			"all":                      {reader.RunFilter{}, []ci.RunID{queued, running, good, failedRun}},
			"repository by name":       {reader.RunFilter{Repo: "local/second"}, []ci.RunID{queued, running}},
			"repository by ID":         {reader.RunFilter{Repo: string(w.repo)}, []ci.RunID{good, failedRun}},
			"no such repository":       {reader.RunFilter{Repo: "local/%"}, nil},
			"state":                    {reader.RunFilter{State: ci.StateRunning}, []ci.RunID{running}},
			"conclusion":               {reader.RunFilter{Conclusion: ci.ConclusionFailed}, []ci.RunID{failedRun}},
			"commit":                   {reader.RunFilter{Commit: "aaaa000000000000000000000000000000000002"}, []ci.RunID{good}},
			"beginning of commits":     {reader.RunFilter{Commit: "aaaa"}, []ci.RunID{good, failedRun}},
			"no wildcards":             {reader.RunFilter{Commit: "%"}, nil},
			"state and repository":     {reader.RunFilter{Repo: "local/second", State: ci.StateFinished}, nil},
			"conclusion and commit":    {reader.RunFilter{Conclusion: ci.ConclusionSuccess, Commit: "aaaa"}, []ci.RunID{good}},
			"behind a run":             {reader.RunFilter{After: string(good)}, []ci.RunID{failedRun}},
			"a state that is no state": {reader.RunFilter{State: "odd"}, nil},
		} {
			page, err := w.r.Runs(w.ctx, w.Viewer, c.filter)
			if err != nil {
				w.t.Errorf("%s: %v", name, err)
			}
			var got []ci.RunID
			for _, r := range page.Items {
				got = append(got, r.ID)
			}
			if !slices.Equal(got, c.want) {
				w.t.Errorf("%s: %v, want %v", name, got, c.want)
			}
		}
	})
}
