package testkit

import (
	"database/sql"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// DatabaseSize returns the bytes that a database takes on disk: the pages of an
// SQLite file, those that still stand in its log included, or what PostgreSQL says
// of the whole database.
func DatabaseSize(t testing.TB, databaseURL string) (n int64) {
	t.Helper()
	ctx := t.Context()
	if path, ok := strings.CutPrefix(databaseURL, "sqlite:"); ok {
		db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?_pragma=query_only(1)")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := db.QueryRowContext(ctx, "SELECT c.page_count * s.page_size FROM pragma_page_count c, pragma_page_size s").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	if err := conn.QueryRow(ctx, "SELECT pg_database_size(current_database())").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
