package blob

import (
	"strings"
	"time"

	"forgeci/internal/ci"
)

// MaxURLLife is the longest life of a signed URL.
const MaxURLLife = 10 * time.Minute

// MaxKey is the longest key in bytes; a component between slashes has at most
// maxComponent.
const (
	MaxKey       = 900
	maxComponent = 200
)

// CheckKey returns ErrInvalid unless key is one that every store takes:
// components of letters, digits and "._=+@-", separated by single slashes, none
// of them "." or "..". Keys that differ only in case are to be avoided, since a
// local directory may fold them.
func CheckKey(key string) error {
	if len(key) > MaxKey {
		return ci.Errorf(ci.ErrInvalid, "object key of %d bytes; the limit is %d", len(key), MaxKey)
	}
	for part := range strings.SplitSeq(key, "/") {
		if part == "" || part == "." || part == ".." || len(part) > maxComponent || !plain(part) {
			return ci.Errorf(ci.ErrInvalid, "object key %q is malformed", key)
		}
	}
	return nil
}

func plain(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && strings.IndexByte("._=+@-", c) < 0 {
			return false
		}
	}
	return true
}

// CheckUpload returns ErrInvalid or ErrTooLarge unless an object of size bytes
// can be uploaded in parts under key.
func CheckUpload(key string, size int64) error {
	if size < 0 {
		return ci.Errorf(ci.ErrInvalid, "size %d", size)
	}
	if size > MaxPartSize*MaxParts {
		return ci.Errorf(ci.ErrTooLarge, "an object of %d bytes is more than %d parts of %d bytes", size, MaxParts, int64(MaxPartSize))
	}
	return CheckKey(key)
}

// CheckPart returns ErrTooLarge or ErrInvalid unless n and size may be those of
// a part of up, and expires the life of a URL. Whether a part below MinPartSize
// is the last one is known only to Seal, except that an object of two parts or
// more has at least one that is not.
func CheckPart(up Upload, n int, size int64, expires time.Duration) error {
	switch {
	case n < 1 || n > MaxParts:
		return ci.Errorf(ci.ErrTooLarge, "part %d; parts are numbered from 1 to %d", n, MaxParts)
	case size < 0 || size > MaxPartSize || size > up.Size:
		return ci.Errorf(ci.ErrTooLarge, "part %d of %d bytes; the limit is %d and the object has %d", n, size, int64(MaxPartSize), up.Size)
	case expires <= 0 || expires > MaxURLLife:
		return ci.Errorf(ci.ErrInvalid, "a signed URL lives between 1 s and %s, not %s", MaxURLLife, expires)
	}
	return nil
}

// CheckParts returns an error unless parts are a whole of up's size: numbered
// from 1 without a gap (ErrInvalid), each but the last of at least MinPartSize
// (ErrTooLarge), together of up.Size bytes (ErrDigest).
func CheckParts(up Upload, parts []Part) error {
	if len(parts) == 0 || len(parts) > MaxParts {
		return ci.Errorf(ci.ErrInvalid, "an object is sealed from 1 to %d parts, not %d", MaxParts, len(parts))
	}
	var size int64
	for i, p := range parts {
		if p.Number != i+1 {
			return ci.Errorf(ci.ErrInvalid, "part %d stands where part %d should", p.Number, i+1)
		}
		if p.Size < 0 || p.Size > MaxPartSize || p.Size < MinPartSize && i < len(parts)-1 {
			return ci.Errorf(ci.ErrTooLarge, "part %d has %d bytes; all but the last have between %d and %d", p.Number, p.Size, MinPartSize, int64(MaxPartSize))
		}
		size += p.Size
	}
	if size != up.Size {
		return ci.Errorf(ci.ErrDigest, "the parts have %d bytes together, not %d", size, up.Size)
	}
	return nil
}
