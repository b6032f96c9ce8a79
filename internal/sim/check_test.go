package sim

import (
	"encoding/json"
	"math"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
)

// mirror is what the database held after the last step, and what callers have
// been told.
type mirror struct {
	runs       map[ci.RunID]store.Run
	runOrder   []ci.RunID
	jobs       map[ci.JobID]store.Job
	jobOrder   []ci.JobID
	specs      map[ci.JobID]ci.JobSpec
	attempts   map[store.AttemptKey]store.Attempt
	leases     map[ci.JobID]*leased
	leaseOrder []ci.JobID
	refs       []ci.LeaseRef // every lease ever seen
	boxes      []*box
	occupied   []store.Occupant
	logs       map[store.AttemptKey]*written
	logOrder   []*written
	runsCode   map[ci.JobID]int // attempts that started a process of the user
	cancelled  []ci.JobID       // cancelled in this step
	readied    int64            // how often a job has become ready
	// pending: the clock has jumped and no node has repaired it yet.
	pending bool
	// fresh: a node has started since that jump.
	fresh bool
}

// leased is a live lease with when it runs out on a clock without jumps.
type leased struct {
	row     store.Lease
	fair    int64
	excused bool
}

func newMirror() mirror {
	return mirror{
		runs: map[ci.RunID]store.Run{}, jobs: map[ci.JobID]store.Job{}, specs: map[ci.JobID]ci.JobSpec{},
		attempts: map[store.AttemptKey]store.Attempt{}, leases: map[ci.JobID]*leased{}, logs: map[store.AttemptKey]*written{},
		runsCode: map[ci.JobID]int{},
	}
}

func (m *mirror) runsOf(id ci.OrgID) (out []store.Run) {
	for _, r := range m.runOrder {
		if run := m.runs[r]; run.Org == id {
			out = append(out, run)
		}
	}
	return out
}

func (m *mirror) activeRuns() (n int) {
	for _, r := range m.runs {
		if r.State != ci.StateFinished {
			n++
		}
	}
	return n
}

func (m *mirror) deadLetters(id ci.OrgID) (out []ci.JobID) {
	for _, j := range m.jobOrder {
		if job := m.jobs[j]; job.Org == id && job.DeadUS > 0 {
			out = append(out, j)
		}
	}
	return out
}

// nodeStarted: a node that starts between a jump of the database's clock and its
// repair cannot know of it, and what it does to the leases of then is excused.
func (m *mirror) nodeStarted() {
	if m.pending {
		m.fresh = true
		m.excuse()
	}
}

func (m *mirror) excuse() {
	for _, l := range m.leases {
		l.excused = true
	}
}

// touched is what a step changed, by the trail.
type touched struct {
	runs     []ci.RunID
	attempts []store.AttemptKey
	slots    bool
	shifted  bool
}

func (t *touched) add(a store.Audit) {
	if a.Run != "" && !slices.Contains(t.runs, a.Run) {
		t.runs = append(t.runs, a.Run)
	}
	if k := (store.AttemptKey{Job: a.Job, Epoch: a.Epoch}); a.Job != "" && a.Epoch > 0 && a.Action != "rejected" && !slices.Contains(t.attempts, k) {
		t.attempts = append(t.attempts, k)
	}
	switch a.Action {
	case "claimed", "attempt_ended", "terminated", "runner_fence", "session_opened":
		t.slots = true
	case "clock_shifted":
		t.shifted = true
	}
}

