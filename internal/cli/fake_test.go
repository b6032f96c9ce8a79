package cli_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// fake is a server that speaks the real protocol over real HTTP and keeps a few
// runs in memory. A script changes them and takes the server away and back.
type fake struct {
	t    testing.TB
	addr string

	mu        sync.Mutex
	http      *http.Server
	runs      map[ci.RunID]*protocol.Run
	jobs      map[ci.JobID]*protocol.Job
	logs      map[ci.JobID][]protocol.LogEvent
	expired   map[ci.JobID]bool
	sealed    map[ci.JobID]bool
	artifacts map[string][]byte
	letters   []protocol.DeadLetter
	runners   []protocol.Runner
	snapshots map[string]bool
	forgets   bool                // the next run finds no snapshot any more
	refuses   string              // no run is made of this workflow file
	created   map[string]ci.RunID // by idempotency key
	requests  []string
	changed   chan struct{} // closed at every change
	number    int64
	waits     int // how often somebody asked for events
	signalled *exec.Cmd
}

const fakeToken = "fca_test"

func newFake(t testing.TB) *fake {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{
		t: t, addr: l.Addr().String(), runs: map[ci.RunID]*protocol.Run{}, jobs: map[ci.JobID]*protocol.Job{},
		logs: map[ci.JobID][]protocol.LogEvent{}, expired: map[ci.JobID]bool{}, sealed: map[ci.JobID]bool{},
		artifacts: map[string][]byte{}, snapshots: map[string]bool{}, created: map[string]ci.RunID{},
		changed: make(chan struct{}),
	}
	f.up(l)
	return f
}

