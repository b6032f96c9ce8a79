// Package blobtest is the suite that every blob.Store passes.
package blobtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

// Subject is a fresh, empty store under test and what is known of it.
type Subject struct {
	Store blob.Store
	// BaseURL stands before signed URLs that are relative.
	BaseURL string
	// Pass lets d pass on the clock by which URLs expire.
	Pass func(d time.Duration)
	// VerifiesWhole says that Seal of several parts reads them all; otherwise
	// their own sums are verified and the whole is left to the consumer
	// (docs/decisions/0004-artifact-content-identity.md).
	VerifiesWhole bool
}

// Run runs the suite; make returns a subject for one test.
func Run(t *testing.T, make func(t *testing.T) Subject) {
	for name, test := range map[string]func(*testing.T, Subject){
		"object comes back":          objectComesBack,
		"ranges":                     ranges,
		"missing objects":            missingObjects,
		"wrong content":              wrongContent,
		"same key again":             sameKeyAgain,
		"one winner":                 oneWinner,
		"list":                       list,
		"delete":                     deleted,
		"bad keys":                   badKeys,
		"get url":                    getURL,
		"multipart":                  multipart,
		"multipart of one part":      onePart,
		"part limits":                partLimits,
		"tampered part":              tamperedPart,
		"other bytes for a part":     otherBytes,
		"resume":                     resume,
		"sealed twice":               sealedTwice,
		"seal refuses":               sealRefuses,
		"wrong whole":                wrongWhole,
		"sealed is final":            sealedIsFinal,
		"abort":                      abort,
		"altered url":                alteredURL,
		"expired url":                expiredURL,
		"upload onto another object": uploadOntoAnother,
		"cancelled":                  cancelled,
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			test(t, make(t))
		})
	}
}

// Bytes returns n bytes that do not compress, different for each seed.
func Bytes(n int, seed string) []byte {
	out := make([]byte, 0, n+32)
	sum := sha256.Sum256([]byte(seed))
	for len(out) < n {
		out = append(out, sum[:]...)
		sum = sha256.Sum256(sum[:])
	}
	return out[:n]
}

func put(t *testing.T, s blob.Store, key string, data []byte) {
	t.Helper()
	if err := s.PutNew(t.Context(), key, bytes.NewReader(data), int64(len(data)), sha256.Sum256(data)); err != nil {
		t.Fatalf("PutNew %s: %v", key, err)
	}
}

func read(t *testing.T, s blob.Store, key string, offset, length int64) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), key, offset, length)
	if err != nil {
		t.Fatalf("Open %s from %d: %v", key, offset, err)
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read %s: %v", key, err)
	}
	return data
}

func holds(t *testing.T, s blob.Store, key string, want []byte) {
	t.Helper()
	if got := read(t, s, key, 0, -1); !bytes.Equal(got, want) {
		t.Errorf("%s holds %d other bytes, want %d", key, len(got), len(want))
	}
}

func absent(t *testing.T, s blob.Store, key string) {
	t.Helper()
	if _, err := s.Stat(t.Context(), key); !errors.Is(err, ci.ErrNotFound) {
		t.Errorf("Stat %s: error %v, want ErrNotFound", key, err)
	}
	if r, err := s.Open(t.Context(), key, 0, -1); !errors.Is(err, ci.ErrNotFound) {
		if err == nil {
			_ = r.Close()
		}
		t.Errorf("Open %s: error %v, want ErrNotFound", key, err)
	}
	infos, err := s.List(t.Context(), "", "", 1000)
	if err != nil {
		t.Errorf("List: %v", err)
	}
	for _, i := range infos {
		if i.Key == key {
			t.Errorf("List shows %s", key)
		}
	}
}

func wantKind(t *testing.T, what string, err error, kinds ...ci.Kind) {
	t.Helper()
	for _, k := range kinds {
		if errors.Is(err, k) {
			return
		}
	}
	t.Errorf("%s: error %v, want one of %v", what, err, kinds)
}

