package store

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"forgeci/internal/testkit"
)

// growing names the tables that grow with use.
func growing() []string {
	return []string{
		"run", "job", "job_need", "attempt", "lease", "step", "queue", "occupancy", "idempotency", "audit", "log", "log_extent",
		"log_object", "artifact", "artifact_part", "artifact_binding", "source", "session",
	}
}

// mayRead says why a statement may read a growing table whole.
func mayRead() map[string]string {
	const sweep = "once a sweep; the expiry has no index, for the sake of renewals"
	const jump = "once a jump of the clock"
	const few = "once a sweep, over a partial index of the few that it is for"
	return map[string]string{
		"LeasesExpired": sweep, "LeasesLongest": sweep, "LeasesShorten": sweep,
		"LeasesShift": jump, "QueueShift": jump,
		"ArtifactsAbandon": few, "LogsExpire": few, "LogsExpired": few, "LogsReleasing": few, "QueueClose": few, "QueueHeld": few,
		"QueueHeldOrgs": few, "QueueNextDue": few, "QueueOpenCounts": few, "SessionsPresent": few, "ShapesServed": few,
		"SessionsDoubt": few, "SessionsGone": few, "SessionsHeard": few,
		"ReadReadyCount": "counts", "ReadQueueByState": "counts unfinished runs", "ReadSessionsPresent": "counts present sessions",
		"ReadShapeServed": "counts present sessions", "ReadReadyJobs": "the queue, by age", "ReadOccupancy": "all taken slots", "ReadFleet": "counts all taken slots",
	}
}

// No statement of a call reads a growing table whole, whatever the statistics say:
// plans are made while tables are empty, and kept, or when they are full.
func TestNoStatementReadsAGrowingTableWhole(t *testing.T) {
	t.Parallel()
	s, err := Open(t.Context(), Options{URL: testkit.Postgres(t), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	wantIndexes(t, s, "empty")
	if err := fill(t.Context(), s.write, 4000); err != nil {
		t.Fatal(err)
	}
	wantIndexes(t, s, "full")
}

func wantIndexes(t *testing.T, s *Store, tables string) {
	t.Helper()
	// With an index, but without a condition for it, a table is read whole too.
	whole := regexp.MustCompile(`(Seq Scan|Index .*Scan .*) on (` + strings.Join(growing(), "|") + `)\b.*\n(\s+Index Cond)?`)
	for name, text := range s.stmts {
		if strings.HasPrefix(name, "Check") || mayRead()[name] != "" {
			continue
		}
		for pool, db := range map[string]*sql.DB{"write": s.write, "read": s.read} {
			plan, err := explain(t.Context(), db, name, text)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			for _, found := range whole.FindAllStringSubmatch(plan, -1) {
				if found[3] == "" {
					t.Errorf("%s with %s tables on connections that %s: %s\n%s", name, tables, pool, found[0], plan)
				}
			}
		}
	}
}

// fill puts n rows into each growing table and counts them.
func fill(ctx context.Context, db *sql.DB, n int) error {
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.ExecContext(ctx, "SET session_replication_role = replica"); err != nil { // no foreign keys
		return err
	}
	for _, table := range growing() {
		rows, err := c.QueryContext(ctx, "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = current_schema() AND table_name = $1", table)
		if err != nil {
			return err
		}
		var names, values []string
		for rows.Next() {
			var name, kind string
			if err := rows.Scan(&name, &kind); err != nil {
				return err
			}
			names, values = append(names, name), append(values, value(table, name, kind))
		}
		if err := rows.Err(); err != nil {
			return err
		}
		q := fmt.Sprintf("INSERT INTO %s (%s) SELECT %s FROM generate_series(1, %d) i", table, strings.Join(names, ", "), strings.Join(values, ", "), n)
		if _, err := c.ExecContext(ctx, q); err != nil {
			return fmt.Errorf("%s: %w", q, err)
		}
	}
	_, err = c.ExecContext(ctx, "ANALYZE")
	return err
}

// value is what a column has in row i: all of one tenant, in a common state.
func value(table, name, kind string) string {
	switch {
	case name == "org_id":
		return "'org'"
	case table == "log" && name == "state":
		return "CASE WHEN i % 10 = 0 THEN 'ended' ELSE 'sealed' END"
	case table == "artifact" && name == "state":
		return "'sealed'"
	case table == "session" && name == "state":
		return "'open'"
	case name == "state":
		return "CASE WHEN i % 10 = 0 THEN 'running' ELSE 'finished' END"
	case name == "conclusion" && table != "step":
		return "CASE WHEN i % 10 = 0 THEN '' ELSE 'success' END"
	case name == "trust":
		return "'trusted'"
	case name == "open":
		return "i % 2"
	case table == "run" && name == "finished_us":
		return "CASE WHEN i % 10 = 0 THEN 0 ELSE i END"
	case name == "dead_us":
		return "CASE WHEN i % 1000 = 0 THEN i ELSE 0 END"
	case name == "present":
		return "CASE WHEN i < 200 THEN 1 ELSE 0 END"
	case kind == "bigint":
		return "i"
	case kind == "bytea":
		return "''::bytea"
	default:
		return "'" + name + "' || i"
	}
}

// explain returns the plan that a connection keeps for the statement.
func explain(ctx context.Context, db *sql.DB, name, text string) (string, error) {
	c, err := db.Conn(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close()
	n := 0
	for _, m := range regexp.MustCompile(`\$(\d+)`).FindAllStringSubmatch(text, -1) {
		k, _ := strconv.Atoi(m[1])
		n = max(n, k)
	}
	args := ""
	if n > 0 {
		args = "(" + strings.TrimSuffix(strings.Repeat("NULL,", n), ",") + ")"
	}
	if _, err := c.ExecContext(ctx, fmt.Sprintf("PREPARE %q AS %s", name, text)); err != nil {
		return "", err
	}
	defer func() { _, _ = c.ExecContext(ctx, fmt.Sprintf("DEALLOCATE %q", name)) }()
	rows, err := c.QueryContext(ctx, fmt.Sprintf("EXPLAIN EXECUTE %q%s", name, args))
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var plan strings.Builder
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return "", err
		}
		plan.WriteString(line + "\n")
	}
	return plan.String(), rows.Err()
}
