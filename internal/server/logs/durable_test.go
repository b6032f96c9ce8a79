package logs_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// A chunk is acknowledged when its segment is stored and its index committed:
// when either fails, stored or not, the runner is told to send the same again,
// and the log has it once.
func TestWhatIsAcknowledgedIsStoredAndIndexed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		whole := ""
		for what, fail := range map[string]func() (mended func()){
			"segment not stored": func() func() {
				w.blob.on(func(string) error { return ci.Errorf(ci.ErrUnavailable, "the store is away") }, nil)
				return func() { w.blob.on(nil, nil) }
			},
			"segment stored, but": func() func() {
				w.blob.after(ci.Errorf(ci.ErrUnavailable, "the answer was lost"))
				return func() { w.blob.after(nil) }
			},
			"index not committed": func() func() {
				failed := w.FailOnce(store.PointCommit)
				return func() {
					if !failed() {
						t.Error("nothing was committed")
					}
				}
			},
			"index committed, but": func() func() {
				w.FailOnce(store.PointCommitted)
				return func() {}
			},
		} {
			c := wr.chunk(0, protocol.Stdout, what+"\n")
			whole += what + "\n"
			held := w.held(ref)
			mended := fail()
			if reply, err := w.svc.Append(t.Context(), held, []protocol.Chunk{c}); !errors.Is(err, ci.ErrUnavailable) {
				t.Errorf("%s: acknowledged %+v, %v", what, reply, err)
			}
			mended()
			for range 2 {
				if reply := w.append(ref, c); len(reply.Streams) != 1 || reply.Streams[0].Length != int64(len(whole)) {
					t.Errorf("%s, sent again: %+v, want %d bytes", what, reply, len(whole))
				}
			}
			if got := w.raw(query(ref)); got != whole {
				t.Errorf("%s: the log is %q", what, got)
			}
		}
	})
}

// rotten is a store that gives archives back with a bit flipped while it is on.
type rotten struct {
	blob.Store
	on atomic.Bool
}

func (r *rotten) Open(ctx context.Context, key string, at, n int64) (io.ReadCloser, error) {
	rc, err := r.Store.Open(ctx, key, at, n)
	if err != nil || !r.on.Load() || !strings.HasPrefix(key, "logs/archives/") || at > 0 {
		return rc, err
	}
	b, err := io.ReadAll(rc)
	if len(b) > 0 {
		b[len(b)/2] ^= 1
	}
	return io.NopCloser(strings.NewReader(string(b))), errors.Join(err, rc.Close())
}

// An archive that does not read back as it was written replaces nothing: the
// segments stay, also when they are old, and the log is sealed when it does.
func TestAnArchiveThatDoesNotReadBackReplacesNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		bad := &rotten{Store: w.blob}
		w.cfg.Blob = bad
		w.svc = w.restart()
		ref := w.job()
		var wr writer
		const whole = "kept until its archive is proven\n"
		w.append(ref, wr.chunk(0, protocol.Stdout, whole))
		bad.on.Store(true)
		w.end(ref, wr.length(0, protocol.Stdout))
		w.Advance(30 * time.Minute)
		if _, err := w.svc.SealEnded(t.Context()); err == nil {
			t.Error("an archive with another content was taken")
		}
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l := w.row(ref); l.State != store.LogEnded || l.Extents == 0 {
			t.Errorf("the log is %s with %d extents", l.State, l.Extents)
		}
		if n := len(w.objects("logs/segments/")); n != 1 {
			t.Errorf("%d segments, want the one that holds the log", n)
		}
		bad.on.Store(false)
		w.waitSealed(ref)
		if got := w.raw(query(ref)); got != whole {
			t.Errorf("the log is %q", got)
		}
	})
}
