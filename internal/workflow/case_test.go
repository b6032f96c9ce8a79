package workflow

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
)

// plan parses and compiles a file that must be valid.
func planOf(t *testing.T, text string) ci.Plan {
	t.Helper()
	f, err := Parse("w.yaml", []byte(text))
	if err != nil {
		t.Fatalf("refused: %v\n%s", err, text)
	}
	p, err := f.Compile(CompileOptions{})
	if err != nil {
		t.Fatalf("not compiled: %v\n%s", err, text)
	}
	return p
}

// refused parses a file that must be invalid and returns its problems, one a
// line, as line:column: text.
func refused(t *testing.T, text string) string {
	t.Helper()
	_, err := Parse("w.yaml", []byte(text))
	if err == nil {
		t.Fatalf("accepted:\n%s", text)
	}
	var lines []string
	for _, f := range mustBeInvalid(t, err) {
		lines = append(lines, fmt.Sprintf("%d:%d: %s", f.Line, f.Column, f.Detail))
	}
	return strings.Join(lines, "\n")
}

// says checks that one line of got begins with place and holds all the words.
func says(t *testing.T, got, place string, words ...string) {
	t.Helper()
	for line := range strings.Lines(got) {
		if strings.HasPrefix(line, place+": ") && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return
		}
	}
	t.Errorf("no problem at %s that says %q in:\n%s", place, words, got)
}

func jobOf(t *testing.T, p ci.Plan, name string) ci.JobSpec {
	t.Helper()
	for _, j := range p.Jobs {
		if j.Name == name {
			return j
		}
	}
	t.Fatalf("no job %q in the plan", name)
	return ci.JobSpec{}
}

func namesOf(p ci.Plan) []string {
	var out []string
	for _, j := range p.Jobs {
		out = append(out, j.Name)
	}
	return out
}

func TestCase_YAML_01_MergeKeysAreOverriddenByTheMapping(t *testing.T) {
	t.Parallel()
	const head = "version: 1\njobs:\n  base: &b {env: {A: base, B: {{B}}}, steps: ['1'], timeout: 1m}\n"
	base := strings.Replace(head, "{{B}}", "base", 1)
	for name, body := range map[string]string{
		"before":         "  job: {<<: *b, steps: ['2'], env: {C: job}}\n",
		"after":          "  job: {steps: ['2'], env: {C: job}, <<: *b}\n",
		"list, first":    "  job: {<<: [{steps: ['2'], env: {C: job}}, *b]}\n",
		"in block style": "  job:\n    steps: ['2']\n    <<: *b\n    env:\n      C: job\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := jobOf(t, planOf(t, base+body), "job")
			if len(j.Steps) != 1 || j.Steps[0].Run != "2" {
				t.Errorf("steps = %+v, want the job's own", j.Steps)
			}
			if j.Timeout.Std() != time.Minute {
				t.Errorf("timeout = %v, want the merged 1m", j.Timeout)
			}
			if diff := cmp.Diff([]ci.KeyValue{{Key: "C", Value: "job"}}, j.Env); diff != "" {
				t.Errorf("a merge must be shallow:\n%s", diff)
			}
		})
	}
	got := refused(t, base+"  job:\n    <<: *b\n    steps: ['2']\n    timeout: 1m\n    steps: ['3']\n")
	says(t, got, "8:5", `duplicate key "steps" (lines 6 and 8)`)
	got = refused(t, base+"  job:\n    <<: *b\n    <<: *b\n")
	says(t, got, "6:5", `duplicate key "<<" (lines 5 and 6)`)
	says(t, refused(t, "version: 1\njobs: {a: {<<: [1], steps: [x]}}\n"), "2:17", "merge << takes a mapping")
	says(t, refused(t, "version: 1\njobs: {a: {\"<<\": {}, steps: [x]}}\n"), "2:12", `unknown key "<<"`)
}

