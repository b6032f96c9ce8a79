package runner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// A runner whose jobs could not enter their workspaces does not start.
func TestARunnerThatItsJobsCannotReachSaysSoAtItsStart(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	r := newRig(t, s, listen(t, s), func(c *Config) { c.JobUser = &executor.User{Name: "job", UID: 64321, GID: 64322} })
	_, err := New(r.config)
	if !errors.Is(err, ci.ErrInvalid) || !strings.Contains(err.Error(), "chmod a+x ") {
		t.Errorf("%v", err)
	}
}

func TestJobRunsFromClaimToCompletion(t *testing.T) {
	t.Parallel()
	s := newControlPlane(t, time.Minute)
	j := s.add(job("echo hi"), map[string]string{"README": "hello\n"})
	r := newRig(t, s, listen(t, s)).start()
	r.finish(j)
	r.drain()
	if j.complete.Conclusion != ci.ConclusionSuccess {
		t.Fatalf("conclusion %s (%s: %s)", j.complete.Conclusion, j.complete.Reason, j.complete.Detail)
	}
	if got := j.text(0, protocol.Stdout); got != "hi\n" {
		t.Errorf("log is %q", got)
	}
	t.Log(s.calls)
}
