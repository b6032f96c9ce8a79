//go:build linux

package workspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

const (
	lockVariable = "FORGECI_TEST_LOCK"
	nobody       = 65534
)

// TestMain is also the second runner of the lock's test.
func TestMain(m *testing.M) {
	root := os.Getenv(lockVariable)
	if root == "" {
		os.Exit(m.Run())
	}
	r, err := Open(root, slog.New(slog.DiscardHandler))
	if err != nil {
		fmt.Println(ci.KindOf(err), err)
		os.Exit(1)
	}
	fmt.Println("open", os.Getpid())
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test ends it
	_ = r.Close()
}

func logger(t *testing.T) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

func lease(n int) ci.LeaseRef {
	return ci.LeaseRef{
		Run: "run_1", Job: ci.JobID(fmt.Sprint("job_", n)), Runner: "rnr_1", Session: "ses_1",
		Lease: ci.LeaseID(fmt.Sprint("lse_", n)), Epoch: 1,
	}
}

func newRoot(t *testing.T) *Root {
	t.Helper()
	r, err := Open(filepath.Join(t.TempDir(), "work"), logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func newDir(t *testing.T, r *Root, n int) *Dir {
	t.Helper()
	d, err := r.New(lease(n), nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func wantKind(t *testing.T, err error, kind ci.Kind) {
	t.Helper()
	if err == nil || ci.KindOf(err) != kind {
		t.Errorf("error %v, want kind %s", err, kind)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is left (%v)", path, err)
	}
}

// tree is every path below dir with its type, mode and content.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		content := ""
		if fi.Mode().IsRegular() {
			c, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = string(c)
		}
		fmt.Fprintf(&b, "%s %v %q\n", path, fi.Mode(), content)
		return nil
	}))
	return b.String()
}

func TestOpenRefusesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	full := filepath.Join(base, "full")
	must(t, os.Mkdir(full, 0o755))
	must(t, os.WriteFile(filepath.Join(full, "thesis.txt"), []byte("years of work"), 0o600))
	file := filepath.Join(base, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	empty := filepath.Join(base, "empty")
	must(t, os.Mkdir(empty, 0o755))
	link := filepath.Join(base, "link")
	must(t, os.Symlink(empty, link))
	dangling := filepath.Join(base, "dangling")
	must(t, os.Symlink(filepath.Join(base, "nowhere"), dangling))
	open := filepath.Join(base, "open")
	must(t, os.Mkdir(open, 0o777))
	must(t, os.Chmod(open, 0o777))
	forged := filepath.Join(base, "forged")
	must(t, os.Mkdir(forged, 0o755))
	must(t, os.WriteFile(filepath.Join(forged, markFile), []byte("mine\n"), 0o600))
	marked := filepath.Join(base, "marked")
	must(t, os.Mkdir(marked, 0o755))
	must(t, os.Symlink(file, filepath.Join(marked, markFile)))
	must(t, os.WriteFile(filepath.Join(marked, "x"), nil, 0o600))

	before := tree(t, base)
	for root, kind := range map[string]ci.Kind{
		full: ci.ErrUnsafe, file: ci.ErrUnsafe, link: ci.ErrUnsafe, dangling: ci.ErrUnsafe, forged: ci.ErrUnsafe, marked: ci.ErrUnsafe,
		filepath.Join(open, "work"): ci.ErrUnsafe,
		"relative":                  ci.ErrInvalid, "": ci.ErrInvalid, base + "/\x00": ci.ErrInvalid,
		// ATTACKS S34: places that must not become a workspace.
		"/": ci.ErrUnsafe, "/bin": ci.ErrUnsafe, "/usr/local/bin": ci.ErrUnsafe, "/etc": ci.ErrUnsafe, base + "/full/../full": ci.ErrUnsafe,
	} {
		r, err := Open(root, logger(t))
		if err == nil {
			_ = r.Close()
		}
		if err == nil || ci.KindOf(err) != kind {
			t.Errorf("Open(%q): %v, want %s", root, err, kind)
		}
	}
	if after := tree(t, base); after != before {
		t.Errorf("changed by the refusals:\n%s\nwas\n%s", after, before)
	}
}

func TestOpenRefusesAnotherUsersRoot(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // only root can make one
	}
	root := filepath.Join(t.TempDir(), "work")
	must(t, os.Mkdir(root, 0o755))
	must(t, os.Chown(root, nobody, nobody))
	_, err := Open(root, logger(t))
	wantKind(t, err, ci.ErrUnsafe)
}

