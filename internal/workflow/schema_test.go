package workflow

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/txtar"
	"go.yaml.in/yaml/v4"
)

// validate judges a decoded document by a JSON Schema, as far as Schema uses
// the language; a word it does not know is an error, so that a new one is not
// taken for satisfied.
func validate(root, s map[string]any, v any) error {
	for word, arg := range s {
		if err := validateWord(root, s, word, arg, v); err != nil {
			return err
		}
	}
	return nil
}

func validateWord(root, s map[string]any, word string, arg, v any) error {
	object, isObject := v.(map[string]any)
	list, isList := v.([]any)
	number, isNumber := v.(float64)
	fail := func() error { return fmt.Errorf("%v: not %s %v", v, word, arg) }
	all := func(schemas any) error {
		for _, sub := range schemas.([]any) {
			if err := validate(root, sub.(map[string]any), v); err != nil {
				return err
			}
		}
		return nil
	}
	switch word {
	case "$schema", "title", "description", "$defs":
		return nil
	case "$ref":
		name := strings.TrimPrefix(arg.(string), "#/$defs/")
		def, ok := root["$defs"].(map[string]any)[name].(map[string]any)
		if !ok {
			return fmt.Errorf("no definition %q", name)
		}
		return validate(root, def, v)
	case "type":
		types, ok := arg.([]any)
		if !ok {
			types = []any{arg}
		}
		if !slices.Contains(types, any(typeOf(v))) && !(typeOf(v) == "integer" && slices.Contains(types, any("number"))) {
			return fail()
		}
	case "const":
		if arg != v {
			return fail()
		}
	case "enum":
		if !slices.Contains(arg.([]any), v) {
			return fail()
		}
	case "pattern":
		if text, ok := v.(string); ok && !regexp.MustCompile(arg.(string)).MatchString(text) {
			return fail()
		}
	case "minimum":
		if isNumber && number < arg.(float64) {
			return fail()
		}
	case "maximum":
		if isNumber && number > arg.(float64) {
			return fail()
		}
	case "minItems":
		if isList && len(list) < int(arg.(float64)) {
			return fail()
		}
	case "minProperties":
		if isObject && len(object) < int(arg.(float64)) {
			return fail()
		}
	case "required":
		for _, r := range arg.([]any) {
			if _, ok := object[r.(string)]; isObject && !ok {
				return fail()
			}
		}
	case "items":
		for _, item := range list {
			if err := validate(root, arg.(map[string]any), item); err != nil {
				return err
			}
		}
	case "properties":
		for name, sub := range arg.(map[string]any) {
			if value, ok := object[name]; ok {
				if err := validate(root, sub.(map[string]any), value); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
	case "additionalProperties":
		properties, _ := s["properties"].(map[string]any)
		for name, value := range object {
			if _, ok := properties[name]; ok {
				continue
			}
			if arg == false {
				return fmt.Errorf("additional property %q", name)
			}
			if sub, ok := arg.(map[string]any); ok {
				if err := validate(root, sub, value); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
	case "propertyNames":
		for name := range object {
			if err := validate(root, arg.(map[string]any), name); err != nil {
				return err
			}
		}
	case "allOf":
		return all(arg)
	case "anyOf":
		var last error
		for _, sub := range arg.([]any) {
			if last = validate(root, sub.(map[string]any), v); last == nil {
				return nil
			}
		}
		return last
	default:
		return fmt.Errorf("the test does not know the word %q", word)
	}
	return nil
}

func typeOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case float64:
		if v == math.Trunc(v) {
			return "integer"
		}
		return "number"
	case []any:
		return "array"
	default:
		return "object"
	}
}

func schemaRoot(t *testing.T) map[string]any {
	t.Helper()
	var root map[string]any
	if err := json.Unmarshal(Schema(), &root); err != nil {
		t.Fatal(err)
	}
	return root
}

// decoded is the file as an editor's YAML language server sees it.
func decoded(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := yaml.Load([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(plainKeys(v))
	if err != nil {
		t.Fatal(err)
	}
	var out any
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func plainKeys(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = plainKeys(v[k])
		}
		return v
	case map[any]any:
		out := map[string]any{}
		for k := range v {
			out[fmt.Sprint(k)] = plainKeys(v[k])
		}
		return out
	case []any:
		for i := range v {
			v[i] = plainKeys(v[i])
		}
		return v
	case nil, bool, string, int, int64, uint64, float64:
		return v
	default:
		return fmt.Sprint(v) // times and the like
	}
}

func TestTheSchemaAcceptsEveryValidExample(t *testing.T) {
	t.Parallel()
	root := schemaRoot(t)
	for name, text := range validExamples(t) {
		if _, err := Parse("w.yaml", []byte(text)); err != nil {
			t.Errorf("%s: the parser refuses it: %v", name, err)
		}
		if err := validate(root, root, decoded(t, text)); err != nil {
			t.Errorf("%s: the schema refuses it: %v", name, err)
		}
	}
}

// Whatever Parse accepts of the corpus of FuzzParse, and of files in which every
// key in turn has an empty, a single, a listed and a quoted value, the schema
// accepts.
func TestTheSchemaAcceptsWhatParseAccepts(t *testing.T) {
	t.Parallel()
	root := schemaRoot(t)
	accepted := 0 // so that the test is about something
	check := func(name string, text []byte) {
		if _, err := Parse("w.yaml", text); err != nil {
			return
		}
		accepted++
		if err := validate(root, root, decoded(t, string(text))); err != nil {
			t.Errorf("%s: Parse accepts it and the schema does not: %v\n%s", name, err, text)
		}
	}
	for name, text := range corpus(t) {
		check(name, text)
	}
	values := []string{
		"", "~", "NULL", "a", "x", `""`, `"1"`, "1", "6379", "1.5", "true", "True", "10m", "junit", "push", "choice", "linux", "success()", "${{ inputs.i }}",
		"[]", "[a]", "[b]", "[1]", "[1.5]", "[~]", `["1"]`, "[a, 1]", "[push, manual]", "[[a]]", "[{exit: 1}]", "[{exit: [1]}]",
		"{}", "{a: }", "{a: 1}", "{a: [1]}", "{A: }", "{A: 1}", "{a: {}}", "{a: {steps: [x]}}", "{a: {image: x}}", "[{name: 1, steps: [x]}]",
		"[{name: a, image: x}]", "[{name: 1, image: x, ports: 1}]", "{max: 1, on: timeout}", "{audience: a}", "{labels: }", "{labels: 1}", "{group: }",
		"{kind: directory, paths: a}", "{kind: junit, path: a}", "{publish: {name: a, path: a}}", "{restore: []}", "{ref: a}", "{inputs: {a: }}", "[{cron: 0 3 * * *}]",
		"{include: [{a: }]}", "{branches: a}", "{runs_on: a}",
	}
	beside := map[string]string{
		tDefaults: "", tOn: "", tPush: "", tPullRequest: "", tManual: "", tRunsOn: "", tMatrix: "", tArtifacts: "", tWorkflow: "",
		tSchedule: "cron: 0 3 * * *", tInput: "type: choice, options: a", tConcurrency: "group: a", tJob: "steps: [x]", tStep: "run: x",
		tImage: "", tService: "image: x", tRetry: "max: 1, on: timeout", tExit: "exit: 1", tCache: "kind: directory, paths: a",
		tPublish: "name: a, path: a", tRestore: "from_job: b, name: a", tReport: "kind: junit, path: a", tIdentity: "audience: a",
	}
	for name, table := range tables() {
		for _, k := range table.keys {
			for _, v := range values {
				body := k.name + ": " + v
				for part := range strings.SplitSeq(beside[name], ", ") {
					if key, _, _ := strings.Cut(part, ":"); part != "" && key != k.name {
						body += ", " + part
					}
				}
				holder := holders()[name]
				if name == tWorkflow {
					holder = strings.Join(slices.DeleteFunc(strings.SplitAfter(holder, "\n"), func(line string) bool { return strings.HasPrefix(line, k.name+":") }), "")
				}
				check(name+"."+k.name, []byte(strings.ReplaceAll(holder, "KEY", body)))
			}
		}
	}
	if accepted < 500 {
		t.Errorf("Parse accepts %d files", accepted)
	}
	// A list of jobs, which no holder has.
	for _, text := range []string{
		"version: 1\njobs: [{name: 1, steps: [x]}, {name: 1.5, needs: , steps: [x]}, {name: true, needs: 1, steps: [x]}]\n",
		"version: \"1\"\ndefaults:\njobs: {a: {steps: [{run: x, secrets: , name: ~}], outputs: , needs: }}\n",
		"version: 1\non: {manual: {inputs: {i: {type: choice, options: a}}}}\njobs: {a: {steps: [x], outputs: version, services: {s: {image: x, ports: 6379}}}}\n",
	} {
		if _, err := Parse("w.yaml", []byte(text)); err != nil {
			t.Errorf("Parse refuses %q: %v", text, err)
		}
		check("a list", []byte(text))
	}
}

// corpus returns the files of FuzzParse.
func corpus(t *testing.T) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for _, pattern := range []string{"plan/*.txtar", "invalid/*.txtar", "fuzz/FuzzParse/*"} {
		files, err := filepath.Glob("testdata/" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no files %s (%v)", pattern, err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if filepath.Ext(file) == ".txtar" {
				out[file] = []byte(section(txtar.Parse(data), "workflow.yaml"))
				continue
			}
			_, quoted, _ := strings.Cut(string(data), "[]byte(")
			text, err := strconv.Unquote(strings.TrimSuffix(strings.TrimSpace(quoted), ")"))
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			out[file] = []byte(text)
		}
	}
	return out
}

// validExamples returns the golden plans' files and the reference's examples.
func validExamples(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	files, err := filepath.Glob("testdata/plan/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples (%v)", err)
	}
	for _, file := range files {
		a, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out[file] = section(a, "workflow.yaml")
	}
	maps.Copy(out, referenceExamples(t))
	return out
}

