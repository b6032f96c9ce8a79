package logs_test

import (
	"testing"

	"forgeci/internal/protocol"
)

func TestAppendedBytesAreReadableLiveAndSealed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, w *world) {
		ref := w.job()
		var wr writer
		reply := w.append(ref, wr.chunk(0, protocol.Stdout, "hello\n"), wr.chunk(0, protocol.Stdout, "wor"), wr.chunk(0, protocol.Stderr, "oops\n"))
		if got := reply.Streams; len(got) != 2 || got[0].Length != 9 || got[1].Length != 5 {
			t.Fatalf("reply %+v", reply)
		}
		w.append(ref, wr.chunk(0, protocol.Stdout, "ld\n"))
		check := func(when string) {
			if got := w.raw(query(ref)); got != "hello\nworoops\nld\n" {
				t.Errorf("%s: raw %q", when, got)
			}
			s := w.lines(query(ref))
			var got []string
			for _, l := range s.Lines {
				got = append(got, l.Text)
			}
			if len(got) != 3 || got[0] != "hello" || got[1] != "world" || got[2] != "oops" || s.Total != 3 {
				t.Errorf("%s: lines %q of %d", when, got, s.Total)
			}
		}
		check("live")
		w.seal(ref, wr.length(0, protocol.Stdout), wr.length(0, protocol.Stderr))
		check("sealed")
		events := w.follow(query(ref))
		if last := events[len(events)-1].Sealed; text(events) != "hello\nworoops\nld\n" || last == nil || last.Lines != 3 || last.Bytes != 17 || last.Gap || last.Truncated {
			t.Errorf("events %q, last %+v", text(events), last)
		}
	})
}
