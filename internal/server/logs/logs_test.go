package logs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
)

func TestAppendedBytesAreReadableLiveAndSealed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		reply := w.append(ref, wr.chunk(0, protocol.Stdout, "hello\n"), wr.chunk(0, protocol.Stdout, "wor"), wr.chunk(0, protocol.Stderr, "oops\n"))
		if got := reply.Streams; len(got) != 2 || got[0].Length != 9 || got[1].Length != 5 {
			t.Fatalf("reply %+v", reply)
		}
		w.append(ref, wr.chunk(0, protocol.Stdout, "ld\n"))
		check := func(when string) {
			if got := w.raw(query(ref)); got != "hello\nworoops\nld\n" {
				t.Errorf("%s: raw %q", when, got)
			}
			s := w.lines(query(ref))
			if got := texts(s); got != "1:hello|2:world|3:oops" || s.Total != 3 {
				t.Errorf("%s: lines %q of %d", when, got, s.Total)
			}
		}
		check("live")
		w.seal(ref, wr.length(0, protocol.Stdout), wr.length(0, protocol.Stderr))
		check("sealed")
		events := w.follow(query(ref))
		if last := events[len(events)-1].Sealed; text(events) != "hello\nworoops\nld\n" || last == nil || last.Lines != 3 || last.Bytes != 17 || last.Gap || last.Truncated {
			t.Errorf("events %q, last %+v", text(events), last)
		}
	})
}

// texts renders lines as "number:text|…".
func texts(s protocol.LogSlice) string {
	var out []string
	for _, l := range s.Lines {
		out = append(out, fmt.Sprintf("%d:%s", l.Number, l.Text))
	}
	return strings.Join(out, "|")
}

// print appends text as a runner would: in chunks of at most a MiB.
func (w *world) print(ref ci.LeaseRef, wr *writer, step int, text string) {
	w.t.Helper()
	for len(text) > 0 {
		n := min(len(text), protocol.MaxChunk)
		w.append(ref, wr.chunk(step, protocol.Stdout, text[:n]))
		text = text[n:]
	}
}

// everywhere checks a log live, sealed, and on a node that has just started.
func (w *world) everywhere(ref ci.LeaseRef, ends []protocol.StreamEnd, check func(when string)) {
	w.t.Helper()
	check("live")
	w.seal(ref, ends...)
	check("sealed")
	w.svc = w.start()
	check("after a restart")
}

func TestCase_LOG_01_LinesOverAnyLengthDoNotEndTheLog(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		for _, n := range []int{66_000, 1_100_000, 20_000_000} {
			ref := w.job()
			var wr writer
			long := strings.Repeat("x", n-3) + "äz"
			whole := "p1\np2\np3\n" + long + "\np4\np5\np6\n"
			w.print(ref, &wr, 0, whole)
			w.everywhere(ref, []protocol.StreamEnd{wr.length(0, protocol.Stdout)}, func(when string) {
				s := w.lines(query(ref))
				if len(s.Lines) != 7 || s.Lines[2].Text != "p3" || s.Lines[4].Text != "p4" || s.Lines[6].Text != "p6" {
					t.Fatalf("%d %s: %d lines", n, when, len(s.Lines))
				}
				l := s.Lines[3]
				if int64(len(l.Text))+l.Cut != int64(n) || !strings.HasPrefix(long, l.Text) || len(l.Text) < 60_000 || !utf8.ValidString(l.Text) {
					t.Errorf("%d %s: long line has %d bytes and %d cut", n, when, len(l.Text), l.Cut)
				}
				if got := w.raw(query(ref)); got != whole {
					t.Errorf("%d %s: raw has %d bytes", n, when, len(got))
				}
			})
			if got := text(w.follow(query(ref))); got != whole {
				t.Errorf("%d: events give %d bytes", n, len(got))
			}
		}
	})
}

func TestCase_LOG_02_ProgressWithoutNewlineIsOneLineThatShowsItsLastState(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		var b strings.Builder
		for i := range 200_000 {
			fmt.Fprintf(&b, "\r%d%%", i*100/199_999)
		}
		w.print(ref, &wr, 0, b.String())
		if s := w.lines(query(ref)); len(s.Lines) != 1 || !s.Lines[0].Open || s.Lines[0].Text != "100%" {
			t.Errorf("while it is drawn: %d lines, %q", len(s.Lines), s.Lines[0].Text)
		}
		b.WriteString("\ndone\n")
		w.append(ref, wr.chunk(0, protocol.Stdout, "\ndone\n"))
		w.everywhere(ref, []protocol.StreamEnd{wr.length(0, protocol.Stdout)}, func(when string) {
			s := w.lines(query(ref))
			if texts(s) != "1:100%|2:done" || s.Lines[0].Open || s.Lines[0].Cut != int64(b.Len())-int64(len("100%\ndone\n")) {
				t.Errorf("%s: %.60q, cut %d", when, texts(s), s.Lines[0].Cut)
			}
			if w.raw(query(ref)) != b.String() {
				t.Errorf("%s: raw differs", when)
			}
		})
		if w.row(ref).Bytes != int64(b.Len()) {
			t.Errorf("counted %d bytes, stored %d", w.row(ref).Bytes, b.Len())
		}
	})
}