func TestCase_YAML_02_ValuesKeepTheirSourceText(t *testing.T) {
	t.Parallel()
	p := planOf(t, `version: 1
on: {manual: {inputs: {tag: {default: 1.10}, flag: {type: string, default: yes}}}}
env: {A: 3.10, B: 010, C: yes, D: 1.0, E: "3.10", F: 1_000, G: 2024-01-01, H: ~, I: null, J: 0x10, K: .5, L: TRUE}
jobs:
  a:
    matrix: {v: [3.9, 3.10, "3.10", 1e3, 0x10, 010, 1_000, 2024-01-01, 12:30, .5, 1.0, 1.20]}
    image: node:20
    env: {V: "${{ matrix.v }}"}
    steps: [x]
  b:
    image: {ref: node:1.10}
    env: {TAG: "${{ inputs.tag }}"}
    steps: [x]
`)
	values := []string{"3.9", "3.10", "1e3", "0x10", "010", "1_000", "2024-01-01", "12:30", ".5", "1.0", "1.20"}
	for i, v := range values {
		j := p.Jobs[i]
		if j.Name != "a ("+v+")" || j.Matrix[0].Value != v || valueOf(j.Env, "V") != v {
			t.Errorf("leg %d is %q with value %q and env %q, want %q", i, j.Name, j.Matrix[0].Value, valueOf(j.Env, "V"), v)
		}
		if j.Image.Ref != "node:20" {
			t.Errorf("image %q", j.Image.Ref)
		}
	}
	b := p.Jobs[len(values)]
	want := map[string]string{"A": "3.10", "B": "010", "C": "yes", "D": "1.0", "E": "3.10", "F": "1_000", "G": "2024-01-01", "H": "~", "I": "null", "J": "0x10", "K": ".5", "L": "TRUE", "TAG": "1.10"}
	for k, v := range want {
		if got := valueOf(b.Env, k); got != v {
			t.Errorf("env %s = %q, want %q", k, got, v)
		}
	}
	if b.Name != "b" || b.Image.Ref != "node:1.10" || p.Inputs["flag"] != "yes" {
		t.Errorf("job %q, image %q, input %q", b.Name, b.Image.Ref, p.Inputs["flag"])
	}
}

func TestCase_YAML_03_OnIsAKeyAndNoIsAText(t *testing.T) {
	t.Parallel()
	for _, on := range []string{"on: push", `"on": push`, "'on': [push]", "on: {push: }"} {
		f, err := Parse("w.yaml", []byte("version: 1\n"+on+"\njobs: {a: {steps: [x]}}\n"))
		if err != nil {
			t.Errorf("%s: %v", on, err)
			continue
		}
		if diff := cmp.Diff(On{Push: &Push{}}, f.On); diff != "" {
			t.Errorf("%s:\n%s", on, diff)
		}
	}
	says(t, refused(t, "version: 1\ntrue: push\njobs: {a: {steps: [x]}}\n"), "2:1", `unknown key "true"`, "write on")

	const text = `version: 1
on: {push: {branches: [on, off, no]}}
env: {ON: on, N: no, Y: y}
jobs:
  off:
    matrix: {country: [NO, SE]}
    steps: [x]
`
	f, err := Parse("w.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"on", "off", "no"}, f.On.Push.Branches.Only); diff != "" {
		t.Error(diff)
	}
	p := planOf(t, text)
	if diff := cmp.Diff([]string{"off (NO)", "off (SE)"}, namesOf(p)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]ci.KeyValue{{Key: "ON", Value: "on"}, {Key: "N", Value: "no"}, {Key: "Y", Value: "y"}}, p.Jobs[0].Env); diff != "" {
		t.Error(diff)
	}
}

func TestCase_YAML_04_IncludeExtendsLegsOrAddsOne(t *testing.T) {
	t.Parallel()
	legs := func(matrix string) []string {
		var out []string
		for _, j := range planOf(t, "version: 1\njobs:\n  a:\n    matrix: "+matrix+"\n    steps: [x]\n").Jobs {
			var kv []string
			for _, m := range j.Matrix {
				kv = append(kv, m.Key+"="+m.Value)
			}
			out = append(out, strings.Join(kv, " "))
		}
		return out
	}
	got := legs("{size: [s, l], os: [lin, win], include: [{note: n1}, {note: n2, os: lin}, {size: s, extra: e}, {size: xl}, {size: xl, os: lin}]}")
	want := []string{"size=s os=lin note=n2 extra=e", "size=s os=win note=n1 extra=e", "size=l os=lin note=n2", "size=l os=win note=n1", "size=xl", "size=xl os=lin"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"a=1", "a=2 b=3"}, legs("{include: [{a: 1}, {a: 2, b: 3}]}")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"a=2 b=1", "a=2 b=2"}, legs("{a: [1, 2], b: [1, 2], exclude: [{a: 1}]}")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"a=1 b=x", "a=2 b=x"}, legs("{a: [1, 2], include: [{b: w}, {b: x}]}")); diff != "" {
		t.Errorf("a later include overwrites what an earlier one added:\n%s", diff)
	}
	says(t, refused(t, "version: 1\njobs: {a: {steps: [x], matrix: {a: [1], exclude: [{a: 1}]}}}\n"), "2:32", "no leg")
	says(t, refused(t, "version: 1\njobs: {a: {steps: [x], matrix: {a: [1], exclude: [{b: 1}]}}}\n"), "2:51", `"b"`, "no axis")
}

