package store

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"forgeci/internal/ci"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

//go:embed sql/*.sql
var statementFiles embed.FS

type migration struct {
	number int
	name   string
	text   string
}

func migrations() ([]migration, error) {
	entries, err := fs.ReadDir(migrationFiles, "migrations")
	if err != nil {
		return nil, err
	}
	var out []migration
	for _, e := range entries {
		number, _, ok := strings.Cut(e.Name(), "_")
		n, err := strconv.Atoi(number)
		if !ok || err != nil || n != len(out)+1 {
			return nil, fmt.Errorf("migration %s: expected number %04d", e.Name(), len(out)+1)
		}
		text, err := migrationFiles.ReadFile("migrations/" + e.Name())
		if err != nil {
			return nil, err
		}
		out = append(out, migration{n, e.Name(), string(text)})
	}
	return out, nil
}

// migrate applies what is missing. Each migration is one transaction on both
// databases, so a crash leaves the schema before or after it, never between.
func (s *Store) migrate(ctx context.Context) error {
	all, err := migrations()
	if err != nil {
		return err
	}
	for {
		done, err := s.migrateOne(ctx, all)
		if err != nil || done {
			return err
		}
	}
}

func (s *Store) migrateOne(ctx context.Context, all []migration) (done bool, err error) {
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return false, ci.Errorf(ci.ErrUnavailable, "the database cannot be opened").WithCause(err)
	}
	defer func() { _ = tx.Rollback() }()
	if s.d.lockMigr != "" {
		if _, err := tx.ExecContext(ctx, s.d.lockMigr); err != nil {
			return false, s.wrap(fmt.Errorf("lock migrations: %w", err))
		}
	}
	if _, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema_version (version BIGINT PRIMARY KEY, name `+s.d.text+` NOT NULL)`); err != nil {
		return false, s.wrap(fmt.Errorf("schema_version: %w", err))
	}
	var at sql.NullInt64
	if err := tx.QueryRowContext(ctx, `SELECT MAX(version) FROM schema_version`).Scan(&at); err != nil {
		return false, s.wrap(fmt.Errorf("schema_version: %w", err))
	}
	version := int(at.Int64)
	if version > len(all) {
		return false, ci.Errorf(ci.ErrIncompatible, "the database is newer than this build (%d > %d): run the newer forgeci", version, len(all))
	}
	if version == len(all) {
		return true, s.wrap(tx.Commit())
	}
	next := all[version]
	for _, stmt := range s.d.rewriteDDL(next.text) {
		if _, err := tx.ExecContext(ctx, stmt); err != nil {
			return false, s.wrap(fmt.Errorf("migration %s: %w", next.name, err))
		}
	}
	if _, err := tx.ExecContext(ctx, s.d.rewrite(`INSERT INTO schema_version (version, name) VALUES ($1, $2)`), next.number, next.name); err != nil {
		return false, s.wrap(fmt.Errorf("migration %s: %w", next.name, err))
	}
	return false, s.wrap(tx.Commit())
}

// statements maps a statement's name to its text in one dialect.
type statements map[string]string

// loadStatements reads the named statements: "-- name: X" begins one, further
// comment lines say what it guarantees; "-- name: X (postgres)" is a second
// text for one database.
func loadStatements(d *dialect) (statements, error) {
	out := statements{}
	own := map[string]bool{}
	pieces := fragments()
	entries, err := fs.ReadDir(statementFiles, "sql")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, err := statementFiles.ReadFile("sql/" + e.Name())
		if err != nil {
			return nil, err
		}
		for i, part := range strings.Split(string(text), "-- name: ") {
			if i == 0 {
				continue
			}
			head, body, _ := strings.Cut(part, "\n")
			name, only, special := strings.Cut(strings.TrimSpace(head), " (")
			if special && strings.TrimSuffix(only, ")") != d.name {
				continue
			}
			if _, twice := out[name]; twice && !special && own[name] {
				continue
			} else if twice && !special {
				return nil, fmt.Errorf("statement %s stands twice", name)
			}
			own[name] = special
			var b strings.Builder
			for line := range strings.Lines(body) {
				if !strings.HasPrefix(strings.TrimSpace(line), "--") {
					b.WriteString(line)
				}
			}
			out[name] = d.rewrite(pieces.Replace(strings.TrimSuffix(strings.TrimSpace(b.String()), ";")))
		}
	}
	return out, nil
}
