// Package forgeci_test keeps the picture of the house true: which room may use
// which, what only one room may do, and what no file may hold. A failure names
// the place and the reason of the rule it breaks.
package forgeci_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestLayout(t *testing.T) {
	t.Parallel()
	findings, err := checkLayout(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		t.Error(f)
	}
}

// module is the import path of the root.
const module = "forgeci"

// finding is one broken rule in one place.
type finding struct{ rule, where, what, reason string }

func (f finding) String() string {
	return fmt.Sprintf("%s: %s\n\trule %s: %s", f.where, f.what, f.rule, f.reason)
}

// rooms under rule 1 and 2: what of the house each may import beside itself,
// and what of other modules. The longest matching prefix decides.
type room struct {
	name    string   // folder under internal/
	inside  []string // folders under internal/ it may import, with what is below them
	outside []string // module path prefixes it may import; nil means any that no other rule forbids
	reason  string
}

var (
	none       = []string{}
	compressor = []string{"github.com/klauspost/compress"}
)

func rooms() []room {
	const pure = "a pure room can be read, tested and fuzzed alone"
	const sides = "server and runner meet on the wire only; what they share is named here"
	return []room{
		{"ci", none, none, "the words depend on nothing, so that everything may depend on them"},
		{"protocol", []string{"ci"}, none, "what is said on the wire needs the words and nothing else"},
		{"archive", []string{"ci"}, compressor, pure},
		{"blob", []string{"ci"}, compressor, pure},
		{"blob/s3", []string{"ci", "blob"}, append([]string{"github.com/minio/minio-go"}, compressor...), "the one place that knows the S3 client"},
		{"blob/fs", []string{"ci", "blob"}, []string{"golang.org/x/sys"}, "a disk, and what its system calls"},
		{"runner/redact", []string{"ci"}, compressor, pure},
		{"server/dag", []string{"ci"}, none, pure},
		{"server/policy", []string{"ci"}, none, pure},
		{"workflow", []string{"ci"}, []string{"go.yaml.in/yaml", "cel.dev/", "github.com/bmatcuk/doublestar"}, "a workflow file is judged by its text alone"},
		{"source", []string{"ci", "archive", "blob"}, nil, "the snapshot is the same thing on every machine"},
		{"server", []string{"ci", "protocol", "workflow", "source", "archive", "blob"}, nil, sides},
		{"runner", []string{"ci", "protocol", "workflow", "source", "archive", "blob"}, nil, sides},
	}
}

// owner says that a thing is used in some folders only. Folders are under
// internal/ unless they start with a slash, which is the root.
type owner struct {
	rule    string
	imports []string // import path prefixes
	uses    []string // package.Name selectors
	in      []string
	tests   bool // test files are bound, too
	reason  string
}

func owners() []owner {
	return []owner{
		{
			rule:    "sql",
			imports: []string{"database/sql", "github.com/jackc/pgx", "modernc.org/sqlite", "github.com/lib/pq", "github.com/mattn/go-sqlite3"},
			in:      []string{"server/store", "testkit"},
			reason:  "only store speaks SQL: one text for two databases, in one place, under one suite",
		},
		{
			rule:    "s3",
			imports: []string{"github.com/minio/", "github.com/aws/"},
			in:      []string{"blob/s3", "testkit"},
			reason:  "only blob/s3 knows an S3 client; everyone else has the create-only contract of blob",
		},
		{
			rule:    "process",
			imports: []string{"os/exec"},
			uses:    []string{"os.StartProcess", "syscall.ForkExec", "syscall.StartProcess", "syscall.Exec"},
			in:      []string{"runner/executor", "server/fleet", "source/git", "cli", "testkit"},
			reason:  "a process is started where its tree, its environment and its end are looked after",
		},
		{
			rule:    "forge",
			imports: []string{"github.com/google/go-github", "code.gitea.io/sdk", "gitlab.com/gitlab-org/api", "github.com/xanzy/go-gitlab"},
			in:      []string{"server/forge"},
			reason:  "only forge knows a code host",
		},
		{
			rule:    "environment",
			imports: []string{"flag", "github.com/spf13/cobra", "github.com/spf13/pflag"},
			uses:    []string{"os.Getenv", "os.LookupEnv", "os.Environ", "os.ExpandEnv", "os.Setenv", "os.Unsetenv", "syscall.Getenv", "syscall.Environ"},
			in:      []string{"cli", "testkit", "/cmd"},
			reason:  "only cli reads flags and environment; a library is handed its configuration",
		},
		{
			rule:   "exit",
			uses:   []string{"os.Exit", "log.Fatal", "log.Fatalf", "log.Panic", "fmt.Print", "fmt.Printf", "fmt.Println", "slog.Default", "slog.SetDefault", "slog.Info", "slog.Warn", "slog.Error", "slog.Debug"},
			in:     []string{"cli", "testkit", "/cmd", helperRoom},
			reason: "a library returns errors and is handed a logger; the process belongs to its command",
		},
		{
			rule:    "testkit",
			imports: []string{module + "/internal/testkit", module + "/internal/sim", "testing"},
			in:      []string{"testkit", "sim", "server/store/storetest", "server/forge/forgetest", "blob/blobtest", "runner/executor/executortest"},
			reason:  "what serves tests stays out of the binary",
		},
		{
			rule:    "transaction",
			imports: []string{module + "/internal/blob", module + "/internal/source", "net/http"},
			in:      []string{"!server/store"},
			reason:  "no I/O inside a transaction: store has neither blobs nor a network client in reach",
		},
	}
}

