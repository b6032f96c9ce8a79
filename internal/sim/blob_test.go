package sim

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/blobtest"
	"forgeci/internal/ci"
)

// memory is the modelled object store: create-only objects in memory.
type memory struct {
	now  func() time.Time
	fail func(call string) mishap // what goes wrong with a call

	mu      sync.Mutex
	objects map[string]object
	uploads map[string]*upload
	opened  int
	secrets map[string]signature // what URLs allow, by their token
}

// mishap is what goes wrong with one call. before: it has no effect; after: it has.
// Either may end the caller's process by a panic.
type mishap struct {
	before, after func() error
	bytes         func([]byte) []byte // what a reader gets instead
	unseen        time.Duration       // what is younger is not seen
}

type object struct {
	data []byte
	sum  [32]byte
	at   time.Time
}

type upload struct {
	blob.Upload
	parts map[int]storedPart
}

type storedPart struct {
	data []byte
	sum  [32]byte
}

type signature struct {
	query   string
	upload  string
	key     string
	part    int
	size    int64
	sum     [32]byte
	expires time.Time
}

func newMemory() *memory {
	return &memory{now: time.Now, objects: map[string]object{}, uploads: map[string]*upload{}, secrets: map[string]signature{}}
}

// begin answers what goes wrong before a call; the returned function what goes
// wrong behind it.
func (m *memory) begin(ctx context.Context, call string) (behind func(error) error, err error) {
	_, behind, err = m.beginWith(ctx, call)
	return behind, err
}

func (m *memory) beginWith(ctx context.Context, call string) (wrong mishap, behind func(error) error, err error) {
	if err := ctx.Err(); err != nil {
		return wrong, nil, err
	}
	if m.fail != nil {
		wrong = m.fail(call)
		if wrong.before != nil {
			if err := wrong.before(); err != nil {
				return wrong, nil, err
			}
		}
	}
	m.mu.Lock()
	return wrong, func(err error) error {
		m.mu.Unlock()
		if err == nil && wrong.after != nil {
			return wrong.after()
		}
		return err
	}, nil
}

// seen returns an object unless it is too young to be seen.
func (m *memory) seen(key string, wrong mishap) (object, bool) {
	o, ok := m.objects[key]
	return o, ok && m.visible(o, wrong)
}

func (m *memory) visible(o object, wrong mishap) bool {
	return wrong.unseen == 0 || m.now().Sub(o.at) >= wrong.unseen
}

func noObject(key string) error { return ci.Errorf(ci.ErrNotFound, "no object %s", key) }
func noUpload(key string) error { return ci.Errorf(ci.ErrNotFound, "no upload of %s", key) }

func (m *memory) PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error {
	if err := blob.CheckUpload(key, size); err != nil {
		return err
	}
	data, err := io.ReadAll(blob.NewVerifier(r, size, sum))
	if err != nil {
		return err
	}
	behind, err := m.begin(ctx, "PutNew")
	if err != nil {
		return err
	}
	if o, ok := m.objects[key]; ok && o.sum != sum {
		return behind(ci.Errorf(ci.ErrConflict, "object %s exists with other content", key))
	} else if !ok {
		m.objects[key] = object{data, sum, m.now()}
	}
	return behind(nil)
}

func (m *memory) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	wrong, behind, err := m.beginWith(ctx, "Open")
	if err != nil {
		return nil, err
	}
	o, ok := m.seen(key, wrong)
	switch n := int64(len(o.data)); {
	case !ok:
		return nil, behind(noObject(key))
	case offset < 0 || offset > n:
		return nil, behind(ci.Errorf(ci.ErrInvalid, "offset %d of %d bytes", offset, n))
	case length < 0 || length > n-offset:
		length = n - offset
	}
	data := o.data[offset : offset+length]
	if wrong.bytes != nil {
		data = wrong.bytes(slices.Clone(data))
	}
	return io.NopCloser(bytes.NewReader(data)), behind(nil)
}

func (m *memory) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	wrong, behind, err := m.beginWith(ctx, "Stat")
	if err != nil {
		return blob.Info{}, err
	}
	o, ok := m.seen(key, wrong)
	if !ok {
		return blob.Info{}, behind(noObject(key))
	}
	return blob.Info{Key: key, Size: int64(len(o.data)), Modified: o.at, SHA256: o.sum}, behind(nil)
}

func (m *memory) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	behind, err := m.begin(ctx, "Delete")
	if err != nil {
		return err
	}
	delete(m.objects, key)
	return behind(nil)
}