func TestTheSchemaRefusesUnknownKeysAtEveryLevel(t *testing.T) {
	t.Parallel()
	root := schemaRoot(t)
	for name := range tables() {
		if name == tMatrix { // its keys are the author's
			continue
		}
		def := root["$defs"].(map[string]any)[name].(map[string]any)
		if err := validate(root, def, map[string]any{"no_such_key": "x"}); err == nil {
			t.Errorf("%s: accepted an unknown key", name)
		}
		for _, r := range tables()[name].required {
			if !slices.Contains(def["required"].([]any), any(r)) {
				t.Errorf("%s: %s is required by the parser only", name, r)
			}
		}
	}
	for _, text := range []string{
		"version: 2\njobs: {a: {steps: [x]}}", "version: 1", "version: 1\njobs: {}", "version: 1\njobs: []", "version: 1\njobs: [{steps: [x]}]",
		"version: 1\njobs: {a: {steps: []}}", "version: 1\njobs: {a: {steps: [x], timeout: 10}}", "version: 1\njobs: {a: {steps: [x], retry: 2}}",
		"version: 1\njobs: {a: {steps: [x], allow_failure: yes please}}", "version: 1\njobs: {a: {steps: [{name: x}]}}", "version: 1\non: release\njobs: {a: {steps: [x]}}",
		"version: 1\nenv: {9A: x}\njobs: {a: {steps: [x]}}",
	} {
		if err := validate(root, root, decoded(t, text)); err == nil {
			t.Errorf("the schema accepts %q", text)
		}
		refused(t, text)
	}
}