func TestCase_LOG_03_BytesThatAreNotUTF8AreKeptAndShownAsReplacement(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "caf\351 \377\376\000x\nafter\n"))
		w.everywhere(ref, []protocol.StreamEnd{wr.length(0, protocol.Stdout)}, func(when string) {
			if got := hex.EncodeToString([]byte(w.raw(query(ref)))); !strings.HasPrefix(got, "636166e920fffe00780a") {
				t.Errorf("%s: raw %s", when, got)
			}
			s := w.lines(query(ref))
			if len(s.Lines) != 2 || s.Lines[0].Text != "caf� ��\x00x" || s.Lines[1].Text != "after" {
				t.Errorf("%s: %q", when, texts(s))
			}
		})
	})
}

func TestCase_LOG_04_WhatBelongsToNoStepIsShownAndTheStepsAddUp(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(protocol.StepSystem, protocol.System, "prepare\n"), wr.chunk(0, protocol.Stdout, "hello\n"))
		for i := range 5 {
			w.append(ref, wr.chunk(protocol.StepSystem, protocol.System, fmt.Sprintf("teardown %d\n", i)))
		}
		w.everywhere(ref, nil, func(when string) {
			sum := int64(0)
			for _, step := range []int{protocol.StepSystem, 0, 1} {
				sum += w.lines(stepOf(query(ref), step)).Total
			}
			all := w.lines(query(ref))
			if system := w.lines(stepOf(query(ref), protocol.StepSystem)); system.Total != 6 || sum != all.Total || all.Total != 7 {
				t.Errorf("%s: %d lines of no step, steps have %d, the log has %d", when, system.Total, sum, all.Total)
			}
		})
	})
}

func TestCase_LOG_10_ChunksOfAnEndedAttemptAreRefusedAndTheEarlierOnesKept(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "before\n"))
		w.Cancel(ref.Job)
		w.append(ref, wr.chunk(0, protocol.Stdout, "while cancelling\n"))
		held := w.held(ref)
		w.end(ref)
		_, err := w.svc.Append(t.Context(), held, []protocol.Chunk{wr.chunk(0, protocol.Stdout, "late\n")})
		if !errors.Is(err, ci.ErrLeaseLost) || ci.RejectOf(err) != ci.RejectEnded {
			t.Errorf("late chunk: %v", err)
		}
		w.waitSealed(ref)
		if got := w.raw(query(ref)); got != "before\nwhile cancelling\n" {
			t.Errorf("log %q", got)
		}
	})
}

func TestAnExpiredLeaseAppendsNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		held := w.held(ref)
		w.Advance(2 * time.Minute)
		var wr writer
		_, err := w.svc.Append(t.Context(), held, []protocol.Chunk{wr.chunk(0, protocol.Stdout, "x")})
		if ci.RejectOf(err) != ci.RejectExpired {
			t.Errorf("append under an expired lease: %v", err)
		}
		if l := w.row(ref); l.Bytes != 0 || l.Extents != 0 {
			t.Errorf("stored %+v", l)
		}
		if left := w.objects("logs/"); len(left) != 0 {
			t.Errorf("objects left: %q", left)
		}
	})
}

func TestOneFencedAttemptDoesNotFailItsGroup(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		stale, good, first := w.job(), w.job(), w.job()
		staleHeld := w.held(stale)
		began, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		w.blob.on(func(string) error {
			once.Do(func() { close(began); <-release })
			return nil
		}, nil)
		var all sync.WaitGroup
		all.Go(func() { var wr writer; w.append(first, wr.chunk(0, protocol.Stdout, "holds the store\n")) })
		<-began
		var staleErr error
		all.Go(func() {
			var wr writer
			_, staleErr = w.svc.Append(t.Context(), staleHeld, []protocol.Chunk{wr.chunk(0, protocol.Stdout, "stale\n")})
		})
		all.Go(func() { var wr writer; w.append(good, wr.chunk(0, protocol.Stdout, "good\n")) })
		w.end(stale)
		newer := w.Claim(stale.Job)
		close(release)
		all.Wait()
		if ci.RejectOf(staleErr) != ci.RejectEpoch {
			t.Errorf("stale append: %v", staleErr)
		}
		if got := w.raw(query(good)); got != "good\n" {
			t.Errorf("its neighbour has %q", got)
		}
		if got := w.raw(query(stale)) + w.raw(query(newer)); got != "" {
			t.Errorf("bytes of the loser: %q", got)
		}
	})
}

