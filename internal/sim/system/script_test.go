package system

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// scripts is what all executors of a seed have done.
type scripts struct {
	tell func(format string, a ...any)

	mu       sync.Mutex
	attempts map[protocol.AttemptRef]*attempt
	busy     map[ci.JobID]int64 // the epoch whose step runs
	broken   []string           // promises that were seen broken
}

// attempt is what was done of a job under one lease.
type attempt struct {
	host  string
	began time.Time
	wrote map[stream]*bytes.Buffer
	exits map[int]int       // of steps that ran to their end
	files map[string]string // made, and found
}

type stream struct {
	step int
	name string
}

// fake is a machine's executor. Its steps are lines of:
//
//	out N, err N   write N bytes to a stream
//	sleep D        let time pass
//	file NAME N    make a file of N bytes
//	find NAME      read a file
//	exit N         end
type fake struct {
	*scripts
	host string
}

func (f *fake) Class() ci.Isolation                                  { return ci.IsolationProcess }
func (f *fake) Check(context.Context) error                          { return nil }
func (f *fake) Sweep(context.Context) ([]protocol.AttemptRef, error) { return nil, nil }
func (f *fake) Close()                                               {}

func (f *fake) Open(_ context.Context, job executor.Job) (executor.Sandbox, error) {
	ref := protocol.AttemptRef{Job: job.Lease.Job, Epoch: job.Lease.Epoch}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.attempts[ref] != nil {
		f.broken = append(f.broken, fmt.Sprintf("attempt %v is executed twice", ref))
	}
	a := &attempt{host: f.host, began: time.Now(), wrote: map[stream]*bytes.Buffer{}, exits: map[int]int{}, files: map[string]string{}}
	f.attempts[ref] = a
	return &box{fake: f, job: job, ref: ref, attempt: a}, nil
}

// box is the sandbox of an attempt.
type box struct {
	*fake
	job     executor.Job
	ref     protocol.AttemptRef
	attempt *attempt
}

func (b *box) Close(context.Context) (protocol.Evidence, error) {
	return protocol.Evidence{Terminated: true, How: "scan"}, nil
}

func (b *box) Run(ctx context.Context, step executor.Step) (executor.Result, error) {
	began := time.Now()
	b.enter()
	defer b.leave()
	out, err := b.play(ctx, step)
	out.Duration = time.Since(began)
	if ctx.Err() == nil && err == nil {
		b.mu.Lock()
		b.attempt.exits[step.Index] = out.ExitCode
		b.mu.Unlock()
	}
	return out, err
}

// enter notes that a process of the job runs. Two attempts of a job never do at
// once: the first is given up by its runner before the server gives the job away.
func (b *box) enter() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tell("%s: attempt %v runs", b.host, b.ref)
	if other, ok := b.busy[b.ref.Job]; ok {
		b.broken = append(b.broken, fmt.Sprintf("job %s: attempt %d runs beside attempt %d", b.ref.Job, b.ref.Epoch, other))
	}
	b.busy[b.ref.Job] = b.ref.Epoch
}

func (b *box) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.busy, b.ref.Job)
	b.tell("%s: attempt %v does not run any more", b.host, b.ref)
}

func (b *box) play(ctx context.Context, step executor.Step) (executor.Result, error) {
	for n, line := range strings.Split(strings.TrimSpace(step.Script), "\n") {
		word := strings.Fields(line)
		var err error
		switch word[0] {
		case "out", "err":
			to := map[string]io.Writer{"out": step.Stdout, "err": step.Stderr}[word[0]]
			err = b.write(ctx, to, stream{step.Index, "std" + word[0]}, n, number(word[1]))
		case "sleep":
			var d time.Duration
			if d, err = time.ParseDuration(word[1]); err == nil {
				select {
				case <-time.After(d):
				case <-ctx.Done():
				}
			}
		case "file":
			name, text := filepath.Join(step.Dir, word[1]), b.text(n, number(word[2]))
			b.keep(word[1], text)
			err = os.WriteFile(name, []byte(text), 0o600)
		case "find":
			var got []byte
			got, err = os.ReadFile(filepath.Join(step.Dir, word[1]))
			b.keep(word[1], string(got))
		case "exit":
			return executor.Result{ExitCode: number(word[1])}, nil
		default:
			err = fmt.Errorf("no such command: %s", line)
		}
		if ctx.Err() != nil { // whatever it met then
			// It does not listen to SIGTERM.
			select {
			case <-time.After(executor.Grace(ctx, b.job.Grace)):
			case <-b.job.Lost():
				pass(executor.Grace(b.job.Owned, b.job.Grace))
			}
			return executor.Result{ExitCode: 137, Signal: "SIGKILL"}, nil // a step that was ended has no error of its own
		}
		if err != nil {
			return executor.Result{}, err
		}
	}
	return executor.Result{}, nil
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}

// text is what a script writes: another one in each attempt, line and place.
func (b *box) text(line, size int) string {
	var s strings.Builder
	for i := 0; s.Len() < size; i++ {
		fmt.Fprintf(&s, "%s attempt %d line %d, %d: all work and no play\n", b.ref.Job, b.ref.Epoch, line, i)
	}
	return s.String()[:size]
}

func (b *box) keep(name, text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attempt.files[name] = text
}

func (b *box) write(ctx context.Context, to io.Writer, s stream, line, size int) error {
	text := b.text(line, size)
	for len(text) > 0 && ctx.Err() == nil {
		n := min(len(text), 1000)
		b.mu.Lock()
		if b.attempt.wrote[s] == nil {
			b.attempt.wrote[s] = &bytes.Buffer{}
		}
		b.attempt.wrote[s].WriteString(text[:n])
		b.mu.Unlock()
		if _, err := io.WriteString(to, text[:n]); err != nil {
			return err
		}
		text = text[n:]
	}
	return nil
}
