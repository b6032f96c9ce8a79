//go:build linux

package executortest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

func (s suite) exitCodes(t *testing.T) {
	b := s.open(t)
	for _, c := range []struct {
		script string
		code   int
		signal string
	}{
		{"exit 0", 0, ""},
		{"exit 1", 1, ""},
		{"exit 3", 3, ""},
		{"exit 77", 77, ""},
		{"exit 255", 255, ""},
		{"exit 137", 137, ""}, // said by the script itself: no signal
		{"no-such-command-here", 127, ""},
		{"/dev/null", 126, ""},
		{"sh -c 'kill -9 $$'", 137, ""}, // the shell lives and says so
		{"kill -KILL $$", 137, "SIGKILL"},
		{"kill -TERM $$", 143, "SIGTERM"},
		{"kill -SEGV $$", 139, "SIGSEGV"},
		{"kill -HUP $$", 129, "SIGHUP"},
		{"kill -USR1 $$", 138, "SIGUSR1"},
		{"kill -PIPE $$", 141, "SIGPIPE"},
		{"exec sh -c 'kill -ABRT $$'", 134, "SIGABRT"},
	} {
		o := b.run(c.script)
		if o.ExitCode != c.code || o.Signal != c.signal || o.Leaked || o.Duration <= 0 || o.Duration > o.took {
			t.Errorf("%s: %+v, want %d %q", c.script, o.Result, c.code, c.signal)
		}
	}
}

func (s suite) shells(t *testing.T) {
	b := s.open(t)
	for _, c := range []struct {
		shell, script string
		code          int
		out           string
	}{
		{"", "false\necho no", 1, ""},
		{"", "false | cat\necho no", 1, ""},
		{"bash", "false | cat\necho no", 1, ""},
		{"sh", "false\necho no", 1, ""},
		{"sh", "false | cat\necho yes", 0, "yes\n"}, // documented: sh has no pipefail
		{"", "exit 0\nfalse", 0, ""},
		{"", "set +e\nfalse\ntrue", 0, ""},
		{"", "mkdir sub; cd sub\nbasename \"$PWD\"", 0, "sub\n"},
		{"", "X=1\ncat <<END\n\t$X  \nEND\n", 0, "\t1  \n"},
		{"", "echo a#b # c", 0, "a#b\n"},
		{"", "echo a \\\n  b", 0, "a b\n"},
		{"", "", 0, ""},
		{"", "# nothing", 0, ""},
		{"", "echo no newline at the end", 0, "no newline at the end\n"},
		{"bash", "shopt -q login_shell || echo no login; [[ $- == *i* ]] || echo not interactive", 0, "no login\nnot interactive\n"},
		{"bash", "echo ${BASH_ENV-unset}", 0, "unset\n"},
		{"bash", "bash -c 'false; echo ${BASH_ENV-unset}'", 0, "unset\n"},
	} {
		o := b.run(c.script, func(st *executor.Step) { st.Shell = c.shell })
		if o.ExitCode != c.code || o.out != c.out || o.err != "" {
			t.Errorf("%s %q: %d %q %q, want %d %q", c.shell, c.script, o.ExitCode, o.out, o.err, c.code, c.out)
		}
	}
	for _, shell := range []string{"zsh", "/bin/sh", "python", "bash -x", "../sh"} {
		_, err := b.try(t.Context(), "echo no", func(st *executor.Step) { st.Shell = shell })
		wantKind(t, err, ci.ErrInvalid)
	}
	// BASH_ENV and a PATH of the step's own do not choose another shell (ATTACKS S33).
	evil := filepath.Join(b.job.Workspace, "evil")
	if err := os.WriteFile(evil, []byte("echo sourced\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.job.Workspace, "bash"), []byte("#!/bin/sh\necho evil\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := b.run("echo ok", func(st *executor.Step) {
		st.Env = []ci.KeyValue{{Key: "PATH", Value: b.job.Workspace}, {Key: "BASH_ENV", Value: evil}}
	})
	o.want(t, 0, "sourced\nok\n") // the step's own choice, in the step alone
}

