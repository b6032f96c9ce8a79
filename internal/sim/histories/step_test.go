package histories

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// kind is a call, or what the server does by itself.
type kind string

const (
	doSubmit   kind = "submit"
	doClaim    kind = "claim"
	doRenew    kind = "renew"
	doPhase    kind = "phase"
	doComplete kind = "complete"
	doHandOver kind = "hand over"
	doOccupied kind = "terminated"
	doOpen     kind = "open session"
	doCancel   kind = "cancel"
	doRetry    kind = "retry"
	doSweep    kind = "sweep"
	doExpire   kind = "(expired)"
	doLook     kind = "look at jobs"
	doLookRun  kind = "look at run"
)

// input is a call. low is what the clock showed before it.
type input struct {
	kind    kind
	low     int64
	call    int64 // when it was made, in the order of the history
	runner  int
	session ci.SessionID // of open: the one before
	request string
	digest  string
	ref     ci.LeaseRef
	refs    []ci.LeaseRef
	phase   ci.Phase
	result  protocol.Complete // of complete; reason of hand over and expire
	run     int
}

// output is an answer. high is what the clock showed behind it.
type output struct {
	unknown bool // the caller never learned it
	high    int64
	ret     int64 // when it came, in the order of the history
	err     ci.Kind
	reject  ci.Reject
	ref     *ci.LeaseRef
	run     ci.RunID
	session ci.SessionID
	latest  ci.SessionID // told instead of a session
	answers []protocol.LeaseAnswer
	done    protocol.Completed
	jobs    []jobView
	state   ci.State
	concl   ci.Conclusion
	reason  ci.Reason
	// at is the instant that an accepted call stored, 0 = unknown.
	at int64
}

type jobView struct {
	state      ci.State
	conclusion ci.Conclusion
	reason     ci.Reason
	epoch      int64
	phase      ci.Phase // of a running job
}

func (i input) String() string {
	s := string(i.kind)
	switch i.kind {
	case doSubmit:
	case doClaim, doOpen:
		s += fmt.Sprintf(" runner %d %s %s", i.runner, short(i.session), i.request)
	case doRenew, doOccupied:
		s += fmt.Sprintf(" runner %d %s", i.runner, short(i.session))
		for _, r := range i.refs {
			s += " " + shortRef(r)
		}
	case doPhase, doComplete, doHandOver, doExpire:
		s += fmt.Sprintf(" runner %d %s %s %s %s", i.runner, shortRef(i.ref), i.phase, i.request, i.digest)
	default:
		s += fmt.Sprintf(" run %d %s", i.run, i.request)
	}
	return s + " [" + clockText(i.low)
}

func (o output) String() string {
	var s string
	switch {
	case o.unknown:
		s = "?"
	case o.err != "":
		s = string(o.err) + " " + string(o.reject)
	case o.ref != nil:
		s = shortRef(*o.ref)
	default:
		s = strings.TrimSpace(fmt.Sprintln("ok ", short(o.run), short(o.session), short(o.latest), o.answers, o.done, o.jobs, o.state, o.concl, o.reason))
	}
	if o.at != 0 {
		s += " at " + clockText(o.at)
	}
	return s + " " + clockText(o.high) + "]"
}

func clockText(us int64) string { return fmt.Sprintf("%.3f", float64(us-start)/1e6) }

func shortRef(r ci.LeaseRef) string {
	return fmt.Sprintf("%s#%d by %s", short(r.Job), r.Epoch, short(r.Session))
}

func short[T ~string](id T) string {
	s := string(id)
	return s[max(0, len(s)-4):]
}

// turn is one step of the model: it changes its own copy of the state.
type turn struct {
	*spec
	*state
	in  input
	out output
}

// step reports whether the call could have had this answer in this state. A call
// whose answer was lost does now what it may do, or nothing.
func (t *turn) step() bool {
	if !t.out.unknown {
		return t.do()
	}
	was := t.state.clone()
	if !t.do() {
		t.state = was
	}
	return true
}