func TestCase_YAML_07_NegatedPatternsAndIgnoreLists(t *testing.T) {
	t.Parallel()
	f := Filter{Only: []string{"**", "!docs/**", "docs/keep.md"}}
	for want, changed := range map[bool][][]string{
		false: {{"docs/a.md"}, {}},
		true:  {{"docs/keep.md"}, {"docs/a.md", "src/x"}},
	} {
		for _, paths := range changed {
			if got := f.Match(paths...); got != want {
				t.Errorf("changed %v: %v, want %v", paths, got, want)
			}
		}
	}
	branches := []string{"release/**", "!release/**-alpha"}
	if MatchFilter(branches, "release/10-alpha") || !MatchFilter(branches, "release/10") {
		t.Error("release/10-alpha must not pass, release/10 must")
	}
	ignore := Filter{Ignore: []string{"docs/**", "*.md"}}
	if ignore.Match("docs/a.md", "README.md") || !ignore.Match("docs/a.md", "src/x") {
		t.Error("an ignore list stops a push that changes ignored files only")
	}
	on := func(event string) string {
		return "version: 1\non:\n  push:\n" + event + "jobs: {a: {steps: [x]}}\n"
	}
	says(t, refused(t, on("    paths: ['!docs/**']\n")), "4:12", "match nothing")
	says(t, refused(t, on("    paths_ignore:\n      - docs/**\n      - '!docs/keep.md'\n")), "6:9", "!", "last match decides")
	says(t, refused(t, on("    paths: [a]\n    paths_ignore: [b]\n")), "5:19", "cannot be used together")
	says(t, refused(t, on("    paths-ignore: [b]\n")), "4:5", `unknown key "paths-ignore"`, "write paths_ignore")
}

func TestCase_YAML_08_DuplicateKeysAreNamedWithBothLines(t *testing.T) {
	t.Parallel()
	const head = "version: 1\njobs:\n  a:\n    env: {A: b}\n    steps: [x]\n"
	says(t, refused(t, head+"    env: {A: c}\n"), "6:5", `duplicate key "env" (lines 4 and 6)`)
	says(t, refused(t, head+"  a:\n    steps: [y]\n"), "6:3", `duplicate key "a" (lines 3 and 6)`)
	says(t, refused(t, head+"  \"a\":\n    steps: [y]\n"), "6:3", `duplicate key "a" (lines 3 and 6)`)
	says(t, refused(t, "version: 1\njobs:\n  - {name: a, steps: [x]}\n  - {name: a, steps: [x]}\n"), "4:5", `two jobs are called "a" (lines 3 and 4)`)
	p := planOf(t, "version: 1\nenv: {FOO: 1, foo: 2}\njobs: {a: {steps: [x]}}\n")
	if diff := cmp.Diff([]ci.KeyValue{{Key: "FOO", Value: "1"}, {Key: "foo", Value: "2"}}, p.Jobs[0].Env); diff != "" {
		t.Error(diff)
	}
}

