package storybook

import (
	"fmt"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Now is the instant at which the sample data is seen.
func Now() time.Time { return time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC) }

func before(d time.Duration) time.Time { return Now().Add(-d) }

func at(d time.Duration) *time.Time { t := before(d); return &t }

// IDs of sample objects that tests and addresses name.
const (
	RunningRun  ci.RunID = "run_01sample0000000000000running"
	FailedRun   ci.RunID = "run_01sample00000000000000failed"
	GoodRun     ci.RunID = "run_01sample0000000000000success"
	AbortedRun  ci.RunID = "run_01sample0000000000000aborted"
	QueuedRun   ci.RunID = "run_01sample00000000000000queued"
	WarningRun  ci.RunID = "run_01sample0000000000000warning"
	CancelRun   ci.RunID = "run_01sample00000000000000cancel"
	StuckRun    ci.RunID = "run_01sample000000000000000stuck"
	LiveJob     ci.JobID = "job_01sample0000000000000000live"
	FailedJob   ci.JobID = "job_01sample00000000000000failed"
	ColourJob   ci.JobID = "job_01sample00000000000000colour"
	AbortedJob  ci.JobID = "job_01sample0000000000000aborted"
	WaitingJob  ci.JobID = "job_01sample0000000000000waiting"
	LongJob     ci.JobID = "job_01sample00000000000000000big"
	sampleOK             = ci.ConclusionSuccess
	sampleBad            = ci.ConclusionFailed
	sampleTotal          = 1_000_000
	sampleHash           = "9f2c41d07b6ae85310f4c8d2b7e6a1950c3d8e4f"
	sampleOlder          = "41b7de9023c1f5a86e70d94b2c8f6013a5e7d892"
	sampleTree           = "sha256:5c1d9be04a7f23681e0fb9d5c4a87263910fedc8b7a6594837261504f3e2d1c0"
	sampleFlow           = "sha256:e07a4c81f2d93b56a8170c9be4f5d62318a0b7c6d5e4f3928170605f4e3d2c1b"
)

func website() protocol.Repo { return protocol.Repo{ID: "repo_01samplewebsite", Name: "local/website"} }

func engine() protocol.Repo { return protocol.Repo{ID: "repo_01sampleengine", Name: "local/engine"} }

// job makes a job of a run; id may be empty for one that has no page of its own.
func job(id ci.JobID, key, name string, needs ...string) protocol.JobSummary {
	if id == "" {
		id = ci.JobID(fmt.Sprintf("job_01sample%x", key+name))
	}
	return protocol.JobSummary{ID: id, Key: key, Name: name, Needs: needs, State: ci.StateWaiting}
}

func done(j protocol.JobSummary, c ci.Conclusion, ready, start, end time.Duration) protocol.JobSummary {
	j.State, j.Conclusion, j.Attempts, j.Runner = ci.StateFinished, c, 1, "anvil-1"
	j.ReadyAt, j.StartedAt, j.FinishedAt = at(ready), at(start), at(end)
	if c == ci.ConclusionFailed {
		code := 1
		j.Reason, j.Detail, j.ExitCode = ci.ReasonExit, "step “test” ended with exit code 1", &code
	}
	return j
}

func running(j protocol.JobSummary, ready, start time.Duration, p ci.Phase) protocol.JobSummary {
	j.State, j.Attempts, j.Phase, j.Runner = ci.StateRunning, 1, p, "anvil-2"
	j.ReadyAt, j.StartedAt = at(ready), at(start)
	return j
}

func ready(j protocol.JobSummary, since time.Duration, w protocol.WaitReason) protocol.JobSummary {
	j.State, j.ReadyAt, j.Waiting = ci.StateReady, at(since), &w
	return j
}

// finish fills in a run's counts, and its end when it is over.
func finish(r protocol.Run, jobs ...protocol.JobSummary) protocol.Run {
	r.JobList, r.Jobs = jobs, map[string]int{}
	r.SourceDigest, r.WorkflowDigest = sampleTree, sampleFlow
	for i := range jobs {
		jobs[i].Index = i
		word := string(jobs[i].State)
		if jobs[i].State == ci.StateFinished {
			word = string(jobs[i].Conclusion)
		}
		r.Jobs[word]++
	}
	return r
}

