package testkit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Postgres returns the URL of an empty database of its own for the test, in the
// one private PostgreSQL cluster of this test process. The cluster is started
// on first use (about 0.5 s) and ends with the process; a database costs about
// 50 ms and is dropped, with whatever is still connected to it, when the test
// ends. Tests may run in parallel. NOTIFY reaches only the test's own database.
//
// The cluster's default collation is a linguistic one where the server has it,
// so that an ORDER BY that relies on byte order without saying COLLATE "C"
// shows. Writes are not flushed to disk; StartPostgres has the durable kind.
//
// Call it outside a synctest bubble: it waits for real processes.
func Postgres(t testing.TB) string {
	t.Helper()
	server, err := sharedPostgres()
	if err != nil {
		t.Fatalf("start PostgreSQL: %v", err)
	}
	RecordVersion(t, "PostgreSQL", server.version)
	return server.Database(t)
}

// sharedPostgres starts the cluster of this process once.
var sharedPostgres = sync.OnceValues(func() (*PostgresServer, error) {
	return startPostgres(false)
})

// PostgresServer is a private PostgreSQL cluster. Its methods may be called
// from any goroutine, the faults (Kill, Start, Pause, Resume) from one at a
// time.
type PostgresServer struct {
	version string
	root    string // holds data/, the socket and the log
	port    int
	account *syscall.Credential // nil: the test's own

	supervisor *exec.Cmd
	commands   io.WriteCloser // closing it ends the cluster
	answers    *bufio.Reader
}

// StartPostgres starts a cluster of the test's own, for tests that break it,
// and ends it with the test. A durable one flushes every commit to disk as a
// production server does.
func StartPostgres(t testing.TB, durable bool) *PostgresServer {
	t.Helper()
	s, err := startPostgres(durable)
	if err != nil {
		t.Fatalf("start PostgreSQL: %v", err)
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Errorf("end PostgreSQL: %v", err)
		}
	})
	RecordVersion(t, "PostgreSQL", s.version)
	return s
}

// Addr returns the TCP address of the server; it stays the same over restarts.
func (s *PostgresServer) Addr() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
}

// Database creates an empty database for the test and returns its URL.
func (s *PostgresServer) Database(t testing.TB) string {
	t.Helper()
	name := "t" + strconv.FormatInt(time.Now().UnixNano(), 36) + randomText(6)
	if err := s.admin(`CREATE DATABASE "` + name + `"`); err != nil {
		t.Fatalf("create test database: %v", err)
	}
	t.Cleanup(func() {
		if err := s.admin(`DROP DATABASE IF EXISTS "` + name + `" WITH (FORCE)`); err != nil && !s.away() {
			t.Errorf("drop test database: %v", err)
		}
	})
	return s.url(name)
}