func (t *turn) do() bool {
	switch t.in.kind {
	case doSubmit:
		if t.runs[0].state == "" {
			t.begin(0, nil)
		}
		return t.out.unknown || t.out.err == "" && t.out.run == t.ids[0]
	case doClaim:
		return t.claim()
	case doRenew:
		return t.renew()
	case doPhase:
		return t.setPhase()
	case doComplete, doHandOver:
		return t.end()
	case doOccupied:
		return t.terminated()
	case doOpen:
		return t.open()
	case doCancel:
		return t.cancel()
	case doRetry:
		return t.retry()
	case doSweep:
		return t.swept()
	case doExpire:
		return t.expire()
	case doLook:
		return t.look()
	case doLookRun:
		r := t.runs[t.in.run]
		was := r.state
		if was == ci.StateWaiting {
			was = ci.StateRunning // a claim may leave it to the next to say so
		}
		seen := t.out.state
		if seen == ci.StateWaiting {
			seen = ci.StateRunning
		}
		return was == seen && r.conclusion == t.out.concl && (r.reason == t.out.reason || r.state != ci.StateFinished)
	}
	return false
}

// own is now for a call that changes something of which the database stored when.
func (t *turn) own(last int64) (span, bool) {
	at := t.out.at
	return span{at, at}, at >= max(t.in.low, last) && at <= t.out.high
}

// now is when the transaction read the clock, under the locks that others held
// until last.
func (t *turn) now(last int64) (span, bool) {
	s := span{max(t.in.low, last), t.out.high}
	return s, s.lo <= s.hi
}

// Access of a call while its run is cancelling.
type access bool

const (
	activeOnly      access = false
	whileCancelling access = true
)

// judge compares a lease tuple with the job's lease, but for the time.
func (t *turn) judge(r *run, j *job, ref ci.LeaseRef, mode access) ci.Reject {
	l := j.lease
	switch {
	case ref.Runner != t.who():
		return ci.RejectRunner
	case !j.held && r.state == ci.StateFinished:
		return ci.RejectRunEnded
	case !j.held:
		return ci.RejectEnded
	case l.ref.Runner != ref.Runner:
		return ci.RejectRunner
	case l.ref.Session != ref.Session:
		return ci.RejectSession
	case l.ref.Epoch != ref.Epoch:
		return ci.RejectEpoch
	case l.ref.Lease != ref.Lease:
		return ci.RejectLease
	case l.cancel && mode == activeOnly:
		return ci.RejectCancelling
	}
	return ci.RejectNone
}

// who is the caller's runner ID; every reference of a runner has it.
func (t *turn) who() ci.RunnerID { return t.runnerIDs[t.in.runner] }

// accepts reports whether the lease may be current at some instant of the call,
// and keeps what that says about its end.
func (t *turn) accepts(r *run, j *job, ref ci.LeaseRef, mode access, at span) bool {
	if t.judge(r, j, ref, mode) != ci.RejectNone || j.lease.expires.hi <= at.lo {
		return false
	}
	j.lease.expires.lo = max(j.lease.expires.lo, at.lo+1)
	return true
}

// refuses reports whether the call may be refused with that word.
func (t *turn) refuses(r *run, j *job, ref ci.LeaseRef, mode access, word ci.Reject) bool {
	// What is not the lease of the tuple is not asked for its end.
	found := t.judge(r, j, ref, mode)
	if found != ci.RejectNone && found != ci.RejectCancelling {
		return word == found
	}
	if word == ci.RejectExpired {
		if j.lease.expires.lo > t.out.high {
			return false
		}
		j.lease.expires.hi = min(j.lease.expires.hi, t.out.high)
		return true
	}
	return found != ci.RejectNone && word == found
}

