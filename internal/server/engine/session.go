package engine

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/policy"
	"forgeci/internal/server/store"
)

// How far a runner's clock may differ before it is told.
const clockTold = 5 * time.Minute

// Register makes the runner of a public key, or finds it again, and gives it the
// credential that it has made; the hash is what is stored. Earlier credentials of
// the same runner stop working and never work again: a repeat of the latest
// registration changes nothing, one of an earlier is ErrConflict.
//
// granted are the labels that the registration allows, "*" for all that the
// runner declares (SPEC decision 13); they take effect with its next session.
func (e *Engine) Register(ctx context.Context, org ci.OrgID, actor string, granted []string, req protocol.Register, credentialHash string) (ci.RunnerID, error) {
	switch {
	case !isText(req.Name, 128):
		return "", invalid("/name", "1 to 128 printable characters are needed")
	case len(req.PublicKey) != 32:
		return "", invalid("/public_key", "32 bytes of an Ed25519 key are needed, in base64")
	}
	grants, err := json.Marshal(append([]string{}, granted...))
	if err != nil {
		return "", err
	}
	var id ci.RunnerID
	err = e.transact(ctx, func(ctx context.Context, t *txn) error {
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		r, err := t.EnsureRunner(ctx, store.Runner{
			ID: ci.RunnerID(e.IDs.New(ci.PrefixRunner)), Org: org, Name: req.Name,
			PublicKey: hex.EncodeToString(req.PublicKey), Granted: string(grants),
		}, now)
		if err != nil {
			return err
		}
		id = r.ID
		switch had, ok, err := t.CredentialByHash(ctx, credentialHash); {
		case err != nil:
			return err
		case ok && had.Runner == id && had.RevokedUS == 0:
			return nil // a repeat
		case ok:
			return ci.Errorf(ci.ErrConflict, "this credential was replaced: make a new one")
		}
		if err := t.RevokeRunnerCredentials(ctx, id, now); err != nil {
			return err
		}
		t.record(store.Audit{Org: org, Actor: actor, Action: "runner_registered", Object: string(id), Detail: req.Name})
		t.say("runner registered", "runner", id, "name", req.Name)
		return t.InsertCredential(ctx, store.Credential{
			ID: e.IDs.New(ci.PrefixToken), Org: org, Kind: "runner", Actor: string(id),
			Runner: id, CreatedUS: now,
		}, credentialHash)
	})
	return id, err
}

