package archive

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"forgeci/internal/ci"
)

// UnpackOptions change how Unpack treats what it finds.
type UnpackOptions struct {
	// Replace lets an entry take the place of a file or link that stands at its
	// path; otherwise that is ErrConflict. A directory is never replaced.
	Replace bool
	// Accept, when set, judges each entry besides, before anything is written.
	Accept func(Entry) error
	// Workers is the number of files written at once; 0 as in Pack.
	Workers int
}

// Unpack reads the archive twice: once to judge all of it before anything is
// written, then to write it below dir, which is made (0700) if it is missing.
// It returns the entries with the SHA-256 of what was written. Nothing is ever
// written outside of dir or through a link, also not through one that stood in
// dir before. Modes are set exactly, whatever the umask. When Unpack fails, all
// that it made is removed again; what Replace removed does not come back.
func Unpack(ctx context.Context, r io.ReadSeeker, dir string, lim Limits, opt UnpackOptions) ([]Entry, error) {
	accept := func(e Entry, _ io.Reader) error { return nil }
	if opt.Accept != nil {
		accept = func(e Entry, _ io.Reader) error { return opt.Accept(e) }
	}
	if _, err := Read(ctx, r, lim, accept); err != nil {
		return nil, err
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "read archive again").WithCause(err)
	}
	made := false
	if err := os.Mkdir(dir, 0o700); err == nil {
		made = true
	} else if !errors.Is(err, fs.ErrExist) {
		return nil, ci.Errorf(ci.ErrUnavailable, "make directory").WithCause(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "open directory").WithCause(err)
	}
	defer root.Close()
	u := &unpacker{root: root, opt: opt, dirs: dirs{root: root}}
	err = u.run(ctx, r, lim)
	u.dirs.close()
	if err != nil {
		u.undo()
		if made {
			_ = os.Remove(dir)
		}
		return nil, err
	}
	return u.entries, nil
}

// unpacker is one run of Unpack. The reading goroutine makes directories and
// links; workers write files.
type unpacker struct {
	root *os.Root
	opt  UnpackOptions
	dirs dirs

	entries []Entry
	madeDir []string // directories that were not there, in the order made

	mu       sync.Mutex // guards madeFile
	madeFile []string
}

// batch is a run of small files for one worker.
type batch struct {
	files   []int // indices into entries
	ends    []int // where each file's content ends in data
	entries []Entry
	data    []byte
}

// Limits of a batch; a file larger than batchBytes is written by the reader.
const (
	batchBytes = 256 << 10
	batchFiles = 64
)

func (u *unpacker) run(ctx context.Context, r io.Reader, lim Limits) error {
	n := workers(u.opt.Workers)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan *batch)
	// sums keeps what workers computed apart from entries, which still grows.
	type result struct {
		index int
		sum   [32]byte
	}
	results := make([][]result, n)
	spare := make(chan *batch, n+1)
	var wg sync.WaitGroup
	for w := range n {
		wg.Go(func() {
			d := dirs{root: u.root}
			defer d.close()
			for b := range work {
				from := 0
				for i, end := range b.ends {
					e := b.entries[i]
					if ctx.Err() != nil {
						break
					}
					if err := u.write(&d, &e, b.data[from:end]); err != nil {
						cancel(err)
						break
					}
					results[w] = append(results[w], result{b.files[i], sha256.Sum256(b.data[from:end])})
					from = end
				}
				select {
				case spare <- b:
				default:
				}
			}
		})
	}
	next := &batch{}
	flush := func() error {
		if len(next.files) == 0 {
			return nil
		}
		select {
		case work <- next:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case next = <-spare:
			next.files, next.ends, next.entries, next.data = next.files[:0], next.ends[:0], next.entries[:0], next.data[:0]
		default:
			next = &batch{}
		}
		return nil
	}
	_, err := Read(ctx, r, lim, func(e Entry, content io.Reader) error {
		u.entries = append(u.entries, e)
		if e.Type != File {
			return u.place(&e)
		}
		if err := u.parent(&e); err != nil {
			return err
		}
		if e.Size > batchBytes {
			return u.stream(&u.entries[len(u.entries)-1], content)
		}
		if len(next.files) == batchFiles || len(next.data)+int(e.Size) > batchBytes {
			if err := flush(); err != nil {
				return err
			}
		}
		at := len(next.data)
		next.data = slices.Grow(next.data, int(e.Size))[:at+int(e.Size)]
		if _, err := io.ReadFull(content, next.data[at:]); err != nil {
			return err
		}
		next.files = append(next.files, len(u.entries)-1)
		next.ends = append(next.ends, len(next.data))
		next.entries = append(next.entries, e)
		return nil
	})
	if err == nil {
		err = flush()
	}
	close(work)
	wg.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return err
	}
	for _, rs := range results {
		for _, r := range rs {
			u.entries[r.index].SHA256 = r.sum
		}
	}
	return u.modes()
}

// parent makes the directories above an entry.
func (u *unpacker) parent(e *Entry) error {
	dir, _ := split(e.Path)
	if _, err := u.dirs.open(dir, u.mkdir); err != nil {
		return u.writeError(e, err)
	}
	return nil
}

func (u *unpacker) mkdir(parent *os.Root, path, name string) error {
	if err := parent.Mkdir(name, 0o700); err != nil {
		return err
	}
	u.madeDir = append(u.madeDir, path)
	return nil
}

