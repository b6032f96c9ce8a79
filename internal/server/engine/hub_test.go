package engine

import (
	"fmt"
	"testing"

	"forgeci/internal/ci"
)

// Hints that nobody came for do not keep out those of sessions that will come.
func TestHintsForSessionsThatAreGoneMakeRoom(t *testing.T) {
	t.Parallel()
	h := newHub()
	gone := map[ci.SessionID]bool{}
	for i := range 2 * unheardMost {
		gone[ci.SessionID(fmt.Sprint("gone ", i))] = true
	}
	h.signal(gone)
	if n := len(h.unheard); n != unheardMost {
		t.Fatalf("%d hints are kept, want %d", n, unheardMost)
	}
	h.keepUnheard(func(id ci.SessionID) bool { return !gone[id] })
	h.signal(map[ci.SessionID]bool{"here": true})
	h.keepUnheard(func(id ci.SessionID) bool { return !gone[id] })
	if len(h.unheard) != 1 || !h.unheard["here"] {
		t.Errorf("%d hints are kept, that of the session that is here: %v", len(h.unheard), h.unheard["here"])
	}
}
