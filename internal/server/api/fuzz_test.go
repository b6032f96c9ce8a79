package api

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// FuzzBody sends hostile bodies to every route that takes a document, as the
// route's own caller, who holds a lease if it needs one. Nothing is a defect
// (500) or a panic, and what is not accepted changes nothing.
func FuzzBody(f *testing.F) {
	var s *stage
	house := &owner{dir: f.TempDir()}
	fresh := func(t testing.TB) {
		t.Helper()
		house.close()
		house.TB = t
		s = newStage(house, "sqlite:"+house.TempDir()+"/m.db", all)
	}
	f.Cleanup(house.close)
	fresh(f)
	var routes []Route
	for _, r := range s.api.Routes() {
		if r.In == nil {
			continue
		}
		routes = append(routes, r)
		body, err := json.Marshal(r.In)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(r.Pattern, body)
	}
	for pattern, row := range matrixRows(s) {
		if i := slices.IndexFunc(routes, func(r Route) bool { return r.Pattern == pattern }); i >= 0 {
			f.Add(pattern, row(s.lease).body)
		}
	}
	// What ends the caller's lease or session is followed by a new stage.
	ends := []string{
		protocol.RouteRegister, protocol.RouteOpenSession, protocol.RouteDrain, protocol.RouteComplete, protocol.RouteHandOver,
		protocol.RouteCancelRun, protocol.RouteDrainRunner, protocol.RouteFenceRunner,
	}
	used := false
	var before []string
	f.Fuzz(func(t *testing.T, pattern string, body []byte) {
		i := slices.IndexFunc(routes, func(r Route) bool { return r.Pattern == pattern })
		if i < 0 {
			return
		}
		if used {
			fresh(t)
			used, before = false, nil
		}
		s.t = t
		if before == nil {
			before = s.dump()
		}
		_, path, _ := strings.Cut(pattern, " ")
		status, _ := s.ask(routes[i], s.filled(path), body)
		switch {
		case status == http.StatusInternalServerError:
			t.Errorf("%s: a defect", pattern)
		case status < 300:
			used, before = slices.Contains(ends, pattern), nil
		default:
			if d := diff(before, s.dump()); d != "" {
				t.Errorf("%s: refused with %d, and changed:\n%s", pattern, status, d)
			}
		}
	})
}

// filled names objects of the caller in a path.
func (s *stage) filled(path string) string {
	var run store.Run
	s.must(s.store.Read(s.ctx, func(tx *store.Tx) (err error) {
		run, _, err = tx.Run(s.ctx, s.lease.Run)
		return err
	}))
	return strings.NewReplacer("{repo_id}", string(run.Repo), "{digest}", matrixDigest, "{run_id}", string(run.ID), "{job_id}", string(s.lease.Job),
		"{artifact_id}", s.artifact, "{runner_id}", string(s.ids["a"].Runner)).Replace(path)
}

// owner lets a stage outlive the input that made it.
type owner struct {
	testing.TB
	dir  string
	ends []func()
}

// Cleanup implements testing.TB.
func (o *owner) Cleanup(f func()) { o.ends = append(o.ends, f) }

// Context implements testing.TB.
func (o *owner) Context() context.Context { return context.Background() }

// Output implements testing.TB.
func (o *owner) Output() io.Writer { return io.Discard }

// TempDir implements testing.TB.
func (o *owner) TempDir() string {
	dir, err := os.MkdirTemp(o.dir, "")
	if err != nil {
		o.Fatal(err)
	}
	o.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (o *owner) close() {
	for _, end := range slices.Backward(o.ends) {
		end()
	}
	o.ends = nil
}
