package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

const (
	// hugeLog is 1 GiB in whole lines of 100 bytes.
	hugeLines = (1<<30 + 99) / 100
	hugeLog   = hugeLines * 100
	tailLines = 1000
)

// log1GiB lets a simulated runner write a log of 1 GiB and measures how long a
// reader waits for its last lines: of the log that is being written, of the
// archive, and of the archive after a restart of the server.
func (b *bench) log1GiB(ctx context.Context) (err error) {
	limit := "--log-limit=" + strconv.Itoa(2<<30)
	w, err := b.open(ctx, sqlite, limit)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	repo, err := w.repo(ctx, "log-1gib")
	if err != nil {
		return err
	}
	dir, err := w.tree(map[string]string{workflowFile: trivial})
	if err != nil {
		return err
	}
	digest, err := w.upload(ctx, repo, dir)
	if err != nil {
		return err
	}
	run, err := w.submit(ctx, repo, digest, "huge")
	if err != nil {
		return err
	}
	s, err := w.simulate(ctx, "writer")
	if err != nil {
		return err
	}
	t, err := s.claim(ctx)
	if err != nil || t == nil {
		return errors.Join(err, fmt.Errorf("no ticket for run %s", run))
	}
	if err := s.begin(ctx, t); err != nil {
		return err
	}
	begun := time.Now()
	if err := s.flood(ctx, t); err != nil {
		return err
	}
	b.logf("log_1gib: written in %s", time.Since(begun).Round(time.Millisecond))
	live, err := w.tails(ctx, t.Lease.Job, false)
	if err != nil {
		return err
	}
	if err := s.complete(ctx, t, hugeLog); err != nil {
		return err
	}
	begun = time.Now()
	err = w.until(ctx, 2*time.Minute, "the log to be sealed", func() (bool, error) {
		job, err := w.client.Job(ctx, t.Lease.Job)
		return err == nil && job.Attempt[0].LogSealed, err
	})
	if err != nil {
		return err
	}
	b.logf("log_1gib: sealed after %s", time.Since(begun).Round(time.Millisecond))
	sealed, err := w.tails(ctx, t.Lease.Job, true)
	if err != nil {
		return err
	}
	mem, err := w.server.memory()
	if err != nil {
		return err
	}
	if err := w.server.stop(); err != nil {
		return err
	}
	if err := w.serve(ctx, limit); err != nil {
		return err
	}
	fresh, err := w.tails(ctx, t.Lease.Job, true)
	if err != nil {
		return err
	}
	b.logf("log_1gib: slowest of 5 while written %.1f ms, sealed %.1f ms, after a restart %.1f ms; server peak %.0f MiB",
		ms(live), ms(sealed), ms(fresh), mib(mem.peak))
	line := struct {
		Bench string  `json:"bench"`
		Open  float64 `json:"open_tail_ms"`
	}{"log_1gib", ms(max(live, sealed, fresh))}
	return b.report(line, "log_1gib", goal{name: "open_tail_ms", got: line.Open, target: 500, floor: 1000})
}

// flood appends the whole log, each request as large as it may be.
func (s *simulated) flood(ctx context.Context, t *protocol.Ticket) error {
	const perChunk = protocol.MaxChunk / 2 / 100 // lines
	const perBody = 7
	body, sequence, line, renewed := []byte(nil), int64(0), 1, time.Now()
	data := make([]byte, 0, perChunk*100)
	for line <= hugeLines {
		body = body[:0]
		end := int64(0)
		for range perBody {
			begin := line
			data = data[:0]
			for ; line <= hugeLines && line < begin+perChunk; line++ {
				data = numbered(data, line)
			}
			if len(data) == 0 {
				break
			}
			sequence++
			body = protocol.AppendChunk(body, protocol.Chunk{
				Stream: protocol.Stdout, Sequence: sequence, Offset: int64(begin-1) * 100, Data: data,
			})
			end = int64(line-1) * 100
		}
		reply, err := s.client.AppendLog(ctx, t.Lease, body)
		if err != nil {
			return err
		}
		if len(reply.Streams) != 1 || reply.Streams[0].Length != end || reply.Full {
			return fmt.Errorf("%d bytes of log were acknowledged as %v", end, reply.Streams)
		}
		if time.Since(renewed) > s.ttl/3 {
			renewed = time.Now()
			if _, err := s.client.Heartbeat(ctx, protocol.Heartbeat{Session: s.session, Leases: []ci.LeaseRef{t.Lease}}); err != nil {
				return err
			}
		}
	}
	return nil
}

// tails reads the last lines a few times and returns the slowest.
func (w *world) tails(ctx context.Context, job ci.JobID, sealed bool) (time.Duration, error) {
	want := make([]byte, 0, tailLines*100)
	for n := hugeLines - tailLines + 1; n <= hugeLines; n++ {
		want = numbered(want, n)
	}
	var slowest time.Duration
	for range 5 {
		begun := time.Now()
		log, err := w.client.JobLog(ctx, job, protocol.LogQuery{Tail: tailLines})
		if err != nil {
			return 0, err
		}
		text, err := io.ReadAll(log)
		took := time.Since(begun)
		err = errors.Join(err, log.Close())
		switch {
		case err != nil:
			return 0, err
		case string(text) != string(want) || log.Sealed != sealed || log.Total != hugeLines:
			return 0, fmt.Errorf("the last %d lines of %s are not what was written (%d bytes, sealed %t, %d lines in all)",
				tailLines, job, len(text), log.Sealed, log.Total)
		}
		slowest = max(slowest, took)
	}
	return slowest, nil
}
