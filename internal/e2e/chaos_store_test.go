package e2e_test

import (
	"crypto/rand"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/testkit"
)

// fault is what an object store does wrong while it is sick.
type fault struct {
	answer func(w http.ResponseWriter, r *http.Request, forward http.Handler)
	// harmless faults cost no attempt: what is read is never wrong, only late.
	harmless bool
}

func storeFaults() map[string]fault {
	problem := func(status int, code string) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(status)
			fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>%s</Message></Error>`, code, code)
		}
	}
	return map[string]fault{
		"503 storm":           {problem(http.StatusServiceUnavailable, "SlowDown"), true},
		"500 storm":           {problem(http.StatusInternalServerError, "InternalError"), true},
		"credentials refused": {problem(http.StatusForbidden, "InvalidAccessKeyId"), false},
		"slow": {func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			r.Body = &slowly{r.Body}
			answer := testkit.Ask(r, forward)
			pass(300 * time.Millisecond)
			answer.Pass(w)
		}, true},
		"answers lost": {func(_ http.ResponseWriter, r *http.Request, forward http.Handler) {
			testkit.Ask(r, forward)
			panic(http.ErrAbortHandler)
		}, true},
		"half of all answers lost": {func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			answer := testkit.Ask(r, forward)
			if mathrand.IntN(2) == 0 {
				panic(http.ErrAbortHandler)
			}
			answer.Pass(w)
		}, true},
		"bodies cut": {func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			answer := testkit.Ask(r, forward)
			if r.Method == http.MethodGet && len(answer.Body) > 1 {
				answer.Header.Set("Content-Length", fmt.Sprint(len(answer.Body)))
				answer.Body = answer.Body[:len(answer.Body)/2]
			}
			answer.Pass(w)
		}, false},
		"wrong bytes": {func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				r.Body = &flipping{r.Body}
			}
			answer := testkit.Ask(r, forward)
			if r.Method == http.MethodGet && len(answer.Body) > 0 {
				answer.Body = slices.Clone(answer.Body)
				answer.Body[len(answer.Body)/2] ^= 1
			}
			answer.Pass(w)
		}, false},
	}
}

// slowly reads a kilobyte at a time, with a pause.
type slowly struct{ io.ReadCloser }

func (s *slowly) Read(b []byte) (int, error) {
	pass(20 * time.Millisecond)
	return s.ReadCloser.Read(b[:min(len(b), 1024)])
}

// flipping turns a bit of every piece that it reads.
type flipping struct{ io.ReadCloser }

func (f *flipping) Read(b []byte) (int, error) {
	n, err := f.ReadCloser.Read(b)
	if n > 0 {
		b[n/2] ^= 1
	}
	return n, err
}

// The object store is slow, away, or lies, while jobs log, publish and restore. No
// lease is lost and no job fails by what is only late; nothing that is incomplete
// or wrong is ever seen; after the recovery everything is there.
func TestChaos_R14_R25_ObjectStoreIsSick(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R14-R25")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 14))
	for round := range setting[int]("rounds") {
		for name, f := range some("R14", storeFaults()) {
			after := time.Duration(random.Int64N(int64(time.Second)))
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				sum.add("requests of a sick store", sickStore(t, f, after))
				sum.add("faults", 1)
				if !t.Failed() {
					sum.add("ok", 1)
				}
			})
		}
	}
}

func sickStore(t *testing.T, f fault, after time.Duration) int {
	t.Helper()
	bucket := testkit.S3(t)
	var ill atomic.Bool
	var met atomic.Int64
	url := testkit.NewGateway(t, bucket.Endpoint, func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !ill.Load() {
			forward.ServeHTTP(w, r)
			return
		}
		met.Add(1)
		f.answer(w, r, forward)
	})
	bucket.Endpoint = strings.TrimPrefix(url, "http://")
	w := newWorld(t, config{ttl: calm, blob: &bucket})
	for _, name := range []string{"a", "b"} {
		w.machine(name).start()
	}
	long := w.submit(counting(""), nil)
	w.came("build", 1)
	text := rand.Text() + "\n"
	jobs := strings.ReplaceAll(chain, "    steps:", "    retry: {max: 2, on: [prepare]}\n    steps:")
	short := w.submit(jobs, map[string]string{"text": text})
	pass(after)
	ill.Store(true)
	pass(3 * time.Second)
	ill.Store(false)
	w.sign("go")
	w.outcome(w.finished(long), "success", map[string]string{"build": "success"})
	build := w.job(long, "build")
	w.attempts(build, "success *")
	w.counted(w.log(build.ID, 1, "stdout"), 1)
	if f.harmless {
		w.chained(short, text)
	} else {
		w.endedWell(short, text)
	}
	run, ok := w.run(short)
	if !ok {
		t.Fatal("no answer")
	}
	for _, a := range run.Artifacts {
		if err := intact(t.Context(), w.people, a.ID); err != nil {
			t.Errorf("artifact of attempt %d, bound: %v: %v", a.Epoch, a.Bound, err)
		}
	}
	w.abandoned = 2
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
	return int(met.Load())
}

// endedWell demands that a run of chain succeeded, or says why it could not; what
// it shows is right in either case.
func (w *world) endedWell(id ci.RunID, text string) {
	w.t.Helper()
	run := w.finished(id)
	for _, j := range run.JobList {
		job := w.job(id, j.Name)
		if j.Conclusion != ci.ConclusionSuccess && j.Reason == "" {
			w.t.Errorf("job %s is %s without a reason", j.Name, j.Conclusion)
		}
		w.t.Logf("job %s: %s %s (%s)", j.Name, j.Conclusion, j.Reason, j.Detail)
		for _, a := range job.Attempt {
			w.t.Logf("attempt %d: %s %s", a.Epoch, a.Conclusion, a.Reason)
			whole := map[string]string{"compile": numbers(1, 400), "test": text + "more\n"}[j.Name]
			got := w.log(job.ID, a.Epoch, "stdout")
			if !strings.HasPrefix(whole, got) || a.Winner && a.Conclusion == ci.ConclusionSuccess && got != whole {
				w.t.Errorf("the log of attempt %d of %s is not what it wrote: %d bytes", a.Epoch, j.Name, len(got))
			}
		}
	}
	if n := len(slices.DeleteFunc(slices.Clone(run.Artifacts), func(a protocol.Artifact) bool { return !a.Bound })); n > 1 {
		w.t.Errorf("%d artifacts are bound", n)
	}
}
