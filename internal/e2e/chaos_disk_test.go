package e2e_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
	"forgeci/internal/testkit/powerfs"
)

// acks are what a server has told its runners, each with the moment by which it
// had said so.
type acks struct {
	mu  sync.Mutex
	all []ack // guarded by mu
}

type ack struct {
	at    int
	route string
	lease ci.LeaseRef
	body  []byte
}

// acknowledged puts a gateway between runners and the server that keeps every
// answer to a call under a lease.
func (w *world) acknowledged(now func() int) (url string, said *acks) {
	said = &acks{}
	url = testkit.NewGateway(w.t, w.addr, func(rw http.ResponseWriter, r *http.Request, forward http.Handler) {
		lease, err := ci.ParseLeaseRef(r.Header.Get(protocol.HeaderLease))
		if err != nil {
			forward.ServeHTTP(rw, r)
			return
		}
		answer := testkit.Ask(r, forward)
		at := now()
		if answer.Status/100 == 2 {
			said.mu.Lock()
			said.all = append(said.all, ack{at, r.Method + " " + r.URL.Path, lease, answer.Body})
			said.mu.Unlock()
		}
		answer.Pass(rw)
	})
	return url, said
}

// output names what one step of an attempt wrote to a stream.
type output struct {
	job    ci.JobID
	epoch  int64
	step   int
	stream string
}

// promised is what had been acknowledged by a moment.
type promised struct {
	length    map[output]int64
	completed map[ci.JobID]bool
	phases    map[ci.JobID]bool
	sealed    map[string]bool
}

func (a *acks) by(moment int) promised {
	p := promised{map[output]int64{}, map[ci.JobID]bool{}, map[ci.JobID]bool{}, map[string]bool{}}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, it := range a.all {
		if it.at > moment {
			continue
		}
		switch {
		case it.route == protocol.RouteAppendLog:
			var reply protocol.LogReply
			if json.Unmarshal(it.body, &reply) != nil {
				continue
			}
			for _, s := range reply.Streams {
				if s.Stream != protocol.Stdout && s.Stream != protocol.Stderr {
					continue // what the runner itself says
				}
				k := output{it.lease.Job, it.lease.Epoch, s.Step, map[protocol.Stream]string{protocol.Stdout: "stdout", protocol.Stderr: "stderr"}[s.Stream]}
				p.length[k] = max(p.length[k], s.Length)
			}
		case it.route == protocol.RoutePhase:
			p.phases[it.lease.Job] = true
		case it.route == protocol.RouteComplete:
			p.completed[it.lease.Job] = true
		case strings.HasSuffix(it.route, "/seal"):
			p.sealed[strings.Split(it.route, "/")[4]] = true
		}
	}
	return p
}

// count returns how many promises there are.
func (p promised) count() int {
	return len(p.length) + len(p.completed) + len(p.phases) + len(p.sealed)
}

// read returns an output as people can read it.
func (o output) read(ctx context.Context, c *protocol.Client) ([]byte, error) {
	l, err := c.JobLog(ctx, o.job, protocol.LogQuery{Attempt: o.epoch, Step: &o.step, Stream: o.stream})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return io.ReadAll(l)
}

// kept demands that a server holds everything that was promised.
func (p promised) kept(ctx context.Context, c *protocol.Client, whole map[output][]byte) error {
	var broken []error
	for o, n := range p.length {
		got, err := o.read(ctx, c)
		if err != nil || int64(len(got)) < n || !bytes.HasPrefix(whole[o], got) {
			broken = append(broken, fmt.Errorf("output %+v: %d bytes, %d acknowledged, a beginning of what was written: %v, %v",
				o, len(got), n, bytes.HasPrefix(whole[o], got), err)) //nolint:errorlint // there may be none
		}
	}
	for id := range p.phases {
		if job, err := c.Job(ctx, id); err != nil || len(job.Attempt) == 0 {
			broken = append(broken, fmt.Errorf("job %s has no attempt: %w", id, err))
		}
	}
	for id := range p.completed {
		if job, err := c.Job(ctx, id); err != nil || job.Conclusion != ci.ConclusionSuccess || !job.Attempt[0].Winner {
			broken = append(broken, fmt.Errorf("job %s is %s %s: %w", id, job.State, job.Conclusion, err))
		}
	}
	for id := range p.sealed {
		if err := intact(ctx, c, id); err != nil {
			broken = append(broken, fmt.Errorf("artifact %s: %w", id, err))
		}
	}
	return errors.Join(broken...)
}

