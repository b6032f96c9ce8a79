package s3

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

// NewUpload implements blob.Store.
func (s *Store) NewUpload(ctx context.Context, key string, size int64, sum [32]byte) (blob.Upload, error) {
	if err := blob.CheckUpload(key, size); err != nil {
		return blob.Upload{}, err
	}
	opened := time.Now().UTC()
	id, err := s.core.NewMultipartUpload(ctx, s.bucket, s.name(key), minio.PutObjectOptions{
		ContentType: "application/octet-stream",
		UserMetadata: map[string]string{
			metaDeclared: hex.EncodeToString(sum[:]),
			// Each part comes with its SHA-256, and the whole gets the SHA-256
			// of the parts' sums.
			"x-amz-checksum-algorithm": "SHA256",
			"x-amz-checksum-type":      "COMPOSITE",
		},
	})
	if err != nil {
		return blob.Upload{}, failure(ctx, "open upload of "+key, err)
	}
	return blob.Upload{Key: key, ID: id, Size: size, SHA256: sum, Opened: opened}, nil
}

func noUpload(up blob.Upload) error {
	return ci.Errorf(ci.ErrNotFound, "no open upload %q of %s", up.ID, up.Key)
}

// PartURL implements blob.Store. It asks the service once, whether the upload is
// open and the part not stored with other bytes. The URL binds the part's
// length and SHA-256 by its signature.
func (s *Store) PartURL(ctx context.Context, up blob.Upload, n int, size int64, sum [32]byte, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckPart(up, n, size, expires); err != nil {
		return blob.SignedRequest{}, err
	}
	if err := blob.CheckKey(up.Key); err != nil {
		return blob.SignedRequest{}, err
	}
	stored, err := s.parts(ctx, up, n-1, 1)
	if err != nil {
		return blob.SignedRequest{}, err
	}
	if len(stored) > 0 && stored[0].Number == n && (stored[0].Size != size || stored[0].SHA256 != sum) {
		return blob.SignedRequest{}, ci.Errorf(ci.ErrConflict, "part %d is stored with other bytes", n)
	}
	header := http.Header{
		"X-Amz-Checksum-Sha256": {base64Sum(sum)},
		"Content-Length":        {strconv.FormatInt(size, 10)},
	}
	u, err := s.core.PresignHeader(ctx, http.MethodPut, s.bucket, s.name(up.Key), max(expires, time.Second), url.Values{
		"partNumber": {strconv.Itoa(n)},
		"uploadId":   {up.ID},
	}, header)
	if err != nil {
		return blob.SignedRequest{}, failure(ctx, "sign a URL", err)
	}
	return blob.SignedRequest{
		Method: http.MethodPut,
		URL:    u.String(),
		// The client's HTTP library sends Content-Length by itself.
		Header: map[string]string{"X-Amz-Checksum-Sha256": base64Sum(sum)},
	}, nil
}

// Parts implements blob.Store.
func (s *Store) Parts(ctx context.Context, up blob.Upload) ([]blob.Part, error) {
	if err := blob.CheckKey(up.Key); err != nil {
		return nil, err
	}
	return s.parts(ctx, up, 0, blob.MaxParts)
}

// parts lists up to limit parts after the given number.
func (s *Store) parts(ctx context.Context, up blob.Upload, after, limit int) ([]blob.Part, error) {
	if up.ID == "" {
		return nil, noUpload(up)
	}
	var parts []blob.Part
	for {
		page, err := s.core.ListObjectParts(ctx, s.bucket, s.name(up.Key), up.ID, after, min(limit-len(parts), 1000))
		if err != nil {
			if err = failure(ctx, "list parts of "+up.Key, err); errors.Is(err, ci.ErrNotFound) {
				return nil, noUpload(up)
			}
			return nil, err
		}
		for _, p := range page.ObjectParts {
			parts = append(parts, blob.Part{Number: p.PartNumber, Size: p.Size, SHA256: sumBase64(p.ChecksumSHA256), ETag: p.ETag})
		}
		if !page.IsTruncated || len(parts) >= limit || page.NextPartNumberMarker <= after {
			return parts, nil
		}
		after = page.NextPartNumberMarker
	}
}

// Seal implements blob.Store. No content passes through: the service has
// compared each part with the SHA-256 that its URL bound, Seal compares these
// with the declared ones and has the service put together exactly those. The
// SHA-256 of the whole is thereby verified only for a single part; that of
// several is verified by every consumer.
func (s *Store) Seal(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	if err := blob.CheckKey(up.Key); err != nil {
		return err
	}
	err := s.seal(ctx, up, parts)
	if errors.Is(err, ci.ErrDigest) {
		return errors.Join(err, s.Abort(ctx, up))
	}
	return err
}