func TestCase_YAML_09_InterpolationNeverTouchesTheSyntax(t *testing.T) {
	t.Parallel()
	f, err := Parse("w.yaml", []byte(`version: 1
on: {manual: {inputs: {msg: , other: {default: SECRET}}}}
jobs: {a: {steps: [{run: 'printf %s "$MSG"', env: {MSG: "${{ inputs.msg }}", LITERAL: "${COMMIT_MESSAGE}"}}]}}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, msg := range hostileTexts() {
		p, err := f.Compile(CompileOptions{Inputs: map[string]string{"msg": msg}})
		if err != nil {
			t.Errorf("%.40q: %v", msg, err)
			continue
		}
		s := p.Jobs[0].Steps[0]
		want := []ci.KeyValue{{Key: "MSG", Value: msg}, {Key: "LITERAL", Value: "${COMMIT_MESSAGE}"}}
		if diff := cmp.Diff(want, s.Env); diff != "" {
			t.Errorf("%.40q:\n%s", msg, diff)
		}
		if s.Run != `printf %s "$MSG"` || len(p.Jobs) != 1 || len(p.Jobs[0].Env) != 0 {
			t.Errorf("%.40q changed more than the variable: %+v", msg, p.Jobs[0])
		}
	}
	if _, err := f.Compile(CompileOptions{Inputs: map[string]string{"msg": "a\x00b"}}); err == nil {
		t.Error("NUL accepted: no environment can hold it")
	}
}

// hostileTexts are texts of strangers: titles, messages, branch names.
func hostileTexts() []string {
	return []string{
		"Merge x\n\nReviewed-on: y", `it's "quoted": yes`, "a\n  privileged: true", "$(touch /tmp/pwned)", "${OTHER}", "%s %d",
		strings.Repeat("x", 64<<10), `"; touch /tmp/pwn #`, "`touch /tmp/pwn`", "${{ inputs.other }}", "}} ${{", "*alias", "<<: *a", "- x", "",
		"\xff\xfe", "'", "\\", "\t", "\r\n", "{a: b}", "!!binary x", "…",
	}
}

// ATTACKS S09: untrusted text reaches a script by a variable only.
func TestCase_S09_ScriptsRefuseInterpolationOfAnything(t *testing.T) {
	t.Parallel()
	for _, field := range []string{
		"github.event.pull_request.title", "event.pull_request.title", "event.head_commit.message", "github.head_ref", "branch", "ref_name",
		"commit.author.name", "commit.author.email", "inputs.x", "matrix.os", "env.X", "secrets.X", "needs.a.outputs.x", "steps.a.outputs.x", "", "'${{'",
	} {
		for _, text := range []string{
			"version: 1\njobs: {a: {matrix: {os: [l]}, steps: [\"echo ${{ FIELD }}\"]}}\n",
			"version: 1\njobs: {a: {matrix: {os: [l]}, steps: [{run: \"echo ${{FIELD}}\"}]}}\n",
			"version: 1\njobs: {a: {matrix: {os: [l]}, steps: [{run: [a, \"echo ${{ FIELD\"]}]}}\n",
			"version: 1\njobs:\n  a:\n    matrix: {os: [l]}\n    steps:\n      - |\n        echo x\n        echo ${{ FIELD }}\n",
		} {
			got := refused(t, strings.ReplaceAll(text, "FIELD", field))
			if !strings.Contains(got, "set env: {NAME:") || !strings.Contains(got, `"$NAME"`) {
				t.Errorf("%s: the way out is not named:\n%s", field, got)
			}
		}
	}
}

func TestCase_YAML_11_ScriptsKeepTheirLines(t *testing.T) {
	t.Parallel()
	text := "version: 1\njobs:\n  a:\n    steps:\n" +
		"      - |\n        false\n        echo no\n" +
		"      - |-\n        cat <<EOF\n        \tx $X  \n        EOF\n" +
		"      - >\n        a\n        b\n" +
		"      - run: [cd sub, pwd]\n" +
		"      - \"echo 'a # b'\" # comment\n" +
		"      - \"- x\"\n" +
		"      - 'a \\'\n"
	want := []string{"false\necho no\n", "cat <<EOF\n\tx $X  \nEOF", "a b\n", "cd sub\npwd", "echo 'a # b'", "- x", `a \`}
	for name, data := range map[string]string{"LF": text, "CRLF": strings.ReplaceAll(text, "\n", "\r\n")} {
		var got []string
		for _, s := range planOf(t, data).Jobs[0].Steps {
			got = append(got, s.Run)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
	got := refused(t, "version: 1\njobs:\n  a:\n    steps:\n      - echo 'a # b'\n")
	says(t, got, "5:9", `"echo 'a"`, "comment")
	for _, empty := range []string{"[]", "['']", "[' ']", "[{run: []}]", "[{run: ''}]", "[~]", "''"} {
		if got := refused(t, "version: 1\njobs: {a: {steps: "+empty+"}}\n"); !strings.Contains(got, "command") {
			t.Errorf("%s: %s", empty, got)
		}
	}
}

func TestCase_QUE_02_ALabelIsNeverAList(t *testing.T) {
	t.Parallel()
	for _, runsOn := range []string{"linux,size=2cpu", "'linux, size=2cpu'", "['linux,size=2cpu']", "{labels: 'linux,size=2cpu'}"} {
		got := refused(t, "version: 1\njobs:\n  a:\n    steps: [x]\n    runs_on: "+runsOn+"\n")
		if !strings.HasPrefix(got, "5:") || !strings.Contains(got, "write a list, [linux, size=2cpu]") {
			t.Errorf("%s: %s", runsOn, got)
		}
	}
	for _, runsOn := range []string{"[linux, size=2cpu]", "[linux,size=2cpu]", "{labels: [size=2cpu, linux]}", "\n      - linux\n      - size=2cpu"} {
		p := planOf(t, "version: 1\njobs:\n  a:\n    steps: [x]\n    runs_on: "+runsOn+"\n")
		if diff := cmp.Diff([]string{"linux", "size=2cpu"}, p.Jobs[0].RunsOn.Labels); diff != "" {
			t.Errorf("%s: both labels are needed:\n%s", runsOn, diff)
		}
	}
}

func TestCase_QUE_03_ImpossibleNeedsAreRefusedBeforeAnythingIsQueued(t *testing.T) {
	t.Parallel()
	got := refused(t, "version: 1\njobs:\n  C: {needs: [D], steps: [x]}\n  D: {needs: [C], steps: [x]}\n  E: {needs: [nope], steps: [x]}\n  F: {needs: F, steps: [x]}\n")
	says(t, got, "3:15", "C -> D -> C")
	if strings.Count(got, "cycle") != 1 {
		t.Errorf("one cycle, one error:\n%s", got)
	}
	says(t, got, "5:15", `unknown dependency "nope"`)
	says(t, got, "6:14", "needs itself")
	got = refused(t, "version: 1\njobs:\n  - {name: a, needs: [c], steps: [x]}\n  - {name: b, steps: [x]}\n  - {name: c, steps: [x]}\n")
	says(t, got, "3:23", "a -> c -> b (the order of the list) -> a (the order of the list)")
}

// A list's order is a need, too: a cycle through it is reported where a need is
// written, and says which of its needs are not.
func TestCyclesAndUnknownNeedsAreReportedAtTheNeed(t *testing.T) {
	t.Parallel()
	got := refused(t, "version: 1\njobs:\n- {name: a, needs: [c], steps: [x]}\n- {name: b, steps: [x]}\n- {name: c, steps: [x]}\n")
	says(t, got, "3:21", "needs form a cycle: a -> c -> b (the order of the list) -> a (the order of the list); remove one")
	got = refused(t, "version: 1\njobs:\n- {name: a, steps: [x]}\n- {name: b, steps: [x]}\n- {name: c, needs: [], steps: [x]}\n- {name: d, steps: [x]}\n- {name: e, needs: [a, b, e], steps: [x]}\n")
	says(t, got, "7:27", `job "e" needs itself`)
	got = refused(t, "version: 1\njobs:\n  a: {steps: [x]}\n  b:\n    needs: [a,\n      nope, d]\n    steps: [x]\n  c: {needs: nix, steps: [x]}\n  d: {needs: [c, b], steps: [x]}\n")
	says(t, got, "6:7", `unknown dependency "nope" in needs of job "b"`)
	says(t, got, "8:14", `unknown dependency "nix" in needs of job "c"`)
	says(t, got, "6:13", "needs form a cycle: b -> d -> b; remove one")
}

// A default that every job replaces is checked all the same: the next job has it.
func TestADefaultThatNoJobTakesIsChecked(t *testing.T) {
	t.Parallel()
	for key, values := range map[string][3]string{ // of the defaults, wrong; of the defaults, right; of the job
		"timeout":           {"banana", "1m", "2m"},
		"shell":             {"fish", "sh", "bash"},
		"working_directory": {"../x", "src", "lib"},
		"retry":             {"2", "{max: 1, on: timeout}", "{max: 2, on: timeout}"},
		"runs_on":           {"{nope: 1}", `"${{ matrix.os }}"`, "linux"},
		"image":             {"{ref: a, dockerfile: b}", `"x:${{ matrix.os }}"`, "y"},
	} {
		file := func(value string) string {
			return "version: 1\ndefaults: {" + key + ": " + value + "}\njobs: {a: {steps: [x], matrix: {os: [a, b]}, " + key + ": " + values[2] + "}}\n"
		}
		if got := refused(t, file(values[0])); !strings.HasPrefix(got, "2:") {
			t.Errorf("%s: %s", key, got)
		}
		if _, err := Parse("w.yaml", []byte(file(values[1]))); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// What is written in a list is taken or refused, and never left out.
func TestAnEmptyItemOfAListIsReported(t *testing.T) {
	t.Parallel()
	in := func(body string) string {
		return "version: 1\non: {manual: {inputs: {tier: {type: choice, " + body + "}}}}\njobs: {a: {steps: [x]}}\n"
	}
	says(t, refused(t, in(`options: [a, "", b]`)), "2:58", "option is empty")
	says(t, refused(t, in(`options: ["", a], default: ""`)), "2:55", "option is empty")
	says(t, refused(t, in(`options: [a, ~]`)), "2:58", "option must be a single value, not nothing")
	for key, holder := range map[string]string{
		"needs": "", "outputs": "", "secrets": "", "inputs": "", "runs_on": "", "identity": "",
		"cache": "{kind: directory, paths: KEY}", "artifacts": "{publish: {name: x, paths: KEY}}",
	} {
		value := `["", b]`
		if holder != "" {
			value = strings.ReplaceAll(holder, "KEY", value)
		}
		refused(t, "version: 1\njobs: {b: {steps: [x]}, a: {steps: [x], "+key+": "+value+"}}\n")
	}
	for _, on := range []string{`push: {branches: ["", b]}`, `push: {paths_ignore: ["", b]}`} {
		refused(t, "version: 1\non: {"+on+"}\njobs: {a: {steps: [x]}}\n")
	}
}

func TestCase_ART_03_BadArtifactNamesAreRefusedWithTheCharacter(t *testing.T) {
	t.Parallel()
	for name, word := range map[string]string{
		"net ovn:latest/edge": `':'`, "a/b": `'/'`, `a\b`: `'\\'`, "a*": `'*'`, "..": "dot", ".": "dot", "": "empty", "a.": "dot", " a": "space",
		strings.Repeat("x", 300): "300 bytes", "a\nb": "U+000A", "a\u202eb": "U+202E", "a\xffb": "UTF-8", `a"`: `'"'`,
	} {
		if err := ArtifactName(name); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v, want the reason %s", name, err, word)
		}
	}
	for _, name := range []string{"app", "net-ovn_1.2 (linux, 3.10)", ".hidden", "é", "a+b@c=d", strings.Repeat("x", 128)} {
		if err := ArtifactName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	got := refused(t, "version: 1\njobs:\n  a:\n    steps: [x]\n    artifacts: {publish: {name: \"net:latest\", path: x}}\n")
	says(t, got, "5:33", `"net:latest"`, `':'`)
}

// Two names are the same only when both are known: an input may make them differ.
func TestNamesOfArtifactsAreComparedWhenTheInputsAreKnown(t *testing.T) {
	t.Parallel()
	for _, names := range [][2]string{
		{"app${{ inputs.variant }}", "app"}, {"app", "app${{ inputs.variant }}"}, {"${{ inputs.variant }}", "${{ inputs.other }}"},
	} {
		f, err := Parse("w.yaml", fmt.Appendf(nil, "version: 1\non: {manual: {inputs: {variant: {}, other: {}}}}\njobs: {a: {artifacts: {publish: [{name: %q, path: x}, {name: %q, path: y}]}, steps: [x]}}\n", names[0], names[1]))
		if err != nil {
			t.Errorf("%q: %v", names, err)
			continue
		}
		if _, err := f.Compile(CompileOptions{Inputs: map[string]string{"variant": "-debug", "other": "-release"}}); err != nil {
			t.Errorf("%q differ: %v", names, err)
		}
		same := map[string]string{"variant": "", "other": ""}
		if names[1] == "${{ inputs.other }}" {
			same = map[string]string{"variant": "app", "other": "app"}
		}
		if _, err := f.Compile(CompileOptions{Inputs: same}); ci.KindOf(err) != ci.ErrInvalid || !strings.Contains(err.Error(), `publishes "app" twice`) {
			t.Errorf("%q are the same: %v", names, err)
		}
	}
}

func TestCase_ART_04_PathsStayInTheWorkspace(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"../x", "/etc", "a/../../b", "~/x", `C:\x`, `a\..\..\b`, ""} {
		got := refused(t, "version: 1\njobs:\n  a:\n    steps: [x]\n    artifacts: {publish: {name: a, path: '"+path+"'}}\n")
		if !strings.HasPrefix(got, "5:") {
			t.Errorf("%q: %s", path, got)
		}
	}
	p := planOf(t, "version: 1\njobs:\n  a:\n    steps: [x]\n    artifacts: {publish: {name: a, path: [.out/, 'dist/**', './x', a..b]}}\n")
	if diff := cmp.Diff([]string{".out/", "dist/**", "./x", "a..b"}, p.Jobs[0].Publish[0].Paths); diff != "" {
		t.Error(diff)
	}
}

