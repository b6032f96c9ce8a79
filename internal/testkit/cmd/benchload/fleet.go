package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"sync/atomic"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// simulated is a runner without processes: it speaks the protocol as the real
// one does and invents its jobs' output.
type simulated struct {
	client  *protocol.Client
	id      ci.RunnerID
	session ci.SessionID
	ttl     time.Duration
}

// hold is how long a real runner lets the server hold a poll.
const hold = 30 * time.Second

// fleet registers simulated runners and opens a session of one slot for each.
func (w *world) fleet(ctx context.Context, n int) ([]*simulated, error) {
	fleet := make([]*simulated, n)
	err := each(ctx, n, 16, func(ctx context.Context, i int) (err error) {
		fleet[i], err = w.simulate(ctx, fmt.Sprintf("sim-%04d", i))
		return err
	})
	return fleet, err
}

func (w *world) simulate(ctx context.Context, name string) (*simulated, error) {
	public, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	registered, err := w.client.WithToken(w.registration).Register(ctx, protocol.Register{
		Name: name, PublicKey: public, Credential: protocol.NewToken(protocol.TokenRunner),
	})
	if err != nil {
		return nil, err
	}
	s := &simulated{client: w.client.WithToken(registered.Credential), id: registered.Runner}
	opened, err := s.client.OpenSession(ctx, protocol.OpenSession{
		RequestID: request(), Protocol: protocol.Version, Version: "bench", Slots: 1, At: time.Now(),
		Offer: protocol.Offer{OS: "linux", Arch: "amd64", Isolation: []ci.Isolation{ci.IsolationProcess}},
	})
	s.session, s.ttl = opened.Session, opened.LeaseTTL.Std()
	return s, err
}

func request() string { return ci.IDSource{}.New(ci.PrefixRequest) }

// claim polls once; nil means that there was nothing to do.
func (s *simulated) claim(ctx context.Context) (*protocol.Ticket, error) {
	return s.client.Claim(ctx, protocol.Claim{Session: s.session, RequestID: request(), Wait: ci.Duration(hold)})
}

// begin takes the job to its first step.
func (s *simulated) begin(ctx context.Context, t *protocol.Ticket) error {
	if err := s.client.SetPhase(ctx, t.Lease, protocol.SetPhase{RequestID: request(), Phase: ci.PhasePreparing}); err != nil {
		return fmt.Errorf("phase preparing: %w", err)
	}
	err := s.client.SetPhase(ctx, t.Lease, protocol.SetPhase{
		RequestID: request(), Phase: ci.PhaseExecuting, SourceDigest: t.Source.Digest,
		Steps: []protocol.StepUpdate{{Name: t.Job.Steps[0].Name, State: ci.StateRunning}},
	})
	if err != nil {
		return fmt.Errorf("phase executing: %w", err)
	}
	return nil
}

// complete reports the job's success with a log of so many bytes.
func (s *simulated) complete(ctx context.Context, t *protocol.Ticket, length int64) error {
	code := 0
	done, err := s.client.Complete(ctx, t.Lease, protocol.Complete{
		RequestID: request(), Conclusion: ci.ConclusionSuccess, ExitCode: &code, SourceDigest: t.Source.Digest,
		Evidence: protocol.Evidence{Terminated: true, How: "cgroup"},
		Steps: []protocol.StepUpdate{{
			Name: t.Job.Steps[0].Name, State: ci.StateFinished, Conclusion: ci.ConclusionSuccess, ExitCode: &code, Duration: ci.Duration(time.Millisecond),
		}},
		Streams:  []protocol.StreamEnd{{Stream: protocol.Stdout, Length: length}},
		Duration: ci.Duration(time.Millisecond),
	})
	switch {
	case err != nil:
		return fmt.Errorf("complete: %w", err)
	case done.State != ci.StateFinished || done.Conclusion != ci.ConclusionSuccess:
		return fmt.Errorf("the completion made job %s %s %s", t.Lease.Job, done.State, done.Conclusion)
	default:
		return nil
	}
}

// output is what a simulated job writes.
func output(job ci.JobID) string { return "hi " + string(job) + "\n" }

// appendOutput sends the job's log as one chunk.
func (s *simulated) appendOutput(ctx context.Context, t *protocol.Ticket) error {
	text := output(t.Lease.Job)
	reply, err := s.client.AppendLog(ctx, t.Lease, protocol.AppendChunk(nil, protocol.Chunk{
		Stream: protocol.Stdout, Sequence: 1, Data: []byte(text),
	}))
	switch {
	case err != nil:
		return fmt.Errorf("append: %w", err)
	case len(reply.Streams) != 1 || reply.Streams[0].Length != int64(len(text)):
		return fmt.Errorf("the log of %s was acknowledged as %v", t.Lease.Job, reply.Streams)
	default:
		return nil
	}
}

// work runs one job from ticket to completion.
func (s *simulated) work(ctx context.Context, t *protocol.Ticket) error {
	if err := s.begin(ctx, t); err != nil {
		return err
	}
	if err := s.appendOutput(ctx, t); err != nil {
		return err
	}
	return s.complete(ctx, t, int64(len(output(t.Lease.Job))))
}

// faults counts what went wrong and remembers the first.
type faults struct {
	count atomic.Int64
	first atomic.Pointer[string]
}

func (f *faults) add(err error) {
	f.count.Add(1)
	text := err.Error()
	f.first.CompareAndSwap(nil, &text)
}

func (f *faults) text() string {
	if t := f.first.Load(); t != nil {
		return *t
	}
	return "none"
}