func (t *turn) claim() bool {
	ended := t.sessions[t.in.runner] != t.in.session
	i := slices.IndexFunc(t.claims, func(c claimed) bool { return c.session == t.in.session && c.request == t.in.request })
	if t.out.err == ci.ErrConflict {
		return ended
	}
	if i >= 0 {
		ref := t.claims[i].ref
		_, r, j := t.find(ref.Job)
		if t.out.ref != nil {
			at, ok := t.now(j.last)
			return ok && *t.out.ref == ref && t.accepts(r, j, ref, whileCancelling, at)
		}
		if t.out.err != ci.ErrLeaseLost || t.out.reject != ci.RejectEnded {
			return false
		}
		if t.judge(r, j, ref, whileCancelling) != ci.RejectNone {
			return true
		}
		return t.refuses(r, j, ref, whileCancelling, ci.RejectExpired)
	}
	switch {
	case t.out.err != "" || ended:
		return false
	case t.out.ref == nil:
		return true // a claim may always find nothing
	}
	ref := *t.out.ref
	where, r, j := t.find(ref.Job)
	if r == nil || ref.Run != t.ids[where.run] || ref.Session != t.in.session || ref.Runner != t.who() {
		return false
	}
	at, ok := t.own(j.last)
	taken := 0
	for _, s := range t.taken {
		if s.runner == t.in.runner {
			taken++
		}
	}
	if !ok || j.state != ci.StateReady || ref.Epoch != j.epoch+1 || j.due.lo > at.hi || taken >= t.slots {
		return false
	}
	j.state, j.phase, j.epoch, j.reported, j.last = ci.StateRunning, ci.PhaseClaimed, ref.Epoch, false, at.lo
	j.held, j.lease = true, lease{ref: ref, runner: t.in.runner, expires: span{at.lo + ttlUS, at.hi + ttlUS}, known: t.out.ret}
	t.limit(where, j, at)
	if r.state == ci.StateWaiting {
		r.state = ci.StateRunning
	}
	t.claims = append(t.claims, claimed{t.in.session, t.in.request, ref})
	t.taken = append(t.taken, slot{t.in.runner, where, ref.Epoch})
	return true
}

func (t *turn) renew() bool {
	for i, ref := range t.in.refs {
		_, r, j := t.find(ref.Job)
		at, _ := t.now(j.last)
		switch {
		case t.out.unknown:
			if ref.Session != t.in.session || at.lo > at.hi || !t.accepts(r, j, ref, whileCancelling, at) {
				continue
			}
		case t.out.err != "":
			return false
		case t.out.answers[i] == protocol.LeaseGone:
			if ref.Session != t.in.session || t.judge(r, j, ref, whileCancelling) != ci.RejectNone {
				continue
			}
			if !t.refuses(r, j, ref, whileCancelling, ci.RejectExpired) {
				return false
			}
			continue
		default:
			if ref.Session != t.in.session || at.lo > at.hi || !t.accepts(r, j, ref, whileCancelling, at) ||
				j.lease.cancel != (t.out.answers[i] == protocol.LeaseCancel) {
				return false
			}
		}
		j.lease.expires = span{at.lo + ttlUS, at.hi + ttlUS}
		j.last = at.lo
	}
	return true
}

func (t *turn) setPhase() bool {
	where, r, j := t.find(t.in.ref.Job)
	at, possible := t.now(j.last)
	possible = possible && t.judge(r, j, t.in.ref, activeOnly) == ci.RejectNone && j.lease.expires.hi > at.lo
	back := possible && t.in.phase.Order() < j.phase.Order()
	switch {
	case t.out.reject != "":
		return t.refuses(r, j, t.in.ref, activeOnly, t.out.reject)
	case t.out.err == ci.ErrConflict:
		return back && t.accepts(r, j, t.in.ref, activeOnly, at)
	case t.out.err != "" || !possible || back:
		return false
	}
	t.accepts(r, j, t.in.ref, activeOnly, at)
	j.last = at.lo
	if j.phase != t.in.phase {
		j.phase = t.in.phase
		t.limit(where, j, at)
	}
	return true
}

// limit is the server's own limit on a phase that began at an instant.
func (t *turn) limit(where place, j *job, at span) {
	d := t.jobs[where.job].timeout
	if j.phase == ci.PhaseFinalising { // uploads have an hour at least
		d = time.Hour
	}
	limit := (d + grace + ttl).Microseconds()
	j.lease.deadline, j.lease.limited = span{at.lo + limit, at.hi + limit}, t.out.ret
}

