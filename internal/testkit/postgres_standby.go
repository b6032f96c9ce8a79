package testkit

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Standby starts a hot standby of the server, in a cluster of its own that ends
// with the test. When it returns it is synchronous: the server answers no commit
// that the standby does not have on disk.
func (s *PostgresServer) Standby(t testing.TB) *PostgresServer {
	t.Helper()
	bin, err := findPostgres()
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.MkdirTemp("", "forgeci-postgres-")
	if err != nil {
		t.Fatal(err)
	}
	standby := &PostgresServer{version: s.version, root: root, account: s.account}
	if err := standby.prepare(bin, true); err != nil {
		t.Fatalf("start standby: %v", errors.Join(err, os.RemoveAll(root)))
	}
	t.Cleanup(func() {
		if err := standby.end(); err != nil {
			t.Errorf("end PostgreSQL: %v", err)
		}
	})
	standby.Follow(t, s)
	return standby
}

// Follow makes a server that does not run the synchronous standby of another,
// from a fresh copy of it, at the address that it had.
func (s *PostgresServer) Follow(t testing.TB, primary *PostgresServer) {
	t.Helper()
	data := filepath.Join(s.root, "data")
	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	copier, err := findBasebackup(s.version)
	if err != nil {
		t.Fatal(err)
	}
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	// The copy takes the settings along, and a promoted standby has no standby.
	must("reset synchronous_standby_names", primary.admin("ALTER SYSTEM RESET synchronous_standby_names"))
	must("reload", primary.admin("SELECT pg_reload_conf()"))
	cmd := exec.Command(copier,
		"-h", "127.0.0.1", "-p", strconv.Itoa(primary.port), "-U", "postgres", "-D", data, "-R", "-X", "stream", "-c", "fast", "--no-sync")
	cmd.Dir = s.root
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.account}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	must("start standby", s.launch())
	must("set synchronous_standby_names", primary.admin("ALTER SYSTEM SET synchronous_standby_names = '*'"))
	must("reload", primary.admin("SELECT pg_reload_conf()"))
	must("wait for the standby", primary.waitFor("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"))
}

// findBasebackup looks in PATH and where Debian puts the programs of a version.
func findBasebackup(version string) (string, error) {
	if p, err := exec.LookPath("pg_basebackup"); err == nil {
		return p, nil
	}
	major, _, _ := strings.Cut(version, ".")
	if p := "/usr/lib/postgresql/" + major + "/bin/pg_basebackup"; isExecutable(p) {
		return p, nil
	}
	return "", errors.New("no pg_basebackup in PATH or /usr/lib/postgresql/" + major + "/bin")
}

// waitFor repeats a query until it answers something else than 0.
func (s *PostgresServer) waitFor(query string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.url("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx) // the query has been answered
	for {
		var n int
		if err := conn.QueryRow(ctx, query).Scan(&n); err != nil || n > 0 {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// StopImmediate ends the server at once, as `pg_ctl -m immediate` does: nothing is
// flushed, clients are cut off.
func (s *PostgresServer) StopImmediate(t testing.TB) {
	t.Helper()
	if err := syscall.Kill(s.processes(t)[0], syscall.SIGQUIT); err != nil {
		t.Fatalf("stop PostgreSQL: %v", err)
	}
	if err := s.command("reap"); err != nil {
		t.Fatalf("stop PostgreSQL: %v", err)
	}
}

// Promote makes a standby the primary and returns when it takes writes.
func (s *PostgresServer) Promote(t testing.TB) {
	t.Helper()
	if err := s.admin("SELECT pg_promote(true, 60)"); err != nil {
		t.Fatalf("promote: %v", err)
	}
	if err := s.waitFor("SELECT CASE WHEN pg_is_in_recovery() THEN 0 ELSE 1 END"); err != nil {
		t.Fatalf("promote: %v", err)
	}
}

// Pair returns the URL of a database on whichever of two servers takes writes.
func Pair(t testing.TB, database string, other *PostgresServer) string {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("postgres://postgres@%s,%s%s?sslmode=disable&target_session_attrs=read-write", u.Host, other.Addr(), u.Path)
}

// Exhaust takes every connection that the server has left and returns what gives
// them back.
func (s *PostgresServer) Exhaust(t testing.TB) (release func()) {
	t.Helper()
	var taken []*pgx.Conn
	for {
		conn, err := pgx.Connect(t.Context(), s.url("postgres"))
		if err != nil {
			if !strings.Contains(err.Error(), "53300") {
				t.Fatalf("take connections: %v", err)
			}
			break
		}
		taken = append(taken, conn)
	}
	return func() {
		for _, conn := range taken {
			_ = conn.Close(context.WithoutCancel(t.Context()))
		}
	}
}
