package workflow

import "sync"

// table lists the keys that one kind of mapping takes. The parser knows a key
// by its table only, and Schema is generated from the same tables.
type table struct {
	what     string // for messages: "a job"
	keys     []keySpec
	required []string
	foreign  map[string]string // key of another system -> what to write instead
	idle     map[string]string // key that has no effect yet -> what does not happen
}

type keySpec struct {
	name string
	doc  string
	// value is the JSON Schema of the value.
	value schema
}

type schema = map[string]any

func (t *table) has(name string) bool {
	for i := range t.keys {
		if t.keys[i].name == name {
			return true
		}
	}
	return false
}

func (t *table) names() []string {
	out := make([]string, len(t.keys))
	for i := range t.keys {
		out[i] = t.keys[i].name
	}
	return out
}

// Names of the tables; they are also the names of the schema's definitions.
const (
	tWorkflow    = "workflow"
	tDefaults    = "defaults"
	tOn          = "on"
	tPush        = "push"
	tPullRequest = "pull_request"
	tSchedule    = "schedule"
	tManual      = "manual"
	tInput       = "input"
	tConcurrency = "concurrency"
	tJob         = "job"
	tStep        = "step"
	tRunsOn      = "runs_on"
	tImage       = "image"
	tService     = "service"
	tRetry       = "retry"
	tExit        = "exit"
	tMatrix      = "matrix" // include and exclude beside the axes
	tCache       = "cache"
	tArtifacts   = "artifacts"
	tPublish     = "publish"
	tRestore     = "restore"
	tReport      = "report"
	tIdentity    = "identity"
)

// tables returns the keys of every kind of mapping; callers do not change it.
func tables() map[string]*table { return tablesOnce() }