// end is a result or a hand-over.
func (t *turn) end() bool {
	where, r, j := t.find(t.in.ref.Job)
	mode := activeOnly
	if t.in.result.Conclusion == ci.ConclusionCancelled {
		mode = whileCancelling
	}
	if e := t.in.ref.Epoch; e <= int64(len(j.ends)) && (e < j.epoch || !j.held) && t.in.ref.Runner == t.who() && j.ends[e-1].request != "" && j.ends[e-1].request == t.in.request {
		if j.ends[e-1].digest != t.in.digest {
			return t.out.err == ci.ErrConflict
		}
		return t.out.err == "" && t.out.done == j.ends[e-1].answer
	}
	switch {
	case t.out.reject != "":
		return t.refuses(r, j, t.in.ref, mode, t.out.reject)
	case t.out.err == ci.ErrInvalid: // nobody asked for the cancellation that it reports
		at, ok := t.now(max(j.last, r.last))
		return mode == whileCancelling && ok && t.accepts(r, j, t.in.ref, mode, at) && !j.lease.cancel
	}
	at, ok := t.own(max(j.last, r.last))
	switch {
	case t.out.err != "" || !ok || !t.accepts(r, j, t.in.ref, mode, at) || mode == whileCancelling && !j.lease.cancel:
		return false
	}
	r.last, j.last = at.lo, at.lo
	t.release(where, j.epoch)
	c, sp := t.in.result, t.jobs[where.job]
	exit := 0
	if c.ExitCode != nil {
		exit = *c.ExitCode
	}
	switch {
	case j.state == ci.StateCancelling: // concluded when none of its attempts may still run
	case t.in.kind == doHandOver, c.Conclusion == ci.ConclusionFailed && c.Reason == ci.ReasonPrepare:
		j.lost(sp, c.Reason, at)
	case c.Conclusion == ci.ConclusionSuccess:
		j.conclude(ci.ConclusionSuccess, "")
	default:
		j.failed(sp, c.Conclusion, c.Reason, exit, at)
	}
	j.drop(end{})
	t.settle()
	t.advance(where.run)
	answer := protocol.Completed{State: j.state, Conclusion: j.conclusion}
	j.ends[j.epoch-1] = end{t.in.request, t.in.digest, answer}
	return t.out.done == answer
}

// terminated is a runner's report that attempts have ended.
func (t *turn) terminated() bool {
	if t.out.err != "" {
		return false
	}
	for _, ref := range t.in.refs {
		where, _, j := t.find(ref.Job)
		if ref.Runner == t.who() && t.release(where, ref.Epoch) && ref.Epoch == j.epoch {
			j.reported = true
		}
	}
	t.settle()
	return true
}

// open begins a new life of a runner whose host was swept: what it was given has
// ended.
func (t *turn) open() bool {
	i := slices.IndexFunc(t.opens, func(o opened) bool { return o.runner == t.in.runner && o.request == t.in.request })
	if i >= 0 {
		return t.out.err == "" && t.out.session == t.opens[i].session
	}
	if t.out.err != "" {
		return false
	}
	if t.in.session != t.sessions[t.in.runner] {
		return t.out.session == "" && t.out.latest == t.sessions[t.in.runner]
	}
	if _, ok := t.own(0); !ok {
		return false
	}
	t.sessions[t.in.runner] = t.out.session
	t.opens = append(t.opens, opened{t.in.runner, t.in.request, t.out.session})
	for n := range t.runs {
		for i := range t.runs[n].jobs {
			at, r, j := place{n, i}, &t.runs[n], &t.runs[n].jobs[i]
			mine := j.held && j.lease.runner == t.in.runner
			t.taken = slices.DeleteFunc(t.taken, func(s slot) bool {
				mine = mine || s.runner == t.in.runner && s.at == at && s.epoch == j.epoch
				return s.runner == t.in.runner && s.at == at
			})
			j.reported = j.reported || mine
			if !mine || !j.held {
				continue
			}
			when, ok := t.own(max(j.last, r.last))
			if !ok {
				return false
			}
			r.last, j.last = when.lo, when.lo
			t.fence(at, ci.ReasonRunnerRestarted, when)
		}
	}
	t.settle()
	return true
}