// OpenSession begins a process life of a runner. Earlier sessions of the runner
// end: nothing more is given to them. Attempts that the request reports as
// terminated, or rules out as swept, end at once (reason runner_restarted,
// decided by phase and policy); others keep their leases. A fenced or draining runner is active again. The
// same request ID gives the same session. A request that does not name the
// runner's latest session opens none and is told it: only who has heard of a
// session may end it.
func (e *Engine) OpenSession(ctx context.Context, who Identity, req protocol.OpenSession) (protocol.SessionOpened, error) {
	switch {
	case req.RequestID == "" || len(req.RequestID) > 128:
		return protocol.SessionOpened{}, ci.Errorf(ci.ErrInvalid, "request_id: 1 to 128 characters are needed")
	case req.Protocol < protocol.MinVersion || req.Protocol > protocol.Version:
		return protocol.SessionOpened{}, ci.Errorf(ci.ErrIncompatible,
			"the runner speaks protocol %d, this server %d to %d: run matching versions", req.Protocol, protocol.MinVersion, protocol.Version)
	case req.Slots < 1 || req.Slots > 10_000:
		return protocol.SessionOpened{}, ci.Errorf(ci.ErrInvalid, "slots: 1 to 10000 are possible")
	}
	if err := errors.Join(validAttempts("/terminated", req.Terminated), validAttempts("/alive", req.Alive), validOffer(req.Offer)); err != nil {
		return protocol.SessionOpened{}, err
	}
	var session store.Session
	var served map[string]bool
	var ended []store.Session
	opened := protocol.SessionOpened{LeaseTTL: ci.Duration(e.LeaseTTL), LogLimit: e.LogLimit}
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		ended, opened.Latest = nil, ""
		runner, ok, err := t.LockRunner(ctx, who.Runner)
		if err != nil {
			return err
		}
		if !ok || runner.Org != who.Org {
			return ci.Errorf(ci.ErrNotFound, "no such runner")
		}
		old, repeated, err := t.SessionByRequest(ctx, who.Runner, req.RequestID)
		if err != nil {
			return err
		}
		if repeated {
			session, served = old, nil
			return nil
		}
		if req.After != runner.Session {
			session, opened.Latest = store.Session{State: "ended"}, runner.Session
			return nil
		}
		if ended, err = t.SessionsOfRunner(ctx, who.Runner); err != nil {
			return err
		}
		at, err := t.Now(ctx)
		if err != nil {
			return err
		}
		for _, s := range ended {
			if err := t.EndSession(ctx, s.ID, at); err != nil {
				return err
			}
		}
		// Nothing is given to the earlier sessions from here on.
		reported, err := t.reported(ctx, who, req)
		if err != nil {
			return err
		}
		if err := t.endReported(ctx, who, reported); err != nil {
			return err
		}
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		if d := time.Duration(req.At.UnixMicro()-now) * time.Microsecond; !req.At.IsZero() && max(d, -d) > clockTold {
			opened.ClockDiffers = ci.Duration(d)
		}
		if err := t.SetRunnerStatus(ctx, who.Runner, "active"); err != nil {
			return err
		}
		var granted []string
		if err := json.Unmarshal([]byte(runner.Granted), &granted); err != nil {
			return err
		}
		offer := policy.Offer{
			OS: req.Offer.OS, Arch: req.Offer.Arch, Size: req.Offer.Size, Isolation: req.Offer.Isolation,
			Labels: policy.Labels(req.Offer.Labels, granted), Features: req.Offer.Features,
		}
		var offerID string
		if offerID, served, err = t.internOffer(ctx, offer, now); err != nil {
			return err
		}
		session = store.Session{
			ID: ci.SessionID(e.IDs.New(ci.PrefixSession)), Org: who.Org, Runner: who.Runner,
			RequestID: req.RequestID, Offer: offerID, Slots: int64(req.Slots), Protocol: int64(req.Protocol),
			Version: clip(req.Version, 128), OpenedUS: now,
		}
		if err := t.InsertSession(ctx, session); err != nil {
			return err
		}
		t.reopenFor(who.Org)
		t.record(store.Audit{Org: who.Org, Actor: string(who.Runner), Action: "session_opened", Object: string(session.ID)})
		t.say("session opened", "session", session.ID, "runner", who.Runner, "name", runner.Name, "slots", req.Slots)
		return nil
	})
	if err != nil {
		return protocol.SessionOpened{}, err
	}
	for _, s := range ended {
		e.fleet.remove(s.ID)
	}
	if session.State != "ended" {
		e.fleet.add(session, served)
		e.nodes.tell(hints{Fleet: true})
		// A job that was submitted between the commit and this line was held, since
		// nobody seemed to serve it.
		e.poke()
	}
	opened.Session = session.ID
	return opened, nil
}

// reported returns the attempts that a new session proves to have ended: those
// it names, and when its host is swept all others of the runner but the live
// ones. That takes in attempts whose ticket never reached the runner, and those
// whose end was reported before (their slots are free) while their leases live on.
func (t *txn) reported(ctx context.Context, who Identity, req protocol.OpenSession) ([]protocol.AttemptRef, error) {
	if !req.Swept {
		return req.Terminated, nil
	}
	all, err := t.OccupancyOfRunner(ctx, who.Runner)
	if err != nil {
		return nil, err
	}
	live, err := t.LeasesOfRunner(ctx, who.Runner)
	if err != nil {
		return nil, err
	}
	for _, l := range live {
		all = append(all, store.AttemptKey{Job: l.Job, Epoch: l.Epoch})
	}
	out := slices.Clone(req.Terminated)
	named := make(map[protocol.AttemptRef]bool, len(req.Alive)+len(all))
	for _, a := range slices.Concat(req.Alive, out) {
		named[a] = true
	}
	for _, k := range all {
		if a := (protocol.AttemptRef{Job: k.Job, Epoch: k.Epoch}); !named[a] {
			named[a] = true
			out = append(out, a)
		}
	}
	return out, nil
}

