package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/archive"
	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// tree writes files below dir: "name" → content; a name ending in "/" is a
// directory, a content beginning with "->" makes a link.
func tree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		switch link, ok := strings.CutPrefix(content, "->"); {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(path, 0o755)
		case ok:
			err = os.Symlink(link, path)
		default:
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// list returns what is below dir, links as "name -> target", directories with "/".
func list(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(path)
			rel += " -> " + to
		case d.IsDir():
			rel += "/"
		}
		all = append(all, rel)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCase_ART_04_what_paths_name(t *testing.T) {
	t.Parallel()
	files := map[string]string{
		"dist/app": "app", "dist/.env": "x", "dist/.well-known/x": "x", "dist/lib/a.so": "a", "dist/lib/.hidden": "h",
		".out/result": "r", "target/app.jar": "jar", "target/other.jar": "jar2", "target/notes.txt": "n",
		"empty/": "", "reports/deep/er/r.xml": "r", "bin/tool": "t", "bin/tool-latest": "->tool", "dangling": "->nowhere",
		"outside": "->/etc/passwd", "caf\xe9": "latin", "19:17:33.log": "l",
	}
	for name, c := range map[string]struct {
		paths []string
		want  []string // in the archive, files and links
		err   ci.Kind
	}{
		"one file":                    {paths: []string{"target/app.jar"}, want: []string{"app.jar"}},
		"one file at the root":        {paths: []string{"19:17:33.log"}, want: []string{"19:17:33.log"}},
		"a directory with dot-files":  {paths: []string{"dist/"}, want: []string{"dist/.env", "dist/.well-known/x", "dist/app", "dist/lib/.hidden", "dist/lib/a.so"}},
		"a directory named by a dot":  {paths: []string{".out/"}, want: []string{".out/result"}},
		"a deep directory":            {paths: []string{"reports/deep"}, want: []string{"deep/er/r.xml"}},
		"a glob":                      {paths: []string{"target/*.jar"}, want: []string{"target/app.jar", "target/other.jar"}},
		"a glob that matches one":     {paths: []string{"target/a*.jar"}, want: []string{"target/app.jar"}},
		"a glob with dot-files":       {paths: []string{"dist/**"}, want: []string{"dist/.env", "dist/.well-known/x", "dist/app", "dist/lib/.hidden", "dist/lib/a.so"}},
		"a glob over a directory":     {paths: []string{"dist/l*"}, want: []string{"dist/lib/.hidden", "dist/lib/a.so"}},
		"a pattern taken out again":   {paths: []string{"dist/", "!dist/**/.*"}, want: []string{"dist/app", "dist/lib/a.so"}},
		"a directory taken out again": {paths: []string{"dist/**", "!dist/lib", "!dist/.*"}, want: []string{"dist/app"}},
		"taken out, then in again":    {paths: []string{"target/*", "!target/*.jar", "target/app.jar"}, want: []string{"target/app.jar", "target/notes.txt"}},
		"a glob that names the dot":   {paths: []string{"dist/.*"}, want: []string{"dist/.env", "dist/.well-known/x"}},
		"a deep glob":                 {paths: []string{"reports/**/*.xml"}, want: []string{"reports/deep/er/r.xml"}},
		"several share a directory":   {paths: []string{"target/app.jar", "target/notes.txt"}, want: []string{"target/app.jar", "target/notes.txt"}},
		"several share the root":      {paths: []string{"target/app.jar", "reports/"}, want: []string{"work/reports/deep/er/r.xml", "work/target/app.jar"}},
		"twice the same":              {paths: []string{"target/app.jar", "target/*.jar"}, want: []string{"target/app.jar", "target/other.jar"}},
		"one of several is not there": {paths: []string{"target/app.jar", "nope/*"}, want: []string{"work/target/app.jar"}},
		"a name that is not UTF-8":    {paths: []string{"caf*"}, want: []string{"work/caf\xe9"}},
		"a link inside the tree":      {paths: []string{"bin"}, want: []string{"bin/tool", "bin/tool-latest"}},
		"nothing":                     {paths: []string{"nope/*"}},
		"a missing path":              {paths: []string{"nope"}},
		"an empty directory":          {paths: []string{"empty/"}},
		"a dangling link":             {paths: []string{"dangling"}, err: ci.ErrUnsafe},
		"a link out of the workspace": {paths: []string{"outside", "bin"}, err: ci.ErrUnsafe},
		"above the workspace":         {paths: []string{"../x"}, err: ci.ErrUnsafe},
		"above by detour":             {paths: []string{"dist/../../x"}, err: ci.ErrUnsafe},
		"absolute":                    {paths: []string{"/etc"}, err: ci.ErrUnsafe},
		"glob above":                  {paths: []string{"../*"}, err: ci.ErrUnsafe},
		"not a glob":                  {paths: []string{"dist/[a"}, err: ci.ErrInvalid},
		"through a link":              {paths: []string{"outside/x"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := filepath.Join(t.TempDir(), "work")
			tree(t, work, files)
			tr := &transfer{dir: t.TempDir(), log: testLog(t)}
			got, err := tr.freeze(t.Context(), c.paths, work)
			if c.err != "" {
				if !errors.Is(err, c.err) {
					t.Fatalf("error %v, want %s", err, c.err)
				}
			} else if err != nil {
				t.Fatal(err)
			}
			if got == nil {
				if c.want != nil {
					t.Fatal("nothing was archived")
				}
				if left := list(t, tr.dir); len(left) > 0 {
					t.Errorf("left behind: %q", left)
				}
				return
			}
			f, err := os.Open(got.file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var names []string
			tops := map[string]bool{}
			if _, err := archive.Read(t.Context(), f, archive.ArtifactLimits(), func(e archive.Entry, _ io.Reader) error {
				if e.Type != archive.Dir {
					names = append(names, e.Path)
				}
				top, _, _ := strings.Cut(e.Path, "/")
				tops[top] = true
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, names); diff != "" {
				t.Errorf("archived (-want +got):\n%s", diff)
			}
			if len(tops) != 1 {
				t.Errorf("top-level entries: %v", tops)
			}
		})
	}
}

// An artifact goes from one job to the next: a single file to the path itself,
// everything else into the directory at the path; bytes, modes and names as they
// were.
func TestCase_ART_01_artifacts_from_job_to_job(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		publish []string
		restore string
		source  map[string]string // of the second job
		want    []string
		fails   ci.Kind
	}{
		"a file to a path": {publish: []string{"bin/tool"}, restore: "inputs/tool.bin", want: []string{"inputs/", "inputs/tool.bin"}},
		"a file into a directory by its slash": {
			publish: []string{"bin/tool"}, restore: "inputs/", want: []string{"inputs/", "inputs/tool"},
		},
		"a file into a directory that is there": {
			publish: []string{"bin/tool"}, restore: "inputs", source: map[string]string{"inputs/old": "o"},
			want: []string{"inputs/", "inputs/old", "inputs/tool"},
		},
		"a file over a file": {
			publish: []string{"bin/tool"}, restore: "tool", source: map[string]string{"tool": "old"}, want: []string{"tool"},
		},
		"a directory": {
			publish: []string{"bin"}, restore: "in/bin2",
			want: []string{"in/", "in/bin2/", "in/bin2/private", "in/bin2/sub/", "in/bin2/sub/x", "in/bin2/tool", "in/bin2/tool-latest -> tool"},
		},
		"a glob with one match is a directory": {
			publish: []string{"bin/to?l"}, restore: "wheels", want: []string{"wheels/", "wheels/tool"},
		},
		"into the workspace itself": {
			publish: []string{"bin/tool", "bin/sub/x"}, restore: ".", source: map[string]string{"sub/y": "y"},
			want: []string{"sub/", "sub/x", "sub/y", "tool"},
		},
		"without a path": {publish: []string{"bin/tool"}, restore: "", source: map[string]string{"y": "y"}, want: []string{"tool", "y"}},
		"a directory in the way of a file": {
			publish: []string{"bin"}, restore: "d", source: map[string]string{"d/tool/x": "x"}, fails: ci.ErrConflict,
		},
		"a path out of the workspace": {publish: []string{"bin/tool"}, restore: "../x", fails: ci.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				r.exec.steps["build"] = func(_ context.Context, step executor.Step) executor.Result {
					tree(t, step.Dir, map[string]string{"bin/tool": "#!/bin/sh\n", "bin/private": "p", "bin/sub/x": "x", "bin/tool-latest": "->tool"})
					_ = errors.Join(os.Chmod(filepath.Join(step.Dir, "bin/tool"), 0o755), os.Chmod(filepath.Join(step.Dir, "bin/private"), 0o600))
					return executor.Result{}
				}
				var got []string
				modes := map[string]fs.FileMode{}
				r.exec.steps["look"] = func(_ context.Context, step executor.Step) executor.Result {
					got = list(t, step.Dir)
					for _, f := range got {
						if info, err := os.Stat(filepath.Join(step.Dir, f)); err == nil && !info.IsDir() {
							modes[filepath.Base(f)] = info.Mode().Perm()
						}
					}
					return executor.Result{}
				}
				producer := s.add(job("build"), nil, func(t *protocol.Ticket) {
					t.Job.Publish = []ci.ArtifactPublish{{Name: "bin", Paths: c.publish}}
				})
				r.start().finish(producer)
				if producer.complete.Conclusion != ci.ConclusionSuccess || len(producer.complete.Artifacts) != 1 {
					t.Fatalf("%+v", producer.complete)
				}
				u := producer.uploads[producer.complete.Artifacts["bin"]]
				if !u.sealed || u.in.Name != "bin" || u.in.Files == 0 || u.in.Bytes == 0 {
					t.Errorf("upload %+v", u.in)
				}
				consumer := s.add(job("look"), c.source, func(t *protocol.Ticket) {
					t.Restore = []protocol.RestoreArtifact{{ID: u.in.Digest, Name: "bin", Path: c.restore, Digest: u.in.Digest, Size: u.in.Size}}
				})
				r.finish(consumer)
				r.drain()
				if c.fails != "" {
					if consumer.complete.Reason != ci.ReasonPrepare {
						t.Errorf("ended with %q: %s", consumer.complete.Reason, consumer.complete.Detail)
					}
					return
				}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Errorf("%s\nworkspace (-want +got):\n%s", consumer.complete.Detail, diff)
				}
				for name, want := range map[string]fs.FileMode{"tool": 0o755, "tool.bin": 0o755, "private": 0o600} {
					if m, ok := modes[name]; ok && m != want && len(c.source) == 0 {
						t.Errorf("%s has mode %o", name, m)
					}
				}
			})
		})
	}
}

