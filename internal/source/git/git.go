// Package git asks the git program about a checkout. It is the only place that
// runs git, and it runs nothing else: the configuration of the user and of the
// system is left out, hooks, file-system monitors, filters, signature programs,
// prompts and all transports are switched off, no lock is taken, and no path or
// ref of the repository ever becomes an argument.
package git

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// maxOutput bounds what one call of git may print: 64 bytes of overhead and a
// path for each of some millions of files.
const maxOutput = 512 << 20

// Root returns the nearest directory at or above dir that holds .git, the root
// of the checkout, and whether there is one.
func Root(dir string) (string, bool) {
	at, err := filepath.Abs(dir)
	if err != nil {
		return "", false
	}
	for {
		if _, err := os.Lstat(filepath.Join(at, ".git")); err == nil {
			return at, true
		}
		above := filepath.Dir(at)
		if above == at {
			return "", false
		}
		at = above
	}
}

// Ignored reports whether the checkout that holds dir ignores dir itself.
func Ignored(ctx context.Context, dir string) (bool, error) {
	_, code, err := run(ctx, dir, "check-ignore", "-q", ".")
	return code == 0 && err == nil, err
}

// ListFiles returns the paths, relative to dir and sorted, that git tracks below
// dir, and with untracked also those that it neither tracks nor ignores. Files
// of checked-out submodules, and with untracked those of repositories that lie
// in the tree without being submodules, are in it. A path that is listed may
// have been deleted from the working tree. Ignore rules are those of the
// repository alone (.gitignore, .git/info/exclude), never the user's.
func ListFiles(ctx context.Context, dir string, untracked bool) ([]string, error) {
	paths, err := listFiles(ctx, dir, untracked, 0)
	if err != nil {
		return nil, err
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// maxNesting bounds repositories within repositories.
const maxNesting = 32

func listFiles(ctx context.Context, dir string, untracked bool, nesting int) ([]string, error) {
	if nesting > maxNesting {
		return nil, ci.Errorf(ci.ErrTooLarge, "repositories are nested more than %d deep", maxNesting)
	}
	type answer struct {
		out []byte
		err error
	}
	others := make(chan answer, 1)
	if untracked {
		go func() {
			out, err := must(ctx, dir, "ls-files", "-z", "--others", "--exclude-standard")
			others <- answer{out, err}
		}()
	} else {
		others <- answer{}
	}
	index, err := must(ctx, dir, "ls-files", "-z", "--stage")
	more := <-others
	if err != nil || more.err != nil {
		return nil, errors.Join(err, more.err)
	}
	var paths, nested []string
	for rec := range bytes.SplitSeq(index, []byte{0}) {
		// MODE SP OBJECT SP STAGE TAB PATH
		head, path, ok := bytes.Cut(rec, []byte{'\t'})
		switch {
		case !ok:
		case bytes.HasPrefix(head, []byte("160000 ")):
			nested = append(nested, string(path))
		default:
			paths = append(paths, string(path))
		}
	}
	for rec := range bytes.SplitSeq(more.out, []byte{0}) {
		if path, isDir := bytes.CutSuffix(rec, []byte{'/'}); isDir {
			nested = append(nested, string(path))
		} else if len(rec) > 0 {
			paths = append(paths, string(rec))
		}
	}
	for _, sub := range nested {
		at := filepath.Join(dir, filepath.FromSlash(sub))
		if _, err := os.Lstat(filepath.Join(at, ".git")); err != nil {
			continue // a submodule that is not checked out
		}
		below, err := listFiles(ctx, at, untracked, nesting+1)
		if err != nil {
			return nil, err
		}
		for _, p := range below {
			paths = append(paths, sub+"/"+p)
		}
	}
	return paths, nil
}

// Commit describes what is checked out. Everything in it but SHA is
// description: it decides nothing.
type Commit struct {
	// SHA is the commit's full object name, empty in a repository without commits.
	SHA string
	// Ref is the branch's full name, "refs/heads/main"; empty when HEAD is detached.
	Ref string
	// Subject is the first paragraph of the message on one line.
	Subject string
	// Author is "Name <address>", and AuthoredAt when it was written.
	Author     string
	AuthoredAt time.Time
	// Dirty says that tracked files differ from the commit, or that there are
	// files which git neither tracks nor ignores.
	Dirty bool
}

// Describe says what is checked out at dir. Only the repository's own files are
// read; filters do not run, so a file kept outside of git by a filter (LFS) may
// count as dirty.
func Describe(ctx context.Context, dir string) (Commit, error) {
	var c Commit
	out, code, err := run(ctx, dir, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
	if err != nil {
		return c, err
	}
	if code == 0 {
		c.SHA = strings.TrimSpace(string(out))
		raw, err := must(ctx, dir, "cat-file", "commit", c.SHA)
		if err != nil {
			return c, err
		}
		c.parse(raw)
	}
	if out, code, err = run(ctx, dir, "symbolic-ref", "--quiet", "HEAD"); err != nil {
		return c, err
	}
	if code == 0 {
		c.Ref = strings.TrimSpace(string(out))
	}
	filters, err := noFilters(ctx, dir)
	if err != nil {
		return c, err
	}
	status, err := must(ctx, dir, append(filters, "status", "--porcelain=v1", "-z", "--untracked-files=normal", "--ignore-submodules=dirty", "--no-renames")...)
	if err != nil {
		return c, err
	}
	c.Dirty = len(status) > 0
	return c, nil
}

// parse reads a commit object.
func (c *Commit) parse(raw []byte) {
	head, message, _ := strings.Cut(string(raw), "\n\n")
	for line := range strings.SplitSeq(head, "\n") {
		text, ok := strings.CutPrefix(line, "author ")
		if !ok {
			continue
		}
		// Name <address> SECONDS ZONE
		end := strings.LastIndexByte(text, '>')
		if end < 0 {
			continue
		}
		c.Author = text[:end+1]
		if fields := strings.Fields(text[end+1:]); len(fields) > 0 {
			if sec, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
				c.AuthoredAt = time.Unix(sec, 0).UTC()
			}
		}
	}
	subject, _, _ := strings.Cut(strings.TrimLeft(message, "\n"), "\n\n")
	c.Subject = strings.Join(strings.Fields(subject), " ")
}

// noFilters returns options that switch off each filter which the repository's
// configuration defines: their commands are the repository's, not the user's.
func noFilters(ctx context.Context, dir string) ([]string, error) {
	out, code, err := run(ctx, dir, "config", "-z", "--name-only", "--get-regexp", `^filter\..*\.(clean|process|required)$`)
	if err != nil || code != 0 {
		return nil, err
	}
	var opts []string
	for rec := range bytes.SplitSeq(out, []byte{0}) {
		name := string(rec)
		switch {
		case name == "":
		case strings.ContainsAny(name, "=\n"):
			return nil, ci.Errorf(ci.ErrUnsafe, "the repository's configuration has a filter with the name %q", name)
		case strings.HasSuffix(name, ".required"):
			opts = append(opts, "-c", name+"=false")
		default:
			opts = append(opts, "-c", name+"=")
		}
	}
	return opts, nil
}

// must runs git and takes any exit code but 0 for an error.
func must(ctx context.Context, dir string, args ...string) ([]byte, error) {
	out, code, err := run(ctx, dir, args...)
	if err == nil && code != 0 {
		err = ci.Errorf(ci.ErrUnavailable, "git could not read the repository (exit code %d): run git status there to see why", code)
	}
	return out, err
}

// run runs git in dir. Exit code 1 is an answer; 128 and others are returned
// too, with what git said as the error only when it could not run at all.
func run(ctx context.Context, dir string, args ...string) ([]byte, int, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, 0, ci.Errorf(ci.ErrInvalid, "directory %q", dir).WithCause(err)
	}
	program, err := exec.LookPath("git")
	if err != nil {
		return nil, 0, ci.Errorf(ci.ErrUnavailable, "git is not installed; it is needed to tell which files belong to the source").WithCause(err)
	}
	root, ok := Root(abs)
	if !ok {
		return nil, 0, ci.Errorf(ci.ErrNotFound, "%q is not in a git repository", dir)
	}
	fixed := []string{
		"--no-pager", "--no-optional-locks",
		"-c", "core.fsmonitor=false",
		"-c", "core.hooksPath=" + os.DevNull,
		"-c", "core.excludesFile=" + os.DevNull,
		"-c", "core.attributesFile=" + os.DevNull,
		"-c", "core.untrackedCache=false",
		"-c", "core.quotePath=true",
		"-c", "protocol.allow=never",
		// With everything above, reading a repository of another owner runs
		// nothing of his; git would refuse it as a whole.
		"-c", "safe.directory=" + root,
	}
	cmd := exec.CommandContext(ctx, program, append(fixed, args...)...)
	cmd.Dir = abs
	cmd.Env = []string{
		"LC_ALL=C", "PATH=" + filepath.Dir(program),
		"HOME=" + os.DevNull, "XDG_CONFIG_HOME=" + os.DevNull,
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_SYSTEM=" + os.DevNull, "GIT_CONFIG_GLOBAL=" + os.DevNull,
		"GIT_ATTR_NOSYSTEM=1", "GIT_OPTIONAL_LOCKS=0", "GIT_TERMINAL_PROMPT=0", "GIT_NO_LAZY_FETCH=1",
		"GIT_ALLOW_PROTOCOL=none", "GIT_NO_REPLACE_OBJECTS=1",
	}
	cmd.WaitDelay = 5 * time.Second
	out, said := &limited{most: maxOutput}, &limited{most: 4 << 10, cut: true}
	cmd.Stdout, cmd.Stderr = out, said
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return nil, 0, context.Cause(ctx)
	case err == nil:
		return out.Bytes(), 0, nil
	case out.full:
		return nil, 0, ci.Errorf(ci.ErrTooLarge, "git listed more than %d MiB of names", maxOutput>>20)
	case errors.As(err, &exit) && exit.ExitCode() == 1:
		return out.Bytes(), 1, nil
	}
	return nil, 0, ci.Errorf(ci.ErrUnavailable, "git could not read the repository; run git status there to see why").
		WithCause(errors.Join(err, errors.New(strings.TrimSpace(said.String()))))
}

// limited keeps up to most bytes; past them it fails, or drops if cut is set.
type limited struct {
	bytes.Buffer
	most int
	cut  bool
	full bool
}

func (l *limited) Write(p []byte) (int, error) {
	if room := l.most - l.Len(); len(p) > room {
		if l.cut {
			l.Buffer.Write(p[:max(0, room)])
			return len(p), nil
		}
		l.full = true
		return 0, io.ErrShortBuffer
	}
	return l.Buffer.Write(p)
}