// follow compares the rows that the step touched with what they were.
func (w *world) follow() {
	m := &w.mirror
	if w.followedAt == w.commits {
		w.followedDB = w.dbNow()
		return
	}
	w.shifted()
	commits := w.commits
	w.read(func(tx *store.Tx) error {
		var t touched
		for _, o := range w.orgs {
			entries, err := tx.AuditAfter(w.ctx, o.id, o.seq, 10_000)
			if err != nil {
				return err
			}
			for _, a := range entries {
				a.Org = o.id
				if hash := engine.AuditHash(o.chain, a); a.Seq != o.seq+1 || hash != a.Hash {
					w.bad("audit chain", "entry %d of %s does not follow entry %d", a.Seq, o.id, o.seq)
				}
				o.seq, o.chain = a.Seq, a.Hash
				w.tell("  audit %s %s %s %s/%d %s %s %s", short(a.Actor), a.Action, short(a.Run), short(a.Job), a.Epoch, short(a.Object), a.Detail, a.Hash[:8])
				t.add(a)
				w.sawEnd(a)
				w.sawProof(a)
				w.sawDrain(a)
			}
		}
		if t.shifted {
			m.pending, m.fresh = false, false
		}
		if err := w.followAttempts(tx, t.attempts); err != nil {
			return err
		}
		if err := w.followRuns(tx, t.runs); err != nil {
			return err
		}
		if err := w.followLeases(tx); err != nil {
			return err
		}
		if t.slots {
			if err := w.followSlots(tx); err != nil {
				return err
			}
		}
		w.checkCancelled()
		return nil
	})
	w.known, w.followedAt, w.followedDB = w.moved, commits, w.dbNow()
}

// sawDrain follows which runners are to take nothing new until they open a session.
func (w *world) sawDrain(a store.Audit) {
	for _, r := range w.runners {
		switch id := string(r.who.Runner); {
		case a.Action == "runner_drain" && a.Object == id:
			r.drained = true
		case a.Action == "session_opened" && a.Actor == id:
			r.drained = false
		}
	}
}

// sawProof counts proofs of termination that something waited for.
func (w *world) sawProof(a store.Audit) {
	m := &w.mirror
	k := store.AttemptKey{Job: a.Job, Epoch: a.Epoch}
	if a.Action != "terminated" {
		return
	}
	fenced := a.Actor == actor
	l := m.leases[k.Job]
	waits := m.attempts[k].State == ci.StateCancelling && (l == nil || l.row.Epoch != k.Epoch)
	quarantined := slices.ContainsFunc(m.occupied, func(o store.Occupant) bool {
		return o.Job == k.Job && o.Epoch == k.Epoch && o.Quarantined > 0
	})
	switch {
	case waits && fenced:
		w.saw(evCancelFence)
	case waits:
		w.saw(evCancelProof)
	}
	switch {
	case quarantined && fenced:
		w.saw(evQuarantineFence)
	case quarantined:
		w.saw(evQuarantineProof)
	}
}

func (w *world) followRuns(tx *store.Tx, ids []ci.RunID) error {
	m := &w.mirror
	for _, id := range ids {
		run, ok, err := tx.Run(w.ctx, id)
		if err != nil {
			return err
		}
		if !ok { // a refused call named a run that is not there
			continue
		}
		jobs, err := tx.JobsOfRun(w.ctx, id)
		if err != nil {
			return err
		}
		old, known := m.runs[id]
		if !known {
			m.runOrder = append(m.runOrder, id)
			keys := make([]ci.JobID, len(jobs))
			for i, j := range jobs {
				keys[i] = j.ID
				m.jobOrder = append(m.jobOrder, j.ID)
			}
			specs, err := tx.Specs(w.ctx, keys)
			if err != nil {
				return err
			}
			for _, j := range jobs {
				var spec ci.JobSpec
				if err := json.Unmarshal([]byte(specs[j.ID]), &spec); err != nil {
					return err
				}
				m.specs[j.ID] = spec
			}
		}
		w.compareRun(old, run, known)
		if !known && !slices.ContainsFunc(jobs, func(j store.Job) bool { return j.Conclusion != ci.ConclusionSkipped }) {
			w.saw(evAllSkipped)
		}
		if !known && slices.ContainsFunc(jobs, func(j store.Job) bool { return j.PinnedFrom != "" }) {
			w.saw(evRetryPinned)
		}
		m.runs[id] = run
		for _, j := range jobs {
			w.compareJob(m.jobs[j.ID], j, known)
			m.jobs[j.ID] = j
		}
	}
	return nil
}

