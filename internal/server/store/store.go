// Package store holds all SQL: one text for SQLite and PostgreSQL, the schema's
// migrations, and typed statements. It decides nothing; engine does.
//
// A transaction does no I/O but its own statements. Statements that lock rows
// take them in the order session, run, queue, lease, job, source, repo, org, each
// sorted by its ID; the database's time is read after the locks (Tx.Now).
package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"forgeci/internal/ci"
)

// Options says how to open a store.
type Options struct {
	// URL is "sqlite:PATH" (or a bare path), "sqlite::memory:", or "postgres://…".
	URL string
	// Now overrides the database's time, microseconds since 1970, for tests and
	// simulation that own the clock. nil means: PostgreSQL's clock_timestamp(),
	// on SQLite the clock of this process.
	Now func() int64
	// MaxConns bounds PostgreSQL connections; 0 means 16.
	MaxConns int
	Log      *slog.Logger
	// Fault, when set, is asked at each Point of each transaction; an error it
	// returns is what the database says there. For tests and simulation that own
	// the failures, as Now is for those that own the clock.
	Fault func(Point) error
}

// Point is a moment in a transaction's life at which Options.Fault is asked.
type Point string

// Points.
const (
	// PointRead is before a transaction that only reads.
	PointRead Point = "read"
	// PointBegin is before a transaction that writes.
	PointBegin Point = "begin"
	// PointCommit is before its commit: an error rolls it back.
	PointCommit Point = "commit"
	// PointCommitted is behind its commit: an error leaves it stored.
	PointCommitted Point = "committed"
)

// ErrSerialization says that a transaction has to be run again because of another
// one. Options.Fault returns it for what the database says to a deadlock's victim.
const ErrSerialization again = "the transaction has to be run again"

type again string

func (a again) Error() string { return string(a) }

// Store is an open database. It is safe for concurrent use. On SQLite all write
// transactions pass through one connection, one after the other.
type Store struct {
	d     *dialect
	url   string
	write *sql.DB
	read  *sql.DB
	now   func() int64
	fault func(Point) error
	log   *slog.Logger

	stmts    statements
	prepared map[prepKey]*sql.Stmt // complete when Open returns
}

type prepKey struct {
	db   *sql.DB
	name string
}