func (s suite) failingLine(t *testing.T) {
	b := s.open(t)
	for _, c := range []struct {
		script string
		line   int
	}{
		{"false\necho no", 1},
		{"echo a\n\n# comment\nfalse\necho no", 4},
		{"echo a\nfalse | cat\necho no", 2},
		{"echo a\ncat <<END\nx\nEND\nls /no/such/file\n", 5},
		{"echo a\nx=$(false)\n", 2},
		{"echo a\nno-such-command\n", 2},
		{"if true; then\n  sh -c 'exit 5'\nfi", 2},
		{"for i in 1 2; do\n  test $i = 1\ndone", 2},
		{"set +e\nfalse\nfalse\nexit 3", 0}, // nothing failed: the script chose to end
		{"exit 3", 0},
		{"true", 0},
		{"false || true\n! true\nif false; then :; fi\nfalse && true\necho done", 0},
		{"trap 'echo mine' ERR\nfalse", 0}, // its own trap replaces ours
	} {
		o := b.run(c.script, func(st *executor.Step) { st.Shell = "bash" })
		if o.Line != c.line {
			t.Errorf("%q: line %d, want %d (exit code %d, stderr %q)", c.script, o.Line, c.line, o.ExitCode, o.err)
		}
	}
	if o := b.run("trap 'echo mine' ERR\nfalse"); o.out != "mine\n" {
		t.Errorf("the script's own trap printed %q", o.out)
	}
	if o := b.run("set +e\nfalse | true | sh -c 'exit 3'\necho $? ${PIPESTATUS[@]}"); o.out != "3 3\n" && o.out != "3 1 0 3\n" {
		t.Errorf("PIPESTATUS %q", o.out)
	}
}

func (s suite) script(t *testing.T) {
	b := s.open(t)
	_, err := b.try(t.Context(), "echo a\necho \x00b")
	wantKind(t, err, ci.ErrInvalid)
	if err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("%v does not say where", err)
	}
	var big strings.Builder
	for i := 0; big.Len() < 1<<20; i++ {
		fmt.Fprintf(&big, ": %d %s\n", i, strings.Repeat("x", 100))
	}
	big.WriteString("echo end\n")
	b.run(big.String()).want(t, 0, "end\n")
	long := "echo " + strings.Repeat("x", 1<<20)
	if o := b.run(long); len(o.out) != 1<<20+1 {
		t.Errorf("%d bytes of a 1 MiB line", len(o.out))
	}
}

func (s suite) outputExact(t *testing.T) {
	b := s.open(t)
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) []byte {
		p := make([]byte, n)
		for i := range p {
			p[i] = byte(random.Uint32())
		}
		return p
	}
	out, errs := noise(300_001), noise(70_003)
	for name, p := range map[string][]byte{"out": out, "err": errs} {
		if err := os.WriteFile(filepath.Join(b.job.Workspace, name), p, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	o := b.run("cat out & cat err >&2; wait")
	if o.out != string(out) || o.err != string(errs) {
		t.Errorf("%d and %d bytes, want %d and %d the same", len(o.out), len(o.err), len(out), len(errs))
	}
	o = b.run(`printf 'a\0b\r\n\377\033[31m'; printf x >&2`)
	if o.out != "a\x00b\r\n\xff\x1b[31m" || o.err != "x" {
		t.Errorf("%q %q", o.out, o.err)
	}
}

func (s suite) outputLongLine(t *testing.T) {
	b := s.open(t)
	o := b.run("head -c 10485760 /dev/zero | tr '\\0' x")
	if len(o.out) != 10<<20 || strings.Trim(o.out, "x") != "" {
		t.Errorf("%d bytes of a line of 10 MiB", len(o.out))
	}
}

// writerFunc is a writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// All that was written before the exit arrives, although the writer is slower
// than the drain grace and a background process keeps the pipe.
func (s suite) outputBeforeExit(t *testing.T) {
	b := s.open(t)
	var got bytes.Buffer
	first := true
	slow := writerFunc(func(p []byte) (int, error) {
		if first {
			first = false
			pause(s.drain + 500*time.Millisecond)
		}
		return got.Write(p)
	})
	o := b.run("{} &\nhead -c 60000 /dev/zero; echo end", func(st *executor.Step) { st.Stdout = slow })
	if got.Len() != 60004 || !strings.HasSuffix(got.String(), "end\n") || !o.Leaked {
		t.Errorf("%d bytes of 60004, %+v", got.Len(), o.Result)
	}
}

func (s suite) outputWriterFails(t *testing.T) {
	b := s.open(t)
	calls := 0
	o := b.run("head -c 1000000 /dev/zero; echo err >&2; exit 3", func(st *executor.Step) {
		st.Stdout = writerFunc(func([]byte) (int, error) { calls++; return 0, errors.New("full") })
	})
	if o.ExitCode != 3 || calls != 1 || o.err != "err\n" {
		t.Errorf("%+v after %d writes, stderr %q", o.Result, calls, o.err)
	}
}

func (s suite) backPressure(t *testing.T) {
	b := s.open(t)
	gate := make(chan struct{})
	var total int
	o := make(chan outcome, 1)
	go func() {
		res, err := b.try(t.Context(), "for i in $(seq 100); do head -c 65536 /dev/zero; echo $i >progress; done", func(st *executor.Step) {
			st.Stdout = writerFunc(func(p []byte) (int, error) { <-gate; total += len(p); return len(p), nil })
		})
		if err != nil {
			t.Error(err)
		}
		o <- res
	}()
	pause(500 * time.Millisecond)
	progress, _ := os.ReadFile(filepath.Join(b.job.Workspace, "progress"))
	if n := strings.TrimSpace(string(progress)); len(n) > 1 {
		t.Errorf("the step wrote %s times 64 KiB that nobody took", n)
	}
	close(gate)
	if res := <-o; res.ExitCode != 0 || total != 100*65536 {
		t.Errorf("%+v, %d bytes", res.Result, total)
	}
}

func (s suite) cancelWhileBlocked(t *testing.T) {
	b := s.open(t)
	gate := make(chan struct{})
	var mu sync.Mutex
	writes := 0
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel)
	o, err := b.try(ctx, "trap '' TERM; while :; do head -c 65536 /dev/zero; done", func(st *executor.Step) {
		st.Stdout = writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			writes++
			mu.Unlock()
			<-gate
			return len(p), nil
		})
	})
	if err != nil || o.Signal != "SIGKILL" || o.took > 300*time.Millisecond+Grace+2*s.drain+3*time.Second {
		t.Errorf("%+v, %v after %v", o.Result, err, o.took)
	}
	mu.Lock()
	before := writes
	mu.Unlock()
	close(gate)
	pause(100 * time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	if writes != before {
		t.Errorf("%d writes began after Run had returned", writes-before)
	}
}