func TestChunksMayArriveInAnyOrderAndTwice(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		a, b, c := wr.chunk(0, protocol.Stdout, "a"), wr.chunk(0, protocol.Stderr, "b"), wr.chunk(0, protocol.Stdout, "c")
		if reply := w.append(ref, c); len(reply.Streams) != 0 {
			t.Errorf("acknowledged behind a hole: %+v", reply)
		}
		if got := w.raw(query(ref)); got != "" {
			t.Errorf("visible behind a hole: %q", got)
		}
		w.append(ref, b, c)
		reply := w.append(ref, a, b)
		if len(reply.Streams) != 2 || reply.Streams[0].Length != 2 || reply.Streams[1].Length != 1 {
			t.Errorf("reply %+v", reply)
		}
		w.append(ref, a, b, c)
		if got := w.raw(query(ref)); got != "abc" {
			t.Errorf("log %q", got)
		}
		for name, bad := range map[string]protocol.Chunk{
			"other bytes":        {Step: 0, Stream: protocol.Stdout, Sequence: 1, Offset: 0, Data: []byte("X")},
			"another stream":     {Step: 1, Stream: protocol.Stdout, Sequence: 1, Offset: 0, Data: []byte("a")},
			"another offset":     {Step: 0, Stream: protocol.Stdout, Sequence: 1, Offset: 1, Data: []byte("a")},
			"longer":             {Step: 0, Stream: protocol.Stdout, Sequence: 1, Offset: 0, Data: []byte("aa")},
			"overlap, new":       {Step: 0, Stream: protocol.Stdout, Sequence: 4, Offset: 1, Data: []byte("z")},
			"jump, new":          {Step: 0, Stream: protocol.Stdout, Sequence: 4, Offset: 9, Data: []byte("z")},
			"overlap, not next":  {Step: 0, Stream: protocol.Stdout, Sequence: 9, Offset: 1, Data: []byte("z")},
			"discarded for data": {Step: 0, Stream: protocol.Stdout, Sequence: 1, Offset: 0, Discarded: 1},
		} {
			if _, err := w.svc.Append(t.Context(), w.held(ref), []protocol.Chunk{bad}); !errors.Is(err, ci.ErrConflict) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got := w.raw(query(ref)); got != "abc" {
			t.Errorf("after conflicts: %q", got)
		}
	})
}

func TestGapsAndTruncationsAreMarkedWhereTheyAre(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "one\ntw"), wr.dropped(0, protocol.Stdout, 100), wr.chunk(0, protocol.Stdout, "o\nthree\n"))
		lostChunk := wr.chunk(0, protocol.Stdout, "lost!\n")
		w.append(ref, wr.chunk(1, protocol.Stderr, "err\n"))
		w.append(ref, wr.chunk(0, protocol.Stdout, "four\n"))
		tail := wr.length(0, protocol.Stdout)
		tail.Length += 7
		w.seal(ref, tail, protocol.StreamEnd{Step: 2, Stream: protocol.Stdout, Length: 5})
		events := w.follow(query(ref))
		want := fmt.Sprintf("one\ntw<discarded 100>o\nthree\nerr\n<lost %d>four\n<lost 7><lost 5>", len(lostChunk.Data))
		if got := text(events); got != want {
			t.Errorf("events %q, want %q", got, want)
		}
		last := events[len(events)-1].Sealed
		if !last.Gap || !last.Truncated {
			t.Errorf("sealed %+v", last)
		}
		s := w.lines(query(ref))
		if got := texts(s); got != "1:one|2:tw|3:o|4:three|5:err|6:four|7:|8:" {
			t.Errorf("lines %q", got)
		}
		if s.Lines[2].Discarded != 100 || s.Lines[5].Lost != 6 || s.Lines[6].Lost != 7 || s.Lines[7].Lost != 5 || s.Lines[7].Step != 2 {
			t.Errorf("marks %+v", s.Lines)
		}
		if l := w.row(ref); l.Gap != 18 || l.Cut != 100 || l.Lines != 8 {
			t.Errorf("row %+v", l)
		}
		r, err := w.svc.Raw(t.Context(), w.viewer, query(ref))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if !r.Truncated || !r.Sealed || r.Total != 8 {
			t.Errorf("raw %+v", r)
		}
	})
}

func TestALostAttemptsLogEndsWithWhatArrived(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref, silent := w.job(), w.job()
		var wr writer
		first := wr.chunk(0, protocol.Stdout, "first\n")
		_ = wr.chunk(0, protocol.Stdout, "never sent\n")
		w.append(ref, first, wr.chunk(0, protocol.Stderr, "behind it\n"))
		w.seal(ref)
		w.seal(silent)
		if got := text(w.follow(query(ref))); got != "first\nbehind it\n" {
			t.Errorf("log %q", got)
		}
		events := w.follow(query(silent))
		if len(events) != 1 || events[0].Sealed == nil || w.row(silent).ArchiveKey != "" {
			t.Errorf("silent attempt: %+v", events)
		}
		// Ending again changes nothing.
		w.Write(func(ctx context.Context, tx *store.Tx) error {
			return tx.EndLogs(ctx, []store.LogEnd{{Job: ref.Job, Epoch: ref.Epoch, Org: w.Org}}, w.Now())
		})
		if l := w.row(ref); l.State != store.LogSealed {
			t.Errorf("state %s after a second end", l.State)
		}
	})
}