func (w *world) compareRun(was, is store.Run, known bool) {
	w.reachRun(was, is, known)
	if !known {
		return
	}
	switch {
	case was.State == ci.StateFinished && (is.State != was.State || is.Conclusion != was.Conclusion || is.Reason != was.Reason || is.FinishedUS != was.FinishedUS):
		w.bad("finished is final", "run %s was %s %s and is %s %s", is.ID, was.State, was.Conclusion, is.State, is.Conclusion)
	case was.State == ci.StateCancelling && is.State != ci.StateCancelling && is.Conclusion != ci.ConclusionCancelled:
		w.bad("LP-7", "run %s was cancelling and is %s %s", is.ID, is.State, is.Conclusion)
	case is.CancelVersion < was.CancelVersion:
		w.bad("I2", "cancel version of run %s fell", is.ID)
	case is.JobsLeft > was.JobsLeft:
		w.bad("finished is final", "run %s has more jobs left than before", is.ID)
	}
}

func (w *world) compareJob(was, is store.Job, known bool) {
	if is.State == ci.StateReady && (was.State != is.State || is.Generation != was.Generation) {
		w.mirror.readied++
	}
	w.reachJob(was, is)
	if !known || was.ID == "" {
		return
	}
	switch {
	case is.Epoch < was.Epoch:
		w.bad("I2 epoch never falls", "job %s: %d after %d", is.ID, is.Epoch, was.Epoch)
	case is.Generation < was.Generation:
		w.bad("I2 epoch never falls", "generation of job %s: %d after %d", is.ID, is.Generation, was.Generation)
	case was.State == ci.StateFinished && (is.State != was.State || is.Conclusion != was.Conclusion || is.Reason != was.Reason ||
		is.Epoch != was.Epoch || is.Outputs != was.Outputs || is.FinishedUS != was.FinishedUS):
		w.bad("I1 one result", "job %s was %s %s and is %s %s", is.ID, was.State, was.Conclusion, is.State, is.Conclusion)
	case was.State == ci.StateCancelling && is.State != ci.StateCancelling && is.Conclusion != ci.ConclusionCancelled:
		w.bad("LP-7", "job %s was cancelling and is %s %s", is.ID, is.State, is.Conclusion)
	case is.InfraUsed < was.InfraUsed || is.GrantedUsed < was.GrantedUsed:
		w.bad("decision 1", "job %s: budget given back", is.ID)
	case is.InfraUsed > ci.DefaultInfraBudget:
		w.bad("decision 1", "job %s: %d attempts ended by infrastructure", is.ID, is.InfraUsed)
	case is.State == ci.StateReady && was.State == ci.StateRunning && is.Generation == was.Generation:
		w.bad("decision 4", "job %s returned to ready in the same generation", is.ID)
	}
	w.compareCancelled(was, is)
	if r := w.mirror.specs[is.ID].Retry; is.GrantedUsed > 0 && (r == nil || is.GrantedUsed > int64(r.Max)) {
		w.bad("decision 1", "job %s: %d further attempts granted", is.ID, is.GrantedUsed)
	}
}

// compareCancelled requires proof of termination of every attempt: a timeout
// alone never says cancelled.
func (w *world) compareCancelled(was, is store.Job) {
	m := &w.mirror
	if was.State == ci.StateFinished || is.State != ci.StateFinished || is.Conclusion != ci.ConclusionCancelled {
		return
	}
	m.cancelled = append(m.cancelled, is.ID)
	for epoch := range is.Epoch {
		a, known := m.attempts[store.AttemptKey{Job: is.ID, Epoch: epoch + 1}]
		if known && a.Evidence == "" {
			w.bad("LP-7", "job %s is cancelled and nothing proves that attempt %d has ended", is.ID, a.Epoch)
		}
	}
	for _, b := range m.boxes {
		if b.key.Job == is.ID && b.alive && !b.excused {
			w.bad("LP-7", "job %s is cancelled and attempt %d still runs on %s", is.ID, b.key.Epoch, b.runner.name)
		}
	}
}

