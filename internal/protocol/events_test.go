package protocol_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

func readAll(t testing.TB, s string) ([]protocol.Event, error) {
	t.Helper()
	var out []protocol.Event
	for ev, err := range protocol.ReadEvents(strings.NewReader(s)) {
		if err != nil {
			return out, err
		}
		out = append(out, ev)
	}
	return out, nil
}

func TestReadEvents(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, in string
		want     []string // id/name/data
	}{
		{"one", "id: 1\nevent: log\ndata: {}\n\n", []string{"1/log/{}"}},
		{"carriage returns", "id: 1\r\nevent: log\r\ndata: a\r\n\r\n", []string{"1/log/a"}},
		{"several data lines", "data: a\ndata:b\ndata:  c\n\n", []string{"//a\nb\n c"}},
		{"comments and unknown fields", ": hi\n\n:\nfoo: x\nretry: 9\ndata: a\n\n", []string{"//a"}},
		{"the id stays, the name does not", "id: 7\nevent: x\ndata: a\n\ndata: b\n\n", []string{"7/x/a", "7//b"}},
		{"an event without data is none", "id: 7\nevent: x\n\ndata: b\n\n", []string{"7//b"}},
		{"empty data is data", "data:\n\n", []string{"//"}},
		{"a cut event is dropped", "data: a\n\nid: 2\ndata: b\n", []string{"//a"}},
		{"a cut line is dropped", "data: a\n\ndata: b", []string{"//a"}},
		{"an id with NUL is ignored", "id: 1\ndata: a\n\nid: 2\x00\ndata: b\n\n", []string{"1//a", "1//b"}},
		{"longer than the buffer", "data: " + strings.Repeat("y", 200<<10) + "\n\n", []string{"//" + strings.Repeat("y", 200<<10)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			evs, err := readAll(t, tc.in)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range evs {
				got = append(got, e.ID+"/"+e.Name+"/"+string(e.Data))
			}
			if fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Errorf("got %.200q, want %.200q", got, tc.want)
			}
		})
	}
	for name, in := range map[string]string{
		"one endless line":   "data: " + strings.Repeat("z", 5<<20),
		"endless data lines": strings.Repeat("data: "+strings.Repeat("z", 1<<20)+"\n", 5),
	} {
		if _, err := readAll(t, in); !errors.Is(err, ci.ErrTooLarge) {
			t.Errorf("%s: got %v, want too_large", name, err)
		}
	}
}

func FuzzReadEvents(f *testing.F) {
	f.Add("id: 1\nevent: log\ndata: {}\n\n: c\r\ndata\n\n")
	f.Add("data:\n\n\n\nid\n\xff:\n")
	f.Fuzz(func(t *testing.T, in string) {
		evs, err := readAll(t, in)
		if err != nil {
			t.Fatalf("small input: %v", err)
		}
		for _, e := range evs {
			if strings.ContainsAny(e.Name+e.ID, "\n\x00") && !strings.Contains(in, "\x00") {
				t.Errorf("a field holds a line end: %+v", e)
			}
			if len(e.Data) > len(in) {
				t.Errorf("data longer than the input")
			}
		}
	})
}

func sse(t testing.TB, w http.ResponseWriter, id, name string, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(w, "id: %s\nevent: %s\ndata: %s\n\n", id, name, b)
}

// A follower of a log gets every byte once, through dropped connections, server
// errors, events sent twice and events that overlap.
func TestLogEvents_no_gap_no_duplicate(t *testing.T) {
	t.Parallel()
	const text = "abcdefghijklmnopqrstuvwxyz"
	chunk := func(from, to int) protocol.LogEvent {
		return protocol.LogEvent{Epoch: 1, Stream: "stdout", Offset: int64(from), Data: []byte(text[from:to])}
	}
	var calls atomic.Int32
	var cursors []string
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		n := calls.Add(1)
		cursors = append(cursors, r.Header.Get("Last-Event-ID"))
		switch n {
		case 1:
			sse(t, w, "c5", protocol.EventLog, chunk(0, 5))
			sse(t, w, "c9", protocol.EventLog, chunk(5, 9))
			fmt.Fprint(w, "id: c12\nevent: log\ndata: {\"epo") // cut in the middle
		case 2:
			protocol.WriteProblem(w, ci.Errorf(ci.ErrUnavailable, "restarting"), "")
		case 3:
			w.WriteHeader(http.StatusBadGateway)
		case 4:
			sse(t, w, "c9", protocol.EventLog, chunk(5, 9)) // again
			sse(t, w, "c14", protocol.EventLog, chunk(7, 14))
		case 5:
			sse(t, w, "c14", "unknown", map[string]int{})
			sse(t, w, "c20", protocol.EventLog, protocol.LogEvent{Epoch: 1, Stream: "stdout", Offset: 14, Lost: 6})
			sse(t, w, "c26", protocol.EventLog, chunk(18, 26))
			sse(t, w, "end", protocol.EventSealed, protocol.LogSealedEvent{Epoch: 1, Bytes: 26})
		default:
			t.Errorf("call %d: the follower did not end at sealed", n)
		}
	})
	var got bytes.Buffer
	var lost int64
	sealed := 0
	err := newClient(t, s.URL).LogEvents(t.Context(), "job_1", protocol.LogQuery{}, protocol.Follow{},
		func(it protocol.LogItem) error {
			switch {
			case it.Sealed != nil:
				sealed++
			case it.Log != nil:
				got.Write(it.Log.Data)
				lost += it.Log.Lost
			}
			return nil
		})
	if err != nil || sealed != 1 {
		t.Fatalf("got %v, sealed %d times", err, sealed)
	}
	if want := text[:14] + text[20:]; got.String() != want || lost != 6 {
		t.Errorf("got %q and %d lost, want %q and 6", got.String(), lost, want)
	}
	if want := []string{"", "c9", "c9", "c9", "c14"}; fmt.Sprint(cursors) != fmt.Sprint(want) {
		t.Errorf("resumed at %q, want %q", cursors, want)
	}
}