// place makes a directory or a link.
func (u *unpacker) place(e *Entry) error {
	if e.Type == Dir {
		if _, err := u.dirs.open(e.Path, u.mkdir); err != nil {
			return u.writeError(e, err)
		}
		return nil
	}
	dir, name := split(e.Path)
	parent, err := u.dirs.open(dir, u.mkdir)
	if err != nil {
		return u.writeError(e, err)
	}
	err = parent.Symlink(e.Link, name)
	if errors.Is(err, fs.ErrExist) && u.clear(parent, name) {
		err = parent.Symlink(e.Link, name)
	}
	if err != nil {
		return u.writeError(e, err)
	}
	u.made(e.Path)
	return nil
}

func (u *unpacker) made(path string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.madeFile = append(u.madeFile, path)
}

// clear removes a file or link that is in the way, if that is wanted.
func (u *unpacker) clear(parent *os.Root, name string) bool {
	if !u.opt.Replace {
		return false
	}
	info, err := parent.Lstat(name)
	return err == nil && !info.IsDir() && parent.Remove(name) == nil
}

// create makes an empty file that was not there.
func (u *unpacker) create(d *dirs, e *Entry) (*os.File, error) {
	dir, name := split(e.Path)
	parent, err := d.open(dir, nil)
	if err != nil {
		return nil, u.writeError(e, err)
	}
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	f, err := parent.OpenFile(name, flags, 0o600)
	if errors.Is(err, fs.ErrExist) && u.clear(parent, name) {
		f, err = parent.OpenFile(name, flags, 0o600)
	}
	if err != nil {
		return nil, u.writeError(e, err)
	}
	u.made(e.Path)
	return f, nil
}

// write makes a small file.
func (u *unpacker) write(d *dirs, e *Entry, data []byte) error {
	f, err := u.create(d, e)
	if err != nil {
		return err
	}
	if len(data) > 0 {
		_, err = f.Write(data)
	}
	return u.finish(f, e, err)
}

// stream makes a large file and sets its sum.
func (u *unpacker) stream(e *Entry, content io.Reader) error {
	f, err := u.create(&u.dirs, e)
	if err != nil {
		return err
	}
	sum := sha256.New()
	buf := make([]byte, batchBytes)
	var readErr error
	for readErr == nil && err == nil {
		var n int
		n, readErr = content.Read(buf)
		sum.Write(buf[:n])
		_, err = f.Write(buf[:n])
	}
	if readErr != io.EOF && err == nil {
		_ = f.Close()
		return readErr
	}
	sum.Sum(e.SHA256[:0])
	return u.finish(f, e, err)
}

// finish sets a file's mode and closes it.
func (u *unpacker) finish(f *os.File, e *Entry, err error) error {
	if err == nil {
		err = f.Chmod(e.Mode)
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return u.writeError(e, err)
	}
	return nil
}

// modes sets the modes of directories, the deepest first, now that nothing more
// is written into them. A directory without an entry of its own gets 0755; one
// that was there before and has no entry keeps its mode.
func (u *unpacker) modes() error {
	want := map[string]fs.FileMode{}
	for _, path := range u.madeDir {
		want[path] = 0o755
	}
	for _, e := range u.entries {
		if e.Type == Dir {
			want[e.Path] = e.Mode
		}
	}
	d := dirs{root: u.root}
	defer d.close()
	paths := make([]string, 0, len(want))
	for path := range want {
		paths = append(paths, path)
	}
	slices.SortFunc(paths, func(a, b string) int { return strings.Compare(b, a) })
	for _, path := range paths {
		dir, name := split(path)
		parent, err := d.open(dir, nil)
		if err == nil {
			err = parent.Chmod(name, want[path])
		}
		if err != nil {
			return u.writeError(&Entry{Path: path}, err)
		}
	}
	return nil
}

// undo removes what was made.
func (u *unpacker) undo() {
	d := dirs{root: u.root}
	defer d.close()
	remove := func(path string) {
		dir, name := split(path)
		if parent, err := d.open(dir, nil); err == nil {
			_ = parent.Remove(name)
		}
	}
	// Directories that modes already closed have to be opened again.
	for _, path := range u.madeDir {
		_ = u.root.Chmod(path, 0o700)
	}
	for _, path := range u.madeFile {
		remove(path)
	}
	for _, path := range slices.Backward(u.madeDir) {
		remove(path)
	}
}

// writeError says why an entry cannot be written.
func (u *unpacker) writeError(e *Entry, err error) error {
	var ours *ci.Error
	var notDir *notDirError
	switch {
	case errors.As(err, &ours):
		return ours
	case errors.As(err, &notDir):
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: %s is in the way and is not a directory", quote(e.Path), quote(notDir.path))
	case errors.Is(err, fs.ErrExist):
		if twin := u.twin(e.Path); twin != "" {
			return ci.Errorf(ci.ErrConflict, "%s and %s are one name on this file system", quote(twin), quote(e.Path))
		}
		return ci.Errorf(ci.ErrConflict, "%s is already there", quote(e.Path)).WithCause(err)
	}
	return ci.Errorf(ci.ErrUnavailable, "write %s", quote(e.Path)).WithCause(err)
}

// twin returns a path already written that differs from path only in case.
func (u *unpacker) twin(path string) string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return foldedTwin(u.madeFile, path)
}

func foldedTwin(paths []string, path string) string {
	for _, p := range paths {
		if p != path && strings.EqualFold(p, path) {
			return p
		}
	}
	return ""
}