// checkCancelled requires that no attempt of what was cancelled in this step
// occupies a runner.
func (w *world) checkCancelled() {
	m := &w.mirror
	for _, o := range m.occupied {
		j := m.jobs[o.Job]
		if run := m.runs[j.Run]; slices.Contains(m.cancelled, o.Job) || run.State == ci.StateFinished && run.Conclusion == ci.ConclusionCancelled {
			w.bad("LP-7", "job %s of run %s is %s %s, the run is %s %s, and attempt %d occupies a runner", o.Job, j.Run, j.State, j.Conclusion,
				run.State, run.Conclusion, o.Epoch)
		}
	}
	m.cancelled = m.cancelled[:0]
}

func (w *world) followAttempts(tx *store.Tx, ks []store.AttemptKey) error {
	if len(ks) == 0 {
		return nil
	}
	rows, err := tx.Attempts(w.ctx, ks)
	if err != nil {
		return err
	}
	for _, a := range rows {
		w.compareAttempt(a)
	}
	return nil
}

func (w *world) compareAttempt(a store.Attempt) {
	m := &w.mirror
	k := store.AttemptKey{Job: a.Job, Epoch: a.Epoch}
	was, known := m.attempts[k]
	m.attempts[k] = a
	if !known {
		m.refs = append(m.refs, a.Ref())
		return
	}
	switch {
	case a.Ref() != was.Ref():
		w.bad("I2 epoch never falls", "attempt %v became %v", was.Ref(), a.Ref())
	case was.State == ci.StateFinished && (a.State != was.State || a.Conclusion != was.Conclusion || a.Reason != was.Reason ||
		a.Winner != was.Winner || a.EndRequest != was.EndRequest || a.EndAnswer != was.EndAnswer || a.EndedUS != was.EndedUS ||
		was.Evidence != "" && a.Evidence != was.Evidence || a.Phase != was.Phase):
		w.bad("I1 one result", "attempt %s/%d was %s and is %s", a.Job, a.Epoch, was.Conclusion, a.Conclusion)
	case a.Phase.Order() < was.Phase.Order():
		w.bad("LP-1", "attempt %s/%d went back from %s to %s", a.Job, a.Epoch, was.Phase, a.Phase)
	}
	if was.State != ci.StateFinished && a.State == ci.StateFinished || was.Conclusion == "" && a.Conclusion != "" {
		w.checkExpiry(a)
	}
}

// checkExpiry requires that a lease lived as long as was promised: a jump of the
// database's clock expires nothing.
func (w *world) checkExpiry(a store.Attempt) {
	if a.Reason != ci.ReasonRunnerLost && a.Reason != ci.ReasonLeaseOmitted {
		return
	}
	l := w.mirror.leases[a.Job]
	if l == nil || l.row.Epoch != a.Epoch || l.excused {
		return
	}
	early := l.fair - w.fair.read(w.now)
	if early > ttlUS/4 { // a difference of up to this is no jump
		w.bad("a jump of the clock expires nothing", "attempt %s/%d was ended as %s %.1f s early", a.Job, a.Epoch, a.Reason, float64(early)/1e6)
	}
}

func (w *world) followLeases(tx *store.Tx) error {
	m := &w.mirror
	const most = 100 // as the engine asks: SQLite prepares the statement again for another
	rows, err := tx.ExpiredLeases(w.ctx, math.MaxInt64, most)
	if err != nil {
		return err
	}
	if len(rows) == most {
		w.bad("model", "there are more leases than are looked at")
	}
	next := make(map[ci.JobID]*leased, len(rows))
	m.leaseOrder = m.leaseOrder[:0]
	for _, l := range rows {
		m.leaseOrder = append(m.leaseOrder, l.Job)
		was := m.leases[l.Job]
		if was != nil && was.row.Ref() == l.Ref() && was.row.ExpiresUS == l.ExpiresUS {
			was.row = l
			next[l.Job] = was
			continue
		}
		if was != nil && l.Epoch < was.row.Epoch {
			w.bad("I2 epoch never falls", "lease of %s: epoch %d after %d", l.Job, l.Epoch, was.row.Epoch)
		}
		// What was given in this step was given before its calls had taken their time.
		given := l.ExpiresUS - ttlUS
		n := &leased{row: l, fair: w.fair.read(w.db.when(w.now, given)) + ttlUS}
		if was != nil && was.row.Ref() == l.Ref() && (given < w.followedDB || given > w.dbNow()) { // moved, not renewed
			n.fair, n.excused = was.fair, was.excused
		}
		next[l.Job] = n
	}
	slices.Sort(m.leaseOrder)
	m.leases = next
	return nil
}

