package runner

import (
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

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
