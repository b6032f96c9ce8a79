// Package s3 keeps objects in a bucket of any service that speaks the S3 API
// with conditional writes (If-None-Match) and SHA-256 checksums.
//
// What the service verifies is what is trusted: of an object put at once, the
// SHA-256 of its content; of a part, the SHA-256 that its signed URL binds. The
// content of an object of several parts is identified by its declared list of
// parts; see docs/decisions/0004-artifact-content-identity.md. An ETag is never
// taken for a content hash.
package s3

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

var _ blob.Store = (*Store)(nil)

// Config says where the bucket is.
type Config struct {
	// Endpoint is host or host:port, as runners and servers both reach it.
	Endpoint string
	Region   string
	Bucket   string
	// Prefix stands before every key, as a directory; empty means the bucket's top.
	Prefix    string
	AccessKey string
	SecretKey string
	// Secure means HTTPS.
	Secure bool
	// PathStyle puts the bucket into the path instead of the host name.
	PathStyle bool
}

// Store is a blob.Store in an S3 bucket.
type Store struct {
	core   minio.Core
	bucket string
	prefix string // "" or ends with a slash
}

// Open returns the store of a bucket, which must exist and be reachable with
// the credentials (ErrInvalid, ErrNotFound, ErrForbidden, ErrUnavailable).
func Open(ctx context.Context, c Config) (*Store, error) {
	prefix := strings.Trim(c.Prefix, "/")
	if prefix != "" {
		if err := blob.CheckKey(prefix); err != nil {
			return nil, err
		}
		prefix += "/"
	}
	lookup := minio.BucketLookupDNS
	if c.PathStyle {
		lookup = minio.BucketLookupPath
	}
	core, err := minio.NewCore(c.Endpoint, &minio.Options{
		Creds:        credentials.NewStaticV4(c.AccessKey, c.SecretKey, ""),
		Secure:       c.Secure,
		Region:       c.Region,
		BucketLookup: lookup,
		// Lets a checksum be sent with an object.
		TrailingHeaders: true,
		MaxRetries:      4,
	})
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "S3 endpoint %q", c.Endpoint).WithCause(err)
	}
	s := &Store{core: *core, bucket: c.Bucket, prefix: prefix}
	found, err := core.BucketExists(ctx, c.Bucket)
	switch {
	case err != nil:
		return nil, failure(ctx, "look for the S3 bucket "+c.Bucket, err)
	case !found:
		return nil, ci.Errorf(ci.ErrNotFound, "there is no S3 bucket %q at %s", c.Bucket, c.Endpoint)
	}
	return s, nil
}

// Metadata that objects carry.
const (
	// metaSum is the SHA-256 of an object put at once, which the service has
	// compared with the content.
	metaSum = "Forgeci-Sha256"
	// metaDeclared is the SHA-256 that was declared for an object in parts.
	metaDeclared = "Forgeci-Declared-Sha256"
)

// name returns the object's name in the bucket.
func (s *Store) name(key string) string { return s.prefix + key }

// failure is the error for an answer of the service.
func failure(ctx context.Context, what string, err error) error {
	if ours, ok := errors.AsType[*ci.Error](err); ok {
		return ours
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	resp := minio.ToErrorResponse(err)
	kind := ci.ErrUnavailable
	switch resp.Code {
	case "XAmzContentSHA256Mismatch", "BadDigest", "InvalidDigest":
		kind = ci.ErrDigest
	case minio.NoSuchKey, "NoSuchUpload", "NotFound":
		kind = ci.ErrNotFound
	case "EntityTooSmall", "EntityTooLarge":
		kind = ci.ErrTooLarge
	case "InvalidPart", "InvalidPartOrder", "PreconditionFailed", "ConditionalRequestConflict":
		kind = ci.ErrConflict
	case "InvalidRange":
		kind = ci.ErrInvalid
	case "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch":
		kind = ci.ErrForbidden
	default:
		switch resp.StatusCode {
		case http.StatusNotFound:
			kind = ci.ErrNotFound
		case http.StatusPreconditionFailed:
			kind = ci.ErrConflict
		case http.StatusRequestedRangeNotSatisfiable:
			kind = ci.ErrInvalid
		case http.StatusForbidden:
			kind = ci.ErrForbidden
		}
	}
	if kind == ci.ErrForbidden {
		// To callers of Store the service refuses us, not them.
		kind = ci.ErrUnavailable
		what += ": the S3 service refuses the credentials"
	}
	return ci.Errorf(kind, "%s", what).WithCause(err)
}

// sumHex reads a SHA-256 in hex; zero if it is none.
func sumHex(text string) (sum [32]byte) {
	if b, err := hex.DecodeString(text); err == nil && len(b) == len(sum) {
		copy(sum[:], b)
	}
	return sum
}

// sumBase64 reads a SHA-256 in base64; zero if it is none, or that of parts
// ("…-3").
func sumBase64(text string) (sum [32]byte) {
	if b, err := base64.StdEncoding.DecodeString(text); err == nil && len(b) == len(sum) {
		copy(sum[:], b)
	}
	return sum
}

func base64Sum(sum [32]byte) string { return base64.StdEncoding.EncodeToString(sum[:]) }

// metadata returns a value of an object's own metadata.
func metadata(info minio.ObjectInfo, key string) string {
	for k, v := range info.UserMetadata {
		if strings.EqualFold(k, key) {
			return v
		}
	}
	return ""
}