// followSlots requires that what runs in truth is accounted, and that no runner
// has more than it has slots.
func (w *world) followSlots(tx *store.Tx) error {
	m := &w.mirror
	m.occupied = m.occupied[:0]
	count := map[ci.RunnerID]int{}
	taken := map[store.AttemptKey]bool{}
	for _, o := range w.orgs {
		rows, err := tx.ReadOccupancy(w.ctx, o.id)
		if err != nil {
			return err
		}
		m.occupied = append(m.occupied, rows...)
	}
	for _, o := range m.occupied {
		count[o.Runner]++
		taken[store.AttemptKey{Job: o.Job, Epoch: o.Epoch}] = true
	}
	for _, r := range w.runners {
		if n := count[r.who.Runner]; n > r.slots {
			w.bad("LP-8", "%d attempts occupy %s, which has %d slots", n, r.name, r.slots)
		}
	}
	for _, b := range m.boxes {
		if b.alive && !b.excused && !taken[b.key] {
			w.bad("LP-8", "attempt %s/%d still runs on %s and its slot is free", b.key.Job, b.key.Epoch, b.runner.name)
		}
	}
	return nil
}

// userCode is told when a process of the user starts: what it needs is finished,
// its phase is recorded, and no earlier attempt started one unless policy allows it.
func (w *world) userCode(k *work) {
	m := &w.mirror
	w.read(func(tx *store.Tx) error {
		a, _, err := tx.Attempt(w.ctx, k.ref.Job, k.ref.Epoch)
		if err != nil {
			return err
		}
		if !a.Phase.UserCodeMayHaveRun() {
			w.bad("decision 1", "user code of %s starts in phase %s", k.ref.Job, a.Phase)
		}
		needs, err := tx.NeedsOf(w.ctx, []ci.JobID{k.ref.Job})
		if err != nil {
			return err
		}
		for _, n := range needs[k.ref.Job] {
			if n.State != ci.StateFinished {
				w.bad("I6", "job %s starts while %s is %s", k.ref.Job, n.ID, n.State)
			}
		}
		return nil
	})
	m.runsCode[k.ref.Job]++
	most := 1
	if r := k.ticket.Job.Retry; r != nil {
		most += r.Max
	}
	if n := m.runsCode[k.ref.Job]; n > most {
		w.bad("decision 1", "job %s ran %d times, its policy allows %d", k.ref.Job, n, most)
	}
}

