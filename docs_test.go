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

// A link of a page leads to a file, and to a heading, that are there.
func TestThePagesLinkToWhatIsThere(t *testing.T) {
	t.Parallel()
	tree := os.DirFS(".")
	headings := map[string]map[string]bool{} // by page
	texts := map[string]string{}
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && skipFolder(tree, name) {
			return errOrSkip(err)
		}
		if path.Ext(name) != ".md" {
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		texts[name], headings[name] = string(text), map[string]bool{}
		for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(string(text), -1) {
			anchor := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
			headings[name][strings.ReplaceAll(anchor, " ", "-")] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	links := 0
	for page, text := range texts {
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			file, anchor, anchored := strings.Cut(m[1], "#")
			to := path.Join(path.Dir(page), file)
			if file == "" {
				to = page
			}
			if _, err := fs.Stat(tree, to); err != nil {
				t.Errorf("%s leads to %s: %v", page, m[1], err)
			} else if anchored && !headings[to][anchor] {
				t.Errorf("%s leads to %s: there is no such heading", page, m[1])
			}
		}
	}
	if links < 50 {
		t.Errorf("%d links were found", links)
	}
}

// The rooms in docs/architecture.md are the folders of the house: no other, and
// none is missing.
func TestTheRoomsAreTheFoldersOfTheHouse(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, plan, _ := strings.Cut(string(text), "\ninternal/\n")
	plan, _, _ = strings.Cut(plan, "```")
	named := map[string]bool{}
	room := "" // of the first floor
	for line := range strings.Lines(plan) {
		words := regexp.MustCompile(` {2,}`).Split(strings.TrimSpace(line), -1)
		names := strings.Fields(strings.Join(words[:len(words)-1], " ")) // the last says what they are
		floor := path.Join("internal", room)
		if !strings.HasPrefix(line, "    ") {
			floor, room = "internal", names[0]
		}
		before := ""
		for _, name := range names {
			if strings.HasSuffix(name, "/") {
				name = path.Join(before, name)
			} else {
				before = name
			}
			named[path.Join(floor, name)] = true
		}
	}
	for name := range named {
		if !isFolder(name) {
			t.Errorf("docs/architecture.md has the room %s, which is not there", name)
		}
	}
	for _, floor := range []string{"internal", "internal/server", "internal/runner"} {
		have, err := os.ReadDir(floor)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range have {
			if name := path.Join(floor, d.Name()); d.IsDir() && d.Name() != "testdata" && !named[name] {
				t.Errorf("docs/architecture.md does not have the room %s", name)
			}
		}
	}
}

func isFolder(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// errOrSkip is what a walk returns that leaves a folder out.
func errOrSkip(err error) error {
	if err != nil {
		return err
	}
	return fs.SkipDir
}
