package testkit

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// SetClock makes the clock by which a server with a PostgreSQL database judges
// everything jump by an amount, and run at a rate from then on.
func SetClock(t testing.TB, database string, jump time.Duration, rate float64) {
	t.Helper()
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, database)
	if err != nil {
		t.Fatalf("set the clock: %v", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // the statement has been answered
	const real = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
	var now, base int64
	if err := conn.QueryRow(ctx, "SELECT now_us(), "+real).Scan(&now, &base); err != nil {
		t.Fatalf("set the clock: %v", err)
	}
	if _, err := conn.Exec(ctx, fmt.Sprintf(
		"CREATE OR REPLACE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql VOLATILE AS 'SELECT %d + ((%s - %d) * %g)::bigint'",
		now+jump.Microseconds(), real, base, rate)); err != nil {
		t.Fatalf("set the clock: %v", err)
	}
}
