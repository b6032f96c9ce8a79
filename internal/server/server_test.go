package server_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server"
)

func TestAServerStartsWithNothingAndStops(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := server.New(t.Context(), server.Config{DataDir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	stop := start(t, s)
	admin, registration := s.Tokens()
	for _, path := range []string{admin, registration} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v, want a file of mode 0600", path, info, err)
		}
	}
	token, err := os.ReadFile(admin)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/openapi.json": 200, "/metrics": 200, "/v1/workflow-runs": 401, "/v1/nothing": 404} {
		if got := get(t, s.URL()+path, ""); got != want {
			t.Errorf("GET %s: %d, want %d", path, got, want)
		}
	}
	if got := get(t, s.URL()+"/v1/workflow-runs", strings.TrimSpace(string(token))); got != 200 {
		t.Errorf("with the admin token: %d, want 200", got)
	}
	stop()
}

// start runs a server; stop ends it and waits until it has ended.
func start(t *testing.T, s *server.Server) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-s.Started()
	return func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the server did not stop")
		}
	}
}

func get(t *testing.T, url, token string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func TestASecondServerLeavesTheDataDirectoryAlone(t *testing.T) {
	t.Parallel()
	cfg := server.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)}
	first, err := server.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.New(t.Context(), cfg); !errors.Is(err, ci.ErrConflict) || !strings.Contains(err.Error(), "in use by another server") {
		t.Errorf("the second server: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := server.New(t.Context(), cfg)
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	_ = again.Close()
}
