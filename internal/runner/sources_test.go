package runner

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// SR-3: what is kept of an earlier job is verified as if it had just come.
func TestASourceIsFetchedOnceAndVerifiedForEachJob(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		files := map[string]string{"a": "one", "b/c": "two"}
		fetched := func() int {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.calls[protocol.RouteFetchSource]
		}
		run := func(files map[string]string) {
			t.Helper()
			j := s.add(job("echo hi"), files)
			r.finish(j)
			if j.complete.Conclusion != ci.ConclusionSuccess {
				t.Fatalf("%+v", j.complete)
			}
		}
		r.start()
		run(files)
		run(files)
		if n := fetched(); n != 1 {
			t.Errorf("two jobs of one source fetched it %d times", n)
		}
		run(map[string]string{"a": "another"})
		if n := fetched(); n != 2 {
			t.Errorf("two sources were fetched %d times", n)
		}
		kept, err := filepath.Glob(filepath.Join(r.config.DataDir, "sources", "*"))
		if err != nil || len(kept) != 2 {
			t.Fatalf("kept %v, %v", kept, err)
		}
		for _, name := range kept {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			if err := os.WriteFile(name, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		run(files)
		if n := fetched(); n != 3 {
			t.Errorf("a damaged archive was fetched again %d times", n-2)
		}
		run(files)
		if n := fetched(); n != 3 {
			t.Error("the repaired archive is not used")
		}
		for _, name := range kept {
			if err := os.Remove(name); err != nil {
				t.Fatal(err)
			}
		}
		run(files)
		if n := fetched(); n != 4 {
			t.Error("an archive that somebody removed was not fetched again")
		}
		r.drain()
	})
}

func TestKeptSourcesAreBoundedAndTheLeastUsedGo(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	for _, left := range []string{"fetch-1", "fetch-2"} {
		if err := os.WriteFile(filepath.Join(data, left), []byte("half of it"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := openSources(data, 250)
	if err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(data, "fetch-*")); len(left) > 0 {
		t.Errorf("left of an earlier process: %v", left)
	}
	names := func() (names []string) {
		entries, err := os.ReadDir(s.dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	keep := func(digest string, age time.Duration) {
		t.Helper()
		file := filepath.Join(data, "fetch-x")
		if err := os.WriteFile(file, make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.keep(file, digest); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if _, err := os.Stat(s.path(digest)); err == nil {
			if err := os.Chtimes(s.path(digest), at, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	keep("sha256:aa", 3*time.Hour)
	keep("sha256:bb", 2*time.Hour)
	if !s.has("sha256:aa") || s.has("sha256:cc") {
		t.Error("has does not say what is kept")
	}
	keep("sha256:cc", 0)
	if got := names(); !slices.Equal(got, []string{"sha256-aa", "sha256-cc"}) {
		t.Errorf("kept %v: the one that was not used for longest has to go", got)
	}
	if err := s.drop("sha256:cc"); err != nil || s.drop("sha256:cc") != nil {
		t.Error("drop fails", err)
	}
	if err := s.clear(); err != nil || len(names()) != 0 {
		t.Errorf("after clear: %v, %v", names(), err)
	}
}
