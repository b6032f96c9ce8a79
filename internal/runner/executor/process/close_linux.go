package process

import (
	"context"
	"os"
	"syscall"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// Means of proof in protocol.Evidence.How.
const (
	howNothing   = "nothing started"
	howCgroup    = "cgroup"
	howSubreaper = "subreaper"
	howScan      = "scan"
)

// Close implements executor.Sandbox.
func (s *sandbox) Close(ctx context.Context) (protocol.Evidence, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.proof, nil
	}
	var killed int
	var again bool
	var err error
	if !s.broken {
		killed, again, err = s.closeHelper(ctx)
		if err != nil && !s.broken {
			return protocol.Evidence{How: s.how(), Killed: killed}, err
		}
	}
	if s.broken {
		s.help.kill()
		killed, err = s.killLost(context.WithoutCancel(ctx))
		if err != nil {
			return protocol.Evidence{How: s.how(), Killed: killed}, err
		}
		s.exec.log.WarnContext(ctx, "the job's helper process was killed; its processes were ended by the runner",
			"job", string(s.job.Lease.Job), "killed", killed, "crash", crashText(s.rec.path))
	}
	s.closed = true
	s.proof = protocol.Evidence{Terminated: true, How: s.how(), Killed: killed}
	if !again {
		s.help.close()
	}
	for _, st := range s.streams {
		st.close()
	}
	s.streams = nil
	for _, path := range s.scripts {
		_ = os.Remove(path)
	}
	if again && s.exec.park(s) {
		return s.proof, nil
	}
	s.forget()
	return s.proof, nil
}

func (s *sandbox) how() string {
	switch {
	case !s.ran:
		return howNothing
	case s.rec.CgroupDir != "":
		return howCgroup
	default:
		return howSubreaper
	}
}

// closeHelper has the helper end the job and returns how many processes were
// left, and whether the helper can serve another job. It sets broken when the
// helper fails.
func (s *sandbox) closeHelper(ctx context.Context) (killed int, again bool, err error) {
	if err := s.help.send(&jobhelper.Message{Kind: jobhelper.KindClose}); err != nil {
		s.broken = true
		return 0, false, err
	}
	begun := time.Now()
	end := begun.Add(s.job.Grace)
	grace, done, lost := time.After(s.job.Grace), ctx.Done(), s.job.Lost()
	var patience <-chan time.Time
	shorten := func(at time.Time) {
		if patience == nil && at.Before(end) {
			end, grace = at, time.After(time.Until(at))
		}
	}
	for {
		select {
		case m, ok := <-s.help.events:
			if !ok {
				s.broken = true
				return 0, false, errHelperGone()
			}
			if m.Kind == jobhelper.KindGone {
				// A KindFinish that crossed this message ends the helper.
				return int(m.Num), m.Text == jobhelper.Again && patience == nil, nil
			}
		case <-done:
			done = nil
			shorten(begun.Add(executor.Grace(ctx, s.job.Grace)))
		case <-lost:
			lost = nil
			shorten(time.Now().Add(executor.Grace(s.job.Owned, s.job.Grace)))
		case <-grace:
			grace, patience = nil, time.After(s.exec.killWait)
			if err := s.help.send(&jobhelper.Message{Kind: jobhelper.KindFinish}); err != nil {
				s.broken = true
				return 0, false, err
			}
		case <-patience:
			// Either the kernel holds a process, or somebody stopped the helper.
			// Without it the runner can look for itself.
			s.broken = true
			return 0, false, errHelperGone()
		}
	}
}

// killLost kills what is left of the job after its helper has ended and was
// reaped, and returns how many processes it met. The error is nil only when
// nothing is left.
func (s *sandbox) killLost(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, s.exec.killWait)
	defer cancel()
	group := s.rec.group()
	met := map[process]bool{}
	find := func() []jobhelper.Proc {
		left := s.strays()
		if group != nil {
			left = append(left, group.Procs()...)
		}
		for _, p := range left {
			if !p.Dead() {
				met[process{p.PID, p.Start}] = true
			}
		}
		return left
	}
	// One look can miss a process whose parent ends meanwhile; it is the runner's
	// child in the next.
	clean := 0
	for delay := time.Millisecond; clean < 2; delay = min(2*delay, 100*time.Millisecond) {
		if group != nil {
			find() // to count them
			group.Kill()
		}
		if jobhelper.KillFound(find) == 0 && (group == nil || group.Empty()) {
			clean++
			continue
		}
		clean = 0
		select {
		case <-ctx.Done():
			return len(met), ci.Errorf(ci.ErrUnavailable, "processes of the job do not end although they were killed")
		case <-time.After(delay):
		}
	}
	if group != nil {
		if err := group.Remove(); err != nil {
			return len(met), ci.Errorf(ci.ErrUnavailable, "the job's cgroup cannot be removed").WithCause(err)
		}
	}
	return len(met), nil
}

// strays lists what a dead helper left to the runner: the runner's children that
// are in a session of their own and are not older than the helper, with all that
// descends from them. Children that the runner starts itself are in its session,
// and a process of a job can never be: each step begins a session, and a session
// can be left but not entered. Those that have ended are reaped, one by one, so
// that nobody else's child is.
func (s *sandbox) strays() []jobhelper.Proc {
	procs, err := jobhelper.Processes()
	if err != nil {
		return nil
	}
	me, err := jobhelper.ReadProc(os.Getpid())
	if err != nil {
		return nil
	}
	var found []jobhelper.Proc
	var roots []int
	for _, p := range procs {
		if p.PPID != me.PID || p.Session == me.Session || p.Start < s.help.id.Start {
			continue
		}
		if p.Dead() {
			_, _ = syscall.Wait4(p.PID, nil, syscall.WNOHANG, nil)
			continue
		}
		found = append(found, p)
		roots = append(roots, p.PID)
	}
	return append(found, jobhelper.Descendants(procs, roots...)...)
}
