package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/source/git"
	"forgeci/internal/workflow"
)

// checkout is a tree on this machine and the workflow files that were chosen in it.
type checkout struct {
	// root is the absolute path of the tree's root.
	root string
	// files are paths of workflow files relative to root, with slashes.
	files []string
}

// choosing are the settings that choose workflow files.
type choosing struct {
	file string
	all  bool
}

// find finds the tree and its workflow files (SPEC decision 15). dir may be
// empty for the working directory.
//
// Without --file the root is the nearest directory, from dir up to the root of
// the checkout, that has workflow files. With --file the root is dir if one is
// given, else the root of the checkout that holds the file, else its directory.
func (ch choosing) find(dir string) (checkout, error) {
	if ch.file != "" && ch.all {
		return checkout{}, usage("--file and --all exclude each other")
	}
	at := dir
	if at == "" {
		at = "."
	}
	at, err := filepath.Abs(at)
	if err != nil {
		return checkout{}, usage("directory %q: %s", dir, err)
	}
	if info, err := os.Stat(at); err != nil || !info.IsDir() {
		return checkout{}, usage("%q is not a directory", at)
	}
	if ch.file != "" {
		return ch.named(dir, at)
	}
	found, err := discover(at)
	if err != nil {
		return checkout{}, err
	}
	if len(found.files) == 0 {
		return checkout{}, usage("there is no workflow file in %s: write .forgeci.yaml, or name one with --file", at)
	}
	if len(found.files) > 1 && !ch.all {
		return checkout{}, usage("there are %d workflow files; name one with --file, or take --all:\n  %s",
			len(found.files), strings.Join(found.files, "\n  "))
	}
	return found, nil
}

// discover looks for workflow files from at up to the root of the checkout.
func discover(at string) (checkout, error) {
	top, inGit := git.Root(at)
	for {
		files, err := workflow.Discover(os.DirFS(at))
		if err != nil {
			return checkout{}, err
		}
		above := filepath.Dir(at)
		if len(files) > 0 || !inGit || at == top || above == at {
			return checkout{root: at, files: files}, nil
		}
		at = above
	}
}

// named takes the file of --file, relative to the working directory or to dir.
func (ch choosing) named(dir, at string) (checkout, error) {
	name := ch.file
	if _, err := os.Stat(name); err != nil && !filepath.IsAbs(name) {
		if inDir := filepath.Join(at, name); exists(inDir) {
			name = inDir
		}
	}
	name, err := filepath.Abs(name)
	if err != nil {
		return checkout{}, usage("file %q: %s", ch.file, err)
	}
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return checkout{}, usage("there is no file %q", ch.file)
	case !info.Mode().IsRegular():
		return checkout{}, usage("%q is not a file", ch.file)
	}
	root := at
	if dir == "" {
		root = filepath.Dir(name)
		if top, ok := git.Root(root); ok {
			root = top
		} else if inside(at, name) {
			root = at
		}
	}
	rel, err := filepath.Rel(root, name)
	if err != nil || !filepath.IsLocal(rel) {
		return checkout{}, usage("%q is outside of %s", ch.file, root)
	}
	return checkout{root: root, files: []string{filepath.ToSlash(rel)}}, nil
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func inside(dir, name string) bool {
	rel, err := filepath.Rel(dir, name)
	return err == nil && filepath.IsLocal(rel)
}

// parse reads and judges one of the files.
func (co checkout) parse(file string) (*workflow.File, error) {
	b, err := readWorkflow(filepath.Join(co.root, filepath.FromSlash(file)))
	if err != nil {
		return nil, err
	}
	return workflow.Parse(file, b)
}

// readWorkflow reads a workflow file, bounded by what a workflow may have.
func readWorkflow(name string) ([]byte, error) {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, usage("there is no file %q", name)
	}
	if err != nil {
		return nil, usage("%s", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, int64(workflow.DefaultLimits().Bytes)+1))
	if err != nil {
		return nil, usage("%s", err)
	}
	return b, nil
}

// key identifies the tree on this machine: its path and the host's name.
func (co checkout) key() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", ci.Errorf(ci.ErrInternal, "this host has no name").WithCause(err)
	}
	root := co.root
	if real, err := filepath.EvalSymlinks(root); err == nil {
		root = real
	}
	sum := sha256.Sum256([]byte(host + "\x00" + root))
	return hex.EncodeToString(sum[:]), nil
}

// describe says which commit is checked out. A tree without git, or a git that
// cannot be asked, is no error: it is description only.
func (co checkout) describe(ctx context.Context) (git.Commit, error) {
	if _, ok := git.Root(co.root); !ok {
		return git.Commit{}, nil
	}
	return git.Describe(ctx, co.root)
}