func TestTheLimitOfAnAttemptIsMarkedAndSaid(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.cfg.Limit = 10
		w.svc = w.start()
		ref := w.job()
		var wr writer
		if r := w.append(ref, wr.chunk(0, protocol.Stdout, "12345678\n")); r.Full {
			t.Error("full too early")
		}
		over := wr.chunk(0, protocol.Stdout, "over\n")
		if r := w.append(ref, over); !r.Full || r.Streams[0].Length != 14 {
			t.Errorf("reply %+v", r)
		}
		if r := w.append(ref, over); !r.Full && r.Streams[0].Length != 14 {
			t.Errorf("repeat %+v", r)
		}
		w.append(ref, wr.dropped(0, protocol.Stdout, 1000))
		w.seal(ref, wr.length(0, protocol.Stdout))
		events := w.follow(query(ref))
		if got := text(events); got != "12345678\n<discarded 5><discarded 1000>" {
			t.Errorf("log %q", got)
		}
		if last := events[len(events)-1].Sealed; !last.Truncated || last.Gap {
			t.Errorf("sealed %+v", last)
		}
	})
}

func TestCase_CLI_03_AStepsLinesAreExactlyItsOwnAndCutsAreSaid(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		want := map[int]string{}
		for step, n := range []int{100, 5000, 10} {
			for i := range n {
				line := fmt.Sprintf("step %d line %d\n", step, i)
				want[step] += line
				if i%7 == 3 { // cut anywhere, with the other stream between
					w.append(ref, wr.chunk(step, protocol.Stdout, line[:5]), wr.chunk(protocol.StepSystem, protocol.System, "tick\n"),
						wr.chunk(step, protocol.Stdout, line[5:]))
				} else {
					w.append(ref, wr.chunk(step, protocol.Stdout, line))
				}
				if i > 60 && step == 1 {
					w.append(ref, wr.chunk(step, protocol.Stdout, remaining(step, i+1, n)))
					want[step] += remaining(step, i+1, n)
					break
				}
			}
		}
		w.everywhere(ref, nil, func(when string) {
			for step, text := range want {
				if got := w.raw(stepOf(query(ref), step)); sha256.Sum256([]byte(got)) != sha256.Sum256([]byte(text)) {
					t.Errorf("%s: step %d has %d bytes, want %d", when, step, len(got), len(text))
				}
				q := stepOf(query(ref), step)
				q.Limit = 10_000
				s := w.lines(q)
				if n := strings.Count(text, "\n"); len(s.Lines) != n || s.Total != int64(n) || s.Truncated {
					t.Errorf("%s: step %d has %d of %d lines, want %d", when, step, len(s.Lines), s.Total, n)
				}
				for i, l := range s.Lines {
					if l.Text != fmt.Sprintf("step %d line %d", step, i) || l.Step != step {
						t.Fatalf("%s: step %d line %d is %q", when, step, i, l.Text)
					}
				}
			}
			q := stepOf(query(ref), 1)
			q.Tail = 20
			if got := w.raw(q); got != remaining(1, 4980, 5000) {
				t.Errorf("%s: tail of step 1: %q", when, got)
			}
			if s := w.lines(q); len(s.Lines) != 20 || s.Total != 5000 || s.Lines[0].Text != "step 1 line 4980" {
				t.Errorf("%s: tail lines of step 1: %d from %q", when, len(s.Lines), s.Lines[0].Text)
			}
			q = stepOf(query(ref), 1)
			var got []string
			for pages := 0; ; pages++ {
				q.Limit = 1111
				s := w.lines(q)
				for _, l := range s.Lines {
					got = append(got, l.Text+"\n")
				}
				if s.Total != 5000 || s.Truncated != (s.Next > 0) {
					t.Fatalf("%s: page %d: %+v", when, pages, s.Total)
				}
				if q.From = s.Next; q.From == 0 {
					break
				}
			}
			if strings.Join(got, "") != want[1] {
				t.Errorf("%s: pages of step 1 give %d lines", when, len(got))
			}
			q = query(ref)
			q.Search = "step 1 line 49"
			if s := w.lines(q); len(s.Lines) != 111 || s.Truncated {
				t.Errorf("%s: search finds %d lines", when, len(s.Lines))
			}
			if s := w.lines(stepOf(query(ref), 9)); len(s.Lines) != 0 || s.Total != 0 || s.Truncated {
				t.Errorf("%s: a step that did not run has %d lines", when, s.Total)
			}
		})
	})
}

func remaining(step, from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, "step %d line %d\n", step, i)
	}
	return b.String()
}

func TestAMatchAcrossChunksIsFound(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		for _, piece := range []string{"noise\nxxne", "e", "dle in pieces\n", "need", "less\n"} {
			w.append(ref, wr.chunk(0, protocol.Stdout, piece), wr.chunk(0, protocol.Stderr, "dle\n"))
		}
		w.everywhere(ref, nil, func(when string) {
			q := query(ref)
			q.Search = "needle"
			if got := texts(w.lines(q)); got != "2:xxneedle in pieces|6:needless" {
				t.Errorf("%s: found %q", when, got)
			}
			q.Search = "needles"
			if got := texts(w.lines(q)); got != "6:needless" {
				t.Errorf("%s: found %q", when, got)
			}
		})
	})
}