var tablesOnce = sync.OnceValue(func() map[string]*table {
	all := map[string]*table{
		tWorkflow: {what: "a workflow", required: []string{"version", "jobs"}, keys: []keySpec{
			{"version", "Version of the format: 1.", schema{"enum": []any{1, "1"}}},
			{"name", "Name shown for the workflow; the file's base name without it.", sText()},
			{"on", "Events that start the workflow; without it every push and pull request does. No event starts a run yet.", sOn()},
			{"env", "Variables of all jobs.", sEnv()},
			{"concurrency", "At most one run of the group at a time.", sConcurrency()},
			{"defaults", "Values for jobs and steps that do not set them.", sNullOr(sRef(tDefaults))},
			{"priority", "Order among the tenant's runs: higher first, 0 by default.", sPriority()},
			{"jobs", "A list is an ordered pipeline, a mapping is a graph.", sJobs()},
		}},
		tDefaults: {what: "defaults", keys: []keySpec{
			{"runs_on", "What a runner must offer.", sRunsOn()},
			{"image", "The job's environment.", sImage()},
			{"timeout", "Limit of a job's steps together.", sDuration()},
			{"retry", "When a further attempt in the same run is allowed.", sRef(tRetry)},
			{"shell", "Shell of the steps: sh or bash.", sShell()},
			{"working_directory", "Directory of the steps, relative to the workspace.", sText()},
		}},
		tOn: {what: "on", keys: []keySpec{
			{"push", "Branches and tags that are pushed.", sNullOr(sRef(tPush))},
			{"pull_request", "Pull (merge) requests, by their target branch.", sNullOr(sRef(tPullRequest))},
			{"schedule", "Times, as cron expressions.", schema{"type": "array", "minItems": 1, "items": sRef(tSchedule)}},
			{"manual", "A form or command line with typed inputs.", sNullOr(sRef(tManual))},
		}},
		tPush:        {what: "push", keys: filterKeys("branches", "tags", "paths")},
		tPullRequest: {what: "pull_request", keys: filterKeys("branches", "paths")},
		tSchedule: {what: "a schedule", required: []string{"cron"}, keys: []keySpec{
			{"cron", "Minute, hour, day of month, month, day of week.", sText()},
			{"timezone", "IANA time zone; UTC without it.", sText()},
		}},
		tManual: {what: "manual", keys: []keySpec{
			{"inputs", "Inputs by name.", schema{"type": "object", "propertyNames": schema{"pattern": namePattern}, "additionalProperties": sNullOr(sRef(tInput))}},
		}},
		tInput: {what: "an input", keys: []keySpec{
			{"type", "string (default), boolean, number or choice.", schema{"enum": []any{"string", "boolean", "number", "choice"}}},
			{"description", "Shown beside the field.", sText()},
			{"required", "A value must be given.", sBool()},
			{"default", "Value when none is given.", sScalar()},
			{"options", "Values of a choice.", schema{"anyOf": []any{sText(), schema{"type": "array", "minItems": 1, "items": sText()}}}},
		}},
		tConcurrency: {what: "concurrency", required: []string{"group"}, keys: []keySpec{
			{"group", "Name of the group.", sScalar()},
			{"cancel_in_progress", "Cancel the running one instead of waiting for it.", sBool()},
		}},
		tJob: {what: "a job", required: []string{"steps"}, keys: []keySpec{
			{"name", "Name of the job, in a list of jobs only.", sName()},
			{"needs", "Jobs that must succeed first; [] frees a job of a list from the one before it.", sNullOr(sOneOrMore())},
			{"if", "Condition (CEL) over the needs; success() without it.", sCondition()},
			{"matrix", "One leg of the job for each combination of values.", sMatrix()},
			{"runs_on", "What a runner must offer.", sRunsOn()},
			{"priority", "Order among ready jobs: higher first, 0 by default.", sPriority()},
			{"image", "The job's environment.", sImage()},
			{"services", "Containers beside the job.", sServices()},
			{"env", "Variables of all steps.", sEnv()},
			{"shell", "Shell of the steps: sh or bash.", sShell()},
			{"working_directory", "Directory of the steps, relative to the workspace.", sText()},
			{"steps", "Commands, one after the other.", schema{"type": "array", "minItems": 1, "items": schema{"anyOf": []any{sScalar(), sRef(tStep)}}}},
			{"timeout", "Limit of the steps together; preparation and publication have the same, each by itself.", sDuration()},
			{"retry", "When a further attempt in the same run is allowed.", sRef(tRetry)},
			{"allow_failure", "The run may succeed although this job failed.", sBool()},
			{"outputs", "Names that steps set through FORGECI_OUTPUT.", sNullOr(sOneOrMoreOf(sName()))},
			{"cache", "Directories kept between runs.", sOneOrMoreOf(sRef(tCache))},
			{"artifacts", "Files given to and taken from other jobs.", sRef(tArtifacts)},
			{"reports", "Test reports.", sOneOrMoreOf(sRef(tReport))},
			{"secrets", "Secrets of the job's steps.", sOneOrMore()},
			{"identity", "Audiences of the identity tokens the job may ask for.", sIdentity()},
			{"environment", "Environment whose rules and secrets apply.", sScalar()},
			{"inputs", "Files the result depends on; lets the job be skipped when they are unchanged.", sOneOrMore()},
			{"concurrency", "At most one job of the group at a time.", sConcurrency()},
		}},
		tStep: {what: "a step", required: []string{"run"}, keys: []keySpec{
			{"name", "Name shown for the step.", sScalar()},
			{"run", "Commands; a list is one shell.", sOneOrMore()},
			{"shell", "sh or bash.", sShell()},
			{"env", "Variables of the step.", sEnv()},
			{"working_directory", "Directory, relative to the workspace.", sText()},
			{"timeout", "Limit of the step.", sDuration()},
			{"if", "Condition (CEL) over the job so far; success() without it.", sCondition()},
			{"continue_on_error", "The job goes on and may succeed although this step failed.", sBool()},
			{"secrets", "Secrets given to this step.", sNullOr(sOneOrMore())},
		}},
		tRunsOn: {what: "runs_on", keys: []keySpec{
			{"os", "linux, darwin or windows.", sScalar()},
			{"arch", "amd64, arm64, …", sScalar()},
			{"size", "A size class that the operator has defined.", sScalar()},
			{"isolation", "process, sandbox, container, gvisor or vm.", sScalar()},
			{"labels", "All of them are needed.", sOneOrMoreOf(sScalar())},
		}},
		tImage: {what: "image", keys: []keySpec{
			{"ref", "Image reference.", sScalar()},
			{"dockerfile", "Dockerfile of the repository to build.", sText()},
			{"context", "Build context, the Dockerfile's directory without it.", sText()},
			{"target", "Stage of the Dockerfile.", sText()},
		}},
		tService: {what: "a service", required: []string{"image"}, keys: []keySpec{
			{"name", "Host name of the service, in a list of services only.", sText()},
			{"image", "Image reference.", sScalar()},
			{"env", "Variables of the service.", sEnv()},
			{"ports", "Ports that it listens on.", sOneOrMoreOf(schema{"type": "integer", "minimum": 1, "maximum": 65535})},
		}},
		tRetry: {what: "retry", required: []string{"max", "on"}, keys: []keySpec{
			{"max", "Further attempts, at most 10.", schema{"type": "integer", "minimum": 0, "maximum": maxRetry}},
			{"on", "Causes that allow one: runner_lost, runner_shutdown, prepare, timeout, {exit: [codes]}.", sOneOrMoreOf(schema{"anyOf": []any{
				schema{"enum": []any{"runner_lost", "runner_shutdown", "prepare", "timeout"}}, sRef(tExit),
			}})},
		}},
		tExit: {what: "an exit cause", required: []string{"exit"}, keys: []keySpec{
			{"exit", "Exit codes from 1 to 255.", sOneOrMoreOf(schema{"type": "integer", "minimum": 1, "maximum": 255})},
		}},
		tMatrix: {what: "a matrix", keys: []keySpec{
			{"include", "Values added to legs that they fit, else legs of their own.", sLegs()},
			{"exclude", "Combinations to leave out.", sLegs()},
		}},
		tCache: {what: "a cache", required: []string{"kind", "paths"}, keys: []keySpec{
			{"kind", "dependencies (package downloads) or directory.", schema{"enum": []any{"dependencies", "directory"}}},
			{"version", "Raise it to start anew.", sText()},
			{"inputs", "Files whose content is part of the key.", sOneOrMore()},
			{"paths", "Directories to keep.", sOneOrMore()},
			{"restore_prefix", "Take the newest cache with other inputs when there is none; for dependencies only.", sBool()},
		}},
		tArtifacts: {what: "artifacts", keys: []keySpec{
			{"publish", "Outputs of the job.", sOneOrMoreOf(sRef(tPublish))},
			{"restore", "Outputs of earlier jobs to fetch.", sOneOrMoreOf(sRef(tRestore))},
		}},
		tPublish: {what: "a published artifact", required: []string{"name"}, keys: []keySpec{
			{"name", "Name of the artifact.", sScalar()},
			{"path", "File, directory or pattern; a list for several.", sOneOrMore()},
			{"paths", "The same as path.", sOneOrMore()},
			{"optional", "Nothing matched is no failure.", sBool()},
			{"retention", "How long it is kept; the server's default without it.", sDuration()},
		}},
		tRestore: {what: "a restored artifact", required: []string{"from_job", "name"}, keys: []keySpec{
			{"from_job", "The job that publishes it, an ancestor of this one.", sScalar()},
			{"name", "Name of the artifact.", sScalar()},
			{"path", "Where it is put, relative to the workspace; the workspace itself without it.", sText()},
		}},
		tReport: {what: "a report", required: []string{"kind", "path"}, keys: []keySpec{
			{"kind", "junit.", schema{"const": "junit"}},
			{"path", "File or pattern.", sText()},
		}},
		tIdentity: {what: "identity", required: []string{"audience"}, keys: []keySpec{
			{"audience", "Who the token is for.", sOneOrMore()},
		}},
	}
	for name, advice := range foreignKeys() {
		all[name].foreign = advice
	}
	for name, idle := range withoutEffect() {
		all[name].idle = idle
	}
	return all
})

// filterKeys returns the keys of an event's filters: each with its ignore list.
func filterKeys(kinds ...string) []keySpec {
	var out []keySpec
	for _, k := range kinds {
		out = append(out,
			keySpec{k, "Patterns; the last that matches decides, ! excludes.", sOneOrMore()},
			keySpec{k + "_ignore", "Patterns that do not count; not together with " + k + ".", sOneOrMore()})
	}
	return out
}