// A store that refuses the bytes of an output, because they are damaged on the way
// or for a reason of its own, is not the job's fault.
func TestBytesThatTheStoreRefusesAreNotTheJobsFault(t *testing.T) {
	t.Parallel()
	for status, says := range map[string]string{"400": "(digest)", "403": "refuses", "413": "refuses"} {
		t.Run(status, func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
				r.exec.steps["build"] = func(_ context.Context, step executor.Step) executor.Result {
					_ = os.WriteFile(filepath.Join(step.Dir, "made"), []byte("made"), 0o644)
					return executor.Result{}
				}
				s.fault = func(route string, _ int) string {
					if strings.HasPrefix(route, "PUT ") {
						return status
					}
					return ""
				}
				j := s.add(job("build"), nil, func(t *protocol.Ticket) {
					t.Job.Publish = []ci.ArtifactPublish{{Name: "made", Paths: []string{"made"}}}
				})
				r.start().finish(j)
				r.drain()
				if c := j.complete; c.Conclusion != ci.ConclusionFailed || c.Reason != ci.ReasonInternal || !strings.Contains(c.Detail, says) {
					t.Errorf("%s %s: %s", c.Conclusion, c.Reason, c.Detail)
				}
			})
		})
	}
}

// AR-3: parts are repeated one by one, also when the reply was lost or the
// address has expired, and sealing may be asked for twice.
func TestUploadSurvivesFaults(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		s.partSize = 1000
		r.exec.steps["build"] = func(_ context.Context, step executor.Step) executor.Result {
			var b strings.Builder
			for i := range 4000 {
				fmt.Fprintf(&b, "%x", i*i*7919)
			}
			_ = os.WriteFile(filepath.Join(step.Dir, "big"), []byte(b.String()), 0o644)
			return executor.Result{}
		}
		s.fault = func(route string, nth int) string {
			switch {
			case strings.HasPrefix(route, "PUT "):
				return []string{"", "503", "", "lost", "", "403", "", "away"}[nth%8]
			case route == protocol.RouteNewArtifact && nth == 1, route == protocol.RouteSealArtifact && nth == 1,
				route == protocol.RouteSignParts && nth%5 == 0:
				return "lost"
			}
			return ""
		}
		j := s.add(job("build"), nil, func(t *protocol.Ticket) {
			t.Job.Publish = []ci.ArtifactPublish{{Name: "big", Paths: []string{"big"}}}
		})
		r.start().finish(j)
		r.drain()
		if j.complete.Conclusion != ci.ConclusionSuccess || len(j.uploads) != 1 {
			t.Fatalf("%+v, %d uploads", j.complete, len(j.uploads))
		}
		for _, u := range j.uploads {
			if !u.sealed || len(u.parts) < 5 {
				t.Errorf("sealed %v, %d parts", u.sealed, len(u.parts))
			}
		}
	})
}

