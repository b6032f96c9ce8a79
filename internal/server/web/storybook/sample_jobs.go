package storybook

import (
	"fmt"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// sampleJobs adds the pages of the jobs that have one, with their logs.
func sampleJobs(d *Data) {
	for _, r := range d.Runs {
		for _, j := range r.JobList {
			page := protocol.Job{JobSummary: j, Run: r.RunSummary}
			if j.Attempts > 0 {
				page.Attempt = []protocol.Attempt{attempt(j)}
				page.StepList = steps(j)
				page.Attempt[0].StepList = page.StepList
				d.Logs[j.ID] = plainLog()
			}
			d.Jobs[j.ID] = page
			d.Stories[j.ID] = story(j)
		}
	}
	d.Logs[LiveJob] = liveLog()
	d.Logs[FailedJob] = failedLog()
	d.Logs[ColourJob] = colourLog()
	d.Logs[LongJob] = Made(sampleTotal, longLine)

	// The failed job was attempted twice: the first runner went away early.
	failed := d.Jobs[FailedJob]
	first, second := failed.Attempt[0], failed.Attempt[0]
	first.Conclusion, first.Reason, first.Winner, first.Phase = ci.ConclusionAborted, ci.ReasonRunnerShutdown, false, ci.PhasePreparing
	first.ExecutedAt, first.RunnerName = nil, "tongs"
	second.Epoch = 2
	first.StepList = nil
	failed.Attempts = 2
	failed.Attempt = []protocol.Attempt{first, second}
	d.Jobs[FailedJob] = failed
}

func attempt(j protocol.JobSummary) protocol.Attempt {
	a := protocol.Attempt{
		Epoch: 1, Lease: "lse_01sample", Runner: "rnr_01sampleone", RunnerName: j.Runner, Session: "ses_01sample",
		Phase: ci.PhaseFinalising, State: j.State, Conclusion: j.Conclusion, Reason: j.Reason, ExitCode: j.ExitCode,
		ClaimedAt: *j.ReadyAt, ExecutedAt: j.StartedAt, EndedAt: j.FinishedAt, LogSealed: j.State == ci.StateFinished,
		Winner: j.State == ci.StateFinished && j.Conclusion != ci.ConclusionAborted, Evidence: "exit",
	}
	if j.Conclusion == ci.ConclusionAborted {
		a.Evidence, a.LogGap = "", true
	}
	if j.State != ci.StateFinished {
		a.Evidence, a.Phase = "", j.Phase
	}
	return a
}

func steps(j protocol.JobSummary) []protocol.Step {
	step := func(i int, name string, took time.Duration) protocol.Step {
		return protocol.Step{Index: i, Name: name, State: ci.StateFinished, Conclusion: sampleOK, ExitCode: new(int), Duration: (*ci.Duration)(&took)}
	}
	list := []protocol.Step{
		step(0, "install", 8400*time.Millisecond), step(1, "test", 74*time.Second), step(2, "upload the report", 640*time.Millisecond),
	}
	switch {
	case j.State == ci.StateRunning:
		list[1].State, list[1].Conclusion, list[1].ExitCode, list[1].Duration = ci.StateRunning, "", nil, nil
		list[2].State, list[2].Conclusion, list[2].ExitCode, list[2].Duration = ci.StateWaiting, "", nil, nil
	case j.Conclusion == ci.ConclusionFailed:
		code := 1
		list[1].Conclusion, list[1].Reason, list[1].ExitCode = sampleBad, ci.ReasonExit, &code
		list[2].Conclusion, list[2].ExitCode, list[2].Duration = ci.ConclusionSkipped, nil, nil
	case j.Conclusion == ci.ConclusionAborted:
		list[1].Conclusion, list[1].Reason, list[1].ExitCode = ci.ConclusionAborted, ci.ReasonRunnerLost, nil
		list[2].Conclusion, list[2].ExitCode, list[2].Duration = ci.ConclusionSkipped, nil, nil
	}
	return list
}

func story(j protocol.JobSummary) protocol.Explanation {
	e := protocol.Explanation{Job: j}
	if j.ReadyAt == nil {
		e.Summary = "The job has not become ready."
		return e
	}
	e.History = []protocol.HistoryEvent{{At: *j.ReadyAt, Actor: "server", Action: "ready", Detail: "everything it needs has succeeded"}}
	if j.StartedAt == nil {
		e.Summary = "No runner has claimed the job yet."
		return e
	}
	e.History = append(e.History,
		protocol.HistoryEvent{At: j.StartedAt.Add(-900 * time.Millisecond), Actor: j.Runner, Action: "claimed", Epoch: 1},
		protocol.HistoryEvent{At: *j.StartedAt, Actor: j.Runner, Action: "phase executing", Epoch: 1})
	e.Summary = "One runner has owned the job."
	if j.Conclusion == ci.ConclusionAborted {
		e.History = append(e.History, protocol.HistoryEvent{At: *j.FinishedAt, Actor: "server", Action: "lease expired", Epoch: 1, Detail: "no heartbeat for 60 s; commands had begun and no policy allows another attempt"},
			protocol.HistoryEvent{At: j.FinishedAt.Add(3 * time.Second), Actor: j.Runner, Action: "completion rejected", Epoch: 1, Detail: "lease_expired"})
		e.Summary = "The runner was lost while commands ran, so the job was aborted. A late result of the runner was rejected."
	} else if j.FinishedAt != nil {
		e.History = append(e.History, protocol.HistoryEvent{At: *j.FinishedAt, Actor: j.Runner, Action: "completed", Epoch: 1, Detail: string(j.Conclusion)})
	}
	return e
}

func plainLog() *Log {
	return Live().
		Append(protocol.StepSystem, protocol.System, "Source verified: 1204 files, 5c1d9be04a\nWorkspace ready after 312 ms\n", 0).
		Append(0, protocol.Stdout, "+ make all\nok\n", 0).Seal()
}

func liveLog() *Log {
	l := Live().Append(protocol.StepSystem, protocol.System, "Source verified: 1204 files, 5c1d9be04a\nWorkspace ready after 312 ms\n", 0).
		Append(0, protocol.Stdout, "added 412 packages in 8s\n", 0)
	for i := range 120 {
		l.Append(1, protocol.Stdout, fmt.Sprintf("\x1b[2m%4d/400\x1b[0m compiling \x1b[36msrc/module_%03d.c\x1b[0m\n", i+1, i+1), 0)
	}
	return l.Append(1, protocol.Stderr, "\x1b[33mwarning:\x1b[0m unused variable ‘tax’ in src/price.c:88\n", 0).
		Append(1, protocol.Stdout, "linking  10%\rlinking  20%\rlinking  30%", 0)
}

func failedLog() *Log {
	l := Live().Append(protocol.StepSystem, protocol.System, "Source verified: 1204 files, 5c1d9be04a\nWorkspace ready after 298 ms\n", 0).
		Append(0, protocol.Stdout, "added 412 packages in 8s\n", 0)
	for i := range 340 {
		l.Append(1, protocol.Stdout, fmt.Sprintf("\x1b[32m✓\x1b[0m price_test %03d \x1b[2m%d ms\x1b[0m\n", i, 3+i%17), 0)
	}
	l.Append(1, protocol.Stdout, "\x1b[1;31m✗ rounds half to even\x1b[0m\n    price_test.go:41: Round(\x1b[35m2.5\x1b[0m) = \x1b[31m3\x1b[0m, want \x1b[32m2\x1b[0m\n", 0)
	l.Append(1, protocol.Stderr, "\x1b[41;97m FAIL \x1b[0m 1 of 341 tests failed, see \x1b]8;;https://example.com/tests\x1b\\the guide\x1b]8;;\x1b\\\n", 0)
	return l.Append(1, protocol.Stdout, "exit status 1\n", 2048).Seal()
}

// colourLog shows every colour and style.
func colourLog() *Log {
	l := Live()
	var b strings.Builder
	for i := range 16 {
		fmt.Fprintf(&b, "\x1b[38;5;%dm colour %2d \x1b[0m \x1b[48;5;%dm on %2d \x1b[0m\n", i, i, i, i)
	}
	for row := range 36 {
		for c := range 6 {
			fmt.Fprintf(&b, "\x1b[38;5;%dm%3d\x1b[0m \x1b[48;5;%dm   \x1b[0m ", 16+row*6+c, 16+row*6+c, 16+row*6+c)
		}
		b.WriteString("\n")
	}
	for i := 232; i < 256; i++ {
		fmt.Fprintf(&b, "\x1b[38;5;%dm%d\x1b[0m ", i, i)
	}
	b.WriteString("\n\x1b[1mbold\x1b[0m \x1b[2mdim\x1b[0m \x1b[3mitalic\x1b[0m \x1b[4munderlined\x1b[0m \x1b[9mstruck\x1b[0m \x1b[7minverse\x1b[0m\n")
	b.WriteString("bell \a, NUL \x00, direction \u202etxt.exe\u202c, tab\tend\n")
	return l.Append(0, protocol.Stdout, b.String(), 0).Seal()
}

func longLine(n int64) protocol.LogLine {
	step := 0
	if n > sampleTotal/100 {
		step = 1
	}
	text := fmt.Sprintf("2026-11-29T06:58:00Z case %07d \x1b[32mok\x1b[0m %s", n, strings.Repeat("payload ", 20))
	if n%100_000 == 7 {
		text = fmt.Sprintf("case %07d \x1b[31mneedle\x1b[0m", n)
	}
	return protocol.LogLine{Step: step, Stream: "stdout", Text: text}
}
