package server_test

import (
	"context"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forgeci/internal/server"
)

// serve starts a server over a data directory and returns it with what stops it.
func serve(t *testing.T, dir string, change ...func(*server.Config)) (*server.Server, func()) {
	t.Helper()
	cfg := server.Config{DataDir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	for _, f := range change {
		f(&cfg)
	}
	s, err := server.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-s.Started()
	return s, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Deleting a token's file makes the token worthless from the next start on, and
// the sessions that were made of it; a token that is kept stays good.
func TestADeletedBootstrapTokenIsWorthNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, stop := serve(t, dir)
	file, _ := s.Tokens()
	read := func() string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	first := read()
	cookie := signIn(t, s, first)
	if got := withCookie(t, http.MethodGet, s.URL()+"/v1/workflow-runs", cookie); got != http.StatusOK {
		t.Errorf("a signed-in browser reads the API: %d", got)
	}
	stop()

	s, stop = serve(t, dir)
	if read() != first || get(t, s.URL()+"/v1/workflow-runs", first) != http.StatusOK {
		t.Error("a token that was kept is not good after a restart")
	}
	stop()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	s, stop = serve(t, dir)
	defer stop()
	second := read()
	if second == first || get(t, s.URL()+"/v1/workflow-runs", second) != http.StatusOK {
		t.Error("the new token is not good")
	}
	if got := get(t, s.URL()+"/v1/workflow-runs", first); got != http.StatusUnauthorized {
		t.Errorf("the deleted token: %d, want 401", got)
	}
	if got := withCookie(t, http.MethodGet, s.URL()+"/v1/workflow-runs", cookie); got != http.StatusUnauthorized {
		t.Errorf("a session of the deleted token: %d, want 401", got)
	}
}

// S61: a browser's session reads the API, for the log viewer, and changes
// nothing there, whatever the request looks like.
func TestCase_S61_ABrowserSessionChangesNothingInTheAPI(t *testing.T) {
	t.Parallel()
	s, stop := serve(t, t.TempDir())
	defer stop()
	file, _ := s.Tokens()
	token, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	cookie := signIn(t, s, strings.TrimSpace(string(token)))
	for _, path := range []string{
		"/v1/repos", "/v1/workflow-runs/run_0/cancel", "/v1/workflow-runs/run_0/retry", "/v1/runners/rnr_0/fence",
		"/v1/runners/rnr_0/drain", "/v1/deadletters/job_0/requeue",
	} {
		if got := withCookie(t, http.MethodPost, s.URL()+path, cookie); got != http.StatusForbidden {
			t.Errorf("POST %s with a cookie: %d, want 403", path, got)
		}
	}
}

func signIn(t *testing.T, s *server.Server, token string) *http.Cookie {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/signin", strings.NewReader(url.Values{"token": {token}}.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for _, c := range resp.Cookies() {
		if c.HttpOnly && c.Value != "" {
			return c
		}
	}
	t.Fatalf("no session: %s", resp.Status)
	return nil
}

func withCookie(t *testing.T, method, address string, c *http.Cookie) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.AddCookie(c)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode
}

// S28: what the data directory holds is its owner's alone, also in a directory
// that others may enter.
func TestCase_S28_NothingInTheDataDirectoryIsForOthers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	_, stop := serve(t, dir)
	defer stop()
	wantPrivate(t, dir)
}

// S28: a data directory that a runner's job user passes through lets it pass, and
// nothing of the server's is for it, also what a backup brought back with modes of
// its own.
func TestCase_S28_AJobUserOnlyPassesThroughTheDataDirectory(t *testing.T) {
	t.Parallel()
	passable := func(c *server.Config) { c.Passable = true }
	fresh := filepath.Join(t.TempDir(), "data")
	_, stop := serve(t, fresh, passable)
	wantPrivate(t, fresh)
	wantMode(t, fresh, 0o711)
	stop()

	used := filepath.Join(t.TempDir(), "data")
	_, stop = serve(t, used)
	wantMode(t, used, 0o700)
	stop()
	for name, mode := range map[string]fs.FileMode{"forgeci.db": 0o644, "server.key": 0o640, "admin.token": 0o604, "registration.token": 0o644, "blobs": 0o755} {
		if err := os.Chmod(filepath.Join(used, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	_, stop = serve(t, used, passable)
	defer stop()
	wantPrivate(t, used)
	wantMode(t, used, 0o711)
}

func wantMode(t *testing.T, name string, want fs.FileMode) {
	t.Helper()
	if fi, err := os.Stat(name); err != nil || fi.Mode().Perm() != want {
		t.Errorf("%s has mode %s, want %s (%v)", name, fi.Mode(), want, err)
	}
}

// wantPrivate demands that nothing in the directory of a server is for others.
func wantPrivate(t *testing.T, dir string) {
	t.Helper()
	found := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		found++
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %s", path, info.Mode())
		}
		if d.IsDir() {
			return fs.SkipDir // nobody else gets in
		}
		return nil
	})
	if err != nil || found < 6 {
		t.Errorf("%d entries, %v", found, err)
	}
}
