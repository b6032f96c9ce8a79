package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/source"
)

// transfer moves the bytes of one attempt: source and artifacts in, artifacts
// out. Everything passes through files of the runner's own, is verified before
// it is used and removed after.
type transfer struct {
	server *link
	lease  ci.LeaseRef
	dir    string // for temporary files
	kept   *sources
	log    *slog.Logger
}

// fetchTries bounds how often bytes are fetched again that did not arrive whole.
const fetchTries = 5

// errArtifactMissing marks a restore that failed because the artifact is gone.
var errArtifactMissing = errors.New("a required artifact is not there")

// source materialises the verified snapshot in dir, which must be empty (SPEC
// SR-3). It fetches the archive unless this runner has it from an earlier job;
// what it has is verified all the same.
func (t *transfer) source(ctx context.Context, want protocol.Source, dir string) error {
	w := source.Want{Digest: want.Digest, Blob: want.Blob, Size: want.Size}
	if t.kept.has(want.Blob) {
		err := source.Materialise(ctx, t.kept.path(want.Blob), w, dir, archive.SourceLimits())
		switch {
		case missing(err):
		case spoiled(err):
			t.log.WarnContext(ctx, "a kept source is damaged: fetching it again", slog.Any("error", err))
			if err := t.kept.drop(want.Blob); err != nil {
				return err
			}
		case err != nil:
			return fmt.Errorf("materialise the source: %w", err)
		default:
			return nil
		}
	}
	file, err := t.fetch(ctx, want.Blob, want.Size, func(ctx context.Context) (io.ReadCloser, error) {
		return t.server.call().FetchSource(ctx, t.lease)
	})
	if err != nil {
		return fmt.Errorf("fetch the source: %w", err)
	}
	if err := source.Materialise(ctx, file, w, dir, archive.SourceLimits()); err != nil {
		return errors.Join(fmt.Errorf("materialise the source: %w", err), os.Remove(file))
	}
	if err := t.kept.keep(file, want.Blob); err != nil {
		t.log.WarnContext(ctx, "the source cannot be kept for other jobs", slog.Any("error", err))
	}
	return nil
}

