package workflow

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
)

func TestDiscoverFindsTheNamesThatScriptsRelyOn(t *testing.T) {
	t.Parallel()
	file := &fstest.MapFile{}
	for name, c := range map[string]struct {
		fs   fstest.MapFS
		want []string
	}{
		"nothing":   {fstest.MapFS{"README.md": file}, nil},
		"one":       {fstest.MapFS{".forgeci.yaml": file, "a.yaml": file}, []string{".forgeci.yaml"}},
		"directory": {fstest.MapFS{".forgeci/b.yaml": file, ".forgeci/a.yaml": file, ".forgeci/sub/c.yaml": file, ".forgeci/x.sh": file, ".forgeci/.hidden.yaml": file}, []string{".forgeci/a.yaml", ".forgeci/b.yaml"}},
		"both":      {fstest.MapFS{".forgeci/b.yaml": file, ".forgeci.yaml": file}, []string{".forgeci.yaml", ".forgeci/b.yaml"}},
		"no file":   {fstest.MapFS{".forgeci.yaml/x": file, ".forgeci/a.yaml": {Mode: fs.ModeSymlink}, ".forgeci/d.yaml/x": file}, nil},
		"a file":    {fstest.MapFS{".forgeci": file}, nil},
	} {
		got, err := Discover(c.fs)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
	for _, name := range []string{".forgeci.yml", ".forgeci/a.yml"} {
		if _, err := Discover(fstest.MapFS{name: file}); ci.KindOf(err) != ci.ErrInvalid || !strings.Contains(err.Error(), name) {
			t.Errorf("%s would be overlooked in silence: %v", name, err)
		}
	}
}
