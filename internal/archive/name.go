package archive

import (
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"forgeci/internal/ci"
)

// CheckPath reports whether path may name an entry, as an ErrUnsafe that quotes
// it (shortened) when it may not. A path is refused when it is empty, absolute
// or not clean, has a ".." (also behind backslashes or in letters that fold to
// dots and slashes), begins with a drive or a backslash, or holds NUL; other
// control bytes are refused unless control is set.
func CheckPath(path string, control bool) error {
	if path == "" {
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry: empty name")
	}
	if why := pathProblem(path, control); why != "" {
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: %s", quote(path), why)
	}
	return nil
}

func pathProblem(path string, control bool) string {
	if path[0] == '/' {
		return "the name is absolute"
	}
	if path[0] == '\\' || hasDrive(path) {
		return "the name begins with a drive or a backslash"
	}
	if why := byteProblem(path, control); why != "" {
		return why
	}
	for part := range strings.SplitSeq(path, "/") {
		switch part {
		case "..":
			return "the name leaves the tree"
		case "", ".":
			return "the name is not clean"
		}
	}
	if foldsToParent(path) {
		return "the name leaves the tree on another system"
	}
	if !filepath.IsLocal(filepath.FromSlash(path)) {
		return "this system does not allow the name"
	}
	return ""
}

func byteProblem(s string, control bool) string {
	for i := range len(s) {
		switch c := s[i]; {
		case c == 0:
			return "the name holds a NUL byte"
		case !control && (c < 0x20 || c == 0x7f):
			return "the name holds a control byte"
		}
	}
	return ""
}

func hasDrive(path string) bool {
	if len(path) < 3 || path[1] != ':' || (path[2] != '/' && path[2] != '\\') {
		return false
	}
	c := path[0] | 0x20
	return c >= 'a' && c <= 'z'
}

// foldsToParent reports whether a component becomes ".." once backslashes count
// as separators and letters that compatibility normalisation turns into dots
// and slashes are turned.
func foldsToParent(path string) bool {
	plain := true
	for i := range len(path) {
		if path[i] == '\\' || path[i] >= utf8.RuneSelf {
			plain = false
			break
		}
	}
	if plain {
		return false
	}
	folded := strings.NewReplacer(
		"\\", "/", "\uff0f", "/", "\uff3c", "/", // full-width slash and backslash
		"\u2024", ".", "\u2025", "..", "\ufe52", ".", "\uff0e", ".",
	).Replace(path)
	for part := range strings.SplitSeq(folded, "/") {
		if part == ".." {
			return true
		}
	}
	return false
}

// quote renders a name for an error: Go syntax, at most about 200 bytes.
func quote(name string) string {
	const most = 200
	if len(name) > most {
		return quote(name[:most/2]) + "…" + quote(name[len(name)-most/4:])
	}
	return strconv.Quote(name)
}

// guard judges the entries of one archive in their order.
type guard struct {
	lim   Limits
	last  string
	stats Stats
	names int64 // bytes of all paths and links' targets
	// opens holds the non-directories that are byte prefixes of last, shortest
	// first: only they could be parents of what follows.
	opens []string
	// links holds the paths of all links; climbs those targets that have ".."
	// after a name, to be judged when all links are known.
	links  map[string]struct{}
	climbs []Entry
}

func newGuard(lim Limits) *guard {
	return &guard{lim: lim, links: map[string]struct{}{}}
}