func TestCase_SEC_01_AStepWithSecretsMayNotRedirectPrograms(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "PATH", "BASH_ENV", "ENV", "NODE_OPTIONS", "HTTP_PROXY", "https_proxy", "ALL_PROXY"} {
		for _, text := range []string{
			"version: 1\njobs:\n  a:\n    steps: [{run: x, secrets: [S], env: {NAME: v}}]\n",
			"version: 1\njobs:\n  a:\n    env: {NAME: v}\n    steps: [{run: x, secrets: [S]}]\n",
			"version: 1\njobs:\n  a:\n    secrets: [S]\n    steps: [{run: x, env: {NAME: v}}]\n",
			"version: 1\nenv: {NAME: v}\njobs:\n  a:\n    secrets: [S]\n    steps: [x]\n",
		} {
			got := refused(t, strings.ReplaceAll(text, "NAME", name))
			if !strings.Contains(got, name) || !strings.Contains(got, "S)") {
				t.Errorf("the variable and the secret must be named: %s", got)
			}
		}
	}
	planOf(t, "version: 1\njobs:\n  a:\n    steps: [{run: x, env: {LD_PRELOAD: v}}, {run: y, secrets: [S]}]\n")
}

func TestCase_CONC_03_AJobCannotWaitForItsOwnWorkflow(t *testing.T) {
	t.Parallel()
	got := refused(t, "version: 1\nconcurrency: deploy\njobs:\n  a: {steps: [x], concurrency: deploy}\n")
	says(t, got, "4:32", `"deploy"`, "line 2")
	got = refused(t, "version: 1\nconcurrency: g-1\njobs:\n  a: {steps: [x], matrix: {v: [1, 2]}, concurrency: \"g-${{ matrix.v }}\"}\n")
	says(t, got, "4:53", `"g-1"`)
	f, err := Parse("w.yaml", []byte("version: 1\non: {manual: {inputs: {i: }}}\nconcurrency: a\njobs: {j: {steps: [x], concurrency: \"${{ inputs.i }}\"}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Compile(CompileOptions{Inputs: map[string]string{"i": "a"}}); ci.KindOf(err) != ci.ErrInvalid {
		t.Errorf("an input makes the groups equal: %v", err)
	}
	p, err := f.Compile(CompileOptions{})
	if err != nil || p.Jobs[0].Concurrency != nil {
		t.Errorf("an empty group groups nothing: %v, %v", p.Jobs, err)
	}
}

// What YAML makes of commands and patterns without quotes surprises people.
func TestTrapsOfYAMLAreExplained(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, place, word string }{
		{"version: 1\njobs: {a: {steps: [x], if: !success()}}\n", "2:28", "quote a value that begins with !"},
		{"version: 1\non: {push: {branches: [main, !x]}}\njobs: {a: {steps: [x]}}\n", "2:30", "quote a value that begins with !"},
		{"version: 1\non: {push: {branches: [**]}}\njobs: {a: {steps: [x]}}\n", "2:24", "quote a value that begins with *"},
		{"version: 1\njobs:\n  a:\n    steps:\n      - echo \"a: b\"\n", "5:9", "since it holds \": \""},
		{"version: 1\njobs:\n  a:\n    steps:\n      - run: echo a: b\n", "5:20", "quote a value that holds \": \""},
		{"version: 1\njobs:\n  a:\n    steps:\n      - echo 'a # b'\n", "5:9", "comment"},
		{"version: 1\njobs:\n  a:\n    steps:\n      - `x`\n", "5:9", "quote a value that begins with a special character"},
		{"version: 1\nenv: {A: !!binary eA==}\njobs: {a: {steps: [x]}}\n", "2:10", "not supported"},
	} {
		says(t, refused(t, c.text), c.place, c.word)
	}
}