func TestOpenAgainAndAfterACrash(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "a", "b", "work")
	for range 3 {
		r, err := Open(root, logger(t))
		must(t, err)
		must(t, r.Close())
	}
	// A crash between the making of the mark and its first byte.
	must(t, os.Truncate(filepath.Join(root, markFile), 0))
	r, err := Open(root, logger(t))
	must(t, err)
	must(t, r.Close())
}

func TestOneRunnerPerRoot(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "work")
	start := func() (*exec.Cmd, string) {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), lockVariable+"="+root)
		stdin, err := cmd.StdinPipe()
		must(t, err)
		t.Cleanup(func() { _ = stdin.Close() })
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line := make([]byte, 500)
		n, _ := out.Read(line)
		return cmd, string(line[:n])
	}
	first, line := start()
	if want := fmt.Sprintf("open %d\n", first.Process.Pid); line != want {
		t.Fatalf("%q, want %q", line, want)
	}
	for range 2 { // a refusal changes nothing
		second, line := start()
		_ = second.Wait()
		if !strings.HasPrefix(line, string(ci.ErrConflict)) || !strings.Contains(line, fmt.Sprintf("process %d)", first.Process.Pid)) {
			t.Errorf("%q does not name process %d", line, first.Process.Pid)
		}
	}
	must(t, first.Process.Kill())
	_ = first.Wait()
	r, err := Open(root, logger(t)) // the lock dies with its holder
	must(t, err)
	must(t, r.Close())
}

func TestNewIsPrivateAndApart(t *testing.T) {
	t.Parallel()
	r := newRoot(t)
	var group sync.WaitGroup
	dirs := make([]*Dir, 20)
	for i := range dirs {
		group.Go(func() { dirs[i] = newDir(t, r, i) })
	}
	group.Wait()
	seen := map[string]bool{}
	for _, d := range dirs {
		if seen[d.Path()] {
			t.Errorf("%s twice", d.Path())
		}
		seen[d.Path()] = true
		for _, path := range []string{d.Path(), d.Work(), d.Home(), d.Tmp(), d.Steps()} {
			fi, err := os.Lstat(path)
			if err != nil || fi.Mode() != fs.ModeDir|0o700 {
				t.Errorf("%s: %v %v", path, fi.Mode(), err)
			}
		}
		if len(d.Tmp()) > len(r.Path())+30 {
			t.Errorf("%s leaves no room for the address of a socket", d.Tmp())
		}
	}
	_, err := r.New(lease(3), nil)
	wantKind(t, err, ci.ErrConflict)
	if _, err := os.Stat(dirs[3].Work()); err != nil {
		t.Error("the refusal removed the first one's directory")
	}
	must(t, dirs[3].Remove(t.Context()))
	newDir(t, r, 3)
	// Every part of the tuple makes another directory.
	base := lease(1)
	for _, change := range []func(*ci.LeaseRef){
		func(l *ci.LeaseRef) { l.Run = "run_2" }, func(l *ci.LeaseRef) { l.Lease = "lse_x" }, func(l *ci.LeaseRef) { l.Epoch = 2 },
	} {
		l := base
		change(&l)
		d, err := r.New(l, nil)
		must(t, err)
		if seen[d.Path()] {
			t.Errorf("%+v shares a directory", l)
		}
	}
	for _, bad := range []ci.LeaseRef{{}, {Run: "../x", Job: "job_1", Runner: "rnr_1", Session: "ses_1", Lease: "lse_1", Epoch: 1}} {
		_, err := r.New(bad, nil)
		wantKind(t, err, ci.ErrInvalid)
	}
}

func TestNewForAJobUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // only root can give files away
	}
	user := &executor.User{Name: "job", UID: 64321, GID: 64322}
	closed := newRoot(t) // below a directory of the test that is closed to others
	_, err := closed.New(lease(1), user)
	wantKind(t, err, ci.ErrInvalid)
	if err == nil || !strings.Contains(err.Error(), "chmod a+x") {
		t.Errorf("%v does not say what to do", err)
	}

	base, err := os.MkdirTemp("", "forgeci-workspace-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	must(t, os.Chmod(base, 0o755))
	old := syscall.Umask(0o077) // whatever the umask of the runner is
	r, err := Open(filepath.Join(base, "work"), logger(t))
	syscall.Umask(old)
	must(t, err)
	defer r.Close()
	d, err := r.New(lease(1), user)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(d.Work(), "source"), []byte("x"), 0o644))
	must(t, os.Mkdir(filepath.Join(d.Work(), "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(d.Work(), "sub", "deep"), []byte("x"), 0o644))
	outside := filepath.Join(base, "outside")
	must(t, os.WriteFile(outside, nil, 0o600))
	must(t, os.Symlink(outside, filepath.Join(d.Work(), "link")))
	must(t, os.WriteFile(filepath.Join(d.Steps(), "script"), []byte("echo"), 0o444))
	output, err := d.NewOutput(0)
	must(t, err)
	must(t, d.GiveToOwner())
	if fi, _ := os.Stat(outside); fi.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Error("a link out of the workspace was followed")
	}
	as := func(uid, gid uint32, script string) string {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", script)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid}}
		out, _ := cmd.CombinedOutput()
		return string(out)
	}
	script := fmt.Sprintf(`exec 2>/dev/null
cd %[1]s && echo in && cat source sub/deep && echo y >sub/deep && echo z >>source && echo wrote
cat %[2]s/script && echo . && echo o >%[3]s && echo output
echo x >%[2]s/new && echo made; rm %[2]s/script && echo removed; mv %[2]s %[2]s2 && echo moved; ls %[4]s && echo listed; rm -r %[4]s/attempts && echo attempts
touch %[5]s/t %[6]s/t && echo tmp home`, d.Work(), d.Steps(), output, filepath.Dir(d.Path()), d.Tmp(), d.Home())
	if got, want := as(user.UID, user.GID, script), "in\nxxwrote\necho.\noutput\ntmp home\n"; got != want {
		t.Errorf("the job's user: %q, want %q", got, want)
	}
	if got := as(64999, 64999, script); got != "" {
		t.Errorf("another user: %q", got)
	}
	b, err := d.ReadOutput(0, 100)
	if err != nil || string(b) != "o\n" {
		t.Errorf("output %q, %v", b, err)
	}
	must(t, d.Remove(t.Context()))
	wantGone(t, d.Path())
}

func TestOutputIsNotTrusted(t *testing.T) {
	t.Parallel()
	d := newDir(t, newRoot(t), 1)
	path, err := d.NewOutput(0)
	must(t, err)
	_, err = d.NewOutput(0)
	wantKind(t, err, ci.ErrUnavailable)
	b, err := d.ReadOutput(0, 10)
	if err != nil || len(b) != 0 {
		t.Errorf("%q, %v", b, err)
	}
	must(t, os.WriteFile(path, []byte("0123456789"), 0o600))
	if b, err := d.ReadOutput(0, 10); err != nil || string(b) != "0123456789" {
		t.Errorf("%q, %v", b, err)
	}
	_, err = d.ReadOutput(0, 9)
	wantKind(t, err, ci.ErrTooLarge)
	must(t, os.Remove(path))
	if b, err := d.ReadOutput(0, 10); err != nil || b != nil {
		t.Errorf("a removed file: %q, %v", b, err)
	}
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("secret"), 0o600))
	inside := filepath.Join(d.Steps(), "inside")
	must(t, os.WriteFile(inside, []byte("x"), 0o600))
	for name, replace := range map[string]func() error{
		"a link out":   func() error { return os.Symlink(outside, path) },
		"a link in":    func() error { return os.Symlink("inside", path) },
		"a pipe":       func() error { return syscall.Mkfifo(path, 0o600) },
		"a directory":  func() error { return os.Mkdir(path, 0o700) },
		"a link to /":  func() error { return os.Symlink("/", path) },
		"a dead link":  func() error { return os.Symlink("nowhere", path) },
		"a link cycle": func() error { return os.Symlink(filepath.Base(path), path) },
	} {
		must(t, replace())
		b, err := d.ReadOutput(0, 100)
		if err == nil || ci.KindOf(err) != ci.ErrInvalid || b != nil {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		must(t, os.Remove(path))
	}
}