func TestALogBelongsToItsOrganisation(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "secret\n"))
		w.seal(ref)
		for _, v := range []auth.Viewer{{}, {Org: "org_other"}} {
			_, err1 := w.svc.Raw(t.Context(), v, query(ref))
			_, err2 := w.svc.Lines(t.Context(), v, query(ref))
			err3 := w.svc.Events(t.Context(), v, query(ref), func(logs.Event) error { t.Error("an event for a stranger"); return nil })
			for _, err := range []error{err1, err2, err3} {
				if !errors.Is(err, ci.ErrNotFound) {
					t.Errorf("viewer %q: %v", v.Org, err)
				}
			}
		}
		q := query(ref)
		q.Epoch = 2
		if _, err := w.svc.Lines(t.Context(), w.viewer, q); !errors.Is(err, ci.ErrNotFound) {
			t.Errorf("an attempt that was not made: %v", err)
		}
		_, jobs := w.Run(ci.JobSpec{})
		if s := w.lines(logs.Query{Job: jobs[0]}); len(s.Lines) != 0 || s.Sealed {
			t.Errorf("a job without attempts: %+v", s)
		}
	})
}

func TestAFollowerOfAJobThatWaitsIsWokenByItsFirstBytes(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.cfg.Poll = time.Hour
		w.svc = w.restart()
		svc := w.svc
		_, jobs := w.Run(ci.JobSpec{})
		first := make(chan string, 1)
		go func() {
			enough := errors.New("enough")
			err := svc.Events(context.Background(), w.viewer, logs.Query{Job: jobs[0]}, func(e logs.Event) error {
				first <- string(e.Log.Data)
				return enough
			})
			if !errors.Is(err, enough) {
				first <- err.Error()
			}
		}()
		w.eventually("the follower waits", func() bool { return svc.Followed(store.AttemptKey{Job: jobs[0], Epoch: 1}) })
		ref := w.Claim(jobs[0])
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "hi\n"))
		if got := <-first; got != "hi\n" {
			t.Errorf("the first event is %q", got)
		}
	})
}

func TestAnotherNodeFollowsWithoutGapOrRepeat(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.cfg.Poll = 5 * time.Millisecond
		other := w.start()
		ref := w.job()
		var wr writer
		var want strings.Builder
		got := make(chan string, 1)
		go func() {
			// Every third event the connection is lost and comes back on the other node.
			var b strings.Builder
			q, services := query(ref), []*logs.Service{other, w.svc}
			lost := errors.New("connection lost")
			for turn := 0; ; turn++ {
				n := 0
				err := services[turn%2].Events(context.Background(), w.viewer, q, func(e logs.Event) error {
					if e.Log != nil {
						b.Write(e.Log.Data)
					}
					q.After = e.Cursor
					if n++; n == 3 && e.Sealed == nil {
						return lost
					}
					return nil
				})
				if err == nil {
					got <- b.String()
					return
				}
				if !errors.Is(err, lost) {
					got <- err.Error()
					return
				}
			}
		}()
		for i := range 40 {
			line := fmt.Sprintf("line %d\n", i)
			want.WriteString(line)
			w.append(ref, wr.chunk(i%3, protocol.Stdout, line))
		}
		w.seal(ref)
		if text := <-got; text != want.String() {
			t.Errorf("followed %q, want %q", text, want.String())
		}
	})
}

func TestALineWindowGoesOnInItsEvents(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "a\nb"))
		s := w.lines(query(ref))
		if s.Cursor == "" || !s.Lines[1].Open {
			t.Fatalf("window %+v", s)
		}
		w.append(ref, wr.chunk(0, protocol.Stdout, "c\n"))
		w.seal(ref)
		q := query(ref)
		q.After = s.Cursor
		if got := text(w.follow(q)); got != "c\n" {
			t.Errorf("events behind the window: %q", got)
		}
		for _, bad := range []string{"x", "1-", "-1", "1-x", "0-5", "1--2", "9999999999999999999-1"} {
			q.After = bad
			if err := w.svc.Events(t.Context(), w.viewer, q, func(logs.Event) error { return nil }); !errors.Is(err, ci.ErrInvalid) {
				t.Errorf("cursor %q: %v", bad, err)
			}
		}
	})
}

// The end of a log is what its last lines are asked for: when not all of them fit
// into an answer, the first are left out, and its events go on behind the last.
func TestTheLastLinesEndWithTheLogWhateverFits(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		for i := range 3 {
			w.append(ref, wr.chunk(0, protocol.Stdout, remaining(0, 1000*i, 1000*(i+1))))
		}
		long := w.job()
		var lw writer
		for i := range 50 { // 6 MiB
			w.append(long, lw.chunk(0, protocol.Stdout, fmt.Sprintf("%d %s\n", i, strings.Repeat(strings.Repeat("x", 50_000)+"\n", 5)[:127_000])))
		}
		check := func(when string, q logs.Query, last string, most int) {
			t.Helper()
			s := w.lines(q)
			n := len(s.Lines)
			if n == 0 || n > most || !s.Truncated || s.Next != 0 {
				t.Fatalf("%s: %d lines, truncated %v, next %d", when, n, s.Truncated, s.Next)
			}
			if end := s.Lines[n-1]; end.Number != s.Total || !strings.HasPrefix(end.Text, last) || s.First != s.Lines[0].Number {
				t.Errorf("%s: the answer ends with line %d of %d, %.40q", when, end.Number, s.Total, end.Text)
			}
			if s.Sealed != (s.Cursor == "") {
				t.Errorf("%s: sealed %v, cursor %q", when, s.Sealed, s.Cursor)
			}
		}
		for _, when := range []string{"live", "sealed"} {
			q := query(ref)
			q.Tail = 2500
			check(when, q, "step 0 line 2999", 1000)
			q.Limit = 7
			check(when, q, "step 0 line 2999", 7)
			q.Search = "line 2"
			check(when+", a search", q, "step 0 line 2999", 7)
			q = query(long)
			q.Tail = 1000
			check(when+", long lines", q, "x", 999)
			if when == "live" {
				w.seal(ref, wr.length(0, protocol.Stdout))
				w.seal(long, lw.length(0, protocol.Stdout))
			}
		}
		q := query(ref)
		q.Tail = 2500
		if got := text(w.follow(q)); got != remaining(0, 500, 3000) {
			t.Errorf("the events of the last 2500 lines are %d bytes", len(got))
		}
	})
}

