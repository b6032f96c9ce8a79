//go:build linux

package executortest

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

// after cancels the step's context when its script has written the file "go".
func (b *box) after() (context.Context, func() time.Time) {
	ctx, cancel := context.WithCancel(b.t.Context())
	at := make(chan time.Time, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(filepath.Join(b.job.Workspace, "go")); err == nil {
				at <- time.Now()
				cancel()
			}
			pause(5 * time.Millisecond)
		}
	}()
	b.t.Cleanup(cancel)
	return ctx, func() time.Time { return <-at }
}

func (s suite) cancelGrandchildren(t *testing.T) {
	b := s.open(t)
	ctx, cancelled := b.after()
	o, err := b.try(ctx, `bash -c '{} & bash -c "{} & wait" & sleep 0.1; touch go; wait'`)
	if err != nil || o.ExitCode != 143 {
		t.Errorf("%+v, %v", o.Result, err)
	}
	if took := time.Since(cancelled()); took > Grace+time.Second {
		t.Errorf("ended %v after the cancel", took)
	}
	if left := Marked(b.mark); len(left) > 0 {
		t.Errorf("left when Run returns: %v", left)
	}
	b.run("echo free").want(t, 0, "free\n")
}

func (s suite) timeoutIgnored(t *testing.T) {
	b := s.open(t)
	ctx, cancelled := b.after()
	o, err := b.try(ctx, `trap '' TERM
setsid sh -c "trap '' TERM; {}; {}" &
(setsid nohup sh -c 'trap "" TERM; {}' >/dev/null 2>&1 &)
sleep 0.1; touch go
while :; do {}; done`)
	if err != nil || o.ExitCode != 137 || o.Signal != "SIGKILL" {
		t.Errorf("%+v, %v", o.Result, err)
	}
	took := time.Since(cancelled())
	if took < Grace || took > Grace+time.Second {
		t.Errorf("ended %v after the time limit, want the grace %v and little more", took, Grace)
	}
	if left := Marked(b.mark); len(left) > 0 {
		t.Errorf("left when Run returns: %v", left)
	}
	b.run("echo always").want(t, 0, "always\n")
}

func (s suite) cancelIsGraceful(t *testing.T) {
	b := s.openIn(t, s.new(t), 20*time.Second)
	ctx, cancelled := b.after()
	o, err := b.try(ctx, "trap 'echo cleaned; exit 9' TERM; touch go; {} & wait")
	o.want(t, 9, "cleaned\n")
	if took := time.Since(cancelled()); err != nil || took > 5*time.Second {
		t.Errorf("ended after %v, %v", took, err)
	}
	// A stopped process is woken to end.
	_ = os.Remove(filepath.Join(b.job.Workspace, "go"))
	ctx, cancelled = b.after()
	o, err = b.try(ctx, "touch go; kill -STOP $$; echo no")
	if took := time.Since(cancelled()); err != nil || o.Signal != "SIGTERM" || took > 5*time.Second {
		t.Errorf("a stopped step: %+v, %v after %v", o.Result, err, took)
	}
}

func (s suite) cancelBeforeStart(t *testing.T) {
	b := s.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o, err := b.try(ctx, "echo no; touch started")
	if err != nil || o.ExitCode != 143 || o.Signal != "SIGTERM" || o.out != "" {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err := os.Stat(filepath.Join(b.job.Workspace, "started")); err == nil {
		t.Error("the step was started")
	}
}

func (s suite) cancelSpares(t *testing.T) {
	b := s.open(t)
	other := Mark()
	b.run("setsid sleep " + other + " >/dev/null 2>&1 & sleep " + other + " >/dev/null 2>&1 &")
	eventually(t, time.Second, "two background processes", func() bool { return len(Marked(other)) == 2 })
	ctx, _ := b.after()
	_, err := b.try(ctx, "(setsid {} &); touch go; {}")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(Marked(b.mark)); n != 0 {
		t.Errorf("%d processes of the cancelled step", n)
	}
	if n := len(Marked(other)); n != 2 {
		t.Errorf("%d of 2 processes of the earlier step live", n)
	}
	ev := evidence(t, b, t.Context())
	if n := len(Marked(other)); n != 0 || ev.Killed != 2 {
		t.Errorf("%d left, %+v", n, ev)
	}
}

// hurry is a cause that leaves little time.
type hurry struct{ error }

func (hurry) Grace() time.Duration { return 100 * time.Millisecond }

func (s suite) graceOfTheCause(t *testing.T) {
	b := s.openIn(t, s.new(t), time.Minute)
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(300*time.Millisecond, func() { cancel(hurry{ci.ErrLeaseLost}) })
	o, err := b.try(ctx, "trap '' TERM; while :; do {}; done")
	if err != nil || o.Signal != "SIGKILL" || o.took > 3*time.Second {
		t.Errorf("%+v, %v after %v", o.Result, err, o.took)
	}
	b.run("(trap '' TERM; while :; do {}; done) >/dev/null 2>&1 &")
	begun := time.Now()
	evidence(t, b, ctx)
	if took := time.Since(begun); took > 3*time.Second {
		t.Errorf("closed after %v", took)
	}
}

// A lease that is lost while the job has its whole grace to end leaves it no more
// than one that is lost at first.
func (s suite) lostInTheGrace(t *testing.T) {
	owned, lose := context.WithCancelCause(t.Context())
	b := s.openJob(t, s.new(t), func(job *executor.Job) { job.Grace, job.Owned = time.Minute, owned })
	ctx, cancel := context.WithCancel(owned)
	time.AfterFunc(300*time.Millisecond, cancel)
	time.AfterFunc(600*time.Millisecond, func() { lose(hurry{ci.ErrLeaseLost}) })
	b.run("(trap '' TERM; while :; do {}; done) >/dev/null 2>&1 &")
	o, err := b.try(ctx, "trap '' TERM; while :; do {}; done")
	if err != nil || o.Signal != "SIGKILL" || o.took < 600*time.Millisecond || o.took > 20*time.Second {
		t.Errorf("%+v, %v after %v", o.Result, err, o.took)
	}
	begun := time.Now()
	evidence(t, b, ctx) // its cause is the first, which leaves a minute
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("closed after %v", took)
	}
}

