package runner

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// sink is what takes a shipper's bodies.
type sink struct {
	t  *testing.T
	mu sync.Mutex
	// answer, when set, decides about each request; nil takes it.
	answer   func(nth int, chunks []protocol.Chunk) error
	requests int
	flying   int
	most     int // requests at once
	chunks   map[int64]protocol.Chunk
	came     map[int64]time.Time
	delay    time.Duration
}

func (k *sink) send(ctx context.Context, body []byte) (protocol.LogReply, error) {
	if len(body) > protocol.MaxLogBody {
		k.t.Errorf("a body of %d bytes", len(body))
	}
	chunks, err := protocol.DecodeChunks(bytes.Clone(body))
	if err != nil {
		k.t.Errorf("the body cannot be read: %v", err)
	}
	k.mu.Lock()
	k.requests++
	nth := k.requests
	k.flying++
	k.most = max(k.most, k.flying)
	answer, delay := k.answer, k.delay
	k.mu.Unlock()
	if delay > 0 {
		_ = pause(ctx, delay)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.flying--
	if answer != nil {
		if err := answer(nth, chunks); err != nil {
			return protocol.LogReply{}, err
		}
	}
	j := &fakeJob{chunks: k.chunks}
	var reply protocol.LogReply
	for _, c := range chunks {
		if old, ok := k.chunks[c.Sequence]; ok && !bytes.Equal(old.Data, c.Data) {
			k.t.Errorf("chunk %d was sent with other bytes before", c.Sequence)
		}
		k.chunks[c.Sequence] = c
		if _, ok := k.came[c.Sequence]; !ok {
			k.came[c.Sequence] = time.Now()
		}
		reply.Streams = append(reply.Streams, protocol.StreamEnd{Step: c.Step, Stream: c.Stream, Length: j.contiguous(c.Step, c.Stream)})
	}
	return reply, nil
}

func (k *sink) text(step int, stream protocol.Stream) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return (&fakeJob{chunks: k.chunks}).text(step, stream)
}

func (k *sink) count() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.chunks)
}

// ship runs a shipper in virtual time.
func ship(t *testing.T, cfg shipping, test func(t *testing.T, k *sink, s *shipper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		def(&cfg.delay, defaultLogDelay)
		def(&cfg.chunk, defaultLogChunk)
		def(&cfg.memory, defaultLogMemory)
		def(&cfg.spool, defaultLogSpool)
		def(&cfg.inFlight, defaultLogInFlight)
		k := &sink{t: t, chunks: map[int64]protocol.Chunk{}, came: map[int64]time.Time{}}
		var refused []cause
		path := filepath.Join(t.TempDir(), "spool")
		s := newShipper(cfg, path, testLog(t), k.send, func(c cause) { refused = append(refused, c) })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); s.run(ctx) }()
		test(t, k, s)
		cancel()
		<-done
		if err := s.spool.remove(); err != nil {
			t.Error(err)
		}
		if left, err := filepath.Glob(path + "*"); err != nil || len(left) != 0 {
			t.Errorf("the spool is left: %q, %v", left, err)
		}
		if len(refused) > 1 {
			t.Errorf("refused %d times", len(refused))
		}
		// What arrived is numbered without gaps and starts at 1 (LG-1).
		if k.answer == nil {
			for i := range int64(len(k.chunks)) {
				if _, ok := k.chunks[i+1]; !ok {
					t.Errorf("sequence %d is missing of %d", i+1, len(k.chunks))
				}
			}
		}
	})
}

func TestFirstAndLastBytesOfAStepAreSentAtOnce(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		start := time.Now()
		out := s.stream(0, protocol.Stdout)
		fmt.Fprint(out, "first\n")
		synctest.Wait()
		if k.text(0, protocol.Stdout) != "first\n" || time.Since(start) != 0 {
			t.Errorf("after %s: %q", time.Since(start), k.text(0, protocol.Stdout))
		}
		fmt.Fprint(out, "second\n")
		synctest.Wait()
		if got := k.text(0, protocol.Stdout); got != "first\n" {
			t.Errorf("the second line does not wait: %q", got)
		}
		time.Sleep(defaultLogDelay)
		synctest.Wait()
		if got := k.text(0, protocol.Stdout); got != "first\nsecond\n" {
			t.Errorf("after the delay: %q", got)
		}
		fmt.Fprint(out, "last, without newline")
		_ = out.Close()
		synctest.Wait()
		if got := k.text(0, protocol.Stdout); !strings.HasSuffix(got, "last, without newline") {
			t.Errorf("after the end: %q", got)
		}
		if k.count() != 3 {
			t.Errorf("%d chunks", k.count())
		}
	})
}

