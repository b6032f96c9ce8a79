package store

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"forgeci/internal/ci"
)

// dialect holds everything in which the two databases differ.
type dialect struct {
	name       string
	versionSQL string
	tablesSQL  string // names of all tables
	nowSQL     string // empty: the clock of this process
	now        string // for /*now*/
	lockRows   string // for /*lock*/
	skipLocked string // for /*lock skip*/
	lockShare  string // for /*lock share*/
	jsonEach   string // set-returning function over a JSON object: key, value
	text       string // type of text columns
	bytes      string // type of byte columns
	lines      bool   // nodes can reach each other through the database (Line)
	cachesText bool   // the driver caches prepared statements by their text
	putsOff    bool   // several statements can be sent at once
	open       func(Options) (write, read *sql.DB, err error)
	retryable  func(error) bool // deadlock, serialization failure, busy: run it again
	away       func(error) bool // the connection or the server is gone
	full       func(error) bool // no space
	lockMigr   string           // taken in the migration's transaction
	parameter  *regexp.Regexp   // matches what is a parameter in the common text; nil where it is one here
}

func dialectFor(u string) (*dialect, error) {
	switch {
	case strings.HasPrefix(u, "postgres://"), strings.HasPrefix(u, "postgresql://"):
		return postgres(), nil
	case strings.HasPrefix(u, "sqlite:"), u != "" && !strings.Contains(u, "://"):
		return sqliteDialect(), nil
	default:
		return nil, ci.Errorf(ci.ErrInvalid, "database URL %q: use sqlite:PATH or postgres://…", redactURL(u))
	}
}

// redactURL hides the password of a database URL.
func redactURL(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "(not a URL)"
	}
	return u.Redacted()
}

func postgres() *dialect {
	return &dialect{
		name:       "postgres",
		versionSQL: "SHOW server_version",
		tablesSQL:  "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() ORDER BY 1",
		nowSQL:     "SELECT now_us()",
		now:        "now_us()",
		lockRows:   "FOR UPDATE",
		skipLocked: "FOR UPDATE SKIP LOCKED",
		lockShare:  "FOR KEY SHARE",
		jsonEach:   "jsonb_each",
		text:       `TEXT COLLATE "C"`,
		bytes:      "BYTEA",
		cachesText: true,
		lines:      true,
		putsOff:    true,
		lockMigr:   "SELECT pg_advisory_xact_lock(7017280452245743464)",
		open: func(o Options) (*sql.DB, *sql.DB, error) {
			cfg, err := pgConfig(o.URL)
			if err != nil {
				return nil, nil, err
			}
			n := o.MaxConns
			if n == 0 {
				n = 16
			}
			// Statements find rows by keys and lists of keys. Their plans must not depend
			// on statistics, which know nothing of a table that fills and empties in
			// seconds: otherwise a list is joined by reading the whole table. They are
			// made once for each connection (TestNoStatementReadsAGrowingTableWhole).
			maps.Copy(cfg.RuntimeParams, map[string]string{
				"plan_cache_mode": "force_generic_plan", "random_page_cost": "0.1", "enable_hashjoin": "off", "enable_mergejoin": "off",
			})
			pool := func(n int) *sql.DB {
				db := stdlib.OpenDB(*cfg)
				db.SetMaxOpenConns(n)
				db.SetMaxIdleConns(n)
				return db
			}
			return pool(max(n/2, 1)), pool(max(n-n/2, 1)), nil
		},
		retryable: func(err error) bool {
			var pg *pgconn.PgError
			return errors.As(err, &pg) && (pg.Code == "40P01" || pg.Code == "40001")
		},
		away: func(err error) bool {
			if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
				return strings.HasPrefix(pg.Code, "08") || strings.HasPrefix(pg.Code, "57P") || pg.Code == "53300" || pg.Code == "25006"
			}
			return disconnected(err)
		},
		full: func(err error) bool {
			var pg *pgconn.PgError
			return errors.As(err, &pg) && pg.Code == "53100"
		},
	}
}

func pgConfig(url string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "database URL: %s", "it cannot be parsed").WithCause(err)
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 5 * time.Second
	}
	cfg.RuntimeParams["application_name"] = "forgeci"
	cfg.RuntimeParams["idle_in_transaction_session_timeout"] = "30000"
	return cfg, nil
}

func disconnected(err error) bool {
	var connect *pgconn.ConnectError
	var op net.Error
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.As(err, &connect) || errors.As(err, &op) || errors.Is(err, sql.ErrConnDone) || errors.Is(err, pgconn.ErrConnClosed) ||
		pgconn.SafeToRetry(err)
}

