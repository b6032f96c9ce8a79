package runner

import (
	"testing"

	"forgeci/internal/ci"
)

// What a refused lease call means: a job that nobody has (its database was
// restored to before it, or it is another tenant's) is as lost as one whose
// lease has gone to somebody else; an outage or a refused report decides nothing.
func TestARefusalSaysWhetherTheJobIsStillOurs(t *testing.T) {
	t.Parallel()
	for err, want := range map[*ci.Error]cause{
		ci.Rejected(ci.RejectEpoch):                    causeLost,
		ci.Rejected(ci.RejectExpired):                  causeLost,
		ci.Rejected(ci.RejectEnded):                    causeLost,
		ci.Rejected(ci.RejectRunEnded):                 causeLost,
		ci.Rejected(ci.RejectCancelling):               causeCancelled,
		ci.Errorf(ci.ErrNotFound, "no job"):            causeLost,
		ci.Errorf(ci.ErrUnavailable, "away"):           "",
		ci.Errorf(ci.ErrInternal, "defect"):            "",
		ci.Errorf(ci.ErrInvalid, "steps"):              "",
		ci.Errorf(ci.ErrConflict, "artifact"):          "",
		ci.Errorf(ci.ErrTooLarge, "outputs"):           "",
		ci.Errorf(ci.ErrUnauthorized, "credential"):    "",
		ci.Errorf(ci.ErrRateLimited, "later"):          "",
		ci.Errorf(ci.ErrDigest, "another source"):      "",
		ci.Errorf(ci.ErrIncompatible, "newer version"): "",
	} {
		if got, refused := verdict(err); got != want || refused != (want != "") {
			t.Errorf("%v: %q %v, want %q", err, got, refused, want)
		}
	}
}