// Open connects, checks that the database is ours and not newer than this
// build, and brings the schema up to date; when several servers start at once
// one migrates and the others wait.
func Open(ctx context.Context, o Options) (*Store, error) {
	d, err := dialectFor(o.URL)
	if err != nil {
		return nil, err
	}
	stmts, err := loadStatements(d)
	if err != nil {
		return nil, err
	}
	s := &Store{d: d, url: o.URL, now: o.Now, fault: o.Fault, log: o.Log, stmts: stmts, prepared: map[prepKey]*sql.Stmt{}}
	if s.write, s.read, err = d.open(o); err != nil {
		return nil, err
	}
	if err := s.migrate(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if err := s.prepare(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close closes all connections.
func (s *Store) Close() error {
	err := s.write.Close()
	if s.read != s.write {
		err = errors.Join(err, s.read.Close())
	}
	return err
}

// Engine returns "sqlite" or "postgres" and the server's version.
func (s *Store) Engine(ctx context.Context) (name, version string, err error) {
	row := s.read.QueryRowContext(ctx, s.d.versionSQL)
	if err := row.Scan(&version); err != nil {
		return "", "", s.wrap(err)
	}
	return s.d.name, version, nil
}

// Ping says whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	return s.wrap(s.read.PingContext(ctx))
}

// Tx is one transaction, or what Read hands to its function.
type Tx struct {
	s  *Store
	tx *sql.Tx // nil in Read
	db *sql.DB

	conn    *sql.Conn // of a transaction that puts statements off, else nil
	pending []queued
	failed  error // of what may be put off: the transaction is not committed
}

// How often a transaction is tried when the database asks for it (deadlock,
// serialization failure, busy).
const maxTries = 8

// Write runs fn in one transaction and commits it. When the database chooses the
// transaction as a deadlock victim or cannot serialise it, nothing was stored
// and fn runs again, up to maxTries times: fn must not have effects outside the
// transaction. When the connection breaks during COMMIT the outcome is unknown;
// the error is ErrUnavailable and the caller's own idempotency decides.
func (s *Store) Write(ctx context.Context, fn func(*Tx) error) error {
	for try := 1; ; try++ {
		err := s.once(ctx, fn)
		if err == nil || try == maxTries || !s.retryable(err) {
			return s.wrap(err)
		}
		if err := sleep(ctx, time.Duration(try)*time.Duration(1+rand.Int64N(int64(4*time.Millisecond)))); err != nil {
			return s.wrap(err)
		}
	}
}

// Read runs fn on connections that only read: each statement sees what was
// committed when it began, on both databases, and two statements need not see
// the same. There is no transaction around them: its begin and end cost more
// than the one statement that most readers have.
func (s *Store) Read(ctx context.Context, fn func(*Tx) error) error {
	if err := s.failAt(PointRead); err != nil {
		return s.wrap(err)
	}
	return s.wrap(fn(&Tx{s: s, db: s.read}))
}

func (s *Store) once(ctx context.Context, fn func(*Tx) error) (err error) {
	if err := s.failAt(PointBegin); err != nil {
		return err
	}
	t, end, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	tx := t.tx
	defer func() {
		if p := recover(); p != nil {
			_ = tx.Rollback()
			panic(p)
		}
	}()
	err = fn(t)
	if err == nil {
		err = t.flush(ctx)
	}
	if err == nil {
		err = t.failed
	}
	if err != nil {
		_ = tx.Rollback()
		return err
	}
	if err := s.failAt(PointCommit); err != nil {
		_ = tx.Rollback()
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	return s.failAt(PointCommitted)
}

// begin begins a transaction; end gives its connection back.
func (s *Store) begin(ctx context.Context) (t *Tx, end func(), err error) {
	if !s.d.putsOff {
		tx, err := s.write.BeginTx(ctx, nil)
		return &Tx{s: s, tx: tx, db: s.write}, func() {}, err
	}
	const most = 4 // connections that have broken while they were idle
	for try := 1; ; try++ {
		conn, err := s.write.Conn(ctx)
		if err != nil {
			return nil, nil, err
		}
		tx, err := conn.BeginTx(ctx, nil)
		if err == nil {
			return &Tx{s: s, tx: tx, db: s.write, conn: conn}, func() { _ = conn.Close() }, nil
		}
		_ = conn.Close()
		if try == most || !errors.Is(err, driver.ErrBadConn) {
			return nil, nil, err
		}
	}
}

func (s *Store) failAt(p Point) error {
	if s.fault == nil {
		return nil
	}
	return s.fault(p)
}

func (s *Store) retryable(err error) bool {
	return errors.Is(err, ErrSerialization) || s.d.retryable(err)
}

// Now returns the database's time in microseconds, as it is at this moment: call
// it after the transaction holds its locks, and once.
func (t *Tx) Now(ctx context.Context) (int64, error) {
	if now, ok := t.s.ownNow(); ok {
		return now, nil
	}
	row := t.db.QueryRowContext
	if t.tx != nil {
		row = t.tx.QueryRowContext
	}
	var now int64
	err := row(ctx, t.s.d.nowSQL).Scan(&now)
	return now, err
}

// ownNow returns the time where it is not a statement's to read.
func (s *Store) ownNow() (now int64, ok bool) {
	switch {
	case s.now != nil:
		return s.now(), true
	case s.d.nowSQL == "":
		return time.Now().UnixMicro(), true
	default:
		return 0, false
	}
}

// stmt returns the prepared statement, on this transaction's connection if there
// is a transaction.
func (t *Tx) stmt(ctx context.Context, name string) (*sql.Stmt, error) {
	p := t.s.prepared[prepKey{t.db, name}]
	if p == nil {
		return nil, fmt.Errorf("store: no statement %s", name)
	}
	if t.tx == nil {
		return p, nil
	}
	return t.tx.StmtContext(ctx, p), nil
}

// prepare prepares every statement where the driver does not cache them by their
// text. It happens before the first transaction: a transaction holds the only
// connection that writes, and could not prepare beside itself.
func (s *Store) prepare(ctx context.Context) error {
	if s.d.cachesText {
		return nil
	}
	for _, db := range []*sql.DB{s.write, s.read} {
		for name, text := range s.stmts {
			if s.prepared[prepKey{db, name}] != nil {
				continue
			}
			st, err := db.PrepareContext(ctx, text)
			if err != nil {
				return s.wrap(fmt.Errorf("prepare %s: %w", name, err))
			}
			s.prepared[prepKey{db, name}] = st
		}
	}
	return nil
}

func (t *Tx) exec(ctx context.Context, name string, args ...any) (int64, error) {
	if t.tx == nil {
		return 0, fmt.Errorf("store: %s writes outside a transaction", name)
	}
	if err := t.flush(ctx); err != nil {
		return 0, err
	}
	var res sql.Result
	var err error
	if t.s.d.cachesText {
		res, err = t.tx.ExecContext(ctx, t.s.stmts[name], args...)
	} else {
		var st *sql.Stmt
		if st, err = t.stmt(ctx, name); err != nil {
			return 0, err
		}
		res, err = st.ExecContext(ctx, args...)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return res.RowsAffected()
}

type scanner interface{ Scan(dest ...any) error }

// query runs a statement and scans each row.
func query[T any](ctx context.Context, t *Tx, name string, scan func(scanner, *T) error, args ...any) ([]T, error) {
	if len(t.pending) > 0 {
		return queryBehind(ctx, t, name, scan, args)
	}
	var rows *sql.Rows
	var err error
	switch {
	case t.s.d.cachesText && t.tx == nil:
		rows, err = t.db.QueryContext(ctx, t.s.stmts[name], args...)
	case t.s.d.cachesText:
		rows, err = t.tx.QueryContext(ctx, t.s.stmts[name], args...)
	default:
		var st *sql.Stmt
		if st, err = t.stmt(ctx, name); err != nil {
			return nil, err
		}
		rows, err = st.QueryContext(ctx, args...)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	defer func() { _ = rows.Close() }()
	var out []T
	for rows.Next() {
		var v T
		if err := scan(rows, &v); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, v)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out, nil
}

// one is query for at most one row; ok is false when there is none.
func one[T any](ctx context.Context, t *Tx, name string, scan func(scanner, *T) error, args ...any) (v T, ok bool, err error) {
	rows, err := query(ctx, t, name, scan, args...)
	if err != nil || len(rows) == 0 {
		return v, false, err
	}
	return rows[0], true, nil
}

func scanString(r scanner, v *string) error { return r.Scan(v) }
func scanInt(r scanner, v *int64) error     { return r.Scan(v) }

// wrap turns driver errors into *ci.Error and leaves others as they are.
func (s *Store) wrap(err error) error {
	if err == nil {
		return nil
	}
	var known *ci.Error
	if errors.As(err, &known) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if s.d.full(err) {
		return ci.Errorf(ci.ErrUnavailable, "the database has no space left: free space on its volume; nothing of this request was stored").WithCause(err)
	}
	if s.retryable(err) || s.d.away(err) || strings.Contains(err.Error(), "sql: database is closed") {
		return ci.Errorf(ci.ErrUnavailable, "the database is not available; try again").WithCause(err)
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// PrepareAll prepares every statement once and returns what the database says
// against them: a check for tests and `server --check`.
func (s *Store) PrepareAll(ctx context.Context) error {
	var all error
	for name, text := range s.stmts {
		st, err := s.write.PrepareContext(ctx, text)
		if err != nil {
			all = errors.Join(all, fmt.Errorf("%s: %w", name, err))
			continue
		}
		_ = st.Close()
	}
	return all
}
