package blob

import (
	"crypto/sha256"
	"errors"
	"hash"
	"io"

	"forgeci/internal/ci"
)

// Verifier is a reader that ends well only if it has read exactly the promised
// bytes: where the last byte would be followed by io.EOF it returns ErrDigest if
// there are more or fewer of them or their SHA-256 is another. An error of the
// reader below becomes ErrUnavailable unless it is a *ci.Error. It is not safe
// for concurrent use.
type Verifier struct {
	r    io.Reader
	left int64
	size int64
	want [32]byte
	sum  hash.Hash
	err  error
}

// NewVerifier returns a Verifier for size bytes of r with the SHA-256 sum.
func NewVerifier(r io.Reader, size int64, sum [32]byte) *Verifier {
	return &Verifier{r: r, left: size, size: size, want: sum, sum: sha256.New()}
}

// Read reads on. After an error or io.EOF it returns the same again.
func (v *Verifier) Read(p []byte) (int, error) {
	if v.err != nil {
		return 0, v.err
	}
	n, err := v.r.Read(p)
	if int64(n) > v.left {
		n = int(v.left)
		v.err = ci.Errorf(ci.ErrDigest, "more than the promised %d bytes", v.size)
	}
	v.left -= int64(n)
	v.sum.Write(p[:n])
	var ours *ci.Error
	switch {
	case v.err != nil, err == nil:
	case err == io.EOF && v.left > 0:
		v.err = ci.Errorf(ci.ErrDigest, "%d bytes instead of the promised %d", v.size-v.left, v.size)
	case err == io.EOF && [32]byte(v.sum.Sum(nil)) != v.want:
		v.err = ci.Errorf(ci.ErrDigest, "the bytes do not have the promised SHA-256")
	case err == io.EOF:
		v.err = io.EOF
	case errors.As(err, &ours):
		v.err = ours
	default:
		v.err = ci.Errorf(ci.ErrUnavailable, "read the object's content").WithCause(err)
	}
	return n, v.err
}

// Failed returns the error that Read ended with, if it is not io.EOF.
func (v *Verifier) Failed() error {
	if v.err == io.EOF {
		return nil
	}
	return v.err
}
