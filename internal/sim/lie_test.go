package sim

import (
	"fmt"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/engine"
)

// lie lets a runner break the protocol.
func (w *world) lie() {
	r := w.rng
	if len(w.mirror.refs) == 0 {
		return
	}
	ref := w.mirror.refs[r.IntN(len(w.mirror.refs))]
	if n := len(w.mirror.leases); n > 0 && r.IntN(3) > 0 {
		ref = w.mirror.leases[w.mirror.leaseOrder[r.IntN(n)]].row.Ref()
	}
	liar := w.runners[r.IntN(len(w.runners))]
	for _, rn := range w.runners {
		if rn.who.Runner == ref.Runner && r.IntN(4) > 0 {
			liar = rn
		}
	}
	if !liar.registered {
		return
	}
	w.wrong("lie")
	other := w.mirror.refs[r.IntN(len(w.mirror.refs))]
	refused := []ci.Kind{ci.ErrLeaseLost, ci.ErrRunEnded, ci.ErrNotFound}
	bad := ref
	switch r.IntN(12) {
	case 0:
		bad.Run = other.Run
	case 1:
		bad.Job = other.Job
	case 2:
		bad.Runner = w.runners[r.IntN(len(w.runners))].who.Runner
	case 3:
		bad.Session = other.Session
	case 4:
		bad.Lease = other.Lease
	case 5:
		bad.Epoch = max(bad.Epoch+int64(1-2*r.IntN(2)), 1)
	default:
		if liar.who.Runner == ref.Runner {
			w.holderLies(liar, ref)
			return
		}
	}
	if bad == ref && liar.who.Runner == ref.Runner {
		bad.Lease += "x"
	}
	w.send(w.lieCall(liar, bad, refused, r.IntN(6)))
}

func terminated() protocol.Evidence { return protocol.Evidence{Terminated: true, How: "cgroup"} }

// lieCall is a call under a tuple that is not the caller's.
func (w *world) lieCall(liar *runner, ref ci.LeaseRef, kinds []ci.Kind, route int) *call {
	text := fmt.Sprintf("lie of %s: %s/%s/%s/%s/%s/%d", liar.name, short(ref.Run), short(ref.Job), short(ref.Runner), short(ref.Session),
		short(ref.Lease), ref.Epoch)
	c := &call{text: text, who: liar.who, lie: kinds}
	request := w.newID(ci.PrefixRequest)
	use := func(name string, access engine.Access, exec func(*node, engine.Held) (any, error)) {
		c.route = name
		c.exec = func(n *node) (any, error) { return w.leaseCall(n, liar.who, ref, name, access, nil, exec) }
	}
	switch route {
	case 0:
		use(routePhase, engine.ActiveOnly, func(n *node, h engine.Held) (any, error) {
			return nil, n.e.SetPhase(w.ctx, h, protocol.SetPhase{RequestID: request, Phase: ci.PhaseFinalising})
		})
	case 1:
		use(routeHandOver, engine.ActiveOnly, func(n *node, h engine.Held) (any, error) {
			return n.e.HandOver(w.ctx, h, protocol.HandOver{RequestID: request, Reason: ci.ReasonRunnerShutdown, Evidence: terminated()})
		})
	case 2:
		use(routeBegin, engine.ActiveOnly, func(n *node, h engine.Held) (any, error) {
			return n.files.Begin(w.ctx, h, protocol.NewArtifact{RequestID: request, Name: "out", Size: 1, Digest: sourceDigest, Files: 1}, request)
		})
	case 3:
		c.route = routeHeartbeat
		c.exec = func(n *node) (any, error) {
			got, err := n.e.Renew(w.ctx, liar.who, ref.Session, []ci.LeaseRef{ref})
			if err == nil && got.Leases[0].Answer == protocol.LeaseGone {
				err = ci.Rejected(got.Leases[0].Reject)
			}
			return got, err
		}
	default:
		use(routeComplete, engine.WhileCancelling, func(n *node, h engine.Held) (any, error) {
			return n.e.Complete(w.ctx, h, protocol.Complete{RequestID: request, Conclusion: ci.ConclusionSuccess, SourceDigest: sourceDigest, Evidence: terminated()})
		})
	}
	return c
}

// holderLies lets the holder of a lease say what is not true.
func (w *world) holderLies(liar *runner, ref ci.LeaseRef) {
	request := w.newID(ci.PrefixRequest)
	c := &call{route: routeComplete, text: "lie of " + liar.name + " about " + short(ref.Job), who: liar.who}
	complete := func(what string, req protocol.Complete, kinds ...ci.Kind) {
		req.RequestID = request
		c.text += ": " + what
		c.lie = append(kinds, ci.ErrNotFound)
		c.exec = func(n *node) (any, error) {
			return w.leaseCall(n, liar.who, ref, routeComplete, engine.WhileCancelling, nil, func(n *node, h engine.Held) (any, error) {
				return n.e.Complete(w.ctx, h, req)
			})
		}
	}
	spec, ok := w.mirror.specs[ref.Job]
	switch n := w.rng.IntN(6); {
	case n == 0:
		complete("wrong source", protocol.Complete{Conclusion: ci.ConclusionSuccess, SourceDigest: "sha256:ff", Evidence: terminated()}, ci.ErrDigest)
	case n == 1:
		complete("no evidence", protocol.Complete{Conclusion: ci.ConclusionFailed}, ci.ErrInvalid)
	case n == 2:
		complete("undeclared output", protocol.Complete{
			Conclusion: ci.ConclusionSuccess, SourceDigest: sourceDigest, Evidence: terminated(),
			Outputs: map[string]string{"w": "1"},
		}, ci.ErrInvalid)
	case n == 3 && ok && needsArtifact(spec):
		complete("success without its artifact", protocol.Complete{
			Conclusion: ci.ConclusionSuccess, SourceDigest: sourceDigest,
			Evidence: terminated(),
		}, ci.ErrConflict)
	case n == 4 && ok && needsArtifact(spec):
		complete("an artifact that is not sealed", protocol.Complete{
			Conclusion: ci.ConclusionSuccess, SourceDigest: sourceDigest,
			Evidence: terminated(), Artifacts: map[string]string{"out": "art_nothing"},
		}, ci.ErrConflict)
	default:
		c.route = "occupancy"
		var others []protocol.AttemptRef
		for _, o := range w.mirror.refs {
			if o.Runner != liar.who.Runner {
				others = append(others, protocol.AttemptRef{Job: o.Job, Epoch: o.Epoch})
			}
		}
		c.text += fmt.Sprintf(": %d attempts of others have ended", len(others))
		c.exec = func(n *node) (any, error) {
			return nil, n.e.Occupancy(w.ctx, liar.who, protocol.Occupancy{Session: ref.Session, Terminated: others})
		}
		c.may = []ci.Kind{ci.ErrNotFound}
	}
	w.send(c)
}

func needsArtifact(spec ci.JobSpec) bool {
	for _, p := range spec.Publish {
		if !p.Optional {
			return true
		}
	}
	return false
}
