package runner

// Keys of the runner's log lines.
const (
	keyRun     = "run"
	keyJob     = "job"
	keyAttempt = "attempt"
	keyRunner  = "runner"
)
