package workflow

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"forgeci/internal/ci"
)

// document draws a workflow from the tables of keys: mostly the right keys with
// mostly the right kinds of values, so that what lies behind the first check is
// reached too.
type document struct {
	t *rapid.T
	// wild is the percentage of values of any kind.
	wild int
}

func (d document) chance(percent int) bool {
	return rapid.IntRange(0, 99).Draw(d.t, "chance") < percent
}

func (d document) pick(words ...string) string { return rapid.SampledFrom(words).Draw(d.t, "word") }

func (d document) text() string {
	return d.pick("a", "b", "c", "linux", "1.10", "10m", "1", "2", "true", "false", "", "~", "\"\"", "x y", "'a,b'", "\"${{ matrix.a }}\"", "\"${{ inputs.i }}\"", "\"${{ matrix.b }}${{inputs.j}}\"",
		"\"${{ x\"", "\"a\\nb\"", "\"\\0\"", "'needs.a.conclusion == \"success\"'", "always()", "success() || matrix.a == 'b'", "'needs[\"b\"].outputs.o == inputs.i'", "a (b)", "bash", "../x", "/x", "'**/*.go'", "'!x'",
		"junit", "dependencies", "push", "manual", "choice", "container", "postgres:16", "runner_lost", "'0 3 * * *'", "*anchor", "&anchor a", "é")
}

func (d document) list(item func() string) string {
	var items []string
	for range rapid.IntRange(0, 3).Draw(d.t, "items") {
		items = append(items, item())
	}
	return "[" + strings.Join(items, ", ") + "]"
}

// sub names the table of a key's mapping.
func sub(table, key string) string {
	switch {
	case table == tWorkflow && key == "jobs":
		return tJob
	case key == "steps":
		return tStep
	case key == "inputs" && table == tManual:
		return tInput
	case key == "services":
		return tService
	case key == "reports":
		return tReport
	case tables()[key] != nil:
		return key
	default:
		return ""
	}
}

// fitting returns values that a key takes.
func fitting(table, key string) []string {
	switch key {
	case "timeout", "retention":
		return []string{"10m", "1h30m", "90s"}
	case "shell":
		return []string{"sh", "bash"}
	case "working_directory", "path", "paths", "dockerfile", "context":
		return []string{"src", "out/a.b", "a/b/c"}
	case "if":
		return []string{"always()", "success() && 1 < 2", "false", "failure()"}
	case "priority", "max":
		return []string{"0", "3", "10"}
	case "allow_failure", "continue_on_error", "optional", "cancel_in_progress", "required", "restore_prefix":
		return []string{"true", "false"}
	case "outputs", "secrets":
		return []string{"[A]", "[A, B]", "[]"}
	case "cron":
		return []string{"'0 3 * * *'", "'*/5 1-5 * jan mon'"}
	case "timezone":
		return []string{"UTC", "Europe/Zurich"}
	case "run":
		return []string{"make", "[a, b]"}
	case "os":
		return []string{"linux", "darwin"}
	case "arch":
		return []string{"amd64", "arm64"}
	case "isolation":
		return []string{"process", "vm"}
	case "labels", "size", "group", "environment", "audience", "target", "description", "default":
		return []string{"x", "y"}
	case "ref":
		return []string{"a/b:c", "debian:13"}
	case "ports":
		return []string{"[80, 443]"}
	case "exit":
		return []string{"75", "[1, 255]"}
	case "kind":
		if table == tReport {
			return []string{"junit"}
		}
		return []string{"dependencies"}
	case "type":
		return []string{"string"}
	case "branches", "tags", "branches_ignore", "tags_ignore", "paths_ignore":
		return []string{"[main]", "['release/**', b]"}
	case "version":
		if table == tCache {
			return []string{"v1", "1.10"}
		}
	case "inputs":
		if table != tManual {
			return []string{"[a, 'b/**']"}
		}
	case "on":
		if table == tRetry {
			return []string{"[runner_lost, {exit: [75]}]", "timeout"}
		}
	case "image":
		return []string{"postgres:16", "{ref: a/b}", "{dockerfile: D, context: .}"}
	case "defaults":
		return []string{"{timeout: 5m, shell: sh}", "{runs_on: [a, b=c]}"}
	case "retry":
		return []string{"{max: 2, on: [runner_lost, {exit: [75]}]}"}
	case "needs":
		return []string{"[]", "[a]", "[b]"}
	}
	return nil
}

