package protocol

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"forgeci/internal/ci"
)

// Ready asks whether the server takes requests.
func (c *Client) Ready(ctx context.Context) error {
	_, err := c.do(ctx, call{route: RouteReady}, nil)
	return err
}

// EnsureLocalRepo returns the caller's repository for a checkout, made on first use.
func (c *Client) EnsureLocalRepo(ctx context.Context, in EnsureLocalRepo) (Repo, error) {
	var out Repo
	_, err := c.do(ctx, call{route: RouteEnsureLocalRepo, in: in, repeat: true}, &out)
	return out, err
}

// FindSnapshot reports whether the repository's tenant holds a source digest.
func (c *Client) FindSnapshot(ctx context.Context, repo ci.RepoID, digest string) (Snapshot, bool, error) {
	var out Snapshot
	_, err := c.do(ctx, call{route: RouteGetSnapshot, values: []string{string(repo), digest}, repeat: true}, &out)
	if errors.Is(err, ci.ErrNotFound) {
		return Snapshot{}, false, nil
	}
	return out, err == nil, err
}

// PutSnapshot uploads a snapshot archive of size bytes. The server verifies that
// its manifest has the digest; sending a snapshot that is there is no error.
func (c *Client) PutSnapshot(
	ctx context.Context, repo ci.RepoID, digest string, body io.Reader, size int64,
) (Snapshot, error) {
	var out Snapshot
	err := c.upload(ctx, call{
		route: RoutePutSnapshot, values: []string{string(repo), digest},
		header: http.Header{"Content-Type": {MediaSnapshot}, "Accept": {MediaJSON}},
		wait:   snapshotWait,
	}, body, size, &out)
	return out, err
}

// CreateRun submits a run. The same key with the same body returns the same run,
// with another body it is ErrConflict.
func (c *Client) CreateRun(ctx context.Context, repo ci.RepoID, key string, in CreateRun) (RunCreated, error) {
	var out RunCreated
	_, err := c.do(ctx, call{
		route: RouteCreateRun, values: []string{string(repo)}, in: in,
		header: http.Header{HeaderIdempotencyKey: {key}}, repeat: true,
	}, &out)
	return out, err
}

// RunsQuery selects runs; zero fields do not select.
type RunsQuery struct {
	Repo       string // name or ID
	State      ci.State
	Conclusion ci.Conclusion
	Commit     string
	Limit      int
	After      string // Page.Next of the page before
}

// Runs lists runs, newest first.
func (c *Client) Runs(ctx context.Context, q RunsQuery) (Page[RunSummary], error) {
	v := url.Values{}
	set(v, "repo", q.Repo)
	set(v, "state", string(q.State))
	set(v, "conclusion", string(q.Conclusion))
	set(v, "commit", q.Commit)
	set(v, "after", q.After)
	setInt(v, "limit", int64(q.Limit))
	var out Page[RunSummary]
	_, err := c.do(ctx, call{route: RouteListRuns, query: v, repeat: true}, &out)
	return out, err
}