// up serves again at the same address.
func (f *fake) up(l net.Listener) {
	if l == nil {
		var err error
		until(func() bool { l, err = net.Listen("tcp", f.addr); return err == nil })
		if err != nil {
			f.t.Error(err)
			return
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.http = &http.Server{Handler: f.handler(), ReadHeaderTimeout: time.Minute}
	go f.http.Serve(l) //nolint:errcheck // ends with down
}

// down breaks every connection and takes no new one.
func (f *fake) down() {
	f.mu.Lock()
	s := f.http
	f.mu.Unlock()
	s.Close()
}

// change changes the state under the lock and wakes the followers.
func (f *fake) change(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
	close(f.changed)
	f.changed = make(chan struct{})
}

// add makes a run with jobs of the same state.
func (f *fake) add(id ci.RunID, state ci.State, c ci.Conclusion, reason ci.Reason, jobs ...string) *protocol.Run {
	f.number++
	at := time.Date(2025, 1, 2, 12, 0, 0, 0, time.UTC)
	run := &protocol.Run{RunSummary: protocol.RunSummary{
		ID: id, Number: f.number, Repo: protocol.Repo{ID: "repo_1", Name: "local/hello"}, Workflow: "ci",
		Path: ".forgeci.yaml", Event: "manual", State: state, Conclusion: c, Reason: reason,
		CommitSHA: "0123456789abcdef0123456789abcdef01234567", Ref: "refs/heads/main", Message: "say hello", Actor: "admin",
		Trust: ci.TrustTrusted, CreatedAt: at, StartedAt: &at, Jobs: map[string]int{},
	}}
	end := at.Add(3200 * time.Millisecond)
	if state == ci.StateFinished {
		run.FinishedAt = &end
	}
	for i, name := range jobs {
		j := protocol.JobSummary{
			ID: ci.JobID("job_" + strings.TrimPrefix(string(id), "run_") + "_" + name), Index: i, Name: name, Key: name,
			State: state, Conclusion: c, Reason: reason, Attempts: 1, Runner: "runner-1", StartedAt: &at, FinishedAt: run.FinishedAt,
		}
		run.JobList = append(run.JobList, j)
		f.jobs[j.ID] = &protocol.Job{JobSummary: j, Run: run.RunSummary}
		f.sealed[j.ID] = state == ci.StateFinished
	}
	f.runs[id] = run
	return run
}

// set changes where a run and all its jobs are.
func (f *fake) set(id ci.RunID, state ci.State, c ci.Conclusion, reason ci.Reason) {
	run := f.runs[id]
	run.State, run.Conclusion, run.Reason = state, c, reason
	end := run.CreatedAt.Add(3200 * time.Millisecond)
	if state == ci.StateFinished {
		run.FinishedAt = &end
	}
	for i := range run.JobList {
		j := &run.JobList[i]
		j.State, j.Conclusion, j.Reason, j.FinishedAt, j.Attempts = state, c, reason, run.FinishedAt, max(j.Attempts, 1)
		f.jobs[j.ID].JobSummary = *j
		f.sealed[j.ID] = state == ci.StateFinished
	}
}

// steps gives a job steps whose output is lines of the form "STEP LINE".
func (f *fake) steps(id ci.JobID, names []string, lines []int, conclusions []ci.Conclusion) {
	job := f.jobs[id]
	offset := map[int]int64{}
	for i, name := range names {
		job.Spec.Steps = append(job.Spec.Steps, ci.StepSpec{Name: name})
		if conclusions[i] == "" {
			continue // not started
		}
		job.StepList = append(job.StepList, protocol.Step{Index: i, Name: name, State: ci.StateFinished, Conclusion: conclusions[i]})
		for n := range lines[i] {
			data := fmt.Appendf(nil, "%s %d\n", name, n+1)
			f.logs[id] = append(f.logs[id], protocol.LogEvent{Epoch: 1, Step: i, Stream: "stdout", Offset: offset[i], Data: data})
			offset[i] += int64(len(data))
		}
	}
}

func (f *fake) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(route string, h func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(route, func(w http.ResponseWriter, r *http.Request) {
			f.mu.Lock()
			f.requests = append(f.requests, r.Method+" "+r.URL.RequestURI())
			if strings.HasSuffix(r.URL.Path, "/events") {
				f.waits++
			}
			f.mu.Unlock()
			err := error(ci.Errorf(ci.ErrUnauthorized, "the token is not valid here"))
			if r.Header.Get("Authorization") == "Bearer "+fakeToken {
				err = h(w, r)
			}
			if err != nil {
				protocol.WriteProblem(w, err, "req_1")
			}
		})
	}
	handle(protocol.RouteListRuns, f.listRuns)
	handle(protocol.RouteGetRun, func(w http.ResponseWriter, r *http.Request) error {
		return f.look(w, func() (any, error) { return f.run(r) })
	})
	handle(protocol.RouteCancelRun, func(w http.ResponseWriter, r *http.Request) error {
		var out protocol.RunSummary
		var err error
		f.change(func() {
			var run *protocol.Run
			if run, err = f.run(r); err != nil {
				return
			}
			if run.State == ci.StateFinished && run.Conclusion != ci.ConclusionCancelled {
				err = ci.Errorf(ci.ErrConflict, "run %s has finished: %s", run.ID, run.Conclusion)
				return
			}
			if run.State != ci.StateCancelling {
				f.set(run.ID, ci.StateFinished, ci.ConclusionCancelled, ci.ReasonUser)
			}
			out = run.RunSummary
		})
		if err != nil {
			return err
		}
		return send(w, http.StatusOK, out)
	})
	handle(protocol.RouteRetryRun, f.retry)
	handle(protocol.RouteRunEvents, f.runEvents)
	handle(protocol.RouteGetJob, func(w http.ResponseWriter, r *http.Request) error {
		return f.look(w, func() (any, error) { return f.job(r) })
	})
	handle(protocol.RouteExplainJob, func(w http.ResponseWriter, r *http.Request) error {
		return f.look(w, func() (any, error) {
			j, err := f.job(r)
			if err != nil {
				return nil, err
			}
			return protocol.Explanation{
				Job: j.JobSummary, Summary: "The runner was lost.\nNo policy allows another attempt.",
				History: []protocol.HistoryEvent{
					{At: time.Date(2025, 1, 2, 12, 0, 1, 0, time.UTC), Actor: "rnr_1", ActorName: "runner-1", Action: "claimed", Epoch: 1, Detail: "\x1b[31mred"},
					{At: time.Date(2025, 1, 2, 12, 0, 2, 0, time.UTC), Actor: "server", Action: "attempt_ended", Epoch: 1, Detail: "aborted (runner_lost): No policy allows another attempt"},
				},
			}, nil
		})
	})
	handle(protocol.RouteJobLog, f.rawLog)
	handle(protocol.RouteJobLogLines, f.logLines)
	handle(protocol.RouteJobLogEvents, f.logEvents)
	handle(protocol.RouteGetArtifact, func(w http.ResponseWriter, r *http.Request) error {
		return f.look(w, func() (any, error) {
			for _, run := range f.runs {
				for _, a := range run.Artifacts {
					if a.ID == r.PathValue("artifact_id") {
						return a, nil
					}
				}
			}
			return nil, ci.Errorf(ci.ErrNotFound, "there is no artifact %s", r.PathValue("artifact_id"))
		})
	})
	handle(protocol.RouteArtifactContent, func(w http.ResponseWriter, r *http.Request) error {
		f.mu.Lock()
		b := f.artifacts[r.PathValue("artifact_id")]
		f.mu.Unlock()
		_, err := w.Write(b)
		return err
	})
	handle(protocol.RouteListRunners, func(w http.ResponseWriter, _ *http.Request) error {
		return f.look(w, func() (any, error) { return protocol.Page[protocol.Runner]{Items: f.runners}, nil })
	})
	for route, status := range map[string]string{protocol.RouteDrainRunner: "draining", protocol.RouteFenceRunner: "fenced"} {
		handle(route, func(w http.ResponseWriter, r *http.Request) error {
			return f.look(w, func() (any, error) {
				for i := range f.runners {
					if string(f.runners[i].ID) == r.PathValue("runner_id") {
						f.runners[i].Status = status
						return f.runners[i], nil
					}
				}
				return nil, ci.Errorf(ci.ErrNotFound, "there is no runner %s", r.PathValue("runner_id"))
			})
		})
	}
	handle(protocol.RouteListDeadLetters, func(w http.ResponseWriter, _ *http.Request) error {
		return f.look(w, func() (any, error) { return protocol.Page[protocol.DeadLetter]{Items: f.letters}, nil })
	})
	handle(protocol.RouteRequeue, func(w http.ResponseWriter, _ *http.Request) error {
		return send(w, http.StatusAccepted, protocol.RunCreated{RunID: "run_success"})
	})
	handle(protocol.RouteEnsureLocalRepo, func(w http.ResponseWriter, r *http.Request) error {
		var in protocol.EnsureLocalRepo
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			return err
		}
		return send(w, http.StatusOK, protocol.Repo{ID: "repo_1", Name: "local/" + in.Name})
	})
	handle(protocol.RouteGetSnapshot, func(w http.ResponseWriter, r *http.Request) error {
		return f.look(w, func() (any, error) {
			if !f.snapshots[r.PathValue("digest")] {
				return nil, ci.Errorf(ci.ErrNotFound, "there is no such source")
			}
			return protocol.Snapshot{Digest: r.PathValue("digest")}, nil
		})
	})
	handle(protocol.RoutePutSnapshot, func(w http.ResponseWriter, r *http.Request) error {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		if int64(len(b)) != r.ContentLength || r.Header.Get("Content-Type") != protocol.MediaSnapshot {
			return ci.Errorf(ci.ErrInvalid, "%d bytes of %d, %s", len(b), r.ContentLength, r.Header.Get("Content-Type"))
		}
		f.change(func() { f.snapshots[r.PathValue("digest")] = true })
		return send(w, http.StatusCreated, protocol.Snapshot{Digest: r.PathValue("digest")})
	})
	handle(protocol.RouteCreateRun, f.create)
	return mux
}