// helperRoom is the one folder whose package may have an init function and
// leave the process: the job helper must act before the rest of the binary
// starts up, which costs a tenth of a full start.
const helperRoom = "runner/executor/process/jobhelper"

// bannedNames say nothing about what is in a package.
func bannedNames() []string {
	return []string{"base", "common", "helper", "helpers", "lib", "misc", "model", "models", "shared", "types", "util", "utils"}
}

// hardLines is the size at which a file that is not a test has to be split.
const hardLines = 700

// goFile is a parsed file of the module.
type goFile struct {
	name   string // from the root, with slashes
	dir    string
	test   bool
	lines  int
	syntax *ast.File
	fset   *token.FileSet
}

// room returns the folder under internal/, or the folder with a slash in front.
func (f goFile) room() string {
	if rest, ok := strings.CutPrefix(f.dir, "internal/"); ok {
		return rest
	}
	return "/" + f.dir
}

func (f goFile) at(pos token.Pos) string {
	return f.name + ":" + strconv.Itoa(f.fset.Position(pos).Line)
}

// below reports whether folder is root or inside it.
func below(folder, root string) bool {
	return folder == root || strings.HasPrefix(folder, root+"/")
}

// imported reports whether an import path is under a prefix, at a border of
// path elements unless the prefix ends in a slash.
func imported(importPath, prefix string) bool {
	return below(importPath, strings.TrimSuffix(prefix, "/"))
}

// checkLayout applies every rule to the tree.
func checkLayout(tree fs.FS) ([]finding, error) {
	var findings []finding
	var files []goFile
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && skipFolder(tree, name):
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		findings = append(findings, checkText(name, string(text))...)
		if path.Ext(name) == ".md" {
			findings = append(findings, checkLinks(tree, name, string(text))...)
		}
		if path.Ext(name) != ".go" || strings.Contains("/"+name, "/testdata/") {
			return nil
		}
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, goFile{
			name: name, dir: path.Dir(name), test: strings.HasSuffix(name, "_test.go"),
			lines: strings.Count(string(text), "\n"), syntax: syntax, fset: fset,
		})
		return nil
	})
	for _, f := range files {
		findings = append(findings, checkImports(f)...)
		findings = append(findings, checkOwners(f)...)
		findings = append(findings, checkDeclarations(f)...)
	}
	findings = append(findings, checkPackages(files)...)
	writers, werr := checkWriters(tree, files)
	return append(findings, writers...), errors.Join(err, werr)
}

// skipFolder leaves out what is not the project's: version control, caches, the
// data of a server that was started here, other modules.
func skipFolder(tree fs.FS, name string) bool {
	if name == "." {
		return false
	}
	if name == "data" || strings.HasPrefix(path.Base(name), ".") && name != ".ci" {
		return true
	}
	_, err := fs.Stat(tree, path.Join(name, "go.mod"))
	return err == nil
}

// checkImports applies rules 1 and 2.
func checkImports(f goFile) []finding {
	if f.test {
		return nil // a test may bring the rooms around its own
	}
	var home *room
	for _, r := range rooms() {
		if below(f.room(), r.name) && (home == nil || len(r.name) > len(home.name)) {
			home = &r
		}
	}
	if home == nil {
		return nil
	}
	var findings []finding
	for _, spec := range f.syntax.Imports {
		target := importPath(spec)
		allowed := true
		switch inside, ours := strings.CutPrefix(target, module+"/internal/"); {
		case ours:
			allowed = below(inside, home.name) || slices.ContainsFunc(home.inside, func(root string) bool { return below(inside, root) })
		case strings.Contains(strings.SplitN(target, "/", 2)[0], "."):
			allowed = home.outside == nil || slices.ContainsFunc(home.outside, func(prefix string) bool { return imported(target, prefix) })
		}
		if !allowed {
			findings = append(findings, finding{"imports of " + home.name, f.at(spec.Pos()), "imports " + target, home.reason})
		}
	}
	return findings
}