// A server that names a part size which no store takes is told so; no number of
// it makes the runner send less than everything, or fall.
func TestPartSizesOfAnotherKindOfServerAreRefused(t *testing.T) {
	t.Parallel()
	for _, size := range []int64{math.MinInt64, -1, 0, blob.MaxPartSize + 1, math.MaxInt64 - 1, math.MaxInt64} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, _ *pipes, r *rig) {
				s.partSize = size
				r.exec.steps["build"] = func(_ context.Context, step executor.Step) executor.Result {
					tree(t, step.Dir, map[string]string{"app": "an app"})
					return executor.Result{}
				}
				j := s.add(job("build"), nil, func(t *protocol.Ticket) {
					t.Job.Publish = []ci.ArtifactPublish{{Name: "app", Paths: []string{"app"}}}
				})
				r.start().finish(j)
				r.drain()
				if j.complete.Conclusion != ci.ConclusionFailed || len(j.complete.Artifacts) != 0 ||
					!strings.Contains(j.complete.Detail, fmt.Sprintf("parts of %d bytes", size)) {
					t.Errorf("%+v", j.complete)
				}
				for _, u := range j.uploads {
					if u.sealed || u.puts != 0 {
						t.Errorf("sealed %v after %d parts", u.sealed, u.puts)
					}
				}
			})
		})
	}
}

