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
	// publish and restore are how an attempt ends that comes to the sick store to do
	// so, and why says what it tells of that; "" if all is only late.
	publish, restore, why string
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
		"503 storm":           {answer: problem(http.StatusServiceUnavailable, "SlowDown")},
		"500 storm":           {answer: problem(http.StatusInternalServerError, "InternalError")},
		"credentials refused": {answer: problem(http.StatusForbidden, "InvalidAccessKeyId")},
		"slow": {answer: func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			r.Body = &slowly{r.Body}
			answer := testkit.Ask(r, forward)
			pass(300 * time.Millisecond)
			answer.Pass(w)
		}},
		"answers lost": {answer: func(_ http.ResponseWriter, r *http.Request, forward http.Handler) {
			testkit.Ask(r, forward)
			panic(http.ErrAbortHandler)
		}},
		"half of all answers lost": {answer: func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			answer := testkit.Ask(r, forward)
			if mathrand.IntN(2) == 0 {
				panic(http.ErrAbortHandler)
			}
			answer.Pass(w)
		}},
		"bodies cut": {answer: func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			answer := testkit.Ask(r, forward)
			if r.Method == http.MethodGet && len(answer.Body) > 1 {
				answer.Header.Set("Content-Length", fmt.Sprint(len(answer.Body)))
				answer.Body = answer.Body[:len(answer.Body)/2]
			}
			answer.Pass(w)
		}},
		"wrong bytes": {answer: func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				r.Body = &flipping{r.Body}
			}
			answer := testkit.Ask(r, forward)
			if r.Method == http.MethodGet && !asksAbout(r) && len(answer.Body) > 0 {
				answer.Body = slices.Clone(answer.Body)
				answer.Body[len(answer.Body)/2] ^= 1
			}
			answer.Pass(w)
		}, publish: "failed internal", restore: "failed prepare", why: "digest"},
	}
}

// asksAbout says whether a request reads what the store knows of objects, not
// their bytes.
func asksAbout(r *http.Request) bool {
	q := r.URL.Query()
	return q.Has("uploadId") || q.Has("uploads") || q.Has("list-type") || q.Has("location")
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
// or wrong is ever seen, and who meets it says so; after the recovery everything is
// there, and a run succeeds.
func TestChaos_R14_R25_ObjectStoreIsSick(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R14-R25")
	for round := range setting[int]("rounds") {
		for name, f := range some("R14", storeFaults()) {
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				sum.add("requests of a sick store", sickStore(t, f))
				sum.add("faults", 1)
				if !t.Failed() {
					sum.add("ok", 1)
				}
			})
		}
	}
}

// publishingChain and restoringChain are chains that wait, one in a step, one in
// a job more, until the store is ill: one publishes then, the other restores then,
// on a machine that has its source already.
const shIll = `while [ ! -e "$SIGNS/ill" ]; do sleep 0.05; done`

func publishingChain() string {
	return strings.Replace(retried(chain), "cat text >made", shSay+"; "+shIll+"; cat text >made", 1)
}

func restoringChain() string {
	jobs := strings.Replace(retried(chain), "needs: [compile]", "needs: [compile, hold]", 1)
	return jobs + "  - name: hold\n    needs: []\n    steps: ['" + shSay + "; " + shIll + "']\n"
}

// retried gives the jobs a policy for preparations that fail.
func retried(jobs string) string {
	return strings.ReplaceAll(jobs, "    steps:", "    retry: {max: 9, on: [prepare]}\n    steps:")
}

// tries is how often a runner sends, and asks for, bytes that turn out wrong.
const tries = 5

