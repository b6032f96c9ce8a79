package sim

import (
	"time"

	"forgeci/internal/ci"
)

// storeFault is one thing that goes wrong with the object store in a step.
type storeFault struct {
	kind string
	nth  int
}

// Faults of the object store.
const (
	flStoreBefore = "object store: 5xx, not stored"
	flStoreAfter  = "object store: 5xx, but stored"
	flStoreCut    = "object store: body cut"
	flStoreWrong  = "object store: wrong bytes"
	flStoreSlow   = "object store: slow"
	flStoreUnseen = "object store: not found right after it was stored"
	flStoreStale  = "object store: stale list"
	flCrashBefore = "crash before a call to the object store"
	flCrashBehind = "crash behind a call to the object store"
)

func storeFaults() []string {
	return []string{flStoreBefore, flStoreAfter, flStoreCut, flStoreWrong, flStoreSlow, flStoreUnseen, flStoreStale, flCrashBefore, flCrashBehind}
}

// drawStoreFault decides what goes wrong with the step's use of the object store.
func (w *world) drawStoreFault() *storeFault {
	r := w.frng
	if w.healing || w.calm[w.step] || r.IntN(100) >= 60 {
		return nil
	}
	kinds := storeFaults()
	return &storeFault{kind: kinds[r.IntN(len(kinds))], nth: 1 + r.IntN(2)}
}

// storeFails is what the object store does with a call.
func (w *world) storeFails(call string) (m mishap) {
	f := w.storePlan
	if f == nil {
		return m
	}
	reads, lists := call == "Open", call == "List"
	switch f.kind {
	case flStoreCut, flStoreWrong:
		if !reads {
			return m
		}
	case flStoreUnseen:
		if !reads && call != "Stat" {
			return m
		}
	case flStoreStale:
		if !lists {
			return m
		}
	case flCrashBefore, flCrashBehind:
		if w.serving == nil {
			return m
		}
	}
	if f.nth--; f.nth > 0 {
		return m
	}
	w.storePlan = nil
	w.wrong(f.kind)
	w.tell("  fault: %s at %s", f.kind, call)
	unavailable := func() error { return ci.Errorf(ci.ErrUnavailable, "the object store answers 503") }
	end := func() error { panic(crash{}) }
	at := w.frng.Int64N(1 << 20)
	switch f.kind {
	case flStoreBefore:
		m.before = unavailable
	case flStoreAfter:
		m.after = unavailable
	case flCrashBefore:
		m.before = end
	case flCrashBehind:
		m.after = end
	case flStoreSlow:
		w.pass(w.frng.Int64N(ttlUS))
	case flStoreCut:
		m.bytes = func(b []byte) []byte { return b[:at%int64(len(b)+1)] }
	case flStoreWrong:
		m.bytes = func(b []byte) []byte {
			if len(b) > 0 {
				b[at%int64(len(b))] ^= 0x20
			}
			return b
		}
	case flStoreUnseen, flStoreStale:
		m.unseen = 5 * time.Minute
	}
	return m
}

// damageDownload lets a runner's download go wrong now and then: there are few of
// them while things go wrong.
func (w *world) damageDownload() {
	if r := w.frng; !w.healing && !w.calm[w.step] && r.IntN(3) == 0 {
		kinds := []string{flStoreCut, flStoreWrong, flStoreUnseen, flStoreBefore}
		w.storePlan = &storeFault{kind: kinds[r.IntN(len(kinds))], nth: 1}
	}
}
