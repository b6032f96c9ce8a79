package protocol

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/url"

	"forgeci/internal/ci"
)

// Register registers a runner; the client's token is the registration token. A
// repeat with the same public key gives the same runner, with another credential
// in place of the one before.
func (c *Client) Register(ctx context.Context, in Register) (Registered, error) {
	var out Registered
	_, err := c.do(ctx, call{route: RouteRegister, in: in, repeat: true}, &out)
	return out, err
}

// OpenSession opens a new session of the runner and ends its earlier one. When the
// answer has no session, in.After is not the runner's latest: ask again with
// Latest and the same request ID.
func (c *Client) OpenSession(ctx context.Context, in OpenSession) (SessionOpened, error) {
	var out SessionOpened
	_, err := c.do(ctx, call{route: RouteOpenSession, in: in}, &out)
	return out, err
}

// Claim asks for a job and may be held for in.Wait. It returns nil without an
// error when there was nothing to do. A repeat with the same request ID returns
// the same lease while it is current.
func (c *Client) Claim(ctx context.Context, in Claim) (*Ticket, error) {
	var out Ticket
	status, err := c.do(ctx, call{route: RouteClaim, in: in, wait: in.Wait.Std() + pollMargin}, &out)
	if err != nil || status == http.StatusNoContent {
		return nil, err
	}
	return &out, nil
}

// Watch waits for a reason to send a heartbeat at once; false means that none
// came in time. A server that does not know the route answers ErrNotFound.
func (c *Client) Watch(ctx context.Context, in Watch) (bool, error) {
	var out Watched
	_, err := c.do(ctx, call{route: RouteWatch, in: in, wait: in.Wait.Std()}, &out)
	return out.Renew, err
}

// Heartbeat renews all leases of the runner in one call; the answers stand in
// the order of in.Leases.
func (c *Client) Heartbeat(ctx context.Context, in Heartbeat) (HeartbeatReply, error) {
	var out HeartbeatReply
	if _, err := c.do(ctx, call{route: RouteHeartbeat, in: in}, &out); err != nil {
		return out, err
	}
	if len(out.Leases) != len(in.Leases) {
		return HeartbeatReply{}, ci.Errorf(ci.ErrIncompatible,
			"the server answered %d of %d leases", len(out.Leases), len(in.Leases))
	}
	return out, nil
}

// SetPhase records a phase and step transitions; when it returns nil they are durable.
func (c *Client) SetPhase(ctx context.Context, lease ci.LeaseRef, in SetPhase) error {
	_, err := c.do(ctx, call{route: RoutePhase, lease: &lease, in: in}, nil)
	return err
}

// AppendLog sends a body of frames (AppendChunk). What the reply acknowledges
// is durable; the same body may be sent again.
func (c *Client) AppendLog(ctx context.Context, lease ci.LeaseRef, body []byte) (LogReply, error) {
	var out LogReply
	_, err := c.do(ctx, call{route: RouteAppendLog, lease: &lease, raw: body}, &out)
	return out, err
}

// Complete reports the attempt's result. A repeat with the same request ID and
// body gets the same answer, also after the lease has ended.
func (c *Client) Complete(ctx context.Context, lease ci.LeaseRef, in Complete) (Completed, error) {
	var out Completed
	_, err := c.do(ctx, call{route: RouteComplete, lease: &lease, in: in}, &out)
	return out, err
}

// HandOver gives the job back; repeatable as Complete is.
func (c *Client) HandOver(ctx context.Context, lease ci.LeaseRef, in HandOver) error {
	_, err := c.do(ctx, call{route: RouteHandOver, lease: &lease, in: in}, nil)
	return err
}

// Occupancy reports attempts, also past ones, whose sandbox has ended.
func (c *Client) Occupancy(ctx context.Context, in Occupancy) error {
	_, err := c.do(ctx, call{route: RouteOccupancy, in: in}, nil)
	return err
}

// Drain says that this session takes nothing new.
func (c *Client) Drain(ctx context.Context, in Drain) error {
	_, err := c.do(ctx, call{route: RouteDrain, in: in}, nil)
	return err
}