func send(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", protocol.MediaJSON)
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(v)
}

// look answers with what get finds under the lock.
func (f *fake) look(w http.ResponseWriter, get func() (any, error)) error {
	f.mu.Lock()
	v, err := get()
	b, encodeErr := json.Marshal(v)
	f.mu.Unlock()
	if err != nil {
		return err
	}
	if encodeErr != nil {
		return encodeErr
	}
	return send(w, http.StatusOK, json.RawMessage(b))
}

func (f *fake) run(r *http.Request) (*protocol.Run, error) {
	id := r.PathValue("run_id")
	switch id {
	case "run_forbidden":
		return nil, ci.Errorf(ci.ErrForbidden, "your token may not read this run")
	case "run_broken":
		return nil, ci.Errorf(ci.ErrInternal, "boom")
	}
	if run := f.runs[ci.RunID(id)]; run != nil {
		return run, nil
	}
	return nil, ci.Errorf(ci.ErrNotFound, "there is no run %s", id)
}

func (f *fake) job(r *http.Request) (*protocol.Job, error) {
	j := f.jobs[ci.JobID(r.PathValue("job_id"))]
	if j == nil {
		return nil, ci.Errorf(ci.ErrNotFound, "there is no job %s", r.PathValue("job_id"))
	}
	j.Run = f.runs[j.Run.ID].RunSummary
	return j, nil
}

