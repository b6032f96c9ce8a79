package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// WellFormed refuses, before anything reads them, addresses whose text no
// database can hold or compare, and bodies in an encoding that the server does
// not take (a small one could unfold into a huge one).
func WellFormed(r *http.Request) error {
	if !storable(r.URL.Path) {
		return ci.Errorf(ci.ErrInvalid, "the address holds a NUL or bytes that are not UTF-8")
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return ci.Errorf(ci.ErrInvalid, "the query of the address cannot be read: it is percent-encoded wrongly or has a semicolon")
	}
	for name, values := range query {
		for _, v := range append(values, name) {
			if !storable(v) {
				return ci.Errorf(ci.ErrInvalid, "?%s holds a NUL or bytes that are not UTF-8", clip(strconv.QuoteToASCII(name), 40))
			}
		}
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return ci.Errorf(ci.ErrInvalid, "Content-Encoding: %s is not accepted: send the body as it is", clip(e, 40))
	}
	return nil
}

// storable reports whether text can be kept and compared by every database.
func storable(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// errTooSlow is the answer to a body whose bytes do not come.
func errTooSlow() *ci.Error {
	return ci.Errorf(ci.ErrUnavailable, "the body came too slowly and was given up; nothing was stored: send it again")
}

// decode reads a JSON body. People get unknown fields as errors; a runner may be
// newer than the server and send fields that it does not know.
func decode[T any](w http.ResponseWriter, r *http.Request, strict bool) (v T, err error) {
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != protocol.MediaJSON {
		return v, ci.Errorf(ci.ErrInvalid, "Content-Type: %s is expected", protocol.MediaJSON)
	}
	b, err := readBody(w, r)
	if err != nil {
		return v, err
	}
	return decodeBytes[T](b, strict)
}

func decodeBytes[T any](b []byte, strict bool) (v T, err error) {
	if !utf8.Valid(b) {
		return v, ci.Errorf(ci.ErrInvalid, "the body is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if strict {
		d.DisallowUnknownFields()
	}
	if err := d.Decode(&v); err != nil {
		return v, jsonError(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return v, ci.Errorf(ci.ErrInvalid, "the body holds more than one JSON document")
	}
	// The text of a NUL is the only way in which one gets into a string.
	if strict || bytes.Contains(b, []byte(`\u0000`)) {
		err = inspect(json.NewDecoder(bytes.NewReader(b)), nil, strict)
	}
	return v, err
}

// inspect walks a document that has been decoded before, so that its depth is
// bounded, and refuses strings with a NUL, which a database cannot hold, and,
// when strict, keys that come twice, of which one would silently be ignored.
func inspect(d *json.Decoder, at []string, strict bool) error {
	wrong := func(at []string, detail string) error {
		return &ci.Error{
			Kind: ci.ErrInvalid, Detail: "the body has a field that cannot be accepted",
			Fields: []ci.FieldError{{Pointer: pointer(at), Detail: detail}},
		}
	}
	const nul = "holds a NUL (\\u0000): text cannot have one"
	t, err := d.Token()
	if err != nil {
		return jsonError(err)
	}
	switch v := t.(type) {
	case string:
		if strings.IndexByte(v, 0) >= 0 {
			return wrong(at, nul)
		}
	case json.Delim:
		seen := map[string]bool{}
		for i := 0; d.More(); i++ {
			key := strconv.Itoa(i)
			if v == '{' {
				t, err := d.Token()
				if err != nil {
					return jsonError(err)
				}
				key, _ = t.(string)
				switch {
				case strings.IndexByte(key, 0) >= 0:
					return wrong(at, "has a key that "+nul)
				case strict && seen[key]:
					return wrong(append(at, key), "is there twice")
				case strict:
					seen[key] = true
				}
			}
			if err := inspect(d, append(at, key), strict); err != nil {
				return err
			}
		}
		_, err = d.Token()
	}
	if err != nil {
		return jsonError(err)
	}
	return nil
}

// pointer renders a JSON pointer (RFC 6901), cut where it gets unreadable.
func pointer(at []string) string {
	var b strings.Builder
	for _, s := range at {
		b.WriteString("/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(s))
		if b.Len() > 300 {
			break
		}
	}
	return clip(b.String(), 300)
}

// jsonError names the place of a JSON error in words of JSON.
func jsonError(err error) error {
	const unknown = "json: unknown field "
	var typ *json.UnmarshalTypeError
	var syn *json.SyntaxError
	var at *time.ParseError
	var known *ci.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &typ):
		field := ci.FieldError{Detail: "a JSON " + clip(typ.Value, 60) + " cannot be read as " + jsonWord(typ.Type)}
		if typ.Field != "" {
			field.Pointer = pointer(strings.Split(typ.Field, "."))
		}
		return &ci.Error{Kind: ci.ErrInvalid, Detail: "the body has a value of the wrong type", Fields: []ci.FieldError{field}}
	case errors.As(err, &syn):
		return ci.Errorf(ci.ErrInvalid, "the body is not JSON: %v at byte %d", syn, syn.Offset)
	case errors.As(err, &at):
		return ci.Errorf(ci.ErrInvalid, "the body has the time %q: one like 2026-01-02T15:04:05Z is expected", clip(at.Value, 60))
	case errors.Is(err, io.EOF):
		return ci.Errorf(ci.ErrInvalid, "the body is empty: a JSON document is expected, {} at least")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return ci.Errorf(ci.ErrInvalid, "the body is cut: its JSON document does not end")
	case strings.HasPrefix(err.Error(), unknown):
		return ci.Errorf(ci.ErrInvalid, "the body has a field that is not known: %s", clip(strings.TrimPrefix(err.Error(), unknown), 100))
	default:
		return ci.Errorf(ci.ErrInvalid, "the body cannot be read as JSON: %s", clip(err.Error(), 200))
	}
}

// jsonWord says what JSON stands for a type.
func jsonWord(t reflect.Type) string {
	if t == nil {
		return "what is expected here"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return jsonWord(t.Elem())
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return "a string of base64"
		}
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	default:
		return "a whole number of at most " + strconv.Itoa(t.Bits()) + " bits"
	}
}
