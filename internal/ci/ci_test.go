package ci_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
)

func TestIdentifiersSortByTimeAndCarryTheirKind(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_700_000_000_000)
	s := ci.IDSource{Now: func() time.Time { now = now.Add(time.Millisecond); return now }}
	var ids []string
	for range 1000 {
		ids = append(ids, s.New(ci.PrefixRun))
	}
	if !sort.StringsAreSorted(ids) {
		t.Error("identifiers do not sort by the time of their creation")
	}
	for _, id := range ids[:10] {
		if !ci.HasPrefix(id, ci.PrefixRun) || ci.HasPrefix(id, ci.PrefixJob) || len(id) != len("run_")+26 {
			t.Errorf("identifier %q", id)
		}
	}
	for _, bad := range []string{"", "run_", "run", "job_0", "run_A", "run_\x00", "run_" + strings.Repeat("0", 65), "run_0/1", "run_%"} {
		if ci.HasPrefix(bad, ci.PrefixRun) {
			t.Errorf("%q is taken for an identifier", bad)
		}
	}
}

func TestALeaseReadsBackOnlyInItsExactForm(t *testing.T) {
	t.Parallel()
	ref := ci.LeaseRef{Run: "run_1", Job: "job_2", Runner: "rnr_3", Session: "ses_4", Lease: "lse_1_5", Epoch: 7}
	got, err := ci.ParseLeaseRef(ref.String())
	if err != nil || got != ref {
		t.Errorf("%v %v", got, err)
	}
	for _, bad := range []string{
		"", "a/b/c/d/e/1", ref.String() + "/1", "/" + ref.String(), ref.String() + " ",
		"run_1/job_2/rnr_3/ses_4/lse_5/0", "run_1/job_2/rnr_3/ses_4/lse_5/-1", "run_1/job_2/rnr_3/ses_4/lse_5/+1",
		"run_1/job_2/rnr_3/ses_4/lse_5/01", "run_1/job_2/rnr_3/ses_4/lse_5/99999999999999999999",
		"job_2/run_1/rnr_3/ses_4/lse_5/1", "run_1/job_2/rnr_3/ses_4/lse_\x00/1", strings.Repeat("x", 600),
	} {
		if _, err := ci.ParseLeaseRef(bad); !errors.Is(err, ci.ErrInvalid) {
			t.Errorf("%q: %v, want invalid", bad, err)
		}
	}
}

func FuzzParseLeaseRef(f *testing.F) {
	f.Add("run_1/job_2/rnr_3/ses_4/lse_1_5/7")
	f.Add("////")
	f.Fuzz(func(t *testing.T, s string) {
		if ref, err := ci.ParseLeaseRef(s); err == nil && ref.String() != s {
			t.Errorf("%q reads as %q", s, ref)
		}
	})
}

func TestAnErrorKeepsItsKindItsRejectAndItsCause(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("complete: %w", ci.Rejected(ci.RejectEpoch).WithCause(io.EOF))
	if !errors.Is(err, ci.ErrLeaseLost) || !errors.Is(err, io.EOF) || ci.RejectOf(err) != ci.RejectEpoch || ci.KindOf(err) != ci.ErrLeaseLost {
		t.Errorf("%v: kind %s, reject %s", err, ci.KindOf(err), ci.RejectOf(err))
	}
	if ci.KindOf(ci.Rejected(ci.RejectRunEnded)) != ci.ErrRunEnded {
		t.Error("an ended run has a kind of its own")
	}
	if ci.KindOf(io.EOF) != ci.ErrInternal || ci.RejectOf(io.EOF) != ci.RejectNone {
		t.Error("a foreign error is not internal")
	}
}

func TestLeaseTimingLeavesRoom(t *testing.T) {
	t.Parallel()
	for _, ttl := range []time.Duration{ci.MinLeaseTTL, ci.DefaultLeaseTTL, time.Hour} {
		if ci.RenewEvery(ttl)*2+ci.LeaseMargin(ttl) >= ttl {
			t.Errorf("TTL %s: one lost renewal loses the lease", ttl)
		}
		if ci.SweepEvery(ttl) > 5*time.Second || ci.SweepEvery(ttl) > ttl/4 {
			t.Errorf("TTL %s: sweep every %s", ttl, ci.SweepEvery(ttl))
		}
	}
}

func TestADurationIsWrittenWithoutUnitsThatAreZero(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0s", 90 * time.Second: "1m30s", time.Minute: "1m", 10 * time.Minute: "10m", time.Hour: "1h", 20 * time.Hour: "20h",
		time.Hour + time.Second: "1h0m1s", 90 * time.Minute: "1h30m", 1500 * time.Millisecond: "1.5s",
	} {
		got := ci.Duration(d).String()
		var back ci.Duration
		if err := back.UnmarshalText([]byte(got)); got != want || err != nil || back.Std() != d {
			t.Errorf("%v is written %q and read as %v (%v), want %q", d, got, back.Std(), err, want)
		}
	}
}

// Whoever has to have seen every reason takes the list; it is that of the constants.
func TestRejectsAreAllReasons(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var declared []ci.Reject
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			if typ, ok := v.Type.(*ast.Ident); ok && typ.Name == "Reject" {
				for _, value := range v.Values {
					if text := value.(*ast.BasicLit).Value; text != `""` {
						declared = append(declared, ci.Reject(strings.Trim(text, `"`)))
					}
				}
			}
			return true
		})
	}
	if got := ci.Rejects(); len(declared) == 0 || !slices.Equal(got, declared) {
		t.Errorf("listed %v, declared %v", got, declared)
	}
}