// endReported ends the leases of attempts that their runner has proven to have
// ended, frees their slots and settles what waited for that.
func (t *txn) endReported(ctx context.Context, who Identity, reported []protocol.AttemptRef) error {
	if len(reported) == 0 {
		return nil
	}
	keys := attemptKeys(reported)
	if err := t.lockAttempts(ctx, who.Runner, keys); err != nil {
		return err
	}
	live, err := t.LeasesOfRunner(ctx, who.Runner)
	if err != nil {
		return err
	}
	named := make(map[store.AttemptKey]bool, len(keys))
	for _, k := range keys {
		named[k] = true
	}
	var found []store.Lease
	for _, l := range live {
		if named[store.AttemptKey{Job: l.Job, Epoch: l.Epoch}] {
			found = append(found, l)
		}
	}
	if len(found) > 0 {
		err := t.endAgainst(ctx, found, evidenceReported,
			func(store.Lease, int64) (ci.Reason, bool) { return ci.ReasonRunnerRestarted, true }, string(who.Runner))
		if err != nil {
			return err
		}
	}
	released, err := t.ReleaseOwnOccupancy(ctx, who.Runner, keys)
	if err != nil {
		return err
	}
	return t.settleTerminated(ctx, released, evidenceReported, string(who.Runner))
}

// Words of evidence that does not come with a result.
const (
	evidenceUnstarted = "nothing was started"
	evidenceReported  = "reported by the runner"
	evidenceFenced    = "host fenced by an operator"
)

func attemptKeys(rs []protocol.AttemptRef) []store.AttemptKey {
	out := make([]store.AttemptKey, len(rs))
	for i, r := range rs {
		out[i] = store.AttemptKey{Job: r.Job, Epoch: r.Epoch}
	}
	return out
}

// Occupancy takes a runner's report that attempts have ended, also past ones: it
// frees slots and ends no lease. A runner that stops an attempt because it cannot
// trust the lease any more reports it while the server still does: the report
// stays known, and when the lease runs out the attempt's end is proven.
func (e *Engine) Occupancy(ctx context.Context, who Identity, req protocol.Occupancy) error {
	if err := validAttempts("/terminated", req.Terminated); err != nil {
		return err
	}
	if err := e.ownSession(ctx, who, req.Session); err != nil {
		return err
	}
	return e.transact(ctx, func(ctx context.Context, t *txn) error {
		keys := attemptKeys(req.Terminated)
		if err := t.lockAttempts(ctx, who.Runner, keys); err != nil {
			return err
		}
		released, err := t.ReleaseOwnOccupancy(ctx, who.Runner, keys)
		if err != nil {
			return err
		}
		return t.settleTerminated(ctx, released, evidenceReported, string(who.Runner))
	})
}

// DrainSession stops giving jobs to a session; gone also ends it.
func (e *Engine) DrainSession(ctx context.Context, who Identity, req protocol.Drain) error {
	if err := e.ownSession(ctx, who, req.Session); err != nil {
		return err
	}
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		if _, err := t.LockSessions(ctx, []ci.SessionID{req.Session}); err != nil {
			return err
		}
		if !req.Gone {
			t.record(store.Audit{Org: who.Org, Actor: string(who.Runner), Action: "session_draining", Object: string(req.Session)})
			return t.DrainSession(ctx, req.Session)
		}
		now, err := t.lockedNow(ctx)
		if err != nil {
			return err
		}
		if err := t.EndSession(ctx, req.Session, now); err != nil {
			return err
		}
		t.record(store.Audit{Org: who.Org, Actor: string(who.Runner), Action: "session_ended", Object: string(req.Session)})
		t.say("session ended", "session", req.Session, "runner", who.Runner)
		return t.closeUnserved(ctx)
	})
	if err == nil && req.Gone {
		e.fleet.remove(req.Session)
	}
	return err
}

