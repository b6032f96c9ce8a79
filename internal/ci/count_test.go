package ci_test

import (
	"testing"

	"forgeci/internal/ci"
)

func TestANumberAgreesWithItsNoun(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0 files", 1: "1 file", 2: "2 files"} {
		if got := ci.Count(n, "file"); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
