package logs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
	"forgeci/internal/server/store/storetest"
	"forgeci/internal/testkit"
)

// flood appends n lines of 100 bytes in requests of about a MiB.
func (w *world) flood(ref ci.LeaseRef, wr *writer, n int) {
	w.t.Helper()
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%08d %s\n", i, strings.Repeat("x", 90))
		if b.Len() > 1<<20-200 || i == n-1 {
			w.append(ref, wr.chunk(0, protocol.Stdout, b.String()))
			b.Reset()
		}
	}
}

func TestCase_UI_01_AWindowOfAMillionLinesIsReadWithoutTheRest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, storetest.SQLite(t), logs.Config{})
	ref := w.job()
	var wr writer
	const lines = 1_000_000
	w.flood(ref, &wr, lines)
	check := func(when string) {
		for _, from := range []int64{1, 987_654, lines - 10} {
			began := time.Now()
			q := query(ref)
			q.From, q.Limit = from, 200
			s := w.lines(q)
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("%s: line %d after %s", when, from, took)
			}
			if s.Total != lines || s.First != from || !strings.HasPrefix(s.Lines[0].Text, fmt.Sprintf("%08d ", from-1)) {
				t.Errorf("%s: line %d: first %d of %d, %.20q", when, from, s.First, s.Total, s.Lines[0].Text)
			}
		}
		q := query(ref)
		q.Search = "00999999 "
		if s := w.lines(q); len(s.Lines) != 1 || s.Lines[0].Number != lines {
			t.Errorf("%s: search found %d lines", when, len(s.Lines))
		}
	}
	check("live")
	w.seal(ref, wr.length(0, protocol.Stdout))
	check("sealed")
}

func TestCase_DB_02_TheDatabaseGrowsByLessThanAKilobyteForAMebibyte(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		const requests = 100
		ref := w.job()
		var wr writer
		w.flood(ref, &wr, 10_000)
		before := testkit.DatabaseSize(t, w.URL)
		w.flood(ref, &wr, requests*10_000) // about 1 MB each
		l := w.row(ref)
		grown := testkit.DatabaseSize(t, w.URL) - before
		const maps = 32 << 10 // PostgreSQL may begin its maps of free space meanwhile
		if mebibytes := l.Bytes >> 20; grown >= mebibytes*1000+maps {
			t.Errorf("the database has grown by %d bytes for %d MiB", grown, mebibytes)
		}
		segments := len(w.objects("logs/segments/"))
		if int64(segments) > l.Extents {
			t.Errorf("%d segments for %d extents", segments, l.Extents)
		}
		w.seal(ref, wr.length(0, protocol.Stdout))
		if l := w.row(ref); l.Extents != 0 {
			t.Errorf("%d extents of a sealed log", l.Extents)
		}
		w.Advance(time.Hour)
		if err := w.svc.Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left := w.objects("logs/segments/"); len(left) != 0 {
			t.Errorf("%d segments left", len(left))
		}
		info, err := w.blob.Stat(t.Context(), w.row(ref).ArchiveKey)
		if err != nil || info.Size > l.Bytes {
			t.Errorf("archive %+v, %v", info, err)
		}
	})
}

// TestCase_R16_StuckViewersCostLittleAndHoldNobodyUp lets viewers hang in the
// middle of an event while the log goes on.
func TestCase_R16_StuckViewersCostLittleAndHoldNobodyUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, storetest.SQLite(t), logs.Config{})
	ref := w.job()
	var wr writer
	w.flood(ref, &wr, 50_000)
	const viewers = 200
	release := make(chan struct{})
	var all, stuck sync.WaitGroup
	lost := errors.New("connection lost")
	before := heap()
	for range viewers {
		stuck.Add(1)
		all.Go(func() {
			var got []byte
			q, once := query(ref), sync.OnceFunc(stuck.Done)
			n := 0
			err := w.svc.Events(context.Background(), w.viewer, q, func(e logs.Event) error {
				if n++; n == 3 {
					once()
					<-release
					return lost
				}
				got = append(got, e.Log.Data...)
				q.After = e.Cursor
				return nil
			})
			if !errors.Is(err, lost) {
				t.Errorf("stuck viewer: %v", err)
			}
			if len(got) == 0 || q.After != fmt.Sprintf("%d-%d", ref.Epoch, len(got)) {
				t.Errorf("cursor %s behind %d bytes", q.After, len(got))
			}
		})
	}
	stuck.Wait()
	if each := (heap() - before) / viewers; each > 256<<10 {
		t.Errorf("a stuck viewer holds %d bytes", each)
	}
	late := wr.chunk(1, protocol.Stdout, "goes on\n")
	began := time.Now()
	w.append(ref, late)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("append beside stuck viewers took %s", took)
	}
	w.seal(ref)
	q := query(ref)
	q.Tail = 1
	if got := text(w.follow(q)); got != "goes on\n" {
		t.Errorf("another viewer reads %q", got)
	}
	close(release)
	all.Wait()
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkLog200k appends 200,000 lines of 100 bytes and measures from the end
// of the attempt until the sealed log has been read whole.
func BenchmarkLog200k(b *testing.B) {
	w := newWorld(b, storetest.SQLite(b), logs.Config{})
	for b.Loop() {
		ref := w.job()
		var wr writer
		began := time.Now()
		w.flood(ref, &wr, 200_000)
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "append_ms")
		began = time.Now()
		w.seal(ref, wr.length(0, protocol.Stdout))
		r, err := w.svc.Raw(b.Context(), w.viewer, query(ref))
		if err != nil {
			b.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, r); err != nil || n != 200_000*100 {
			b.Fatal(n, err)
		}
		_ = r.Close()
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "readable_after_exit_ms")
		b.ReportMetric(peakMiB(b), "peak_mib")
	}
}

// peakMiB is the most resident memory of this process so far.
func peakMiB(tb testing.TB) float64 {
	tb.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var kib float64
		if _, err := fmt.Sscanf(line, "VmHWM: %f kB", &kib); err == nil {
			return kib / 1024
		}
	}
	return 0
}

// BenchmarkLog1GiBTail opens the last 1,000 lines of a log of 1 GiB on a node
// that has not seen it, while it grows and after it is sealed.
func BenchmarkLog1GiBTail(b *testing.B) {
	w := newWorld(b, storetest.SQLite(b), logs.Config{Limit: 2 << 30})
	ref := w.job()
	var wr writer
	w.flood(ref, &wr, (1<<30)/100)
	open := func(b *testing.B) {
		var took []time.Duration
		for b.Loop() {
			node := logs.New(w.cfg)
			q := query(ref)
			q.Tail = 1000
			began := time.Now()
			s, err := node.Lines(b.Context(), w.viewer, q)
			if err != nil || len(s.Lines) != 1000 {
				b.Fatal(len(s.Lines), err)
			}
			r, err := node.Raw(b.Context(), w.viewer, q)
			if err != nil {
				b.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, r); err != nil || n != 100_000 {
				b.Fatal(n, err)
			}
			_ = r.Close()
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "open_tail_max_ms")
	}
	b.Run("live", open)
	w.end(ref)
	began := time.Now()
	w.svc.Ended(store.AttemptKey{Job: ref.Job, Epoch: ref.Epoch})
	for w.row(ref).State != store.LogSealed {
		<-time.After(10 * time.Millisecond)
	}
	b.Logf("1 GiB sealed after %s", time.Since(began))
	b.Run("sealed", open)
}
