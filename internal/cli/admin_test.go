package cli

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"testing"
)

func TestTheAdminListenerServesProfilesOnLoopbackOnly(t *testing.T) {
	t.Parallel()
	var told strings.Builder
	log := slog.New(slog.NewTextHandler(&told, nil))
	for _, bad := range []string{"0.0.0.0:0", ":6060", "example.com:1", "[::]:0", "127.0.0.1", "localhost:0"} {
		d := daemon{adminListen: bad}
		var e *exitError
		if _, err := d.admin(t.Context(), log); !errors.As(err, &e) {
			t.Errorf("--admin-listen %s: %v", bad, err)
		}
	}
	d := daemon{adminListen: "127.0.0.1:0"}
	stop, err := d.admin(t.Context(), log)
	if err != nil {
		t.Fatal(err)
	}
	get := func(url string) (int, error) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return 0, err
		}
		resp, err := new(http.Client).Do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, err
	}
	base := regexp.MustCompile(`http://127[^"]*/`).FindString(told.String())
	for path, want := range map[string]int{"": 200, "heap": 200, "profile?seconds=1": 200, "cmdline": 404, "../vars": 404} {
		if got, err := get(base + path); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", path, got, err, want)
		}
	}
	stop()
	if _, err := get(base); err == nil {
		t.Error("profiles are served after the end")
	}
	if stop, err := (&daemon{}).admin(t.Context(), log); err != nil {
		t.Errorf("without the flag: %v", err)
	} else {
		stop()
	}
}
