package s3

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

const (
	// maxPut is the largest object that can be put at once.
	maxPut = 5 << 30
	// maxBuffered is the largest object that is read into memory before it is
	// put: what is wrong with it is then found without a request, and a request
	// that fails can be made again.
	maxBuffered = 4 << 20
)

// PutNew implements blob.Store. Objects above 5 GiB are ErrTooLarge: they are
// uploaded in parts.
func (s *Store) PutNew(ctx context.Context, key string, r io.Reader, size int64, sum [32]byte) error {
	if err := blob.CheckUpload(key, size); err != nil {
		return err
	}
	if size > maxPut {
		return ci.Errorf(ci.ErrTooLarge, "an object of %d bytes has to be uploaded in parts", size)
	}
	v := blob.NewVerifier(r, size, sum)
	var body io.Reader = v
	if size <= maxBuffered {
		buf := bytes.NewBuffer(make([]byte, 0, size+bytes.MinRead))
		if _, err := buf.ReadFrom(v); err != nil {
			return err
		}
		body = bytes.NewReader(buf.Bytes())
	}
	opts := minio.PutObjectOptions{
		ContentType: "application/octet-stream",
		UserMetadata: map[string]string{
			metaSum:                 hex.EncodeToString(sum[:]),
			"x-amz-checksum-sha256": base64Sum(sum),
		},
	}
	opts.SetMatchETagExcept("*")
	// The signature covers the sum: a service that checks signatures compares
	// it with what it receives.
	_, err := s.core.PutObject(ctx, s.bucket, s.name(key), body, size, "", hex.EncodeToString(sum[:]), opts)
	if err == nil {
		return nil
	}
	if v.Failed() != nil {
		return v.Failed()
	}
	err = failure(ctx, "put object "+key, err)
	if ctx.Err() != nil || errors.Is(err, ci.ErrDigest) {
		return err
	}
	// The key exists (412, or a connection closed by a service that would not
	// read the body of a request it refuses), or it is unknown what happened.
	info, statErr := s.Stat(ctx, key)
	switch {
	case errors.Is(statErr, ci.ErrNotFound) && errors.Is(err, ci.ErrConflict):
		return ci.Errorf(ci.ErrUnavailable, "the object %s was being written and is not there; try again", key).WithCause(err)
	case errors.Is(statErr, ci.ErrNotFound):
		return err
	case statErr != nil:
		return errors.Join(statErr, err)
	case info.Size == size && info.SHA256 == sum:
		return nil
	}
	return ci.Errorf(ci.ErrConflict, "the object %s exists with other content", key)
}

// Open implements blob.Store.
func (s *Store) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	if offset < 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "offset %d", offset)
	}
	if length == 0 {
		return s.openNothing(ctx, key, offset)
	}
	var opts minio.GetObjectOptions
	var err error
	switch {
	case length > 0:
		err = opts.SetRange(offset, offset+min(length, 1<<62-offset)-1)
	case offset > 0:
		err = opts.SetRange(offset, 0)
	}
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "range").WithCause(err)
	}
	body, _, _, err := s.core.GetObject(ctx, s.bucket, s.name(key), opts)
	if err != nil {
		err = failure(ctx, "open object "+key, err)
		if errors.Is(err, ci.ErrInvalid) {
			return s.openNothing(ctx, key, offset)
		}
		return nil, err
	}
	return &bodyReader{ReadCloser: body, ctx: ctx, key: key}, nil
}

// openNothing is the answer to a range without bytes.
func (s *Store) openNothing(ctx context.Context, key string, offset int64) (io.ReadCloser, error) {
	info, err := s.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if offset > info.Size {
		return nil, ci.Errorf(ci.ErrInvalid, "offset %d in an object of %d bytes", offset, info.Size)
	}
	return io.NopCloser(bytes.NewReader(nil)), nil
}

// bodyReader types the errors of a response's body.
type bodyReader struct {
	io.ReadCloser
	ctx context.Context
	key string
}

// Read reads on.
func (b *bodyReader) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = failure(b.ctx, "read object "+b.key, err)
	}
	return n, err
}

// Stat implements blob.Store. The SHA256 is known of objects that were put at
// once, not of those that were uploaded in parts.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	info, err := s.stat(ctx, key)
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: info.Size, Modified: info.LastModified, SHA256: sumHex(metadata(info, metaSum))}, nil
}

func (s *Store) stat(ctx context.Context, key string) (minio.ObjectInfo, error) {
	if err := blob.CheckKey(key); err != nil {
		return minio.ObjectInfo{}, err
	}
	info, err := s.core.StatObject(ctx, s.bucket, s.name(key), minio.StatObjectOptions{Checksum: true})
	if err != nil {
		return info, failure(ctx, "look at object "+key, err)
	}
	return info, nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	err := s.core.RemoveObject(ctx, s.bucket, s.name(key), minio.RemoveObjectOptions{})
	if err == nil {
		return nil
	}
	if err = failure(ctx, "delete object "+key, err); errors.Is(err, ci.ErrNotFound) {
		return nil
	}
	return err
}

// List implements blob.Store. Infos carry no SHA256.
func (s *Store) List(ctx context.Context, prefix, after string, limit int) ([]blob.Info, error) {
	var found []blob.Info
	if after != "" {
		after = s.name(after)
	}
	token := ""
	for len(found) < limit {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		page, err := s.core.ListObjectsV2(s.bucket, s.name(prefix), after, token, "", min(limit-len(found), 1000))
		if err != nil {
			return nil, failure(ctx, "list objects", err)
		}
		for _, o := range page.Contents {
			if strings.HasSuffix(o.Key, "/") {
				continue // a directory that some other tool has made
			}
			found = append(found, blob.Info{Key: strings.TrimPrefix(o.Key, s.prefix), Size: o.Size, Modified: o.LastModified})
		}
		if token = page.NextContinuationToken; !page.IsTruncated || token == "" {
			break
		}
	}
	return found, nil
}

// GetURL implements blob.Store.
func (s *Store) GetURL(ctx context.Context, key string, expires time.Duration) (blob.SignedRequest, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.SignedRequest{}, err
	}
	if expires <= 0 || expires > blob.MaxURLLife {
		return blob.SignedRequest{}, ci.Errorf(ci.ErrInvalid, "a signed URL lives between 1 s and %s, not %s", blob.MaxURLLife, expires)
	}
	u, err := s.core.PresignedGetObject(ctx, s.bucket, s.name(key), max(expires, time.Second), url.Values{
		// What a job has made never runs in a browser.
		"response-content-disposition": {"attachment"},
		"response-content-type":        {"application/octet-stream"},
	})
	if err != nil {
		return blob.SignedRequest{}, failure(ctx, "sign a URL", err)
	}
	return blob.SignedRequest{Method: "GET", URL: u.String()}, nil
}
