package store

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

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

func tables(t *testing.T, s *Store) []string {
	t.Helper()
	rows, err := s.read.QueryContext(t.Context(), s.d.tablesSQL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var out []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		out = append(out, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
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
			fresh := bare(t, url(t))
			if err := fresh.migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := tables(t, fresh)
			s := bare(t, url(t))
			statements := s.d.rewriteDDL(all[0].text)
			for cut := 0; cut < len(statements); cut += max(len(statements)/20, 1) {
				broken := slices.Clone(all)
				broken[0].text = strings.Join(statements[:cut], ";\n") + ";\nCREATE TABLE no (;\n"
				if err := s.migrate1(t.Context(), broken); err == nil {
					t.Fatalf("a migration that fails at statement %d did not stop the start", cut)
				}
				if got := tables(t, s); len(got) > 0 {
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
			if got := tables(t, s); !slices.Equal(got, want) {
				t.Errorf("after the restart: %v, want %v", got, want)
			}
		})
	}
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
