package runner

import (
	"errors"
	"os"

	"forgeci/internal/protocol"
)

// spool keeps unsent chunks of one attempt on disk, first in, first out. It is
// not durable and need not be: a runner that dies loses the attempt. The owner's
// lock guards it.
type spool struct {
	path    string
	file    *os.File
	end     int64 // where the next chunk goes
	bytes   int64 // of data on disk
	entries []spooled
	failed  bool // the last write was refused
}

// spooled is a chunk whose data is on disk, or in memory when the disk refused it.
type spooled struct {
	chunk protocol.Chunk
	at    int64
	size  int
}

func newSpool(path string) *spool { return &spool{path: path} }

func (s *spool) len() int { return len(s.entries) }

// crowded reports whether the spool takes nothing more: it is at its cap, or
// the disk has refused and has not been relieved since.
func (s *spool) crowded(most int64) bool { return s.failed || s.bytes >= most }

// push writes the chunk's data behind all others. The file is made on first use.
func (s *spool) push(c protocol.Chunk) error {
	if s.file == nil {
		f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			s.failed = true
			return err
		}
		s.file = f
	}
	if _, err := s.file.WriteAt(c.Data, s.end); err != nil {
		s.failed = true
		return err
	}
	s.failed = false
	size := len(c.Data)
	c.Data = nil
	s.entries = append(s.entries, spooled{chunk: c, at: s.end, size: size})
	s.end += int64(size)
	s.bytes += int64(size)
	return nil
}

// keep holds a chunk in memory in its place, when the disk refused it.
func (s *spool) keep(c protocol.Chunk) { s.entries = append(s.entries, spooled{chunk: c}) }

// pop returns the oldest chunk; with an error its data is not what it was, only
// as long. An empty spool starts again at the beginning of
// its file, so that the disk is free again.
func (s *spool) pop() (protocol.Chunk, error) {
	e := s.entries[0]
	s.entries = s.entries[1:]
	c := e.chunk
	var err error
	if e.size > 0 {
		c.Data = make([]byte, e.size)
		_, err = s.file.ReadAt(c.Data, e.at)
		s.bytes -= int64(e.size)
	}
	if len(s.entries) == 0 {
		s.entries, s.end, s.failed = nil, 0, false
		if s.file != nil && s.file.Truncate(0) != nil {
			s.failed = true // only its space is not free; what was read is good
		}
	}
	return c, err
}

// remove closes and deletes the file.
func (s *spool) remove() error {
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	s.file = nil
	return errors.Join(err, os.Remove(s.path))
}