func TestChunksAreCutAtNewlines(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		out := s.stream(0, protocol.Stdout)
		var want strings.Builder
		for i := range 30_000 {
			line := fmt.Sprintf("line %d\n", i)
			want.WriteString(line)
			fmt.Fprint(out, line)
		}
		if !s.flush(t.Context()) {
			t.Error("not everything arrived")
		}
		if k.text(0, protocol.Stdout) != want.String() {
			t.Error("the text differs")
		}
		for n, c := range k.chunks {
			if !bytes.HasSuffix(c.Data, []byte("\n")) {
				t.Errorf("chunk %d of %d bytes ends with %q", n, len(c.Data), c.Data[len(c.Data)-5:])
			}
		}
	})
}

func TestCase_LOG_01_long_lines_arrive_whole(t *testing.T) {
	t.Parallel()
	for _, n := range []int{66_000, 1_100_000, 20_000_000} {
		ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
			out := s.stream(0, protocol.Stdout)
			text := "p1\np2\np3\n" + strings.Repeat("x", n) + "\np4\np5\np6\n"
			fmt.Fprint(out, text)
			if !s.flush(t.Context()) || k.text(0, protocol.Stdout) != text {
				t.Errorf("a line of %d bytes: %d of %d bytes arrived", n, len(k.text(0, protocol.Stdout)), len(text))
			}
		})
	}
}

func TestCase_LOG_02_progress_without_newline_is_sent_by_time(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		out := s.stream(0, protocol.Stdout)
		for i := range 2000 {
			fmt.Fprintf(out, "\r%d%%", i/20)
			time.Sleep(10 * time.Millisecond)
			if late := out.cutLag(k); late > 2*defaultLogDelay {
				t.Fatalf("output is %s late", late)
			}
		}
		fmt.Fprint(out, "\r100%\ndone\n")
		if !s.flush(t.Context()) || !strings.HasSuffix(k.text(0, protocol.Stdout), "\r100%\ndone\n") {
			t.Error("the end is missing")
		}
		if k.count() > 250 {
			t.Errorf("%d chunks in 20 s", k.count())
		}
	})
}

// cutLag is how long the oldest byte that was not cut waits.
func (st *logStream) cutLag(*sink) time.Duration {
	st.ship.mu.Lock()
	defer st.ship.mu.Unlock()
	if len(st.open) == 0 {
		return 0
	}
	return time.Since(st.ship.began) - st.openAt
}

func TestCase_LOG_03_any_bytes_are_sent_once(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		out := s.stream(0, protocol.Stdout)
		raw := "caf\xe9 \xff\xfe\x00x\nafter\n"
		fmt.Fprint(out, raw)
		if !s.flush(t.Context()) || k.text(0, protocol.Stdout) != raw || k.requests != 1 {
			t.Errorf("%q after %d requests", k.text(0, protocol.Stdout), k.requests)
		}
	})
	// A refusal that is not about the lease is not repeated for ever.
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		k.answer = func(int, []protocol.Chunk) error { return ci.Errorf(ci.ErrInvalid, "no") }
		fmt.Fprint(s.stream(0, protocol.Stdout), "x\n")
		s.flush(t.Context())
		if k.requests != 1 {
			t.Errorf("%d requests", k.requests)
		}
	})
}

// A failure of server or network is repeated with the same bytes and numbers,
// in whatever order the requests come through.
func TestLostAndFailedRequestsAreRepeatedIdentically(t *testing.T) {
	t.Parallel()
	ship(t, shipping{chunk: 100, memory: 4000}, func(t *testing.T, k *sink, s *shipper) {
		random, faults := rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(3, 4))
		k.answer = func(_ int, chunks []protocol.Chunk) error {
			switch faults.IntN(4) {
			case 0:
				return ci.Errorf(ci.ErrUnavailable, "not stored")
			case 1: // stored, and the reply lost
				for _, c := range chunks {
					k.chunks[c.Sequence] = c
				}
				return ci.Errorf(ci.ErrUnavailable, "stored")
			default:
				return nil
			}
		}
		var want [2]strings.Builder
		streams := []*logStream{s.stream(0, protocol.Stdout), s.stream(0, protocol.Stderr)}
		for i := range 3000 {
			n := random.IntN(2)
			line := fmt.Sprintf("%d of stream %d\n", i, n)
			want[n].WriteString(line)
			fmt.Fprint(streams[n], line)
			time.Sleep(time.Millisecond)
		}
		if !s.flush(t.Context()) {
			t.Error("not everything arrived")
		}
		for n, stream := range []protocol.Stream{protocol.Stdout, protocol.Stderr} {
			if k.text(0, stream) != want[n].String() {
				t.Errorf("%s differs", stream)
			}
		}
		for _, end := range s.ends() {
			if n := want[end.Stream-1].Len(); end.Length != int64(n) {
				t.Errorf("%s has the length %d, not %d", end.Stream, end.Length, n)
			}
		}
	})
}

