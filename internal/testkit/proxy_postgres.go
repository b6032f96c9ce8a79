package testkit

import (
	"bytes"
	"encoding/binary"
)

// commitScanner finds the commits in what a client sends to a PostgreSQL server,
// which comes in pieces. A client sends its commit when it has the answers to
// everything before, so a commit begins a piece.
type commitScanner struct {
	seen func() bool

	started bool   // the first message, which has no type, is over
	head    []byte // of the message being collected: type, length, beginning of its text
	left    int    // bytes of the message to come after the head
	held    bool
}

// commitText is the text of the one query that ends a transaction well.
const commitText = "commit\x00"

// scan looks at the next piece and says whether it may pass.
func (s *commitScanner) scan(b []byte) bool {
	for len(b) > 0 && !s.held {
		if s.left > 0 {
			n := min(s.left, len(b))
			b, s.left = b[n:], s.left-n
			continue
		}
		typed := 1
		if !s.started {
			typed = 0
		}
		need := typed + 4
		if len(s.head) >= need {
			size := typed + int(binary.BigEndian.Uint32(s.head[typed:]))
			need = min(size, typed+4+len(commitText))
		}
		n := min(need-len(s.head), len(b))
		s.head, b = append(s.head, b[:n]...), b[n:]
		s.message(typed)
	}
	return !s.held
}

// message ends the head when it is whole.
func (s *commitScanner) message(typed int) {
	if len(s.head) < typed+4 {
		return
	}
	size := typed + int(binary.BigEndian.Uint32(s.head[typed:]))
	if len(s.head) < min(size, typed+4+len(commitText)) {
		return
	}
	if s.started && s.head[0] == 'Q' && bytes.EqualFold(s.head[5:], []byte(commitText)) && size == len(s.head) {
		s.held = !s.seen()
	}
	s.left, s.head, s.started = size-len(s.head), nil, true
}
