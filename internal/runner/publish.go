package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"forgeci/internal/archive"
	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/workflow"
)

// partsAtOnce is how many parts of an upload are sent at a time.
const partsAtOnce = 3

// errOutputMissing marks a required output that matched nothing.
var errOutputMissing = errors.New("nothing was produced")

// frozen is a declared output, archived in a file of the runner's own: what
// happens in the workspace later changes nothing.
type frozen struct {
	file string
	archive.Packed
}

// freeze archives what the patterns name (SPEC AR-1). It returns nil when they
// name nothing. The archive has one top-level entry: the file itself when one
// path names one file, else the directory that all patterns share.
func (t *transfer) freeze(ctx context.Context, patterns []string, work string) (_ *frozen, err error) {
	root, err := os.OpenRoot(work)
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "the workspace cannot be read").WithCause(err)
	}
	defer root.Close()
	sel := &selection{root: root, entries: map[string]archive.Entry{}}
	for _, p := range patterns {
		if err := sel.add(ctx, p, len(patterns) == 1); err != nil {
			return nil, err
		}
	}
	if sel.files == 0 {
		return nil, nil
	}
	base, entries := sel.arrange(filepath.Base(work))
	from, err := openBelow(root, work, base)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	f, err := os.CreateTemp(t.dir, "artifact-*")
	if err != nil {
		return nil, diskError(err)
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	packed, err := archive.Pack(ctx, f, from, entries, archive.ArtifactLimits(), 0)
	if err != nil {
		return nil, err
	}
	return &frozen{file: f.Name(), Packed: packed}, nil
}

// openBelow opens the directory that holds the archive's one top-level entry:
// the parent of the directory base of the workspace.
func openBelow(root *os.Root, work, base string) (*os.Root, error) {
	var (
		from *os.Root
		err  error
	)
	switch base {
	case "":
		from, err = os.OpenRoot(filepath.Dir(work))
	case ".":
		from, err = os.OpenRoot(work)
	default:
		from, err = root.OpenRoot(base)
	}
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnsafe, "directory %s of the workspace cannot be read", quote(base)).WithCause(err)
	}
	return from, nil
}

// selection gathers the entries that patterns name; their paths are relative to
// the workspace.
type selection struct {
	root    *os.Root
	entries map[string]archive.Entry
	bases   []string // the directory that each pattern's matches lie in
	single  string   // the one file that the one pattern names
	files   int
}

// add takes what a pattern names; "!" before it takes out again what was taken
// so far.
func (s *selection) add(ctx context.Context, pattern string, only bool) error {
	name, out := strings.CutPrefix(pattern, "!")
	clean := path.Clean(name)
	if name == "" || !filepath.IsLocal(filepath.FromSlash(clean)) || strings.ContainsRune(name, 0) {
		return ci.Errorf(ci.ErrUnsafe, "path %s leaves the workspace", quote(pattern))
	}
	if err := workflow.CheckPattern(clean); err != nil {
		return ci.Errorf(ci.ErrInvalid, "path %s: %s", quote(pattern), err)
	}
	switch {
	case out:
		s.remove(clean)
		return nil
	case !isGlob(clean):
		return s.addPath(ctx, clean, only)
	default:
		return s.addGlob(ctx, clean)
	}
}