func (m *memory) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	wrong, behind, err := m.beginWith(ctx, "List")
	if err != nil {
		return nil, err
	}
	var out []blob.Info
	for key, o := range m.objects {
		if strings.HasPrefix(key, prefix) && key > after && m.visible(o, wrong) {
			out = append(out, blob.Info{Key: key, Size: int64(len(o.data)), Modified: o.at, SHA256: o.sum})
		}
	}
	slices.SortFunc(out, func(a, b blob.Info) int { return strings.Compare(a.Key, b.Key) })
	return out[:min(max(limit, 0), len(out))], behind(nil)
}

func (m *memory) NewUpload(ctx context.Context, key string, size int64, sum [32]byte) (blob.Upload, error) {
	if err := blob.CheckUpload(key, size); err != nil {
		return blob.Upload{}, err
	}
	behind, err := m.begin(ctx, "NewUpload")
	if err != nil {
		return blob.Upload{}, err
	}
	m.opened++
	up := blob.Upload{Key: key, ID: fmt.Sprintf("up%08d", m.opened), Size: size, SHA256: sum, Opened: m.now().UTC()}
	m.uploads[up.ID] = &upload{up, map[int]storedPart{}}
	return up, behind(nil)
}

func (m *memory) PartURL(ctx context.Context, up blob.Upload, n int, size int64, sum [32]byte, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckPart(up, n, size, expires); err != nil {
		return blob.SignedRequest{}, err
	}
	behind, err := m.begin(ctx, "PartURL")
	if err != nil {
		return blob.SignedRequest{}, err
	}
	u, ok := m.uploads[up.ID]
	if !ok {
		return blob.SignedRequest{}, behind(noUpload(up.Key))
	}
	if p, ok := u.parts[n]; ok && (p.sum != sum || int64(len(p.data)) != size) {
		return blob.SignedRequest{}, behind(ci.Errorf(ci.ErrConflict, "part %d of %s has other bytes", n, up.Key))
	}
	return m.sign("PUT", signature{upload: up.ID, key: up.Key, part: n, size: size, sum: sum, expires: m.now().Add(expires)}), behind(nil)
}

func (m *memory) GetURL(ctx context.Context, key string, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.SignedRequest{}, err
	}
	if expires <= 0 || expires > blob.MaxURLLife {
		return blob.SignedRequest{}, ci.Errorf(ci.ErrInvalid, "a signed URL lives at most %s", blob.MaxURLLife)
	}
	behind, err := m.begin(ctx, "GetURL")
	if err != nil {
		return blob.SignedRequest{}, err
	}
	return m.sign("GET", signature{key: key, expires: m.now().Add(expires)}), behind(nil)
}

// sign remembers what a URL allows; the token in it is all that is compared, and
// the rest of its text has to be as it was.
func (m *memory) sign(method string, s signature) blob.SignedRequest {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %v %d", method, s, len(m.secrets)))
	token := hex.EncodeToString(sum[:])
	s.query = url.Values{
		"token": {token}, "key": {s.key}, "part": {strconv.Itoa(s.part)}, "size": {strconv.FormatInt(s.size, 10)},
		"sum": {hex.EncodeToString(s.sum[:])}, "upload": {s.upload}, "expires": {strconv.FormatInt(s.expires.UnixMicro(), 10)},
	}.Encode()
	m.secrets[method+token] = s
	return blob.SignedRequest{Method: method, URL: "/memory?" + s.query}
}

// request is a client's use of a signed URL: it answers the content, or the ETag.
func (m *memory) request(ctx context.Context, method, raw string, body []byte) (data []byte, etag string, err error) {
	u, err := url.Parse(raw)
	if err != nil || u.Path != "/memory" {
		return nil, "", ci.Errorf(ci.ErrForbidden, "not a URL of this store")
	}
	m.mu.Lock()
	s, ok := m.secrets[method+u.Query().Get("token")]
	m.mu.Unlock()
	if !ok || s.query != u.RawQuery || !m.now().Before(s.expires) {
		return nil, "", ci.Errorf(ci.ErrForbidden, "this URL is not for that")
	}
	if method == "GET" {
		r, err := m.Open(ctx, s.key, 0, -1)
		if err != nil {
			return nil, "", err
		}
		data, err = io.ReadAll(r)
		return data, "", err
	}
	if int64(len(body)) != s.size {
		return nil, "", ci.Errorf(ci.ErrInvalid, "%d bytes; the URL is for %d", len(body), s.size)
	}
	if sha256.Sum256(body) != s.sum {
		return nil, "", ci.Errorf(ci.ErrDigest, "the bytes do not have the signed SHA-256")
	}
	behind, err := m.begin(ctx, "part")
	if err != nil {
		return nil, "", err
	}
	up, ok := m.uploads[s.upload]
	if !ok {
		return nil, "", behind(noUpload(s.key))
	}
	if p, ok := up.parts[s.part]; ok && p.sum != s.sum {
		return nil, "", behind(ci.Errorf(ci.ErrConflict, "part %d of %s has other bytes", s.part, s.key))
	}
	up.parts[s.part] = storedPart{slices.Clone(body), s.sum}
	return nil, etagOf(s.sum), behind(nil)
}

