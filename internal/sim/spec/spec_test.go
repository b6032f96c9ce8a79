package spec

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every property of every model is checked whole, and each has a broken variant
// that must violate it; every rule that can be taken away is.
func TestEveryPropertyCanFailAndEveryRuleIsTakenAway(t *testing.T) {
	t.Parallel()
	for _, model := range Models() {
		text, err := Text(model)
		if err != nil {
			t.Fatal(err)
		}
		assertions, formula, err := Properties(text)
		if err != nil {
			t.Fatalf("%s: %v", model, err)
		}
		noticed, taken := map[string]bool{}, map[string]bool{}
		whole := map[string]bool{}
		for _, c := range Checks() {
			if c.Model != model {
				continue
			}
			if c.Broken == "" {
				whole[c.Formula] = true
				continue
			}
			noticed[c.Fails], taken[c.Broken] = true, true
			if !slices.Contains(assertions, c.Fails) && c.Fails != formula {
				t.Errorf("%s: %s is no property of the model", c.Name(), c.Fails)
			}
		}
		if !whole[""] || !whole[formula] {
			t.Errorf("%s: the good model is not checked for its assertions and for %s", model, formula)
		}
		for _, p := range append(assertions, formula) {
			if !noticed[p] {
				t.Errorf("%s: no broken variant violates %s", model, p)
			}
		}
		for _, rule := range Rules(text) {
			if !taken[rule] {
				t.Errorf("%s: BROKEN_%s is never checked", model, rule)
			}
			delete(taken, rule)
		}
		for rule := range taken {
			t.Errorf("%s: the model has no BROKEN_%s", model, rule)
		}
	}
}

func TestChecksHaveNamesOfTheirOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, c := range Checks() {
		if seen[c.Name()] {
			t.Errorf("two checks are called %s", c.Name())
		}
		seen[c.Name()] = true
	}
}

// The page names every property and every rule, and every file and function that
// it names is there.
func TestThePageOfTheModelsIsTrue(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..", "..")
	page, err := os.ReadFile(filepath.Join(root, "docs", "model.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, model := range Models() {
		text, err := Text(model)
		if err != nil {
			t.Fatal(err)
		}
		assertions, formula, err := Properties(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range slices.Concat(assertions, []string{formula}, Rules(text)) {
			if !strings.Contains(string(page), "`"+name+"`") {
				t.Errorf("docs/model.md does not mention %s of %s.pml", name, model)
			}
		}
	}
	named := regexp.MustCompile("`((?:server|runner)/[\\w/.]+)(?:: ([\\w, ]+))?`").FindAllStringSubmatch(string(page), -1)
	if len(named) < 30 {
		t.Fatalf("the page names %d files: the pattern of this test is wrong", len(named))
	}
	for _, m := range named {
		file := filepath.Join(root, "internal", filepath.FromSlash(m[1]))
		have, err := declared(file)
		if err != nil {
			t.Errorf("docs/model.md: %v", err)
			continue
		}
		for name := range strings.SplitSeq(m[2], ", ") {
			if name != "" && !have[name] {
				t.Errorf("docs/model.md: %s has no %s", m[1], name)
			}
		}
	}
}

// declared returns the functions of a Go file, or the statements of a file of SQL.
func declared(file string) (map[string]bool, error) {
	names := map[string]bool{}
	if filepath.Ext(file) != ".go" {
		text, err := os.ReadFile(file)
		for _, m := range regexp.MustCompile(`(?m)^-- name: (\w+)`).FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
		return names, err
	}
	syntax, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range syntax.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			names[f.Name.Name] = true
		}
	}
	return names, nil
}