// DrainRunner is the operator's drain: the runner takes nothing new until it
// opens a new session.
func (e *Engine) DrainRunner(ctx context.Context, org ci.OrgID, actor string, id ci.RunnerID) error {
	return e.transact(ctx, func(ctx context.Context, t *txn) error {
		r, ok, err := t.LockRunner(ctx, id)
		if err != nil {
			return err
		}
		if !ok || r.Org != org {
			return ci.Errorf(ci.ErrNotFound, "no runner %s", id)
		}
		if r.Status == "fenced" {
			return ci.Errorf(ci.ErrConflict, "the runner is fenced")
		}
		sessions, err := t.SessionsOfRunner(ctx, id)
		if err != nil {
			return err
		}
		for _, s := range sessions {
			t.signal(s.ID)
		}
		t.record(store.Audit{Org: org, Actor: actor, Action: "runner_drain", Object: string(id)})
		t.say("runner draining", "runner", id, "actor", actor)
		return t.SetRunnerStatus(ctx, id, "draining")
	})
}

// FenceRunner is the audited operator's statement that the runner's host is dead
// or cut off: its leases end (decided by phase and policy), all its slots are
// freed, jobs that wait for proof of termination are concluded, its sessions end.
func (e *Engine) FenceRunner(ctx context.Context, org ci.OrgID, actor string, id ci.RunnerID) error {
	var sessions []store.Session
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		r, ok, err := t.LockRunner(ctx, id)
		if err != nil {
			return err
		}
		if !ok || r.Org != org {
			return ci.Errorf(ci.ErrNotFound, "no runner %s", id)
		}
		if sessions, err = t.SessionsOfRunner(ctx, id); err != nil {
			return err
		}
		// The sessions end first: a claim that is under way is waited for and seen
		// below, and none comes behind it.
		at, err := t.Now(ctx)
		if err != nil {
			return err
		}
		for _, s := range sessions {
			if err := t.EndSession(ctx, s.ID, at); err != nil {
				return err
			}
		}
		taken, err := t.OccupancyOfRunner(ctx, id)
		if err != nil {
			return err
		}
		if err := t.lockAttempts(ctx, id, taken); err != nil {
			return err
		}
		leases, err := t.LeasesOfRunner(ctx, id)
		if err != nil {
			return err
		}
		if len(leases) > 0 {
			err := t.endAgainst(ctx, leases, evidenceFenced,
				func(store.Lease, int64) (ci.Reason, bool) { return ci.ReasonRunnerFenced, true }, actor)
			if err != nil {
				return err
			}
		}
		released, err := t.ReleaseRunnerOccupancy(ctx, id)
		if err != nil {
			return err
		}
		if err := t.settleTerminated(ctx, released, evidenceFenced, actor); err != nil {
			return err
		}
		t.record(store.Audit{Org: org, Actor: actor, Action: "runner_fence", Object: string(id)})
		t.say("runner fenced", "runner", id, "actor", actor, "leases", len(leases))
		if err := t.SetRunnerStatus(ctx, id, "fenced"); err != nil {
			return err
		}
		return t.closeUnserved(ctx)
	})
	if err == nil {
		for _, s := range sessions {
			e.fleet.remove(s.ID)
		}
	}
	return err
}

// sessionBack records that a session that was thought gone is heard of again.
func (e *Engine) sessionBack(ctx context.Context, s store.Session) error {
	if s.State == "ended" {
		return nil
	}
	err := e.transact(ctx, func(ctx context.Context, t *txn) error {
		back, err := t.SessionBack(ctx, s.ID)
		if back {
			t.reopenFor(s.Org)
			t.say("session back", "session", s.ID, "runner", s.Runner)
		}
		return err
	})
	if err != nil {
		return err
	}
	e.fleet.add(s, nil)
	e.poke() // what was held because nobody seemed to serve it
	return nil
}

// Online reports whether a session of the runner is present, how long ago it was
// heard of, and whether it was heard of at this node: what another node heard is
// known here only once it matters.
func (e *Engine) Online(id ci.RunnerID) (ok bool, ago time.Duration, here bool) {
	return e.fleet.online(id)
}