// listRuns gives pages of two, so that every list is put together from pages.
func (f *fake) listRuns(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	return f.look(w, func() (any, error) {
		var all []protocol.RunSummary
		for n := f.number; n > 0; n-- {
			for _, run := range f.runs {
				if run.Number == n && (q.Get("state") == "" || q.Get("state") == string(run.State)) &&
					(q.Get("commit") == "" || q.Get("commit") == run.CommitSHA) {
					all = append(all, run.RunSummary)
				}
			}
		}
		from, err := strconv.Atoi(q.Get("after"))
		if err != nil {
			from = 0
		}
		limit, err := strconv.Atoi(q.Get("limit"))
		if err != nil {
			return nil, err
		}
		page := protocol.Page[protocol.RunSummary]{Items: all[from:min(from+min(2, limit), len(all))]}
		if end := from + len(page.Items); end < len(all) {
			page.Next = strconv.Itoa(end)
		}
		return page, nil
	})
}

func (f *fake) create(w http.ResponseWriter, r *http.Request) error {
	var in protocol.CreateRun
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		return err
	}
	id := ci.RunID("run_new")
	var err error
	f.change(func() {
		if f.refuses != "" && in.WorkflowPath == f.refuses {
			err = ci.Errorf(ci.ErrForbidden, "your token may not run %s", in.WorkflowPath)
			return
		}
		if f.forgets {
			f.forgets, f.snapshots = false, map[string]bool{}
		}
		if !f.snapshots[in.Snapshot] {
			err = ci.Errorf(ci.ErrNotFound, "no source %s: upload the snapshot first", in.Snapshot)
			return
		}
		key := r.Header.Get(protocol.HeaderIdempotencyKey)
		if known := f.created[key]; known != "" {
			id = known
			return
		}
		if n := len(f.created); n > 0 {
			id += ci.RunID("_" + strconv.Itoa(n))
		}
		f.created[key] = id
		b, encodeErr := json.Marshal(in)
		if encodeErr != nil {
			err = encodeErr
			return
		}
		f.requests = append(f.requests, string(b))
		run := f.add(id, ci.StateWaiting, "", "", "build")
		run.Path, run.Message, run.Dirty, run.CommitSHA = in.WorkflowPath, in.Message, in.Dirty, in.CommitSHA
	})
	if err != nil {
		return err
	}
	return send(w, http.StatusAccepted, protocol.RunCreated{RunID: id, URL: "http://" + f.addr + "/runs/" + string(id)})
}

func (f *fake) retry(w http.ResponseWriter, r *http.Request) error {
	var in protocol.RetryRun
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		return err
	}
	if r.Header.Get(protocol.HeaderIdempotencyKey) == "" {
		return ci.Errorf(ci.ErrInvalid, "no idempotency key")
	}
	var err error
	f.change(func() {
		var old *protocol.Run
		if old, err = f.run(r); err == nil && old.State != ci.StateFinished {
			err = ci.Errorf(ci.ErrConflict, "run %s has not finished", old.ID)
		}
		if err == nil {
			f.requests = append(f.requests, fmt.Sprintf("failed=%t", in.Failed))
			f.add("run_again", ci.StateFinished, ci.ConclusionSuccess, "", "build").ParentRun = old.ID
		}
	})
	if err != nil {
		return err
	}
	return send(w, http.StatusAccepted, protocol.RunCreated{RunID: "run_again"})
}

func event(w io.Writer, id, name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "id: %s\nevent: %s\ndata: %s\n\n", id, name, b)
	return err
}