// Run returns a run with its jobs.
func (c *Client) Run(ctx context.Context, id ci.RunID) (Run, error) {
	var out Run
	_, err := c.do(ctx, call{route: RouteGetRun, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// Job returns a job with its attempts and steps.
func (c *Client) Job(ctx context.Context, id ci.JobID) (Job, error) {
	var out Job
	_, err := c.do(ctx, call{route: RouteGetJob, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// Cancel asks for the run's cancellation and returns it as it then is. A run
// that is cancelling or cancelled already is no error; one that has finished
// otherwise is ErrConflict.
func (c *Client) Cancel(ctx context.Context, id ci.RunID) (RunSummary, error) {
	var out RunSummary
	_, err := c.do(ctx, call{route: RouteCancelRun, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// Retry makes a new run of a finished one; the key works as in CreateRun.
func (c *Client) Retry(ctx context.Context, id ci.RunID, key string, in RetryRun) (RunCreated, error) {
	var out RunCreated
	_, err := c.do(ctx, call{
		route: RouteRetryRun, values: []string{string(id)}, in: in,
		header: http.Header{HeaderIdempotencyKey: {key}}, repeat: true,
	}, &out)
	return out, err
}

// LogQuery selects a part of a job's log.
type LogQuery struct {
	Attempt int64 // 0 means the latest
	Step    *int  // nil means all
	Stream  string
	Tail    int64  // last lines; 0 means all; LogEvents: not with After
	From    int64  // LogLines: number of the first line
	Limit   int    // LogLines: most lines in one answer
	Search  string // LogLines: substring
	After   string // LogEvents: cursor to resume behind
}

func (q LogQuery) values() url.Values {
	v := url.Values{}
	setInt(v, "attempt", q.Attempt)
	if q.Step != nil {
		v.Set("step", strconv.Itoa(*q.Step))
	}
	set(v, "stream", q.Stream)
	set(v, "q", q.Search)
	set(v, "after", q.After)
	setInt(v, "tail", q.Tail)
	setInt(v, "from", q.From)
	setInt(v, "limit", int64(q.Limit))
	return v
}

// JobLog is a log's bytes with what the server says about them.
type JobLog struct {
	io.ReadCloser
	Epoch int64
	// Sealed: nothing will be added.
	Sealed bool
	// Truncated: the answer does not hold everything that was asked for.
	Truncated bool
	// Lines and Total count the lines answered and the lines there are; -1 when
	// the server does not say.
	Lines, Total int64
}

// JobLog opens the bytes of a job's log as they were written. The caller closes it.
func (c *Client) JobLog(ctx context.Context, id ci.JobID, q LogQuery) (*JobLog, error) {
	resp, err := c.stream(ctx, call{ //nolint:bodyclose // JobLog closes it
		route: RouteJobLog, values: []string{string(id)}, query: q.values(),
		header: http.Header{"Accept": {MediaBytes}},
	}, nil, 0)
	if err != nil {
		return nil, err
	}
	h := resp.Header
	return &JobLog{
		ReadCloser: resp.Body,
		Epoch:      max(headerInt(h, HeaderLogEpoch), 0),
		Sealed:     h.Get(HeaderLogSealed) == "true",
		Truncated:  h.Get(HeaderLogTruncated) == "true",
		Lines:      headerInt(h, HeaderLogLines),
		Total:      headerInt(h, HeaderLogTotal),
	}, nil
}

// LogLines returns a window of lines as text.
func (c *Client) LogLines(ctx context.Context, id ci.JobID, q LogQuery) (LogSlice, error) {
	var out LogSlice
	_, err := c.do(ctx, call{
		route: RouteJobLogLines, values: []string{string(id)}, query: q.values(), repeat: true,
	}, &out)
	return out, err
}

// Artifact returns what is known of an artifact.
func (c *Client) Artifact(ctx context.Context, id string) (Artifact, error) {
	var out Artifact
	_, err := c.do(ctx, call{route: RouteGetArtifact, values: []string{id}, repeat: true}, &out)
	return out, err
}

// ArtifactContent opens an artifact's archive, following the server to where the
// bytes are. They are not verified here. The caller closes it.
func (c *Client) ArtifactContent(ctx context.Context, id string) (io.ReadCloser, error) {
	resp, err := c.stream(ctx, call{
		route: RouteArtifactContent, values: []string{id}, header: http.Header{"Accept": {"*/*"}},
	}, nil, 0)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Explain returns a job's ownership history and what it means.
func (c *Client) Explain(ctx context.Context, id ci.JobID) (Explanation, error) {
	var out Explanation
	_, err := c.do(ctx, call{route: RouteExplainJob, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// Runners lists registered runners.
func (c *Client) Runners(ctx context.Context, after string) (Page[Runner], error) {
	v := url.Values{}
	set(v, "after", after)
	var out Page[Runner]
	_, err := c.do(ctx, call{route: RouteListRunners, query: v, repeat: true}, &out)
	return out, err
}

// DrainRunner lets a runner finish what it holds and take nothing new.
func (c *Client) DrainRunner(ctx context.Context, id ci.RunnerID) (Runner, error) {
	var out Runner
	_, err := c.do(ctx, call{route: RouteDrainRunner, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// FenceRunner declares a runner's host dead: its leases end at once and its
// quarantined capacity is released.
func (c *Client) FenceRunner(ctx context.Context, id ci.RunnerID) (Runner, error) {
	var out Runner
	_, err := c.do(ctx, call{route: RouteFenceRunner, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// DeadLetters lists jobs that infrastructure made fail, newest first.
func (c *Client) DeadLetters(ctx context.Context, after string) (Page[DeadLetter], error) {
	v := url.Values{}
	set(v, "after", after)
	var out Page[DeadLetter]
	_, err := c.do(ctx, call{route: RouteListDeadLetters, query: v, repeat: true}, &out)
	return out, err
}

// Requeue makes a retry run of a dead letter; a repeat returns the same run.
func (c *Client) Requeue(ctx context.Context, id ci.JobID) (RunCreated, error) {
	var out RunCreated
	_, err := c.do(ctx, call{route: RouteRequeue, values: []string{string(id)}, repeat: true}, &out)
	return out, err
}

// upload sends a raw body and decodes the document that answers it.
func (c *Client) upload(ctx context.Context, rq call, body io.Reader, size int64, out any) error {
	resp, err := c.stream(ctx, rq, body, size) //nolint:bodyclose // drain closes it
	if err != nil {
		return err
	}
	defer drain(resp.Body)
	return c.decode(resp, out)
}

func set(v url.Values, key, value string) {
	if value != "" {
		v.Set(key, value)
	}
}

func setInt(v url.Values, key string, value int64) {
	if value != 0 {
		v.Set(key, strconv.FormatInt(value, 10))
	}
}

func headerInt(h http.Header, key string) int64 {
	n, err := strconv.ParseInt(h.Get(key), 10, 64)
	if err != nil {
		return -1
	}
	return n
}