func TestCase_R14_AStoreThatIsAwayCostsNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "before\n"))
		during := wr.chunk(0, protocol.Stdout, "during\n")
		w.blob.on(func(string) error { return ci.Errorf(ci.ErrUnavailable, "the store is away") }, nil)
		var e *ci.Error
		for range 3 {
			_, err := w.svc.Append(t.Context(), w.held(ref), []protocol.Chunk{during})
			if !errors.As(err, &e) || e.Kind != ci.ErrUnavailable || e.RetryAfter <= 0 {
				t.Fatalf("append: %v", err)
			}
		}
		if got := w.raw(query(ref)); got != "before\n" {
			t.Errorf("while away: %q", got)
		}
		w.blob.on(nil, nil)
		if r := w.append(ref, during); r.Streams[0].Length != 14 {
			t.Errorf("after it is back: %+v", r)
		}
		// Stored, and the answer lost.
		stored := wr.chunk(0, protocol.Stdout, "stored\n")
		w.append(ref, stored)
		w.append(ref, stored)
		// Sealing waits for the store, too.
		w.blob.on(func(key string) error {
			if strings.Contains(key, "archives") {
				return ci.Errorf(ci.ErrUnavailable, "the store is away")
			}
			return nil
		}, nil)
		w.end(ref, wr.length(0, protocol.Stdout))
		if _, err := w.svc.SealEnded(t.Context()); err == nil && w.row(ref).State == store.LogSealed {
			t.Error("sealed without an archive")
		}
		if got := w.raw(query(ref)); got != "before\nduring\nstored\n" {
			t.Errorf("before it can be sealed: %q", got)
		}
		w.blob.on(nil, nil)
		w.svc.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
		w.waitSealed(ref)
		if got := w.raw(query(ref)); got != "before\nduring\nstored\n" {
			t.Errorf("sealed: %q", got)
		}
	})
}

func TestWaitingBytesAreBounded(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		w.cfg.Memory = 1 << 20
		w.svc = w.start()
		ref, other := w.job(), w.job()
		began, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		w.blob.on(func(string) error { once.Do(func() { close(began); <-release }); return nil }, nil)
		var all sync.WaitGroup
		all.Go(func() {
			var wr writer
			w.append(ref, wr.chunk(0, protocol.Stdout, strings.Repeat("x", 1<<20)))
		})
		<-began
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("gone")
		var wr writer
		c := wr.chunk(0, protocol.Stdout, "y")
		held := w.held(other)
		all.Go(func() {
			if _, err := w.svc.Append(ctx, held, []protocol.Chunk{c}); !errors.Is(err, gone) {
				t.Errorf("append beyond the bound: %v", err)
			}
		})
		cancel(gone)
		close(release)
		all.Wait()
		w.append(other, c)
	})
}

func TestCase_S54_ChangedBytesAreNeverReturned(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "authentic\n"))
		flip := func(what string) {
			for _, key := range w.objects("logs/") {
				if !strings.Contains(key, what) {
					continue
				}
				info, err := w.blob.Stat(t.Context(), key)
				if err != nil {
					t.Fatal(err)
				}
				for at := range info.Size {
					w.svc = logs.New(w.cfg) // nothing in memory
					w.svc = withFlip(w, key, at)
					r, err := w.svc.Raw(t.Context(), w.viewer, query(ref))
					if err == nil {
						var b []byte
						b, err = io.ReadAll(r)
						if len(b) > 0 && string(b) != "authentic\n" {
							t.Fatalf("%s byte %d flipped: returned %q", what, at, b)
						}
						_ = r.Close()
					}
					if !errors.Is(err, ci.ErrDigest) && !(what == "archives" && err == nil) {
						t.Fatalf("%s byte %d flipped: %v", what, at, err)
					}
				}
			}
		}
		flip("segments")
		first := w.svc
		w.svc = w.start()
		w.seal(ref)
		w.svc = first
		flip("archives")
	})
}

// withFlip returns a service that reads one object with one bit flipped.
func withFlip(w *world, key string, at int64) *logs.Service {
	cfg := w.cfg
	cfg.Blob = &flipped{Store: w.blob, key: key, at: at}
	return logs.New(cfg)
}

