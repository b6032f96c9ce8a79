package web

import (
	"bytes"
	"compress/gzip"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/web/ansi"
)

// policy is the content security policy of every page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// Headers sets the headers that every answer of the pages has: the content
// security policy and what keeps a browser from guessing, framing and leaking.
// The server may wrap routes of its own in it as well.
func (s *Site) Headers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
		h.Set("Cache-Control", "no-store")
		if s.cfg.Secure {
			h.Set("Strict-Transport-Security", "max-age=31536000; includeSubDomains")
		}
		next.ServeHTTP(w, r)
	})
}

// request is one request for a page: who asks, and where the answer goes.
type request struct {
	*http.Request
	site   *Site
	w      http.ResponseWriter
	viewer auth.Viewer
}

// view is what every template gets: the frame of the page and its own data.
type view struct {
	Title string
	// Section marks the place in the navigation.
	Section string
	Theme   string
	Viewer  auth.Viewer
	// SignedIn is false on the pages that need no session.
	SignedIn bool
	Version  string
	Path     string // of this page, for forms that come back to it
	// Events is the address of the page's event stream, empty for none.
	Events string
	// Now is the server's time, for a browser whose clock is another.
	Now time.Time
	// Script and Style name the page's own assets beside the common ones.
	Script, Style string
	Data          any
}

// page makes a handler of a function that needs a session.
func (s *Site) page(f func(*request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := &request{Request: r, site: s, w: w}
		v, err := s.viewer(r)
		if err != nil {
			if ci.KindOf(err) == ci.ErrUnauthorized && r.Method == http.MethodGet && !q.fragment() {
				http.Redirect(w, r, "/signin?next="+url.QueryEscape(r.URL.RequestURI()), http.StatusSeeOther)
				return
			}
			q.fail(err)
			return
		}
		q.viewer = v
		if err := f(q); err != nil {
			q.fail(err)
		}
	})
}

// open makes a handler of a function that needs no session.
func (s *Site) open(f func(*request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := &request{Request: r, site: s, w: w}
		if err := f(q); err != nil {
			q.fail(err)
		}
	})
}

// nothing answers what is at no address, and what a page is not there for: a page
// with the site's frame, for whoever asks.
func (s *Site) nothing(q *request) error {
	if v, err := s.viewer(q.Request); err == nil {
		q.viewer = v
	}
	if methods := protocol.Methods(s.mux, q.Request); len(methods) > 0 {
		q.w.Header().Set("Allow", strings.Join(methods, ", "))
		return ci.Errorf(ci.ErrMethod, "%s is answered to %s, not to %s.", cut(q.URL.Path, 200), strings.Join(methods, " and "), cut(q.Method, 20))
	}
	return ci.Errorf(ci.ErrNotFound, "There is no page at %s. It may have moved, or its address is not written right.", cut(q.URL.Path, 200))
}

// fragment reports whether only the part of the page that changes is wanted.
func (q *request) fragment() bool { return q.URL.Query().Get("fragment") == "1" }

// server returns the address under which this server is reached.
func (q *request) server() string {
	switch {
	case q.site.cfg.URL != "":
		return q.site.cfg.URL
	case q.site.cfg.Secure:
		return "https://" + q.Host
	default:
		return "http://" + q.Host
	}
}

