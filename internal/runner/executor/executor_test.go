package executor

import (
	"context"
	"errors"
	"testing"
	"time"

	"forgeci/internal/ci"
)

func TestLookupUser(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nobody", "65534"} {
		u, err := LookupUser(name)
		if err != nil || u.UID != 65534 || u.Name != "nobody" {
			t.Errorf("%s: %+v, %v", name, u, err)
		}
		for _, g := range u.Groups {
			if g == u.GID {
				t.Errorf("%s: the user's own group is among the supplementary ones", name)
			}
		}
	}
	for _, name := range []string{"root", "0", "no such user", "", "-1", "4294967296"} {
		if u, err := LookupUser(name); !errors.Is(err, ci.ErrInvalid) {
			t.Errorf("%q: %+v, %v", name, u, err)
		}
	}
}

type hurried struct{ error }

func (hurried) Grace() time.Duration { return time.Second }

func TestGraceIsNeverLongerThanTheCauseAllows(t *testing.T) {
	t.Parallel()
	cause := func(err error) context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(err)
		return ctx
	}
	for _, c := range []struct {
		ctx       context.Context
		own, want time.Duration
	}{
		{t.Context(), time.Minute, time.Minute},
		{cause(errors.New("x")), time.Minute, time.Minute},
		{cause(hurried{errors.New("x")}), time.Minute, time.Second},
		{cause(hurried{errors.New("x")}), time.Millisecond, time.Millisecond},
	} {
		if got := Grace(c.ctx, c.own); got != c.want {
			t.Errorf("%v, want %v", got, c.want)
		}
	}
}