func (s *Store) seal(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	stored, err := s.Parts(ctx, up)
	if errors.Is(err, ci.ErrNotFound) {
		// The answer of an earlier Seal may have been lost.
		if sealed := s.awaitSealed(ctx, up, parts); !errors.Is(sealed, ci.ErrNotFound) {
			return sealed
		}
		return err
	}
	if err != nil {
		return err
	}
	if err := blob.CheckParts(up, parts); err != nil {
		return err
	}
	complete, err := match(parts, stored)
	if err != nil {
		return err
	}
	if len(parts) == 1 && parts[0].SHA256 != up.SHA256 {
		return ci.Errorf(ci.ErrDigest, "the object %s does not have the promised SHA-256", up.Key)
	}
	var opts minio.PutObjectOptions
	opts.SetMatchETagExcept("*")
	_, err = s.core.CompleteMultipartUpload(ctx, s.bucket, s.name(up.Key), up.ID, complete, opts)
	if err != nil {
		err = failure(ctx, "seal object "+up.Key, err)
	}
	// Also after an error: it may have been done, by this call or by another.
	sealed := s.awaitSealed(ctx, up, parts)
	switch {
	case !errors.Is(sealed, ci.ErrNotFound):
		return sealed
	case err == nil:
		return ci.Errorf(ci.ErrUnavailable, "the object %s was sealed and does not show; try again", up.Key)
	}
	return err
}

// awaitSealed is sealed, but gives an object that another Seal is putting
// together, or that does not show at once, half a second to appear.
func (s *Store) awaitSealed(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	const tries, pause = 10, 50 * time.Millisecond
	for try := 1; ; try++ {
		err := s.sealed(ctx, up, parts)
		if try == tries || !errors.Is(err, ci.ErrNotFound) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// match pairs the declared parts with the stored ones.
func match(parts, stored []blob.Part) ([]minio.CompletePart, error) {
	byNumber := make(map[int]blob.Part, len(stored))
	for _, p := range stored {
		byNumber[p.Number] = p
	}
	complete := make([]minio.CompletePart, 0, len(parts))
	for _, p := range parts {
		have, ok := byNumber[p.Number]
		switch {
		case !ok:
			return nil, ci.Errorf(ci.ErrConflict, "part %d is not stored", p.Number)
		case have.SHA256 == [32]byte{}:
			return nil, ci.Errorf(ci.ErrUnavailable, "the S3 service does not say the SHA-256 of parts; this store needs one that does")
		case have.Size != p.Size || have.SHA256 != p.SHA256:
			return nil, ci.Errorf(ci.ErrConflict, "part %d is stored with other bytes", p.Number)
		}
		complete = append(complete, minio.CompletePart{PartNumber: p.Number, ETag: have.ETag, ChecksumSHA256: base64Sum(have.SHA256)})
	}
	return complete, nil
}

// sealed returns nil if the object is there as up and parts say, ErrNotFound if
// there is none, ErrConflict if it is another.
func (s *Store) sealed(ctx context.Context, up blob.Upload, parts []blob.Part) error {
	info, err := s.stat(ctx, up.Key)
	if err != nil {
		return err
	}
	same := info.Size == up.Size && sumHex(metadata(info, metaDeclared)) == up.SHA256
	// The service's own sum over the parts' sums, where it says it.
	if got := info.ChecksumSHA256; same && got != "" && len(parts) > 0 {
		same = got == composite(parts)
	}
	if !same {
		return ci.Errorf(ci.ErrConflict, "the object %s exists with other content", up.Key)
	}
	return nil
}

// composite is the checksum that S3 gives an object in parts: the SHA-256 of the
// parts' SHA-256, and their number.
func composite(parts []blob.Part) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write(p.SHA256[:])
	}
	return fmt.Sprintf("%s-%d", base64Sum([32]byte(h.Sum(nil))), len(parts))
}

// Abort implements blob.Store.
func (s *Store) Abort(ctx context.Context, up blob.Upload) error {
	if blob.CheckKey(up.Key) != nil || up.ID == "" {
		return nil //nolint:nilerr // what no upload can be named names nothing to abort
	}
	err := s.core.AbortMultipartUpload(ctx, s.bucket, s.name(up.Key), up.ID)
	if err == nil {
		return nil
	}
	if err = failure(ctx, "abort upload of "+up.Key, err); errors.Is(err, ci.ErrNotFound) {
		return nil
	}
	return err
}

// Uploads implements blob.Store. The service does not say the Size and SHA256
// of an open upload: they are zero. Key and ID are enough for Abort.
func (s *Store) Uploads(ctx context.Context, prefix string) ([]blob.Upload, error) {
	var ups []blob.Upload
	keyMarker, idMarker := "", ""
	for {
		page, err := s.core.ListMultipartUploads(ctx, s.bucket, s.name(prefix), keyMarker, idMarker, "", 1000)
		if err != nil {
			return nil, failure(ctx, "list uploads", err)
		}
		for _, u := range page.Uploads {
			if strings.HasPrefix(u.Key, s.name(prefix)) {
				ups = append(ups, blob.Upload{Key: strings.TrimPrefix(u.Key, s.prefix), ID: u.UploadID, Opened: u.Initiated})
			}
		}
		if !page.IsTruncated || page.NextKeyMarker == keyMarker && page.NextUploadIDMarker == idMarker {
			break
		}
		keyMarker, idMarker = page.NextKeyMarker, page.NextUploadIDMarker
	}
	slices.SortFunc(ups, func(a, b blob.Upload) int {
		return cmp.Or(a.Opened.Compare(b.Opened), cmp.Compare(a.ID, b.ID))
	})
	return ups, nil
}
