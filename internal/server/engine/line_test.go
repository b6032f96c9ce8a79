package engine_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

// pair is two nodes on one database, without sweeps: only a hint wakes a poll.
type pair struct {
	*world
	url     string
	other   *engine.Engine
	commits atomic.Int64 // of the other node
}

func newPair(t *testing.T) *pair {
	t.Helper()
	url := testkit.Postgres(t)
	p := &pair{world: newWorld(t, url), url: url}
	s, err := store.Open(p.ctx, store.Options{URL: url, Now: p.now.Load, Log: slog.New(slog.DiscardHandler), MaxConns: 4, Fault: func(at store.Point) error {
		if at == store.PointCommit {
			p.commits.Add(1)
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	own := p.store
	p.store = s
	p.other = p.engine(slog.New(slog.DiscardHandler))
	p.store = own
	return p
}

// line opens a node's line until the test ends.
func (p *pair) line(nodes ...*engine.Engine) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(p.ctx))
	var open sync.WaitGroup
	for _, e := range nodes {
		open.Go(func() { e.RunLine(ctx) })
	}
	p.t.Cleanup(func() { cancel(); open.Wait() })
}

func (p *pair) acquainted() {
	p.t.Helper()
	p.line(p.e, p.other)
	p.eventually(func() bool { return p.e.OtherNodes() && p.other.OtherNodes() })
}

// poll waits at the other node for a job; got answers what it was given.
func (p *pair) poll(a *agent, n int) (got func() *protocol.Ticket) {
	p.t.Helper()
	answers := make(chan *protocol.Ticket, 1)
	before := p.other.Polls()
	go func() {
		t, err := p.other.Claim(p.ctx, a.who, protocol.Claim{Session: a.session, RequestID: fmt.Sprint("poll ", n), Wait: ci.Duration(engine.MaxPoll)})
		if err != nil && p.ctx.Err() == nil {
			p.t.Errorf("poll %d: %v", n, err)
		}
		answers <- t
	}()
	p.eventually(func() bool { return p.other.Polls() > before })
	return func() *protocol.Ticket { return <-answers }
}

// A job that one node made claimable is given to a poll at another, though no
// sweep looks; of a shape that the other node has never seen, too.
func TestAPollHearsOfJobsOfAnotherNode(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	a := p.agentWith("a", 4, "gpu")
	p.acquainted()
	for n, labels := range [][]string{nil, {"gpu"}, nil} {
		got := p.poll(a, n)
		spec := job("j")
		spec.RunsOn.Labels = labels
		p.submit(spec)
		if got() == nil {
			t.Errorf("poll %d heard of nothing", n)
		}
	}
	p.check()
}

// A claim holds the best jobs of each shape until its commit, and takes one of them.
// Another node passes over the others, and hears of them then.
func TestAPollHearsOfWhatAClaimOfAnotherNodeHeld(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	a, b := p.agentWith("a", 1, "gpu"), p.agentWith("b", 1, "gpu")
	holder := p.halted(p.url)
	gpu := job("gpu")
	gpu.RunsOn.Labels = []string{"gpu"}
	p.submit(gpu, job("plain")) // before anybody listens
	p.line(holder.e, p.other)
	p.eventually(func() bool { return holder.e.OtherNodes() && p.other.OtherNodes() })
	holder.armed.Store(true)
	var claimed sync.WaitGroup
	claimed.Go(func() {
		if got, err := holder.e.Claim(p.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "c"}); err != nil || got == nil {
			t.Errorf("claim: %v, %v", got, err)
		}
	})
	<-holder.there
	looked := p.commits.Load()
	got := p.poll(b, 1)
	p.eventually(func() bool { return p.commits.Load() > looked }) // it has found nothing
	close(holder.on)
	claimed.Wait()
	if got() == nil {
		t.Error("the job waits although a runner is idle")
	}
	p.check()
}

// A session that one node opened is known to another before its next sweep: a job
// submitted there is claimable at once.
func TestASessionOfAnotherNodeIsKnownAtOnce(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.acquainted()
	a := p.agentWith("a", 1, "gpu")
	p.eventually(func() bool {
		spec := job("j")
		spec.RunsOn.Labels = []string{"gpu"}
		_, err := p.other.Submit(p.ctx, engine.Submission{
			Org: p.org, Repo: p.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted,
			Event: "manual", Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{spec}},
		})
		return err == nil && a.claim() != nil
	})
}

// A cancel at one node reaches the session that waits for it at another, and
// whoever watches the run there.
func TestACancelIsHeardAtAnotherNode(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	a := p.agent("a", 1)
	id := p.submit(job("j"))
	a.mustClaim()
	p.acquainted()
	changes, stop := p.other.WatchRuns(p.org, id)
	defer stop()
	heard := make(chan bool, 1)
	go func() {
		renew, err := p.other.Watch(p.ctx, a.who, protocol.Watch{Session: a.session, Wait: ci.Duration(engine.MaxPoll)})
		if err != nil {
			t.Error(err)
		}
		heard <- renew
	}()
	if err := p.e.Cancel(p.ctx, p.org, "tester", id); err != nil {
		t.Fatal(err)
	}
	if !<-heard {
		t.Error("the session was not told to renew")
	}
	if got := <-changes; got != id {
		t.Errorf("the watcher heard of %q", got)
	}
}

