package api

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/protocol"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/store"
)

// rotten is a store that gives back other bytes than it was given.
type rotten struct{ blob.Store }

func (r rotten) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	in, err := r.Store.Open(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	b, err := io.ReadAll(in)
	return io.NopCloser(bytes.NewReader(bytes.ToUpper(b))), err
}

// Who follows a log that cannot be followed is told why, with a status or, when the
// stream has begun, by its last event, and does not come back again and again.
func TestALogThatCannotBeFollowedSaysWhy(t *testing.T) {
	t.Parallel()
	bothDatabases(t, func(t *testing.T, s *stage) {
		if status, b := s.send(s.tokens["a"], matrixRows(s)[protocol.RouteAppendLog](s.lease)); status != 200 {
			t.Fatalf("append: %d %s", status, b)
		}
		_, path := protocol.Endpoint(protocol.RouteJobLogEvents, string(s.lease.Job))
		check := func(what, query string, want int, has string) {
			t.Helper()
			if status, b := s.send(s.admin, matrixRequest{method: "GET", path: path + query}); status != want || !strings.Contains(string(b), has) {
				t.Errorf("%s: %d %s, want %d with %q", what, status, b, want, has)
			}
		}
		check("a malformed cursor", "?after=junk", 422, `"urn:forgeci:error:invalid"`)

		living := s.api.Logs
		s.api.Logs = logs.New(logs.Config{Store: s.store, Blob: rotten{s.api.Blob}, Log: s.api.Log})
		check("a damaged piece", "", 200, "event: problem\ndata: {\"type\":\"urn:forgeci:error:digest\"")
		s.api.Logs = living

		s.end("a", s.lease, nil)
		key := store.AttemptKey{Job: s.lease.Job, Epoch: s.lease.Epoch}
		living.Ended(key)
		for until := time.Now().Add(20 * time.Second); ; <-time.After(2 * time.Millisecond) {
			var l store.Log
			s.must(s.store.Read(s.ctx, func(tx *store.Tx) (err error) {
				l, _, err = tx.Log(s.ctx, s.org, key)
				return err
			}))
			if l.State == store.LogSealed {
				break
			}
			if time.Now().After(until) {
				t.Fatalf("the log is %s", l.State)
			}
		}
		s.must(s.store.Write(s.ctx, func(tx *store.Tx) error {
			_, err := tx.ExpireLogs(s.ctx, s.now.Load()+1, 10)
			return err
		}))
		check("an expired log", "", 410, `"urn:forgeci:error:gone"`)
		check("an expired log behind a cursor", "?after=1-1", 410, `"urn:forgeci:error:gone"`)
	})
}
