package runner

import (
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// stepState is what a step's condition may depend on.
type stepState struct {
	failed bool // a step before it did not succeed, and that was not allowed
}

func (s *stepState) add(up protocol.StepUpdate, allowed bool) {
	if !up.Conclusion.Succeeded() && up.Conclusion != ci.ConclusionSkipped && !allowed {
		s.failed = true
	}
}

// runs evaluates a step's condition.
func (s *stepState) runs(condition string) (bool, error) {
	switch condition {
	case "", "success()":
		return !s.failed, nil
	case "failure()":
		return s.failed, nil
	case "always()":
		return true, nil
	default:
		return false, ci.Errorf(ci.ErrInvalid, "unknown condition %s", quote(condition))
	}
}