// checkOwners applies rules 3 to 5.
func checkOwners(f goFile) []finding {
	var findings []finding
	names := importNames(f.syntax)
	for _, o := range owners() {
		if f.test && !o.tests || o.allows(f.room()) {
			continue
		}
		for _, spec := range f.syntax.Imports {
			target := importPath(spec)
			if slices.ContainsFunc(o.imports, func(prefix string) bool { return imported(target, prefix) }) {
				findings = append(findings, finding{o.rule, f.at(spec.Pos()), "imports " + target, o.reason})
			}
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			selector, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := selector.X.(*ast.Ident)
			if !ok || names[x.Name] == "" {
				return true
			}
			if use := path.Base(names[x.Name]) + "." + selector.Sel.Name; slices.Contains(o.uses, use) {
				findings = append(findings, finding{o.rule, f.at(n.Pos()), "uses " + use, o.reason})
			}
			return true
		})
	}
	return findings
}

// allows reports whether the rule leaves this room alone. A list of rooms with
// an exclamation mark turns the rule round: bound are those, free is the rest.
func (o owner) allows(room string) bool {
	for _, in := range o.in {
		if bound, ok := strings.CutPrefix(in, "!"); ok {
			return !below(room, bound)
		}
		if below(room, in) {
			return true
		}
	}
	return false
}

func importPath(spec *ast.ImportSpec) string {
	p, err := strconv.Unquote(spec.Path.Value)
	if err != nil {
		return spec.Path.Value
	}
	return p
}

// importNames maps the names of a file's imports to their paths. The name of a
// package without one of its own is taken from the path, which holds for the
// standard library.
func importNames(file *ast.File) map[string]string {
	names := map[string]string{}
	for _, spec := range file.Imports {
		p := importPath(spec)
		name := path.Base(p)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = p
	}
	return names
}

// checkDeclarations looks for init functions, package state, skipped tests and
// files that have grown too long.
func checkDeclarations(f goFile) []finding {
	var findings []finding
	add := func(pos token.Pos, rule, what, reason string) {
		findings = append(findings, finding{rule, f.at(pos), what, reason})
	}
	if !f.test && f.lines > hardLines {
		add(f.syntax.Package, "size", fmt.Sprintf("%d lines", f.lines), fmt.Sprintf("a file of more than %d lines is read by nobody; split it by what it does", hardLines))
	}
	for _, name := range declared(f.syntax) {
		if !f.test && foreignWord.MatchString(name.Name) {
			add(name.Pos(), "words", "declares "+name.Name, "one thing has one word, the glossary's in docs/architecture.md: workflow or run, job, retry or attempt, runner")
		}
	}
	for _, d := range f.syntax.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.Name == "init" && d.Recv == nil && !below(f.room(), helperRoom) {
				add(d.Pos(), "init", "has an init function", "nothing happens by being imported")
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok || d.Tok != token.VAR || f.test || isConstant(d, v) {
					continue
				}
				for _, name := range v.Names {
					if name.Name != "_" {
						add(name.Pos(), "globals", "has the package variable "+name.Name, "state belongs to a value that someone made; a table or pattern that is built once goes into a function by sync.OnceValue")
					}
				}
			}
		}
	}
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if s, ok := call.Fun.(*ast.SelectorExpr); ok && slices.Contains(skippers(), s.Sel.Name) && (f.test || below(f.room(), "testkit")) {
			add(n.Pos(), "skip", "calls "+s.Sel.Name, "a test runs or fails; one that skips has proved nothing and looks green")
		}
		return true
	})
	return findings
}

// foreignWord matches names that other systems have for our words.
var foreignWord = regexp.MustCompile(`[Pp]ipeline|Rerun|^rerun|^(?:Task|Agent)(?:[A-Z]|$)|[a-z](?:Task|BuildAgent)(?:[A-Z]|$)`)

// declared returns the names of the file's types and functions.
func declared(file *ast.File) []*ast.Ident {
	var names []*ast.Ident
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names = append(names, d.Name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if t, ok := spec.(*ast.TypeSpec); ok {
					names = append(names, t.Name)
				}
			}
		}
	}
	return names
}

