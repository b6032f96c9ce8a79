package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// controlPlane drives the server by simulated runners over HTTP: at a fixed
// rate of submissions for a minute, then as fast as it goes.
func (b *bench) controlPlane(ctx context.Context) (err error) {
	const sessions, rate = 240, 231
	const warm, measured = 3 * time.Second, 60 * time.Second
	w, err := b.open(ctx, postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	p := &plant{w: w}
	if p.repo, err = w.repo(ctx, "control-plane"); err != nil {
		return err
	}
	dir, err := w.tree(map[string]string{workflowFile: trivial})
	if err != nil {
		return err
	}
	if p.digest, err = w.upload(ctx, p.repo, dir); err != nil {
		return err
	}
	fleet, err := w.fleet(ctx, sessions)
	if err != nil {
		return err
	}
	stop := p.run(ctx, fleet)
	defer stop()

	if err := p.sustain(ctx, rate, warm); err != nil {
		return err
	}
	cpu, err := w.server.cpu()
	if err != nil {
		return err
	}
	wait := w.profile(ctx, "control-plane", 20*time.Second)
	defer wait()
	statements, err := w.statements(ctx, "control-plane")
	if err != nil {
		return err
	}
	from := time.Now()
	if err := p.sustain(ctx, rate, measured); err != nil {
		return err
	}
	to := time.Now()
	used, err := w.server.cpu()
	if err != nil {
		return err
	}
	if err := statements(); err != nil {
		return err
	}
	b.logf("control_plane: at %d runs/s the server used %.0f%% of one processor, %.2f ms a job (load %s)", rate,
		100*float64(used-cpu)/float64(to.Sub(from)), ms(used-cpu)/(rate*measured.Seconds()), load())
	if err := p.settle(ctx); err != nil {
		return err
	}
	ceiling, err := p.ceiling(ctx, 3*time.Second, 12*time.Second)
	if err != nil {
		return err
	}
	if err := p.settle(ctx); err != nil {
		return err
	}
	stop()
	if err := p.verify(ctx); err != nil {
		return err
	}
	starts, dispatch := p.window(from, to)
	b.logf("control_plane: dispatch p50 %.1f ms, p90 %.1f ms, max %.1f ms; %d jobs in all; first error: %s",
		ms(quantile(dispatch, 0.5)), ms(quantile(dispatch, 0.9)), ms(quantile(dispatch, 1)), len(p.tickets), p.faults.text())
	line := struct {
		Bench    string  `json:"bench"`
		Database string  `json:"database"`
		Starts   float64 `json:"starts_per_s"`
		Dispatch float64 `json:"p99_dispatch_ms"`
		Errors   int64   `json:"errors"`
		Ceiling  float64 `json:"ceiling_per_s"`
	}{"control_plane", postgres, round1(float64(starts) / to.Sub(from).Seconds()), ms(quantile(dispatch, 0.99)), p.faults.count.Load(), round1(ceiling)}
	return b.report(line, "control_plane",
		goal{name: "starts_per_s", got: line.Starts, target: 230, floor: 230, atLeast: true},
		goal{name: "p99_dispatch_ms", got: line.Dispatch, target: 50, floor: 250},
		goal{name: "errors", got: float64(line.Errors)},
		goal{name: "ceiling_per_s", got: line.Ceiling, target: 800, floor: 400, atLeast: true})
}

// plant is a server under load, with a record of everything that was given out.
type plant struct {
	w      *world
	repo   protocol.Repo
	digest string
	faults faults

	submitted, started, completed atomic.Int64
	keys                          atomic.Int64

	mu      sync.Mutex
	tickets map[ci.RunID]ticket // guarded by mu until the fleet has ended
	created map[ci.RunID]bool   // guarded by mu until the fleet has ended
}

// ticket is a job that a simulated runner was given.
type ticket struct {
	job ci.JobID
	at  time.Time
	// readyAt is when the server's database says that the job was ready.
	readyAt time.Time
}

// run lets the fleet work until the function that it returns is called.
func (p *plant) run(ctx context.Context, fleet []*simulated) (stop func()) {
	p.tickets, p.created = map[ci.RunID]ticket{}, map[ci.RunID]bool{}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, s := range fleet {
		wg.Go(func() {
			for ctx.Err() == nil {
				t, err := s.claim(ctx)
				switch {
				case ctx.Err() != nil:
				case err != nil:
					p.faults.add(fmt.Errorf("claim: %w", err))
				case t != nil:
					p.given(t)
					if err := s.work(ctx, t); err != nil {
						p.faults.add(err)
					}
					p.completed.Add(1)
				}
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// given notes a ticket; a run of one job is given out once.
func (p *plant) given(t *protocol.Ticket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, twice := p.tickets[t.Lease.Run]; twice {
		p.faults.add(fmt.Errorf("the job of run %s was given out twice", t.Lease.Run))
	}
	p.tickets[t.Lease.Run] = ticket{job: t.Lease.Job, at: time.Now()}
	p.started.Add(1)
}

func (p *plant) submit(ctx context.Context) {
	run, err := p.w.submit(ctx, p.repo, p.digest, "load-"+strconv.FormatInt(p.keys.Add(1), 10))
	if err != nil {
		if ctx.Err() == nil {
			p.faults.add(fmt.Errorf("submit: %w", err))
		}
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.created[run] = true
	p.submitted.Add(1)
}

// sustain submits at a rate for a while, whether the server keeps up or not.
func (p *plant) sustain(ctx context.Context, rate int, d time.Duration) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	begun := time.Now()
	for i := range int(d.Seconds() * float64(rate)) {
		if wait := time.Until(begun.Add(time.Duration(i) * time.Second / time.Duration(rate))); wait > 0 {
			if err := idle(ctx, wait); err != nil {
				return err
			}
		}
		wg.Go(func() { p.submit(ctx) })
	}
	return idle(ctx, time.Until(begun.Add(d)))
}

// settle waits until everything that was submitted is completed.
func (p *plant) settle(ctx context.Context) error {
	err := p.w.until(ctx, time.Minute, "the fleet to finish", func() (bool, error) {
		return p.completed.Load() >= p.submitted.Load(), nil
	})
	if err != nil {
		err = fmt.Errorf("%w: %d submitted, %d started, %d completed; %d errors, the first: %s", err,
			p.submitted.Load(), p.started.Load(), p.completed.Load(), p.faults.count.Load(), p.faults.text())
	}
	return err
}

// ceiling submits as fast as the server takes it, with a short queue, and
// returns how many jobs a second were completed.
func (p *plant) ceiling(ctx context.Context, warm, measured time.Duration) (float64, error) {
	const submitters, queue = 24, 240
	pushing, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range submitters {
		wg.Go(func() {
			for pushing.Err() == nil {
				if p.submitted.Load()-p.completed.Load() > queue {
					if idle(pushing, time.Millisecond) != nil {
						return
					}
					continue
				}
				p.submit(context.WithoutCancel(pushing))
			}
		})
	}
	if err := idle(ctx, warm); err != nil {
		return 0, err
	}
	wait := p.w.profile(ctx, "control-plane-ceiling", measured)
	statements, err := p.w.statements(ctx, "control-plane-ceiling")
	if err != nil {
		return 0, err
	}
	from, begun := p.completed.Load(), time.Now()
	cpu, err := p.w.server.cpu()
	if err != nil {
		return 0, err
	}
	if err := idle(ctx, measured); err != nil {
		return 0, err
	}
	took, n := time.Since(begun), p.completed.Load()-from
	used, err := p.w.server.cpu()
	err = errors.Join(err, statements())
	wait()
	p.w.b.logf("control_plane: at the ceiling the server used %.2f ms a job (load %s)", ms(used-cpu)/float64(n), load())
	return float64(n) / took.Seconds(), err
}

// verify checks that every run that was made was given out once and succeeded,
// and reads a sample of the logs. It also learns when each job was ready.
func (p *plant) verify(ctx context.Context) error {
	seen := 0
	q := protocol.RunsQuery{Limit: 200}
	for {
		page, err := p.w.client.Runs(ctx, q)
		if err != nil {
			return err
		}
		for _, r := range page.Items {
			t, given := p.tickets[r.ID]
			if !given || !p.created[r.ID] || r.State != ci.StateFinished || r.Conclusion != ci.ConclusionSuccess {
				p.faults.add(fmt.Errorf("run %s is %s %s (given out: %t)", r.ID, r.State, r.Conclusion, given))
				continue
			}
			// The run of one job that needs nothing is ready when it is made.
			t.readyAt = r.CreatedAt
			p.tickets[r.ID] = t
			seen++
			if seen%50 == 0 {
				if err := p.read(ctx, t.job); err != nil {
					p.faults.add(err)
				}
			}
		}
		if q.After = page.Next; q.After == "" {
			break
		}
	}
	if want := int(p.submitted.Load()); seen != want || len(p.tickets) != want {
		p.faults.add(fmt.Errorf("%d runs were made, %d given out, %d are good", want, len(p.tickets), seen))
	}
	return nil
}

func (p *plant) read(ctx context.Context, job ci.JobID) error {
	log, err := p.w.client.JobLog(ctx, job, protocol.LogQuery{})
	if err != nil {
		return err
	}
	defer log.Close()
	text, err := io.ReadAll(log)
	if err == nil && string(text) != output(job) {
		err = fmt.Errorf("the log of %s is %q", job, text)
	}
	return err
}

// window returns how many tickets came in a time and how long after their jobs
// were ready.
func (p *plant) window(from, to time.Time) (starts int, dispatch []time.Duration) {
	for _, t := range p.tickets {
		if t.at.Before(from) || t.at.After(to) {
			continue
		}
		starts++
		if !t.readyAt.IsZero() {
			// Both are of this machine's wall clock.
			dispatch = append(dispatch, max(t.at.Round(0).Sub(t.readyAt), 0))
		}
	}
	return starts, dispatch
}