// fetch streams a blob into a temporary file and verifies size and digest. What
// is damaged or cut off is fetched again, a few times.
func (t *transfer) fetch(ctx context.Context, digest string, size int64, open func(context.Context) (io.ReadCloser, error)) (string, error) {
	var wait backoff
	damaged := 0
	for {
		file, err := t.fetchOnce(ctx, digest, size, open)
		if err == nil {
			return file, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if errors.Is(err, ci.ErrDigest) {
			damaged++
		}
		// A refused address has expired: the next try asks for another.
		again := transient(err) || errors.Is(err, ci.ErrDigest) || errors.Is(err, ci.ErrForbidden)
		if !again || damaged == fetchTries {
			return "", err
		}
		if err := pause(ctx, wait.delay(err)); err != nil {
			return "", err
		}
	}
}

func (t *transfer) fetchOnce(ctx context.Context, digest string, size int64, open func(context.Context) (io.ReadCloser, error)) (_ string, err error) {
	body, err := open(ctx)
	if err != nil {
		return "", err
	}
	defer body.Close()
	f, err := os.CreateTemp(t.dir, "fetch-*")
	if err != nil {
		return "", diskError(err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), io.LimitReader(body, size+1))
	if closed := f.Close(); closed != nil {
		return "", diskError(closed)
	}
	if err != nil {
		if _, ok := errors.AsType[*ci.Error](err); ok {
			return "", err
		}
		return "", ci.Errorf(ci.ErrUnavailable, "the download was cut off after %d of %d bytes", n, size).WithCause(err)
	}
	if n != size {
		return "", ci.Errorf(ci.ErrDigest, "the download has %d bytes or more, not %d", n, size)
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != digest {
		return "", ci.Errorf(ci.ErrDigest, "the download has the digest %s, not %s", got, digest)
	}
	return f.Name(), nil
}

func diskError(err error) *ci.Error {
	return ci.Errorf(ci.ErrUnavailable, "the runner's disk refuses").WithCause(err)
}

// restore fetches an artifact and puts it into the workspace: a single file at
// the path, everything else into the directory at the path (docs/artifacts.md).
func (t *transfer) restore(ctx context.Context, in protocol.RestoreArtifact, work string) error {
	if in.Path == "" {
		in.Path = "." // the workspace itself
	}
	if !filepath.IsLocal(filepath.FromSlash(in.Path)) {
		return ci.Errorf(ci.ErrUnsafe, "the restore path %q leaves the workspace", in.Path)
	}
	file, err := t.fetch(ctx, in.Digest, in.Size, func(ctx context.Context) (io.ReadCloser, error) {
		to, err := t.server.call().RestoreArtifact(ctx, t.lease, in.ID)
		if err != nil {
			return nil, err
		}
		return t.server.call().Download(ctx, to)
	})
	if errors.Is(err, ci.ErrNotFound) || errors.Is(err, ci.ErrGone) {
		return errors.Join(errArtifactMissing, err)
	}
	if err != nil {
		return err
	}
	defer os.Remove(file)
	f, err := os.Open(file)
	if err != nil {
		return diskError(err)
	}
	defer f.Close()
	// The staging directory is on the workspace's file system, so that what was
	// unpacked whole is moved, not copied.
	home := filepath.Dir(work)
	staging, err := os.MkdirTemp(home, ".restore-*")
	if err != nil {
		return diskError(err)
	}
	defer os.RemoveAll(staging)
	if _, err := archive.Unpack(ctx, f, staging, archive.ArtifactLimits(), archive.UnpackOptions{}); err != nil {
		return err
	}
	root, err := os.OpenRoot(home)
	if err != nil {
		return diskError(err)
	}
	defer root.Close()
	return place1(root, filepath.Base(staging), path.Join(filepath.Base(work), path.Clean(in.Path)), strings.HasSuffix(in.Path, "/"))
}

// place1 moves the one top-level entry of an unpacked artifact to its place.
func place1(root *os.Root, staging, to string, into bool) error {
	names, err := listDir(root, staging)
	if err != nil {
		return err
	}
	if len(names) != 1 {
		return ci.Errorf(ci.ErrUnsafe, "the artifact does not have one top-level entry but %d", len(names))
	}
	from := path.Join(staging, names[0])
	info, err := root.Lstat(from)
	if err != nil {
		return diskError(err)
	}
	if !info.IsDir() {
		if at, err := root.Stat(to); into || err == nil && at.IsDir() {
			to = path.Join(to, names[0])
		}
	}
	if err := root.MkdirAll(path.Dir(to), 0o755); err != nil {
		return ci.Errorf(ci.ErrConflict, "the restore path cannot be made").WithCause(err)
	}
	return merge(root, from, to)
}

// merge moves from to to. A directory that is there already takes the other's
// content; files are replaced; a directory and a file never replace each other.
func merge(root *os.Root, from, to string) error {
	info, err := root.Lstat(from)
	if err != nil {
		return diskError(err)
	}
	at, err := root.Lstat(to)
	switch {
	case errors.Is(err, os.ErrNotExist), err == nil && !info.IsDir() && !at.IsDir():
		if err := root.Rename(from, to); err != nil {
			return ci.Errorf(ci.ErrConflict, "%s cannot be put into the workspace", quote(to)).WithCause(err)
		}
		return nil
	case err != nil:
		return ci.Errorf(ci.ErrUnsafe, "%s cannot be reached in the workspace", quote(to)).WithCause(err)
	case info.IsDir() != at.IsDir():
		return ci.Errorf(ci.ErrConflict, "%s is in the way of the artifact", quote(to))
	}
	names, err := listDir(root, from)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := merge(root, path.Join(from, name), path.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

func listDir(root *os.Root, dir string) ([]string, error) {
	f, err := root.Open(dir)
	if err != nil {
		return nil, diskError(err)
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, diskError(err)
	}
	return names, nil
}

// prepare makes the job's place: workspace, source, restored artifacts, sandbox.
func (w *worker) prepare(ctx context.Context, with executor.Executor) error {
	recorded, err := w.settle()
	if err != nil {
		return fmt.Errorf("make the workspace: %w", err)
	}
	if err := errors.Join(w.furnish(ctx), <-recorded); err != nil {
		return err
	}
	job := w.dir.Job(w.grace())
	job.Owned = w.owned
	w.box, err = with.Open(ctx, job)
	if err != nil {
		w.box = nil
		return fmt.Errorf("open the sandbox: %w", err)
	}
	return nil
}

// furnish puts source and restored artifacts into the workspace.
func (w *worker) furnish(ctx context.Context) error {
	w.transfer = &transfer{server: w.r.server, lease: w.lease, dir: w.r.cfg.DataDir, kept: w.r.sources, log: w.log}
	begin := time.Now()
	if err := w.allBound(); err != nil {
		return err
	}
	if err := w.transfer.source(ctx, w.ticket.Source, w.dir.Work()); err != nil {
		return err
	}
	w.verified = w.ticket.Source.Digest
	for _, in := range w.ticket.Restore {
		if err := w.transfer.restore(ctx, in, w.dir.Work()); err != nil {
			return fmt.Errorf("restore artifact %s to %s: %w", in.Name, in.Path, err)
		}
		w.system.line(fmt.Sprintf("artifact %s restored to %s", in.Name, in.Path))
	}
	w.log.DebugContext(ctx, "prepared", slog.Duration("after", time.Since(begin)))
	return w.dir.GiveToOwner()
}

// allBound demands that the ticket resolves everything that the job restores: the
// server leaves out what its producers did not publish, and a job never begins
// without a file that it asked for.
func (w *worker) allBound() error {
	for _, want := range w.ticket.Job.Restore {
		bound := slices.ContainsFunc(w.ticket.Restore, func(r protocol.RestoreArtifact) bool {
			return r.Name == want.Name && r.Path == want.Path
		})
		if !bound {
			return fmt.Errorf("restore artifact %s to %s: job %s published none in this run: %w",
				want.Name, want.Path, want.FromJob, errArtifactMissing)
		}
	}
	return nil
}