// AwaitLockWait returns when a transaction on a test's database waits for a lock
// that another one holds, or when done is closed because what was to wait did
// not: what two nodes do at once is tested without waiting for a time.
func AwaitLockWait(t testing.TB, databaseURL string, done <-chan struct{}) {
	t.Helper()
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx) // every statement has been answered
	for {
		var waiting int
		err := conn.QueryRow(ctx, `SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
		if waiting > 0 {
			return
		}
		select {
		case <-done:
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (s *PostgresServer) url(database string) string {
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Host: s.Addr(), Path: "/" + database, RawQuery: "sslmode=disable"}
	return u.String()
}

// admin runs one statement on the maintenance database.
func (s *PostgresServer) admin(statement string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.url("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx) // the statement has been answered
	_, err = conn.Exec(ctx, statement)
	return err
}

// away reports whether a test left the server dead, so that nothing can be
// cleaned up and nothing needs to be.
func (s *PostgresServer) away() bool {
	c, err := net.DialTimeout("tcp", s.Addr(), time.Second)
	if err != nil {
		return true
	}
	return c.Close() != nil
}

// Kill ends the server as a crash of its machine would: every process of the
// cluster gets SIGKILL, nothing is flushed or said to clients.
func (s *PostgresServer) Kill(t testing.TB) {
	t.Helper()
	for _, pid := range s.processes(t) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatalf("kill PostgreSQL process %d: %v", pid, err)
		}
	}
	if err := s.command("reap"); err != nil {
		t.Fatalf("kill PostgreSQL: %v", err)
	}
}

// Start starts the server again after Kill, on the same data and address, and
// returns when it accepts connections.
func (s *PostgresServer) Start(t testing.TB) {
	t.Helper()
	if err := s.launch(); err != nil {
		t.Fatalf("start PostgreSQL again: %v", err)
	}
}

// Pause stops every process of the cluster in its tracks (SIGSTOP): connections
// stay open and nothing answers. Resume lets them go on.
func (s *PostgresServer) Pause(t testing.TB) { t.Helper(); s.signal(t, syscall.SIGSTOP) }

// Resume undoes Pause.
func (s *PostgresServer) Resume(t testing.TB) { t.Helper(); s.signal(t, syscall.SIGCONT) }

func (s *PostgresServer) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	for _, pid := range s.processes(t) {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatalf("signal PostgreSQL process %d: %v", pid, err)
		}
	}
}

// processes lists the postmaster first, then its children.
func (s *PostgresServer) processes(t testing.TB) []int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.root, "data", "postmaster.pid"))
	if err != nil {
		t.Fatalf("PostgreSQL does not run: %v", err)
	}
	first, _, _ := strings.Cut(string(b), "\n")
	postmaster, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		t.Fatalf("postmaster.pid: %v", err)
	}
	children, err := childrenOf(postmaster)
	if err != nil {
		t.Fatalf("list PostgreSQL processes: %v", err)
	}
	return append([]int{postmaster}, children...)
}

// supervisorScript owns the server. It obeys one word a line and, when its
// input closes, which happens however the test process ends, stops the server
// and removes its files.
const supervisorScript = `
root=$1; shift
trap '' INT HUP TERM
pid=
while read -r word; do
	case $word in
	start) "$@" >>"$root/log" 2>&1 </dev/null & pid=$!; echo "ok $pid" ;;
	reap) wait "$pid"; echo ok ;;
	esac
