package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// books are what an installation's database says in the end.
type books struct {
	// rejections counts refused lease calls by route and reason.
	rejections map[string]int64
	rows       []string // rows of all tables as text, "table: column=value …"
}

// count returns how many rows of a table hold all of the words.
func (b books) count(table string, words ...string) int {
	n := 0
	for _, row := range b.rows {
		if !strings.HasPrefix(row, table+":") {
			continue
		}
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(row+" ", " "+word+" ") }) {
			n++
		}
	}
	return n
}

// close ends the installation in an orderly way and audits it: no process and no
// file of any job is left, no slot is taken, runners and server end well, and the
// books balance. It is the last thing that a test does.
func (w *world) close() books {
	w.t.Helper()
	if left := testkit.ProcessesWith(w.t, w.mark); len(left) > 0 {
		w.t.Errorf("%d processes of jobs are left: %v", len(left), left)
	}
	var taken []string
	w.until(patience, "all slots to be free", func() bool {
		page, err := w.people.Runners(w.t.Context(), "")
		taken = taken[:0]
		for _, r := range page.Items {
			for _, held := range r.Running {
				taken = append(taken, fmt.Sprintf("%s: %s, attempt %d, quarantined: %v", r.Name, held.Name, held.Epoch, held.Quarantined))
			}
		}
		return err == nil && len(taken) == 0
	})
	for _, m := range w.machines {
		if m.running() {
			m.signal(syscall.SIGTERM)
		}
	}
	for _, m := range w.machines {
		if m.running() {
			if code := m.proc.Wait(w.t, patience); code != 0 {
				w.t.Errorf("the runner of %s ended with %d after SIGTERM", m.name, code)
			}
			for _, dir := range []string{"work/jobs/*", "sandboxes/*", "*.spool*", "fetch-*", "artifact-*"} {
				if left, err := filepath.Glob(filepath.Join(m.data, dir)); err != nil || len(left) > 0 {
					w.t.Errorf("left on machine %s: %v, %v", m.name, left, err)
				}
			}
		}
	}
	servers := []*testkit.Process{w.server}
	if w.other != nil {
		servers = append(servers, w.other.proc)
	}
	for _, p := range servers {
		p.Signal(w.t, syscall.SIGTERM)
	}
	for _, p := range servers {
		if code := p.Wait(w.t, patience); code != 0 {
			w.t.Errorf("a server ended with %d after SIGTERM", code)
		}
	}
	if left := testkit.ProcessesWith(w.t, w.house); len(left) > 0 {
		w.t.Errorf("%d processes of the installation are left: %v", len(left), left)
	}
	if w.ended != nil {
		w.ended()
	}
	return w.audit()
}

