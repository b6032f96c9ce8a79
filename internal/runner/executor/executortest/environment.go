//go:build linux

package executortest

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

const canary = "canary-0b7e41"

func (s suite) environment(t *testing.T) {
	t.Setenv("FORGECI_TOKEN", canary)
	t.Setenv("SOME_SECRET", canary)
	t.Setenv("BASH_FUNC_evil%%", "() { echo "+canary+"; }")
	b := s.open(t)
	o := b.run("env -0; tr '\\0' '\\n' </proc/$$/environ >&2; cat /proc/$PPID/environ >&2 || true", func(st *executor.Step) {
		st.Env = []ci.KeyValue{{Key: "A", Value: "one"}, {Key: "B", Value: "two\nlines = and 'quotes'"}, {Key: "A", Value: "later"}, {Key: "LANG", Value: "de_DE"}}
	})
	if strings.Contains(o.out+o.err, canary) {
		t.Errorf("a variable of the runner reached the step:\n%s\n%s", o.out, o.err)
	}
	env := map[string]string{}
	for kv := range strings.SplitSeq(strings.TrimSuffix(o.out, "\x00"), "\x00") {
		k, v, _ := strings.Cut(kv, "=")
		if _, twice := env[k]; twice {
			t.Errorf("%s is there twice", k)
		}
		env[k] = v
	}
	name := env["USER"]
	want := map[string]string{
		"HOME": b.job.Home, "TMPDIR": b.job.Tmp, "LOGNAME": name, "LANG": "de_DE", "TERM": "dumb",
		"A": "later", "B": "two\nlines = and 'quotes'", "PWD": b.job.Workspace,
	}
	for k, v := range want {
		if env[k] != v {
			t.Errorf("%s=%q, want %q", k, env[k], v)
		}
	}
	if s.user != nil && name != s.user.Name || name == "" {
		t.Errorf("USER=%q, want the job's user", name)
	}
	if base := filepath.Base(env["SHELL"]); base != "bash" && base != "sh" {
		t.Errorf("SHELL=%q", env["SHELL"])
	}
	if env["PATH"] == "" {
		t.Error("no PATH")
	}
	allowed := []string{"PATH", "USER", "SHELL", "SHLVL", "_", "OLDPWD", "FORGECI_SANDBOX"}
	for k := range env {
		if _, ok := want[k]; !ok && !slices.Contains(allowed, k) {
			t.Errorf("unexpected variable %s=%q", k, env[k])
		}
	}
	mark := env["FORGECI_SANDBOX"]
	o = b.run(`echo "$FORGECI_SANDBOX"`, func(st *executor.Step) {
		st.Env = []ci.KeyValue{{Key: "FORGECI_SANDBOX", Value: "mine"}}
	})
	o.want(t, 0, mark+"\n")
}

func (s suite) environmentRefused(t *testing.T) {
	b := s.open(t)
	for _, kv := range []ci.KeyValue{{Key: "", Value: "x"}, {Key: "A=B", Value: "x"}, {Key: "A\x00", Value: "x"}, {Key: "A", Value: "x\x00y"}} {
		_, err := b.try(t.Context(), "echo no", func(st *executor.Step) { st.Env = []ci.KeyValue{kv} })
		wantKind(t, err, ci.ErrInvalid)
	}
	_, err := b.try(t.Context(), "echo no", func(st *executor.Step) {
		st.Env = []ci.KeyValue{{Key: "A", Value: strings.Repeat("x", 8<<20)}}
	})
	wantKind(t, err, ci.ErrTooLarge)
	o := b.run(`echo "${#A}"`, func(st *executor.Step) {
		for i := range 10 {
			st.Env = append(st.Env, ci.KeyValue{Key: fmt.Sprintf("A%d", i), Value: strings.Repeat("x", 100<<10)})
		}
		st.Env = append(st.Env, ci.KeyValue{Key: "A", Value: strings.Repeat("y", 100<<10)})
	})
	o.want(t, 0, "102400\n") // the sandbox is of use after a refusal
}

