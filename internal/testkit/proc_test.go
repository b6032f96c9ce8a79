package testkit_test

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

func shell(script string, env ...string) testkit.Command {
	return testkit.Command{Path: "/bin/sh", Args: []string{"-c", script}, Env: env}
}

func TestBinaryIsBuiltOnceAndStarts(t *testing.T) {
	t.Parallel()
	first, second := testkit.Binary(t), testkit.Binary(t)
	if first != second {
		t.Errorf("built twice: %s and %s", first, second)
	}
	testkit.Start(t, testkit.Command{Args: []string{"version"}}).Wait(t, time.Minute)
}

func TestRunReturnsCodeAndBothStreams(t *testing.T) {
	t.Parallel()
	got := testkit.Run(t, shell("echo out; echo err >&2; printf tail; exit 7"))
	if want := (testkit.Result{Code: 7, Stdout: "out\ntail", Stderr: "err\n"}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestProcessInheritsOnlyWhatItIsGiven(t *testing.T) {
	t.Setenv("FORGECI_TOKEN", "of the developer's own server")
	env := strings.Fields(testkit.Run(t, shell("env", "GIVEN=1")).Stdout)
	var names []string
	for _, line := range env {
		name, _, _ := strings.Cut(line, "=")
		names = append(names, name)
	}
	slices.Sort(names)
	if want := []string{"GIVEN", "HOME", "LC_ALL", "PATH", "PWD", "TMPDIR"}; !slices.Equal(names, want) {
		t.Errorf("environment has %q, want %q", names, want)
	}
}

func TestSignalStopsContinuesAndKills(t *testing.T) {
	t.Parallel()
	p := testkit.Start(t, shell("sleep 600"))
	state := func() string {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))[0]
	}
	p.Signal(t, syscall.SIGSTOP)
	eventually(t, "it is stopped", func() bool { return state() == "T" })
	p.Signal(t, syscall.SIGCONT)
	eventually(t, "it goes on", func() bool { return state() != "T" })
	p.Signal(t, syscall.SIGKILL)
	if code := p.Wait(t, 10*time.Second); code != 128+9 {
		t.Errorf("code %d, want 137", code)
	}
}

func TestWaitReadyWaitsForA2xx(t *testing.T) {
	t.Parallel()
	answers := make(chan int, 2)
	answers <- http.StatusServiceUnavailable
	answers <- http.StatusNoContent
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(<-answers) }))
	t.Cleanup(server.Close)
	testkit.Start(t, shell("sleep 600")).WaitReady(t, server.URL)
	if len(answers) != 0 {
		t.Error("a 503 was taken for ready")
	}
}

func TestProcessGroupEndsWithItsTest(t *testing.T) { //nolint:tparallel // the subtest has to end first
	t.Parallel()
	marker := "FORGECI_TESTKIT_MARK=" + strconv.Itoa(os.Getpid())
	t.Run("inner", func(t *testing.T) {
		testkit.Start(t, shell("sleep 600 & sleep 600", marker))
		eventually(t, "three processes carry the mark", func() bool { return len(testkit.ProcessesWith(t, marker)) == 3 })
	})
	eventually(t, "none is left", func() bool { return len(testkit.ProcessesWith(t, marker)) == 0 })
}

func TestProcessesWithTakesTheWholeVariable(t *testing.T) {
	t.Parallel()
	testkit.Start(t, shell("sleep 600", "MARK_OF_TESTKIT=ab"))
	eventually(t, "the mark is seen", func() bool { return len(testkit.ProcessesWith(t, "MARK_OF_TESTKIT=ab")) > 0 })
	for _, other := range []string{"MARK_OF_TESTKIT=a", "ARK_OF_TESTKIT=ab", "MARK_OF_TESTKIT=abc"} {
		if pids := testkit.ProcessesWith(t, other); len(pids) > 0 {
			t.Errorf("%s is found in %v", other, pids)
		}
	}
}

func TestProcessEndsWithAKilledTestProcess(t *testing.T) {
	t.Parallel()
	marker := "FORGECI_TESTKIT_ORPHAN=" + strconv.Itoa(os.Getpid())
	cmd := startHelper(t, "TestHelperHoldsAProcess", orphanEnv+"="+marker)
	eventually(t, "the helper has its process", func() bool { return len(testkit.ProcessesWith(t, marker)) == 1 })
	killHelper(t, cmd)
	eventually(t, "the process ends", func() bool { return len(testkit.ProcessesWith(t, marker)) == 0 })
}

// orphanEnv turns TestHelperHoldsAProcess from an empty test into the process
// that TestProcessEndsWithAKilledTestProcess kills.
const orphanEnv = "FORGECI_TESTKIT_HOLD"

func TestHelperHoldsAProcess(t *testing.T) {
	t.Parallel()
	if marker := os.Getenv(orphanEnv); marker != "" {
		testkit.Start(t, shell("exec sleep 600", marker))
		hold(t)
	}
}

func TestFreeAddrCanBeListenedOn(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", testkit.FreeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

// Between the choice of a port and the start of the program that listens on it
// nobody takes it: no other caller, and no listener that lets the system choose.
func TestFreeAddrIsForOneProgram(t *testing.T) {
	t.Parallel()
	chosen := map[string]bool{}
	for range 500 { // so many would meet by chance
		addr := testkit.FreeAddr(t)
		if chosen[addr] {
			t.Fatalf("%s was given twice", addr)
		}
		chosen[addr] = true
	}
	for range 500 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if chosen[l.Addr().String()] {
			t.Errorf("%s was given to a program, and is taken", l.Addr())
		}
		l.Close()
	}
}
