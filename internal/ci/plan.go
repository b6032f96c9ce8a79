package ci

import (
	"strings"
	"time"
)

// Plan is a workflow after validation, defaults and matrix expansion: what a
// run freezes. It is stored as JSON with the run; a field is only ever added.
type Plan struct {
	// Workflow is the name shown for the workflow: its name key or its file's base name.
	Workflow string `json:"workflow"`
	// Path is the workflow file's path relative to the repository's root, with slashes.
	Path string `json:"path"`
	// Digest is the SHA-256 of the file's bytes, lower-case hex.
	Digest string `json:"digest"`
	// Priority orders runs of one tenant: higher first, 0 by default.
	Priority int `json:"priority,omitempty"`
	// Inputs are the accepted values of on.manual.inputs.
	Inputs map[string]string `json:"inputs,omitempty"`
	// Concurrency is parsed now and executed by a later version.
	Concurrency *Concurrency `json:"concurrency,omitempty"`
	// Jobs in file order, legs of a matrix in the order of its expansion.
	Jobs []JobSpec `json:"jobs"`
}

// Concurrency is a workflow's or a job's concurrency group.
type Concurrency struct {
	Group            string `json:"group"`
	CancelInProgress bool   `json:"cancel_in_progress,omitempty"`
}

// JobSpec is one job of a plan: one node of the graph, one leg of a matrix.
type JobSpec struct {
	// Name is unique in the run: the job's key, with the leg's values in
	// parentheses when it comes from a matrix ("build (linux, 3.10)").
	Name string `json:"name"`
	// Key is the job's name in the file; legs of one matrix share it.
	Key string `json:"key"`
	// Line is where the job begins in the file, from 1.
	Line int `json:"line,omitempty"`
	// Matrix holds the leg's values in the order of the file.
	Matrix []KeyValue `json:"matrix,omitempty"`
	// Needs holds keys of jobs in the file; a key stands for all its legs.
	Needs []string `json:"needs,omitempty"`
	// If is a CEL expression over the needs; empty means success().
	If string `json:"if,omitempty"`
	// RunsOn is what a runner must offer.
	RunsOn Requirements `json:"runs_on"`
	// Priority orders jobs: higher first.
	Priority int `json:"priority,omitempty"`
	// Env holds the job's variables in order: the workflow's, then the job's.
	Env []KeyValue `json:"env,omitempty"`
	// Shell and WorkingDirectory are the defaults of the steps, already copied into them.
	Steps []StepSpec `json:"steps"`
	// Timeout bounds the whole attempt from the start of execution.
	Timeout Duration `json:"timeout"`
	// Retry is the job's own policy; nil means the run's frozen default applies.
	Retry *RetryPolicy `json:"retry,omitempty"`
	// AllowFailure lets the run succeed and dependents start although this job failed.
	AllowFailure bool `json:"allow_failure,omitempty"`
	// Outputs are the names the job may set through FORGECI_OUTPUT, sorted.
	Outputs []string `json:"outputs,omitempty"`
	// Publish and Restore are the job's artifacts.
	Publish []ArtifactPublish `json:"publish,omitempty"`
	Restore []ArtifactRestore `json:"restore,omitempty"`

	// The following are parsed and validated now and executed by later versions.
	Image       *Image       `json:"image,omitempty"`
	Services    []Service    `json:"services,omitempty"`
	Cache       []Cache      `json:"cache,omitempty"`
	Reports     []Report     `json:"reports,omitempty"`
	Secrets     []string     `json:"secrets,omitempty"`
	Identity    []string     `json:"identity,omitempty"` // audiences
	Environment string       `json:"environment,omitempty"`
	Inputs      []string     `json:"inputs,omitempty"`
	Concurrency *Concurrency `json:"concurrency,omitempty"`
}

// StepSpec is one step of a job.
type StepSpec struct {
	Name             string     `json:"name"`
	Run              string     `json:"run"`
	Shell            string     `json:"shell,omitempty"` // sh, bash; empty means the default of the executor
	Env              []KeyValue `json:"env,omitempty"`
	WorkingDirectory string     `json:"working_directory,omitempty"` // relative to the workspace
	Timeout          Duration   `json:"timeout,omitempty"`
	If               string     `json:"if,omitempty"` // CEL over the job so far; empty means success()
	ContinueOnError  bool       `json:"continue_on_error,omitempty"`
	Secrets          []string   `json:"secrets,omitempty"`
	Line             int        `json:"line,omitempty"`
}