done
if [ -n "$pid" ] && kill -CONT "$pid" 2>/dev/null; then kill -QUIT "$pid"; wait "$pid"; fi
rm -rf "$root"
`

func startPostgres(durable bool, settings ...string) (*PostgresServer, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	version, err := bin.version()
	if err != nil {
		return nil, err
	}
	account, err := postgresAccount()
	if err != nil {
		return nil, err
	}
	template, err := bin.template(version, account)
	if err != nil {
		return nil, fmt.Errorf("initialise template cluster: %w", err)
	}
	root, err := os.MkdirTemp("", "forgeci-postgres-")
	if err != nil {
		return nil, err
	}
	s := &PostgresServer{version: version, root: root, account: account}
	if err := copyTree(template, filepath.Join(root, "data")); err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	if err := s.prepare(bin, durable, settings...); err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	if err := s.launch(); err != nil {
		return nil, errors.Join(err, s.end())
	}
	return s, nil
}

// prepare starts what will start the server.
func (s *PostgresServer) prepare(bin postgresPrograms, durable bool, more ...string) error {
	if s.account != nil {
		if err := os.Chown(s.root, int(s.account.Uid), int(s.account.Gid)); err != nil {
			return err
		}
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	s.port = port
	settings := []string{
		"listen_addresses=127.0.0.1", "port=" + strconv.Itoa(port), "unix_socket_directories=" + s.root,
		"max_connections=400", "dynamic_shared_memory_type=mmap", "jit=off", "timezone=UTC",
	}
	if !durable {
		settings = append(settings, "fsync=off", "full_page_writes=off", "synchronous_commit=off")
	}
	args := []string{"-c", supervisorScript, "postgres-supervisor", s.root, bin.postgres, "-D", filepath.Join(s.root, "data")}
	for _, setting := range append(settings, more...) {
		args = append(args, "-c", setting)
	}
	// Not exec.CommandContext: the server lives as long as the process.
	cmd := exec.Command("/bin/sh", args...)
	cmd.Dir = s.root
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}
	// A session of its own: what is sent to the test's process group, be it by
	// a terminal or by the test runner, must not reach the supervisor.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: s.account}
	if s.commands, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	s.answers = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	s.supervisor = cmd
	return nil
}

// launch starts the server and waits until it takes connections.
func (s *PostgresServer) launch() error {
	before := len(s.log()) // of earlier starts
	if err := s.command("start"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, s.url("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no connection within a minute: %w\n%s", err, end(s.log()))
		case <-time.After(10 * time.Millisecond):
		}
		if strings.Contains(s.log()[before:], "pre-existing shared memory block") {
			// What was killed is still ending: again.
			if err := s.command("reap"); err != nil {
				return err
			}
			before = len(s.log())
			if err := s.command("start"); err != nil {
				return err
			}
			continue
		}
		if log := s.log()[before:]; strings.Contains(log, "FATAL") && !strings.Contains(log, "the database system is") {
			return fmt.Errorf("the server refused to start:\n%s", end(log))
		}
	}
}

// log returns the server's log, empty before its first start.
func (s *PostgresServer) log() string {
	b, _ := os.ReadFile(filepath.Join(s.root, "log"))
	return string(b)
}

// end returns the end of a log.
func end(log string) string { return log[max(0, len(log)-4000):] }

// command sends one word to the supervisor and waits for its answer.
func (s *PostgresServer) command(word string) error {
	if _, err := io.WriteString(s.commands, word+"\n"); err != nil {
		return fmt.Errorf("supervisor: %w", err)
	}
	answer, err := s.answers.ReadString('\n')
	if err != nil {
		return fmt.Errorf("supervisor: %w", err)
	}
	if !strings.HasPrefix(answer, "ok") {
		return fmt.Errorf("supervisor answered %q", answer)
	}
	return nil
}

// end stops the server and removes its files.
func (s *PostgresServer) end() error {
	if err := s.commands.Close(); err != nil {
		return err
	}
	return s.supervisor.Wait()
}

// postgresPrograms are the paths of the server's binaries.
type postgresPrograms struct{ postgres, initdb string }

// findPostgres looks in PATH and in the place where Debian puts them.
func findPostgres() (postgresPrograms, error) {
	var dirs []string
	if p, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(p))
	}
	debian, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return postgresPrograms{}, err
	}
	slices.Reverse(debian)
	for _, dir := range append(dirs, debian...) {
		p := postgresPrograms{postgres: filepath.Join(dir, "postgres"), initdb: filepath.Join(dir, "initdb")}
		if isExecutable(p.postgres) && isExecutable(p.initdb) {
			return p, nil
		}
	}
	return postgresPrograms{}, errors.New("no postgres and initdb in PATH or /usr/lib/postgresql/*/bin; install PostgreSQL 13 or later (Debian: apt-get install postgresql)")
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

func (p postgresPrograms) version() (string, error) {
	out, err := exec.Command(p.postgres, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", p.postgres, err)
	}
	// postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
	fields := strings.Fields(string(out))
	if len(fields) < 3 {
		return "", fmt.Errorf("%s --version: unexpected answer %q", p.postgres, out)
	}
	return fields[2], nil
}

// template returns a directory with an initialised cluster to copy, made once
// per machine and version: a copy takes a third of the time of initdb.
func (p postgresPrograms) template(version string, account *syscall.Credential) (string, error) {
	owner := os.Getuid()
	if account != nil {
		owner = int(account.Uid)
	}
	dir := filepath.Join(cacheDir(), fmt.Sprintf("postgres-%s-%d-1", version, owner))
	if _, err := os.Stat(filepath.Join(dir, "PG_VERSION")); err == nil {
		return dir, nil
	}
	work, err := os.MkdirTemp("", "forgeci-initdb-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work) // a leftover in the temporary directory harms nothing
	if account != nil {
		if err := os.Chown(work, int(account.Uid), int(account.Gid)); err != nil {
			return "", err
		}
	}
	made := filepath.Join(work, "data")
	// A linguistic collation first, plain C where the server lacks it.
	if first := p.init(made, account, "--locale-provider=icu", "--icu-locale=en", "--locale=C.UTF-8"); first != nil {
		if err := errors.Join(os.RemoveAll(made), p.init(made, account, "--locale=C")); err != nil {
			return "", errors.Join(first, err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	// Copy beside the goal, then rename: others may do the same at once, and
	// a rename onto a filled directory fails.
	beside := dir + "." + randomText(8)
	defer os.RemoveAll(beside) // gone already when the rename won
	if err := copyTree(made, beside); err != nil {
		return "", err
	}
	if err := os.Rename(beside, dir); err != nil {
		if _, missing := os.Stat(filepath.Join(dir, "PG_VERSION")); missing != nil {
			return "", err
		}
	}
	return dir, nil
}

func (p postgresPrograms) init(dir string, account *syscall.Credential, locale ...string) error {
	args := append([]string{"-D", dir, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"}, locale...)
	cmd := exec.Command(p.initdb, args...)
	cmd.Dir = filepath.Dir(dir)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: account}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	return nil
}
