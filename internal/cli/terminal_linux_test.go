package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"forgeci/internal/cli"
)

// openTerminal returns both ends of a pseudo-terminal.
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	var unlock, number int32
	for _, call := range []struct {
		request uintptr
		arg     *int32
	}{{syscall.TIOCSPTLCK, &unlock}, {syscall.TIOCGPTN, &number}} {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, master.Fd(), call.request, uintptr(unsafe.Pointer(call.arg))); errno != 0 {
			t.Fatal(errno)
		}
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

// onTerminal runs a command whose output is a terminal and returns what it shows.
func onTerminal(t *testing.T, env map[string]string, args ...string) (int, string) {
	t.Helper()
	master, slave := openTerminal(t)
	shown := make(chan []byte)
	go func() {
		var b bytes.Buffer
		_, _ = b.ReadFrom(master) // ends with an error when the other end is closed
		shown <- b.Bytes()
	}()
	code := cli.Main(context.Background(), cli.Process{
		Args: args, Stdin: strings.NewReader(""), Stdout: slave, Stderr: slave, Now: time.Now,
		LookupEnv: func(name string) (string, bool) { v, ok := env[name]; return v, ok },
	})
	slave.Close()
	return code, strings.ReplaceAll(string(<-shown), "\r\n", "\n")
}

// A terminal gets colours and a log in which nothing else acts on it; NO_COLOR
// takes the colours, too.
func TestCase_CLI_02_on_a_terminal(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	t.Cleanup(f.down)
	f.change(func() { furnish(t, f) })
	env := map[string]string{"FORGECI_SERVER": "http://" + f.addr, "FORGECI_TOKEN": fakeToken, "TERM": "xterm"}
	code, shown := onTerminal(t, env, "logs", "job_odd_build")
	for _, want := range []string{`\xff\xfe^@` + "\n", "café\n", "\x1b[31mred\x1b[0m\n", "10%\n20%\n100%\n", `\x9bm\u202eevil`} {
		if !strings.Contains(shown, want) {
			t.Errorf("lacks %q", want)
		}
	}
	if rest := strings.NewReplacer("\x1b[31m", "", "\x1b[0m", "", "\n", "").Replace(shown); code != 0 || strings.ContainsFunc(rest, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		t.Errorf("code %d, or a control character that is no colour: %.200q", code, rest)
	}
	if _, shown := onTerminal(t, env, "logs", "-f", "job_odd_build"); !strings.Contains(shown, "\x1b[31mred\x1b[0m\n10%\n20%\n") {
		t.Errorf("followed: %.200q", shown[max(0, len(shown)-200):])
	}
	if _, shown := onTerminal(t, env, "show", "run_failed"); !strings.Contains(shown, "\x1b[31mfailed\x1b[0m") {
		t.Errorf("no colours: %q", shown)
	}
	for name, value := range map[string]string{"NO_COLOR": "1", "TERM": "dumb"} {
		plain := map[string]string{"FORGECI_SERVER": env["FORGECI_SERVER"], "FORGECI_TOKEN": fakeToken, "TERM": "xterm"}
		plain[name] = value
		for _, args := range [][]string{{"show", "run_failed"}, {"logs", "job_odd_build"}, {"show", "run_unknown"}} {
			if _, shown := onTerminal(t, plain, args...); strings.Contains(shown, "\x1b") {
				t.Errorf("%s=%s %v: colours", name, value, args)
			}
		}
	}
}