// hostile fills a job's directory with what a removal can stumble over and
// returns what must be the same afterwards.
func hostile(t *testing.T, d *Dir, files, levels int) (outside string) {
	t.Helper()
	outside = t.TempDir()
	must(t, os.MkdirAll(filepath.Join(outside, "dir"), 0o755))
	must(t, os.WriteFile(filepath.Join(outside, "file"), []byte("keep"), 0o444))
	must(t, os.WriteFile(filepath.Join(outside, "dir", "file"), []byte("keep"), 0o600))
	w := d.Work()
	for name, target := range map[string]string{
		"file": filepath.Join(outside, "file"), "dir": filepath.Join(outside, "dir"), "root": "/", "up": "../../../..", "dead": "nowhere", "self": "self",
	} {
		must(t, os.Symlink(target, filepath.Join(w, "link-"+name)))
	}
	must(t, os.Link(filepath.Join(outside, "file"), filepath.Join(w, "hard")))
	must(t, syscall.Mkfifo(filepath.Join(w, "pipe"), 0o600))
	for _, name := range []string{" ", "\n", "-rf", "\xff\xfe", strings.Repeat("n", 255), "*", "$(reboot)"} {
		must(t, os.WriteFile(filepath.Join(w, name), nil, 0))
	}
	for i, mode := range []os.FileMode{0o000, 0o555, 0o111, 0o222, 0o444, 0o333} {
		sub := filepath.Join(w, fmt.Sprint("mode", i), "sub")
		must(t, os.MkdirAll(sub, 0o755))
		must(t, os.WriteFile(filepath.Join(sub, "f"), nil, 0o400))
		must(t, os.Symlink("/etc", filepath.Join(sub, "l")))
		must(t, os.Chmod(sub, mode))
		must(t, os.Chmod(filepath.Dir(sub), mode))
	}
	many := filepath.Join(w, "many")
	must(t, os.Mkdir(many, 0o755))
	for i := range files {
		must(t, os.WriteFile(filepath.Join(many, fmt.Sprint(i)), nil, 0o600))
	}
	must(t, os.Chmod(many, 0o500))
	deep(t, w, levels)
	must(t, os.Chmod(w, 0o000))
	return outside
}

// deep makes a chain of directories that no path can name, every tenth of them
// not writable.
func deep(t *testing.T, dir string, levels int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for i := range levels {
		must(t, unix.Mkdirat(fd, "deep", 0o755))
		next, err := unix.Openat(fd, "deep", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		f, err := unix.Openat(next, "file", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o400)
		must(t, err)
		_ = unix.Close(f)
		if i%10 == 0 {
			must(t, unix.Fchmod(fd, 0o555))
		}
		_ = unix.Close(fd)
		fd = next
	}
	_ = unix.Close(fd)
}

func TestRemoveOfAnythingAJobCanMake(t *testing.T) {
	t.Parallel()
	r := newRoot(t)
	d, neighbour := newDir(t, r, 1), newDir(t, r, 2)
	must(t, os.WriteFile(filepath.Join(neighbour.Work(), "f"), []byte("keep"), 0o600))
	files, levels := batch+100, 5000
	if os.Geteuid() != 0 {
		files, levels = 100, 5*maxOpen // the run as root looks at the sizes
	}
	outside := hostile(t, d, files, levels)
	before, beside := tree(t, outside), tree(t, neighbour.Path())
	begun := time.Now()
	must(t, d.Remove(t.Context()))
	t.Logf("removed in %v", time.Since(begun))
	wantGone(t, d.Path())
	if after := tree(t, outside); after != before {
		t.Errorf("outside of the root:\n%s\nwas\n%s", after, before)
	}
	if after := tree(t, neighbour.Path()); after != beside {
		t.Errorf("the neighbour:\n%s\nwas\n%s", after, beside)
	}
	must(t, d.Remove(t.Context())) // again: nothing to do
}

// The permission bits above stop nobody who is root. This is the same without.
func TestRemoveAsOrdinaryUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // this is that run, or root is not at hand and it was all along
	}
	base, err := os.MkdirTemp("", "forgeci-workspace-")
	must(t, err)
	defer os.RemoveAll(base)
	must(t, os.Chown(base, nobody, nobody))
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.v", "-test.run=^Test(Remove|Output|Attempts|Sweep|New)")
	cmd.Dir = "/"
	cmd.Env = []string{"TMPDIR=" + base, "PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestRemoveOfAnythingAJobCanMake")) {
		t.Errorf("%v\n%s", err, out)
	}
}

