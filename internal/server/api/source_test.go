package api

import (
	"bytes"
	"context"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forgeci/internal/protocol"
	"forgeci/internal/source"
)

// hangingUp is a body whose sender goes when all of it has been read.
type hangingUp struct {
	io.Reader
	hangUp func()
}

func (h *hangingUp) Read(p []byte) (int, error) {
	n, err := h.Reader.Read(p)
	if err == io.EOF {
		h.hangUp()
	}
	return n, err
}

// A snapshot that takes longer to verify and store than its sender waits is there
// when the sender comes back.
func TestASnapshotIsPublishedAlsoWhenItsSenderHasHungUp(t *testing.T) {
	t.Parallel()
	bothDatabases(t, func(t *testing.T, s *stage) {
		dir := t.TempDir()
		s.must(os.WriteFile(filepath.Join(dir, "x"), []byte("x"), 0o600))
		snap, err := source.Capture(s.ctx, dir, source.CaptureOptions{})
		s.must(err)
		defer func() { s.must(snap.Close()) }()
		var body bytes.Buffer
		_, err = snap.WriteTo(&body)
		s.must(err)

		_, path, _ := strings.Cut(protocol.RoutePutSnapshot, " ")
		path = strings.ReplaceAll(s.filled(path), matrixDigest, snap.Digest)
		ctx, hangUp := context.WithCancel(s.ctx)
		r := httptest.NewRequestWithContext(ctx, "PUT", path, &hangingUp{&body, hangUp})
		r.Header.Set("Authorization", "Bearer "+s.admin)
		r.Header.Set("Content-Type", protocol.MediaSnapshot)
		s.mux.ServeHTTP(httptest.NewRecorder(), r)

		if status, b := s.send(s.admin, matrixRequest{method: "GET", path: path}); status != 200 {
			t.Errorf("asked again: %d %s", status, b)
		}
	})
}