// FetchSource streams the snapshot archive of the lease's run. The bytes are
// not verified here. The caller closes it; a stream that stalls ends with
// ErrUnavailable.
func (c *Client) FetchSource(ctx context.Context, lease ci.LeaseRef) (io.ReadCloser, error) {
	resp, err := c.stream(ctx, call{route: RouteFetchSource, lease: &lease}, nil, 0)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// NewArtifact opens an upload session, or finds the one that the same request ID opened.
func (c *Client) NewArtifact(ctx context.Context, lease ci.LeaseRef, in NewArtifact) (ArtifactSession, error) {
	var out ArtifactSession
	_, err := c.do(ctx, call{route: RouteNewArtifact, lease: &lease, in: in}, &out)
	return out, err
}

// SignParts asks for upload addresses; they stand in the order of in.Parts.
func (c *Client) SignParts(ctx context.Context, lease ci.LeaseRef, id string, in SignParts) (SignedParts, error) {
	var out SignedParts
	_, err := c.do(ctx, call{route: RouteSignParts, values: []string{id}, lease: &lease, in: in}, &out)
	if err == nil && len(out.URLs) != len(in.Parts) {
		return SignedParts{}, ci.Errorf(ci.ErrIncompatible,
			"the server signed %d of %d parts", len(out.URLs), len(in.Parts))
	}
	return out, err
}

// SealArtifact asks the server to verify the uploaded bytes and seal them.
func (c *Client) SealArtifact(ctx context.Context, lease ci.LeaseRef, id string, in SealArtifact) error {
	_, err := c.do(ctx, call{route: RouteSealArtifact, values: []string{id}, lease: &lease, in: in}, nil)
	return err
}

// RestoreArtifact asks for a download address of an artifact that the lease's
// ticket names.
func (c *Client) RestoreArtifact(ctx context.Context, lease ci.LeaseRef, id string) (SignedURL, error) {
	var out SignedURL
	_, err := c.do(ctx, call{route: RouteRestoreArtifact, values: []string{id}, lease: &lease}, &out)
	return out, err
}

// Upload sends size bytes of body to a signed address, without any credential,
// and returns the ETag. An address without a host is one of the server's own.
// A refusal of the store is typed by its status: an address that has expired or
// does not allow this is ErrForbidden, a store that is away ErrUnavailable.
func (c *Client) Upload(ctx context.Context, to SignedURL, body io.Reader, size int64) (etag string, err error) {
	resp, err := c.signed(ctx, to, body, size) //nolint:bodyclose // drain closes it
	if err != nil {
		return "", err
	}
	defer drain(resp.Body)
	return resp.Header.Get("ETag"), nil
}

// Download opens a signed address, without any credential. The caller closes it
// and verifies the bytes.
func (c *Client) Download(ctx context.Context, from SignedURL) (io.ReadCloser, error) {
	resp, err := c.signed(ctx, from, nil, 0)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func (c *Client) signed(ctx context.Context, s SignedURL, body io.Reader, size int64) (*http.Response, error) {
	ref, err := url.Parse(s.URL)
	if err != nil {
		return nil, ci.Errorf(ci.ErrIncompatible, "the server gave an address that cannot be read").WithCause(err)
	}
	u := ref
	if ref.Host == "" {
		base := *c.base
		base.Path += "/"
		u = base.ResolveReference(ref)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	watch := newStall(c.stallTimeout, cancel)
	switch {
	case body != nil && size == 0:
		body = http.NoBody
	case body != nil:
		body = &stallReader{r: body, watch: watch}
	default:
		body = bytes.NewReader(nil)
	}
	req, err := http.NewRequestWithContext(ctx, s.Method, u.String(), body)
	if err != nil {
		watch.end()
		return nil, ci.Errorf(ci.ErrIncompatible, "the server gave an address that cannot be used").WithCause(err)
	}
	req.ContentLength = size
	req.Header.Set("User-Agent", c.userAgent)
	for k, v := range s.Header {
		req.Header.Set(k, v)
	}
	return c.send(req, watch)
}