// What a step made as another user stays, is named, and keeps nothing else.
func TestRemoveSaysWhatItCannot(t *testing.T) {
	t.Parallel()
	r := newRoot(t)
	d := newDir(t, r, 1)
	stuck := filepath.Join(d.Work(), "a", "stuck")
	must(t, os.MkdirAll(stuck, 0o755))
	must(t, os.WriteFile(filepath.Join(stuck, "immutable"), nil, 0o600))
	must(t, os.WriteFile(filepath.Join(d.Work(), "other"), nil, 0o600))
	f, err := os.Open(filepath.Join(stuck, "immutable"))
	must(t, err)
	defer f.Close()
	const immutable = 0x10
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, immutable); err != nil {
		// Not this file system, or not root: a directory of root in the way does the same.
		if os.Geteuid() != 0 {
			return
		}
		t.Fatalf("cannot make a file immutable: %v", err)
	}
	release := func() { must(t, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)) }
	err = d.Remove(t.Context())
	wantKind(t, err, ci.ErrConflict)
	if err == nil || !strings.Contains(err.Error(), "work/a/stuck/immutable") || !strings.Contains(err.Error(), "lsattr") {
		t.Errorf("%v does not name the file and the reason", err)
	}
	wantGone(t, filepath.Join(d.Work(), "other"))
	_, again := r.New(lease(1), nil)
	wantKind(t, again, ci.ErrConflict) // never a dirty directory
	d2 := newDir(t, r, 2)
	must(t, d2.Remove(t.Context()))
	release()
	must(t, d.Remove(t.Context()))
	wantGone(t, d.Path())
}

// A mount in the workspace is another directory of the machine.
func TestRemoveLeavesMountsAlone(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		return // only root can mount
	}
	d := newDir(t, newRoot(t), 1)
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "f"), []byte("keep"), 0o600))
	for _, name := range []string{"mnt", "with space", "mnt/inner"} {
		at := filepath.Join(d.Work(), name)
		must(t, os.MkdirAll(at, 0o755))
		must(t, unix.Mount(outside, at, "", unix.MS_BIND, ""))
		must(t, os.MkdirAll(filepath.Join(outside, "inner"), 0o755))
	}
	before := tree(t, outside)
	must(t, d.Remove(t.Context()))
	wantGone(t, d.Path())
	if after := tree(t, outside); after != before {
		t.Errorf("%s\nwas\n%s", after, before)
	}
}