// checkTicket compares a claim's answer with the database.
func (w *world) checkTicket(r *runner, t *protocol.Ticket) {
	w.read(func(tx *store.Tx) error {
		l, ok, err := tx.Lease(w.ctx, t.Lease.Job)
		if err != nil {
			return err
		}
		if !ok || l.Ref() != t.Lease {
			w.bad("what is answered is stored", "claim of %s: %v, the lease is %v", r.name, t.Lease, l.Ref())
		}
		if t.Lease.Runner != r.who.Runner || l.Org != r.org.id {
			w.bad("ID-4", "%s was given %v of %s", r.name, t.Lease, l.Org)
		}
		needs, err := tx.NeedsOf(w.ctx, []ci.JobID{t.Lease.Job})
		if err != nil {
			return err
		}
		for _, n := range needs[t.Lease.Job] {
			if _, ok := t.Needs[n.Key]; !ok || n.State != ci.StateFinished {
				w.bad("I6", "job %s was given out before %s (%s)", t.Lease.Job, n.ID, n.State)
			}
			failed := n.Conclusion == ci.ConclusionFailed || n.Conclusion == ci.ConclusionTimedOut
			if t.Job.If == "" && !n.Conclusion.Succeeded() && !(failed && n.AllowFailure != 0) {
				w.bad("WF-3", "job %s was given out although %s is %s", t.Lease.Job, n.ID, n.Conclusion)
			}
		}
		bindings, err := tx.BindingsOfRun(w.ctx, t.Lease.Run)
		if err != nil {
			return err
		}
		for _, want := range t.Job.Restore {
			for _, n := range needs[t.Lease.Job] {
				bound := slices.ContainsFunc(bindings, func(b store.Binding) bool { return b.Job == n.ID && b.Name == want.Name })
				given := slices.ContainsFunc(t.Restore, func(g protocol.RestoreArtifact) bool { return g.Name == want.Name })
				if n.Name == want.FromJob && bound && !given {
					w.bad("AR-4", "job %s was not given artifact %s of %s", t.Lease.Job, want.Name, n.Name)
				}
			}
		}
		for _, g := range t.Restore {
			if !slices.ContainsFunc(bindings, func(b store.Binding) bool { return b.Artifact.ID == g.ID && b.Artifact.State == store.ArtifactSealed }) {
				w.bad("I8", "job %s was given artifact %s, which nothing binds", t.Lease.Job, g.ID)
			}
		}
		return nil
	})
}

// checkRenewed compares the answer to a heartbeat that arrived at a time with the
// database. What was renewed need not be live any more: the answer may have taken
// longer, inside the server (which records that the session is back) as on its way,
// and promises nothing that the runner counts from when it asked.
func (w *world) checkRenewed(refs []ci.LeaseRef, rep protocol.HeartbeatReply, arrived int64) {
	w.read(func(tx *store.Tx) error {
		for i, ref := range refs {
			l, ok, err := tx.Lease(w.ctx, ref.Job)
			if err != nil {
				return err
			}
			held := ok && l.Ref() == ref
			switch rep.Leases[i].Answer {
			case protocol.LeaseGone:
				w.rejects[rep.Leases[i].Reject]++
				if held && l.ExpiresUS > w.dbNow() {
					w.bad("the holder is heard", "heartbeat: %v is current and was called lost", ref)
				}
			case protocol.LeaseRenewed, protocol.LeaseCancel:
				if !held || l.ExpiresUS-ttlUS < arrived {
					w.bad("what is answered is stored", "heartbeat: %v was renewed", ref)
				}
				if (l.Cancel != 0) != (rep.Leases[i].Answer == protocol.LeaseCancel) {
					w.bad("LP-4", "heartbeat: %v answered %s, cancel is %d", ref, rep.Leases[i].Answer, l.Cancel)
				}
				if was := w.mirror.leases[ref.Job]; was == nil || was.row.Ref() != ref || w.mirror.expired(w, was, l.ExpiresUS-ttlUS) {
					w.bad("I3 fencing", "heartbeat: %v was renewed after it had run out", ref)
				}
			}
		}
		return nil
	})
}

// expired reports whether a lease had run out at a time in this step; a repair of
// the clock in it counts.
func (m *mirror) expired(w *world, l *leased, now int64) bool {
	return repaired(l.row.ExpiresUS, w.moved-w.known) <= now
}

// repaired is until when a lease may live that would have run out at a time, if a
// repair has moved deadlines by so much. A node that had not looked at the clock
// for long gives more, up to a TTL from then: seed 21012 waited 71 s for a lock.
func repaired(expiresUS, moved int64) int64 {
	if moved <= 0 { // none is shortened below what is left of a TTL
		return expiresUS
	}
	return math.MaxInt64
}

