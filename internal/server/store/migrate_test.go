package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/testkit"
)

func bothURLs() map[string]func(*testing.T) string {
	return map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/m.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	}
}

// bare is a store without a schema.
func bare(t *testing.T, url string) *Store {
	t.Helper()
	d, err := dialectFor(url)
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{d: d, log: slog.New(slog.DiscardHandler), prepared: map[prepKey]*sql.Stmt{}}
	if s.write, s.read, err = d.open(Options{URL: url}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// schema is the whole definition of what is in the database: on SQLite its
// texts, on PostgreSQL columns, indexes, constraints and functions.
func schema(t *testing.T, s *Store) []string {
	t.Helper()
	query := `SELECT type || ' ' || name || ' ' || tbl_name || ' ' || COALESCE(sql, '') FROM sqlite_master ORDER BY 1`
	if s.d.name == "postgres" {
		query = `SELECT concat_ws(' ', 'column', c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attcollation::regcollation,
				a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid), c.reloptions)
			FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
			WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S') AND a.attnum > 0 AND NOT a.attisdropped
			UNION ALL SELECT 'index ' || pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
			WHERE c.relnamespace = current_schema()::regnamespace
			UNION ALL SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid), convalidated) FROM pg_constraint
			WHERE connamespace = current_schema()::regnamespace
			UNION ALL SELECT 'function ' || pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
			ORDER BY 1`
	}
	rows, err := s.read.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var out []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		out = append(out, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// wantFresh demands the schema of a fresh installation, and that each migration is
// recorded once.
func wantFresh(t *testing.T, s *Store, fresh []string) {
	t.Helper()
	if got := schema(t, s); len(fresh) == 0 || !slices.Equal(got, fresh) {
		t.Errorf("the schema is not that of a fresh installation:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(fresh, "\n"))
	}
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	var n, most int
	if err := s.read.QueryRowContext(t.Context(), "SELECT COUNT(*), MAX(version) FROM schema_version").Scan(&n, &most); err != nil {
		t.Fatal(err)
	}
	if n != len(all) || most != len(all) {
		t.Errorf("%d migrations up to number %d are recorded, want %d", n, most, len(all))
	}
}

// freshSchema is what an installation that nothing disturbs has.
func freshSchema(t *testing.T, url string) []string {
	t.Helper()
	s := bare(t, url)
	if err := s.migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return schema(t, s)
}

// A migration that is cut anywhere leaves the schema as it was, and the next
// start completes it: the schema is then that of a fresh installation.
func TestCase_DB_03_AMigrationIsAllOrNothing(t *testing.T) {
	t.Parallel()
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	for name, url := range bothURLs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := freshSchema(t, url(t))
			s := bare(t, url(t))
			statements := s.d.rewriteDDL(all[0].text)
			for cut := 0; cut < len(statements); cut += max(len(statements)/20, 1) {
				broken := slices.Clone(all)
				broken[0].text = verbatim(append(statements[:cut:cut], "SELECT * FROM there_is_no_such_table"))
				err := s.migrate1(t.Context(), broken)
				if err == nil || !strings.Contains(err.Error(), "migration "+all[0].name) || !strings.Contains(err.Error(), "there_is_no_such_table") {
					t.Fatalf("a migration that fails at statement %d: %v, want an error with its number", cut, err)
				}
				if got := schema(t, s); len(got) > 0 {
					t.Fatalf("cut at statement %d the migration left %v", cut, got)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := s.migrate(ctx); err == nil {
				t.Error("a cancelled migration succeeded")
			}
			if err := s.migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantFresh(t, s, want)
		})
	}
}

// TestMain is also the process that is killed in the middle of a migration.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == migrateSlowly {
		cut, err := strconv.Atoi(os.Args[3])
		if err == nil {
			err = slowMigration(os.Args[2], cut)
		}
		fmt.Println("it ended:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const migrateSlowly = "migrate-slowly"

// slowMigration runs the first migration up to a statement, and takes hours there.
func slowMigration(url string, cut int) error {
	d, err := dialectFor(url)
	if err != nil {
		return err
	}
	s := &Store{d: d, log: slog.New(slog.DiscardHandler), prepared: map[prepKey]*sql.Stmt{}}
	if s.write, s.read, err = d.open(Options{URL: url}); err != nil {
		return err
	}
	all, err := migrations()
	if err != nil {
		return err
	}
	slow := "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 100000) SELECT COUNT(*) FROM c"
	if d.name == "postgres" {
		slow = "SELECT pg_sleep(0.1)"
	}
	all[0].text = verbatim(slices.Concat(d.rewriteDDL(all[0].text)[:cut], slices.Repeat([]string{slow}, 100_000)))
	fmt.Println("it begins")
	_, err = s.migrateOne(context.Background(), all)
	return err
}

// A server that is killed in the middle of a migration leaves nothing of it, and
// the next start does it all.
func TestCase_DB_03_AKilledMigrationIsDoneByTheNextStart(t *testing.T) {
	t.Parallel()
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	for name, url := range bothURLs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := freshSchema(t, url(t))
			u := url(t)
			s := bare(t, u)
			n := len(s.d.rewriteDDL(all[0].text))
			for _, cut := range []int{0, 1, n / 2, n} {
				p := testkit.Start(t, testkit.Command{Path: os.Args[0], Args: []string{migrateSlowly, u, strconv.Itoa(cut)}})
				for !strings.Contains(p.Stdout(), "it begins") && t.Context().Err() == nil {
					<-time.After(time.Millisecond)
				}
				<-time.After(100 * time.Millisecond) // wherever it has come by then
				p.Signal(t, syscall.SIGKILL)
				<-p.Exited()
				if strings.Contains(p.Stdout(), "it ended") {
					t.Fatalf("the migration was not killed: %s", p.Stdout())
				}
				if got := schema(t, s); len(got) > 0 {
					t.Fatalf("killed behind statement %d the migration left %v", cut, got)
				}
			}
			if err := s.migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantFresh(t, s, want)
		})
	}
}

// verbatim is the text of a migration of these statements, which are in the
// database's dialect already: the comment keeps them from being translated again.
func verbatim(statements []string) string {
	var b strings.Builder
	for _, s := range statements {
		b.WriteString("/* as it is */ " + s + ";\n")
	}
	return b.String()
}

func (s *Store) migrate1(ctx context.Context, all []migration) error {
	_, err := s.migrateOne(ctx, all)
	return err
}

func TestCase_DB_03_OneOfManyStartsMigrates(t *testing.T) {
	t.Parallel()
	for name, url := range bothURLs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := freshSchema(t, url(t))
			u := url(t)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					s, err := Open(t.Context(), Options{URL: u, Log: slog.New(slog.DiscardHandler)})
					if err != nil {
						t.Error(err)
						return
					}
					if err := s.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			wantFresh(t, bare(t, u), want)
		})
	}
}

func TestCase_DB_03_AnOlderBinaryRefusesANewerDatabase(t *testing.T) {
	t.Parallel()
	for name, url := range bothURLs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := url(t)
			s, err := Open(t.Context(), Options{URL: u, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.write.ExecContext(t.Context(), "INSERT INTO schema_version (version, name) VALUES (9999, 'later')"); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			_, err = Open(t.Context(), Options{URL: u, Log: slog.New(slog.DiscardHandler)})
			if !errors.Is(err, ci.ErrIncompatible) || !strings.Contains(err.Error(), "newer than this build (9999 > ") {
				t.Errorf("%v, want incompatible with both numbers", err)
			}
		})
	}
}
