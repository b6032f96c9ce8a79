package ci

// Transition is a step that the state of a run or a job may take.
type Transition struct {
	From, To State
	By       string
}

// JobTransitions lists every step of a job's state; the store refuses others.
func JobTransitions() []Transition {
	return []Transition{
		{StateWaiting, StateReady, "all needs have finished and its condition holds"},
		{StateWaiting, StateFinished, "skipped, or cancelled before it started"},
		{StateReady, StateRunning, "claimed: next epoch, lease"},
		{StateReady, StateCancelling, "its run is cancelled, and an attempt that was lost may still run"},
		{StateReady, StateFinished, "cancelled before it started"},
		{StateRunning, StateReady, "the attempt was lost or failed, and policy grants another"},
		{StateRunning, StateCancelling, "its run is cancelled"},
		{StateRunning, StateFinished, "completed, aborted, or dead letter"},
		{StateCancelling, StateFinished, "termination of all its sandboxes is proven, or their hosts fenced"},
	}
}

// RunTransitions lists every step of a run's state; the store refuses others.
func RunTransitions() []Transition {
	return []Transition{
		{StateWaiting, StateRunning, "a job is claimed"},
		{StateWaiting, StateCancelling, "cancelled"},
		{StateWaiting, StateFinished, "all jobs were skipped"},
		{StateRunning, StateCancelling, "cancelled"},
		{StateRunning, StateFinished, "its last job has finished"},
		{StateCancelling, StateFinished, "every job has finished, every sandbox is proven to have ended"},
	}
}

// Legal reports whether ts holds the step; staying is always legal.
func Legal(ts []Transition, from, to State) bool {
	if from == to {
		return true
	}
	for _, t := range ts {
		if t.From == from && t.To == to {
			return true
		}
	}
	return false
}
