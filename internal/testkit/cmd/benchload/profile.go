package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"forgeci/internal/testkit"
)

// adminArgs let a process serve its profiles when they are wanted.
func (b *bench) adminArgs(p *string) ([]string, error) {
	if b.profiles == "" {
		return nil, nil
	}
	address, err := testkit.FreeAddress()
	*p = address
	return []string{"--admin-listen", address}, err
}

// postgresSettings let PostgreSQL count what each statement costs when profiles
// are wanted.
func (b *bench) postgresSettings() []string {
	if b.profiles == "" {
		return nil
	}
	return []string{"shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track_utility=on"}
}

// statements writes what each statement of the world's database has cost since
// the function was called, the dearest first, when the function that it returns
// is called.
func (w *world) statements(ctx context.Context, name string) (write func() error, err error) {
	if w.b.profiles == "" {
		return func() error { return nil }, nil
	}
	db, err := pgx.Connect(ctx, w.database)
	if err != nil {
		return nil, err
	}
	if _, err := db.Exec(ctx, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements"); err != nil {
		return nil, errors.Join(err, db.Close(ctx))
	}
	if _, err := db.Exec(ctx, "SELECT pg_stat_statements_reset()"); err != nil {
		return nil, errors.Join(err, db.Close(ctx))
	}
	return func() (err error) {
		defer func() { err = errors.Join(err, db.Close(ctx)) }()
		var out strings.Builder
		for _, query := range []string{
			`SELECT round(total_exec_time::numeric, 1) AS "total ms", calls, rows, shared_blks_hit AS blocks, wal_bytes AS "WAL bytes",
				left(regexp_replace(query, '\s+', ' ', 'g'), 200) AS statement
				FROM pg_stat_statements ORDER BY total_exec_time DESC`,
			`SELECT relname AS table, n_live_tup AS rows, n_dead_tup AS dead, n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_hot_upd AS "updated in place",
				n_tup_del AS deleted, autovacuum_count AS vacuums, pg_relation_size(relid) AS bytes, pg_indexes_size(relid) AS "bytes of indexes"
				FROM pg_stat_user_tables ORDER BY n_tup_upd + n_tup_ins DESC`,
		} {
			if err := table(ctx, db, query, &out); err != nil {
				return err
			}
		}
		return os.WriteFile(filepath.Join(w.b.profiles, name+"-statements.tsv"), []byte(out.String()), 0o644)
	}, nil
}

// table writes the result of a query with tabs.
func table(ctx context.Context, db *pgx.Conn, query string, out *strings.Builder) error {
	rows, err := db.Query(ctx, query, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return err
	}
	defer rows.Close()
	for i, f := range rows.FieldDescriptions() {
		if i > 0 {
			out.WriteByte('\t')
		}
		out.WriteString(f.Name)
	}
	out.WriteByte('\n')
	for rows.Next() {
		for i, v := range rows.RawValues() {
			if i > 0 {
				out.WriteByte('\t')
			}
			out.Write(v)
		}
		out.WriteByte('\n')
	}
	return rows.Err()
}

// profile takes the CPU profiles of the world's processes for a while. The
// function that it returns waits for them.
func (w *world) profile(ctx context.Context, name string, d time.Duration) (wait func()) {
	if w.b.profiles == "" {
		return func() {}
	}
	names := map[string]string{w.server.admin: name + "-server"}
	for i, r := range w.runners {
		names[r.admin] = name + "-runner" + strconv.Itoa(i+1)
	}
	done := make(chan error)
	for address, file := range names {
		go func() { done <- w.b.take(ctx, address, filepath.Join(w.b.profiles, file+".pprof"), d) }()
	}
	return func() {
		for range names {
			if err := <-done; err != nil {
				w.b.logf("profile: %v", err)
			}
		}
	}
}

func (b *bench) take(ctx context.Context, address, file string, d time.Duration) error {
	url := fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", address, int(d.Seconds()))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	for try := 0; err != nil && try < 50; try++ { // it may just be starting
		if idle(ctx, 100*time.Millisecond) != nil {
			break
		}
		resp, err = http.DefaultClient.Do(req)
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %w", url, resp.Status, err)
	}
	return os.WriteFile(file, data, 0o644)
}
