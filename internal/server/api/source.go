package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
	"forgeci/internal/source"
	"forgeci/internal/workflow"
)

const (
	// maxSnapshot is the most bytes of an uploaded snapshot.
	maxSnapshot = 8 << 30
	// snapshotLimit is how long one may be verified and stored for: 32 GiB of files
	// are hashed, and 8 GiB written, at 25 MiB a second.
	snapshotLimit = 30 * time.Minute
)

func (a *API) getSnapshot(w http.ResponseWriter, r *http.Request, c caller) error {
	if _, err := a.repo(r.Context(), r, c); err != nil {
		return err
	}
	src, err := a.Snapshots.Find(r.Context(), c.viewer.Org, r.PathValue("digest"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, snapshotDoc(src))
}

func snapshotDoc(s store.Source) protocol.Snapshot {
	return protocol.Snapshot{Digest: s.Digest, Blob: s.BlobDigest, Size: s.Size, Files: int(s.Files), Bytes: s.Bytes}
}

// putSnapshot takes a snapshot: the bytes are kept aside, their manifest is
// recomputed and compared with the digest of the path, then they are published.
// Nothing of a wrong one stays. Bytes that have arrived whole are published also
// when their sender does not wait for it: it finds them when it comes back.
func (a *API) putSnapshot(w http.ResponseWriter, r *http.Request, c caller) error {
	ctx := r.Context()
	if _, err := a.repo(ctx, r, c); err != nil {
		return err
	}
	want := r.PathValue("digest")
	if hexed, ok := strings.CutPrefix(want, "sha256:"); !ok || !isHex(hexed, sha256.Size) {
		return ci.Errorf(ci.ErrInvalid, "the address ends in %q: the manifest's digest is expected, sha256: and 64 characters of hex", clip(want, 80))
	}
	if src, err := a.Snapshots.Find(ctx, c.viewer.Org, want); err == nil {
		return writeJSON(w, http.StatusOK, snapshotDoc(src))
	} else if !errors.Is(err, ci.ErrNotFound) {
		return err
	}
	f, err := os.CreateTemp(a.TempDir, "snapshot-")
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "the server cannot write to its data directory, where uploads are checked: free space there; nothing was stored").WithCause(err)
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}()
	sum := sha256.New()
	size, err := receive(w, r, f, sum)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotLimit)
	defer cancel()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	blobSum := [32]byte(sum.Sum(nil))
	src := store.Source{BlobDigest: "sha256:" + hex.EncodeToString(blobSum[:]), Size: size}
	src.Digest, err = source.Verify(ctx, f, archive.SourceLimits(), func(e source.Entry) {
		src.Files++
		src.Bytes += e.Size
	})
	if err != nil {
		return err
	}
	if src.Digest != want {
		return ci.Errorf(ci.ErrDigest, "the snapshot's manifest has digest %s, the address says %s", src.Digest, clip(want, 80))
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if src, err = a.Snapshots.Publish(ctx, c.viewer.Org, src, f, blobSum); err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, snapshotDoc(src))
}

// receive writes the body to a file and a hash.
func receive(w http.ResponseWriter, r *http.Request, f *os.File, sum hash.Hash) (int64, error) {
	kept := &writing{w: io.MultiWriter(f, sum)}
	size, err := io.Copy(kept, http.MaxBytesReader(w, r.Body, maxSnapshot))
	var large *http.MaxBytesError
	switch {
	case err == nil:
		return size, nil
	case kept.err != nil:
		return 0, ci.Errorf(ci.ErrUnavailable, "the server cannot write to its data directory, where uploads are checked: free space there; nothing was stored").WithCause(err)
	case errors.As(err, &large):
		return 0, ci.Errorf(ci.ErrTooLarge, "a snapshot may have at most %d bytes", int64(maxSnapshot))
	case errors.Is(err, os.ErrDeadlineExceeded):
		return 0, errTooSlow().WithCause(err)
	default:
		return 0, ci.Errorf(ci.ErrInvalid, "the upload was cut after %d bytes; nothing was stored", size).WithCause(err)
	}
}

// writing remembers that it was the writing that failed.
type writing struct {
	w   io.Writer
	err error
}

func (w *writing) Write(b []byte) (int, error) {
	n, err := w.w.Write(b)
	if err != nil {
		w.err = err
	}
	return n, err
}

// isHex reports whether s is n bytes in lower-case hex.
func isHex(s string, n int) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == n && strings.ToLower(s) == s
}

// workflowFiles remembers parsed workflow files of recent sources: both are
// immutable.
type workflowFiles struct {
	mu    sync.Mutex
	files map[workflowKey]*workflow.File
}

type workflowKey struct{ org, digest, path string }

const workflowFilesMost = 64

func newWorkflowFiles() *workflowFiles {
	return &workflowFiles{files: map[workflowKey]*workflow.File{}}
}

func (c *workflowFiles) get(k workflowKey) *workflow.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.files[k]
}

func (c *workflowFiles) put(k workflowKey, f *workflow.File) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.files) >= workflowFilesMost {
		clear(c.files)
	}
	c.files[k] = f
}

// plan reads the workflow out of the published snapshot and compiles it.
func (a *API) plan(ctx context.Context, org ci.OrgID, req protocol.CreateRun) (ci.Plan, error) {
	key := workflowKey{string(org), req.Snapshot, req.WorkflowPath}
	file := a.files.get(key)
	if file == nil {
		src, err := a.Snapshots.Get(ctx, org, req.Snapshot)
		if err != nil {
			return ci.Plan{}, err
		}
		body, err := a.Blob.Open(ctx, src.BlobKey, 0, -1)
		if err != nil {
			return ci.Plan{}, err
		}
		defer func() { _ = body.Close() }()
		data, err := source.ReadFile(ctx, body, req.WorkflowPath, int64(workflow.DefaultLimits().Bytes)+1)
		if err != nil {
			return ci.Plan{}, err
		}
		if file, err = workflow.Parse(req.WorkflowPath, data); err != nil {
			return ci.Plan{}, err
		}
		a.files.put(key, file)
	}
	return file.Compile(workflow.CompileOptions{Inputs: req.Inputs, Jobs: req.Jobs})
}