func (f *fake) runEvents(w http.ResponseWriter, r *http.Request) error {
	flush := http.NewResponseController(w).Flush
	for n := 0; ; n++ {
		f.mu.Lock()
		run, err := f.run(r)
		var summary protocol.RunSummary
		if err == nil {
			summary = run.RunSummary
		}
		changed := f.changed
		f.mu.Unlock()
		if err != nil {
			return err
		}
		w.Header().Set("Content-Type", protocol.MediaEvents)
		if err := event(w, strconv.Itoa(n), protocol.EventRun, summary); err != nil {
			return nil //nolint:nilerr // the reader has gone
		}
		if err := flush(); err != nil || summary.State == ci.StateFinished {
			return nil //nolint:nilerr // the reader has gone
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return nil
		}
	}
}

// selected returns the events of a log that a request asks for.
func (f *fake) selected(r *http.Request) ([]protocol.LogEvent, error) {
	job, err := f.job(r)
	if err != nil {
		return nil, err
	}
	if f.expired[job.ID] {
		return nil, ci.Errorf(ci.ErrGone, "the log of job %s has expired", job.ID)
	}
	var out []protocol.LogEvent
	for _, e := range f.logs[job.ID] {
		if step := r.URL.Query().Get("step"); step != "" && step != strconv.Itoa(e.Step) {
			continue
		}
		out = append(out, e)
	}
	return out, nil
}

func (f *fake) rawLog(w http.ResponseWriter, r *http.Request) error {
	f.mu.Lock()
	events, err := f.selected(r)
	sealed := f.sealed[ci.JobID(r.PathValue("job_id"))]
	f.mu.Unlock()
	if err != nil {
		return err
	}
	var b []byte
	for _, e := range events {
		b = append(b, e.Data...)
	}
	lines := bytes.SplitAfter(b, []byte("\n"))
	total := len(lines) - 1
	h := w.Header()
	if tail, err := strconv.Atoi(r.URL.Query().Get("tail")); err == nil && tail < total {
		lines = lines[total-tail:]
		h.Set(protocol.HeaderLogTruncated, "true")
	}
	h.Set(protocol.HeaderLogTotal, strconv.Itoa(total))
	h.Set(protocol.HeaderLogLines, strconv.Itoa(len(lines)-1))
	h.Set(protocol.HeaderLogSealed, strconv.FormatBool(sealed))
	_, err = w.Write(bytes.Join(lines, nil))
	return err
}

func (f *fake) logLines(w http.ResponseWriter, r *http.Request) error {
	return f.look(w, func() (any, error) {
		events, err := f.selected(r)
		if err != nil {
			return nil, err
		}
		limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
		if err != nil {
			limit = len(events)
		}
		out := protocol.LogSlice{Epoch: 1, First: 1, Total: int64(len(events)), Sealed: true}
		for i, e := range events[:min(limit, len(events))] {
			out.Lines = append(out.Lines, protocol.LogLine{Number: int64(i + 1), Step: e.Step, Stream: e.Stream, Text: strings.TrimSuffix(string(e.Data), "\n")})
		}
		if len(out.Lines) < len(events) {
			out.Truncated, out.Next = true, int64(len(out.Lines)+1)
		}
		return out, nil
	})
}

func (f *fake) logEvents(w http.ResponseWriter, r *http.Request) error {
	at, err := strconv.Atoi(r.Header.Get("Last-Event-ID"))
	if err != nil {
		at = 0
	}
	flush := http.NewResponseController(w).Flush
	for {
		f.mu.Lock()
		events, err := f.selected(r)
		sealed, changed := f.sealed[ci.JobID(r.PathValue("job_id"))], f.changed
		f.mu.Unlock()
		if err != nil {
			return err
		}
		w.Header().Set("Content-Type", protocol.MediaEvents)
		for ; at < len(events); at++ {
			if err := event(w, strconv.Itoa(at+1), protocol.EventLog, events[at]); err != nil {
				return nil //nolint:nilerr // the reader has gone
			}
		}
		if sealed {
			if err := event(w, "end", protocol.EventSealed, protocol.LogSealedEvent{Epoch: 1}); err != nil {
				return nil //nolint:nilerr // the reader has gone
			}
		}
		if err := flush(); err != nil || sealed {
			return nil //nolint:nilerr // the reader has gone
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return nil
		}
	}
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}
