package testkit_test

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"forgeci/internal/testkit"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func exec1(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestPostgresGivesEachTestADatabaseOfItsOwn(t *testing.T) {
	t.Parallel()
	a, b := testkit.Postgres(t), testkit.Postgres(t)
	if a == b {
		t.Fatalf("both tests got %s", a)
	}
	exec1(t, connect(t, a), "CREATE TABLE x (i bigint)")
	exec1(t, connect(t, b), "CREATE TABLE x (i bigint)")
}

func TestPostgresShowsOrderByWithoutByteCollation(t *testing.T) {
	t.Parallel()
	conn := connect(t, testkit.Postgres(t))
	var linguistic, bytewise bool
	if err := conn.QueryRow(t.Context(), `SELECT 'a' < 'B', 'a' < 'B' COLLATE "C"`).Scan(&linguistic, &bytewise); err != nil {
		t.Fatal(err)
	}
	if !linguistic || bytewise {
		t.Errorf("'a' < 'B' is %v by default and %v by bytes, want true and false", linguistic, bytewise)
	}
}

func TestPostgresDropsTheDatabaseUnderOpenConnections(t *testing.T) { //nolint:tparallel // the subtest has to end first
	t.Parallel()
	var url string
	t.Run("owner", func(t *testing.T) {
		url = testkit.Postgres(t)
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		exec1(t, conn, "BEGIN")
	})
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Error("the database is still there after its test")
	}
}

func TestPostgresServerKeepsCommittedRowsOverKillAndFreezesOnPause(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t, true)
	url := server.Database(t)
	conn := connect(t, url)
	exec1(t, conn, "CREATE TABLE x (i bigint)")
	exec1(t, conn, "INSERT INTO x VALUES (1)")
	server.Kill(t)
	if _, err := conn.Exec(t.Context(), "SELECT 1"); err == nil {
		t.Fatal("the connection survived the kill")
	}
	server.Start(t)
	conn = connect(t, url)
	var rows int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM x").Scan(&rows); err != nil || rows != 1 {
		t.Fatalf("after the restart: %d rows, %v; want 1", rows, err)
	}

	server.Pause(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := conn.Exec(ctx, "SELECT 1"); err == nil {
		t.Error("a paused server answered")
	}
	server.Resume(t)
	exec1(t, connect(t, url), "SELECT 1")
}

// TestPostgresEndsWithAKilledTestProcess runs this test binary again as a
// process that starts a cluster, says where, and waits; then kills it.
func TestPostgresEndsWithAKilledTestProcess(t *testing.T) {
	t.Parallel()
	marker := filepath.Join(t.TempDir(), "url")
	cmd := startHelper(t, "TestHelperHoldsACluster", helperEnv+"="+marker)
	var url string
	eventually(t, "the helper has its cluster", func() bool {
		b, err := os.ReadFile(marker)
		url = strings.TrimSuffix(string(b), "\n")
		return err == nil && strings.HasSuffix(string(b), "\n")
	})
	connect(t, url)
	killHelper(t, cmd)
	eventually(t, "the cluster ends", func() bool {
		conn, err := pgx.Connect(t.Context(), url)
		if err == nil {
			conn.Close(t.Context())
		}
		return err != nil && strings.Contains(err.Error(), "refused")
	})
}

// helperEnv turns TestHelperHoldsACluster from an empty test into the process
// that TestPostgresEndsWithAKilledTestProcess kills.
const helperEnv = "FORGECI_TESTKIT_HELPER"

func TestHelperHoldsACluster(t *testing.T) {
	t.Parallel()
	marker := os.Getenv(helperEnv)
	if marker == "" {
		return
	}
	if err := os.WriteFile(marker, []byte(testkit.Postgres(t)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	hold(t)
}

// hold keeps a helper process alive until it is killed or its parent has ended.
func hold(t *testing.T) {
	t.Helper()
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		t.Fatal(err)
	}
}

// startHelper runs one test of this binary as a process of its own that holds.
func startHelper(t *testing.T, test, env string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$")
	cmd.Env = append(os.Environ(), env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close() })
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// killHelper kills the helper's process group and makes sure that it was alive
// until then.
func killHelper(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the helper was not killed but ended by itself: %v", err)
	}
}

// eventually waits for something that another process does.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