// holders gives, for every table, a file with KEYS in a mapping of that kind.
func holders() map[string]string {
	job := func(body string) string { return "version: 1\njobs: {a: {steps: [x], " + body + "}}\n" }
	return map[string]string{
		tWorkflow:    "version: 1\njobs: {a: {steps: [x]}}\nKEY\n",
		tDefaults:    "version: 1\ndefaults: {KEY}\njobs: {a: {steps: [x]}}\n",
		tOn:          "version: 1\non: {KEY}\njobs: {a: {steps: [x]}}\n",
		tPush:        "version: 1\non: {push: {KEY}}\njobs: {a: {steps: [x]}}\n",
		tPullRequest: "version: 1\non: {pull_request: {KEY}}\njobs: {a: {steps: [x]}}\n",
		tSchedule:    "version: 1\non: {schedule: [{KEY}]}\njobs: {a: {steps: [x]}}\n",
		tManual:      "version: 1\non: {manual: {KEY}}\njobs: {a: {steps: [x]}}\n",
		tInput:       "version: 1\non: {manual: {inputs: {i: {KEY}}}}\njobs: {a: {steps: [x]}}\n",
		tConcurrency: "version: 1\nconcurrency: {KEY}\njobs: {a: {steps: [x]}}\n",
		tJob:         "version: 1\njobs: {a: {KEY}}\n",
		tStep:        "version: 1\njobs: {a: {steps: [{KEY}]}}\n",
		tRunsOn:      job("runs_on: {KEY}"),
		tImage:       job("image: {KEY}"),
		tService:     job("services: {s: {KEY}}"),
		tRetry:       job("retry: {KEY}"),
		tExit:        job("retry: {max: 1, on: [{KEY}]}"),
		tMatrix:      job("matrix: {KEY}"),
		tCache:       job("cache: {KEY}"),
		tArtifacts:   job("artifacts: {KEY}"),
		tPublish:     job("artifacts: {publish: [{KEY}]}"),
		tRestore:     job("artifacts: {restore: [{KEY}]}"),
		tReport:      job("reports: {KEY}"),
		tIdentity:    job("identity: {KEY}"),
	}
}

