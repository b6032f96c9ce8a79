package workflow

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"

	"forgeci/internal/ci"
)

// Discover returns the paths of the workflow files of a repository, sorted:
// .forgeci.yaml and .forgeci/*.yaml, regular files only. A directory without
// any gives an empty list. A file that only misses by its extension (.yml) and
// would be overlooked is an error of kind ErrInvalid; other errors come from
// the file system.
func Discover(root fs.FS) ([]string, error) {
	var found []string
	var misspelt []string
	consider := func(name string, e fs.DirEntry) {
		switch {
		case !e.Type().IsRegular():
		case path.Ext(name) == ".yaml":
			found = append(found, name)
		case path.Ext(name) == ".yml":
			misspelt = append(misspelt, name)
		}
	}
	entries, err := fs.ReadDir(root, ".")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.Name() == ".forgeci.yaml" || e.Name() == ".forgeci.yml" {
			consider(e.Name(), e)
		}
	}
	entries, err = fs.ReadDir(root, ".forgeci")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		if info, statErr := fs.Stat(root, ".forgeci"); statErr != nil || info.IsDir() {
			return nil, err
		}
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			consider(path.Join(".forgeci", e.Name()), e)
		}
	}
	if len(misspelt) > 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "%s: workflow files end in .yaml: rename it", strings.Join(misspelt, ", "))
	}
	slices.Sort(found)
	return found, nil
}