// While the lines are cut a hint may be lost. A line that is open again wakes for
// whatever is there, and hints arrive as before.
func TestALineThatWasCutIsOpenedAgain(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	a := p.agent("a", 8)
	p.acquainted()
	for n := range 4 {
		got := p.poll(a, n)
		if n%2 == 0 {
			p.cut()
		}
		p.submit(job("j"))
		if got() == nil {
			t.Errorf("poll %d heard of nothing", n)
		}
	}
	p.check()
}

// cut ends the connections of all lines.
func (p *pair) cut() {
	p.t.Helper()
	conn, err := pgx.Connect(p.ctx, p.url)
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close(p.ctx)
	var ended int
	err = conn.QueryRow(p.ctx, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND (query LIKE 'LISTEN%' OR query LIKE '%pg_notify%')`).Scan(&ended)
	if err != nil || ended < 2 {
		p.t.Fatalf("%d lines were cut: %v", ended, err)
	}
}

// A node that knows of no other says nothing but that it is there; one that does
// tells of jobs only when it has too few polls of its own for them.
func TestANodeThatIsAloneTellsNothing(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	tap, err := p.store.OpenLine(p.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close(p.ctx)
	// said returns what was told until a message of the test's own comes back.
	said := func() (all []string) {
		t.Helper()
		if err := tap.Tell(p.ctx, "the test"); err != nil {
			t.Fatal(err)
		}
		for {
			message, ok, err := tap.Wait(p.ctx)
			switch {
			case err != nil || !ok:
				t.Fatalf("%v %v", ok, err)
			case message == "the test":
				return all
			}
			all = append(all, message)
		}
	}
	p.line(p.e)
	p.eventually(func() bool { return len(said()) > 0 }) // it is there
	a := p.agent("a", 4)
	p.submit(job("one"))
	a.mustClaim()
	for _, message := range said() {
		if !strings.HasPrefix(message, `{"n":"node_`) || strings.ContainsAny(message, ",") {
			t.Errorf("alone, it says %s", message)
		}
	}
	p.line(p.other)
	p.eventually(func() bool { return p.e.OtherNodes() && p.other.OtherNodes() })
	said()

	p.submit(job("two"))
	var told []string
	p.eventually(func() bool {
		told = append(told, said()...)
		return strings.Contains(strings.Join(told, "\n"), `"r":[`)
	})
	if all := strings.Join(told, "\n"); !strings.Contains(all, `"j":[`) {
		t.Errorf("a job that nobody waits for here is not told: %s", all)
	}
	a.mustClaim()
	p.eventually(func() bool { return len(said()) == 0 })

	answers := make(chan *protocol.Ticket, 1)
	go func() {
		got, err := p.e.Claim(p.ctx, a.who, protocol.Claim{Session: a.session, RequestID: "waits", Wait: ci.Duration(engine.MaxPoll)})
		if err != nil {
			t.Error(err)
		}
		answers <- got
	}()
	p.eventually(func() bool { return p.e.Polls() == 1 })
	p.submit(job("three"))
	if <-answers == nil {
		t.Fatal("the poll heard of nothing")
	}
	told = nil
	p.eventually(func() bool {
		told = append(told, said()...)
		return strings.Contains(strings.Join(told, "\n"), `"r":[`)
	})
	if all := strings.Join(told, "\n"); strings.Contains(all, `"j":[`) {
		t.Errorf("a job that a poll waits for here is told: %s", all)
	}
}

// More hints than a message takes are told in several.
func TestManyHintsAreToldInMessagesThatFit(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	go p.e.Run(p.ctx) // merges
	p.line(p.other)
	p.eventually(func() bool { return p.e.OtherNodes() && p.other.OtherNodes() })
	tap, err := p.store.OpenLine(p.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close(p.ctx)
	const most = 300
	var made sync.WaitGroup
	for range most {
		made.Go(func() {
			_, err := p.e.Submit(p.ctx, engine.Submission{
				Org: p.org, Repo: p.repo, Actor: "tester", Source: digest, Trust: ci.TrustTrusted,
				Event: "manual", Plan: ci.Plan{Workflow: "w", Jobs: []ci.JobSpec{job("j")}},
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	made.Wait()
	told := map[string]bool{}
	ctx, cancel := context.WithTimeout(p.ctx, 30*time.Second)
	defer cancel()
	for len(told) < most {
		message, ok, err := tap.Wait(ctx)
		if err != nil || !ok {
			t.Fatalf("%d of %d runs were told: %v", len(told), most, err)
		}
		if len(message) > store.MaxTold {
			t.Fatalf("a message of %d bytes", len(message))
		}
		var h struct {
			Runs []struct {
				Run string `json:"r"`
			} `json:"r"`
		}
		if err := json.Unmarshal([]byte(message), &h); err != nil {
			t.Fatal(err)
		}
		for _, r := range h.Runs {
			told[r.Run] = true
		}
	}
}
