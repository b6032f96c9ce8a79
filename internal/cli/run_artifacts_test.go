package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Whatever artifacts and jobs are called, each has a directory of its own inside
// of the one that was asked for, also where upper and lower case are one.
func TestArtifactsAreSavedApart(t *testing.T) {
	t.Parallel()
	run := func(id ci.RunID, path string, artifacts ...string) protocol.Run {
		r := protocol.Run{RunSummary: protocol.RunSummary{ID: id, Path: path}}
		for _, a := range artifacts {
			job, name, _ := strings.Cut(a, "/")
			r.Artifacts = append(r.Artifacts, protocol.Artifact{Run: id, JobName: job, Name: name, Bound: name != "lost"})
		}
		return r
	}
	for name, tc := range map[string]struct {
		runs []protocol.Run
		want string
	}{
		"names of their own": {[]protocol.Run{run("run_1", ".forgeci.yaml", "build/app", "test/coverage", "test/lost")}, "app coverage"},
		"one name": {
			[]protocol.Run{run("run_1", ".forgeci.yaml", "test (linux, 1.10)/cov", "test (mac, 1.10)/cov", "build/app")},
			"cov/test-linux-1.10 cov/test-mac-1.10 app",
		},
		"jobs that are one word": {
			[]protocol.Run{run("run_1", ".forgeci.yaml", "t (a-b)/x", "t (a, b)/x", "T (a b)/x", "../x", "(…)/x")},
			"x/t-a-b x/t-a-b-2 x/T-a-b-3 x/job x/job-2",
		},
		"upper and lower case": {[]protocol.Run{run("run_1", ".forgeci.yaml", "build/App", "build/app")}, "App/build app/build-2"},
		"long names": {
			[]protocol.Run{run("run_1", ".forgeci.yaml", strings.Repeat("ä", 99)+"/x", strings.Repeat("ä", 98)+"/x")},
			"x/" + strings.Repeat("ä", 60) + " x/" + strings.Repeat("ä", 60) + "-2",
		},
		"several workflows": {
			[]protocol.Run{
				run("run_1", ".forgeci/a.yaml", "build/app", "build/one"), run("run_2", ".forgeci/b.yaml", "build/app"),
				run("run_3", ".forgeci/forgeci.yaml", "build/app"), run("run_4", ".forgeci.yaml", "build/app"),
			},
			"app/a/build one app/b/build app/forgeci/build app/forgeci/build-2",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for _, s := range arrange(tc.runs) {
				if !filepath.IsLocal(s.place) {
					t.Errorf("%q is outside", s.place)
				}
				got = append(got, filepath.ToSlash(s.place))
			}
			if have := strings.Join(got, " "); have != tc.want {
				t.Errorf("got  %s\nwant %s", have, tc.want)
			}
		})
	}
}