func TestSecretsGoToTheStepsThatNameThem(t *testing.T) {
	t.Parallel()
	p := planOf(t, `version: 1
jobs:
  all: {secrets: [A, B], steps: [x, {run: y}]}
  some: {secrets: [A], steps: [x, {run: y, secrets: [B]}, {run: z, secrets: []}]}
`)
	secrets := func(name string) []string {
		j := jobOf(t, p, name)
		out := []string{strings.Join(j.Secrets, " ")}
		for _, s := range j.Steps {
			out = append(out, strings.Join(s.Secrets, " "))
		}
		return out
	}
	if diff := cmp.Diff([]string{"A B", "A B", "A B"}, secrets("all")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"A B", "", "B", ""}, secrets("some")); diff != "" {
		t.Error(diff)
	}
}

func TestAListIsAnOrderedPipelineAndAMappingAGraph(t *testing.T) {
	t.Parallel()
	needs := func(text string) map[string][]string {
		out := map[string][]string{}
		for _, j := range planOf(t, text).Jobs {
			out[j.Name] = j.Needs
		}
		return out
	}
	got := needs(`version: 1
jobs:
  - {name: a, steps: [x], matrix: {v: [1, 2]}}
  - {name: b, steps: [x]}
  - {name: c, steps: [x], needs: []}
  - {name: d, steps: [x]}
  - {name: e, steps: [x], needs: [a, b]}
  - {name: f, steps: [x], needs: }
`)
	want := map[string][]string{"a (1)": nil, "a (2)": nil, "b": {"a"}, "c": nil, "d": {"c"}, "e": {"a", "b"}, "f": nil}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	got = needs("version: 1\njobs: {a: {steps: [x]}, b: {steps: [x]}, c: {steps: [x], needs: a}}\n")
	if diff := cmp.Diff(map[string][]string{"a": nil, "b": nil, "c": {"a"}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestTextOfEveryKindThatIsNoUTF8YAMLIsRefusedWithItsPlace(t *testing.T) {
	t.Parallel()
	const valid = "version: 1\njobs: {a: {steps: [x]}}\n"
	for name, c := range map[string]struct{ data, place, word string }{
		"NUL":             {"version: 1\nname: a\x00b\n", "2:8", "\\x00"},
		"escape":          {"version: 1\nname: \x1b[31m\n", "2:7", "\\x1b"},
		"latin 1":         {"version: 1\nname: caf\xe9\n", "2:10", "UTF-8"},
		"UTF-16 LE":       {"\xff\xfev\x00", "1:1", "UTF-16"},
		"UTF-16 BE":       {"\xfe\xff\x00v", "1:1", "UTF-16"},
		"empty":           {"", "1:1", "empty"},
		"comment only":    {"# nothing\n", "1:1", "empty"},
		"blank":           {"\n\n  \n", "1:1", "empty"},
		"tab":             {"version: 1\njobs:\n\ta: {steps: [x]}\n", "3:1", "spaces"},
		"two documents":   {valid + "---\nversion: 1\n", "3:1", "second YAML document"},
		"bad second":      {valid + "---\n[\n", "5:1", "YAML"},
		"unclosed":        {"version: 1\njobs: {a: [\n", "3:1", "end of the file"},
		"too large":       {strings.Repeat("#", 1<<20+1), "1:1", "limit"},
		"NUL in a string": {"version: 1\njobs: {a: {steps: [\"x\\0y\"]}}\n", "2:20", "NUL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			says(t, refused(t, c.data), c.place, c.word)
		})
	}
	for name, data := range map[string]string{
		"byte order mark": "\xef\xbb\xbf" + valid, "CRLF": strings.ReplaceAll(valid, "\n", "\r\n"), "CR": strings.ReplaceAll(valid, "\n", "\r"),
		"document marks": "---\n" + valid + "...\n", "no end of line": strings.TrimSuffix(valid, "\n"),
	} {
		if got := planOf(t, data).Jobs[0].Steps[0].Run; got != "x" {
			t.Errorf("%s: run = %q", name, got)
		}
	}
}

func TestTheDigestIsOfTheBytesAndNamesComeFromTheFile(t *testing.T) {
	t.Parallel()
	data := []byte("version: 1\njobs: {a: {steps: [x]}}\n")
	for path, name := range map[string]string{".forgeci.yaml": "forgeci", ".forgeci/nightly.yaml": "nightly", "a/b.yml": "b"} {
		f, err := Parse(path, data)
		if err != nil {
			t.Fatal(err)
		}
		p, err := f.Compile(CompileOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if p.Workflow != name || p.Path != path {
			t.Errorf("%s: workflow %q at %q", path, p.Workflow, p.Path)
		}
		if sum := sha256.Sum256(data); p.Digest != hex.EncodeToString(sum[:]) || p.Digest != f.Digest {
			t.Errorf("digest %q", p.Digest)
		}
	}
}

func TestAStepWithoutANameIsNamedAfterItsFirstLineWhateverItHolds(t *testing.T) {
	t.Parallel()
	for run, want := range map[string]string{
		"make\nmake test":                   "make",
		strings.Repeat("a", 80):             strings.Repeat("a", 80),
		strings.Repeat("a", 81):             strings.Repeat("a", 79) + "…",
		strings.Repeat("日", 66):             strings.Repeat("日", 66),
		strings.Repeat("日", 67):             strings.Repeat("日", 65) + "…",
		"a" + strings.Repeat("🚀", 79):       "a" + strings.Repeat("🚀", 49) + "…",
		"echo " + strings.Repeat("é", 1000): "echo " + strings.Repeat("é", 74) + "…",
		"\x01\x02\nmake":                    "make",
		"\x01":                              "…",
	} {
		got := planOf(t, fmt.Sprintf("version: 1\njobs: {a: {steps: [{run: %q}]}}\n", run)).Jobs[0].Steps[0].Name
		if got != want {
			t.Errorf("%q is called %q (%d bytes), not %q", run, got, len(got), want)
		}
	}
}

func TestCompilePlansOnlyTheAskedJobsAndTheirAncestors(t *testing.T) {
	t.Parallel()
	f, err := Parse("w.yaml", []byte("version: 1\njobs: {a: {steps: [x], matrix: {v: [1, 2]}}, b: {steps: [x], needs: a}, c: {steps: [x], needs: b}, d: {steps: [x]}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	for asked, want := range map[string][]string{
		"b": {"a (1)", "a (2)", "b"}, "d": {"d"}, "a (2)": {"a (2)"}, "c,d": {"a (1)", "a (2)", "b", "c", "d"},
	} {
		p, err := f.Compile(CompileOptions{Jobs: strings.Split(asked, ",")})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, namesOf(p)); diff != "" {
			t.Errorf("%s:\n%s", asked, diff)
		}
	}
	if _, err := f.Compile(CompileOptions{Jobs: []string{"nope"}}); ci.KindOf(err) != ci.ErrInvalid || !strings.Contains(err.Error(), `"nope"`) {
		t.Errorf("unknown job: %v", err)
	}
}

func TestAnEventDoesNotAskForRequiredInputs(t *testing.T) {
	t.Parallel()
	f, err := Parse("w.yaml", []byte("version: 1\non: {push: , manual: {inputs: {x: {required: true}}}}\njobs: {a: {steps: [x]}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Compile(CompileOptions{}); ci.KindOf(err) != ci.ErrInvalid {
		t.Errorf("started by hand without x: %v", err)
	}
	p, err := f.Compile(CompileOptions{Event: true})
	if err != nil || p.Inputs["x"] != "" {
		t.Errorf("started by a push: %v %v", p.Inputs, err)
	}
}