func sickStore(t *testing.T, f fault) int {
	t.Helper()
	bucket := testkit.S3(t)
	var ill atomic.Bool
	var met, opened, sent, asked atomic.Int64
	url := testkit.NewGateway(t, bucket.Endpoint, func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		if !ill.Load() {
			forward.ServeHTTP(w, r)
			return
		}
		met.Add(1)
		switch artifact := strings.Contains(r.URL.Path, "/artifacts/"); {
		case artifact && r.Method == http.MethodPost:
			opened.Add(1)
		case artifact && r.Method == http.MethodPut:
			sent.Add(1)
		case artifact && r.Method == http.MethodGet && !asksAbout(r):
			asked.Add(1)
		}
		f.answer(w, r, forward)
	})
	bucket.Endpoint = strings.TrimPrefix(url, "http://")
	w := newWorld(t, config{ttl: calm, blob: &bucket})
	for _, name := range []string{"a", "b", "c"} {
		w.machine(name).start()
	}
	long := w.submit(counting(""), nil)
	w.came("build", 1)
	text := rand.Text() + "\n"
	restores := w.submit(restoringChain(), map[string]string{"text": text})
	w.came("hold", 1)
	w.until(patience, "an artifact to restore", func() bool { return w.job(restores, "compile").State == ci.StateFinished })
	publishes := w.submit(publishingChain(), map[string]string{"text": text})
	w.came("compile", 1)

	ill.Store(true)
	w.sign("ill")
	pass(3 * time.Second)
	w.until(patience, "the sick store to be told of an artifact", func() bool { return opened.Load()+sent.Load() > 0 })
	w.until(patience, "an artifact that is asked of the sick store", func() bool { return asked.Load() > 0 })
	if f.publish != "" { // both give up after some tries; then their logs can be stored again
		w.until(patience, "the last try to publish", func() bool { return sent.Load() >= tries })
		w.until(patience, "the last try to restore", func() bool { return asked.Load() >= tries })
	}
	ill.Store(false)
	w.sign("go")

	w.outcome(w.finished(long), "success", map[string]string{"build": "success"})
	build := w.job(long, "build")
	w.attempts(build, "success *")
	w.counted(w.log(build.ID, 1, "stdout"), 1)
	if f.publish == "" {
		w.chained(publishes, text)
	} else {
		w.outcome(w.finished(publishes), "failed infrastructure", map[string]string{"compile": "aborted internal", "test": "skipped needs"})
		compile := w.job(publishes, "compile")
		w.attempts(compile, f.publish)
		w.says(compile.Attempt[0], f.why)
		if got := w.log(compile.ID, 1, "stdout"); got != numbers(1, 400) {
			t.Errorf("the log of what could not be published has %d bytes", len(got))
		}
	}
	if f.restore == "" {
		w.chained(restores, text)
	} else {
		w.outcome(w.finished(restores), "success", map[string]string{"compile": "success", "hold": "success", "test": "success"})
		test := w.job(restores, "test")
		last := len(test.Attempt) - 1
		if last < 1 {
			t.Fatalf("no attempt saw what the sick store gave: %+v", test.Attempt)
		}
		w.attempts(test, append(slices.Repeat([]string{f.restore}, last), "success *")...)
		for _, a := range test.Attempt[:last] {
			w.says(a, f.why)
			if got := w.log(test.ID, a.Epoch, "stdout"); got != "" {
				t.Errorf("a step saw what was restored of a store that lies: %q", got)
			}
		}
		if got := w.log(test.ID, int64(last+1), "stdout"); got != text+"more\n" {
			t.Errorf("restored: %q", got)
		}
	}
	later := w.submit(chain, map[string]string{"text": text})
	w.chained(later, text)
	for _, id := range []ci.RunID{publishes, restores, later} {
		run, ok := w.run(id)
		if !ok {
			t.Fatal("no answer")
		}
		for _, a := range run.Artifacts {
			if err := intact(t.Context(), w.people, a.ID); err != nil {
				t.Errorf("artifact of attempt %d, bound: %v: %v", a.Epoch, a.Bound, err)
			}
		}
	}
	w.abandoned = 2
	if b := w.close(); b.total() != 0 {
		t.Errorf("calls were refused: %v", b.rejections)
	}
	return int(met.Load())
}

// says demands that an attempt's end is explained in these words.
func (w *world) says(a protocol.Attempt, words string) {
	w.t.Helper()
	w.t.Logf("attempt %d: %s %s (%s)", a.Epoch, a.Conclusion, a.Reason, a.Detail)
	if words == "" || !has(a.Detail, words) {
		w.t.Errorf("attempt %d ended with %q, want it to say %q", a.Epoch, a.Detail, words)
	}
}