func run(id ci.RunID, number int64, repo protocol.Repo, flow string, created time.Duration) protocol.Run {
	return protocol.Run{RunSummary: protocol.RunSummary{
		ID: id, Number: number, Repo: repo, Workflow: flow, Path: ".forgeci/" + flow + ".yaml", Event: "manual",
		State: ci.StateFinished, Trust: ci.TrustTrusted, Actor: "admin", CommitSHA: sampleHash, Ref: "main",
		CreatedAt: before(created), StartedAt: at(created - time.Second),
	}}
}

// Sample returns the data that the storybook shows.
func Sample() Data {
	d := Data{
		Jobs: map[ci.JobID]protocol.Job{}, Stories: map[ci.JobID]protocol.Explanation{},
		Logs: map[ci.JobID]*Log{}, LastGood: map[ci.RunID]protocol.RunSummary{},
	}
	d.Runs = []protocol.Run{queuedRun(), runningRun(), failedRun(), warningRun(), goodRun(), abortedRun(), cancelledRun(), stuckRun()}
	d.LastGood[FailedRun] = goodRun().RunSummary
	for i := range 60 {
		r := run(ci.RunID(fmt.Sprintf("run_01sampleolder%03d", i)), int64(120-i), engine(), "nightly", time.Duration(30+i)*time.Hour)
		r.Conclusion, r.Event, r.FinishedAt = sampleOK, "schedule", at(time.Duration(30+i)*time.Hour-7*time.Minute)
		r.CommitSHA, r.Message = sampleOlder, "Nightly run of everything"
		d.Runs = append(d.Runs, finish(r, done(job("", "all", "all"), sampleOK, time.Hour, time.Hour, 0)))
	}
	sampleJobs(&d)
	sampleFleet(&d)
	return d
}

func queuedRun() protocol.Run {
	r := run(QueuedRun, 132, engine(), "release", 4*time.Minute)
	r.State, r.StartedAt, r.Message, r.Dirty = ci.StateWaiting, nil, "Prepare the release notes", true
	until := Now().Add(42 * time.Second)
	return finish(r,
		ready(job(WaitingJob, "sign", "sign"), 4*time.Minute, protocol.WaitReason{Code: "no_matching_runner", Detail: "No registered runner offers the label hsm; 3 runners are online."}),
		ready(job("", "image", "image"), 4*time.Minute, protocol.WaitReason{Code: "runners_busy", Detail: "All 2 matching runners are busy", Position: 2}),
		ready(job("", "upload", "upload"), 3*time.Minute, protocol.WaitReason{Code: "backoff", Detail: "The last attempt was lost while preparing", Until: &until}),
	)
}

func runningRun() protocol.Run {
	r := run(RunningRun, 131, website(), "build", 95*time.Second)
	r.State, r.Message, r.Ref = ci.StateRunning, "Serve fonts from our own origin\n\nThe old host is slow.", "own-fonts"
	needs := func(k ...string) *protocol.WaitReason {
		return &protocol.WaitReason{Code: "needs", Detail: "Needs " + k[0] + " to finish", Needs: k}
	}
	jobs := []protocol.JobSummary{
		done(job("", "fetch", "fetch"), sampleOK, 94*time.Second, 93*time.Second, 81*time.Second),
		done(job(ColourJob, "lint", "lint", "fetch"), sampleOK, 81*time.Second, 80*time.Second, 66*time.Second),
		running(job(LiveJob, "compile", "compile", "fetch"), 81*time.Second, 79*time.Second, ci.PhaseExecuting),
	}
	for i, leg := range []string{"firefox, linux", "firefox, windows", "chromium, linux", "chromium, windows", "webkit, darwin", "webkit, linux", "chromium, darwin", "firefox, darwin"} {
		j := job("", "browsers", "browsers ("+leg+")", "lint")
		switch {
		case i < 3:
			j = done(j, sampleOK, 66*time.Second, time.Duration(64-i)*time.Second, time.Duration(30-6*i)*time.Second)
		case i < 5:
			j = running(j, 66*time.Second, 28*time.Second, ci.PhaseExecuting)
		case i == 5:
			j = running(j, 66*time.Second, 3*time.Second, ci.PhasePreparing)
		default:
			j = ready(j, 66*time.Second, protocol.WaitReason{Code: "runners_busy", Detail: "All 2 matching runners are busy", Position: i - 5})
		}
		jobs = append(jobs, j)
	}
	for _, j := range []protocol.JobSummary{job("", "unit", "unit", "compile"), job("", "package", "package", "compile", "lint", "fetch"), job("", "deploy-preview", "deploy-preview", "unit", "package", "browsers"), job("", "links", "links", "unit", "package", "browsers")} {
		j.Waiting = needs(j.Needs...)
		jobs = append(jobs, j)
	}
	return finish(r, jobs...)
}