// audit reads the database of an installation that has ended.
func (w *world) audit() books {
	w.t.Helper()
	url := w.config.database
	if url == "" {
		url = "sqlite:" + filepath.Join(w.data, "forgeci.db")
	}
	ctx := w.t.Context()
	s, err := store.Open(ctx, store.Options{URL: url, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.t.Fatal(err)
	}
	defer s.Close()
	findings, err := s.Inconsistencies(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range findings {
		w.t.Errorf("inconsistent: %s", f)
	}
	b := books{rejections: map[string]int64{}}
	var orgs []ci.OrgID
	err = s.Read(ctx, func(tx *store.Tx) error {
		refused, err := tx.Rejections(ctx)
		if err != nil {
			return err
		}
		for _, r := range refused {
			b.rejections[r.Route+" "+string(r.Reason)] += r.N
		}
		orgs, err = tx.OrgIDs(ctx)
		return err
	})
	if err != nil || len(orgs) == 0 {
		w.t.Fatalf("rejections and organisations (%d): %v", len(orgs), err)
	}
	trail := &engine.Engine{Config: engine.Config{Store: s}}
	for _, org := range orgs {
		if bad, err := trail.VerifyAudit(ctx, org); err != nil || bad != 0 {
			w.t.Errorf("the audit trail of %s does not fit from entry %d on (%v)", org, bad, err)
		}
	}
	if b.rows, err = s.Dump(ctx); err != nil {
		w.t.Fatal(err)
	}
	for _, table := range []string{"lease", "occupancy", "queue"} {
		if n := b.count(table); n != 0 {
			w.t.Errorf("%d rows are left in %s", n, table)
		}
	}
	if n := b.count("artifact", "state=open"); n > w.abandoned {
		w.t.Errorf("%d uploads are open, %d were cut off", n, w.abandoned)
	}
	counted := int64(0)
	for _, n := range b.rejections {
		counted += n
	}
	if told := b.count("audit", "action=rejected"); int64(told) != counted {
		w.t.Errorf("%d refused calls are counted, %d are in the audit trail", counted, told)
	}
	return b
}

// dump returns every row of the installation's database but those of the named
// tables.
func (w *world) dump(without ...string) []string {
	w.t.Helper()
	url := w.config.database
	if url == "" {
		url = "sqlite:" + filepath.Join(w.data, "forgeci.db")
	}
	s, err := store.Open(w.t.Context(), store.Options{URL: url, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.t.Fatal(err)
	}
	defer s.Close()
	rows, err := s.Dump(w.t.Context(), without...)
	if err != nil {
		w.t.Fatal(err)
	}
	return rows
}

// attempts demands what became of each attempt of a job, in order: its
// conclusion and reason, with a star for the winner: "aborted runner_lost",
// "success *". The last attempt's number is the job's epoch.
func (w *world) attempts(job protocol.Job, want ...string) {
	w.t.Helper()
	var got []string
	for i, a := range job.Attempt {
		text := string(a.Conclusion)
		if a.Reason != "" {
			text += " " + string(a.Reason)
		}
		if a.Winner {
			text += " *"
		}
		got = append(got, text)
		if a.Epoch != int64(i+1) || a.State != ci.StateFinished {
			w.t.Errorf("attempt %d of %s has epoch %d and is %s", i+1, job.Name, a.Epoch, a.State)
		}
	}
	if !slices.Equal(got, want) {
		w.t.Errorf("attempts of %s: %q, want %q", job.Name, got, want)
	}
	if job.Attempts != int64(len(want)) {
		w.t.Errorf("epoch of %s is %d, want %d", job.Name, job.Attempts, len(want))
	}
}

// outcome demands the result of a run and of its jobs: "success", "aborted
// runner_lost", by name.
func (w *world) outcome(run protocol.Run, want string, jobs map[string]string) {
	w.t.Helper()
	text := func(c ci.Conclusion, r ci.Reason) string { return strings.TrimSpace(string(c) + " " + string(r)) }
	if got := text(run.Conclusion, run.Reason); got != want {
		w.t.Errorf("run ended with %q, want %q", got, want)
	}
	if len(run.JobList) != len(jobs) {
		w.t.Errorf("run has %d jobs, want %d", len(run.JobList), len(jobs))
	}
	for _, j := range run.JobList {
		if got := text(j.Conclusion, j.Reason); got != jobs[j.Name] {
			w.t.Errorf("job %s ended with %q, want %q (%s)", j.Name, got, jobs[j.Name], j.Detail)
		}
	}
}

// shCount prints numbered lines that carry the number of the attempt, at least
// one, until the sign "go", then how many there were.
const shCount = `i=0; while :; do i=$((i+1)); echo "$CI_ATTEMPT $i"; [ ! -e "$SIGNS/go" ] || break; sleep 0.05; done; echo "end $i"`

// counted demands that a log is exactly what shCount of that attempt wrote: no
// line lost, doubled or of another attempt. It returns how many there were.
func (w *world) counted(log string, attempt int) int {
	w.t.Helper()
	var want strings.Builder
	n := strings.Count(log, "\n") - 1
	for i := range n {
		fmt.Fprintf(&want, "%d %d\n", attempt, i+1)
	}
	fmt.Fprintf(&want, "end %d\n", n)
	if log != want.String() {
		w.t.Errorf("the log of attempt %d is not what it wrote (%d lines):\n%s", attempt, n+1, log)
	}
	return n
}

// begun demands that the log of an attempt that was cut off is a beginning of
// what shCount wrote.
func (w *world) begun(log string, attempt int) {
	w.t.Helper()
	var want strings.Builder
	for i := 1; want.Len() < len(log); i++ {
		fmt.Fprintf(&want, "%d %d\n", attempt, i)
	}
	if !strings.HasPrefix(want.String(), log) {
		w.t.Errorf("the log of attempt %d is not a beginning of what it wrote:\n%s", attempt, log)
	}
}

// unchanged demands that the log of a fenced attempt is what it was when another
// had taken over: nothing that came late was taken.
func (w *world) unchanged(job ci.JobID, attempt int64, before string) {
	w.t.Helper()
	if got := w.log(job, attempt, "stdout"); got != before {
		w.t.Errorf("the log of attempt %d has grown from %d to %d bytes after its lease was over", attempt, len(before), len(got))
	}
}

// refusals makes every lease call as the impostor and demands that each is
// refused because the lease is not current. It returns how many it made.
func (p impostor) refusals() int {
	p.w.t.Helper()
	ctx, cancel := context.WithTimeout(p.w.t.Context(), patience)
	defer cancel()
	digest := "sha256:" + strings.Repeat("0", 64)
	evidence := protocol.Evidence{Terminated: true, How: "scan"}
	calls := map[string]func() error{
		"source": func() error {
			body, err := p.client.FetchSource(ctx, p.lease)
			if err == nil {
				body.Close()
			}
			return err
		},
		"log": func() error {
			_, err := p.client.AppendLog(ctx, p.lease, protocol.AppendChunk(nil, protocol.Chunk{
				Stream: protocol.Stdout, Sequence: 1, Data: []byte("stale\n"),
			}))
			return err
		},
		"phase": func() error {
			return p.client.SetPhase(ctx, p.lease, protocol.SetPhase{RequestID: "stale-phase", Phase: ci.PhaseFinalising})
		},
		"artifact": func() error {
			_, err := p.client.NewArtifact(ctx, p.lease, protocol.NewArtifact{
				RequestID: "stale-artifact", Name: "app", Size: 5, Digest: digest, Files: 1, Bytes: 5,
			})
			return err
		},
		"complete": func() error {
			_, err := p.client.Complete(ctx, p.lease, protocol.Complete{
				RequestID: "stale-complete", Conclusion: ci.ConclusionSuccess, Evidence: evidence, SourceDigest: digest,
			})
			return err
		},
		"hand-over": func() error {
			return p.client.HandOver(ctx, p.lease, protocol.HandOver{
				RequestID: "stale-hand-over", Reason: ci.ReasonRunnerShutdown, Evidence: evidence,
			})
		},
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, ci.ErrLeaseLost) && !errors.Is(err, ci.ErrRunEnded) {
			p.w.t.Errorf("%s under a stale lease: %v, want it refused because of the lease", name, err)
		}
	}
	reply, err := p.client.Heartbeat(ctx, protocol.Heartbeat{Session: p.lease.Session, Leases: []ci.LeaseRef{p.lease}})
	if err == nil && reply.Leases[0].Answer != protocol.LeaseGone || err != nil && !errors.Is(err, ci.ErrLeaseLost) {
		p.w.t.Errorf("heartbeat for a stale lease: %+v, %v, want lost", reply, err)
	}
	return len(calls)
}

// total returns how many calls were refused, heartbeats left out: one may cross
// its own runner's completion on the way.
func (b books) total() int {
	n := int64(0)
	for call, c := range b.rejections {
		if !strings.HasPrefix(call, "heartbeat ") {
			n += c
		}
	}
	return int(n)
}

// gone demands that a process of the installation's jobs that is there now ends
// within the limit.
func (w *world) gone(limit time.Duration) {
	w.t.Helper()
	w.until(limit, "the job's processes to end", func() bool { return len(testkit.ProcessesWith(w.t, w.mark)) == 0 })
}