func TestSeveralRequestsAreUnderWayAndChunksGrowUnderBacklog(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		k.delay = 200 * time.Millisecond
		out := s.stream(0, protocol.Stdout)
		line := []byte(strings.Repeat("y", 999) + "\n")
		for range 10_000 { // 10 MB in a second
			_, _ = out.Write(line)
			time.Sleep(100 * time.Microsecond)
		}
		if !s.flush(t.Context()) {
			t.Error("not everything arrived")
		}
		if len(k.text(0, protocol.Stdout)) != 10_000_000 {
			t.Errorf("%d bytes", len(k.text(0, protocol.Stdout)))
		}
		if k.most < 2 || k.most > defaultLogInFlight {
			t.Errorf("at most %d requests at once", k.most)
		}
		if k.requests > 40 {
			t.Errorf("%d requests for 10 MB", k.requests)
		}
	})
}

// onDisk is how many bytes the files of a spool have.
func onDisk(t *testing.T, s *spool) (n int64) {
	t.Helper()
	paths, err := filepath.Glob(s.path + "*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		n += info.Size()
	}
	return n
}

// A spool that is filled as fast as it is emptied stays at its cap, and gives back
// what it was given.
func TestASpoolThatIsNeverEmptyStaysAtItsCap(t *testing.T) {
	t.Parallel()
	const most, chunk = 1 << 20, 10_000
	s := newSpool(filepath.Join(t.TempDir(), "spool"), most)
	pushed, popped := int64(0), int64(0)
	data := func(n int64) []byte { return bytes.Repeat([]byte{byte(n)}, chunk) }
	for popped < 1000 {
		for !s.crowded() {
			pushed++
			if err := s.push(protocol.Chunk{Sequence: pushed, Data: data(pushed)}); err != nil {
				t.Fatal(err)
			}
		}
		if n := onDisk(t, s); n > most+chunk {
			t.Fatalf("%d bytes on disk after %d chunks", n, pushed)
		}
		popped++
		if c, err := s.pop(); err != nil || c.Sequence != popped || !bytes.Equal(c.Data, data(popped)) {
			t.Fatalf("chunk %d: %v, sequence %d", popped, err, c.Sequence)
		}
	}
	if pushed-popped < most/chunk/2 {
		t.Errorf("the spool has only %d chunks when it is full", pushed-popped)
	}
	for s.len() > 0 {
		if _, err := s.pop(); err != nil {
			t.Fatal(err)
		}
	}
	if n := onDisk(t, s); n != 0 || s.crowded() {
		t.Errorf("%d bytes on disk when it is empty", n)
	}
	if err := s.remove(); err != nil {
		t.Error(err)
	}
}

// R14: the log store is away for ten minutes. The writer is not held up until
// memory and disk are full, and everything arrives afterwards.
func TestLogStoreAwayTenMinutesCostsNothing(t *testing.T) {
	t.Parallel()
	ship(t, shipping{memory: 100 << 10}, func(t *testing.T, k *sink, s *shipper) {
		away := true
		k.answer = func(int, []protocol.Chunk) error {
			if away {
				return ci.Errorf(ci.ErrUnavailable, "away")
			}
			return nil
		}
		out := s.stream(0, protocol.Stdout)
		var want strings.Builder
		start := time.Now()
		for i := range 6000 {
			line := fmt.Sprintf("%d %s\n", i, strings.Repeat("z", 1000))
			want.WriteString(line)
			fmt.Fprint(out, line)
			time.Sleep(100 * time.Millisecond)
		}
		if d := time.Since(start); d != 10*time.Minute {
			t.Errorf("the writer took %s", d)
		}
		s.mu.Lock()
		if s.memory > 200<<10+protocol.MaxChunk || s.spool.disk == 0 {
			t.Errorf("%d bytes in memory, %d on disk", s.memory, s.spool.disk)
		}
		s.mu.Unlock()
		k.mu.Lock()
		away = false
		k.mu.Unlock()
		if !s.flush(t.Context()) || k.text(0, protocol.Stdout) != want.String() {
			t.Errorf("%d of %d bytes arrived", len(k.text(0, protocol.Stdout)), want.Len())
		}
		if n := onDisk(t, s.spool); n != 0 {
			t.Errorf("the spool still has %d bytes", n)
		}
	})
}