func failedRun() protocol.Run {
	r := run(FailedRun, 130, website(), "build", 41*time.Minute)
	r.Conclusion, r.Reason, r.FinishedAt = sampleBad, ci.ReasonJobFailed, at(38*time.Minute)
	r.Message, r.Author = "Round prices half to even", "the team"
	m := time.Minute
	skipped := job("", "package", "package", "test", "lint")
	skipped.State, skipped.Conclusion, skipped.Reason, skipped.FinishedAt = ci.StateFinished, ci.ConclusionSkipped, ci.ReasonNeeds, at(38*m)
	r = finish(r,
		done(job("", "compile", "compile"), sampleOK, 41*m, 41*m-2*time.Second, 40*m),
		done(job("", "lint", "lint"), sampleOK, 41*m, 41*m-2*time.Second, 40*m+20*time.Second),
		done(job(FailedJob, "test", "test", "compile"), sampleBad, 40*m, 40*m-time.Second, 38*m),
		skipped)
	r.Artifacts = []protocol.Artifact{
		{ID: "art_01samplesite", Run: r.ID, Job: r.JobList[0].ID, JobName: "compile", Epoch: 1, Name: "site", Size: 48_213_004, Digest: sampleTree, Files: 1204, Bytes: 112_000_000, Bound: true, CreatedAt: before(40 * m)},
		{ID: "art_01samplereport", Run: r.ID, Job: FailedJob, JobName: "test", Epoch: 1, Name: "report", Size: 88_120, Digest: sampleFlow, Files: 3, Bytes: 410_000, CreatedAt: before(38 * m)},
	}
	return r
}

func warningRun() protocol.Run {
	r := run(WarningRun, 129, engine(), "build", 3*time.Hour)
	r.Conclusion, r.Warnings, r.FinishedAt, r.Message = sampleOK, true, at(3*time.Hour-4*time.Minute), "Try the new allocator"
	h := 3 * time.Hour
	bad := done(job("", "bench", "bench", "test"), sampleBad, h, h-time.Minute, h-2*time.Minute)
	bad.AllowFailure = true
	return finish(r, done(job("", "test", "test"), sampleOK, h, h-time.Second, h-time.Minute), bad)
}

func goodRun() protocol.Run {
	r := run(GoodRun, 128, website(), "build", 5*time.Hour)
	r.Conclusion, r.FinishedAt, r.Message, r.CommitSHA = sampleOK, at(5*time.Hour-3*time.Minute), "Show the price with its tax", sampleOlder
	h := 5 * time.Hour
	return finish(r, done(job("", "compile", "compile"), sampleOK, h, h-time.Second, h-time.Minute),
		done(job(LongJob, "test", "test", "compile"), sampleOK, h-time.Minute, h-time.Minute, h-3*time.Minute))
}

func abortedRun() protocol.Run {
	r := run(AbortedRun, 127, engine(), "deploy", 9*time.Hour)
	r.Conclusion, r.Reason, r.FinishedAt, r.Message = sampleBad, ci.ReasonInfrastructure, at(9*time.Hour-8*time.Minute), "Deploy to the test stand"
	h := 9 * time.Hour
	j := done(job(AbortedJob, "deploy", "deploy"), ci.ConclusionAborted, h, h-time.Second, h-8*time.Minute)
	j.Reason, j.Uncertain = ci.ReasonRunnerLost, true
	j.Detail = "the runner was lost while executing; retry: {on: [runner_lost]} in line 14 would have allowed another attempt"
	return finish(r, j)
}

