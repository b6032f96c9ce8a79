package protocol

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"forgeci/internal/ci"
)

// Names of SSE events.
const (
	EventRun     = "run"     // RunSummary
	EventLog     = "log"     // LogEvent
	EventSealed  = "sealed"  // LogSealedEvent
	EventProblem = "problem" // Problem: why the stream ends, for good
)

// maxEvent bounds one SSE event: the base64 of a chunk and its frame.
const maxEvent = 4 << 20

// Event is one server-sent event.
type Event struct {
	// ID is the last ID that the stream has set, also by an earlier event.
	ID   string
	Name string
	Data []byte
}

// ReadEvents reads a text/event-stream. It yields whole events only: an event
// that the end of the stream cuts is dropped. A clean end ends the sequence, any
// other error is yielded last.
func ReadEvents(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		br := bufio.NewReaderSize(r, 64<<10)
		var ev Event
		var data []byte
		hasData := false
		for {
			line, err := readLine(br, maxEvent-len(data))
			if err != nil {
				if !errors.Is(err, io.EOF) {
					yield(Event{}, err)
				}
				return
			}
			if len(line) == 0 {
				if hasData {
					out := Event{ID: ev.ID, Name: ev.Name, Data: data[:len(data)-1]}
					if !yield(out, nil) {
						return
					}
				}
				ev.Name, data, hasData = "", nil, false
				continue
			}
			field, value, _ := bytes.Cut(line, []byte(":"))
			value = bytes.TrimPrefix(value, []byte(" "))
			switch string(field) {
			case "event":
				ev.Name = string(value)
			case "data":
				data = append(append(data, value...), '\n')
				hasData = true
			case "id":
				if !bytes.ContainsRune(value, 0) {
					ev.ID = string(value)
				}
			}
		}
	}
}

// readLine returns a line without its LF or CRLF. A line that the end cuts is io.EOF.
func readLine(br *bufio.Reader, limit int) ([]byte, error) {
	var long []byte
	for {
		part, err := br.ReadSlice('\n')
		if len(long)+len(part) > limit {
			return nil, ci.Errorf(ci.ErrTooLarge, "an event of more than %d MiB", maxEvent>>20)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			long = append(long, part...)
			continue
		case err != nil:
			return nil, err
		case long != nil:
			part = append(long, part...)
		}
		part = part[:len(part)-1]
		return bytes.TrimSuffix(part, []byte("\r")), nil
	}
}

// Follow says how a stream of events outlives lost connections.
type Follow struct {
	// GiveUp ends the call when no server has answered with a stream for so long; 0
	// means 2 minutes. A stream need not say anything yet.
	GiveUp time.Duration
	// Lost is told when a connection is lost and after which pause the next is
	// tried; it may be nil.
	Lost func(err error, pause time.Duration)
}

const (
	firstPause    = 200 * time.Millisecond
	longestPause  = 3 * time.Second
	defaultGiveUp = 2 * time.Minute
)

