package main

import (
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"testing"

	"forgeci/internal/server/web/storybook"
)

// Every page of the list can be opened in a browser that follows the links.
func TestEveryListedPageOpens(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(handler(slog.New(slog.NewTextHandler(t.Output(), nil))))
	defer s.Close()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar}
	get := func(path string) (int, string) {
		r, err := client.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		return r.StatusCode, r.Request.URL.RequestURI()
	}
	if status, _ := get("/"); status != http.StatusOK {
		t.Errorf("the list: %d", status)
	}
	for _, p := range storybook.Pages() {
		want, err := p.Render(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if status, at := get("/storybook/" + p.Name); status != want.Status || at != p.Path {
			t.Errorf("%s: %d at %s, want %d at %s", p.Name, status, at, want.Status, p.Path)
		}
	}
}