func (s suite) descriptors(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(canary), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Open(secret, syscall.O_RDONLY, 0) // not close-on-exec: a careless parent's
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	high, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD, 200)
	if errno != 0 {
		t.Fatal(errno)
	}
	defer syscall.Close(int(high))
	b := s.open(t)
	for _, shell := range []string{"sh", "bash"} {
		o := b.run("ls /proc/self/fd", func(st *executor.Step) { st.Shell = shell })
		o.want(t, 0, "0\n1\n2\n3\n") // 3 is the directory that ls reads
	}
	b.run("wc -c; readlink /proc/self/fd/0; { read -r x && echo read; } || echo end").want(t, 0, "0\n/dev/null\nend\n")
}

func (s suite) signals(t *testing.T) {
	signal.Ignore(syscall.SIGUSR1, syscall.SIGHUP, syscall.SIGTTOU, syscall.SIGTSTP)
	defer signal.Reset(syscall.SIGUSR1, syscall.SIGHUP, syscall.SIGTTOU, syscall.SIGTSTP)
	b := s.open(t)
	o := b.run("exec grep -E '^Sig(Blk|Ign)' /proc/self/status")
	o.want(t, 0, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n")
	b.run("set +e\nyes | head -n 1\necho ${PIPESTATUS[0]}").want(t, 0, "y\n141\n")
}

func (s suite) workingDirectory(t *testing.T) {
	b := s.open(t)
	sub := filepath.Join(b.job.Workspace, "a", "b c")
	if err := os.MkdirAll(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	links := map[string]string{"out": "/tmp", "up": "..", "in": "a/b c", "root": "/"}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(b.job.Workspace, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(b.job.Workspace, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	in := func(dir string) func(*executor.Step) { return func(st *executor.Step) { st.Dir = dir } }
	b.run("pwd -P").want(t, 0, b.job.Workspace+"\n")
	b.run("pwd -P", in(sub)).want(t, 0, sub+"\n")
	b.run("pwd -P", in(filepath.Join(b.job.Workspace, "in"))).want(t, 0, sub+"\n")
	for dir, kind := range map[string]ci.Kind{
		"/": ci.ErrUnsafe, "/bin": ci.ErrUnsafe, "/usr/local/bin": ci.ErrUnsafe, filepath.Dir(b.job.Workspace): ci.ErrUnsafe,
		b.job.Workspace + "/..":   ci.ErrUnsafe,
		b.job.Workspace + "/out":  ci.ErrUnsafe,
		b.job.Workspace + "/up":   ci.ErrUnsafe,
		b.job.Workspace + "/root": ci.ErrUnsafe,
		b.job.Workspace + "/none": ci.ErrInvalid,
		b.job.Workspace + "/file": ci.ErrInvalid,
		"a":                       ci.ErrInvalid,
		"":                        ci.ErrInvalid,
		b.job.Workspace + "/\x00": ci.ErrInvalid,
	} {
		_, err := b.try(t.Context(), "echo no", in(dir))
		if !errorIs(err, kind) {
			t.Errorf("directory %q: %v, want %s", dir, err, kind)
		}
	}
}

func errorIs(err error, kind ci.Kind) bool { return err != nil && ci.KindOf(err) == kind }

func (s suite) directories(t *testing.T) {
	b := s.open(t)
	b.run(`echo a >"$HOME/f"; echo b >"$TMPDIR/f"; echo c >f; t=$(mktemp); case $t in "$TMPDIR"/*) echo ok;; *) echo "$t";; esac`).want(t, 0, "ok\n")
	for _, p := range []string{b.job.Home, b.job.Tmp, b.job.Workspace} {
		if _, err := os.Stat(filepath.Join(p, "f")); err != nil {
			t.Error(err)
		}
	}
	b.run("umask; touch new; mkdir newdir; stat -c %a new newdir").want(t, 0, "0022\n644\n755\n")
}

func (s suite) userAndGroups(t *testing.T) {
	b := s.open(t)
	uid, gid := os.Geteuid(), os.Getegid()
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	if s.user != nil {
		uid, gid, groups = int(s.user.UID), int(s.user.GID), nil
		for _, g := range s.user.Groups {
			groups = append(groups, int(g))
		}
	}
	all := append([]int{gid}, groups...)
	slices.Sort(all)
	all = slices.Compact(all)
	o := b.run("id -u; id -g; id -G; grep -E '^(Uid|Gid)' /proc/self/status; whoami >&2 || true")
	f := strings.SplitN(o.out, "\n", 4)
	var got []int
	for g := range strings.FieldsSeq(f[2]) {
		n, _ := strconv.Atoi(g)
		got = append(got, n)
	}
	slices.Sort(got)
	if f[0] != strconv.Itoa(uid) || f[1] != strconv.Itoa(gid) || !slices.Equal(got, all) {
		t.Errorf("user %s, group %s, groups %v, want %d, %d, %v", f[0], f[1], got, uid, gid, all)
	}
	if want := fmt.Sprintf("Uid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d\nGid:\t%[2]d\t%[2]d\t%[2]d\t%[2]d\n", uid, gid); f[3] != want {
		t.Errorf("%q, want real, effective, saved and file system ID all %q", f[3], want)
	}
}

func (s suite) session(t *testing.T) {
	b := s.open(t)
	// Fields of stat: 1 pid, 5 group, 6 session, 7 terminal.
	o := b.run(`set -- $(cat /proc/$$/stat); echo "$1 $5 $6 $7"; test -t 0 || test -t 1 || test -t 2 || echo none; (: </dev/tty) 2>/dev/null || echo no tty`)
	f := strings.Fields(o.out)
	if len(f) != 7 || f[0] != f[1] || f[0] != f[2] || f[3] != "0" || strings.Join(f[4:], " ") != "none no tty" {
		t.Errorf("pid, group, session, terminal: %q", o.out)
	}
	if f[0] == strconv.Itoa(os.Getpid()) {
		t.Error("not a process of its own")
	}
}

func (s suite) limits(t *testing.T) {
	script := "ulimit -Sn; ulimit -Hn; ulimit -Su; ulimit -Ss; ulimit -Hv"
	plain := exec.CommandContext(t.Context(), "bash", "-c", script)
	want, err := plain.Output()
	if err != nil {
		t.Fatal(err)
	}
	b := s.open(t)
	b.run(script).want(t, 0, string(want))
	b.run("ulimit -Sc; ulimit -Hc").want(t, 0, "0\n0\n")
}

// Neither the script's text nor a variable is in any process's arguments, ours
// or the system's, while the step runs (ATTACKS S29).
func (s suite) arguments(t *testing.T) {
	b := s.open(t)
	secret := "s29-" + b.mark
	seen := filepath.Join(b.job.Workspace, "seen")
	done := make(chan outcome, 1)
	go func() {
		o, err := b.try(t.Context(), "touch up\nuntil test -e seen; do sleep 0.01; done # "+secret, func(st *executor.Step) {
			st.Env = []ci.KeyValue{{Key: "SECRET", Value: secret}}
		})
		if err != nil {
			t.Error(err)
		}
		done <- o
	}()
	for looks := 0; ; {
		for pid, args := range commandLines() {
			if strings.Contains(strings.Join(args, " "), secret) {
				t.Errorf("process %d has the secret in its arguments: %q", pid, args)
			}
		}
		if _, err := os.Stat(filepath.Join(b.job.Workspace, "up")); err == nil {
			looks++ // while the step runs
		}
		if looks == 5 {
			if err := os.WriteFile(seen, nil, 0o644); err != nil {
				t.Fatal(err)
			}
			(<-done).want(t, 0, "")
			return
		}
		pause(5 * time.Millisecond)
	}
}