func (s suite) backgroundHoldsOutput(t *testing.T) {
	b := s.open(t)
	o := b.run("{} & echo started")
	o.want(t, 0, "started\n")
	if !o.Leaked || o.took > 5*time.Second {
		t.Errorf("%+v after %v", o.Result, o.took)
	}
	o = b.run(fmt.Sprintf("nohup sh -c 'sleep %.2f; echo late; {}' & exit 3", s.drain.Seconds()+1))
	o.want(t, 3, "")
	if !o.Leaked || o.took > 5*time.Second {
		t.Errorf("%+v after %v", o.Result, o.took)
	}
	o = b.run("(sleep 0.2; echo soon) & echo now") // ends within the drain grace: nothing is missing
	o.want(t, 0, "now\nsoon\n")
	if o.Leaked {
		t.Error("leaked although the background process ended")
	}
	if n := len(Marked(b.mark)); n == 0 {
		t.Error("the background process is gone before the job's end")
	}
	ev := evidence(t, b, t.Context())
	if ev.Killed < 2 {
		t.Errorf("evidence %+v, want at least the two sleeps", ev)
	}
	if left := Marked(b.mark); len(left) > 0 {
		t.Errorf("left after Close: %v", left)
	}
}

func (s suite) leaksNothing(t *testing.T) {
	e := s.new(t)
	fds := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	job := func(steps int) {
		b := s.openIn(t, e, Grace)
		for range steps {
			if o := b.run("{} >/dev/null 2>&1 &"); o.ExitCode != 0 || o.Leaked {
				t.Fatalf("%+v", o.Result)
			}
		}
		evidence(t, b, t.Context())
	}
	leaky := func() {
		b := s.openIn(t, e, Grace)
		for range 4 {
			b.run("{} & echo started").want(t, 0, "started\n")
		}
		evidence(t, b, t.Context())
	}
	job(1) // what the first use makes and keeps
	beforeFDs, beforeRoutines := fds(), runtime.NumGoroutine()
	job(40)
	var group sync.WaitGroup
	for range 25 { // at a time, since each of the hundred steps waits for the drain grace
		group.Go(leaky)
	}
	group.Wait()
	eventually(t, 2*time.Second, fmt.Sprintf("%d descriptors and %d goroutines as before", beforeFDs, beforeRoutines), func() bool {
		return fds() <= beforeFDs && runtime.NumGoroutine() <= beforeRoutines
	})
}