// One that is lost while the sandbox is being closed, likewise.
func (s suite) lostInClose(t *testing.T) {
	owned, lose := context.WithCancelCause(t.Context())
	b := s.openJob(t, s.new(t), func(job *executor.Job) { job.Grace, job.Owned = time.Minute, owned })
	b.run("(trap '' TERM; while :; do {}; done) >/dev/null 2>&1 &")
	time.AfterFunc(300*time.Millisecond, func() { lose(hurry{ci.ErrLeaseLost}) })
	begun := time.Now()
	evidence(t, b, t.Context())
	if took := time.Since(begun); took < 300*time.Millisecond || took > 20*time.Second {
		t.Errorf("closed after %v", took)
	}
}

func (s suite) backgroundLives(t *testing.T) {
	b := s.open(t)
	o := b.run("while :; do echo tick; date +%N >beat; sleep 0.05; done & echo started")
	if !o.Leaked || !strings.HasPrefix(o.out, "started\n") && !strings.Contains(o.out, "tick\nstarted\n") {
		t.Errorf("%+v %q", o.Result, o.out)
	}
	// It still writes to the first step's output, and is not hurt by it.
	b.run("a=$(cat beat); sleep 0.3; b=$(cat beat); test \"$a\" != \"$b\" && echo beats").want(t, 0, "beats\n")
	evidence(t, b, t.Context())
	a, _ := os.ReadFile(filepath.Join(b.job.Workspace, "beat"))
	pause(200 * time.Millisecond)
	if c, _ := os.ReadFile(filepath.Join(b.job.Workspace, "beat")); string(a) != string(c) {
		t.Error("it beats after Close")
	}
}

func (s suite) zombies(t *testing.T) {
	b := s.open(t)
	// Orphans that end: whoever takes them in must reap them. Fields of stat after
	// the name: state, parent.
	b.run("for i in 1 2 3 4 5 6 7 8 9 10; do (sh -c 'sleep 0.05' & ) ; (setsid sh -c 'exit 3' &); done; sleep 0.4")
	o := b.run(`for f in /proc/[0-9]*/stat; do s=$(cat $f 2>/dev/null) || continue; set -- ${s##*) }; if [ "$1" = Z ] && [ "$2" = $PPID ]; then echo "$s"; fi; done`,
		func(st *executor.Step) { st.Shell = "sh" })
	for line := range strings.Lines(o.out) {
		if strings.Contains(line, "(sh)") || strings.Contains(line, "(sleep)") {
			t.Errorf("zombie: %s", line)
		}
	}
}

func (s suite) closeProves(t *testing.T) {
	b := s.open(t)
	b.run(`(setsid sh -c 'trap "" TERM HUP; {}; {}' >/dev/null 2>&1 &)
(setsid sh -c '(setsid {} &) ; exit' >/dev/null 2>&1 &)
{} >/dev/null 2>&1 &
env -i setsid sleep ` + b.mark + ` >/dev/null 2>&1 &
sleep 0.2`)
	if n := len(Marked(b.mark)); n < 3 {
		t.Errorf("only %d processes to kill", n)
	}
	ev := evidence(t, b, t.Context())
	if left := Marked(b.mark); len(left) > 0 {
		t.Errorf("left after Close: %v", left)
	}
	if ev.How == "" || ev.Killed < 4 {
		t.Errorf("evidence %+v", ev)
	}
}