func objectComesBack(t *testing.T, s Subject) {
	for _, n := range []int{0, 1, 1000, 64 << 10, 9<<20 + 1} {
		data := Bytes(n, "object")
		key := "org_1/src/" + strings.Repeat("k", 1+n%7)
		put(t, s.Store, key, data)
		holds(t, s.Store, key, data)
		info, err := s.Store.Stat(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if info.Key != key || info.Size != int64(n) || info.SHA256 != sha256.Sum256(data) {
			t.Errorf("Stat says %+v", info)
		}
		if age := time.Since(info.Modified); age < -time.Minute || age > time.Hour {
			t.Errorf("Stat says it is %s old", age)
		}
		// A reader that cannot seek, and that hands out little at a time.
		key += "-slow"
		slow := io.MultiReader(bytes.NewReader(data[:n/2]), struct{ io.Reader }{bytes.NewReader(data[n/2:])})
		if err := s.Store.PutNew(t.Context(), key, slow, int64(n), sha256.Sum256(data)); err != nil {
			t.Fatal(err)
		}
		holds(t, s.Store, key, data)
		for _, k := range []string{key, strings.TrimSuffix(key, "-slow")} {
			if err := s.Store.Delete(t.Context(), k); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func ranges(t *testing.T, s Subject) {
	data := Bytes(1000, "ranges")
	put(t, s.Store, "r/x", data)
	for _, c := range []struct{ offset, length, end int64 }{
		{0, -1, 1000},
		{0, 1000, 1000},
		{0, 1, 1},
		{0, 0, 0},
		{1, 10, 11},
		{999, 1, 1000},
		{999, -1, 1000},
		{999, 5, 1000},
		{1000, -1, 1000},
		{1000, 7, 1000},
		{500, 5000, 1000},
		{500, 0, 500},
	} {
		if got := read(t, s.Store, "r/x", c.offset, c.length); !bytes.Equal(got, data[c.offset:c.end]) {
			t.Errorf("Open(%d, %d) gives %d bytes, want those up to %d", c.offset, c.length, len(got), c.end)
		}
	}
	for _, offset := range []int64{1001, 1 << 40, -1} {
		r, err := s.Store.Open(t.Context(), "r/x", offset, -1)
		wantKind(t, "Open past the end", err, ci.ErrInvalid)
		if err == nil {
			_ = r.Close()
		}
	}
	put(t, s.Store, "r/empty", nil)
	if got := read(t, s.Store, "r/empty", 0, -1); len(got) != 0 {
		t.Errorf("an empty object gives %d bytes", len(got))
	}
	_, err := s.Store.Open(t.Context(), "r/empty", 1, -1)
	wantKind(t, "Open past the end of nothing", err, ci.ErrInvalid)
}

func missingObjects(t *testing.T, s Subject) {
	absent(t, s.Store, "no/such")
	_, err := s.Store.Open(t.Context(), "no/such", 10, 10)
	wantKind(t, "Open", err, ci.ErrNotFound)
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

func wrongContent(t *testing.T, s Subject) {
	for _, n := range []int{100, 9 << 20} {
		data := Bytes(n, "wrong")
		other := Bytes(n, "other")
		sum := sha256.Sum256(data)
		broken := errors.New("connection lost")
		for what, c := range map[string]struct {
			r    io.Reader
			size int64
			kind ci.Kind
		}{
			"other bytes":  {bytes.NewReader(other), int64(n), ci.ErrDigest},
			"too few":      {bytes.NewReader(data[:n-1]), int64(n), ci.ErrDigest},
			"none":         {bytes.NewReader(nil), int64(n), ci.ErrDigest},
			"too many":     {io.MultiReader(bytes.NewReader(data), strings.NewReader("x")), int64(n), ci.ErrDigest},
			"smaller size": {bytes.NewReader(data), int64(n - 1), ci.ErrDigest},
			"reader fails": {io.MultiReader(bytes.NewReader(data[:n/2]), failingReader{broken}), int64(n), ci.ErrUnavailable},
		} {
			err := s.Store.PutNew(t.Context(), "w/x", c.r, c.size, sum)
			wantKind(t, what, err, c.kind)
			if what == "reader fails" && !errors.Is(err, broken) {
				t.Errorf("reader fails: error %v does not wrap the cause", err)
			}
			absent(t, s.Store, "w/x")
		}
		put(t, s.Store, "w/x", data)
		holds(t, s.Store, "w/x", data)
		if err := s.Store.Delete(t.Context(), "w/x"); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, "negative size", s.Store.PutNew(t.Context(), "w/y", bytes.NewReader(nil), -1, sha256.Sum256(nil)), ci.ErrInvalid)
}

func sameKeyAgain(t *testing.T, s Subject) {
	for _, n := range []int{50, 9 << 20} {
		data, other := Bytes(n, "first"), Bytes(n, "second")
		key := "same/" + strings.Repeat("x", 1+n%5)
		put(t, s.Store, key, data)
		put(t, s.Store, key, data)
		err := s.Store.PutNew(t.Context(), key, bytes.NewReader(other), int64(n), sha256.Sum256(other))
		wantKind(t, "other content", err, ci.ErrConflict)
		err = s.Store.PutNew(t.Context(), key, bytes.NewReader(other[:n/2]), int64(n/2), sha256.Sum256(other[:n/2]))
		wantKind(t, "other size", err, ci.ErrConflict)
		holds(t, s.Store, key, data)
	}
}

func oneWinner(t *testing.T, s Subject) {
	for _, n := range []int{40, 6 << 20} {
		key := "race/" + strings.Repeat("x", 1+n%5)
		kinds := [][]byte{Bytes(n, "a"), Bytes(n, "b"), Bytes(n, "c")}
		const each = 4
		results := make([][]error, len(kinds))
		type answer struct {
			kind int
			err  error
		}
		answers := make(chan answer)
		for k, data := range kinds {
			for range each {
				go func() {
					answers <- answer{k, s.Store.PutNew(t.Context(), key, bytes.NewReader(data), int64(n), sha256.Sum256(data))}
				}()
			}
		}
		for range len(kinds) * each {
			a := <-answers
			results[a.kind] = append(results[a.kind], a.err)
		}
		won := -1
		for k, rs := range results {
			for _, err := range rs {
				switch {
				case err == nil && won >= 0 && won != k:
					t.Errorf("%d bytes: contents %d and %d were both stored", n, won, k)
				case err == nil:
					won = k
				case !errors.Is(err, ci.ErrConflict):
					t.Errorf("%d bytes: error %v, want ErrConflict", n, err)
				}
			}
		}
		if won < 0 {
			t.Fatalf("%d bytes: nobody won", n)
		}
		for _, err := range results[won] {
			if err != nil {
				t.Errorf("%d bytes: the winner's content was refused: %v", n, err)
			}
		}
		holds(t, s.Store, key, kinds[won])
	}
}

func list(t *testing.T, s Subject) {
	keys := []string{
		"l/A", "l/a-b", "l/a.b", "l/a/b", "l/a/c/d", "l/a/c/e", "l/a0", "l/ab", "l/b/1", "l/b/10", "l/b/2", "m",
	}
	for i := range keys {
		put(t, s.Store, keys[(i*5)%len(keys)], Bytes(i, "list"))
	}
	page := func(prefix, after string, limit int) []string {
		t.Helper()
		infos, err := s.Store.List(t.Context(), prefix, after, limit)
		if err != nil {
			t.Fatal(err)
		}
		got := []string{}
		for _, i := range infos {
			got = append(got, i.Key)
		}
		return got
	}
	for _, prefix := range []string{"", "l", "l/", "l/a", "l/a/", "l/a/c", "l/b/1", "m", "none", "l/b/"} {
		for _, after := range append([]string{"", "l/a/", "l/a/b/x", "zz", "l/a/c", "l/b", "k"}, keys...) {
			want := []string{}
			for _, k := range keys {
				if strings.HasPrefix(k, prefix) && k > after {
					want = append(want, k)
				}
			}
			if got := page(prefix, after, 100); strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("List(%q, %q) = %q, want %q", prefix, after, got, want)
			}
		}
		for _, limit := range []int{1, 2, 5} {
			var got []string
			for after := ""; ; {
				p := page(prefix, after, limit)
				if len(p) == 0 {
					break
				}
				if len(p) > limit {
					t.Fatalf("a page of %d has %d", limit, len(p))
				}
				got, after = append(got, p...), p[len(p)-1]
			}
			if want := page(prefix, "", 100); strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("pages of %d below %q: %q, want %q", limit, prefix, got, want)
			}
		}
	}
	infos, err := s.Store.List(t.Context(), "l/a/c/", "", 10)
	if err != nil || len(infos) != 2 || infos[0].Size != int64(indexOf(keys, "l/a/c/d")) {
		t.Errorf("List = %+v, %v; want the sizes of the objects", infos, err)
	}
}

// indexOf returns which i of the loop above stored key.
func indexOf(keys []string, key string) int {
	for i := range keys {
		if keys[(i*5)%len(keys)] == key {
			return i
		}
	}
	return -1
}

func deleted(t *testing.T, s Subject) {
	data := Bytes(10, "delete")
	put(t, s.Store, "d/sub/x", data)
	put(t, s.Store, "d/sub/y", data)
	for range 2 {
		if err := s.Store.Delete(t.Context(), "d/sub/x"); err != nil {
			t.Fatal(err)
		}
		absent(t, s.Store, "d/sub/x")
	}
	if err := s.Store.Delete(t.Context(), "never/was"); err != nil {
		t.Errorf("Delete of nothing: %v", err)
	}
	holds(t, s.Store, "d/sub/y", data)
	if err := s.Store.Delete(t.Context(), "d/sub/y"); err != nil {
		t.Fatal(err)
	}
	put(t, s.Store, "d/sub/z", data)
	holds(t, s.Store, "d/sub/z", data)
}

func badKeys(t *testing.T, s Subject) {
	for _, key := range []string{
		"", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "a/./b", "a b", "a\x00b", "a\nb", "a\\b", "a~", "é", "a?b", "a%2e", "a:b", "*",
		strings.Repeat("k", 201), strings.Repeat("k/", 460) + "k",
	} {
		_, errOpen := s.Store.Open(t.Context(), key, 0, -1)
		_, errStat := s.Store.Stat(t.Context(), key)
		_, errNew := s.Store.NewUpload(t.Context(), key, 1, sha256.Sum256([]byte("x")))
		_, errGet := s.Store.GetURL(t.Context(), key, time.Minute)
		for what, err := range map[string]error{
			"PutNew":    s.Store.PutNew(t.Context(), key, strings.NewReader("x"), 1, sha256.Sum256([]byte("x"))),
			"Delete":    s.Store.Delete(t.Context(), key),
			"Open":      errOpen,
			"Stat":      errStat,
			"NewUpload": errNew,
			"GetURL":    errGet,
		} {
			if !errors.Is(err, ci.ErrInvalid) {
				t.Errorf("%s of key %q: error %v, want ErrInvalid", what, key, err)
			}
		}
	}
}

func cancelled(t *testing.T, s Subject) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	data := Bytes(1000, "cancel")
	if err := s.Store.PutNew(ctx, "c/x", bytes.NewReader(data), 1000, sha256.Sum256(data)); err == nil {
		t.Error("PutNew with a cancelled context succeeded")
	}
	absent(t, s.Store, "c/x")
}

// send makes a signed request and returns its status and body.
func send(t *testing.T, s Subject, req blob.SignedRequest, body []byte, change func(*http.Request)) (int, []byte) {
	t.Helper()
	url := req.URL
	if strings.HasPrefix(url, "/") {
		url = s.BaseURL + url
	}
	r, err := http.NewRequestWithContext(t.Context(), req.Method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range req.Header {
		r.Header.Set(k, v)
	}
	if change != nil {
		change(r)
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		// A server may refuse and close before it has read the body.
		return 0, nil
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, got
}

func getURL(t *testing.T, s Subject) {
	data := Bytes(3000, "get")
	put(t, s.Store, "g/x", data)
	req, err := s.Store.GetURL(t.Context(), "g/x", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if status, got := send(t, s, req, nil, nil); status != http.StatusOK || !bytes.Equal(got, data) {
		t.Errorf("status %d and %d bytes, want 200 and the object", status, len(got))
	}
	status, got := send(t, s, req, nil, func(r *http.Request) { r.Header.Set("Range", "bytes=1000-1999") })
	if status != http.StatusPartialContent || !bytes.Equal(got, data[1000:2000]) {
		t.Errorf("range: status %d and %d bytes", status, len(got))
	}
	for _, method := range []string{"PUT", "DELETE", "POST"} {
		if status, _ := send(t, s, req, []byte("x"), func(r *http.Request) { r.Method = method }); status/100 == 2 {
			t.Errorf("%s by a URL for GET: status %d", method, status)
		}
	}
	holds(t, s.Store, "g/x", data)
	for _, d := range []time.Duration{0, -time.Second, blob.MaxURLLife + time.Second} {
		_, err := s.Store.GetURL(t.Context(), "g/x", d)
		wantKind(t, "life "+d.String(), err, ci.ErrInvalid)
	}
}
