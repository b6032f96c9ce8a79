package forgeci_test

import (
	"strings"
	"testing"
	"testing/fstest"
)

// TestLayoutCatches breaks each rule once: a rule that nothing can break guards
// nothing.
func TestLayoutCatches(t *testing.T) {
	t.Parallel()
	file := func(pkg, rest string) string {
		return "// Package " + pkg + " is a sample.\npackage " + pkg + "\n" + rest
	}
	for _, c := range []struct {
		name, file, text string
		want             string // rule and what, or empty when it is allowed
	}{
		{"words import a room", "internal/ci/x.go", file("ci", `import _ "forgeci/internal/blob"`), "imports of ci: imports forgeci/internal/blob"},
		{"words import a module", "internal/ci/x.go", file("ci", `import _ "github.com/google/uuid"`), "imports of ci: imports github.com/google/uuid"},
		{"words import the standard library", "internal/ci/x.go", file("ci", `import _ "encoding/json"`), ""},
		{"dag imports store", "internal/server/dag/x.go", file("dag", `import _ "forgeci/internal/server/store"`), "imports of server/dag: imports forgeci/internal/server/store"},
		{"workflow imports its parser", "internal/workflow/x.go", file("workflow", `import _ "go.yaml.in/yaml/v4"`), ""},
		{"server imports runner", "internal/server/api/x.go", file("api", `import _ "forgeci/internal/runner/executor"`), "imports of server: imports forgeci/internal/runner/executor"},
		{"runner imports server", "internal/runner/x.go", file("runner", `import _ "forgeci/internal/server/dag"`), "imports of runner: imports forgeci/internal/server/dag"},
		{"runner imports protocol", "internal/runner/x.go", file("runner", `import _ "forgeci/internal/protocol"`), ""},
		{"engine has a driver", "internal/server/engine/x.go", file("engine", `import _ "database/sql"`), "sql: imports database/sql"},
		{"store has a driver", "internal/server/store/x.go", file("store", `import _ "github.com/jackc/pgx/v5/stdlib"`), ""},
		{"store has a network client", "internal/server/store/x.go", file("store", `import _ "net/http"`), "transaction: imports net/http"},
		{"store has blobs", "internal/server/store/x.go", file("store", `import _ "forgeci/internal/blob"`), "transaction: imports forgeci/internal/blob"},
		{"artifact has an S3 client", "internal/server/artifact/x.go", file("artifact", `import _ "github.com/minio/minio-go/v7"`), "s3: imports github.com/minio/minio-go/v7"},
		{"engine starts a process", "internal/server/engine/x.go", file("engine", `import _ "os/exec"`), "process: imports os/exec"},
		{"executor starts a process", "internal/runner/executor/process/x.go", file("process", `import _ "os/exec"`), ""},
		{"a room with a like name starts a process", "internal/runner/executors/x.go", file("executors", `import _ "os/exec"`), "process: imports os/exec"},
		{"server reads the environment", "internal/server/x.go", file("server", "import \"os\"\nfunc f() string { return os.Getenv(\"X\") }"), "environment: uses os.Getenv"},
		{"server reads the environment by another name", "internal/server/x.go", file("server", "import o \"os\"\nfunc f() []string { return o.Environ() }"), "environment: uses os.Environ"},
		{"cli reads the environment", "internal/cli/x.go", file("cli", "import \"os\"\nfunc f() string { return os.Getenv(\"X\") }"), ""},
		{"a library uses the default logger", "internal/server/x.go", file("server", "import \"log/slog\"\nfunc f() { slog.Info(\"x\") }"), "exit: uses slog.Info"},
		{"the binary has a test double", "internal/cli/x.go", file("cli", `import _ "forgeci/internal/testkit"`), "testkit: imports forgeci/internal/testkit"},
		{"a package without a comment", "internal/cli/x.go", "package cli\n", "comments: package has no comment"},
		{"a drawer", "internal/util/x.go", file("util", ""), "names: package is called util"},
		{"a drawer in disguise", "internal/cli/x.go", file("common", ""), "names: package is called common"},
		{"an init function", "internal/cli/x.go", file("cli", "func init() {}"), "init: has an init function"},
		{"the helper's init function", "internal/runner/executor/process/jobhelper/x.go", file("jobhelper", "func init() {}"), ""},
		{"package state", "internal/cli/x.go", file("cli", "var cache = map[string]int{}"), "globals: has the package variable cache"},
		{"package state without a value", "internal/cli/x.go", file("cli", "var cache []int"), "globals: has the package variable cache"},
		{"an embedded file", "internal/cli/x.go", file("cli", "import _ \"embed\"\n//go:embed x\nvar x []byte"), ""},
		{"a table built once", "internal/cli/x.go", file("cli", "import \"sync\"\nvar x = sync.OnceValue(func() int { return 1 })"), ""},
		{"an error of its own", "internal/cli/x.go", file("cli", "import \"errors\"\nvar errX = errors.New(\"x\")"), ""},
		{"an error for others", "internal/cli/x.go", file("cli", "import \"errors\"\nvar ErrX = errors.New(\"x\")"), "globals: has the package variable ErrX"},
		{"an error that can change", "internal/cli/x.go", file("cli", "import \"forgeci/internal/ci\"\nvar errX = ci.Errorf(ci.ErrGone, \"x\")"), "globals: has the package variable errX"},
		{"an interface check", "internal/cli/x.go", file("cli", "var _ error = (*e)(nil)\ntype e struct{ error }"), ""},
		{"a skipped test", "internal/cli/x_test.go", file("cli", "import \"testing\"\nfunc TestX(t *testing.T) { t."+"Skip() }"), "skip: calls Skip"},
		{"a test that depends on -short", "internal/cli/x_test.go", file("cli", "import \"testing\"\nvar x = testing."+"Short()"), "skip: calls Short"},
		{"another system's word", "internal/ci/x.go", file("ci", "type PipelineID string"), "words: declares PipelineID"},
		{"a word for two things", "internal/ci/x.go", file("ci", "func RerunJob() {}"), "words: declares RerunJob"},
		{"a test that quotes it", "internal/ci/x_test.go", file("ci", "func TestAListIsAnOrderedPipeline() {}"), ""},
		{"a word that only looks like it", "internal/ci/x.go", file("ci", "type UserAgent string\ntype Multitasking int"), ""},
		{"a long file", "internal/cli/x.go", file("cli", strings.Repeat("\n", hardLines)), "size: 702 lines"},
		{"a long test", "internal/cli/x_test.go", file("cli", strings.Repeat("\n", hardLines)), ""},
		{"a remark", "scripts/x.sh", "# TO" + "DO: later\n", `text: holds "TO` + `DO"`},
		{"a foreign path", "docs/x.md", "see /tmp/" + "hub\n", `text: holds "/tmp/` + `hub"`},
		{"a broken link", "docs/x.md", "[y](y.md)\n", "links: links to y.md, which is not there"},
		{"a broken anchor", "docs/x.md", "# One\n[y](#two)\n", "links: links to #two, which is not there"},
		{"good links", "docs/x.md", "# One: `two`\n[y](#one-two) [z](../docs) [w](https://example.com/x)\n", ""},
		{"another module", "tools/x.go", "package types\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tree := fstest.MapFS{c.file: {Data: []byte(c.text)}, "tools/go.mod": {Data: []byte("module tools\n")}}
			findings, err := checkLayout(tree)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range findings {
				got = append(got, f.rule+": "+f.what)
			}
			if strings.Join(got, "; ") != c.want {
				t.Errorf("found %q, want %q", strings.Join(got, "; "), c.want)
			}
		})
	}
}