func TestRemoveStopsWithItsContext(t *testing.T) {
	t.Parallel()
	d := newDir(t, newRoot(t), 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Remove(ctx); err == nil {
		t.Error("no error")
	}
	must(t, d.Remove(t.Context()))
	wantGone(t, d.Path())
}

func TestSweepRemovesWhatACrashLeft(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "work")
	r, err := Open(root, logger(t))
	must(t, err)
	crashed := newDir(t, r, 1)
	outside := hostile(t, crashed, 10, 2*maxOpen)
	before := tree(t, outside)
	must(t, newDir(t, r, 2).Remove(t.Context()))
	must(t, r.Close()) // the end of the process, as far as the file system sees

	// What people put there.
	for _, path := range []string{"notes/todo.txt", "jobs/mine/file", "jobs/UPPERCASE123/file", "attempts-old/x"} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, path), []byte("keep"), 0o600))
	}
	must(t, os.Symlink(outside, filepath.Join(root, "jobs", "aaaaaaaaaaaa"))) // a link in a job's place

	r, err = Open(root, logger(t))
	must(t, err)
	defer r.Close()
	live := newDir(t, r, 3)
	must(t, os.WriteFile(filepath.Join(live.Work(), "f"), nil, 0o600))
	must(t, r.Sweep(t.Context()))
	wantGone(t, crashed.Path())
	wantGone(t, filepath.Join(root, "jobs", "aaaaaaaaaaaa"))
	for _, path := range []string{"notes/todo.txt", "jobs/mine/file", "jobs/UPPERCASE123/file", "attempts-old/x"} {
		if b, err := os.ReadFile(filepath.Join(root, path)); err != nil || string(b) != "keep" {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	if _, err := os.Stat(filepath.Join(live.Work(), "f")); err != nil {
		t.Errorf("the live job's file: %v", err)
	}
	if after := tree(t, outside); after != before {
		t.Errorf("outside:\n%s\nwas\n%s", after, before)
	}
	newDir(t, r, 1) // the place is free
}

// ATTACKS S42: what is under the root's own names cannot lead the removal away.
func TestSweepDoesNotFollowItsOwnDirectories(t *testing.T) {
	t.Parallel()
	for _, name := range []string{jobsDir, attemptsFile} {
		root := filepath.Join(t.TempDir(), "work")
		r, err := Open(root, logger(t))
		must(t, err)
		must(t, r.Begin(Attempt{Lease: lease(1)}))
		must(t, r.Close())
		outside := t.TempDir()
		must(t, os.MkdirAll(filepath.Join(outside, "abcdefghijkl", "work"), 0o755))
		must(t, os.Remove(filepath.Join(root, name)))
		must(t, os.Symlink(outside, filepath.Join(root, name)))
		before := tree(t, outside)
		r, err = Open(root, logger(t))
		if err == nil {
			err = r.Sweep(t.Context())
			_ = r.Close()
		}
		if err == nil {
			t.Errorf("%s as a link: no error", name)
		}
		if after := tree(t, outside); after != before {
			t.Errorf("%s as a link: outside\n%s\nwas\n%s", name, after, before)
		}
	}
}

func TestAttemptsSurviveTheProcess(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "work")
	r, err := Open(root, logger(t))
	must(t, err)
	at := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	for i := range 3 {
		must(t, r.Begin(Attempt{Lease: lease(i), Started: at.Add(-time.Duration(i) * time.Second)}))
	}
	must(t, r.Begin(Attempt{Lease: lease(1), Started: at.Add(-time.Second)})) // again: still one
	must(t, r.End(lease(0)))
	must(t, r.End(lease(0))) // again: no error
	must(t, r.End(lease(9)))
	must(t, r.Close())

	// What a crash in the middle of Begin leaves, and what Begin cannot have made.
	f, err := os.OpenFile(filepath.Join(root, attemptsFile), os.O_WRONLY|os.O_APPEND, 0)
	must(t, err)
	_, err = f.WriteString("notes\n{}\n\x00\x00\n{\"begin\":{\"lea")
	must(t, errors.Join(err, f.Close()))

	r, err = Open(root, logger(t))
	must(t, err)
	defer r.Close()
	must(t, r.Sweep(t.Context())) // is no report of termination
	got := r.Attempts()
	if len(got) != 2 || got[0].Lease != lease(2) || got[1].Lease != lease(1) || !got[1].Started.Equal(at.Add(-time.Second)) {
		t.Errorf("%+v", got)
	}
}

// A busy runner's record stays short, and what it says stays true when the disk
// refuses for a while.
func TestTheRecordOfAttemptsIsWrittenAnew(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "work")
	r, err := Open(root, logger(t))
	must(t, err)
	must(t, r.Begin(Attempt{Lease: lease(1)}))
	for i := range 2 * journalLines {
		must(t, r.Begin(Attempt{Lease: lease(2 + i)}))
		must(t, r.End(lease(2+i)))
	}
	b, err := os.ReadFile(filepath.Join(root, attemptsFile))
	must(t, err)
	if n := bytes.Count(b, []byte("\n")); n > journalLines+1 {
		t.Errorf("%d lines", n)
	}
	must(t, r.journal.file.Close()) // every write fails from now on
	if err := r.Begin(Attempt{Lease: lease(3)}); ci.KindOf(err) != ci.ErrUnavailable {
		t.Errorf("an attempt that cannot be recorded is begun: %v", err)
	}
	must(t, r.Begin(Attempt{Lease: lease(4)}))
	must(t, r.End(lease(1)))
	for range 2 {
		if got := r.Attempts(); len(got) != 1 || got[0].Lease != lease(4) {
			t.Errorf("%+v", got)
		}
		must(t, r.Close())
		r, err = Open(root, logger(t))
		must(t, err)
	}
	must(t, r.Close())
}

// Where the file system takes the hint, jobs' directories are spread.
func TestDirectoriesOfJobsAreSpread(t *testing.T) {
	t.Parallel()
	probe := filepath.Join(t.TempDir(), "probe")
	must(t, os.Mkdir(probe, 0o700))
	if exec.Command("chattr", "+T", probe).Run() != nil {
		t.Log("no ext4 here, or no chattr: there is no hint to look for")
		return
	}
	r := newRoot(t)
	out, err := exec.Command("lsattr", "-d", filepath.Join(r.path, jobsDir)).Output()
	must(t, err)
	if !strings.Contains(strings.Fields(string(out))[0], "T") {
		t.Errorf("attributes: %s", out)
	}
}
