package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

// queued is a statement whose result nobody waits for: PostgreSQL is sent it with
// the next one that somebody waits for, or with the commit. Half of a merge's
// statements are such, and most of what a statement costs is its way there and
// back.
type queued struct {
	name string
	args []any
	rows int64  // how many it has to change, -1 for any number
	what string // of what
}

// later runs a statement that changes rows, at the latest before the commit; any
// statement behind it sees what it did. When rows is not negative and it changes
// another number of them, the transaction fails.
func (t *Tx) later(ctx context.Context, name string, rows int, what string, args ...any) error {
	q := queued{name, args, int64(rows), what}
	if t.conn != nil {
		t.pending = append(t.pending, q)
		return nil
	}
	n, err := t.exec(ctx, name, args...)
	if err == nil {
		err = q.check(n)
	}
	return t.fail(err)
}

// fail remembers the first failure of a statement that may be put off: whoever
// asked for the one it was sent with may take it for an answer of its own.
func (t *Tx) fail(err error) error {
	if t.failed == nil {
		t.failed = err
	}
	return err
}

func (q queued) check(n int64) error {
	if q.rows < 0 {
		return nil
	}
	return changed(n, int(q.rows), q.what, nil)
}

// flush runs what is pending.
func (t *Tx) flush(ctx context.Context) error {
	if len(t.pending) == 0 {
		return nil
	}
	return t.sendWith(ctx, func(*pgx.Batch) {}, func(pgx.BatchResults) error { return nil })
}

// sendWith sends what is pending, and what add adds to it, in one go; read takes
// the results of the latter.
func (t *Tx) sendWith(ctx context.Context, add func(*pgx.Batch), read func(pgx.BatchResults) error) error {
	pending := t.pending
	t.pending = nil
	return t.fail(t.conn.Raw(func(c any) (err error) {
		conn, ok := c.(*stdlib.Conn)
		if !ok {
			return driver.ErrBadConn
		}
		var b pgx.Batch
		for _, q := range pending {
			b.Queue(t.s.stmts[q.name], q.args...)
		}
		add(&b)
		results := conn.Conn().SendBatch(ctx, &b)
		defer func() { err = errors.Join(err, results.Close()) }()
		for _, q := range pending {
			tag, err := results.Exec()
			if err == nil {
				err = q.check(tag.RowsAffected())
			}
			if err != nil {
				return fmt.Errorf("%s: %w", q.name, err)
			}
		}
		return read(results)
	}))
}

// queryBehind runs a query behind what is pending and scans each row.
func queryBehind[T any](ctx context.Context, t *Tx, name string, scan func(scanner, *T) error, args []any) (out []T, err error) {
	err = t.sendWith(ctx, func(b *pgx.Batch) { b.Queue(t.s.stmts[name], args...) }, func(r pgx.BatchResults) error {
		rows, err := r.Query()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		defer rows.Close()
		for rows.Next() {
			var v T
			if err := scan(rows, &v); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			out = append(out, v)
		}
		if err := rows.Err(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
