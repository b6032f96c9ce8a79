package logs_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/fs"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// world is a running log service over a real database and a local directory.
type world struct {
	*storetest.World
	t      testing.TB
	blob   *faulty
	svc    *logs.Service
	viewer auth.Viewer
	cfg    logs.Config
	guard  *engine.Engine
	stop   func()
}

func each(t *testing.T, run func(*testing.T, *world)) {
	t.Helper()
	storetest.Each(t, testkit.Postgres, func(t *testing.T, w *storetest.World) { run(t, newWorld(t, w, logs.Config{})) })
}

func newWorld(t testing.TB, sw *storetest.World, cfg logs.Config) *world {
	t.Helper()
	dir, err := fs.Open(t.TempDir(), fs.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	w := &world{World: sw, t: t, blob: &faulty{Store: dir}, viewer: auth.Viewer{Org: sw.Org}}
	cfg.Store, cfg.Blob, cfg.Log, cfg.Temp = sw.Store, w.blob, sw.Log, t.TempDir()
	w.cfg = cfg
	guard, err := engine.New(t.Context(), engine.Config{
		Store: sw.Store, Log: sw.Log,
		Monotonic: func() time.Duration { return time.Duration(sw.Now()) * time.Microsecond },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.guard = guard
	w.svc = w.start()
	return w
}

// start runs another node over the same database and store; it ends with the test.
func (w *world) start() *logs.Service {
	svc := logs.New(w.cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = svc.Run(ctx)
	}()
	w.stop = func() {
		cancel()
		<-done
	}
	w.t.Cleanup(w.stop)
	return svc
}

// restart ends the node that was started last and starts another.
func (w *world) restart() *logs.Service {
	w.stop()
	return w.start()
}

// job returns a running attempt of a new job.
func (w *world) job() ci.LeaseRef {
	_, jobs := w.Run(ci.JobSpec{})
	return w.Claim(jobs[0])
}

// held passes the guard.
func (w *world) held(ref ci.LeaseRef) engine.Held {
	w.t.Helper()
	h, err := w.guard.Hold(w.t.Context(), engine.Identity{Runner: ref.Runner, Org: w.Org}, ref, "logs", engine.WhileCancelling)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

func (w *world) append(ref ci.LeaseRef, chunks ...protocol.Chunk) protocol.LogReply {
	w.t.Helper()
	reply, err := w.svc.Append(w.t.Context(), w.held(ref), chunks)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply
}

// end ends an attempt as its completion would.
func (w *world) end(ref ci.LeaseRef, ends ...protocol.StreamEnd) {
	w.t.Helper()
	w.World.End(ref, func(ctx context.Context, tx *store.Tx) error {
		return tx.EndLogs(ctx, []store.LogEnd{{Job: ref.Job, Epoch: ref.Epoch, Org: w.Org, Streams: ends}}, w.Now())
	})
}

// seal ends an attempt and waits until its log is sealed.
func (w *world) seal(ref ci.LeaseRef, ends ...protocol.StreamEnd) {
	w.t.Helper()
	w.end(ref, ends...)
	w.waitSealed(ref)
}

func (w *world) waitSealed(ref ci.LeaseRef) {
	w.t.Helper()
	w.svc.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch}) // the clock stands still: without it the grace does not end
	w.eventually("log is sealed", func() bool { return w.row(ref).State == store.LogSealed && w.row(ref).Extents == 0 })
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			w.t.Fatalf("not within 20 s: %s", what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func (w *world) row(ref ci.LeaseRef) store.Log {
	w.t.Helper()
	l, err := w.svc.Status(w.t.Context(), w.viewer, query(ref))
	if err != nil {
		w.t.Fatal(err)
	}
	return l
}

func query(ref ci.LeaseRef) logs.Query { return logs.Query{Job: ref.Job, Epoch: ref.Epoch} }

func (w *world) raw(q logs.Query) string {
	w.t.Helper()
	r, err := w.svc.Raw(w.t.Context(), w.viewer, q)
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

func (w *world) lines(q logs.Query) protocol.LogSlice {
	w.t.Helper()
	out, err := w.svc.Lines(w.t.Context(), w.viewer, q)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// follow collects events until the log is sealed.
func (w *world) follow(q logs.Query) (events []logs.Event) {
	w.t.Helper()
	err := w.svc.Events(w.t.Context(), w.viewer, q, func(e logs.Event) error {
		events = append(events, e)
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return events
}

func text(events []logs.Event) string {
	var b bytes.Buffer
	for _, e := range events {
		if e.Log != nil {
			b.Write(e.Log.Data)
			if e.Log.Lost > 0 {
				fmt.Fprintf(&b, "<lost %d>", e.Log.Lost)
			}
			if e.Log.Discarded > 0 {
				fmt.Fprintf(&b, "<discarded %d>", e.Log.Discarded)
			}
		}
	}
	return b.String()
}

func stepOf(q logs.Query, step int) logs.Query {
	q.Step = &step
	return q
}

// writer makes chunks as a runner does: numbered, with offsets.
type writer struct {
	seq  int64
	ends map[string]int64
	at   int64
}

func (w *writer) chunk(step int, stream protocol.Stream, data string) protocol.Chunk {
	return w.put(protocol.Chunk{Step: step, Stream: stream, Data: []byte(data)})
}

func (w *writer) dropped(step int, stream protocol.Stream, n int64) protocol.Chunk {
	return w.put(protocol.Chunk{Step: step, Stream: stream, Discarded: n})
}

func (w *writer) put(c protocol.Chunk) protocol.Chunk {
	if w.ends == nil {
		w.ends = map[string]int64{}
	}
	key := fmt.Sprint(c.Step, c.Stream)
	w.seq++
	w.at += 1000
	c.Sequence, c.Offset, c.AtMicros = w.seq, w.ends[key], w.at
	w.ends[key] += c.Len()
	return c
}

func (w *writer) length(step int, stream protocol.Stream) protocol.StreamEnd {
	return protocol.StreamEnd{Step: step, Stream: stream, Length: w.ends[fmt.Sprint(step, stream)]}
}

// faulty is a store whose operations a test can make fail.
type faulty struct {
	blob.Store
	mu  sync.Mutex
	put func(key string) error // before a PutNew
	got func(key string) error // before an Open
	end error                  // of a PutNew that has stored
	cut error                  // of reading a segment, after its first byte
}

// during makes what Open returns of a segment fail in the middle.
func (f *faulty) during(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut = err
}

// after makes PutNew store and then fail.
func (f *faulty) after(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.end = err
}

func (f *faulty) on(put, got func(key string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.put, f.got = put, got
}

func (f *faulty) PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error {
	f.mu.Lock()
	put, end := f.put, f.end
	f.mu.Unlock()
	if put != nil {
		if err := put(key); err != nil {
			return err
		}
	}
	if err := f.Store.PutNew(ctx, key, r, size, sum); err != nil {
		return err
	}
	return end
}

func (f *faulty) Open(ctx context.Context, key string, at, n int64) (io.ReadCloser, error) {
	f.mu.Lock()
	got, cut := f.got, f.cut
	f.mu.Unlock()
	if got != nil {
		if err := got(key); err != nil {
			return nil, err
		}
	}
	r, err := f.Store.Open(ctx, key, at, n)
	if err != nil || cut == nil || !strings.HasPrefix(key, "logs/segments/") {
		return r, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(io.LimitReader(r, 1), iotest.ErrReader(cut)), r}, nil
}

// objects counts what is stored under a prefix.
func (w *world) objects(prefix string) []string {
	w.t.Helper()
	infos, err := w.blob.List(w.t.Context(), prefix, "", 10_000)
	if err != nil {
		w.t.Fatal(err)
	}
	var keys []string
	for _, in := range infos {
		keys = append(keys, in.Key)
	}
	return keys
}