// intact demands that an artifact's bytes are those that it was sealed with.
func intact(ctx context.Context, c *protocol.Client, id string) error {
	a, err := c.Artifact(ctx, id)
	if err != nil {
		return err
	}
	body, err := c.ArtifactContent(ctx, id)
	if err != nil {
		return err
	}
	defer body.Close()
	h := sha256.New()
	n, err := io.Copy(h, body)
	if got := fmt.Sprintf("sha256:%x", h.Sum(nil)); err != nil || n != a.Size || got != a.Digest {
		return fmt.Errorf("%d bytes of %d, %s instead of %s: %w", n, a.Size, got, a.Digest, err)
	}
	return nil
}

// The power fails at any moment of two runs, with SQLite and blobs in files. What
// is on the disk then opens, is whole, and holds everything that was
// acknowledged: results, artifacts, every byte of logs.
func TestChaos_R12_PowerFails(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R12")
	disk := powerfs.Mount(t)
	w := newWorld(t, config{ttl: calm, data: filepath.Join(disk.Dir(), "server")})
	w.ended = func() {
		w.data = filepath.Join(t.TempDir(), "copy")
		if err := disk.Copy(w.data); err != nil {
			t.Fatal(err)
		}
		w.data = filepath.Join(w.data, "server")
	}
	url, said := w.acknowledged(disk.Now)
	for _, name := range []string{"a", "b"} {
		m := w.machine(name)
		m.server = url
		m.start()
	}
	first := disk.Now()
	long := w.submit(counting(""), nil)
	w.came("build", 1)
	text := rand.Text() + "\n"
	short := w.submit(chain, map[string]string{"text": text})
	submitted := disk.Now()
	w.chained(short, text)
	w.sign("go")
	w.outcome(w.finished(long), "success", map[string]string{"build": "success"})
	last := disk.Now()

	whole := map[output][]byte{}
	for o := range said.by(last).length {
		b, err := o.read(t.Context(), w.people)
		if err != nil {
			t.Fatal(err)
		}
		whole[o] = b
	}
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}

	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 12))
	syncs := slices.DeleteFunc(disk.Syncs(), func(at int) bool { return at < first || at > last })
	sum.most("syncs of the runs", len(syncs))
	for i := range setting[int]("cuts") {
		at := first + random.IntN(last-first+1)
		if i%2 == 1 {
			at = syncs[random.IntN(len(syncs))]
		}
		to := t.TempDir()
		if err := disk.Cut(at, setting[uint64]("seed")+uint64(i), to); err != nil {
			t.Fatal(err)
		}
		p := said.by(at)
		revived(t, filepath.Join(to, "server"), func(c *protocol.Client) {
			if err := p.kept(t.Context(), c, whole); err != nil {
				t.Errorf("cut at %d: %v", at, err)
			}
			if at >= submitted {
				if _, err := c.Run(t.Context(), short); err != nil {
					t.Errorf("cut at %d: the run: %v", at, err)
				}
			}
		})
		sum.add("cuts", 1)
		sum.add("promises", p.count())
		if err := os.RemoveAll(to); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// revived starts a server on a data directory, looks, kills it, and demands that
// the database is whole.
func revived(t *testing.T, data string, look func(*protocol.Client)) {
	t.Helper()
	addr := testkit.FreeAddr(t)
	server := testkit.Start(t, testkit.Command{Args: []string{"server", "--data", data, "--listen", addr, "--lease-ttl", calm.String()}})
	server.WaitReady(t, "http://"+addr+"/readyz")
	token, err := os.ReadFile(filepath.Join(data, "admin.token"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := protocol.NewClient(protocol.ClientConfig{BaseURL: "http://" + addr, Token: strings.TrimSpace(string(token))})
	if err != nil {
		t.Fatal(err)
	}
	look(c)
	c.CloseIdle()
	server.Signal(t, syscall.SIGKILL)
	server.Wait(t, patience)
	if said := testkit.SQLiteIntegrity(t, filepath.Join(data, "forgeci.db")); said != "ok" {
		t.Errorf("integrity_check: %s", said)
	}
}

// While the disk of the server refuses to sync, or is full, nothing is
// acknowledged; when it is well again all goes on, and nothing is missing.
func TestChaos_R13_DiskOfTheServer(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R13")
	t.Run("sync fails", func(t *testing.T) {
		t.Parallel()
		disk := powerfs.Mount(t)
		w := newWorld(t, config{ttl: calm, data: filepath.Join(disk.Dir(), "server")})
		w.ended = func() {
			w.data = filepath.Join(t.TempDir(), "copy")
			if err := disk.Copy(w.data); err != nil {
				t.Fatal(err)
			}
			w.data = filepath.Join(w.data, "server")
		}
		n := sick(t, w, false, func() { disk.FailSyncs(true) }, func() { disk.FailSyncs(false) })
		if disk.Failed() == 0 {
			t.Error("no sync failed")
		}
		sum.add("syncs failed", disk.Failed())
		sum.add("calls refused meanwhile", n)
	})
	t.Run("disk full", func(t *testing.T) {
		t.Parallel()
		disk := testkit.NewDisk(t, 64<<20)
		w := newWorld(t, config{ttl: calm, data: filepath.Join(disk.Dir, "server")})
		sum.add("calls refused meanwhile", sick(t, w, true, func() { disk.Fill(t, 0) }, func() { disk.Clear(t) }))
	})
	t.Run("disk of the runner full", func(t *testing.T) {
		t.Parallel()
		disk := testkit.NewDisk(t, 300<<20)
		w := newWorld(t, config{ttl: calm})
		m := w.machine("m")
		m.data = filepath.Join(disk.Dir, "runner")
		disk.Fill(t, 100<<20)
		m.start()
		id := w.submit("\n  - name: build\n    steps: ['true']\n", nil)
		w.until(patience, "the runner to say that its disk is full", func() bool { return has(m.proc.Stderr(), "disk nearly full: no job is taken") })
		pass(time.Second)
		if j := w.job(id, "build"); j.State != ci.StateReady || j.Attempts != 0 {
			t.Errorf("a job was given to a runner with a full disk: %s, %d attempts", j.State, j.Attempts)
		}
		disk.Clear(t)
		w.outcome(w.finished(id), "success", map[string]string{"build": "success"})
		w.close()
		sum.add("runners with a full disk", 1)
	})
}

// sickness counts what a server answers while its disk is sick.
type sickness struct {
	fallen chan struct{} // closed when the disk is sick

	mu      sync.Mutex
	ill     bool           // guarded by mu
	refused map[string]int // by route; guarded by mu
	granted map[string]int // by route; guarded by mu
}

// now says whether the disk is sick.
func (s *sickness) now() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ill
}

// set makes it so, once.
func (s *sickness) set(ill bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ill = ill; ill {
		close(s.fallen)
	}
}

// said returns how many calls of a route were answered while the disk was sick.
func (s *sickness) said(route string) (refused, granted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused[route], s.granted[route]
}

// before puts a gateway between a machine and the server. Calls of the route hold,
// if there is one, wait there until the disk is sick; held is closed when the first
// has come.
func (s *sickness) before(m *machine, hold string) (held <-chan struct{}) {
	came := make(chan struct{})
	var once sync.Once
	m.server = testkit.NewGateway(m.w.t, m.w.addr, func(rw http.ResponseWriter, r *http.Request, forward http.Handler) {
		if _, err := ci.ParseLeaseRef(r.Header.Get(protocol.HeaderLease)); err != nil {
			forward.ServeHTTP(rw, r)
			return
		}
		if hold != "" && asks(hold)(r) {
			once.Do(func() { close(came) })
			select {
			case <-s.fallen:
			case <-r.Context().Done():
				return
			}
		}
		before := s.now()
		answer := testkit.Ask(r, forward)
		if before && s.now() {
			s.count(r, answer.Status/100 == 2)
		}
		answer.Pass(rw)
	})
	return came
}

func (s *sickness) count(r *http.Request, granted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, route := range sickRoutes() {
		if asks(route)(r) {
			if granted {
				s.granted[route]++
			} else {
				s.refused[route]++
			}
		}
	}
}

// sickRoutes are the calls that something of a job's result stands in.
func sickRoutes() map[string]string {
	return map[string]string{
		"log": protocol.RouteAppendLog, "phase": protocol.RoutePhase, "artifact": protocol.RouteNewArtifact,
		"seal": protocol.RouteSealArtifact, "complete": protocol.RouteComplete,
	}
}

// sick makes the server's disk sick in the middle of a job that logs, and of four
// others that come just then with a phase, a new artifact, its seal and their
// completion, and well again. No log append is acknowledged meanwhile, nor anything
// else unless the database may have room left for a row: what is, stays. It returns
// how many calls were refused.
func sick(t *testing.T, w *world, room bool, fall, heal func()) int {
	t.Helper()
	s := &sickness{fallen: make(chan struct{}), refused: map[string]int{}, granted: map[string]int{}}
	jobs := "\n  log:\n    runs_on: [log]\n    steps: ['" + shSay + "; " + shCount + "']\n"
	var held []<-chan struct{}
	for name, route := range sickRoutes() {
		m := w.machine(name, name)
		if name == "log" {
			s.before(m, "")
		} else {
			held = append(held, s.before(m, route))
			jobs += "  " + name + ":\n    runs_on: [" + name + "]\n    steps: ['seq 1 50; echo " + name +
				" >made']\n    artifacts: {publish: [{name: made, path: made}]}\n"
		}
		m.start()
	}
	id := w.submit(jobs, nil)
	w.came("log", 1)
	w.until(patience, "a line", func() bool { return w.log(w.job(id, "log").ID, 1, "stdout") != "" })
	for _, h := range held {
		select {
		case <-h:
		case <-time.After(patience):
			t.Fatal("a call that was to meet the sick disk was not made")
		}
	}
	fall()
	s.set(true)
	for name, route := range sickRoutes() {
		w.until(patience, "a call to be answered: "+name, func() bool { refused, granted := s.said(route); return refused+granted > 0 })
	}
	pass(2 * time.Second)
	total := 0
	for name, route := range sickRoutes() {
		refused, granted := s.said(route)
		total += refused
		if granted != 0 && (!room || name == "log") {
			t.Errorf("%d calls were acknowledged by a server whose disk is sick: %s", granted, name)
		}
	}
	s.set(false)
	heal()
	pass(time.Second)
	w.sign("go")
	run := w.finished(id)
	want := map[string]string{}
	for name := range sickRoutes() {
		want[name] = "success"
		job := w.job(id, name)
		w.attempts(job, "success *")
		if name == "log" {
			w.counted(w.log(job.ID, 1, "stdout"), 1)
		} else if got := w.log(job.ID, 1, "stdout"); got != numbers(1, 50) {
			t.Errorf("the log of %s has %d bytes", name, len(got))
		}
	}
	w.outcome(run, "success", want)
	if n := len(run.Artifacts); n != len(held) {
		t.Errorf("%d artifacts", n)
	}
	for _, a := range run.Artifacts {
		if err := intact(t.Context(), w.people, a.ID); err != nil || !a.Bound {
			t.Errorf("artifact of %s, bound: %v: %v", a.JobName, a.Bound, err)
		}
	}
	if total == 0 {
		t.Error("no call was refused")
	}
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
	return total
}
