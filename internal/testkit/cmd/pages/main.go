// Command pages shows every page of the site with sample data, without a server
// behind it.
//
//	pages [-listen 127.0.0.1:8301]   serve them; the address lists them all
//	pages -write DIR                 write them as files, to compare or to keep
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"html"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"forgeci/internal/server/web/storybook"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8301", "address to serve the pages on")
	dir := flag.String("write", "", "write the pages into this directory instead")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *dir != "" {
		err = storybook.Write(ctx, *dir)
	} else {
		err = serve(ctx, *listen)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pages:", err)
		os.Exit(1)
	}
}

// serve gives each page a book of its own, below a prefix of its name.
func serve(ctx context.Context, address string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	fmt.Printf("http://%s/\n", l.Addr())
	s := &http.Server{Handler: handler(slog.New(slog.NewTextHandler(os.Stderr, nil))), ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = s.Close() })
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// handler serves the sample site, signed in, and the list of what is worth a look
// at /storybook. Pages whose data is another are chosen there.
func handler(log *slog.Logger) http.Handler {
	pages := storybook.Pages()
	sites := make(map[string]http.Handler, len(pages))
	for _, p := range pages {
		sites[p.Name] = storybook.New(p.Data(), storybook.Now).Handler(log, "storybook")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" && r.URL.RawQuery == "" && site(r) == "" {
			list(w, pages)
			return
		}
		for _, p := range pages {
			if r.URL.Path == "/storybook/"+p.Name {
				http.SetCookie(w, &http.Cookie{Name: "storybook", Value: p.Name, Path: "/"})
				http.Redirect(w, r, p.Path, http.StatusSeeOther)
				return
			}
		}
		if r.URL.Path == "/storybook" {
			list(w, pages)
			return
		}
		for _, p := range pages {
			if p.Name == site(r) && !p.Anonymous {
				r.AddCookie(&http.Cookie{Name: "forgeci", Value: storybook.Session})
			}
		}
		h := sites[site(r)]
		if h == nil {
			h = sites[pages[0].Name]
		}
		h.ServeHTTP(w, r)
	})
}

// site is the page that was chosen last.
func site(r *http.Request) string {
	c, err := r.Cookie("storybook")
	if err != nil {
		return ""
	}
	return c.Value
}

func list(w http.ResponseWriter, pages []storybook.Page) {
	var b strings.Builder
	b.WriteString("<!doctype html><html lang=en><meta charset=utf-8><title>Pages</title><h1>Pages with sample data</h1><ul>")
	for _, p := range pages {
		fmt.Fprintf(&b, `<li><a href="/storybook/%s">%s</a> %s`, p.Name, p.Name, html.EscapeString(p.Path))
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(b.String())) // the browser may have left
}