func cancelledRun() protocol.Run {
	r := run(CancelRun, 126, website(), "build", 26*time.Hour)
	r.Conclusion, r.Reason, r.FinishedAt, r.Event, r.ParentRun = ci.ConclusionCancelled, ci.ReasonUser, at(26*time.Hour-time.Minute), "retry", GoodRun
	h := 26 * time.Hour
	return finish(r, done(job("", "compile", "compile"), ci.ConclusionCancelled, h, h-time.Second, h-time.Minute))
}

// stuckRun is being cancelled and waits for what nobody has proven to have ended.
func stuckRun() protocol.Run {
	r := run(StuckRun, 125, engine(), "deploy", 21*time.Minute)
	r.State, r.Reason, r.Message = ci.StateCancelling, ci.ReasonUser, "Deploy by mistake"
	h := 21 * time.Minute
	r = finish(r, done(job("", "compile", "compile"), sampleOK, h, h-time.Second, h-time.Minute),
		stuck(job("", "deploy", "deploy", "compile"), "bellows", h-time.Minute), stuck(job("", "notify", "notify", "compile"), "anvil-1", 30*time.Second))
	r.Unproven = []protocol.Unproven{
		{Job: r.JobList[1].ID, Name: "deploy", Epoch: 1, Runner: "rnr_01samplethree", RunnerName: "bellows", Lost: true, Since: before(19 * time.Minute)},
		{Job: r.JobList[2].ID, Name: "notify", Epoch: 1, Runner: "rnr_01sampleone", RunnerName: "anvil-1", Since: before(30 * time.Second)},
	}
	return r
}

func stuck(j protocol.JobSummary, runner string, ready time.Duration) protocol.JobSummary {
	j.State, j.Attempts, j.Runner, j.ReadyAt, j.StartedAt = ci.StateCancelling, 1, runner, at(ready), at(ready-time.Second)
	return j
}

func sampleFleet(d *Data) {
	seen := before(2 * time.Second)
	lost := before(20 * time.Minute)
	quiet, silent := before(40*time.Second), ci.Duration(40*time.Second)
	offer := protocol.Offer{OS: "linux", Arch: "amd64", Size: "medium", Isolation: []ci.Isolation{ci.IsolationProcess}, Labels: []string{"ssd", "zone=a"}}
	d.Runners = []protocol.Runner{
		{
			ID: "rnr_01sampleone", Name: "anvil-1", Status: "online", Offer: offer, Slots: 4, Version: "0.1.0", LastSeen: &seen, CreatedAt: before(90 * 24 * time.Hour),
			Running: []protocol.HeldJob{{Job: LiveJob, Name: "compile", Epoch: 1}, {Job: "job_01sampleleg", Name: "browsers (chromium, windows)", Epoch: 2}},
		},
		{
			ID: "rnr_01sampletwo", Name: "anvil-2", Status: "draining", Offer: offer, Slots: 2, Version: "0.1.0", LastSeen: &seen,
			Running: []protocol.HeldJob{{Job: "job_01sampleleg2", Name: "browsers (webkit, darwin)", Epoch: 1}},
		},
		{
			ID: "rnr_01samplethree", Name: "bellows", Status: "offline", Offer: protocol.Offer{OS: "darwin", Arch: "arm64", Isolation: []ci.Isolation{ci.IsolationProcess}}, Slots: 1, Version: "0.1.0", LastSeen: &lost, Quarantined: 1,
			Running: []protocol.HeldJob{{Job: AbortedJob, Name: "deploy", Epoch: 1, Quarantined: true}},
		},
		{ID: "rnr_01samplequiet", Name: "quench", Status: "online", Offer: offer, Slots: 1, Version: "0.1.0", LastSeen: &quiet, Silent: &silent},
		{ID: "rnr_01samplefour", Name: "tongs", Status: "fenced", Offer: offer, Slots: 2, Version: "0.0.9", LastSeen: &lost},
	}
	d.Letters = []protocol.DeadLetter{
		{Job: AbortedJob, Name: "deploy", Run: AbortedRun, Repo: "local/engine", Attempts: 3, Reason: ci.ReasonRunnerLost, Detail: "Three attempts were lost while preparing: bellows, bellows, tongs.", At: before(9 * time.Hour)},
		{Job: FailedJob, Name: "image", Run: CancelRun, Repo: "local/engine", Attempts: 3, Reason: ci.ReasonPrepare, Detail: "The source could not be fetched.", At: before(50 * time.Hour), Requeued: GoodRun},
	}
}
