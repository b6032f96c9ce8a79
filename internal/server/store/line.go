package store

import (
	"context"
	"errors"
	"net"

	"github.com/jackc/pgx/v5"
)

// Line is a connection over which the nodes on one database tell each other
// things. It promises nothing: what is told reaches those that listen at that
// moment, the teller too. One goroutine at a time may use it.
type Line struct {
	conn *pgx.Conn
	s    *Store
}

// HasLines reports whether there are lines: PostgreSQL has them; an embedded
// database has one node.
func (s *Store) HasLines() bool { return s.d.lines }

// lineName is the channel of the nodes on one schema.
const lineName = "'forgeci_' || md5(current_schema())"

// MaxTold is how long a message may be, in bytes.
const MaxTold = 7500

// OpenLine opens a line. From then on nothing that is told is missed until the
// line breaks or is closed.
func (s *Store) OpenLine(ctx context.Context) (*Line, error) {
	cfg, err := pgConfig(s.url)
	if err != nil {
		return nil, err
	}
	// Messages are hints: their transactions write nothing that is worth a sync.
	cfg.RuntimeParams["synchronous_commit"] = "off"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, s.wrap(err)
	}
	l := &Line{conn: conn, s: s}
	var name string
	err = conn.QueryRow(ctx, "SELECT "+lineName).Scan(&name)
	if err == nil {
		_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{name}.Sanitize())
	}
	if err != nil {
		l.Close(ctx)
		return nil, s.wrap(err)
	}
	return l, nil
}

// Wait returns the next message. When ctx ends first, ok is false and the line
// may be used further; an error is a line that has broken.
func (l *Line) Wait(ctx context.Context) (message string, ok bool, err error) {
	n, err := l.conn.WaitForNotification(ctx)
	var timeout net.Error
	switch {
	case err == nil:
		return n.Payload, true, nil
	case ctx.Err() != nil && !l.conn.IsClosed() && (errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, ctx.Err())):
		return "", false, nil
	default:
		return "", false, l.s.wrap(err)
	}
}

// Tell sends a message of at most MaxTold bytes to all lines.
func (l *Line) Tell(ctx context.Context, message string) error {
	_, err := l.conn.Exec(ctx, "SELECT pg_notify("+lineName+", $1)", message)
	return l.s.wrap(err)
}

// Close ends the line.
func (l *Line) Close(ctx context.Context) {
	_ = l.conn.Close(ctx) // the server notices by itself
}