func isGlob(pattern string) bool { return strings.ContainsAny(pattern, `*?[\`) }

// names reports whether a glob names a path, itself or a directory it lies in.
func names(glob, p string) bool {
	for at := p; at != "."; at = path.Dir(at) {
		if workflow.MatchFilter([]string{glob}, at) {
			return true
		}
	}
	return false
}

func (s *selection) remove(pattern string) {
	for p, e := range s.entries {
		if names(pattern, p) {
			delete(s.entries, p)
			if e.Type != archive.Dir {
				s.files--
			}
		}
	}
}

// addPath takes a file, or a directory with everything in it, dot-files too.
func (s *selection) addPath(ctx context.Context, name string, only bool) error {
	if name == "." {
		s.bases = append(s.bases, ".")
		return s.walk(ctx, "", nil, nil)
	}
	found, err := archive.Scan(ctx, s.root, []string{name}, 1)
	if err != nil {
		return err
	}
	if err := found.Err(); err != nil {
		return err
	}
	for _, e := range found.Entries {
		switch {
		case e.Type == archive.Dir:
			s.bases = append(s.bases, name)
			s.take(e)
			return s.walk(ctx, name, nil, nil)
		case e.Type == archive.Symlink && only:
			return ci.Errorf(ci.ErrUnsafe, "%s is a symbolic link: name what it points to", quote(name))
		case only:
			s.single = name
		}
		s.bases = append(s.bases, path.Dir(name))
		s.take(e)
	}
	return nil
}

// addGlob takes what the glob matches, directories with everything in them.
// Directories that cannot hold a match are not read.
func (s *selection) addGlob(ctx context.Context, glob string) error {
	segments := strings.Split(glob, "/")
	static := slices.IndexFunc(segments, isGlob)
	base := path.Clean(strings.Join(segments[:static], "/"))
	s.bases = append(s.bases, base)
	deep := strings.Contains(glob, "**")
	return s.walk(ctx, strings.TrimSuffix(base, "."), func(p string, dir bool) bool {
		if names(glob, p) {
			return true
		}
		n := strings.Count(p, "/") + 1
		return dir && (deep || n < len(segments) && workflow.MatchFilter([]string{strings.Join(segments[:n], "/")}, p))
	}, func(p string) bool { return names(glob, p) })
}

// walk takes what lies below a directory, as far as the conditions, if any, hold:
// whether to look at a path at all, and whether to take it.
func (s *selection) walk(ctx context.Context, dir string, look func(p string, dir bool) bool, takes func(p string) bool) error {
	found, err := archive.Walk(ctx, s.root, dir, func(p string, isDir bool) bool { return look != nil && !look(p, isDir) })
	if err != nil {
		return err
	}
	if err := found.Err(); err != nil {
		return err
	}
	for _, e := range found.Entries {
		if takes == nil || takes(e.Path) {
			s.take(e)
		}
	}
	return nil
}

func (s *selection) take(e archive.Entry) {
	if _, ok := s.entries[e.Path]; ok {
		return
	}
	s.entries[e.Path] = e
	if e.Type != archive.Dir {
		s.files++
	}
}

// arrange returns the directory to archive from, relative to the workspace ("."
// for itself, "" for its parent), and the entries relative to that, sorted.
func (s *selection) arrange(workName string) (string, []archive.Entry) {
	var strip, prefix, base string
	if s.single != "" {
		base = path.Dir(s.single)
		if base != "." {
			strip = base + "/"
		}
	} else if shared := sharedDir(s.bases); shared == "." {
		base, prefix = "", workName+"/"
	} else if base = path.Dir(shared); base != "." {
		strip = base + "/"
	}
	entries := make([]archive.Entry, 0, len(s.entries))
	for _, e := range s.entries {
		e.Path = prefix + strings.TrimPrefix(e.Path, strip)
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b archive.Entry) int { return strings.Compare(a.Path, b.Path) })
	return base, entries
}

// sharedDir returns the deepest directory that holds all of them.
func sharedDir(dirs []string) string {
	shared := strings.Split(dirs[0], "/")
	for _, d := range dirs[1:] {
		parts := strings.Split(d, "/")
		n := 0
		for n < len(shared) && n < len(parts) && shared[n] == parts[n] {
			n++
		}
		shared = shared[:n]
	}
	if len(shared) == 0 || dirs[0] == "." {
		return "."
	}
	return strings.Join(shared, "/")
}

// publish freezes and uploads one declared output and returns the sealed
// generation's ID, "" when an optional output is not there.
func (w *worker) publish(ctx context.Context, out ci.ArtifactPublish) (string, error) {
	froze, err := w.transfer.freeze(ctx, out.Paths, w.dir.Work())
	if err != nil {
		return "", err
	}
	if froze == nil {
		if out.Optional {
			w.system.line(fmt.Sprintf("artifact %s: nothing matches %s", out.Name, strings.Join(out.Paths, ", ")))
			return "", nil
		}
		return "", errors.Join(ci.Errorf(ci.ErrNotFound, "nothing matches %s", strings.Join(out.Paths, ", ")), errOutputMissing)
	}
	defer os.Remove(froze.file)
	id, err := w.transfer.upload(ctx, w.r.poller.ids.New(ci.PrefixRequest), out.Name, froze)
	// What an object store does not find says nothing about the lease.
	if why, refused := verdict(err); refused && !errors.Is(err, ci.ErrNotFound) {
		w.act(why)
	}
	if err != nil {
		return "", err
	}
	w.system.line(fmt.Sprintf("artifact %s: %s, %s", out.Name, ci.Count(froze.Files, "file"), ci.Count(froze.Bytes, "byte")))
	return id, nil
}

// upload sends a frozen output in parts and has it sealed. Parts are repeated
// one by one; what the store holds already is not sent again.
func (t *transfer) upload(ctx context.Context, request, name string, froze *frozen) (string, error) {
	var session protocol.ArtifactSession
	err := insist(ctx, quick(), func(ctx context.Context) (err error) {
		session, err = t.server.call().NewArtifact(ctx, t.lease, protocol.NewArtifact{
			RequestID: request, Name: name, Size: froze.Size, Digest: "sha256:" + hex.EncodeToString(froze.SHA256[:]),
			Files: froze.Files, Bytes: froze.Bytes,
		})
		return err
	})
	if err != nil {
		return "", fmt.Errorf("open the upload: %w", err)
	}
	if session.Sealed {
		return session.ID, nil
	}
	parts, err := t.sendParts(ctx, session, froze)
	if err != nil {
		return "", fmt.Errorf("upload: %w", err)
	}
	// The server goes on when a try is cut off, and the next one waits with it.
	err = insist(ctx, always(sendLimit), func(ctx context.Context) error {
		return t.server.call().SealArtifact(ctx, t.lease, session.ID, protocol.SealArtifact{Parts: parts})
	})
	if err != nil {
		return "", fmt.Errorf("seal: %w", err)
	}
	return session.ID, nil
}

// partCount is how many parts of the size that a server named make an upload. A
// size that no store takes is refused, whatever number it is.
func partCount(size, part int64) (int, error) {
	if part <= 0 || part > blob.MaxPartSize || size > part*blob.MaxParts {
		return 0, ci.Errorf(ci.ErrIncompatible, "the server asks for parts of %d bytes for an artifact of %d bytes", part, size)
	}
	return int((size + part - 1) / part), nil
}

func (t *transfer) sendParts(ctx context.Context, session protocol.ArtifactSession, froze *frozen) ([]protocol.ArtifactPart, error) {
	count, err := partCount(froze.Size, session.PartSize)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(froze.file)
	if err != nil {
		return nil, diskError(err)
	}
	defer f.Close()
	stored := map[int]protocol.ArtifactPart{}
	for _, p := range session.Stored {
		stored[p.Number] = p
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	parts := make([]protocol.ArtifactPart, count)
	next := make(chan int)
	var senders sync.WaitGroup
	for range min(partsAtOnce, len(parts)) {
		senders.Go(func() {
			for i := range next {
				at := int64(i) * session.PartSize
				body := io.NewSectionReader(f, at, min(session.PartSize, froze.Size-at))
				p, err := t.sendPart(ctx, session.ID, i+1, body, stored[i+1])
				if err != nil {
					cancel(err)
					continue
				}
				parts[i] = p
			}
		})
	}
	for i := range parts {
		next <- i
	}
	close(next)
	senders.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return parts, nil
}

// sendPart sends one part until the store has it. An address is asked for anew
// for every try, since it lives for minutes only. When ctx has ended nothing more of
// the part is read.
func (t *transfer) sendPart(ctx context.Context, id string, number int, body *io.SectionReader, stored protocol.ArtifactPart) (protocol.ArtifactPart, error) {
	sum := sha256.New()
	if _, err := io.Copy(sum, &reading{ctx, body}); err != nil {
		return protocol.ArtifactPart{}, err
	}
	part := protocol.ArtifactPart{Number: number, Size: body.Size(), Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil))}
	if stored.Digest == part.Digest && stored.Size == part.Size {
		return stored, nil
	}
	var wait backoff
	for refusals := 0; ; {
		if ctx.Err() != nil {
			return part, context.Cause(ctx)
		}
		signed, err := t.server.call().SignParts(ctx, t.lease, id, protocol.SignParts{Parts: []protocol.ArtifactPart{part}})
		sent := false
		if err == nil {
			if _, err = body.Seek(0, io.SeekStart); err != nil {
				return part, diskError(err)
			}
			sent = true
			part.ETag, err = t.server.call().Upload(ctx, signed.URLs[0], body, body.Size())
		}
		if err == nil {
			return part, nil
		}
		// The store's refusals may be those of an address that has just expired.
		if !transient(err) {
			if refusals++; !sent {
				return part, fmt.Errorf("part %d: %w", number, err)
			} else if refusals == fetchTries {
				return part, fmt.Errorf("part %d: %w", number, refusedByStore(err))
			}
		}
		if stopped := pause(ctx, wait.delay(err)); stopped != nil {
			return part, stopped
		}
	}
}

// refusedByStore says what it means that a store refuses bytes again and again:
// what was sent is what was announced, so it is never the output's fault. A store
// calls a request bad when what arrives is not that.
func refusedByStore(err error) error {
	if errors.Is(err, ci.ErrInvalid) {
		return ci.Errorf(ci.ErrDigest, "the object store refuses what arrives as not what was sent (digest)").WithCause(err)
	}
	return ci.Errorf(ci.ErrUnavailable, "the object store refuses it").WithCause(err)
}

// reading is a file that is read until ctx ends.
type reading struct {
	ctx context.Context
	r   io.Reader
}

func (r *reading) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		err = diskError(err)
	}
	return n, err
}