func skippers() []string { return []string{"Skip", "Skipf", "SkipNow", "Short"} }

// isConstant reports whether a package variable cannot be meant to change: an
// embedded file, a function that computes its value once, or an error of the
// package's own that errors.New made.
func isConstant(d *ast.GenDecl, v *ast.ValueSpec) bool {
	for _, doc := range []*ast.CommentGroup{d.Doc, v.Doc} {
		if doc != nil && slices.ContainsFunc(doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//go:embed ") }) {
			return true
		}
	}
	return len(v.Values) > 0 && !slices.ContainsFunc(v.Values, func(e ast.Expr) bool {
		call, ok := e.(*ast.CallExpr)
		if !ok {
			return true
		}
		s, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		from, ok := s.X.(*ast.Ident)
		return !ok || !slices.Contains([]string{"sync.OnceValue", "sync.OnceValues", "sync.OnceFunc", "errors.New"}, from.Name+"."+s.Sel.Name) ||
			from.Name == "errors" && v.Names[0].IsExported()
	})
}

// checkPackages looks at names and comments of packages.
func checkPackages(files []goFile) []finding {
	var findings []finding
	first := map[string]goFile{}
	documented := map[string]bool{}
	for _, f := range files {
		if f.test {
			continue
		}
		if _, seen := first[f.dir]; !seen {
			first[f.dir] = f
		}
		documented[f.dir] = documented[f.dir] || f.syntax.Doc != nil
		for _, name := range []string{path.Base(f.dir), f.syntax.Name.Name} {
			if slices.Contains(bannedNames(), name) {
				findings = append(findings, finding{"names", f.name, "package is called " + name, "a room is called after what is in it"})
				break
			}
		}
	}
	for dir, f := range first {
		if !documented[dir] {
			findings = append(findings, finding{"comments", f.name, "package has no comment", "a package says what it guarantees before its first line"})
		}
	}
	slices.SortFunc(findings, func(a, b finding) int { return strings.Compare(a.where, b.where) })
	return findings
}

// forbiddenText lists what no file may hold. The words are put together here so
// that this file does not hold them.
func forbiddenText() map[string][]string {
	return map[string][]string{
		"what is not done is an issue, not a remark in the code": {"TO" + "DO", "FIX" + "ME", "XX" + "X:"},
		"the project speaks of itself, not of the place where it was written": {
			"/work/" + "shared", "/work/" + ".library", "/work/" + "bench", "/tmp/" + "h/", "/tmp/" + "hub", "/tmp/" + "brief",
			"proxy." + "golang.org", "registry." + "npmjs.org", "deb." + "debian.org", "a-" + "seed-",
			"Cla" + "ude", "Anth" + "ropic", "Chat" + "GPT", "Open" + "AI", "Co" + "pilot",
		},
	}
}

// checkText looks for forbidden words in a text file.
func checkText(name, text string) []finding {
	if slices.Contains([]string{"go.sum", "go.work.sum"}, path.Base(name)) || strings.ContainsRune(text[:min(len(text), 8000)], 0) {
		return nil
	}
	var findings []finding
	for reason, words := range forbiddenText() {
		for _, word := range words {
			if before, _, found := strings.Cut(text, word); found {
				line := 1 + strings.Count(before, "\n")
				findings = append(findings, finding{"text", fmt.Sprintf("%s:%d", name, line), fmt.Sprintf("holds %q", word), reason})
			}
		}
	}
	return findings
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fence   = regexp.MustCompile("(?ms)^```.*?^```[^\n]*$")
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	marks   = regexp.MustCompile("[^a-z0-9 _-]+")
)

// checkLinks resolves the links of a page that stay inside the tree.
func checkLinks(tree fs.FS, name, text string) []finding {
	var findings []finding
	for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		target, anchor, _ := strings.Cut(m[1], "#")
		if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
			continue
		}
		file := name
		if target != "" {
			file = path.Join(path.Dir(name), target)
		}
		content, err := fs.ReadFile(tree, file)
		if err != nil {
			if info, dir := fs.Stat(tree, file); dir == nil && info.IsDir() && anchor == "" {
				continue
			}
		}
		if err != nil || anchor != "" && !slices.Contains(anchors(string(content)), anchor) {
			findings = append(findings, finding{"links", name, "links to " + m[1] + ", which is not there", "a page leads somewhere"})
		}
	}
	return findings
}

// anchors returns the fragment names of a page's headings.
func anchors(text string) []string {
	var names []string
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		names = append(names, strings.ReplaceAll(marks.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return names
}