// number reads a whole number ≥ 0 from the query; what is absent or is none is 0.
func (q *request) number(name string) int64 {
	n, err := strconv.ParseInt(q.URL.Query().Get(name), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// show renders a page, or only its main part when a fragment is wanted.
func (q *request) show(status int, name string, v view) error {
	v.Theme = themeOf(q.Request)
	v.Viewer = q.viewer
	v.Now = q.site.cfg.Now()
	v.SignedIn = q.viewer.Actor != ""
	v.Version = q.site.cfg.Version
	v.Path = localPath(q.URL.RequestURI())
	var b bytes.Buffer
	if err := q.site.pages.render(&b, name, q.fragment(), v, v.Now); err != nil {
		return err
	}
	// The one place that all text of a page passes: what would change the
	// direction of text or hide some is named instead, wherever it came from.
	body := ansi.Visible(b.String())
	h := q.w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Add("Vary", "Accept-Encoding, Cookie")
	if len(body) < 1024 || !strings.Contains(q.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Length", strconv.Itoa(len(body)))
		q.w.WriteHeader(status)
		_, _ = q.w.Write([]byte(body)) // the browser may have left; there is no second answer
		return nil
	}
	h.Set("Content-Encoding", "gzip")
	q.w.WriteHeader(status)
	z, err := gzip.NewWriterLevel(q.w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	_, _ = z.Write([]byte(body))
	_ = z.Close()
	return nil
}

// back redirects after a form to a page of this site.
func (q *request) back(path string) error {
	http.Redirect(q.w, q.Request, path, http.StatusSeeOther)
	return nil
}

// localPath returns p when it is a path of this site, else "/".
func localPath(p string) string {
	u, err := url.Parse(p)
	if err != nil || u.Scheme != "" || u.Host != "" || !strings.HasPrefix(p, "/") || strings.HasPrefix(p, "//") ||
		strings.ContainsAny(p, "\\\r\n\t") || len(p) > 2048 {
		return "/"
	}
	return p
}

// failure is what the error page shows.
type failure struct {
	Status int
	Title  string
	Detail string
	Fields []string
}

// fail shows an error: the detail of a *ci.Error, a fixed text for anything else.
func (q *request) fail(err error) {
	f := describe(err)
	if f.Status >= http.StatusInternalServerError {
		q.site.cfg.Log.ErrorContext(q.Context(), "page", "method", q.Method, "path", q.URL.Path, "error", err)
	}
	var e *ci.Error
	if errors.As(err, &e) && e.RetryAfter > 0 {
		q.w.Header().Set("Retry-After", strconv.Itoa(int((e.RetryAfter+999_999_999)/1_000_000_000)))
	}
	if err := q.show(f.Status, "error", view{Title: f.Title, Data: f}); err != nil {
		q.site.cfg.Log.ErrorContext(q.Context(), "error page", "path", q.URL.Path, "error", err)
		http.Error(q.w, f.Title, f.Status)
	}
}

func describe(err error) failure {
	f := failure{
		Status: http.StatusInternalServerError, Title: "Something went wrong",
		Detail: "This is a defect of the server. Its log has the cause; nothing you entered was lost without being told.",
	}
	var e *ci.Error
	if !errors.As(err, &e) {
		return f
	}
	known := true
	switch e.Kind {
	case ci.ErrInvalid, ci.ErrUnsafe, ci.ErrDigest, ci.ErrIncompatible:
		f.Status, f.Title = http.StatusBadRequest, "This request cannot be taken"
	case ci.ErrUnauthorized:
		f.Status, f.Title = http.StatusUnauthorized, "Not signed in"
	case ci.ErrForbidden:
		f.Status, f.Title = http.StatusForbidden, "Not allowed"
	case ci.ErrNotFound:
		f.Status, f.Title = http.StatusNotFound, "Not found"
	case ci.ErrMethod:
		f.Status, f.Title = http.StatusMethodNotAllowed, "Not this way"
	case ci.ErrConflict, ci.ErrLeaseLost, ci.ErrRunEnded:
		f.Status, f.Title = http.StatusConflict, "That is not possible now"
	case ci.ErrGone:
		f.Status, f.Title = http.StatusGone, "No longer kept"
	case ci.ErrTooLarge:
		f.Status, f.Title = http.StatusRequestEntityTooLarge, "Too large"
	case ci.ErrRateLimited:
		f.Status, f.Title = http.StatusTooManyRequests, "Too many requests"
	case ci.ErrUnavailable:
		f.Status, f.Title = http.StatusServiceUnavailable, "A part of the server is away"
	default:
		known = false
	}
	if known {
		f.Detail = e.Detail
		for _, x := range e.Fields {
			f.Fields = append(f.Fields, x.String())
		}
	}
	return f
}
