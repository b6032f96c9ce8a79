package archive

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"forgeci/internal/ci"
)

// Scanned is what Scan and Walk found, each list sorted by path.
type Scanned struct {
	Entries []Entry
	// Missing are paths that were asked for and are not there.
	Missing []string
	// Refused are sockets, devices, fifos and what may not be read.
	Refused []Refusal
}

// Refusal is something that cannot go into an archive.
type Refusal struct {
	Path string
	// Why names what stands at the path: "a socket", "permission denied".
	Why string
}

// Err returns nil when nothing was refused, else an ErrUnsafe that lists what
// was (twenty at most) and says what to do.
func (s *Scanned) Err() error {
	if len(s.Refused) == 0 {
		return nil
	}
	const most = 20
	err := ci.Errorf(ci.ErrUnsafe, "%d of the files can not be stored; remove them, make them readable or have them ignored", len(s.Refused))
	for i, r := range s.Refused {
		if i == most {
			err.Fields = append(err.Fields, ci.FieldError{Detail: "…"})
			break
		}
		err.Fields = append(err.Fields, ci.FieldError{Detail: quote(r.Path) + " is " + r.Why})
	}
	return err
}

func (s *Scanned) sort() {
	slices.SortFunc(s.Entries, func(a, b Entry) int { return cmp.Compare(a.Path, b.Path) })
	slices.Sort(s.Missing)
	slices.SortFunc(s.Refused, func(a, b Refusal) int { return cmp.Compare(a.Path, b.Path) })
}

// Scan looks at the given paths below root, without following links. A path
// below a link counts as missing. The number of workers is as in Pack.
func Scan(ctx context.Context, root *os.Root, paths []string, n int) (*Scanned, error) {
	n = min(workers(n), max(1, len(paths)/64))
	parts := make([]Scanned, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for w := range n {
		wg.Go(func() {
			d := dirs{root: root}
			defer d.close()
			for i, p := range paths[len(paths)*w/n : len(paths)*(w+1)/n] {
				if i%256 == 0 && ctx.Err() != nil {
					errs[w] = context.Cause(ctx)
					return
				}
				if err := CheckPath(p, true); err != nil {
					errs[w] = err
					return
				}
				dir, name := split(p)
				parent, err := d.open(dir, nil)
				if err == nil {
					var info fs.FileInfo
					if info, err = parent.Lstat(name); err == nil {
						err = parts[w].take(parent, p, name, info)
					}
				}
				if err != nil {
					parts[w].fail(p, err)
				}
			}
		})
	}
	wg.Wait()
	all := &Scanned{}
	for _, p := range parts {
		all.Entries = append(all.Entries, p.Entries...)
		all.Missing = append(all.Missing, p.Missing...)
		all.Refused = append(all.Refused, p.Refused...)
	}
	all.sort()
	return all, errors.Join(errs...)
}

// take adds what info describes.
func (s *Scanned) take(parent *os.Root, path, name string, info fs.FileInfo) error {
	e := Entry{Path: path, Mode: info.Mode().Perm(), modified: info.ModTime().UnixNano()}
	switch info.Mode().Type() {
	case 0:
		e.Type, e.Size = File, info.Size()
	case fs.ModeDir:
		e.Type = Dir
	case fs.ModeSymlink:
		target, err := parent.Readlink(name)
		if err != nil {
			return err
		}
		e.Type, e.Mode, e.Link = Symlink, 0o777, target
	case fs.ModeSocket:
		s.Refused = append(s.Refused, Refusal{path, "a socket"})
		return nil
	case fs.ModeNamedPipe:
		s.Refused = append(s.Refused, Refusal{path, "a named pipe"})
		return nil
	default:
		s.Refused = append(s.Refused, Refusal{path, "a device or another special file"})
		return nil
	}
	s.Entries = append(s.Entries, e)
	return nil
}

func (s *Scanned) fail(path string, err error) {
	var notDir *notDirError
	switch {
	case os.IsNotExist(err), errors.As(err, &notDir), errors.Is(err, syscall.ENOTDIR):
		s.Missing = append(s.Missing, path)
	default:
		s.Refused = append(s.Refused, Refusal{path, "not readable: " + reason(err)})
	}
}

// reason is what the system said, without the path in front of it.
func reason(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error()
	}
	return err.Error()
}

// Walk lists everything below dir ("" is the root), without following links;
// directories are entries of their own, dir itself is not. What skip reports
// true for is left out, with all that is below it; skip may be nil.
func Walk(ctx context.Context, root *os.Root, dir string, skip func(path string, isDir bool) bool) (*Scanned, error) {
	if dir != "" {
		if err := CheckPath(dir, true); err != nil {
			return nil, err
		}
	}
	d := dirs{root: root}
	defer d.close()
	s := &Scanned{}
	todo := []string{dir}
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		below, err := s.list(&d, at, skip)
		if err != nil {
			s.fail(at, err)
			continue
		}
		todo = append(todo, below...)
	}
	s.sort()
	return s, nil
}

// list adds the entries of one directory and returns its directories, last first.
func (s *Scanned) list(d *dirs, at string, skip func(string, bool) bool) ([]string, error) {
	parent, err := d.open(at, nil)
	if err != nil {
		return nil, err
	}
	f, err := parent.Open(".")
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	_ = f.Close()
	if err != nil {
		return nil, err
	}
	slices.SortFunc(names, func(a, b string) int { return strings.Compare(b, a) })
	var below []string
	for _, name := range names {
		path := name
		if at != "" {
			path = at + "/" + name
		}
		info, err := parent.Lstat(name)
		if err != nil {
			s.fail(path, err)
			continue
		}
		if skip != nil && skip(path, info.IsDir()) {
			continue
		}
		if err := s.take(parent, path, name, info); err != nil {
			s.fail(path, err)
			continue
		}
		if info.IsDir() {
			below = append(below, path)
		}
	}
	return below, nil
}
