package histories

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// made is a history that was made by hand: two runners, one run of two siblings
// and one behind them.
type made struct {
	spec spec
	ops  []porcupine.Operation
	now  int64
}

func newMade() *made {
	m := &made{now: start, spec: spec{
		slots: 2,
		jobs: []jobSpec{
			{name: "a", timeout: time.Minute}, {name: "b", timeout: time.Minute}, {name: "c", needs: []int{0, 1}, timeout: time.Minute},
		},
		ids:       []ci.RunID{"run"},
		where:     map[ci.JobID]place{"a": {0, 0}, "b": {0, 1}, "c": {0, 2}},
		first:     [runners]ci.SessionID{"s0", "s1", "s2"},
		runnerIDs: [runners]ci.RunnerID{"r0", "r1", "r2"},
	}}
	m.add(input{kind: doSubmit}, output{run: "run"})
	return m
}

// add appends a call that nothing runs beside.
func (m *made) add(in input, out output) {
	n := int64(len(m.ops)) * 10
	m.during(n, n+5, in, out)
}

// during appends a call with its beginning and end.
func (m *made) during(call, ret int64, in input, out output) {
	in.low, out.high = m.now, max(out.high, m.now)
	in.call, out.ret = call, ret
	m.ops = append(m.ops, porcupine.Operation{ClientId: in.runner, Input: in, Output: out, Call: call, Return: ret})
}

func (m *made) ref(job string, runner int, epoch int64) ci.LeaseRef {
	return ci.LeaseRef{
		Run: "run", Job: ci.JobID(job), Runner: m.spec.runnerIDs[runner], Session: m.spec.first[runner],
		Lease: ci.LeaseID(job+string(rune('0'+epoch))) + ci.LeaseID(m.spec.first[runner]), Epoch: epoch,
	}
}

func (m *made) claims(runner int, job string, epoch int64) ci.LeaseRef {
	ref := m.ref(job, runner, epoch)
	m.add(m.claimOf(runner, job, epoch), output{ref: &ref, at: m.now})
	return ref
}

func (m *made) claimOf(runner int, job string, epoch int64) input {
	return input{kind: doClaim, runner: runner, session: m.spec.first[runner], request: job + string(rune('0'+epoch))}
}

var succeeded = protocol.Completed{State: ci.StateFinished, Conclusion: ci.ConclusionSuccess}

func success(ref ci.LeaseRef, runner int) input {
	return input{
		kind: doComplete, runner: runner, ref: ref, request: "done", digest: "d",
		result: protocol.Complete{Conclusion: ci.ConclusionSuccess},
	}
}

func (m *made) expires(ref ci.LeaseRef) {
	m.add(input{kind: doExpire, ref: ref, result: protocol.Complete{Reason: ci.ReasonRunnerLost}}, output{at: m.now})
}

