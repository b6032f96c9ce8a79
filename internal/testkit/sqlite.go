package testkit

import (
	"database/sql"
	"net/url"
	"testing"

	_ "modernc.org/sqlite" // the driver
)

// SQLiteIntegrity returns what SQLite's own check says of a database file: "ok"
// when it is whole.
func SQLiteIntegrity(t testing.TB, path string) string {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var said string
	if err := db.QueryRowContext(t.Context(), "PRAGMA integrity_check").Scan(&said); err != nil {
		return err.Error()
	}
	return said
}