func (d document) value(table, key string, depth int) string {
	next := sub(table, key)
	if d.chance(d.wild) || depth > 8 {
		return d.text()
	}
	if good := fitting(table, key); good != nil {
		return d.pick(good...)
	}
	switch {
	case key == "version" && table == tWorkflow:
		return "1"
	case key == "jobs", key == "services", key == "inputs" && table == tManual:
		if key == "jobs" && d.chance(30) {
			n := 0
			return "[{name: first, steps: [make]}, " + strings.TrimPrefix(d.list(func() string {
				n++
				return strings.Replace(d.mapping(next, depth+1), "{", fmt.Sprintf("{name: j%d, ", n), 1)
			}), "[")
		}
		var entries []string
		for i, name := range []string{"a", "b", "c", "i", "j"} {
			if i == 0 || d.chance(60) {
				entries = append(entries, name+": "+d.mapping(next, depth+1))
			}
		}
		return "{" + strings.Join(entries, ", ") + "}"
	case key == "matrix":
		text := func() string {
			if d.chance(d.wild) {
				return d.text()
			}
			return d.pick("1", "1.10", "x")
		}
		return "{a: [" + text() + ", z], b: [x, y], include: " + d.list(func() string { return "{a: " + text() + ", c: " + text() + "}" }) + "}"
	case key == "env":
		return "{A: " + d.pick("1", "yes", d.pick("\"x ${{ matrix.a }}\"", "x")) + "}"
	case key == "steps":
		return "[make, " + strings.TrimPrefix(d.list(func() string { return d.mapping(tStep, depth+1) }), "[")
	case key == "schedule", key == "publish", key == "restore":
		return d.list(func() string { return d.mapping(next, depth+1) })
	case key == "name":
		return d.pick("a", "b", "c")
	case key == "needs":
		return d.list(func() string { return d.pick("a", "b", "c") })
	case key == "from_job":
		return d.pick("a", "b", "c", "a (b, x)")
	case next != "" && d.chance(90):
		return d.mapping(next, depth+1)
	case d.chance(40):
		return d.list(d.text)
	default:
		return d.text()
	}
}

// conflicts names keys that do not go with another, or need one.
func conflicts(key string) bool {
	switch key {
	case "options", "context", "target", "dockerfile", "paths", "needs":
		return true
	default:
		return strings.HasSuffix(key, "_ignore")
	}
}

func (d document) mapping(table string, depth int) string {
	var entries []string
	required := tables()[table].required
	for _, k := range tables()[table].keys {
		if k.name == "name" && (table == tJob || table == tService) {
			continue
		}
		if conflicts(k.name) && !d.chance(d.wild) {
			continue
		}
		percent := 12
		for _, r := range required {
			if r == k.name {
				percent = 100 - d.wild
			}
		}
		if d.chance(percent) {
			entries = append(entries, k.name+": "+d.value(table, k.name, depth))
		}
	}
	if d.chance(d.wild) {
		entries = append(entries, "no_such_key: 1")
	}
	return "{" + strings.Join(entries, ", ") + "}"
}

func TestAnyCombinationOfKeysIsJudged(t *testing.T) {
	t.Parallel()
	valid := 0
	rapid.Check(t, func(rt *rapid.T) {
		text := document{rt, rapid.SampledFrom([]int{0, 1, 10}).Draw(rt, "wild")}.mapping(tWorkflow, 0) + "\n"
		f, err := Parse("w.yaml", []byte(text))
		if err != nil {
			if ci.KindOf(err) != ci.ErrInvalid {
				rt.Fatalf("%v\n%s", err, text)
			}
			return
		}
		valid++
		p, err := f.Compile(CompileOptions{Event: true})
		if err != nil && ci.KindOf(err) != ci.ErrInvalid {
			rt.Fatalf("%v\n%s", err, text)
		}
		for _, j := range p.Jobs {
			if _, err := EvalJobIf(j.If, IfContext{}); err != nil && ci.KindOf(err) != ci.ErrInvalid {
				rt.Fatalf("%v\n%s", err, text)
			}
		}
	})
	t.Logf("%d valid documents", valid)
}

// The plan of a matrix is a function of the sets it names: every leg once, in
// order, and the names of all jobs differ.
func TestMatrixProperties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		matrix := map[string][]string{}
		for _, axis := range []string{"a", "b", "c"} {
			if values := rapid.SliceOfN(rapid.SampledFrom([]string{"1", "1.0", "x", "x, y", "y", "(", ""}), 0, 4).Draw(rt, axis); len(values) > 0 {
				matrix[axis] = values
			}
		}
		if len(matrix) == 0 {
			return
		}
		text, err := json.Marshal(matrix)
		if err != nil {
			rt.Fatal(err)
		}
		f, err := Parse("w.yaml", fmt.Appendf(nil, "version: 1\njobs: {j: {steps: [x], matrix: %s}}\n", text))
		if err != nil {
			rt.Fatal(err)
		}
		p, err := f.Compile(CompileOptions{})
		if err != nil {
			rt.Fatal(err)
		}
		want := 1
		for _, values := range matrix {
			distinct := map[string]bool{}
			for _, v := range values {
				distinct[v] = true
			}
			want *= len(distinct)
		}
		seen, seenNames := map[string]bool{}, map[string]bool{}
		for _, j := range p.Jobs {
			seen[fmt.Sprint(j.Matrix)] = true
			seenNames[j.Name] = true
		}
		if len(p.Jobs) != want || len(seenNames) != want {
			rt.Fatalf("%d legs, %d names, want %d of %s", len(p.Jobs), len(seenNames), want, text)
		}
	})
}