// fence ends a lease against its holder.
func (t *turn) fence(where place, cause ci.Reason, at span) {
	j := &t.runs[where.run].jobs[where.job]
	if j.reported || j.phase == ci.PhaseClaimed {
		t.release(where, j.epoch)
	}
	j.drop(end{})
	if j.state != ci.StateCancelling {
		j.lost(t.jobs[where.job], cause, at)
	}
	t.settle()
	t.advance(where.run)
}

// expire is the server's end of a lease that ran out at t.out.at at the latest.
func (t *turn) expire() bool {
	where, r, j := t.find(t.in.ref.Job)
	if r == nil || !j.held || j.epoch != t.in.ref.Epoch {
		return false
	}
	at, ok := t.own(max(j.last, r.last))
	if !ok {
		return false
	}
	limit := &j.lease.expires
	if t.in.result.Reason == ci.ReasonOverdue {
		limit = &j.lease.deadline
	}
	if limit.hi == 0 || limit.lo > at.hi {
		return false
	}
	r.last, j.last = at.lo, at.lo
	t.fence(where, t.in.result.Reason, at)
	return true
}

// swept says that a sweep has ended: no lease is left that had run out before it, of
// those that were known when it began. It looks once, then ends what it has found: a
// claim that was answered meanwhile may have stored its lease behind the look, by an
// earlier time, and the next sweep finds that.
func (t *turn) swept() bool {
	for _, r := range t.runs {
		for _, j := range r.jobs {
			over := j.lease.known < t.in.call && j.lease.expires.hi <= t.in.low
			overdue := j.lease.limited < t.in.call && j.lease.deadline.hi != 0 && j.lease.deadline.hi <= t.in.low
			if j.held && (over || overdue) {
				return false
			}
		}
	}
	return t.out.err == ""
}

func (t *turn) cancel() bool {
	r := &t.runs[t.in.run]
	at, ok := t.now(r.last)
	switch {
	case r.state == ci.StateFinished:
		return t.out.err == ci.ErrConflict
	case t.out.err != "":
		return false
	case r.state == ci.StateCancelling:
		return true
	case !ok:
		return false
	}
	r.state, r.reason, r.last = ci.StateCancelling, ci.ReasonUser, at.lo
	for i := range r.jobs {
		switch j := &r.jobs[i]; {
		case j.state == ci.StateRunning:
			j.state, j.lease.cancel = ci.StateCancelling, true
		case j.state == ci.StateReady && t.occupied(t.in.run, i): // a lost attempt of it may still run
			j.state = ci.StateCancelling
		case j.state != ci.StateFinished:
			j.conclude(ci.ConclusionCancelled, ci.ReasonUser)
		}
	}
	t.advance(t.in.run)
	return true
}

// retry makes one of the history's retry runs.
func (t *turn) retry() bool {
	n := t.in.run
	if t.runs[n].state != "" {
		return t.out.unknown || t.out.err == "" && t.out.run == t.ids[n]
	}
	old := &t.runs[0]
	pinned := make([]bool, len(t.jobs))
	all := true
	for i, j := range old.jobs {
		pinned[i] = t.retries[n-1] && j.conclusion == ci.ConclusionSuccess
		for _, need := range t.jobs[i].needs {
			pinned[i] = pinned[i] && pinned[need]
		}
		all = all && pinned[i]
	}
	if old.state != ci.StateFinished || all {
		return t.out.err == ci.ErrConflict
	}
	t.begin(n, pinned)
	return t.out.unknown || t.out.err == "" && t.out.run == t.ids[n]
}

func (t *turn) look() bool {
	if len(t.out.jobs) != len(t.runs[t.in.run].jobs) {
		return false
	}
	for i, j := range t.runs[t.in.run].jobs {
		v := jobView{j.state, j.conclusion, j.reason, j.epoch, ""}
		if j.state == ci.StateRunning {
			v.phase = j.phase
		}
		if v != t.out.jobs[i] {
			return false
		}
	}
	return true
}
