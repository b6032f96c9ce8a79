package web

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"forgeci/internal/ci"
)

// settle is how long hints are gathered before one is sent.
const settle = 150 * time.Millisecond

// events serves the page's one event stream: an event "change" for whatever
// changed, "beat" as a sign of life that the page's script can see. A new
// stream begins with a change, so a page that was away is right again at once.
func (s *Site) events(w http.ResponseWriter, r *http.Request) {
	q := &request{Request: r, site: s, w: w}
	v, err := s.viewer(r)
	if err != nil {
		q.fail(err)
		return
	}
	topic := Topic{
		Run:   ci.RunID(r.URL.Query().Get("run")),
		Job:   ci.JobID(r.URL.Query().Get("job")),
		Fleet: r.URL.Query().Get("fleet") == "1",
	}
	hints, err := s.cfg.Reader.Watch(r.Context(), v, topic)
	if err != nil {
		q.fail(err)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("X-Accel-Buffering", "no")
	h.Set("Cache-Control", "no-store")
	out := http.NewResponseController(w)
	send := func(text string) bool {
		// A viewer that does not read for two heartbeats is dropped; it comes back.
		deadline := time.Now().Add(2*s.cfg.Heartbeat + 10*time.Second)
		if err := out.SetWriteDeadline(deadline); err != nil {
			return false
		}
		if _, err := w.Write([]byte(text)); err != nil {
			return false
		}
		return out.Flush() == nil
	}
	if !send("retry: 1000\n: " + strconv.Itoa(int(s.cfg.Heartbeat/time.Second)) + " s\nevent: change\ndata: {}\n\n") {
		return
	}
	beat := time.NewTicker(s.cfg.Heartbeat)
	defer beat.Stop()
	var due <-chan time.Time
	var last Hint
	for {
		select {
		case <-r.Context().Done():
			return
		case hint, open := <-hints:
			if !open {
				return
			}
			last = hint
			if due == nil {
				due = time.After(settle)
			}
		case <-due:
			due = nil
			data, err := json.Marshal(last)
			if err != nil || !send("event: change\ndata: "+string(data)+"\n\n") {
				return
			}
		case <-beat.C:
			if _, err := s.viewer(r); err != nil || !send("event: beat\ndata: {}\n\n") {
				return // signed out or revoked meanwhile: the next request says so
			}
		}
	}
}