// add judges the next entry.
func (g *guard) add(e Entry) error {
	if len(e.Path) > g.lim.Path {
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: the name has %d bytes, the limit is %d", quote(e.Path), len(e.Path), g.lim.Path)
	}
	if g.names += int64(len(e.Path) + len(e.Link)); g.names > g.lim.Names {
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: the names have more than %d bytes together", quote(e.Path), g.lim.Names)
	}
	if err := CheckPath(e.Path, g.lim.ControlBytes); err != nil {
		return err
	}
	if e.Path <= g.last {
		if e.Path == g.last {
			return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the name occurs twice", quote(e.Path))
		}
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: it is out of order after %s", quote(e.Path), quote(g.last))
	}
	g.last = e.Path
	if err := g.parents(e); err != nil {
		return err
	}
	switch e.Type {
	case Dir:
	case File:
		if err := g.file(e); err != nil {
			return err
		}
	case Symlink:
		if err := g.link(e); err != nil {
			return err
		}
	default:
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: neither file, directory nor symbolic link", quote(e.Path))
	}
	g.stats.Entries++
	if g.stats.Entries > g.lim.Entries {
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: more than %d entries", quote(e.Path), g.lim.Entries)
	}
	return nil
}

// parents refuses an entry below a file or a link. Between a path and its
// children only paths that begin with it can be sorted, so a stack suffices.
func (g *guard) parents(e Entry) error {
	for len(g.opens) > 0 && !strings.HasPrefix(e.Path, g.opens[len(g.opens)-1]) {
		g.opens = g.opens[:len(g.opens)-1]
	}
	for _, above := range g.opens {
		if e.Path[len(above)] == '/' {
			return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: %s is not a directory", quote(e.Path), quote(above))
		}
	}
	if e.Type != Dir {
		g.opens = append(g.opens, e.Path)
	}
	return nil
}

func (g *guard) file(e Entry) error {
	if e.Size < 0 || e.Size > g.lim.File {
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: %d bytes, the limit of one file is %d", quote(e.Path), e.Size, g.lim.File)
	}
	g.stats.Files++
	g.stats.Bytes += e.Size
	if g.stats.Bytes > g.lim.Bytes {
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: more than %d bytes in all", quote(e.Path), g.lim.Bytes)
	}
	return nil
}

// link refuses a target that leaves the tree. A target that climbs only at its
// beginning starts in a real directory (nothing is stored below a link), so its
// ".." mean what they say; one that climbs after a name is judged by finish.
func (g *guard) link(e Entry) error {
	target := e.Link
	switch {
	case target == "":
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the link has no target", quote(e.Path))
	case len(target) > g.lim.Path:
		return ci.Errorf(ci.ErrTooLarge, "archive entry %s: the link's target has %d bytes, the limit is %d", quote(e.Path), len(target), g.lim.Path)
	case target[0] == '/', target[0] == '\\', hasDrive(target):
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the link points to the absolute path %s; make it relative or leave it out", quote(e.Path), quote(target))
	}
	if why := byteProblem(target, g.lim.ControlBytes); why != "" {
		return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the link points to %s: %s", quote(e.Path), quote(target), why)
	}
	climbs := false
	for _, text := range []string{target, strings.ReplaceAll(target, "\\", "/")} {
		depth, named := strings.Count(e.Path, "/"), false
		for part := range strings.SplitSeq(text, "/") {
			switch part {
			case "", ".":
			case "..":
				climbs = climbs || named
				if depth--; depth < 0 {
					return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the link points outside of the tree, to %s; leave it out", quote(e.Path), quote(target))
				}
			default:
				named = true
				depth++
			}
		}
	}
	g.links[e.Path] = struct{}{}
	if climbs {
		g.climbs = append(g.climbs, e)
	}
	return nil
}

// finish judges what needs all entries: a link that goes through another link
// and climbs from there could end anywhere.
func (g *guard) finish() error {
	for _, e := range g.climbs {
		var at []string
		if i := strings.LastIndexByte(e.Path, '/'); i >= 0 {
			at = strings.Split(e.Path[:i], "/")
		}
		for part := range strings.SplitSeq(e.Link, "/") {
			switch part {
			case "", ".":
			case "..":
				if _, through := g.links[strings.Join(at, "/")]; through {
					return ci.Errorf(ci.ErrUnsafe, "unsafe archive entry %s: the link climbs out of another link, by %s", quote(e.Path), quote(e.Link))
				}
				at = at[:len(at)-1]
			default:
				at = append(at, part)
			}
		}
	}
	return nil
}
