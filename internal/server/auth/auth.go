package auth

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// Credential is what a route asks for.
type Credential string

// Credentials. A route takes exactly one.
const (
	None         Credential = "none"
	Registration Credential = "registration"
	Runner       Credential = "runner"
	Person       Credential = "person" // a token or a browser session
	Admin        Credential = "admin"  // a Person who may act on the fleet
)

// cacheFor is how long a looked-up credential is trusted: revocation takes
// effect within it.
const cacheFor = 2 * time.Second

// Auth looks credentials up by the hash of their text. It is safe for
// concurrent use.
type Auth struct {
	store *store.Store
	log   *slog.Logger
	now   func() time.Time
	key   []byte // signs browser sessions

	mu    sync.Mutex
	cache map[string]cached
}

type cached struct {
	cred store.Credential
	ok   bool
	at   time.Time
}

// New prepares auth over an open store. key signs browser sessions; nodes share it.
func New(s *store.Store, key []byte, log *slog.Logger, now func() time.Time) *Auth {
	return &Auth{store: s, log: log, now: now, key: key, cache: map[string]cached{}}
}

// Hash is how a token is stored: SHA-256 of its text, hex.
func Hash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

func refused() error {
	return ci.Errorf(ci.ErrUnauthorized, "a valid credential is needed: Authorization: Bearer <token>")
}

// lookup finds a live credential of a token's text.
func (a *Auth) lookup(ctx context.Context, token string) (store.Credential, error) {
	if protocol.KindOfToken(token) == "" {
		return store.Credential{}, refused()
	}
	hash := Hash(token)
	now := a.now()
	a.mu.Lock()
	c, hit := a.cache[hash]
	a.mu.Unlock()
	if !hit || now.Sub(c.at) > cacheFor {
		err := a.store.Read(ctx, func(tx *store.Tx) (err error) {
			c.cred, c.ok, err = tx.CredentialByHash(ctx, hash)
			return err
		})
		if err != nil {
			return store.Credential{}, err
		}
		c.at = now
		a.mu.Lock()
		if len(a.cache) > 10_000 {
			clear(a.cache)
		}
		a.cache[hash] = c
		a.mu.Unlock()
	}
	if !c.ok || c.cred.RevokedUS > 0 || c.cred.ExpiresUS > 0 && c.cred.ExpiresUS <= now.UnixMicro() {
		return store.Credential{}, refused()
	}
	return c.cred, nil
}

// Forget drops what is remembered of credentials, after one was revoked here.
func (a *Auth) Forget() {
	a.mu.Lock()
	clear(a.cache)
	a.mu.Unlock()
}

func bearer(r *http.Request) (string, bool) {
	scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", false
	}
	return token, true
}

// RunnerOf proves which runner asks.
func (a *Auth) RunnerOf(r *http.Request) (engine.Identity, error) {
	c, err := a.ofKind(r, "runner")
	return engine.Identity{Runner: c.Runner, Org: c.Org}, err
}

// RegistrationOf proves that the caller may register runners of an organisation
// and answers the labels that such runners are granted. The only registration
// token so far is the bootstrap token of a loopback installation: it grants
// whatever a runner declares ("*").
func (a *Auth) RegistrationOf(r *http.Request) (org ci.OrgID, actor string, granted []string, err error) {
	c, err := a.ofKind(r, "registration")
	if err != nil {
		return "", "", nil, err
	}
	return c.Org, c.Actor, []string{"*"}, nil
}

func (a *Auth) ofKind(r *http.Request, kind string) (store.Credential, error) {
	token, ok := bearer(r)
	if !ok {
		return store.Credential{}, refused()
	}
	c, err := a.lookup(r.Context(), token)
	if err != nil {
		return store.Credential{}, err
	}
	if c.Kind != kind {
		return store.Credential{}, ci.Errorf(ci.ErrForbidden, "this needs a %s credential, not one of kind %s", kind, c.Kind)
	}
	return c, nil
}

// sessionCookies are the names under which a browser's session may come: with
// the __Host- prefix over HTTPS, without it on loopback.
func sessionCookies() []string { return []string{"__Host-forgeci", "forgeci"} }