// fileOfOnes is a file that says how much of it was read.
type fileOfOnes struct {
	read  int
	first func()
}

func (f *fileOfOnes) ReadAt(p []byte, _ int64) (int, error) {
	if f.read == 0 {
		f.first()
	}
	f.read += len(p)
	for i := range p {
		p[i] = 1
	}
	return len(p), nil
}

// When an upload has failed or its job is cancelled, what is left of it, up to
// 100 GiB, is not read any more.
func TestAnEndedUploadReadsNothingMore(t *testing.T) {
	t.Parallel()
	const part = 128 << 20
	for what, most := range map[string]int{"before a part": 0, "within a part": 1 << 20} {
		ctx, cancel := context.WithCancelCause(t.Context())
		f := &fileOfOnes{first: func() { cancel(causeCancelled) }}
		if most == 0 {
			cancel(causeCancelled)
		}
		_, err := (&transfer{}).sendPart(ctx, "art_1", 1, io.NewSectionReader(f, 0, part), protocol.ArtifactPart{})
		if !errors.Is(err, causeCancelled) || f.read > most {
			t.Errorf("%s: error %v, %d bytes read", what, err, f.read)
		}
	}
}

func TestPartCount(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		size, part int64
		want       int // 0: refused
	}{
		{1, 1, 1},
		{10, 3, 4},
		{9, 3, 3},
		{1, blob.MaxPartSize, 1},
		{blob.MaxParts, 1, blob.MaxParts},
		{blob.MaxParts + 1, 1, 0},
		{math.MaxInt64, 1, 0},
		{math.MaxInt64, blob.MaxPartSize, 0},
	} {
		got, err := partCount(c.size, c.part)
		if got != c.want || (c.want == 0) != errors.Is(err, ci.ErrIncompatible) {
			t.Errorf("%d bytes in parts of %d: %d, %v", c.size, c.part, got, err)
		}
	}
}

// Decision 8: a failed job's outputs are sent for people to read, and not named
// for binding.
func TestOutputsOfAFailedJobAreSentUnbound(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		r.exec.steps["test"] = func(_ context.Context, step executor.Step) executor.Result {
			tree(t, step.Dir, map[string]string{"report.xml": "<r/>"})
			return executor.Result{ExitCode: 1}
		}
		j := s.add(job("test"), nil, func(t *protocol.Ticket) {
			t.Job.Publish = []ci.ArtifactPublish{{Name: "missing", Paths: []string{"nope"}}, {Name: "report", Paths: []string{"report.xml"}}}
		})
		r.start().finish(j)
		r.drain()
		if j.complete.Conclusion != ci.ConclusionFailed || j.complete.Reason != ci.ReasonExit || len(j.complete.Artifacts) != 0 {
			t.Errorf("%+v", j.complete)
		}
		if len(j.uploads) != 1 {
			t.Errorf("%d uploads", len(j.uploads))
		}
	})
}

// AR-4: an artifact that arrives damaged is never used.
func TestDamagedArtifactIsRefused(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Minute, func(t *testing.T, s *controlPlane, p *pipes, r *rig) {
		digest := digestOf([]byte("what it should be"))
		s.blobs[digest] = []byte("what it is not   ")
		j := s.add(job("echo never"), nil, func(t *protocol.Ticket) {
			t.Restore = []protocol.RestoreArtifact{{ID: digest, Name: "app", Path: "app", Digest: digest, Size: 17}}
		})
		r.start().finish(j)
		r.drain()
		if j.complete.Reason != ci.ReasonPrepare || len(r.exec.scripts()) != 0 {
			t.Errorf("%+v", j.complete)
		}
		if n := s.count("GET /blob/{digest}"); n != fetchTries {
			t.Errorf("%d downloads", n)
		}
	})
}

func TestSharedDirectory(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		dirs []string
		want string
	}{
		{[]string{"a/b"}, "a/b"},
		{[]string{"a/b", "a/c"}, "a"},
		{[]string{"a", "ab"}, "."},
		{[]string{".", "a"}, "."},
		{[]string{"a", "."}, "."},
		{[]string{"a/b", "a/b/c"}, "a/b"},
	} {
		if got := sharedDir(slices.Clone(c.dirs)); got != c.want {
			t.Errorf("%q share %q, want %q", c.dirs, got, c.want)
		}
	}
}
