package blobtest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

const mib = 1 << 20

// pieces cuts data into parts of size bytes.
func pieces(data []byte, size int) [][]byte {
	var out [][]byte
	for len(data) > size {
		out = append(out, data[:size])
		data = data[size:]
	}
	return append(out, data)
}

func open(t *testing.T, s Subject, key string, data []byte) blob.Upload {
	t.Helper()
	up, err := s.Store.NewUpload(t.Context(), key, int64(len(data)), sha256.Sum256(data))
	if err != nil {
		t.Fatal(err)
	}
	return up
}

func sign(t *testing.T, s Subject, up blob.Upload, n int, piece []byte) blob.SignedRequest {
	t.Helper()
	req, err := s.Store.PartURL(t.Context(), up, n, int64(len(piece)), sha256.Sum256(piece), time.Minute)
	if err != nil {
		t.Fatalf("PartURL %d: %v", n, err)
	}
	return req
}

// sendPart uploads a piece as part n.
func sendPart(t *testing.T, s Subject, up blob.Upload, n int, piece []byte) {
	t.Helper()
	if status, body := send(t, s, sign(t, s, up, n, piece), piece, nil); status != http.StatusOK {
		t.Fatalf("part %d: status %d: %s", n, status, body)
	}
}

// stored returns the parts that the store lists.
func stored(t *testing.T, s Subject, up blob.Upload) []blob.Part {
	t.Helper()
	parts, err := s.Store.Parts(t.Context(), up)
	if err != nil {
		t.Fatal(err)
	}
	return parts
}

func multipart(t *testing.T, s Subject) {
	data := Bytes(17*mib+5, "multipart")
	up := open(t, s, "up/x", data)
	absent(t, s.Store, "up/x")
	cut := pieces(data, 5*mib)
	// The last first, the others at once.
	sendPart(t, s, up, len(cut), cut[len(cut)-1])
	reqs := make([]blob.SignedRequest, len(cut))
	for i := range len(cut) - 1 {
		reqs[i] = sign(t, s, up, i+1, cut[i])
	}
	var wg sync.WaitGroup
	for i := range len(cut) - 1 {
		wg.Go(func() {
			if status, body := send(t, s, reqs[i], cut[i], nil); status != http.StatusOK {
				t.Errorf("part %d: status %d: %s", i+1, status, body)
			}
		})
	}
	wg.Wait()
	absent(t, s.Store, "up/x")
	parts := stored(t, s, up)
	if len(parts) != len(cut) {
		t.Fatalf("the store lists %d parts, want %d", len(parts), len(cut))
	}
	for i, p := range parts {
		if p.Number != i+1 || p.Size != int64(len(cut[i])) || p.SHA256 != sha256.Sum256(cut[i]) {
			t.Errorf("part %d is listed as %+v", i+1, p)
		}
	}
	if err := s.Store.Seal(t.Context(), up, parts); err != nil {
		t.Fatal(err)
	}
	holds(t, s.Store, "up/x", data)
	if got := read(t, s.Store, "up/x", 5*mib-1, 3); !bytes.Equal(got, data[5*mib-1:5*mib+2]) {
		t.Error("a range over the border of two parts gives other bytes")
	}
	info, err := s.Store.Stat(t.Context(), "up/x")
	if err != nil || info.Size != int64(len(data)) {
		t.Errorf("Stat: %+v, %v", info, err)
	}
	if info.SHA256 != [32]byte{} && info.SHA256 != sha256.Sum256(data) {
		t.Errorf("Stat knows a wrong SHA-256, %x", info.SHA256)
	}
	if ups, err := s.Store.Uploads(t.Context(), ""); err != nil || len(ups) != 0 {
		t.Errorf("uploads left: %v, %v", ups, err)
	}
}