// KeyValue is one named value where order matters.
type KeyValue struct {
	Key   string `json:"k"`
	Value string `json:"v"`
}

// Requirements are what a job needs of a runner.
type Requirements struct {
	OS        string    `json:"os,omitempty"`        // GOOS word; empty means any
	Arch      string    `json:"arch,omitempty"`      // GOARCH word; empty means any
	Size      string    `json:"size,omitempty"`      // operator-defined word; empty means any
	Isolation Isolation `json:"isolation,omitempty"` // exact class; empty means any
	// Labels are all required: "key" or "key=value", sorted, without repeats.
	Labels []string `json:"labels,omitempty"`
	// Features are abilities of a runner that the job's keys ask for (image,
	// services, cache is optional and not among them), sorted.
	Features []string `json:"features,omitempty"`
}

// Features that a job's keys can ask for.
const (
	FeatureImage       = "image"
	FeatureServices    = "services"
	FeatureSecrets     = "secrets"
	FeatureIdentity    = "identity"
	FeatureEnvironment = "environment"
)

// RetryPolicy says when a further attempt in the same run is allowed.
type RetryPolicy struct {
	// Max is how many further attempts On grants.
	Max int `json:"max"`
	// On names causes: runner_lost, runner_shutdown, prepare, timeout.
	On []Reason `json:"on,omitempty"`
	// Exit holds exit codes that are causes.
	Exit []int `json:"exit,omitempty"`
	// Line is where the policy stands in the file, 0 for a default.
	Line int `json:"line,omitempty"`
}

// Image is the job's environment: a reference or a Dockerfile of the source.
type Image struct {
	Ref        string `json:"ref,omitempty"`
	Dockerfile string `json:"dockerfile,omitempty"`
	Context    string `json:"context,omitempty"`
	Target     string `json:"target,omitempty"`
}

// Service is a container beside the job.
type Service struct {
	Name  string     `json:"name"`
	Image string     `json:"image"`
	Env   []KeyValue `json:"env,omitempty"`
	Ports []int      `json:"ports,omitempty"`
}

// Cache is one directory cache of a job.
type Cache struct {
	Kind          string   `json:"kind"`
	Version       string   `json:"version"`
	Inputs        []string `json:"inputs,omitempty"`
	Paths         []string `json:"paths"`
	RestorePrefix bool     `json:"restore_prefix,omitempty"`
}

// Report is a test report that the job produces.
type Report struct {
	Kind string `json:"kind"` // junit
	Path string `json:"path"`
}

// ArtifactPublish declares an output.
type ArtifactPublish struct {
	Name string `json:"name"`
	// Paths are files, directories or globs relative to the workspace.
	Paths     []string `json:"paths"`
	Optional  bool     `json:"optional,omitempty"`
	Retention Duration `json:"retention,omitempty"` // 0 means the server's default
}

// ArtifactRestore declares an input: the output of an ancestor in the same run.
type ArtifactRestore struct {
	FromJob string `json:"from_job"` // a job's key, or the full name of a matrix leg
	Name    string `json:"name"`
	Path    string `json:"path"` // where it is put, relative to the workspace
}

// Duration is a time.Duration that reads and writes Go's duration text ("90s") in JSON.
type Duration time.Duration

// Std returns d as a time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String returns Go's duration text without units that are zero: 1h, not 1h0m0s.
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// MarshalText writes Go's duration text.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads Go's duration text.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return Errorf(ErrInvalid, "duration %q: write it like 90s, 10m or 1h30m", b)
	}
	*d = Duration(v)
	return nil
}

// Defaults that a workflow inherits when it says nothing.
const (
	DefaultJobTimeout  = Duration(time.Hour)
	DefaultGrace       = 10 * time.Second // SIGTERM to SIGKILL
	DefaultInfraBudget = 3                // attempts ended by infrastructure
)
