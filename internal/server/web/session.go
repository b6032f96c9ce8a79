package web

import (
	"net/http"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/auth"
)

// Names of cookies. The first is for HTTPS: a browser takes it only with
// Secure, for the whole host, and from that host.
const (
	cookieSecure = "__Host-forgeci"
	cookiePlain  = "forgeci"
	cookieTheme  = "forgeci_theme"
)

func (s *Site) cookieName() string {
	if s.cfg.Secure {
		return cookieSecure
	}
	return cookiePlain
}

// SessionOf returns the session value that a request carries, or "". The API
// accepts it beside a bearer token, for the requests that the pages' own
// modules make.
func (s *Site) SessionOf(r *http.Request) string {
	c, err := r.Cookie(s.cookieName())
	if err != nil {
		return ""
	}
	return c.Value
}

func (s *Site) viewer(r *http.Request) (auth.Viewer, error) {
	value := s.SessionOf(r)
	if value == "" {
		return auth.Viewer{}, ci.Errorf(ci.ErrUnauthorized, "Sign in to see this page.")
	}
	return s.cfg.Auth.Viewer(r.Context(), value)
}

// setCookie sets a cookie for the whole site that scripts cannot read. Lax lets
// a link from elsewhere open a page; requests that change something are held
// off by http.CrossOriginProtection as well.
func (q *request) setCookie(name, value string, expires time.Time) {
	http.SetCookie(q.w, &http.Cookie{
		Name: name, Value: value, Path: "/", Expires: expires,
		Secure: q.site.cfg.Secure, HttpOnly: true, SameSite: http.SameSiteLaxMode,
	})
}

// signInPage is the data of the page that takes a token.
type signInPage struct {
	Next  string
	Wrong string // what to tell about the last try
}

func (s *Site) signInForm(q *request) error {
	return q.show(http.StatusOK, "signin", view{Title: "Sign in", Data: signInPage{Next: localPath(q.URL.Query().Get("next"))}})
}

// maxForm bounds the body of a form.
const maxForm = 64 << 10

func (q *request) form(name string) string {
	q.Body = http.MaxBytesReader(q.w, q.Body, maxForm)
	return q.PostFormValue(name)
}

func (s *Site) signIn(q *request) error {
	next := localPath(q.form("next"))
	session, err := s.cfg.Auth.SignIn(q.Context(), q.form("token"))
	if err != nil {
		if k := ci.KindOf(err); k == ci.ErrUnauthorized || k == ci.ErrForbidden {
			wrong := describe(err).Detail
			return q.show(http.StatusUnauthorized, "signin", view{Title: "Sign in", Data: signInPage{Next: next, Wrong: wrong}})
		}
		return err
	}
	q.setCookie(s.cookieName(), session.Value, session.Expires)
	return q.back(next)
}

func (s *Site) signOut(q *request) error {
	if value := s.SessionOf(q.Request); value != "" {
		if err := s.cfg.Auth.SignOut(q.Context(), value); err != nil {
			return err
		}
	}
	q.setCookie(s.cookieName(), "", time.Unix(1, 0))
	return q.back("/signin")
}

// themeOf returns the theme that the visitor chose: light, dark, or "" for the
// system's.
func themeOf(r *http.Request) string {
	c, err := r.Cookie(cookieTheme)
	if err != nil || c.Value != "light" && c.Value != "dark" {
		return ""
	}
	return c.Value
}

func (s *Site) theme(q *request) error {
	next := localPath(q.form("next"))
	switch t := q.form("theme"); t {
	case "light", "dark":
		q.setCookie(cookieTheme, t, s.cfg.Now().AddDate(1, 0, 0))
	default:
		q.setCookie(cookieTheme, "", time.Unix(1, 0))
	}
	return q.back(next)
}