// checkEnd compares the answer to a completion or hand-over with the database.
func (w *world) checkEnd(ref ci.LeaseRef, request string, rep protocol.Completed) {
	w.read(func(tx *store.Tx) error {
		a, _, err := tx.Attempt(w.ctx, ref.Job, ref.Epoch)
		if err != nil {
			return err
		}
		text, err := json.Marshal(rep)
		if err != nil {
			return err
		}
		if a.EndRequest != request || a.EndAnswer != string(text) || a.State != ci.StateFinished {
			w.bad("what is answered is stored", "end of %v: answered %s, stored %s by %s (%s)", ref, text, a.EndAnswer, a.EndRequest, a.State)
		}
		j, _, err := tx.Job(w.ctx, ref.Job)
		if err == nil && rep.State == ci.StateFinished && (j.State != ci.StateFinished || j.Conclusion != rep.Conclusion) {
			w.bad("what is answered is stored", "end of %v: answered %v, the job is %s %s", ref, rep, j.State, j.Conclusion)
		}
		if l, ok, err := tx.Lease(w.ctx, ref.Job); err != nil {
			return err
		} else if ok && l.Epoch == ref.Epoch {
			w.bad("LP-6", "attempt %v ended and holds its lease", ref)
		}
		return err
	})
}

// checkSealed compares the answer to a seal with the database and the object store.
func (w *world) checkSealed(k *work, id string) {
	w.read(func(tx *store.Tx) error {
		a, ok, err := tx.ArtifactSession(w.ctx, k.r.org.id, id)
		if err == nil && (!ok || a.State != store.ArtifactSealed) {
			w.bad("what is answered is stored", "seal of %s: %s", id, a.State)
		}
		if err == nil {
			w.checkObject(a.Artifact)
		}
		return err
	})
}

// checkObject requires the whole object of a visible artifact.
func (w *world) checkObject(a store.Artifact) {
	o, ok := w.blobs.objects[a.BlobKey]
	if !ok || int64(len(o.data)) != a.Size || "sha256:"+hexSum(o.data) != a.Digest {
		w.bad("I8", "artifact %s is %s and its object is not there", a.ID, a.State)
	}
}

// full compares everything.
func (w *world) full() {
	w.checkLogs(2)
	var found []string
	w.aside(func() {
		var err error
		found, err = w.store.Inconsistencies(w.ctx)
		w.must(err)
	})
	for _, f := range found {
		w.bad("rows agree", "%s", f)
	}
	m := &w.mirror
	w.read(func(tx *store.Tx) error {
		for _, id := range m.runOrder {
			run, _, err := tx.Run(w.ctx, id)
			if err != nil {
				return err
			}
			if old := m.runs[id]; run != old {
				if old.State != run.State || old.JobsLeft != run.JobsLeft || old.CancelVersion != run.CancelVersion {
					w.bad("ID-5", "run %s changed without an entry in the trail: %s, %s", id, old.State, run.State)
				}
				w.compareRun(old, run, true)
				m.runs[id] = run
			}
		}
		return w.followSlots(tx)
	})
}

// finally compares what is compared once.
func (w *world) finally() {
	m := &w.mirror
	w.full()
	w.read(func(tx *store.Tx) error {
		for _, id := range m.runOrder {
			jobs, err := tx.JobsOfRun(w.ctx, id)
			if err != nil {
				return err
			}
			for _, j := range jobs {
				w.compareJob(m.jobs[j.ID], j, true)
				attempts, err := tx.AttemptsOfJob(w.ctx, j.ID)
				if err != nil {
					return err
				}
				for _, a := range attempts {
					w.compareAttempt(a)
				}
			}
			bindings, err := tx.BindingsOfRun(w.ctx, id)
			if err != nil {
				return err
			}
			for _, b := range bindings {
				w.checkObject(b.Artifact)
			}
			for _, j := range jobs {
				for _, p := range m.specs[j.ID].Publish {
					bound := slices.ContainsFunc(bindings, func(b store.Binding) bool { return b.Job == j.ID && b.Name == p.Name })
					if j.Conclusion == ci.ConclusionSuccess && !p.Optional && !bound {
						w.bad("LP-6", "job %s succeeded without its artifact %s", j.ID, p.Name)
					}
					if bound && j.Conclusion != ci.ConclusionSuccess {
						w.bad("LP-6", "job %s is %s and binds %s", j.ID, j.Conclusion, p.Name)
					}
				}
			}
		}
		return nil
	})
	w.collectAll()
}
