package forgeci_test

import (
	"go/ast"
	"go/token"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
)

const (
	storeRoom  = "server/store"
	engineRoom = "server/engine"

	oneWriter = "only engine writes runs, jobs and attempts: a transition has one place, one lock order and one audit row"
	oneText   = "only store speaks SQL: one text for two databases, in one place, under one suite"
)

var (
	statement = regexp.MustCompile(`(?ms)^-- name: (\w+)(.*?)(?:^-- name: |\z)`)
	// owned matches a statement that changes what only the engine may change.
	owned = regexp.MustCompile(`(?i)\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM)\s+(?:run|job|attempt|lease|queue|step)\b`)
	// anySQL matches a statement in a string.
	anySQL = regexp.MustCompile(`(?is)^\s*(?:SELECT\s.+\sFROM\s|INSERT\s+INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|CREATE\s+TABLE\s)`)
)

// checkWriters applies rule 4: it finds the methods of store whose statements
// change runs, jobs or attempts, and who calls them. SQL outside store is found
// by its look.
func checkWriters(tree fs.FS, files []goFile) ([]finding, error) {
	statements, err := owningStatements(tree)
	if err != nil {
		return nil, err
	}
	methods := map[string]bool{}
	for _, f := range files {
		if f.room() != storeRoom || f.test {
			continue
		}
		for _, d := range f.syntax.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv != nil && names(fn, statements) {
				methods[fn.Name.Name] = true
			}
		}
	}
	var findings []finding
	for _, f := range files {
		if f.test || below(f.room(), storeRoom) || below(f.room(), "testkit") {
			continue
		}
		usesStore := slices.ContainsFunc(f.syntax.Imports, func(s *ast.ImportSpec) bool {
			return importPath(s) == module+"/internal/"+storeRoom
		})
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if usesStore && methods[n.Sel.Name] && !below(f.room(), engineRoom) {
					findings = append(findings, finding{"writers", f.at(n.Pos()), "calls " + n.Sel.Name + " of store", oneWriter})
				}
			case *ast.BasicLit:
				if text, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil && anySQL.MatchString(text) {
					findings = append(findings, finding{"sql", f.at(n.Pos()), "holds a statement", oneText})
				}
			}
			return true
		})
	}
	return findings, nil
}

// owningStatements returns the names of store's statements that only the engine
// may run.
func owningStatements(tree fs.FS) ([]string, error) {
	paths, err := fs.Glob(tree, "internal/"+storeRoom+"/sql/*.sql")
	if err != nil {
		return nil, err
	}
	var list []string
	for _, p := range paths {
		text, err := fs.ReadFile(tree, p)
		if err != nil {
			return nil, err
		}
		for rest := text; ; {
			m := statement.FindSubmatchIndex(rest)
			if m == nil {
				break
			}
			if owned.Match(rest[m[4]:m[5]]) {
				list = append(list, string(rest[m[2]:m[3]]))
			}
			rest = rest[m[5]:]
		}
	}
	return list, nil
}

// names reports whether the function holds the name of one of the statements.
func names(fn *ast.FuncDecl, statements []string) bool {
	found := false
	ast.Inspect(fn, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			text, err := strconv.Unquote(lit.Value)
			found = found || err == nil && slices.Contains(statements, text)
		}
		return !found
	})
	return found
}
