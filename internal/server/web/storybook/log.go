package storybook

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/web"
)

// Log is the log of one attempt, in memory: either lines made on demand, or
// what Append has added so far. It is safe for concurrent use.
type Log struct {
	mu     sync.Mutex
	make   func(n int64) protocol.LogLine // when set, line n of a sealed log
	total  int64
	lines  []protocol.LogLine
	open   map[string]int // step and stream -> index of its line without an end
	offset map[string]int64
	events []protocol.LogEvent
	sealed bool
	grown  chan struct{} // closed and replaced whenever something is added
	// readers counts event streams.
	readers int
}

// Made returns a sealed log of total lines that f makes.
func Made(total int64, f func(n int64) protocol.LogLine) *Log {
	return &Log{make: f, total: total, sealed: true, grown: make(chan struct{})}
}

// Live returns an empty log to append to.
func Live() *Log {
	return &Log{open: map[string]int{}, offset: map[string]int64{}, grown: make(chan struct{})}
}

// Append adds bytes to a stream. Lost bytes are missing before them.
func (l *Log) Append(step int, stream protocol.Stream, data string, lost int64) *Log {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := fmt.Sprint(step, stream)
	line := func() *protocol.LogLine {
		i, ok := l.open[key]
		if !ok {
			l.lines = append(l.lines, protocol.LogLine{Number: int64(len(l.lines) + 1), Step: step, Stream: stream.String(), Open: true})
			i = len(l.lines) - 1
			l.open[key] = i
		}
		return &l.lines[i]
	}
	if lost > 0 {
		line().Lost += lost
		l.events = append(l.events, protocol.LogEvent{Epoch: 1, Step: step, Stream: stream.String(), Offset: l.offset[key], Lost: lost})
		l.offset[key] += lost
	}
	if data != "" {
		l.events = append(l.events, protocol.LogEvent{Epoch: 1, Step: step, Stream: stream.String(), Offset: l.offset[key], Data: []byte(data)})
		l.offset[key] += int64(len(data))
	}
	parts := strings.SplitAfter(data, "\n")
	for _, p := range parts {
		if p == "" {
			continue
		}
		at := line()
		text, ended := strings.CutSuffix(p, "\n")
		at.Text += strings.ToValidUTF8(text, "\ufffd")
		if ended {
			at.Open = false
			delete(l.open, key)
		}
	}
	l.total = int64(len(l.lines))
	l.wake()
	return l
}

// Seal ends the log.
func (l *Log) Seal() *Log {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.lines {
		l.lines[i].Open = false
	}
	l.sealed = true
	l.wake()
	return l
}

func (l *Log) wake() {
	close(l.grown)
	l.grown = make(chan struct{})
}

// Readers returns how many event streams are open.
func (l *Log) Readers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readers
}

func (l *Log) line(n int64) protocol.LogLine {
	if l.make == nil {
		return l.lines[n-1]
	}
	line := l.make(n)
	line.Number = n
	return line
}

// Lines answers a window as the API does.
func (l *Log) Lines(q web.LogQuery) protocol.LogSlice {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := protocol.LogSlice{Epoch: 1, Lines: []protocol.LogLine{}, Total: l.total, Sealed: l.sealed, First: max(q.From, 1)}
	if q.Tail > 0 {
		s.First = max(l.total-int64(q.Tail)+1, 1)
	}
	n := s.First
	for ; n <= l.total && len(s.Lines) < q.Limit; n++ {
		line := l.line(n)
		if (q.Query == "" || strings.Contains(line.Text, q.Query)) && (q.Step == nil || *q.Step == line.Step) {
			s.Lines = append(s.Lines, line)
		}
	}
	if n <= l.total {
		s.Next = n
	} else if !l.sealed {
		s.Cursor = strconv.Itoa(len(l.events))
	}
	return s
}

func (b *Book) log(w http.ResponseWriter, r *http.Request) *Log {
	b.mu.Lock()
	l := b.data.Logs[ci.JobID(r.PathValue("job_id"))]
	b.mu.Unlock()
	if l == nil {
		http.Error(w, "no log", http.StatusNotFound)
	}
	return l
}

func (b *Book) serveLines(w http.ResponseWriter, r *http.Request) {
	l := b.log(w, r)
	if l == nil {
		return
	}
	number := func(name string) int {
		n, _ := strconv.Atoi(r.URL.Query().Get(name)) // what is no number is 0
		return n
	}
	q := web.LogQuery{From: int64(number("from")), Tail: number("tail"), Limit: min(max(number("limit"), 1), 1000), Query: r.URL.Query().Get("q")}
	if r.URL.Query().Has("step") {
		step := number("step")
		q.Step = &step
	}
	w.Header().Set("Content-Type", protocol.MediaJSON)
	_ = json.NewEncoder(w).Encode(l.Lines(q)) // the browser may have left
}

func (b *Book) serveRaw(w http.ResponseWriter, r *http.Request) {
	l := b.log(w, r)
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	w.Header().Set("Content-Type", protocol.MediaBytes)
	for n := int64(1); n <= l.total; n++ {
		if _, err := w.Write([]byte(l.line(n).Text + "\n")); err != nil {
			return
		}
	}
}

func (b *Book) serveEvents(w http.ResponseWriter, r *http.Request) {
	l := b.log(w, r)
	if l == nil {
		return
	}
	at, _ := strconv.Atoi(r.URL.Query().Get("after")) // what is no cursor begins at the start
	if id, err := strconv.Atoi(r.Header.Get("Last-Event-ID")); err == nil {
		at = id
	}
	w.Header().Set("Content-Type", protocol.MediaEvents)
	out := http.NewResponseController(w)
	l.mu.Lock()
	l.readers++
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.readers--
		l.mu.Unlock()
	}()
	beat := time.NewTicker(5 * time.Second)
	defer beat.Stop()
	for {
		l.mu.Lock()
		events, sealed, grown, total := l.events[min(at, len(l.events)):], l.sealed, l.grown, l.total
		l.mu.Unlock()
		var text bytes.Buffer
		for _, e := range events {
			at++
			data, err := json.Marshal(e)
			if err != nil {
				return
			}
			fmt.Fprintf(&text, "id: %d\nevent: log\ndata: %s\n\n", at, data)
		}
		if sealed {
			fmt.Fprintf(&text, "event: sealed\ndata: {\"epoch\":1,\"lines\":%d}\n\n", total)
		}
		if _, err := w.Write(text.Bytes()); err != nil || out.Flush() != nil || sealed {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-grown:
		case <-beat.C:
			if _, err := w.Write([]byte(": beat\n\n")); err != nil {
				return
			}
		}
	}
}
