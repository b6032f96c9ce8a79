package source

import (
	"context"
	"io"
	"os"
	"runtime"
	"strings"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/source/git"
)

// CaptureOptions say how to capture a tree. The zero value captures what git
// tracks, under archive.SourceLimits.
type CaptureOptions struct {
	// Untracked takes in files that git neither tracks nor ignores.
	Untracked bool
	// TempDir is where the snapshot is kept; empty means the system's.
	TempDir string
	// Limits bound the snapshot; zero means archive.SourceLimits.
	Limits archive.Limits
	// Workers is how many files are read at once; 0 is one per processor, four
	// at most. Each needs about 6 MiB.
	Workers int
}

// Snapshot is a captured tree. It is immutable and safe for concurrent use
// until Close.
type Snapshot struct {
	Manifest Manifest
	// Digest is the canonical source digest, BlobDigest that of the archive;
	// both "sha256:" and lower-case hex.
	Digest     string
	BlobDigest string
	// Size is the archive's length, Bytes the sum of the files' sizes.
	Size, Bytes int64
	// Files counts files and links.
	Files int

	file *os.File
	name string // of the file, when it still has one
}

// Capture reads the tree at dir once and keeps it as a snapshot in a temporary
// file. In a checkout of git the files are those that git lists (with those of
// checked-out submodules), read from the working tree: what is deleted there is
// not in the snapshot, what is changed there is in it as it is. Any other
// directory is taken whole, except for entries named .git. The ignore rules are
// those of the repository, so that everyone captures the same tree; the user's
// own do not count.
//
// Sockets, devices, named pipes and unreadable files are ErrUnsafe with all of
// their names; a file that changes while it is read is ErrConflict with its
// name; a link that leaves the tree is ErrUnsafe. The caller closes the
// snapshot.
func Capture(ctx context.Context, dir string, opt CaptureOptions) (*Snapshot, error) {
	if opt.Limits == (archive.Limits{}) {
		opt.Limits = archive.SourceLimits()
	}
	info, err := os.Stat(dir)
	if err != nil || !info.IsDir() {
		return nil, ci.Errorf(ci.ErrNotFound, "%q is not a directory", dir).WithCause(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "open directory %q", dir).WithCause(err)
	}
	defer root.Close()
	found, err := list(ctx, dir, root, opt)
	if err != nil {
		return nil, err
	}
	if err := found.Err(); err != nil {
		return nil, err
	}
	entries := found.Entries[:0]
	for _, e := range found.Entries {
		switch e.Type {
		case archive.File:
			e.Mode = canonicalMode(e.Mode)
			entries = append(entries, e)
		case archive.Symlink:
			entries = append(entries, e)
		case archive.Dir: // implied by what is in it
		}
	}
	return pack(ctx, root, entries, opt)
}

// list finds the files of the tree.
func list(ctx context.Context, dir string, root *os.Root, opt CaptureOptions) (*archive.Scanned, error) {
	checkout, inGit := git.Root(dir)
	if inGit && !sameDir(checkout, dir) {
		ignored, err := git.Ignored(ctx, dir)
		if err != nil {
			return nil, err
		}
		inGit = !ignored
	}
	if !inGit {
		return archive.Walk(ctx, root, "", func(path string, _ bool) bool { return insideGit(path) })
	}
	paths, err := git.ListFiles(ctx, dir, opt.Untracked)
	if err != nil {
		return nil, err
	}
	return archive.Scan(ctx, root, paths, opt.Workers)
}

func sameDir(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// insideGit reports whether a component of path is .git, in any case.
func insideGit(path string) bool {
	for part := range strings.SplitSeq(path, "/") {
		if strings.EqualFold(part, ".git") {
			return true
		}
	}
	return false
}

// pack writes the snapshot's file.
func pack(ctx context.Context, root *os.Root, entries []archive.Entry, opt CaptureOptions) (*Snapshot, error) {
	f, err := os.CreateTemp(opt.TempDir, "forgeci-source-*")
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "make temporary file").WithCause(err)
	}
	s := &Snapshot{file: f, name: f.Name()}
	if runtime.GOOS != "windows" && os.Remove(s.name) == nil {
		s.name = "" // nothing is left behind, whatever happens to the process
	}
	packed, err := archive.Pack(ctx, f, root, entries, opt.Limits, opt.Workers)
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	s.Manifest = manifestOf(entries)
	s.Digest = s.Manifest.Digest()
	s.BlobDigest = digestText(packed.SHA256)
	s.Size, s.Bytes, s.Files = packed.Size, packed.Bytes, len(entries)
	return s, nil
}

// Open returns a reader of the archive from its beginning. Readers are
// independent of each other; none may be used after Close.
func (s *Snapshot) Open() io.ReadSeeker { return io.NewSectionReader(s.file, 0, s.Size) }

// WriteTo writes the archive to w.
func (s *Snapshot) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, s.Open()) }

// Close removes the snapshot's file.
func (s *Snapshot) Close() error {
	err := s.file.Close()
	if s.name != "" {
		err = os.Remove(s.name)
	}
	return err
}