// follow reads events until yield says done, returns an error, ctx ends, the
// server refuses, at once or by a last event, or no server answers for f.GiveUp. A lost connection is opened
// again behind the last event that was read.
func (c *Client) follow(
	ctx context.Context, rq call, after string, f Follow, yield func(Event) (done bool, err error),
) error {
	giveUp := f.GiveUp
	if giveUp == 0 {
		giveUp = defaultGiveUp
	}
	pause, heard := firstPause, time.Now()
	for {
		answered, fresh, done, err := c.followOnce(ctx, rq, &after, yield)
		if done || (err != nil && !again(err)) {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if fresh {
			pause = firstPause
		}
		if err == nil {
			err = ci.Errorf(ci.ErrUnavailable, "the connection to %s ended", c.base.Host)
		}
		switch {
		case answered:
			heard = time.Now()
		case time.Since(heard) > giveUp:
			return err
		}
		wait := pause/2 + rand.N(pause)
		if f.Lost != nil {
			f.Lost(err, wait)
		}
		if sleep(ctx, wait) != nil {
			return context.Cause(ctx)
		}
		pause = min(2*pause, longestPause)
	}
}

// again reports whether a lost stream may be opened once more.
func again(err error) bool {
	return errors.Is(err, ci.ErrUnavailable) || errors.Is(err, ci.ErrRateLimited)
}

// followOnce reads one connection; answered reports whether there was a stream,
// fresh whether an event came.
func (c *Client) followOnce(
	ctx context.Context, rq call, after *string, yield func(Event) (bool, error),
) (answered, fresh, done bool, err error) {
	rq.header = http.Header{"Accept": {MediaEvents}, "Cache-Control": {"no-cache"}}
	if *after != "" {
		rq.header.Set("Last-Event-ID", *after)
	}
	resp, err := c.stream(ctx, rq, nil, 0)
	if err != nil {
		return false, false, false, err
	}
	defer resp.Body.Close()
	for ev, err := range ReadEvents(resp.Body) {
		if err != nil {
			return true, fresh, false, err
		}
		fresh = true
		if ev.Name == EventProblem {
			return true, fresh, true, problemIn(ev)
		}
		done, err := yield(ev)
		if done || err != nil {
			return true, fresh, true, err
		}
		*after = ev.ID
	}
	return true, fresh, false, nil
}

// RunEvents yields the run's summary at once and after each change until it says
// finished (nil), yield returns an error, or the stream cannot be had any more.
func (c *Client) RunEvents(ctx context.Context, id ci.RunID, f Follow, yield func(RunSummary) error) error {
	rq := call{route: RouteRunEvents, values: []string{string(id)}}
	return c.follow(ctx, rq, "", f, func(ev Event) (bool, error) {
		if ev.Name != EventRun {
			return false, nil
		}
		var run RunSummary
		if err := decodeEvent(ev, &run); err != nil {
			return true, err
		}
		err := yield(run)
		return run.State == ci.StateFinished, err
	})
}

// LogItem is one event of a log; exactly one of the pointers is set.
type LogItem struct {
	// Cursor resumes behind this event.
	Cursor string
	Log    *LogEvent
	Sealed *LogSealedEvent
}

// LogEvents yields a log from q.After on, in the server's order, until an
// attempt is sealed (nil), yield returns an error, or the stream cannot be had
// any more. Over lost connections and server restarts no byte is yielded twice
// and none is left out without the server's mark.
func (c *Client) LogEvents(ctx context.Context, id ci.JobID, q LogQuery, f Follow, yield func(LogItem) error) error {
	after := q.After
	q.After = ""
	rq := call{route: RouteJobLogEvents, values: []string{string(id)}, query: q.values()}
	type stream struct {
		epoch  int64
		step   int
		stream string
	}
	next := map[stream]int64{} // offset behind the last byte yielded
	return c.follow(ctx, rq, after, f, func(ev Event) (bool, error) {
		item := LogItem{Cursor: ev.ID}
		switch ev.Name {
		case EventLog:
			item.Log = &LogEvent{}
			if err := decodeEvent(ev, item.Log); err != nil {
				return true, err
			}
			key := stream{item.Log.Epoch, item.Log.Step, item.Log.Stream}
			if !item.Log.skipTo(next[key]) {
				return false, nil
			}
			next[key] = item.Log.Offset + item.Log.length()
		case EventSealed:
			item.Sealed = &LogSealedEvent{}
			if err := decodeEvent(ev, item.Sealed); err != nil {
				return true, err
			}
		default:
			return false, nil
		}
		err := yield(item)
		return item.Sealed != nil, err
	})
}

func (e *LogEvent) length() int64 { return int64(len(e.Data)) + e.Discarded + e.Lost }

// skipTo drops what lies before offset and reports whether anything is left.
func (e *LogEvent) skipTo(offset int64) bool {
	skip := offset - e.Offset
	switch {
	case skip <= 0:
		return true
	case skip >= e.length():
		return false
	case len(e.Data) > 0:
		e.Data = e.Data[skip:]
	case e.Discarded > 0:
		e.Discarded -= skip
	default:
		e.Lost -= skip
	}
	e.Offset = offset
	return true
}

// problemIn returns the error that a stream ended with.
func problemIn(ev Event) error {
	var p Problem
	if err := decodeEvent(ev, &p); err != nil {
		return err
	}
	if e := p.err(p.Status); e != nil {
		return e
	}
	return ci.Errorf(ci.ErrIncompatible, "the server ended the stream without an explanation")
}

func decodeEvent(ev Event, out any) error {
	if err := json.Unmarshal(ev.Data, out); err != nil {
		return ci.Errorf(ci.ErrIncompatible, "event %s of the server cannot be read", strconv.Quote(ev.Name)).WithCause(err)
	}
	return nil
}
