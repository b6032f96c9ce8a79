package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// idleFleet measures what a thousand runners cost that wait for work.
func (b *bench) idleFleet(ctx context.Context) (err error) {
	const runners = 1000
	const measured = 60 * time.Second
	w, err := b.open(ctx, postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	fleet, err := w.fleet(ctx, runners)
	if err != nil {
		return err
	}
	polling, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	stop := func() { cancel(); wg.Wait() }
	defer stop()
	var broken faults
	for i, s := range fleet {
		wg.Go(func() {
			// Real runners do not all start in one moment.
			if idle(polling, time.Duration(i)*5*time.Millisecond) != nil {
				return
			}
			for polling.Err() == nil {
				t, err := s.claim(polling)
				switch {
				case polling.Err() != nil:
				case err != nil:
					broken.add(err)
				case t != nil:
					broken.add(fmt.Errorf("a ticket for %s that nobody submitted", t.Lease.Job))
				}
			}
		})
	}
	if err := idle(ctx, runners*5*time.Millisecond+time.Second); err != nil {
		return err
	}
	db, err := pgx.Connect(ctx, w.database)
	if err != nil {
		return err
	}
	defer db.Close(context.WithoutCancel(ctx)) // it was only read from
	// What the registration left to do for autovacuum is done before.
	if _, err := db.Exec(ctx, "VACUUM ANALYZE"); err != nil {
		return err
	}
	if err := idle(ctx, reported); err != nil {
		return err
	}
	before, err := rowsWritten(ctx, db)
	if err != nil {
		return err
	}
	cpu, err := w.server.cpu()
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := idle(ctx, measured); err != nil {
		return err
	}
	used, err := w.server.cpu()
	took := time.Since(begun)
	if err != nil {
		return err
	}
	mem, err := w.server.memory()
	if err != nil {
		return err
	}
	if err := idle(ctx, reported); err != nil {
		return err
	}
	after, err := rowsWritten(ctx, db)
	if err != nil {
		return err
	}
	page, err := w.client.Runners(ctx, "")
	if err != nil {
		return err
	}
	for _, r := range page.Items {
		if r.Status != "online" {
			broken.add(fmt.Errorf("runner %s is %s", r.Name, r.Status))
		}
	}
	if n := broken.count.Load(); n > 0 {
		return fmt.Errorf("%d faults, the first: %s", n, broken.text())
	}
	b.logf("idle_fleet: the server holds %d polls in %.1f MiB anonymous memory", runners, mib(mem.anon))
	line := struct {
		Bench   string  `json:"bench"`
		Runners int     `json:"runners"`
		CPU     float64 `json:"cpu_percent"`
		Writes  int64   `json:"db_writes"`
	}{"idle_fleet", runners, round1(100 * float64(used-cpu) / float64(took)), after - before}
	return b.report(line, "idle_fleet",
		goal{name: "cpu_percent", got: line.CPU, target: 5, floor: 10}, goal{name: "db_writes", got: float64(line.Writes)})
}

// reported is how long an idle backend of PostgreSQL may keep what it counted.
const reported = 11 * time.Second

// rowsWritten is PostgreSQL's own count of the rows written in the server's tables;
// its own statistics are rows too, and it writes them when it likes.
func rowsWritten(ctx context.Context, db *pgx.Conn) (n int64, err error) {
	err = db.QueryRow(ctx,
		"SELECT COALESCE(SUM(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_user_tables").Scan(&n)
	return n, err
}