func sqliteDialect() *dialect {
	code := func(err error) (int, bool) {
		var e *sqlite.Error
		if !errors.As(err, &e) {
			return 0, false
		}
		return e.Code(), true
	}
	return &dialect{
		name:       "sqlite",
		versionSQL: "SELECT sqlite_version()",
		tablesSQL:  "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY 1",
		jsonEach:   "json_each",
		now:        "0",
		text:       "TEXT",
		bytes:      "BLOB",
		parameter:  regexp.MustCompile(`\$(\d+)`),
		open:       openSQLite,
		retryable: func(err error) bool {
			c, ok := code(err)
			return ok && (c&0xff == sqlite3.SQLITE_BUSY || c&0xff == sqlite3.SQLITE_LOCKED)
		},
		away: func(err error) bool {
			c, ok := code(err)
			return ok && (c&0xff == sqlite3.SQLITE_IOERR || c&0xff == sqlite3.SQLITE_CANTOPEN || c&0xff == sqlite3.SQLITE_READONLY)
		},
		full: func(err error) bool {
			c, ok := code(err)
			return ok && c&0xff == sqlite3.SQLITE_FULL
		},
	}
}

func openSQLite(o Options) (*sql.DB, *sql.DB, error) {
	path := strings.TrimPrefix(o.URL, "sqlite:")
	common := "_pragma=busy_timeout(10000)&_pragma=foreign_keys(1)&_pragma=synchronous(FULL)&_pragma=temp_store(MEMORY)"
	if path == ":memory:" {
		db, err := sql.Open("sqlite", "file::memory:?"+common)
		if err != nil {
			return nil, nil, err
		}
		db.SetMaxOpenConns(1)
		db.SetMaxIdleConns(1)
		db.SetConnMaxIdleTime(0)
		db.SetConnMaxLifetime(0)
		return db, db, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, nil, ci.Errorf(ci.ErrUnavailable, "the database's directory cannot be made: %v", err)
	}
	// What the database holds is its owner's alone, whoever may enter the directory;
	// the files beside it take its mode over.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, ci.Errorf(ci.ErrUnavailable, "the database cannot be opened: %v", err)
	}
	if err := f.Close(); err != nil {
		return nil, nil, ci.Errorf(ci.ErrUnavailable, "the database cannot be opened: %v", err)
	}
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?" + common + "&_pragma=journal_mode(WAL)&_pragma=wal_autocheckpoint(1000)"
	write, err := sql.Open("sqlite", dsn+"&_txlock=immediate")
	if err != nil {
		return nil, nil, err
	}
	write.SetMaxOpenConns(1)
	write.SetMaxIdleConns(1)
	read, err := sql.Open("sqlite", dsn+"&_pragma=query_only(1)")
	if err != nil {
		return nil, nil, errors.Join(err, write.Close())
	}
	// As many as are ever open stay open: a new one has every statement to prepare.
	read.SetMaxOpenConns(4)
	read.SetMaxIdleConns(4)
	return write, read, nil
}

// rewrite turns the common text of a statement into this dialect's.
func (d *dialect) rewrite(text string) string {
	text = strings.ReplaceAll(text, "/*lock skip*/", d.skipLocked)
	text = strings.ReplaceAll(text, "/*lock share*/", d.lockShare)
	text = strings.ReplaceAll(text, "/*lock*/", d.lockRows)
	text = strings.ReplaceAll(text, "/*now*/", d.now)
	text = strings.ReplaceAll(text, "json_each(", d.jsonEach+"(")
	if d.parameter != nil {
		text = d.parameter.ReplaceAllString(text, "?$1")
	}
	return text
}

// rewriteDDL turns the common text of a migration into this dialect's statements.
func (d *dialect) rewriteDDL(text string) []string {
	var b strings.Builder
	var own []string
	flush := func() {
		for s := range strings.SplitSeq(b.String(), ";\n") {
			if s = strings.TrimSpace(s); s != "" {
				own = append(own, s)
			}
		}
		b.Reset()
	}
	for line := range strings.Lines(text) {
		if pg, ok := strings.CutPrefix(line, "--pg:"); ok {
			flush()
			if d.name == "postgres" {
				own = append(own, strings.TrimSuffix(strings.TrimSpace(pg), ";"))
			}
			continue
		}
		if i := strings.Index(line, "--"); i >= 0 {
			line = strings.TrimRight(line[:i], " ") + "\n"
		}
		b.WriteString(line)
	}
	flush()
	word := regexp.MustCompile(`\b(TEXT|BYTES)\b`)
	for i, s := range own {
		if strings.HasPrefix(s, "CREATE TABLE") {
			own[i] = word.ReplaceAllStringFunc(s, func(w string) string {
				if w == "TEXT" {
					return d.text
				}
				return d.bytes
			})
		}
	}
	return own
}