// TestLayoutCatchesASecondWriter calls a writing method of store from two rooms.
func TestLayoutCatchesASecondWriter(t *testing.T) {
	t.Parallel()
	call := func(pkg, method string) string {
		return "// Package " + pkg + " is a sample.\npackage " + pkg + "\nimport \"forgeci/internal/server/store\"\nfunc f(t *store.Tx) { t." + method + "() }"
	}
	tree := fstest.MapFS{
		"internal/server/store/sql/run.sql": {Data: []byte("-- name: RunRead\nSELECT id FROM run;\n-- name: RunEnd\n-- Ends it.\nUPDATE run\nSET state = $1;\n-- name: NoteInsert\nINSERT INTO run_note (id) VALUES ($1);\n")},
		"internal/server/store/tx.go": {Data: []byte("// Package store is a sample.\npackage store\ntype Tx struct{}\n" +
			"func (t *Tx) Run() { t.exec(\"RunRead\") }\nfunc (t *Tx) EndRun() { t.exec(\"RunEnd\") }\nfunc (t *Tx) Note() { t.exec(\"NoteInsert\") }\nfunc (*Tx) exec(string) {}\n")},
		"internal/server/engine/ok.go":  {Data: []byte(call("engine", "EndRun"))},
		"internal/server/web/read.go":   {Data: []byte(call("web", "Run"))},
		"internal/server/web/note.go":   {Data: []byte(call("web", "Note"))},
		"internal/server/web/write.go":  {Data: []byte(call("web", "EndRun"))},
		"internal/server/api/inline.go": {Data: []byte("// Package api is a sample.\npackage api\nconst q = \"UPDATE run SET state = 'x'\"\n")},
	}
	findings, err := checkLayout(tree)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range findings {
		got = append(got, f.where+" "+f.what)
	}
	want := []string{"internal/server/api/inline.go:3 holds a statement", "internal/server/web/write.go:4 calls EndRun of store"}
	if strings.Join(got, "; ") != strings.Join(want, "; ") {
		t.Errorf("found %q, want %q", got, want)
	}
}