type flipped struct {
	blob.Store
	key string
	at  int64
}

func (f *flipped) Open(ctx context.Context, key string, at, n int64) (io.ReadCloser, error) {
	r, err := f.Store.Open(ctx, key, at, n)
	if err != nil || key != f.key {
		return r, err
	}
	b, err := io.ReadAll(r)
	if i := f.at - at; i >= 0 && i < int64(len(b)) {
		b[i] ^= 1
	}
	return io.NopCloser(strings.NewReader(string(b))), err
}

func TestManyAttemptsWriteAtOnceThroughTwoNodes(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		other := w.start()
		const attempts, chunks = 12, 15
		refs := make([]ci.LeaseRef, attempts)
		want := make([]string, attempts)
		var all sync.WaitGroup
		for i := range refs {
			refs[i] = w.job()
			var wr writer
			held := w.held(refs[i])
			var list []protocol.Chunk
			for j := range chunks {
				c := wr.chunk(j%2, protocol.Stdout, fmt.Sprintf("attempt %d chunk %d\n", i, j))
				list = append(list, c)
				want[i] += string(c.Data)
			}
			for turn, svc := range []*logs.Service{w.svc, other} {
				all.Go(func() { // each node gets every chunk; the second in another order
					for j := range list {
						c := list[j]
						if turn == 1 {
							c = list[len(list)-1-j]
						}
						body := protocol.AppendChunk(nil, c)
						for {
							_, err := svc.AppendBody(t.Context(), held, bytes.NewReader(body), int64(len(body)))
							if err == nil {
								break
							}
							if !errors.Is(err, ci.ErrUnavailable) {
								t.Errorf("append: %v", err)
								return
							}
						}
					}
				})
			}
		}
		all.Wait()
		for i, ref := range refs {
			if got := w.raw(query(ref)); got != want[i] {
				t.Errorf("attempt %d has %q", i, got)
			}
		}
		body := protocol.AppendChunk(nil, protocol.Chunk{Stream: protocol.Stdout, Sequence: 99, Data: []byte("x")})
		for name, bad := range map[string][]byte{"cut": body[:len(body)-1], "flipped": append(bytes.Clone(body[:len(body)-1]), 'y'), "empty": nil} {
			if _, err := w.svc.AppendBody(t.Context(), w.held(refs[0]), bytes.NewReader(bad), int64(len(bad))); err == nil || errors.Is(err, ci.ErrInternal) {
				t.Errorf("a body that is %s: %v", name, err)
			}
		}
		if _, err := w.svc.AppendBody(t.Context(), w.held(refs[0]), bytes.NewReader(body), int64(len(body))+1); !errors.Is(err, ci.ErrInvalid) {
			t.Errorf("a body shorter than its length: %v", err)
		}
		if _, err := w.svc.AppendBody(t.Context(), w.held(refs[0]), bytes.NewReader(body), protocol.MaxLogBody+1); !errors.Is(err, ci.ErrTooLarge) {
			t.Errorf("a body over the limit: %v", err)
		}
	})
}

// Before Run each call stores what waits by itself, in groups when calls come
// together: what it acknowledges is as durable as behind a writer.
func TestAppendStoresByItselfWhileNothingRuns(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		cfg := w.cfg
		first, second := w.job(), w.job()
		var one, two writer
		var svc *logs.Service
		put := func(ref ci.LeaseRef, c protocol.Chunk) {
			reply, err := svc.Append(t.Context(), w.held(ref), []protocol.Chunk{c})
			if err != nil || len(reply.Streams) != 1 || reply.Streams[0].Length != c.Offset+c.Len() {
				t.Errorf("reply %+v, %v", reply, err)
			}
		}
		calls := 0
		cfg.Gather = func() {
			if calls++; calls == 1 { // another call comes while the first one waits
				put(second, two.chunk(0, protocol.Stdout, "second\n"))
			}
		}
		svc = logs.New(cfg)
		put(first, one.chunk(0, protocol.Stdout, "first\n"))
		put(first, one.chunk(0, protocol.Stdout, "third\n"))
		if got := len(w.objects("logs/segments/")); got != 2 {
			t.Errorf("%d segments for a group of two calls and a single one", got)
		}
		if a, b := w.raw(query(first)), w.raw(query(second)); a != "first\nthird\n" || b != "second\n" {
			t.Errorf("another node reads %q and %q", a, b)
		}
	})
}

// The database's clock jumps by more than a segment lives: what was dated by the
// clock before is sent again, once, and then judged as any other.
func TestAClockJumpRefusesOneSegment(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		w.append(ref, protocol.Chunk{Stream: protocol.Stdout, Sequence: 1, Data: []byte("a")})
		held := w.held(ref)
		w.Advance(time.Hour)
		for i, want := range []ci.Kind{ci.ErrUnavailable, ci.ErrLeaseLost} { // nobody has moved the lease
			_, err := w.svc.Append(t.Context(), held, []protocol.Chunk{{Stream: protocol.Stdout, Sequence: 2, Offset: 1, Data: []byte("b")}})
			if !errors.Is(err, want) {
				t.Errorf("append %d after the jump: %v, want %s", i+1, err, want)
			}
		}
	})
}

