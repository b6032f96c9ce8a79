package archive

import (
	"os"
	"strings"
)

// dirs opens directories below a root, each relative to the one above it, and
// keeps the last chain open: entries in path order cost one open per directory,
// not one per path component. It never goes through a link that stands there
// when it looks, and never out of the root whatever happens. Not safe for
// concurrent use.
type dirs struct {
	root  *os.Root
	chain []openDir
}

type openDir struct {
	path string
	root *os.Root
}

// maxOpenDirs bounds the descriptors that one chain holds, for trees that are
// thousands of levels deep.
const maxOpenDirs = 256

// open returns the directory at path ("" is the root itself). It belongs to d
// and is good until the next open. When create is set, a directory that is
// missing is made by it first.
func (d *dirs) open(path string, create func(parent *os.Root, path, name string) error) (*os.Root, error) {
	for len(d.chain) > 0 {
		top := d.chain[len(d.chain)-1]
		if path == top.path || strings.HasPrefix(path, top.path) && path[len(top.path)] == '/' {
			break
		}
		d.chain = d.chain[:len(d.chain)-1]
		_ = top.root.Close()
	}
	at, from := d.root, 0
	if len(d.chain) > 0 {
		top := d.chain[len(d.chain)-1]
		at, from = top.root, len(top.path)+1
	}
	for from < len(path) {
		to := len(path)
		if i := strings.IndexByte(path[from:], '/'); i >= 0 {
			to = from + i
		}
		next, err := enter(at, path[:to], path[from:to], create)
		if err != nil {
			return nil, err
		}
		d.chain = append(d.chain, openDir{path: path[:to], root: next})
		if len(d.chain) > maxOpenDirs {
			_ = d.chain[0].root.Close()
			d.chain = append(d.chain[:0], d.chain[1:]...)
		}
		at, from = next, to+1
	}
	return at, nil
}

// enter opens name in parent if it is a directory and not a link to one.
func enter(parent *os.Root, path, name string, create func(*os.Root, string, string) error) (*os.Root, error) {
	info, err := parent.Lstat(name)
	if os.IsNotExist(err) && create != nil {
		if err := create(parent, path, name); err != nil {
			return nil, err
		}
		info, err = parent.Lstat(name)
	}
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, &notDirError{path: path}
	}
	next, err := parent.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	opened, err := next.Stat(".")
	if err != nil || !os.SameFile(info, opened) {
		_ = next.Close()
		return nil, &notDirError{path: path}
	}
	return next, nil
}

// close closes what is open. d can be used again.
func (d *dirs) close() {
	for _, o := range d.chain {
		_ = o.root.Close()
	}
	d.chain = nil
}

// notDirError says that something other than a directory stands at a path.
type notDirError struct{ path string }

func (e *notDirError) Error() string { return quote(e.path) + " is not a directory" }

// split returns the directory of a path ("" at the top) and its last name.
func split(path string) (dir, name string) {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}
