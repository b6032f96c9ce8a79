package histories

import (
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// The installation's settings, as the model knows them.
const (
	ttl     = 60 * time.Second
	ttlUS   = int64(ttl / time.Microsecond)
	grace   = 10 * time.Second
	budget  = 3 // attempts that infrastructure may end
	runners = 3
)

// spec is what does not change in a history.
type spec struct {
	jobs    []jobSpec
	slots   int    // of a runner
	retries []bool // the retry runs that may be made: whether from failed
	// ids are those of the run and its retries, "" for what was not made.
	ids []ci.RunID
	// where finds a job by its ID.
	where map[ci.JobID]place
	// first are the runners' first sessions.
	first     [runners]ci.SessionID
	runnerIDs [runners]ci.RunnerID
}

type place struct{ run, job int }

type jobSpec struct {
	name    string
	needs   []int
	always  bool // if: always()
	allow   bool // allow_failure
	timeout time.Duration
	retry   *ci.RetryPolicy
}

// span is an instant that is known to lie between two, microseconds.
type span struct{ lo, hi int64 }

type lease struct {
	ref      ci.LeaseRef
	runner   int
	expires  span
	deadline span // of its phase
	cancel   bool
	known    int64 // when its claim was answered
	limited  int64 // when what set its deadline was answered
}

type job struct {
	state      ci.State
	conclusion ci.Conclusion
	reason     ci.Reason
	dead       bool
	phase      ci.Phase
	epoch      int64
	due        span
	infra      int
	granted    int
	held       bool // lease is live
	lease      lease
	reported   bool  // the latest attempt is known to have ended
	last       int64 // the lease's locks were held at this instant or later
	ends       []end // by epoch, from 1
}

// end is the answer that was given for an attempt's end.
type end struct {
	request, digest string
	answer          protocol.Completed
}

type run struct {
	state      ci.State // "" = not made
	conclusion ci.Conclusion
	reason     ci.Reason
	last       int64 // the run's lock was held at this instant or later
	jobs       []job
}

type claimed struct {
	session ci.SessionID
	request string
	ref     ci.LeaseRef
}

type opened struct {
	runner  int
	request string
	session ci.SessionID
}

// slot is one of a runner that an attempt takes.
type slot struct {
	runner int
	at     place
	epoch  int64
}

// state is everything that a history's calls may show.
type state struct {
	runs     []run
	sessions [runners]ci.SessionID // the one that has not ended
	opens    []opened
	claims   []claimed
	taken    []slot
	text     string // of all of it, to compare
}

func (s *state) clone() *state {
	c := &state{
		runs: slices.Clone(s.runs), sessions: s.sessions,
		opens: slices.Clip(s.opens), claims: slices.Clip(s.claims), taken: slices.Clone(s.taken),
	}
	for i := range c.runs {
		c.runs[i].jobs = slices.Clone(c.runs[i].jobs)
		for k := range c.runs[i].jobs {
			c.runs[i].jobs[k].ends = slices.Clip(c.runs[i].jobs[k].ends)
		}
	}
	return c
}

func (s *state) seal() *state {
	s.text = fmt.Sprintf("%v %v %v %v %v", s.runs, s.sessions, s.opens, s.claims, s.taken)
	return s
}

// model is the sequential specification for porcupine.
func (sp *spec) model() porcupine.Model {
	return porcupine.Model{
		Init: func() any {
			s := &state{runs: make([]run, 1+len(sp.retries)), sessions: sp.first}
			return s.seal()
		},
		Step: func(was, in, out any) (bool, any) {
			s, i, o := was.(*state), in.(input), out.(output) //nolint:forcetypeassert // the recorder makes them
			t := &turn{spec: sp, state: s.clone(), in: i, out: o}
			ok := t.step()
			if ok && len(t.taken) > 1 {
				slices.SortFunc(t.taken, func(a, b slot) int {
					if a.at != b.at {
						return (a.at.run-b.at.run)*100 + a.at.job - b.at.job
					}
					return int(a.epoch - b.epoch)
				})
			}
			if !ok {
				return false, was
			}
			return true, t.seal()
		},
		Equal: func(a, b any) bool { return a.(*state).text == b.(*state).text }, //nolint:forcetypeassert // made by Step
		Hash: func(a any) uint64 {
			h := fnv.New64a()
			_, _ = h.Write([]byte(a.(*state).text)) //nolint:forcetypeassert // made by Step
			return h.Sum64()
		},
		DescribeOperation: func(in, out any) string { return fmt.Sprintf("%v: %v", in, out) },
	}
}

// find returns the job of a lease.
func (t *turn) find(id ci.JobID) (place, *run, *job) {
	at, ok := t.where[id]
	if !ok || t.runs[at.run].state == "" {
		return at, nil, nil
	}
	r := &t.runs[at.run]
	return at, r, &r.jobs[at.job]
}

// begin makes a run: what is pinned has succeeded, what needs nothing more is
// decided, the others wait.
func (t *turn) begin(n int, pinned []bool) {
	r := &t.runs[n]
	*r = run{state: ci.StateWaiting, jobs: make([]job, len(t.jobs))}
	for i := range r.jobs {
		r.jobs[i] = job{state: ci.StateWaiting}
		if pinned != nil && pinned[i] {
			r.jobs[i] = job{state: ci.StateFinished, conclusion: ci.ConclusionSuccess, reason: ci.ReasonPinned}
		}
	}
	t.advance(n)
}

// occupied reports whether an attempt of the run's job may still run; job -1 means
// any of them.
func (t *turn) occupied(run, job int) bool {
	return slices.ContainsFunc(t.taken, func(s slot) bool { return s.at.run == run && (job < 0 || s.at.job == job) })
}

// settle concludes what of cancelled runs waited for proof that nothing of it runs.
func (t *turn) settle() {
	for n := range t.runs {
		r := &t.runs[n]
		if r.state != ci.StateCancelling {
			continue
		}
		for i := range r.jobs {
			if j := &r.jobs[i]; j.state == ci.StateCancelling && !j.held && !t.occupied(n, i) {
				j.conclude(ci.ConclusionCancelled, ci.ReasonUser)
			}
		}
		t.advance(n)
	}
}

// advance follows from finished jobs to those behind them and to the run.
func (t *turn) advance(n int) {
	r := &t.runs[n]
	if r.state == ci.StateFinished {
		return
	}
	for changed := true; changed; {
		changed = false
		for i := range r.jobs {
			if j := &r.jobs[i]; j.state == ci.StateWaiting {
				changed = t.decide(r, j, t.jobs[i]) || changed
			}
		}
	}
	infra, failed, late := false, false, false
	for i, j := range r.jobs {
		if j.state != ci.StateFinished {
			return
		}
		infra = infra || j.conclusion == ci.ConclusionAborted || j.dead
		failed = failed || j.conclusion == ci.ConclusionFailed && !j.dead && !t.jobs[i].allow
		late = late || j.conclusion == ci.ConclusionTimedOut && !t.jobs[i].allow
	}
	switch {
	case r.state == ci.StateCancelling && t.occupied(n, -1):
		return
	case r.state == ci.StateCancelling:
		r.conclusion, r.reason = ci.ConclusionCancelled, ci.ReasonUser
	case infra:
		r.conclusion, r.reason = ci.ConclusionFailed, ci.ReasonInfrastructure
	case failed:
		r.conclusion, r.reason = ci.ConclusionFailed, ci.ReasonJobFailed
	case late:
		r.conclusion, r.reason = ci.ConclusionTimedOut, ci.ReasonTimeout
	default:
		r.conclusion, r.reason = ci.ConclusionSuccess, ""
	}
	r.state = ci.StateFinished
}

// decide makes a waiting job ready or skips it, once all its needs have finished.
func (t *turn) decide(r *run, j *job, sp jobSpec) bool {
	satisfied := true
	for _, n := range sp.needs {
		need := r.jobs[n]
		if need.state != ci.StateFinished {
			return false
		}
		allowed := t.jobs[n].allow && (need.conclusion == ci.ConclusionFailed || need.conclusion == ci.ConclusionTimedOut)
		satisfied = satisfied && (need.conclusion == ci.ConclusionSuccess || allowed)
	}
	if satisfied || sp.always {
		j.state = ci.StateReady
	} else {
		j.conclude(ci.ConclusionSkipped, ci.ReasonNeeds)
	}
	return true
}

func (j *job) conclude(c ci.Conclusion, r ci.Reason) {
	j.state, j.conclusion, j.reason = ci.StateFinished, c, r
}

// requeue makes the job ready again behind its backoff: 1 s, doubled each time.
func (j *job) requeue(at span) {
	wait := int64(1_000_000) << (j.epoch - 1)
	j.state, j.phase, j.due = ci.StateReady, "", span{at.lo + wait, at.hi + wait}
}

// lost decides about a job whose attempt infrastructure ended.
func (j *job) lost(sp jobSpec, cause ci.Reason, at span) {
	named := cause
	if cause != ci.ReasonRunnerShutdown && cause != ci.ReasonPrepare {
		named = ci.ReasonRunnerLost
	}
	j.infra++
	covered := sp.retry != nil && slices.Contains(sp.retry.On, named)
	early := j.phase == ci.PhaseClaimed || j.phase == ci.PhasePreparing
	switch {
	case j.infra < budget && early && (!covered || named != ci.ReasonPrepare):
		j.requeue(at) // nothing of the user's ran: nothing is granted
	case j.infra >= budget, covered && j.granted >= sp.retry.Max:
		j.dead = true
		j.conclude(ci.ConclusionFailed, ci.ReasonAttemptsExhausted)
	case covered:
		j.granted++
		j.requeue(at)
	default:
		j.conclude(ci.ConclusionAborted, cause)
	}
}

// failed decides about an attempt that ended by its own result.
func (j *job) failed(sp jobSpec, c ci.Conclusion, reason ci.Reason, exit int, at span) {
	again := false
	if p := sp.retry; p != nil && j.granted < p.Max {
		again = c == ci.ConclusionTimedOut && slices.Contains(p.On, ci.ReasonTimeout) ||
			c == ci.ConclusionFailed && exit != 0 && slices.Contains(p.Exit, exit)
	}
	if again {
		j.granted++
		j.requeue(at)
		return
	}
	j.conclude(c, reason)
}

// release frees the slot of an attempt; it reports whether it was taken.
func (t *turn) release(at place, epoch int64) bool {
	n := len(t.taken)
	t.taken = slices.DeleteFunc(t.taken, func(s slot) bool { return s.at == at && s.epoch == epoch })
	return len(t.taken) < n
}

// drop ends the job's lease.
func (j *job) drop(e end) {
	j.held, j.lease = false, lease{}
	for int64(len(j.ends)) < j.epoch {
		j.ends = append(j.ends, end{})
	}
	j.ends[j.epoch-1] = e
}