func onePart(t *testing.T, s Subject) {
	for i, n := range []int{0, 1, 6 * mib} {
		data := Bytes(n, "one part")
		key := "one/" + strings.Repeat("x", 1+i)
		up := open(t, s, key, data)
		sendPart(t, s, up, 1, data)
		if err := s.Store.Seal(t.Context(), up, stored(t, s, up)); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		holds(t, s.Store, key, data)
		// The sum of a single part is the sum of the whole.
		other := Bytes(n+1, "one part")
		up, err := s.Store.NewUpload(t.Context(), key+"-wrong", int64(len(other)), sha256.Sum256(data))
		if err != nil {
			t.Fatal(err)
		}
		sendPart(t, s, up, 1, other)
		wantKind(t, "wrong whole", s.Store.Seal(t.Context(), up, stored(t, s, up)), ci.ErrDigest)
		absent(t, s.Store, key+"-wrong")
		if err := s.Store.Seal(t.Context(), up, []blob.Part{{Number: 1, Size: int64(len(other)), SHA256: sha256.Sum256(other)}}); err == nil {
			t.Error("the second try to seal a wrong whole succeeded")
		}
		absent(t, s.Store, key+"-wrong")
	}
}

func partLimits(t *testing.T, s Subject) {
	data := Bytes(6*mib, "limits")
	up := open(t, s, "lim/x", data)
	sum := sha256.Sum256(nil)
	for _, c := range []struct {
		n    int
		size int64
		life time.Duration
		kind ci.Kind
	}{
		{0, 1, time.Minute, ci.ErrTooLarge},
		{-1, 1, time.Minute, ci.ErrTooLarge},
		{blob.MaxParts + 1, 1, time.Minute, ci.ErrTooLarge},
		{1, 6*mib + 1, time.Minute, ci.ErrTooLarge},
		{1, -1, time.Minute, ci.ErrTooLarge},
		{1, blob.MaxPartSize + 1, time.Minute, ci.ErrTooLarge},
		{1, mib, blob.MaxURLLife + time.Second, ci.ErrInvalid},
		{1, mib, 0, ci.ErrInvalid},
	} {
		_, err := s.Store.PartURL(t.Context(), up, c.n, c.size, sum, c.life)
		wantKind(t, "PartURL", err, c.kind)
	}
	// A part below the minimum that is not the last does not become an object.
	sendPart(t, s, up, 1, data[:3*mib])
	sendPart(t, s, up, 2, data[3*mib:])
	wantKind(t, "Seal with a small first part", s.Store.Seal(t.Context(), up, stored(t, s, up)), ci.ErrTooLarge)
	absent(t, s.Store, "lim/x")
}

func tamperedPart(t *testing.T, s Subject) {
	data := Bytes(6*mib, "tampered")
	up := open(t, s, "tam/x", data)
	req := sign(t, s, up, 1, data)
	bad := slices.Clone(data)
	bad[len(bad)/2] ^= 1
	for what, body := range map[string][]byte{
		"one bit": bad, "shorter": data[:len(data)-1], "longer": append(slices.Clone(data), 0), "empty": nil,
	} {
		if status, _ := send(t, s, req, body, nil); status/100 == 2 {
			t.Errorf("%s: status %d", what, status)
		}
		if parts := stored(t, s, up); len(parts) != 0 {
			t.Errorf("%s: the store lists %+v", what, parts)
		}
	}
	// What the headers promise instead does not count.
	status, _ := send(t, s, req, bad, func(r *http.Request) {
		for k := range req.Header {
			r.Header.Del(k)
		}
	})
	if parts := stored(t, s, up); len(parts) != 0 {
		t.Errorf("without the signed headers: status %d and the store lists %+v", status, parts)
	}
	if status, body := send(t, s, req, data, nil); status != http.StatusOK {
		t.Errorf("the right bytes after wrong ones: status %d: %s", status, body)
	}
}