// What the server refuses ends the follower at once; what it cannot answer ends
// it after the bound, and the caller hears of each lost connection.
func TestFollow_ends(t *testing.T) {
	t.Parallel()
	for _, kind := range []ci.Kind{ci.ErrNotFound, ci.ErrForbidden, ci.ErrUnauthorized, ci.ErrGone} {
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			protocol.WriteProblem(w, ci.Errorf(kind, "no"), "")
		})
		err := newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{}, nil)
		if !errors.Is(err, kind) {
			t.Errorf("got %v, want %s", err, kind)
		}
	}
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	lost := 0
	err := newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{
		GiveUp: 300 * time.Millisecond,
		Lost:   func(error, time.Duration) { lost++ },
	}, nil)
	if !errors.Is(err, ci.ErrUnavailable) || lost == 0 {
		t.Errorf("got %v after %d notices", err, lost)
	}

	// Streams in which nothing happens are answers, too.
	quiet := 0
	s = serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if quiet++; quiet < 4 {
			fmt.Fprint(w, ": alive\n\n")
			return
		}
		sse(t, w, "1", protocol.EventRun, protocol.RunSummary{ID: "run_1", State: ci.StateFinished})
	})
	err = newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{GiveUp: 1}, func(protocol.RunSummary) error { return nil })
	if err != nil || quiet != 4 {
		t.Errorf("after %d streams: %v", quiet, err)
	}

	calls := 0
	s = serve(t, func(w http.ResponseWriter, _ *http.Request) {
		calls++
		sse(t, w, "1", protocol.EventRun, protocol.RunSummary{ID: "run_1", State: ci.StateRunning})
		sse(t, w, "", protocol.EventProblem, protocol.ProblemFrom(ci.Errorf(ci.ErrDigest, "damaged"), "req_1"))
	})
	err = newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{}, func(protocol.RunSummary) error { return nil })
	if !errors.Is(err, ci.ErrDigest) || err.Error() != "damaged" || calls != 1 {
		t.Errorf("got %v after %d calls, want the stream's last word", err, calls)
	}

	stop := errors.New("enough")
	s = serve(t, func(w http.ResponseWriter, _ *http.Request) {
		sse(t, w, "1", protocol.EventRun, protocol.RunSummary{ID: "run_1", State: ci.StateRunning})
	})
	err = newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{}, func(protocol.RunSummary) error { return stop })
	if !errors.Is(err, stop) {
		t.Errorf("got %v, want the yield's own error", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	err = newClient(t, s.URL).RunEvents(ctx, "run_1", protocol.Follow{}, func(protocol.RunSummary) error {
		cancel(stop)
		return nil
	})
	if !errors.Is(err, stop) {
		t.Errorf("got %v, want the context's cause", err)
	}
}

// The stream of a run ends with the event that says finished.
func TestRunEvents_ends_when_finished(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for i, state := range []ci.State{ci.StateWaiting, ci.StateRunning, ci.StateFinished} {
			sse(t, w, fmt.Sprint(i), protocol.EventRun, protocol.RunSummary{ID: "run_1", State: state})
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
		<-r.Context().Done()
	})
	var states []ci.State
	err := newClient(t, s.URL).RunEvents(t.Context(), "run_1", protocol.Follow{}, func(r protocol.RunSummary) error {
		states = append(states, r.State)
		return nil
	})
	if err != nil || fmt.Sprint(states) != "[waiting running finished]" {
		t.Errorf("got %v, %v", states, err)
	}
}