// A read that fails proves nothing: neither a clock that jumps nor a store that
// was away for an hour makes it the last word about bytes that were acknowledged.
func TestBytesAreGivenUpOnlyWhenTheStoreKeepsNotHavingThem(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "there\n"))
		w.stop()
		var mono time.Duration
		cfg := w.cfg
		cfg.Monotonic = func() time.Duration { return mono }
		svc := logs.New(cfg) // nothing in memory
		w.end(ref, wr.length(0, protocol.Stdout))
		w.Advance(48 * time.Hour) // the database's clock has jumped
		gone := func(string) error { return ci.Errorf(ci.ErrNotFound, "no such object") }
		try := func(want bool) {
			t.Helper()
			if n, err := svc.SealEnded(t.Context()); (n == 1) != want || (err == nil) != want {
				t.Fatalf("%d sealed, %v", n, err)
			}
		}
		w.blob.on(nil, gone)
		try(false)
		mono += 2 * time.Hour // the store was away
		try(false)
		w.blob.on(nil, nil)
		try(true)
		if l := w.row(ref); l.Gap != 0 || l.State != store.LogSealed {
			t.Errorf("sealed as %+v", l)
		}

		lost := w.job()
		wr = writer{}
		svc = logs.New(cfg)
		if _, err := svc.Append(t.Context(), w.held(lost), []protocol.Chunk{wr.chunk(0, protocol.Stdout, "lost\n")}); err != nil {
			t.Fatal(err)
		}
		svc = logs.New(cfg)
		w.end(lost, wr.length(0, protocol.Stdout))
		w.Advance(time.Minute)
		w.blob.on(nil, func(key string) error {
			if strings.HasPrefix(key, "logs/segments/") {
				return gone(key)
			}
			return nil
		})
		for range 10 {
			try(false)
			mono += 10 * time.Minute
		}
		try(true)
		if l := w.row(lost); l.Gap != 5 || l.State != store.LogSealed {
			t.Errorf("sealed as %+v", l)
		}
	})
}

// A reading that breaks off says how the connection ended, not what the store
// holds: whoever reads is asked to come back, and no byte is given up for it, also
// not while others are.
func TestAReadingThatBreaksOffIsNoDamage(t *testing.T) {
	t.Parallel()
	away := ci.Errorf(ci.ErrUnavailable, "read object").WithCause(io.ErrUnexpectedEOF) // as the store on S3 says it
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		w.append(ref, wr.chunk(0, protocol.Stdout, "there\n"))
		w.stop()
		var mono time.Duration
		cfg := w.cfg
		cfg.Monotonic = func() time.Duration { return mono }
		svc := logs.New(cfg) // nothing in memory
		for name, end := range map[string]struct {
			cut  error
			want ci.Kind
		}{
			"the store's error": {away, ci.ErrUnavailable},
			"an untyped error":  {errors.New("input/output error"), ci.ErrUnavailable},
			"a short object":    {io.EOF, ci.ErrDigest},
		} {
			w.blob.during(end.cut)
			if _, err := svc.Lines(t.Context(), w.viewer, query(ref)); ci.KindOf(err) != end.want {
				t.Errorf("%s: Lines answers %v, want %s", name, err, end.want)
			}
		}
		w.end(ref, wr.length(0, protocol.Stdout))
		w.Advance(time.Minute)
		try := func() {
			t.Helper()
			if n, err := svc.SealEnded(t.Context()); n != 0 || err == nil {
				t.Fatalf("%d sealed, %v", n, err)
			}
			mono += 10 * time.Minute
		}
		w.blob.during(nil)
		w.blob.on(nil, func(string) error { return ci.Errorf(ci.ErrNotFound, "no such object") })
		for range 10 {
			try() // the next failure of this kind would give the bytes up
		}
		w.blob.on(nil, nil)
		w.blob.during(away)
		for range 12 {
			try()
		}
		w.blob.during(nil)
		if n, err := svc.SealEnded(t.Context()); n != 1 || err != nil {
			t.Fatalf("%d sealed, %v", n, err)
		}
		if l := w.row(ref); l.Gap != 0 || l.State != store.LogSealed {
			t.Errorf("sealed as %+v", l)
		}
	})
}

// That stored bytes cannot be read now says nothing about a repeat of them: the
// runner is asked to send it again, not told that its chunk is wrong.
func TestARepeatWaitsForAStoreThatCannotBeRead(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		c := wr.chunk(0, protocol.Stdout, "once\n")
		w.append(ref, c)
		w.svc = w.restart() // nothing in memory
		for _, kind := range []ci.Kind{ci.ErrNotFound, ci.ErrDigest, ci.ErrUnavailable} {
			w.blob.on(nil, func(string) error { return ci.Errorf(kind, "not now") })
			if _, err := w.svc.Append(t.Context(), w.held(ref), []protocol.Chunk{c}); ci.KindOf(err) != ci.ErrUnavailable {
				t.Errorf("a store that answers %s: %v", kind, err)
			}
		}
		w.blob.on(nil, nil)
		w.append(ref, c)
	})
}