// ViewerOf proves which person asks: by a bearer token or, for browsers, by the
// session cookie, which only reads. admin asks for more than reading and running.
func (a *Auth) ViewerOf(r *http.Request, admin bool) (Viewer, error) {
	v, err := a.viewerOf(r)
	if err == nil && admin && !v.Admin {
		return Viewer{}, ci.Errorf(ci.ErrForbidden, "this needs an admin credential")
	}
	return v, err
}

func (a *Auth) viewerOf(r *http.Request) (Viewer, error) {
	if token, ok := bearer(r); ok {
		c, err := a.lookup(r.Context(), token)
		if err != nil {
			return Viewer{}, err
		}
		if c.Kind != "admin" {
			return Viewer{}, ci.Errorf(ci.ErrForbidden, "this needs a person's credential, not one of kind %s", c.Kind)
		}
		return viewer(c), nil
	}
	for _, name := range sessionCookies() {
		if c, err := r.Cookie(name); err == nil {
			// A browser sends its cookie with what any page makes it ask: it reads with
			// it, and changes something by the pages' own forms.
			if r.Method != http.MethodGet && r.Method != http.MethodHead {
				return Viewer{}, ci.Errorf(ci.ErrForbidden, "a browser session only reads here: send Authorization: Bearer <token>")
			}
			return a.Viewer(r.Context(), c.Value)
		}
	}
	return Viewer{}, refused()
}

func viewer(c store.Credential) Viewer {
	return Viewer{Org: c.Org, Actor: c.Actor, Admin: c.Kind == "admin"}
}

// sessionFor is how long a browser stays signed in at most.
const sessionFor = 7 * 24 * time.Hour

// session is the content of a browser's cookie: it names a credential, so that
// revoking that ends the session too.
type session struct {
	Hash    string `json:"h"`
	Expires int64  `json:"e"` // Unix seconds
}

// SignIn answers a signed session for a person's token.
func (a *Auth) SignIn(ctx context.Context, token string) (value string, expires time.Time, err error) {
	c, err := a.lookup(ctx, strings.TrimSpace(token))
	if err != nil {
		return "", time.Time{}, err
	}
	if c.Kind != "admin" {
		return "", time.Time{}, refused()
	}
	expires = a.now().Add(sessionFor)
	b, err := json.Marshal(session{Hash: Hash(strings.TrimSpace(token)), Expires: expires.Unix()})
	if err != nil {
		return "", time.Time{}, err
	}
	body := base64.RawURLEncoding.EncodeToString(b)
	return body + "." + a.sign(body), expires, nil
}

func (a *Auth) sign(body string) string {
	m := hmac.New(sha256.New, a.key)
	m.Write([]byte("session\n" + body))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// Viewer answers who holds a session value.
func (a *Auth) Viewer(ctx context.Context, value string) (Viewer, error) {
	expired := ci.Errorf(ci.ErrUnauthorized, "the session has ended: sign in again")
	body, sig, ok := strings.Cut(value, ".")
	if !ok || !hmac.Equal([]byte(sig), []byte(a.sign(body))) {
		return Viewer{}, expired
	}
	b, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		return Viewer{}, expired
	}
	var s session
	if err := json.Unmarshal(b, &s); err != nil || a.now().Unix() >= s.Expires {
		return Viewer{}, expired
	}
	c, err := a.byHash(ctx, s.Hash)
	if err != nil {
		if errors.Is(err, ci.ErrUnauthorized) {
			return Viewer{}, expired
		}
		return Viewer{}, err
	}
	return viewer(c), nil
}

func (a *Auth) byHash(ctx context.Context, hash string) (store.Credential, error) {
	var c store.Credential
	var ok bool
	err := a.store.Read(ctx, func(tx *store.Tx) (err error) {
		c, ok, err = tx.CredentialByHash(ctx, hash)
		return err
	})
	if err != nil {
		return c, err
	}
	if !ok || c.Kind != "admin" || c.RevokedUS > 0 || c.ExpiresUS > 0 && c.ExpiresUS <= a.now().UnixMicro() {
		return c, refused()
	}
	return c, nil
}
