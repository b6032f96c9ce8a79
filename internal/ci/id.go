package ci

import (
	"crypto/rand"
	"encoding/binary"
	"io"
	"strings"
	"time"
)

// Identifiers are opaque text made by the server: a type prefix, "_", and 26
// characters of lower-case Crockford base32 that hold a 48-bit millisecond
// timestamp and 80 random bits (the ULID layout), so that identifiers of one
// kind sort by the time of their creation.
type (
	// OrgID names an organisation, the tenant.
	OrgID string
	// RepoID names a repository.
	RepoID string
	// RunID names one run of one workflow.
	RunID string
	// JobID names one job of one run.
	JobID string
	// RunnerID names a registered runner.
	RunnerID string
	// SessionID names one process life of a runner.
	SessionID string
	// LeaseID names one lease. It carries the incarnation of the database, so
	// that no lease issued after a restore point is current after the restore.
	LeaseID string
)

// Prefixes of identifiers.
const (
	PrefixOrg      = "org"
	PrefixRepo     = "repo"
	PrefixRun      = "run"
	PrefixJob      = "job"
	PrefixRunner   = "rnr"
	PrefixSession  = "ses"
	PrefixLease    = "lse"
	PrefixArtifact = "art"
	PrefixToken    = "tok"
	PrefixObject   = "obj"
	PrefixOutbox   = "out"
	PrefixRequest  = "req"
)

// IDSource makes identifiers. The zero value uses the system clock and the
// system's random source; a simulation sets both. It is safe for concurrent
// use when Now and Rand are.
type IDSource struct {
	// Now tells the time that goes into an identifier; nil means time.Now.
	Now func() time.Time
	// Rand is the source of the random part; nil means crypto/rand.
	Rand io.Reader
}

// New returns a fresh identifier with the given prefix.
func (s IDSource) New(prefix string) string {
	now := time.Now
	if s.Now != nil {
		now = s.Now
	}
	src := rand.Reader
	if s.Rand != nil {
		src = s.Rand
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(now().UnixMilli())<<16)
	if _, err := io.ReadFull(src, b[6:]); err != nil {
		panic("ci: random source failed: " + err.Error())
	}
	return prefix + "_" + encodeBase32(b)
}

const base32Alphabet = "0123456789abcdefghjkmnpqrstvwxyz"

// encodeBase32 writes 128 bits as 26 characters, most significant first.
func encodeBase32(b [16]byte) string {
	hi := binary.BigEndian.Uint64(b[:8])
	lo := binary.BigEndian.Uint64(b[8:])
	var out [26]byte
	for i := 25; i >= 0; i-- {
		out[i] = base32Alphabet[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(out[:])
}

// HasPrefix reports whether id has the form of an identifier with the prefix:
// bounded length, the prefix, and only characters that identifiers are made of.
// It says nothing about whether the object exists.
func HasPrefix(id, prefix string) bool {
	rest, ok := strings.CutPrefix(id, prefix+"_")
	if !ok || len(rest) == 0 || len(rest) > 64 {
		return false
	}
	for i := range len(rest) {
		c := rest[i]
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && c != '_' {
			return false
		}
	}
	return true
}