func (s suite) closeTwice(t *testing.T) {
	b := s.open(t)
	b.run("{} >/dev/null 2>&1 &")
	first := evidence(t, b, t.Context())
	if second := evidence(t, b, t.Context()); second != first {
		t.Errorf("%+v, then %+v", first, second)
	}
	_, err := b.try(t.Context(), "echo no")
	wantKind(t, err, ci.ErrConflict)
}

func (s suite) closeIsGraceful(t *testing.T) {
	b := s.openIn(t, s.new(t), 20*time.Second)
	b.run("(trap 'echo bye >bye; exit' TERM; touch up; while :; do sleep 0.02; done) >/dev/null 2>&1 &\nuntil test -e up; do sleep 0.01; done")
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // does not stop Close, nor shorten the grace without a cause that says so
	evidence(t, b, ctx)
	if _, err := os.Stat(filepath.Join(b.job.Workspace, "bye")); err != nil {
		t.Error("the background process could not clean up")
	}
}

func (s suite) closeHurried(t *testing.T) {
	b := s.openIn(t, s.new(t), time.Minute)
	b.run("(trap '' TERM; while :; do {}; done) >/dev/null 2>&1 &")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(200*time.Millisecond, func() { cancel(hurry{ci.ErrLeaseLost}) })
	begun := time.Now()
	evidence(t, b, ctx)
	if took := time.Since(begun); took > 3*time.Second {
		t.Errorf("closed after %v", took)
	}
}

func (s suite) nothingStarted(t *testing.T) {
	b := s.open(t)
	if _, err := b.try(t.Context(), "\x00"); err == nil {
		t.Error("no error")
	}
	ev := evidence(t, b, t.Context())
	if ev.How != "nothing started" || ev.Killed != 0 {
		t.Errorf("evidence %+v", ev)
	}
}

func (s suite) jobsApart(t *testing.T) {
	e := s.new(t)
	one, two := s.openIn(t, e, Grace), s.openIn(t, e, Grace)
	one.run("{} >/dev/null 2>&1 & echo 1 >f")
	two.run("{} >/dev/null 2>&1 & echo 2 >f")
	o := make(chan outcome, 1)
	go func() {
		res, err := two.try(t.Context(), "sleep 0.5; echo done; cat f")
		if err != nil {
			t.Error(err)
		}
		o <- res
	}()
	pause(100 * time.Millisecond)
	evidence(t, one, t.Context())
	if n := len(Marked(two.mark)); n != 1 {
		t.Errorf("%d background processes of the other job, want 1", n)
	}
	(<-o).want(t, 0, "done\n2\n")
	if ended, err := e.Sweep(t.Context()); err != nil || len(ended) != 0 {
		t.Errorf("Sweep ended %v, %v", ended, err)
	}
	if n := len(Marked(two.mark)); n != 1 {
		t.Errorf("%d background processes after Sweep, want 1", n)
	}
}

// nothingForTheNextJob looks at what is promised in every class: processes. What
// a step of class process writes outside of its directories as the same user
// stays; that is for stronger classes.
func (s suite) nothingForTheNextJob(t *testing.T) {
	e := s.new(t)
	one := s.openIn(t, e, Grace)
	one.run(`(setsid sh -c '{} ; touch "$HOME/late"' >/dev/null 2>&1 &); (nohup {} >/dev/null 2>&1 &); (exec -a '[kworker/0:0]' {} >/dev/null 2>&1 &); sleep 0.1`)
	evidence(t, one, t.Context())
	two := s.openIn(t, e, Grace)
	o := two.run(`set +e
grep -lz -x ` + "'" + one.mark + "'" + ` /proc/[0-9]*/cmdline 2>/dev/null | wc -l; ls -A "$HOME" "$TMPDIR" | grep -v '^/' | wc -w; ls -A | wc -l`)
	lines := strings.Fields(o.out)
	if len(lines) != 3 || lines[0] > "1" || lines[1] != "0" || lines[2] != "0" { // grep finds itself
		t.Errorf("processes, files in HOME and TMPDIR, files in the workspace: %v", lines)
	}
}

// A tree that forks all the time does not outrun the kill.
func (s suite) forkingTree(t *testing.T) {
	b := s.open(t)
	ctx, _ := b.after()
	o, err := b.try(ctx, `trap '' TERM
f() { trap '' TERM; for i in $(seq 2000); do (setsid sh -c "trap '' TERM; sleep 0.02; exec {}" &); sleep 0.01; done; }
f & f & f & sleep 0.3; touch go; f`)
	if err != nil || o.ExitCode != 137 {
		t.Errorf("%+v, %v", o.Result, err)
	}
	if left := Marked(b.mark); len(left) > 0 {
		t.Errorf("%d left when Run returns", len(left))
	}
}

func (s suite) nothingOnDisk(t *testing.T) {
	b := s.open(t)
	b.run("false")
	b.run("echo a")
	evidence(t, b, t.Context())
	err := filepath.WalkDir(filepath.Dir(b.job.Workspace), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			err = fmt.Errorf("left on disk: %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
