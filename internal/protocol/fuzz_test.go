package protocol_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// A log body is read whole or refused with a type: what is accepted holds every
// field within its bounds and is written back byte for byte.
func FuzzDecodeChunks(f *testing.F) {
	one := protocol.AppendChunk(nil, protocol.Chunk{Step: 0, Stream: protocol.Stdout, Sequence: 1, Data: []byte("hello\n")})
	f.Add(one)
	f.Add(protocol.AppendChunk(one, protocol.Chunk{Step: -1, Stream: protocol.System, Sequence: 2, AtMicros: 9, Discarded: 1 << 40}))
	f.Fuzz(func(t *testing.T, body []byte) {
		chunks, err := protocol.DecodeChunks(body)
		if err != nil {
			if k := ci.KindOf(err); k != ci.ErrInvalid && k != ci.ErrDigest && k != ci.ErrTooLarge || chunks != nil {
				t.Errorf("%d chunks, %v", len(chunks), err)
			}
			return
		}
		back := []byte("FLG1")
		for _, c := range chunks {
			back = protocol.AppendChunk(back, c)
			if c.Sequence < 1 || c.Offset < 0 || c.AtMicros < 0 || c.Discarded < 0 || len(c.Data) > protocol.MaxChunk || c.Len() <= 0 || c.Offset+c.Len() < c.Offset {
				t.Errorf("out of bounds: %+v", c)
			}
		}
		if !bytes.Equal(back, body) {
			t.Errorf("%x\nis written back as\n%x", body, back)
		}
	})
}

// A text is a token of one kind at most, and one character more, less or other
// makes it none.
func FuzzToken(f *testing.F) {
	for _, k := range []protocol.TokenKind{protocol.TokenAdmin, protocol.TokenRegistration, protocol.TokenRunner} {
		f.Add(protocol.NewToken(k), uint8(5))
	}
	f.Fuzz(func(t *testing.T, s string, at uint8) {
		kind := protocol.KindOfToken(s)
		kinds := 0
		for _, k := range []protocol.TokenKind{protocol.TokenAdmin, protocol.TokenRegistration, protocol.TokenRunner} {
			if protocol.ValidToken(s, k) {
				kinds++
				if k != kind {
					t.Errorf("%q is a token of kind %s and of kind %s", s, k, kind)
				}
			}
		}
		if kinds > 1 || kinds == 0 && kind != "" || kind != "" && strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
			t.Errorf("%q is a token of %d kinds, %q", s, kinds, kind)
		}
		if kind == "" {
			return
		}
		i := int(at) % len(s)
		for _, other := range []string{s + "0", s[1:], s[:i] + s[i+1:], s[:i] + "!" + s[i+1:]} {
			if protocol.KindOfToken(other) != "" {
				t.Errorf("%q is taken for a token as well as %q", other, s)
			}
		}
	})
}

// hostile is a server that gives one answer to everything.
type hostile struct {
	status      int
	media, wait string
	body        []byte
}

// RoundTrip implements http.RoundTripper.
func (a hostile) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	h := http.Header{}
	h.Set("Content-Type", a.media)
	h.Set("Retry-After", a.wait)
	return &http.Response{
		StatusCode: a.status, Status: strconv.Itoa(a.status) + " " + http.StatusText(a.status), Header: h, Request: r,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(bytes.NewReader(a.body)), ContentLength: int64(len(a.body)),
	}, nil
}

func fuzzClient(t *testing.T, a hostile) *protocol.Client {
	t.Helper()
	c, err := protocol.NewClient(protocol.ClientConfig{BaseURL: "http://server.test", Token: "fca_x", HTTP: &http.Client{Transport: a}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A success with a body that is none of ours is an error or a document, for every
// call of a runner and of a person: no call panics, and lists are as long as the
// caller may index them.
func FuzzAnswers(f *testing.F) {
	for _, body := range []string{
		`{}`, `null`, `[]`, `{"items":null,"next":"x"}`, `{"leases":[{}]}`, `{"urls":[]}`, `{"part_size":9223372036854775807}`,
		`{"lease":{"epoch":-1},"job":{"steps":[null]}}`, `{"id":1}`, "\xff\xfe{", `{"items":[{"silent_for":"-1h"}]}`, `{"run_id":"run_1","run_id":"run_2"}`,
	} {
		f.Add(200, []byte(body))
	}
	f.Add(204, []byte(nil))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if status < 200 || status > 299 {
			return
		}
		c := fuzzClient(t, hostile{status, protocol.MediaJSON, "", body})
		ctx, ref := t.Context(), ci.LeaseRef{Run: "run_1", Job: "job_1", Runner: "rnr_1", Session: "ses_1", Lease: "lse_1", Epoch: 1}
		two := []protocol.ArtifactPart{{Number: 1}, {Number: 2}}
		for name, call := range map[string]func() error{
			"run":       func() error { _, err := c.Run(ctx, "run_1"); return err },
			"runs":      func() error { _, err := c.Runs(ctx, protocol.RunsQuery{}); return err },
			"job":       func() error { _, err := c.Job(ctx, "job_1"); return err },
			"explain":   func() error { _, err := c.Explain(ctx, "job_1"); return err },
			"lines":     func() error { _, err := c.LogLines(ctx, "job_1", protocol.LogQuery{}); return err },
			"artifact":  func() error { _, err := c.Artifact(ctx, "art_1"); return err },
			"runners":   func() error { _, err := c.Runners(ctx, ""); return err },
			"letters":   func() error { _, err := c.DeadLetters(ctx, ""); return err },
			"create":    func() error { _, err := c.CreateRun(ctx, "repo_1", "k", protocol.CreateRun{}); return err },
			"session":   func() error { _, err := c.OpenSession(ctx, protocol.OpenSession{}); return err },
			"claim":     func() error { _, err := c.Claim(ctx, protocol.Claim{}); return err },
			"complete":  func() error { _, err := c.Complete(ctx, ref, protocol.Complete{}); return err },
			"append":    func() error { _, err := c.AppendLog(ctx, ref, []byte("FLG1")); return err },
			"upload":    func() error { _, err := c.NewArtifact(ctx, ref, protocol.NewArtifact{}); return err },
			"restore":   func() error { _, err := c.RestoreArtifact(ctx, ref, "art_1"); return err },
			"watch":     func() error { _, err := c.Watch(ctx, protocol.Watch{}); return err },
			"hand-over": func() error { return c.HandOver(ctx, ref, protocol.HandOver{}) },
			"heartbeat": func() error {
				r, err := c.Heartbeat(ctx, protocol.Heartbeat{Leases: []ci.LeaseRef{ref}})
				if err == nil && len(r.Leases) != 1 {
					t.Errorf("%d answers for one lease", len(r.Leases))
				}
				return err
			},
			"sign": func() error {
				r, err := c.SignParts(ctx, ref, "art_1", protocol.SignParts{Parts: two})
				if err == nil && len(r.URLs) != len(two) {
					t.Errorf("%d addresses for %d parts", len(r.URLs), len(two))
				}
				return err
			},
		} {
			if err := call(); err != nil {
				if _, ok := errors.AsType[*ci.Error](err); !ok {
					t.Errorf("%s: %v is not a typed error", name, err)
				}
			}
		}
	})
}