// A key that the table lists and the parser does not read would be accepted
// and have no effect; so each must object to a value of no kind it can take.
func TestEveryKeyOfTheTablesIsReadByTheParser(t *testing.T) {
	t.Parallel()
	for name, table := range tables() {
		for _, k := range table.keys {
			holder := holders()[name]
			if name == tWorkflow { // the key replaces the one that is there
				holder = strings.Join(slices.DeleteFunc(strings.SplitAfter(holder, "\n"), func(line string) bool { return strings.HasPrefix(line, k.name+":") }), "")
			}
			text := strings.ReplaceAll(holder, "KEY", k.name+": [[[{no_such_key: 1}]]]")
			_, err := Parse("w.yaml", []byte(text))
			if err == nil {
				t.Errorf("%s.%s takes anything", name, k.name)
				continue
			}
			column := 0
			for line := range strings.Lines(text) {
				if i := strings.Index(line, k.name+": [[["); i >= 0 {
					column = utf8.RuneCountInString(line[:i]) + len(k.name) + 3
				}
			}
			at := false
			for _, f := range mustBeInvalid(t, err) {
				if strings.Contains(f.Detail, "unknown key") && strings.Contains(f.Detail, `"`+k.name+`"`) {
					t.Errorf("%s.%s is in the table and unknown to the parser", name, k.name)
				}
				at = at || f.Column >= column && f.Column <= column+3
			}
			if !at {
				t.Errorf("%s.%s: no problem at its value: %v", name, k.name, err)
			}
		}
	}
}

// USERS 4.1: one spelling is accepted, and a known key of another system gives
// an error that names ours.
func TestForeignKeysAreAnsweredWithOurs(t *testing.T) {
	t.Parallel()
	for name, foreign := range foreignKeys() {
		for key, advice := range foreign {
			if tables()[name].has(key) {
				t.Errorf("%s.%s is a key of ours", name, key)
			}
			text := strings.ReplaceAll(holders()[name], "KEY", key+": x")
			got := refused(t, text)
			if !strings.Contains(got, fmt.Sprintf("unknown key %q in %s: %s", key, tables()[name].what, advice)) {
				t.Errorf("%s.%s:\n%s", name, key, got)
			}
			for _, w := range regexp.MustCompile(`write ([a-z_]+)`).FindAllStringSubmatch(advice, -1) {
				if !knownSomewhere(w[1]) && !slices.Contains([]string{"the", "one"}, w[1]) {
					t.Errorf("%s.%s: the advice %q names %q, which is no key", name, key, advice, w[1])
				}
			}
		}
	}
	for _, key := range []string{"runs-on", "timeout-minutes", "continue-on-error", "depends_on", "uses", "with", "container", "script", "stage", "stages"} {
		if _, ok := foreignKeys()[tJob][key]; !ok {
			t.Errorf("no advice for %s in a job", key)
		}
	}
	says(t, refused(t, "version: 1\njobs: {a: {steps: {run: x}}}\n"), "2:19", "steps is a list")
}

func knownSomewhere(key string) bool {
	for _, t := range tables() {
		if t.has(key) {
			return true
		}
	}
	return false
}

func TestTheSchemaIsStable(t *testing.T) {
	t.Parallel()
	if !bytes.Equal(Schema(), Schema()) || !json.Valid(Schema()) {
		t.Error("two schemas")
	}
	changed := Schema()
	changed[0] = 'x'
	if bytes.Equal(changed, Schema()) {
		t.Error("the caller's copy is the original")
	}
}
