// Package blob is object storage: create-only keys with verified content.
//
// Keys are never reused and a stored object never changes. Two stores implement
// Store: fs (a local directory) and s3 (an S3 API); blobtest is the suite that
// both pass.
package blob

import (
	"context"
	"io"
	"time"
)

// Store is object storage. All methods are safe for concurrent use. Errors are
// *ci.Error: ErrNotFound, ErrConflict (the key exists with other content),
// ErrDigest (the bytes are not what was promised), ErrTooLarge (a part outside
// the limits), ErrUnavailable (the store is away, full or refuses; whether the
// object was stored is then unknown and the caller may repeat).
type Store interface {
	// PutNew stores size bytes of r under key and returns when they are durable
	// (object PUT confirmed; or file and directory fsynced). The bytes must have
	// the SHA-256 sum; otherwise nothing is stored and the error is ErrDigest.
	// Repeating a PutNew with the same sum succeeds; with another sum it is
	// ErrConflict and the stored object is untouched.
	PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error
	// Open reads length bytes from offset; length < 0 means to the end. An
	// offset at the end gives an empty reader, past it ErrInvalid.
	Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
	// Stat returns the size and, where the store knows it, the SHA-256 of an object.
	Stat(ctx context.Context, key string) (Info, error)
	// Delete removes an object; one that is not there is no error.
	Delete(ctx context.Context, key string) error
	// List returns up to limit objects whose key begins with prefix and sorts
	// after `after`, in byte order of their keys.
	List(ctx context.Context, prefix, after string, limit int) ([]Info, error)

	// NewUpload opens a multipart upload for an object of exactly size bytes
	// with the sum. Nothing is visible under key until Seal.
	NewUpload(ctx context.Context, key string, size int64, sum [32]byte) (Upload, error)
	// PartURL returns a URL to which a client PUTs part n (from 1) with exactly
	// size bytes of the SHA-256 sum, and the headers it must send. The URL works
	// for that part of that upload only, until expires (at most 10 minutes).
	PartURL(ctx context.Context, up Upload, n int, size int64, sum [32]byte, expires time.Duration) (SignedRequest, error)
	// Parts lists the parts the store holds.
	Parts(ctx context.Context, up Upload) ([]Part, error)
	// Seal completes the upload from parts 1..len(parts), verifies the size and
	// the content's identity, and makes it visible. It may be repeated after a
	// lost answer. The identity is the list of parts, each verified by the store
	// by its SHA-256 (ErrConflict if another is stored or none), and the SHA-256
	// of the whole: verified by fs always, by s3 for a single part, and in any
	// case by whoever reads the object (docs/decisions/0004). A whole that does
	// not verify is ErrDigest, is removed, and can never become visible. A sealed
	// object cannot be overwritten.
	Seal(ctx context.Context, up Upload, parts []Part) error
	// Abort removes an upload that was not sealed and its parts; repeatable.
	Abort(ctx context.Context, up Upload) error
	// Uploads lists open uploads whose key begins with prefix, oldest first; Size
	// and SHA256 may be zero, Key and ID are enough for Abort. Those that can be read
	// are returned also beside an error.
	Uploads(ctx context.Context, prefix string) ([]Upload, error)

	// GetURL returns a URL from which a client reads the whole object until
	// expires (at most 10 minutes).
	GetURL(ctx context.Context, key string, expires time.Duration) (SignedRequest, error)
}

// Limits of a multipart upload, those of the S3 API; fs enforces them too.
const (
	MinPartSize = 5 << 20 // every part but the last
	MaxPartSize = 5 << 30
	MaxParts    = 10_000
)

// PartSize returns the size of the parts in which size bytes are best sent:
// 128 MiB for large objects (100 GiB are 800 parts), less for small ones, and
// never more than MaxParts parts.
func PartSize(size int64) int64 {
	const small, large = 8 << 20, 128 << 20
	part := int64(small)
	if size > 1<<30 {
		part = large
	}
	for part*MaxParts < size {
		part *= 2
	}
	return part
}

// Info describes a stored object.
type Info struct {
	Key      string
	Size     int64
	Modified time.Time
	// SHA256 is the content's sum when the store knows it, else zero.
	SHA256 [32]byte
}

// Upload names an open multipart upload.
type Upload struct {
	Key    string    `json:"key"`
	ID     string    `json:"id"`
	Size   int64     `json:"size"`
	SHA256 [32]byte  `json:"sha256"`
	Opened time.Time `json:"opened"`
}

// Part is one stored part of an upload.
type Part struct {
	Number int      `json:"number"`
	Size   int64    `json:"size"`
	SHA256 [32]byte `json:"sha256"`
	// ETag is what the store answered for the part; never taken for a content hash.
	ETag string `json:"etag"`
}

// SignedRequest is a request that a client without credentials may make.
type SignedRequest struct {
	Method string            `json:"method"`
	URL    string            `json:"url"` // may be relative to the server's address (fs)
	Header map[string]string `json:"header,omitempty"`
}