// Each of these histories breaks one promise, and the check says so; without its
// last call, or with the call that is right, it would find an order.
func TestTheCheckRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for name, tell := range map[string]func(m *made, broken bool){
		"one job is given out twice": func(m *made, broken bool) {
			m.claims(0, "a", 1)
			if broken {
				m.claims(1, "a", 1)
			}
		},
		"a repeated claim gets a second job": func(m *made, broken bool) {
			first := m.claims(0, "a", 1)
			if broken {
				first = m.ref("b", 0, 1)
			}
			m.add(m.claimOf(0, "a", 1), output{ref: &first, at: m.now})
		},
		"a job is given out before its needs have finished": func(m *made, broken bool) {
			m.add(success(m.claims(0, "a", 1), 0), output{done: succeeded, at: m.now})
			b := m.claims(0, "b", 1)
			if !broken {
				m.add(success(b, 0), output{done: succeeded, at: m.now})
			}
			m.claims(1, "c", 1)
		},
		"both siblings have finished and the job behind them still waits": func(m *made, broken bool) {
			m.add(success(m.claims(0, "a", 1), 0), output{done: succeeded, at: m.now})
			m.add(success(m.claims(1, "b", 1), 1), output{done: succeeded, at: m.now})
			done := jobView{state: ci.StateFinished, conclusion: ci.ConclusionSuccess, epoch: 1}
			behind := jobView{state: ci.StateReady}
			if broken {
				behind.state = ci.StateWaiting
			}
			m.add(input{kind: doLook}, output{jobs: []jobView{done, done, behind}})
		},
		"a result is taken behind the end of its lease": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.now += ttlUS - 1
			if broken {
				m.now++
			}
			m.add(success(ref, 0), output{done: succeeded, at: m.now})
		},
		"a result is taken under an old epoch": func(m *made, broken bool) {
			first := m.claims(0, "a", 1)
			m.now += ttlUS
			m.expires(first)
			m.now += 1_000_000
			second := m.claims(1, "a", 2)
			if broken {
				m.add(success(first, 0), output{done: succeeded, at: m.now})
			}
			m.add(success(second, 1), output{done: succeeded, at: m.now})
		},
		"a repeated result gets another answer": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.add(success(ref, 0), output{done: succeeded, at: m.now})
			if broken {
				m.add(success(ref, 0), output{err: ci.ErrLeaseLost, reject: ci.RejectEnded})
			} else {
				m.add(success(ref, 0), output{done: succeeded})
			}
		},
		"a renewed lease ends": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.now += ttlUS / 2
			if broken {
				m.add(input{kind: doRenew, session: "s0", refs: []ci.LeaseRef{ref}}, output{answers: []protocol.LeaseAnswer{protocol.LeaseRenewed}})
			}
			m.now += ttlUS / 2
			m.expires(ref)
		},
		"a lease that ran out is left by a sweep": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.now += ttlUS
			if !broken {
				m.expires(ref)
			}
			m.add(input{kind: doSweep}, output{})
		},
		// A sweep looks once: what a claim stores behind that look it may leave, what was
		// answered before it began it may not.
		"a lease that ran out and was known is left by a sweep": func(m *made, broken bool) {
			a, n := m.claims(0, "a", 1), int64(len(m.ops))*10
			before, b := m.now, m.ref("b", 1, 1)
			later := before + ttlUS
			answered := n + 3
			if broken {
				answered = n + 1
			}
			m.during(n, answered, m.claimOf(1, "b", 1), output{ref: &b, at: before, high: later})
			m.now = later
			m.during(n+2, n+6, input{kind: doSweep}, output{})
			m.during(n+4, n+5, input{kind: doPhase, ref: a, phase: ci.PhasePreparing}, output{err: ci.ErrLeaseLost, reject: ci.RejectExpired})
			m.during(n+4, n+8, input{kind: doExpire, ref: a, result: protocol.Complete{Reason: ci.ReasonRunnerLost}}, output{at: later})
			m.during(n+9, n+10, input{kind: doPhase, runner: 1, ref: b, phase: ci.PhasePreparing}, output{err: ci.ErrLeaseLost, reject: ci.RejectExpired})
		},
		"a late attempt is tried again before its backoff is over": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.now += ttlUS
			m.expires(ref)
			m.now += 999_999
			if !broken {
				m.now++
			}
			m.claims(1, "a", 2)
		},
		"an attempt is tried again on a guess": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			phase := ci.PhasePreparing
			if broken {
				phase = ci.PhaseExecuting
			}
			m.add(input{kind: doPhase, ref: ref, phase: phase}, output{})
			m.now += ttlUS
			m.expires(ref)
			m.now += 1_000_000
			m.claims(1, "a", 2)
		},
		"a success is taken behind a cancel": func(m *made, broken bool) {
			ref := m.claims(0, "a", 1)
			m.add(input{kind: doCancel}, output{})
			if broken {
				m.add(success(ref, 0), output{done: succeeded, at: m.now})
			} else {
				m.add(success(ref, 0), output{err: ci.ErrLeaseLost, reject: ci.RejectCancelling})
			}
		},
		"a slot is given out that may still be in use": func(m *made, broken bool) {
			a, _ := m.claims(0, "a", 1), m.claims(0, "b", 1)
			m.add(input{kind: doPhase, ref: a, phase: ci.PhasePreparing}, output{})
			m.now += ttlUS
			m.expires(a)
			m.now += 1_000_000
			if !broken {
				m.add(input{kind: doOccupied, session: "s0", refs: []ci.LeaseRef{a}}, output{})
			}
			m.claims(0, "a", 2)
		},
		"what is stored was read before the locks": func(m *made, broken bool) {
			a, b := m.claims(0, "a", 1), m.claims(1, "b", 1)
			before := m.now
			n := int64(len(m.ops)) * 10
			m.now += 5
			later := m.now
			m.now = before
			// Both are under way when the clock moves; b's result comes first, since a's
			// makes the job behind them ready, which is seen at once.
			m.during(n, n+50, success(a, 0), output{done: succeeded, at: before, high: later})
			m.now = later
			m.during(n+1, n+2, success(b, 1), output{done: succeeded, at: later})
			if broken {
				views := []jobView{{state: ci.StateRunning, phase: ci.PhaseClaimed, epoch: 1}, {state: ci.StateFinished, conclusion: ci.ConclusionSuccess, epoch: 1}, {state: ci.StateWaiting}}
				m.during(n+3, n+4, input{kind: doLook}, output{jobs: views})
			}
		},
		"a lost answer changes something twice": func(m *made, broken bool) {
			m.claims(0, "a", 1)
			m.add(input{kind: doCancel}, output{unknown: true})
			running := jobView{state: ci.StateRunning, epoch: 1, phase: ci.PhaseClaimed}
			cancelling := jobView{state: ci.StateCancelling, epoch: 1}
			over := jobView{state: ci.StateFinished, conclusion: ci.ConclusionCancelled, reason: ci.ReasonUser}
			m.ops[len(m.ops)-1].Return = 1 << 60
			m.add(input{kind: doLook}, output{jobs: []jobView{running, {state: ci.StateReady}, {state: ci.StateWaiting}}})
			m.add(input{kind: doLook}, output{jobs: []jobView{cancelling, over, over}})
			if broken {
				m.add(input{kind: doLook}, output{jobs: []jobView{running, over, over}})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, broken := range []bool{false, true} {
				m := newMade()
				tell(m, broken)
				want := porcupine.Ok
				if broken {
					want = porcupine.Illegal
				}
				if got := porcupine.CheckOperationsTimeout(m.spec.model(), m.ops, checkFor); got != want {
					t.Errorf("broken %t: %s, want %s\n%s", broken, got, want, describe(m.ops))
				}
			}
		})
	}
}

func describe(ops []porcupine.Operation) string {
	var lines []string
	for _, o := range ops {
		lines = append(lines, fmt.Sprintf("%d..%d %v: %v", o.Call, o.Return, o.Input, o.Output))
	}
	return strings.Join(lines, "\n")
}