// Past memory and disk the writer waits, and goes on when the store is back;
// when the job is ended meanwhile it discards with a marker instead.
func TestFullSpoolHoldsTheWriterUntilTheJobIsEnded(t *testing.T) {
	t.Parallel()
	for _, relent := range []bool{false, true} {
		ship(t, shipping{memory: 10_000, spool: 20_000, chunk: 1000}, func(t *testing.T, k *sink, s *shipper) {
			away := true
			k.answer = func(int, []protocol.Chunk) error {
				if away {
					return ci.Errorf(ci.ErrUnavailable, "away")
				}
				return nil
			}
			out := s.stream(0, protocol.Stdout)
			done := make(chan struct{})
			const total = 200_000
			go func() {
				defer close(done)
				for range total / 100 {
					fmt.Fprintln(out, strings.Repeat("q", 99))
				}
			}()
			time.Sleep(time.Minute)
			select {
			case <-done:
				t.Fatal("the writer was not held up")
			default:
			}
			if relent {
				s.relent()
				<-done
			}
			k.mu.Lock()
			away = false
			k.mu.Unlock()
			<-done
			if !s.flush(t.Context()) {
				t.Error("not everything arrived")
			}
			text := k.text(0, protocol.Stdout)
			if !relent && len(text) != total {
				t.Errorf("%d bytes arrived", len(text))
			}
			if relent && !strings.HasSuffix(text, "]") {
				t.Errorf("there is no marker of what was discarded: …%q", text[len(text)-20:])
			}
			if end := s.ends()[0].Length; end != total {
				t.Errorf("the stream's length is %d", end)
			}
		})
	}
}

// LG-4: past the attempt's limit output is discarded with a marker, and the
// step is never held up for it.
func TestCase_LG_4_limit_discards_with_a_marker(t *testing.T) {
	t.Parallel()
	ship(t, shipping{limit: 1000}, func(t *testing.T, k *sink, s *shipper) {
		out, other := s.stream(0, protocol.Stdout), s.stream(0, protocol.Stderr)
		for range 50 {
			fmt.Fprint(out, strings.Repeat("a", 99)+"\n")
			time.Sleep(10 * time.Millisecond)
		}
		fmt.Fprint(other, "not seen\n")
		if !s.flush(t.Context()) {
			t.Error("not everything arrived")
		}
		text := k.text(0, protocol.Stdout)
		if kept, _, ok := strings.Cut(text, "["); !ok || len(kept) != 1000 {
			t.Errorf("kept %d bytes: %s", len(kept), text[len(text)-30:])
		}
		if got := k.text(0, protocol.Stderr); got != "[9]" {
			t.Errorf("stderr: %q", got)
		}
		for _, end := range s.ends() {
			if want := map[protocol.Stream]int64{protocol.Stdout: 5000, protocol.Stderr: 9}[end.Stream]; end.Length != want {
				t.Errorf("%s ends at %d, not %d", end.Stream, end.Length, want)
			}
		}
		if k.count() > 20 {
			t.Errorf("%d chunks", k.count())
		}
	})
}

func TestServerSaysThatTheLogIsFull(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		out := s.stream(0, protocol.Stdout)
		fmt.Fprint(out, "kept\n")
		synctest.Wait()
		s.confirmed(protocol.LogReply{Full: true})
		fmt.Fprint(out, "dropped\n")
		if !s.flush(t.Context()) || k.text(0, protocol.Stdout) != "kept\n[8]" {
			t.Errorf("%q", k.text(0, protocol.Stdout))
		}
	})
}

func TestCase_LOG_10_refusal_stops_sending(t *testing.T) {
	t.Parallel()
	ship(t, shipping{chunk: 10}, func(t *testing.T, k *sink, s *shipper) {
		k.delay = 50 * time.Millisecond
		k.answer = func(nth int, _ []protocol.Chunk) error {
			if nth > 2 {
				return ci.Rejected(ci.RejectEnded)
			}
			return nil
		}
		out := s.stream(0, protocol.Stdout)
		for i := range 5000 {
			fmt.Fprintf(out, "line %d\n", i)
			time.Sleep(10 * time.Millisecond)
		}
		if s.flush(t.Context()) {
			t.Error("flush says that everything arrived")
		}
		if refused := k.requests - 2; refused > 3 {
			t.Errorf("%d requests were refused", refused)
		}
	})
}

