package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
)

func testApp(env map[string]string) (a *app, stdout, stderr *bytes.Buffer) {
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	a = newApp(Process{
		Stdin: strings.NewReader(""), Stdout: stdout, Stderr: stderr,
		LookupEnv: func(name string) (string, bool) { v, ok := env[name]; return v, ok },
		Now:       func() time.Time { return time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC) },
	})
	return a, stdout, stderr
}

// Every kind of error has a code of its own, and every kind is here.
func TestExitCodesOfErrors(t *testing.T) {
	t.Parallel()
	for kind, want := range map[ci.Kind]int{
		ci.ErrInvalid: 2, ci.ErrTooLarge: 2, ci.ErrUnsafe: 2,
		ci.ErrUnauthorized: 4, ci.ErrForbidden: 4, ci.ErrNotFound: 4, ci.ErrConflict: 4, ci.ErrRunEnded: 4, ci.ErrGone: 4,
		ci.ErrLeaseLost: 5, ci.ErrRateLimited: 5, ci.ErrUnavailable: 5, ci.ErrDigest: 5, ci.ErrIncompatible: 5, ci.ErrMethod: 5, ci.ErrInternal: 5,
	} {
		if got := codeOf(fmt.Errorf("do: %w", ci.Errorf(kind, "x"))); got != want {
			t.Errorf("%s: %d, want %d", kind, got, want)
		}
	}
	for name, tc := range map[string]struct {
		err  error
		want int
	}{
		"none":            {nil, 0},
		"usage":           {usage("x"), 2},
		"defect":          {errors.New("x"), 5},
		"a result":        {ended(3), 3},
		"success":         {ended(0), 0},
		"interrupted":     {stopped{130, "interrupted"}, 130},
		"timeout":         {fmt.Errorf("wait: %w", stopped{124, "late"}), 124},
		"timeout wrapped": {ci.Errorf(ci.ErrUnavailable, "x").WithCause(stopped{124, "late"}), 124},
	} {
		if got := codeOf(tc.err); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

// Every conclusion with every reason that goes with it.
func TestExitCodesOfResults(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		c      ci.Conclusion
		reason ci.Reason
		want   int
	}{
		{ci.ConclusionSuccess, "", 0},
		{ci.ConclusionSkipped, ci.ReasonCondition, 0},
		{ci.ConclusionCached, "", 0},
		{ci.ConclusionFailed, ci.ReasonJobFailed, 1},
		{ci.ConclusionFailed, ci.ReasonExit, 1},
		{ci.ConclusionFailed, ci.ReasonOutputMissing, 1},
		{ci.ConclusionFailed, ci.ReasonInfrastructure, 5},
		{ci.ConclusionFailed, ci.ReasonAttemptsExhausted, 5},
		{ci.ConclusionTimedOut, ci.ReasonTimeout, 1},
		{ci.ConclusionCancelled, ci.ReasonUser, 3},
		{ci.ConclusionAborted, ci.ReasonRunnerLost, 5},
		{"novel", "", 5},
	} {
		if got := codeOfResult(tc.c, tc.reason); got != tc.want {
			t.Errorf("%s %s: %d, want %d", tc.c, tc.reason, got, tc.want)
		}
	}
}

// An error says what, where and what to do, and nothing of others' bytes acts on
// the terminal.
func TestErrorsAreToldInFull(t *testing.T) {
	t.Parallel()
	a, stdout, stderr := testApp(nil)
	code := a.exit(fmt.Errorf("plan: %w", &ci.Error{Kind: ci.ErrInvalid, Detail: "the workflow is not valid", Fields: []ci.FieldError{
		{File: "a.yaml", Line: 3, Column: 7, Detail: "unknown key \x1b[2J"}, {Pointer: "/inputs/x~1y~01", Detail: "is missing"}, {Pointer: "/jobs/0", Detail: "is odd"},
	}}))
	want := "a.yaml:3:7: unknown key ^[[2J\n--input x/y~1: is missing\n/jobs/0: is odd\nforgeci: the workflow is not valid\n"
	if code != 2 || stderr.String() != want || stdout.Len() > 0 {
		t.Errorf("code %d, %q on stderr, want %q", code, stderr, want)
	}
	stderr.Reset()
	if code := a.exit(ci.Errorf(ci.ErrUnavailable, "no answer from h").WithCause(io.ErrUnexpectedEOF)); code != 5 ||
		stderr.String() != "forgeci: no answer from h (unexpected EOF)\n" {
		t.Errorf("code %d, %q", code, stderr)
	}
	stderr.Reset()
	if code := a.exit(ci.Errorf(ci.ErrUnavailable, "it cannot work here").WithCause(ci.Errorf(ci.ErrInvalid, "it is closed: chmod it"))); code != 5 ||
		stderr.String() != "forgeci: it cannot work here (it is closed: chmod it)\n" {
		t.Errorf("code %d, %q", code, stderr)
	}
	stderr.Reset()
	if code := a.exit(ended(1)); code != 1 || stderr.Len() > 0 {
		t.Errorf("code %d, %q: a result needs no message", code, stderr)
	}
	if code := a.exit(context.Cause(cancelled())); code != 124 || stderr.String() != "forgeci: late\n" {
		t.Errorf("code %d, %q", code, stderr)
	}
}

func cancelled() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(stopped{124, "late"})
	return ctx
}

func TestTablesAndTimes(t *testing.T) {
	t.Parallel()
	a, stdout, _ := testApp(nil)
	tb := table{head: []string{"NAME", "N", ""}}
	tb.add(text("grün"), text("1"), text(""))
	tb.add(text("a\x1b[2Jb\n"), text("12345"), text("note"))
	tb.write(a.out)
	if want := "NAME       N\ngrün       1\na^[[2Jb\\n  12345  note\n"; stdout.String() != want {
		t.Errorf("got %q, want %q", stdout, want)
	}
	now := a.Now()
	for d, want := range map[time.Duration]string{
		-time.Second: "now", 0: "0s ago", 59 * time.Second: "59s ago", time.Minute: "1m ago", 90 * time.Minute: "1h ago",
		47 * time.Hour: "47h ago", 48 * time.Hour: "2d ago", 40 * 24 * time.Hour: "2026-10-20",
	} {
		if got := a.ago(now.Add(-d)); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		0: "0ms", 42 * time.Millisecond: "42ms", 1500 * time.Millisecond: "1.5s", 42 * time.Second: "42s",
		62 * time.Second: "1m02s", 3720 * time.Second: "1h02m",
	} {
		if got := span(d); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
	early := now.Add(-time.Minute)
	if got := a.took(&now, &early); got != "0ms" {
		t.Errorf("an end before the start took %s", got)
	}
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 5 << 20: "5.0 MiB", 3 << 40: "3.0 TiB", 2000 << 40: "2000.0 TiB"} {
		if got := size(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

// Colours are for terminals, and only where nobody forbids them.
func TestColours(t *testing.T) {
	t.Parallel()
	a, _, _ := testApp(nil)
	if a.out.color || a.out.paint(red, "x") != "x" {
		t.Error("colours on what is no terminal")
	}
	s := &screen{w: io.Discard, terminal: true, color: true}
	if got := s.paint(red, "x"); got != "\x1b[31mx\x1b[0m" {
		t.Errorf("got %q", got)
	}
}
