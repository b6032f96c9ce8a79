package fs

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

// claim is what a signed URL allows: one operation on one object or part.
type claim struct {
	op      string
	key     string
	upload  string
	part    int
	size    int64
	sum     [32]byte
	expires int64 // seconds since 1970
}

// Operations of a claim.
const (
	opPart = "part" // PUT one part of an upload
	opGet  = "get"  // GET an object
)

// signed returns the bytes that are signed. Each field stands behind its
// length, so that different claims never give the same bytes.
func (c claim) signed() []byte {
	var b []byte
	text := func(s string) {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	text("forgeci blob url 1")
	text(c.op)
	text(c.key)
	text(c.upload)
	b = binary.BigEndian.AppendUint64(b, uint64(c.part))
	b = binary.BigEndian.AppendUint64(b, uint64(c.size))
	b = append(b, c.sum[:]...)
	return binary.BigEndian.AppendUint64(b, uint64(c.expires))
}

func (c claim) mac(key []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write(c.signed())
	return m.Sum(nil)
}

// query returns the claim as the query of a URL, with the signature.
func (c claim) query(mac []byte) string {
	return url.Values{
		"expires": {strconv.FormatInt(c.expires, 10)},
		"key":     {c.key},
		"mac":     {base64.RawURLEncoding.EncodeToString(mac)},
		"op":      {c.op},
		"part":    {strconv.Itoa(c.part)},
		"sha256":  {hex.EncodeToString(c.sum[:])},
		"size":    {strconv.FormatInt(c.size, 10)},
		"upload":  {c.upload},
	}.Encode()
}

// parseClaim reads a query. Only the text that query returns is accepted, so
// that one claim has one URL.
func parseClaim(raw string) (c claim, mac []byte, ok bool) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return claim{}, nil, false
	}
	c.op, c.key, c.upload = values.Get("op"), values.Get("key"), values.Get("upload")
	var errs [4]error
	var sum []byte
	c.part, errs[0] = strconv.Atoi(values.Get("part"))
	c.size, errs[1] = strconv.ParseInt(values.Get("size"), 10, 64)
	c.expires, errs[2] = strconv.ParseInt(values.Get("expires"), 10, 64)
	sum, errs[3] = hex.DecodeString(values.Get("sha256"))
	mac, err = base64.RawURLEncoding.DecodeString(values.Get("mac"))
	if errs != [4]error{} || err != nil || len(sum) != len(c.sum) {
		return claim{}, nil, false
	}
	copy(c.sum[:], sum)
	if c.query(mac) != raw {
		return claim{}, nil, false
	}
	return c, mac, true
}

func (s *Store) sign(c claim) string { return s.prefix + "?" + c.query(c.mac(s.key)) }

// authorise returns what the query of a signed URL allows, if its signature
// holds and it has not expired.
func (s *Store) authorise(raw string) (claim, error) {
	c, mac, ok := parseClaim(raw)
	if !ok || !hmac.Equal(mac, c.mac(s.key)) {
		return claim{}, ci.Errorf(ci.ErrForbidden, "this URL is not one that the server has signed")
	}
	if s.now().Unix() >= c.expires {
		return claim{}, ci.Errorf(ci.ErrForbidden, "this URL has expired; ask for a new one")
	}
	return c, nil
}

// GetURL implements blob.Store.
func (s *Store) GetURL(_ context.Context, key string, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.SignedRequest{}, err
	}
	if expires <= 0 || expires > blob.MaxURLLife {
		return blob.SignedRequest{}, ci.Errorf(ci.ErrInvalid, "a signed URL lives between 1 s and %s, not %s", blob.MaxURLLife, expires)
	}
	return blob.SignedRequest{Method: "GET", URL: s.sign(claim{op: opGet, key: key, expires: s.now().Add(expires).Unix()})}, nil
}

// Handler serves the signed URLs of the store at Options.PathPrefix, which it
// sees in the request (no http.StripPrefix): GET (whole
// or by Range) and HEAD of an object, PUT of a part. A request needs no other
// credential and reaches nothing but what its URL names. fail writes errors
// (*ci.Error: ErrForbidden for a URL that is altered, foreign or expired,
// ErrInvalid for a length other than the signed one, and those of blob.Store);
// nil means plain text.
func (s *Store) Handler(fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	if fail == nil {
		fail = plainError
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.serve(w, r); err != nil {
			fail(w, r, err)
		}
	})
}

func (s *Store) serve(w http.ResponseWriter, r *http.Request) error {
	if r.URL.EscapedPath() != s.prefix {
		return ci.Errorf(ci.ErrNotFound, "no such route")
	}
	c, err := s.authorise(r.URL.RawQuery)
	if err != nil {
		return err
	}
	switch {
	case c.op == opPart && r.Method == http.MethodPut:
		if r.ContentLength != c.size {
			return ci.Errorf(ci.ErrInvalid, "the request has %d bytes, the URL is for %d", r.ContentLength, c.size)
		}
		if err := s.putPart(r.Context(), c, http.MaxBytesReader(w, r.Body, c.size)); err != nil {
			return err
		}
		w.Header().Set("ETag", etag(c.sum))
		w.WriteHeader(http.StatusOK)
		return nil
	case c.op == opGet && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		return s.serveObject(w, r, c.key)
	}
	return ci.Errorf(ci.ErrForbidden, "this URL is not for %s", r.Method)
}

func (s *Store) serveObject(w http.ResponseWriter, r *http.Request, key string) error {
	content, err := s.Open(r.Context(), key, 0, -1)
	if err != nil {
		return err
	}
	defer content.Close()
	h := w.Header()
	// What a job has made never runs in a browser.
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", "attachment")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	h.Set("Cache-Control", "private, no-store")
	http.ServeContent(w, r, "", time.Time{}, content.(*objectReader))
	return nil
}

// plainError writes an error as text.
func plainError(w http.ResponseWriter, _ *http.Request, err error) {
	status := map[ci.Kind]int{
		ci.ErrForbidden: http.StatusForbidden, ci.ErrNotFound: http.StatusNotFound, ci.ErrConflict: http.StatusConflict,
		ci.ErrInvalid: http.StatusBadRequest, ci.ErrDigest: http.StatusBadRequest, ci.ErrTooLarge: http.StatusRequestEntityTooLarge,
		ci.ErrUnavailable: http.StatusServiceUnavailable,
	}[ci.KindOf(err)]
	if status == 0 {
		status = http.StatusInternalServerError
	}
	http.Error(w, strings.ReplaceAll(string(ci.KindOf(err)), "_", " "), status)
}
