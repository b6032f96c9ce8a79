package jobhelper

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

// The helper starts fast because nothing is initialised before this package but
// what os needs.
func TestImportsNothingButWhatOsImports(t *testing.T) {
	t.Parallel()
	list := func(args ...string) []string {
		out, err := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strings.Fields(string(out))
	}
	allowed := map[string]bool{"os": true, "unsafe": true}
	for _, p := range list("-deps", "os") {
		allowed[p] = true
	}
	for _, p := range list("-f", `{{join .Imports " "}}`, ".") {
		if !allowed[p] {
			t.Errorf("import of %s: it delays the start of every job, see the package comment", p)
		}
	}
}

func messages() []*Message {
	return []*Message{
		{},
		{Kind: KindClose},
		{Kind: KindExited, Seq: 1<<32 - 1, Num: -1, Nanos: 1 << 62},
		{Kind: KindFailed, Seq: 3, Num: 13, Text: "start: permission denied"},
		{
			Kind: KindStart, Seq: 7, Dir: "/w", Argv: []string{"/bin/sh", "-e", ""}, Env: []string{"A=\xff\n", "B="},
			User: &Credential{UID: 1, GID: 2, Groups: []uint32{3, 1<<32 - 1}},
		},
		{Kind: KindStart, Env: []string{strings.Repeat("x", 1<<20)}, User: &Credential{}},
	}
}

func TestMessagesArriveWhole(t *testing.T) {
	t.Parallel()
	var wire bytes.Buffer
	for _, m := range messages() {
		header, payload, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		wire.Write(header)
		wire.Write(payload)
	}
	for _, want := range messages() {
		got, err := ReadMessage(&wire)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
	}
	if _, err := ReadMessage(&wire); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

func TestMessageCutOffIsAnError(t *testing.T) {
	t.Parallel()
	header, payload, err := Encode(messages()[4])
	if err != nil {
		t.Fatal(err)
	}
	whole := append(header, payload...)
	for n := 1; n < len(whole); n++ {
		if m, err := ReadMessage(bytes.NewReader(whole[:n])); err == nil {
			t.Errorf("%d of %d bytes gave %+v", n, len(whole), m)
		}
	}
}

func FuzzReadMessage(f *testing.F) {
	for _, m := range messages()[:5] {
		header, payload, err := Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(header, payload...))
	}
	f.Add([]byte("S\x00\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerSize && get32(b[4:]) > 1<<20 {
			return // only the runner writes to the helper; the bound is for a defect
		}
		m, err := ReadMessage(bytes.NewReader(b))
		if err != nil {
			return
		}
		header, payload, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ReadMessage(bytes.NewReader(append(header, payload...)))
		if err != nil || !reflect.DeepEqual(again, m) {
			t.Errorf("%+v became %+v, %v", m, again, err)
		}
	})
}

func TestReadProcWithAnyName(t *testing.T) {
	t.Parallel()
	me, err := ReadProc(os.Getpid())
	if err != nil || me.PPID != os.Getppid() || me.Dead() || me.Start == 0 {
		t.Errorf("%+v, %v", me, err)
	}
	if _, err := ReadProc(1 << 30); err == nil {
		t.Error("a process that does not exist")
	}
	dir := t.TempDir()
	name := dir + "/) Z 1 (x"
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), name, "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	p, err := ReadProc(cmd.Process.Pid)
	if err != nil || p.PPID != os.Getpid() || p.Dead() {
		t.Errorf("%+v, %v", p, err)
	}
	procs, err := Processes()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, d := range Descendants(procs, os.Getpid()) {
		found = found || d.PID == cmd.Process.Pid
	}
	if !found {
		t.Error("not among the descendants")
	}
}

// A number that now belongs to another process is not signalled.
func TestSignalReachesOnlyTheProcessMeant(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "sleep", "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := ReadProc(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	other := p
	other.Start++
	if err := Signal(other, syscall.SIGKILL); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("another process of that number: %v", err)
	}
	if now, err := ReadProc(p.PID); err != nil || now.Dead() {
		t.Fatalf("it was killed: %+v, %v", now, err)
	}
	if err := Signal(p, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	if err := Signal(p, syscall.SIGKILL); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("a process that has ended: %v", err)
	}
}

func TestCgroupEvents(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"populated 1\nfrozen 0\n": "1", "frozen 0\npopulated 0\n": "0", "": "", "populated": ""} {
		if got := populated(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