func otherBytes(t *testing.T, s Subject) {
	data, other := Bytes(6*mib, "these"), Bytes(6*mib, "those")
	up := open(t, s, "oth/x", data)
	late := sign(t, s, up, 1, other) // signed before anything is stored
	sendPart(t, s, up, 1, data)
	sendPart(t, s, up, 1, data) // repeating is fine
	if _, err := s.Store.PartURL(t.Context(), up, 1, int64(len(other)), sha256.Sum256(other), time.Minute); !errors.Is(err, ci.ErrConflict) {
		t.Errorf("PartURL for other bytes: error %v, want ErrConflict", err)
	}
	// A store may take the late one; then it is not what Seal is asked to seal.
	status, _ := send(t, s, late, other, nil)
	want := []blob.Part{{Number: 1, Size: int64(len(data)), SHA256: sha256.Sum256(data)}}
	if parts := stored(t, s, up); len(parts) == 1 {
		want[0].ETag = parts[0].ETag
	}
	err := s.Store.Seal(t.Context(), up, want)
	if status/100 == 2 {
		wantKind(t, "Seal after other bytes", err, ci.ErrConflict, ci.ErrDigest)
		absent(t, s.Store, "oth/x")
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	holds(t, s.Store, "oth/x", data)
}

func resume(t *testing.T, s Subject) {
	data := Bytes(11*mib, "resume")
	cut := pieces(data, 5*mib)
	up := open(t, s, "res/x", data)
	sendPart(t, s, up, 2, cut[1])
	// Nothing is known but what was persisted of the upload.
	again := blob.Upload{Key: up.Key, ID: up.ID, Size: up.Size, SHA256: up.SHA256, Opened: up.Opened}
	have := map[int]bool{}
	for _, p := range stored(t, s, again) {
		have[p.Number] = true
	}
	if len(have) != 1 || !have[2] {
		t.Fatalf("the store lists parts %v, want 2", have)
	}
	for i, piece := range cut {
		if !have[i+1] {
			sendPart(t, s, again, i+1, piece)
		}
	}
	if err := s.Store.Seal(t.Context(), again, stored(t, s, again)); err != nil {
		t.Fatal(err)
	}
	holds(t, s.Store, "res/x", data)
}

func sealedTwice(t *testing.T, s Subject) {
	for _, n := range []int{mib, 11 * mib} {
		data := Bytes(n, "twice")
		key := "two/" + strings.Repeat("x", n/mib)
		up := open(t, s, key, data)
		for i, piece := range pieces(data, 5*mib) {
			sendPart(t, s, up, i+1, piece)
		}
		parts := stored(t, s, up)
		// Two at once, then one more after the answers were lost.
		errs := make(chan error)
		for range 2 {
			go func() { errs <- s.Store.Seal(t.Context(), up, parts) }()
		}
		for range 2 {
			if err := <-errs; err != nil {
				t.Errorf("Seal at once: %v", err)
			}
		}
		if err := s.Store.Seal(t.Context(), up, parts); err != nil {
			t.Errorf("Seal again: %v", err)
		}
		holds(t, s.Store, key, data)
	}
}

func sealRefuses(t *testing.T, s Subject) {
	data := Bytes(11*mib, "refuses")
	cut := pieces(data, 5*mib)
	up := open(t, s, "ref/x", data)
	sendPart(t, s, up, 1, cut[0])
	sendPart(t, s, up, 3, cut[2])
	parts := []blob.Part{}
	for i, piece := range cut {
		parts = append(parts, blob.Part{Number: i + 1, Size: int64(len(piece)), SHA256: sha256.Sum256(piece)})
	}
	for _, p := range stored(t, s, up) {
		parts[p.Number-1].ETag = p.ETag
	}
	wantKind(t, "a part is missing", s.Store.Seal(t.Context(), up, parts), ci.ErrConflict)
	wantKind(t, "no parts", s.Store.Seal(t.Context(), up, nil), ci.ErrInvalid)
	wantKind(t, "a gap", s.Store.Seal(t.Context(), up, []blob.Part{parts[0], parts[2]}), ci.ErrInvalid)
	wantKind(t, "out of order", s.Store.Seal(t.Context(), up, []blob.Part{parts[1], parts[0], parts[2]}), ci.ErrInvalid)
	absent(t, s.Store, "ref/x")
	sendPart(t, s, up, 2, cut[1])
	foreign := up
	foreign.ID = strings.Repeat("0", len(up.ID))
	_, errParts := s.Store.Parts(t.Context(), foreign)
	_, errURL := s.Store.PartURL(t.Context(), foreign, 1, int64(len(cut[0])), parts[0].SHA256, time.Minute)
	wantKind(t, "Parts of an upload that is not there", errParts, ci.ErrNotFound)
	wantKind(t, "PartURL of an upload that is not there", errURL, ci.ErrNotFound)
	wantKind(t, "Seal of an upload that is not there", s.Store.Seal(t.Context(), foreign, parts), ci.ErrNotFound)
	if err := s.Store.Seal(t.Context(), up, stored(t, s, up)); err != nil {
		t.Fatalf("after all that: %v", err)
	}
	holds(t, s.Store, "ref/x", data)
}

func wrongWhole(t *testing.T, s Subject) {
	data := Bytes(11*mib, "whole")
	up, err := s.Store.NewUpload(t.Context(), "who/x", int64(len(data)), sha256.Sum256([]byte("another")))
	if err != nil {
		t.Fatal(err)
	}
	for i, piece := range pieces(data, 5*mib) {
		sendPart(t, s, up, i+1, piece)
	}
	parts := stored(t, s, up)
	if s.VerifiesWhole {
		wantKind(t, "Seal", s.Store.Seal(t.Context(), up, parts), ci.ErrDigest)
		absent(t, s.Store, "who/x")
		if err := s.Store.Seal(t.Context(), up, parts); err == nil {
			t.Error("Seal again succeeded")
		}
		absent(t, s.Store, "who/x")
	} else if err := s.Store.Abort(t.Context(), up); err != nil {
		t.Fatal(err)
	}
	// A whole of another size is found out by every store.
	up, err = s.Store.NewUpload(t.Context(), "who/y", int64(len(data))+1, sha256.Sum256(data))
	if err != nil {
		t.Fatal(err)
	}
	for i, piece := range pieces(data, 5*mib) {
		sendPart(t, s, up, i+1, piece)
	}
	wantKind(t, "Seal with another size", s.Store.Seal(t.Context(), up, stored(t, s, up)), ci.ErrDigest)
	absent(t, s.Store, "who/y")
	if ups, err := s.Store.Uploads(t.Context(), "who/"); err != nil || len(ups) != 0 {
		t.Errorf("uploads left: %v, %v", ups, err)
	}
}

func sealedIsFinal(t *testing.T, s Subject) {
	data, other := Bytes(6*mib, "final"), Bytes(6*mib, "later")
	up := open(t, s, "fin/x", data)
	req, late := sign(t, s, up, 1, data), sign(t, s, up, 1, other)
	if status, _ := send(t, s, req, data, nil); status != http.StatusOK {
		t.Fatalf("status %d", status)
	}
	if err := s.Store.Seal(t.Context(), up, stored(t, s, up)); err != nil {
		t.Fatal(err)
	}
	for _, r := range []blob.SignedRequest{req, late} {
		for _, body := range [][]byte{data, other} {
			if status, _ := send(t, s, r, body, nil); status/100 == 2 {
				t.Errorf("PUT by an old URL after Seal: status %d", status)
			}
		}
	}
	err := s.Store.PutNew(t.Context(), "fin/x", bytes.NewReader(other), int64(len(other)), sha256.Sum256(other))
	wantKind(t, "PutNew over a sealed object", err, ci.ErrConflict)
	if err := s.Store.Abort(t.Context(), up); err != nil {
		t.Errorf("Abort after Seal: %v", err)
	}
	holds(t, s.Store, "fin/x", data)
}

func abort(t *testing.T, s Subject) {
	data := Bytes(6*mib, "abort")
	first := open(t, s, "ab/1", data)
	second := open(t, s, "ab/2", data)
	other := open(t, s, "zz/3", data)
	req := sign(t, s, first, 1, data)
	sendPart(t, s, first, 1, data)
	ids := func(prefix string) []string {
		t.Helper()
		ups, err := s.Store.Uploads(t.Context(), prefix)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i, up := range ups {
			if i > 0 && up.Opened.Before(ups[i-1].Opened) {
				t.Errorf("%s is listed after a younger one", up.Key)
			}
			got = append(got, up.Key+" "+up.ID)
		}
		slices.Sort(got)
		return got
	}
	name := func(up blob.Upload) string { return up.Key + " " + up.ID }
	if got, want := ids("ab/"), []string{name(first), name(second)}; !slices.Equal(got, want) {
		t.Errorf("uploads below ab/: %q, want %q", got, want)
	}
	for range 2 {
		if err := s.Store.Abort(t.Context(), first); err != nil {
			t.Fatal(err)
		}
	}
	if status, _ := send(t, s, req, data, nil); status/100 == 2 {
		t.Errorf("PUT after Abort: status %d", status)
	}
	if err := s.Store.Seal(t.Context(), first, []blob.Part{{Number: 1, Size: int64(len(data)), SHA256: sha256.Sum256(data)}}); !errors.Is(err, ci.ErrNotFound) {
		t.Errorf("Seal after Abort: error %v, want ErrNotFound", err)
	}
	absent(t, s.Store, "ab/1")
	if got, want := ids(""), []string{name(second), name(other)}; !slices.Equal(got, want) {
		t.Errorf("uploads: %q, want %q", got, want)
	}
}

func alteredURL(t *testing.T, s Subject) {
	data := Bytes(6*mib, "altered")
	up := open(t, s, "alt/x", data)
	victim := open(t, s, "alt/victim", data)
	req := sign(t, s, up, 1, data)
	u, err := url.Parse(req.URL)
	if err != nil {
		t.Fatal(err)
	}
	swap := strings.NewReplacer(up.ID, victim.ID, "alt/x", "alt/victim", "alt%2Fx", "alt%2Fvictim")
	altered := map[string]string{
		"victim's upload": strings.ReplaceAll(req.URL, up.ID, victim.ID),
		"victim's both":   swap.Replace(req.URL),
		"no query":        strings.TrimSuffix(req.URL, "?"+u.RawQuery),
		"another path":    strings.Replace(req.URL, "?", "/../x?", 1),
		"twice":           req.URL + "&" + u.RawQuery,
	}
	for key, values := range u.Query() {
		q := u.Query()
		v := []byte(values[0] + "0")
		if len(values[0]) > 0 {
			v = []byte(values[0])
			v[len(v)/2] ^= 1
		}
		q.Set(key, string(v))
		changed := *u
		changed.RawQuery = q.Encode()
		altered["changed "+key] = changed.String()
		q.Del(key)
		changed.RawQuery = q.Encode()
		altered["without "+key] = changed.String()
	}
	for what, text := range altered {
		bad := req
		bad.URL = text
		if status, _ := send(t, s, bad, data, nil); status/100 == 2 {
			t.Errorf("%s: status %d", what, status)
		}
	}
	for _, method := range []string{"GET", "POST", "DELETE"} {
		if status, _ := send(t, s, req, data, func(r *http.Request) { r.Method = method }); status/100 == 2 {
			t.Errorf("%s: status %d", method, status)
		}
	}
	for _, u := range []blob.Upload{up, victim} {
		if parts := stored(t, s, u); len(parts) != 0 {
			t.Errorf("%s has parts %+v", u.Key, parts)
		}
	}
	absent(t, s.Store, "alt/x")
	absent(t, s.Store, "alt/victim")
	if status, body := send(t, s, req, data, nil); status != http.StatusOK {
		t.Errorf("the URL as it was signed: status %d: %s", status, body)
	}
}

func expiredURL(t *testing.T, s Subject) {
	data := Bytes(6*mib, "expired")
	put(t, s.Store, "exp/get", data[:10])
	get, err := s.Store.GetURL(t.Context(), "exp/get", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	up := open(t, s, "exp/x", data)
	req, err := s.Store.PartURL(t.Context(), up, 1, int64(len(data)), sha256.Sum256(data), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	s.Pass(2 * time.Second)
	if status, _ := send(t, s, req, data, nil); status/100 == 2 {
		t.Errorf("PUT by an expired URL: status %d", status)
	}
	if status, got := send(t, s, get, nil, nil); status/100 == 2 {
		t.Errorf("GET by an expired URL: status %d and %d bytes", status, len(got))
	}
	if parts := stored(t, s, up); len(parts) != 0 {
		t.Errorf("the store lists %+v", parts)
	}
}

func uploadOntoAnother(t *testing.T, s Subject) {
	data, other := Bytes(6*mib, "mine"), Bytes(6*mib, "theirs")
	up := open(t, s, "onto/x", data)
	sendPart(t, s, up, 1, data)
	parts := stored(t, s, up)
	put(t, s.Store, "onto/x", other)
	wantKind(t, "Seal onto another object", s.Store.Seal(t.Context(), up, parts), ci.ErrConflict)
	holds(t, s.Store, "onto/x", other)
}