func etagOf(sum [32]byte) string { return `"` + hex.EncodeToString(sum[:16]) + `"` }

// ServeHTTP serves signed URLs, for the suite.
func (m *memory) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		var data []byte
		var etag string
		if data, etag, err = m.request(r.Context(), method, r.URL.String(), body); err == nil {
			if etag != "" {
				w.Header().Set("ETag", etag)
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
			return
		}
	}
	status := map[ci.Kind]int{ci.ErrForbidden: 403, ci.ErrNotFound: 404, ci.ErrInvalid: 400, ci.ErrDigest: 400, ci.ErrConflict: 409}[ci.KindOf(err)]
	http.Error(w, err.Error(), max(status, 400))
}

func (m *memory) Parts(ctx context.Context, up blob.Upload) ([]blob.Part, error) {
	behind, err := m.begin(ctx, "Parts")
	if err != nil {
		return nil, err
	}
	u, ok := m.uploads[up.ID]
	if !ok {
		return nil, behind(noUpload(up.Key))
	}
	var out []blob.Part
	for n, p := range u.parts {
		out = append(out, blob.Part{Number: n, Size: int64(len(p.data)), SHA256: p.sum, ETag: etagOf(p.sum)})
	}
	slices.SortFunc(out, func(a, b blob.Part) int { return a.Number - b.Number })
	return out, behind(nil)
}

func (m *memory) Seal(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	for i, p := range parts {
		if p.Number != i+1 {
			return ci.Errorf(ci.ErrInvalid, "part %d in place %d", p.Number, i+1)
		}
	}
	if len(parts) == 0 {
		return ci.Errorf(ci.ErrInvalid, "no parts")
	}
	behind, err := m.begin(ctx, "Seal")
	if err != nil {
		return err
	}
	if o, ok := m.objects[up.Key]; ok {
		if o.sum == up.SHA256 && int64(len(o.data)) == up.Size {
			return behind(nil)
		}
		return behind(ci.Errorf(ci.ErrConflict, "object %s exists with other content", up.Key))
	}
	u, ok := m.uploads[up.ID]
	if !ok {
		return behind(noUpload(up.Key))
	}
	var data []byte
	for i, p := range parts {
		have, ok := u.parts[i+1]
		switch {
		case !ok:
			return behind(ci.Errorf(ci.ErrConflict, "part %d of %s was not stored", p.Number, up.Key))
		case have.sum != p.SHA256 || int64(len(have.data)) != p.Size:
			return behind(ci.Errorf(ci.ErrConflict, "part %d of %s has other bytes", p.Number, up.Key))
		case i < len(parts)-1 && p.Size < blob.MinPartSize:
			return behind(ci.Errorf(ci.ErrTooLarge, "part %d has %d bytes", p.Number, p.Size))
		}
		data = append(data, have.data...)
	}
	if int64(len(data)) != up.Size || sha256.Sum256(data) != up.SHA256 {
		delete(m.uploads, up.ID)
		return behind(ci.Errorf(ci.ErrDigest, "the whole does not have the promised SHA-256"))
	}
	delete(m.uploads, up.ID)
	m.objects[up.Key] = object{data, up.SHA256, m.now()}
	return behind(nil)
}

func (m *memory) Abort(ctx context.Context, up blob.Upload) error {
	behind, err := m.begin(ctx, "Abort")
	if err != nil {
		return err
	}
	delete(m.uploads, up.ID)
	return behind(nil)
}

func (m *memory) Uploads(ctx context.Context, prefix string) ([]blob.Upload, error) {
	behind, err := m.begin(ctx, "Uploads")
	if err != nil {
		return nil, err
	}
	var out []blob.Upload
	for _, u := range m.uploads {
		if strings.HasPrefix(u.Key, prefix) {
			out = append(out, u.Upload)
		}
	}
	slices.SortFunc(out, func(a, b blob.Upload) int { return strings.Compare(a.ID, b.ID) })
	return out, behind(nil)
}

func TestTheModelledObjectStoreIsOne(t *testing.T) {
	t.Parallel()
	blobtest.Run(t, func(t *testing.T) blobtest.Subject {
		var ahead atomic.Int64
		m := newMemory()
		m.now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		server := httptest.NewServer(m)
		t.Cleanup(server.Close)
		return blobtest.Subject{Store: m, BaseURL: server.URL, Pass: func(d time.Duration) { ahead.Add(int64(d)) }, VerifiesWhole: true}
	})
}
