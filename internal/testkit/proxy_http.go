package testkit

import (
	"bufio"
	"bytes"
	"net/http"
	"strconv"
	"strings"
)

// requestScanner finds the heads of HTTP/1.1 requests in a byte stream that
// comes in pieces, and skips bodies. A stream that is no HTTP is left alone.
type requestScanner struct {
	seen func(*http.Request) bool

	line    []byte // of the head or chunk size being collected
	state   scanState
	left    int64 // body bytes to skip
	ignored bool
	held    bool // seen has said that a request may not pass
}

type scanState int

const (
	inHead scanState = iota
	inBody
	inChunkSize
	inChunk
	inTrailer
)

// maxHead is where a stream without the end of a head is given up.
const maxHead = 1 << 20

// scan looks at the next piece and says whether it may pass.
func (s *requestScanner) scan(b []byte) bool {
	for len(b) > 0 && !s.ignored && !s.held {
		switch s.state {
		case inHead:
			b = s.collect(b, "\r\n\r\n", s.head)
		case inBody:
			b = s.skip(b, inHead)
		case inChunk:
			b = s.skip(b, inChunkSize)
		case inChunkSize:
			b = s.collect(b, "\r\n", s.chunkSize)
		case inTrailer:
			b = s.collect(b, "\r\n", func(line []byte) {
				if len(line) == 2 {
					s.state = inHead
				}
			})
		}
	}
	return !s.held
}

// collect gathers bytes up to and with the mark, hands them over, and returns
// the rest.
func (s *requestScanner) collect(b []byte, mark string, take func([]byte)) []byte {
	before := len(s.line)
	s.line = append(s.line, b...)
	i := bytes.Index(s.line, []byte(mark))
	if i < 0 {
		s.ignored = len(s.line) > maxHead
		return nil
	}
	line := s.line[:i+len(mark)]
	s.line = nil
	take(line)
	return b[len(line)-before:]
}

func (s *requestScanner) skip(b []byte, next scanState) []byte {
	n := min(s.left, int64(len(b)))
	s.left -= n
	if s.left == 0 {
		s.state = next
	}
	return b[n:]
}

func (s *requestScanner) head(head []byte) {
	r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
	if err != nil {
		s.ignored = true
		return
	}
	switch {
	case r.ContentLength > 0:
		s.state, s.left = inBody, r.ContentLength
	case len(r.TransferEncoding) > 0:
		s.state = inChunkSize
	}
	r.Body = http.NoBody
	s.held = !s.seen(r)
}

func (s *requestScanner) chunkSize(line []byte) {
	digits, _, _ := strings.Cut(strings.TrimSpace(string(line)), ";")
	size, err := strconv.ParseInt(digits, 16, 64)
	switch {
	case err != nil:
		s.ignored = true
	case size == 0:
		s.state = inTrailer
	default:
		s.state, s.left = inChunk, size+2
	}
}
