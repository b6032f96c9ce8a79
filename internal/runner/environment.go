package runner

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Bounds of the values of needs in the environment; the file FORGECI_NEEDS has
// them all. Linux takes 128 KiB in one variable.
const (
	maxNeedValue = 32 << 10
	maxNeedTotal = 256 << 10
)

// jobEnvironment returns what all steps of a job have: first what a workflow may
// change, then the workflow's and the job's variables, then what is fixed.
// docs/environment.md is the reference.
func jobEnvironment(t *protocol.Ticket, workspace, needsFile string) (changeable, fixed []ci.KeyValue) {
	set := func(name, value string) { fixed = append(fixed, ci.KeyValue{Key: name, Value: value}) }
	known := func(name, value string) {
		if value != "" {
			set(name, value)
		}
	}
	changeable = append([]ci.KeyValue{{Key: "CI", Value: "true"}}, t.Job.Env...)

	set("FORGECI", "true")
	owner, name, _ := strings.Cut(t.Run.Repo, "/")
	set("CI_REPO", t.Run.Repo)
	set("CI_REPO_OWNER", owner)
	set("CI_REPO_NAME", name)
	known("CI_COMMIT_SHA", t.Run.CommitSHA)
	known("CI_COMMIT_REF", t.Run.Ref)
	if branch, ok := strings.CutPrefix(t.Run.Ref, "refs/heads/"); ok {
		set("CI_COMMIT_BRANCH", branch)
	}
	if tag, ok := strings.CutPrefix(t.Run.Ref, "refs/tags/"); ok {
		set("CI_COMMIT_TAG", tag)
	}
	known("CI_COMMIT_MESSAGE", t.Run.Message)
	known("CI_COMMIT_AUTHOR", t.Run.Author)
	set("CI_RUN_ID", string(t.Lease.Run))
	set("CI_RUN_NUMBER", strconv.FormatInt(t.Run.Number, 10))
	set("CI_RUN_EVENT", t.Run.Event)
	known("CI_RUN_URL", t.Run.URL)
	known("CI_RUN_PARENT", string(t.Run.ParentRun))
	set("CI_WORKFLOW_NAME", t.Run.Workflow)
	set("CI_WORKFLOW_PATH", t.Run.Path)
	set("CI_JOB_ID", string(t.Lease.Job))
	set("CI_JOB_NAME", t.Job.Name)
	set("CI_JOB_KEY", t.Job.Key)
	set("CI_ATTEMPT", strconv.FormatInt(t.Lease.Epoch, 10))
	set("CI_WORKSPACE", workspace)
	for _, kv := range t.Job.Matrix {
		set("FORGECI_MATRIX_"+variable(kv.Key), kv.Value)
	}
	for _, name := range sortedKeys(t.Run.Inputs) {
		set("FORGECI_INPUT_"+variable(name), t.Run.Inputs[name])
	}
	fixed = append(fixed, needsEnvironment(t.Needs)...)
	if needsFile != "" {
		set("FORGECI_NEEDS", needsFile)
	}
	return changeable, fixed
}

// stepEnvironment returns the whole environment of one step; later entries win.
func stepEnvironment(changeable, fixed []ci.KeyValue, t *protocol.Ticket, index int, outputFile string) []ci.KeyValue {
	step := t.Job.Steps[index]
	all := slices.Concat(changeable, step.Env, fixed, []ci.KeyValue{
		{Key: "CI_STEP_NAME", Value: step.Name},
		{Key: "CI_STEP_NUMBER", Value: strconv.Itoa(index + 1)},
		{Key: "FORGECI_OPERATION_ID", Value: operationID(t, index)},
		{Key: "FORGECI_OUTPUT", Value: outputFile},
	})
	for i := range all {
		// No process can be given a NUL; a commit message could hold one.
		all[i].Value = strings.ReplaceAll(all[i].Value, "\x00", "")
	}
	return all
}

// operationID names one step's effect on the outside: equal in all attempts of
// the job, different for every other step (SPEC LP-12).
func operationID(t *protocol.Ticket, index int) string {
	return fmt.Sprintf("%s-%d", t.OperationID, index)
}

// needsEnvironment makes FORGECI_NEEDS_<KEY> and FORGECI_NEEDS_<KEY>_<OUTPUT>.
// A name that two results would share, and a value that is too long, is left
// out: the file has them all.
func needsEnvironment(needs map[string]protocol.NeedResult) []ci.KeyValue {
	values, count, total := map[string]string{}, map[string]int{}, 0
	add := func(name, value string) {
		values[name] = value
		count[name]++
	}
	for key, need := range needs {
		add("FORGECI_NEEDS_"+variable(key), string(need.Conclusion))
		for output, value := range need.Outputs {
			add("FORGECI_NEEDS_"+variable(key)+"_"+variable(output), value)
		}
	}
	var out []ci.KeyValue
	for _, name := range sortedKeys(values) {
		value := values[name]
		if count[name] > 1 || len(value) > maxNeedValue || total+len(value) > maxNeedTotal {
			continue
		}
		total += len(value)
		out = append(out, ci.KeyValue{Key: name, Value: value})
	}
	return out
}

// needsDocument is the content of the file FORGECI_NEEDS.
func needsDocument(needs map[string]protocol.NeedResult) ([]byte, error) {
	doc := map[string]protocol.NeedResult{}
	for key, need := range needs {
		if need.Outputs == nil {
			need.Outputs = map[string]string{}
		}
		doc[key] = need
	}
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the results of needs: %w", err)
	}
	return append(text, '\n'), nil
}

// variable turns a key into a part of a variable's name: upper case, and "_" for
// everything else than letters and digits.
func variable(key string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z':
			return c - 'a' + 'A'
		case c >= 'A' && c <= 'Z' || c >= '0' && c <= '9':
			return c
		default:
			return '_'
		}
	}, key)
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
