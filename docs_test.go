package forgeci_test

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

// A page that names a test, a make target or a property of a model as its proof
// names one that is there.
func TestThePagesNameProofsThatAreThere(t *testing.T) {
	t.Parallel()
	tree := os.DirFS(".")
	have := map[string]bool{}
	test := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && skipFolder(tree, name) {
			return errOrSkip(err)
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		for _, m := range test.FindAllSubmatch(text, -1) {
			have[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllSubmatch(makefile, -1) {
		have["make "+string(m[1])] = true
	}
	named := regexp.MustCompile("`(Test\\w+)`|`(make [a-z-]+)|-run '?\\^(Test\\w+)")
	for _, page := range []string{"reliability.md", "bugs.md", "model.md"} {
		text, err := fs.ReadFile(tree, path.Join("docs", page))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			if name := m[1] + m[2] + m[3]; !have[name] {
				t.Errorf("docs/%s names %s, which is not there", page, name)
			}
		}
	}
}

// errOrSkip is what a walk returns that leaves a folder out.
func errOrSkip(err error) error {
	if err != nil {
		return err
	}
	return fs.SkipDir
}