// A damaged body is sent again; the flush is bounded.
func TestDamagedBodiesAndBoundedFlush(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		k.answer = func(nth int, _ []protocol.Chunk) error {
			if nth <= 2 {
				return ci.Errorf(ci.ErrDigest, "damaged")
			}
			return nil
		}
		fmt.Fprint(s.stream(0, protocol.Stdout), "x\n")
		if !s.flush(t.Context()) || k.requests != 3 {
			t.Errorf("%d requests", k.requests)
		}
		k.answer = func(int, []protocol.Chunk) error { return ci.Errorf(ci.ErrUnavailable, "away") }
		fmt.Fprint(s.stream(1, protocol.Stdout), "y\n")
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		start := time.Now()
		if s.flush(ctx) || time.Since(start) != 30*time.Second {
			t.Errorf("flush ended after %s", time.Since(start))
		}
	})
}

// The runner's own lines go before the step's first line, in one request.
func TestRunnersLinesKeepTheirOrder(t *testing.T) {
	t.Parallel()
	ship(t, shipping{}, func(t *testing.T, k *sink, s *shipper) {
		s.stream(protocol.StepSystem, protocol.System).line("artifact restored")
		fmt.Fprint(s.stream(0, protocol.Stdout), "hello\n")
		synctest.Wait()
		if k.requests != 1 || k.chunks[1].Stream != protocol.System || k.chunks[2].Stream != protocol.Stdout {
			t.Errorf("%d requests, first chunk %s", k.requests, k.chunks[1].Stream)
		}
	})
}

// R13: a disk that refuses makes the writer wait; nothing is lost.
func TestFullDiskUnderTheSpoolLosesNothing(t *testing.T) {
	t.Parallel()
	ship(t, shipping{memory: 5000, chunk: 1000}, func(t *testing.T, k *sink, s *shipper) {
		s.spool.path = filepath.Join(t.TempDir(), "not", "there")
		away := true
		k.answer = func(int, []protocol.Chunk) error {
			if away {
				return ci.Errorf(ci.ErrUnavailable, "away")
			}
			return nil
		}
		out := s.stream(0, protocol.Stdout)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 2_000 {
				fmt.Fprintln(out, strings.Repeat("q", 99))
			}
		}()
		time.Sleep(time.Minute)
		k.mu.Lock()
		away = false
		k.mu.Unlock()
		<-done
		if !s.flush(t.Context()) || len(k.text(0, protocol.Stdout)) != 200_000 {
			t.Errorf("%d bytes arrived", len(k.text(0, protocol.Stdout)))
		}
	})
}

// LOG-04: what the runner says at the end of a job is stored, whatever the last
// step was.
func TestCase_LOG_04_teardown_lines_are_kept(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		spec := job("echo hello", "echo never")
		spec.Steps[1].If = "failure()"
		spec.Publish = []ci.ArtifactPublish{{Name: "a", Paths: []string{"*.none"}, Optional: true}}
		j := s.add(spec, nil)
		r.start().finish(j)
		r.drain()
		if got := j.text(protocol.StepSystem, protocol.System); !strings.Contains(got, "nothing matches *.none") {
			t.Errorf("the runner's lines are %q", got)
		}
		for _, end := range j.complete.Streams {
			if got := j.contiguous(end.Step, end.Stream); got != end.Length {
				t.Errorf("step %d %s: %d bytes arrived of %d", end.Step, end.Stream, got, end.Length)
			}
		}
	})
}

// Decision 7: a log that does not arrive delays the result by the flush's bound
// and never fails the job; the lengths say what is missing.
func TestMissingTailOfTheLogDoesNotFailTheJob(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.fault = func(route string, _ int) string {
			if route == protocol.RouteAppendLog {
				return "503"
			}
			return ""
		}
		j := s.add(job("echo hello"), nil)
		start := time.Now()
		r.start().finish(j)
		if d := time.Since(start); d < 30*time.Second || d > 31*time.Second {
			t.Errorf("ended after %s", d)
		}
		r.drain()
		if j.complete.Conclusion != ci.ConclusionSuccess || len(j.complete.Streams) != 1 || j.complete.Streams[0].Length != 6 {
			t.Errorf("%+v", j.complete)
		}
	})
}

// CAN-03: that a background process holds the output is said in the step's log.
func TestCase_CAN_03_leak_is_noted(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.exec.steps["leak"] = func(context.Context, executor.Step) executor.Result {
			return executor.Result{ExitCode: 3, Leaked: true}
		}
		j := s.add(job("leak"), nil)
		r.start().finish(j)
		r.drain()
		if got := j.text(0, protocol.System); !strings.Contains(got, "still holds the output") {
			t.Errorf("%q", got)
		}
		if codeOf(j.complete.ExitCode) != 3 {
			t.Errorf("exit code %d", codeOf(j.complete.ExitCode))
		}
	})
}
