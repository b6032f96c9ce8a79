package runner

import (
	"errors"
	"os"
	"slices"
	"strconv"

	"forgeci/internal/protocol"
)

// spoolFiles is about how many files a full spool has: what was taken out of the
// oldest one is still on disk.
const spoolFiles = 16

// spool keeps unsent chunks of one attempt on disk, first in, first out, in files
// of which each goes with its last chunk, so that also a spool that is never empty
// stays at its cap. It is not durable and need not be: a runner that dies loses the
// attempt. The owner's lock guards it.
type spool struct {
	path    string // of the first file, and the beginning of the others'
	most    int64  // the cap
	files   []*spoolFile
	made    int   // files so far
	disk    int64 // bytes in the files
	entries []spooled
	failed  bool // the last write was refused
}

// spoolFile is one file of a spool.
type spoolFile struct {
	file *os.File
	end  int64 // where the next chunk goes
	left int   // chunks that have not been taken
}

// spooled is a chunk whose data is in a file, or in memory when the disk refused it.
type spooled struct {
	chunk protocol.Chunk
	file  *spoolFile
	at    int64
	size  int
}

func newSpool(path string, most int64) *spool { return &spool{path: path, most: most} }

func (s *spool) len() int { return len(s.entries) }

// crowded reports whether the spool takes nothing more: it is at its cap, or
// the disk has refused and has not been relieved since.
func (s *spool) crowded() bool { return s.failed || s.disk >= s.most }

// push writes the chunk's data behind all others.
func (s *spool) push(c protocol.Chunk) error {
	f, err := s.last()
	if err == nil {
		_, err = f.file.WriteAt(c.Data, f.end)
	}
	if err != nil {
		s.failed = true
		return err
	}
	s.failed = false
	size := len(c.Data)
	c.Data = nil
	s.entries = append(s.entries, spooled{chunk: c, file: f, at: f.end, size: size})
	f.end += int64(size)
	f.left++
	s.disk += int64(size)
	return nil
}

// last returns the file to write to. It is made on first use, and when the one
// before has its share.
func (s *spool) last() (*spoolFile, error) {
	if n := len(s.files); n > 0 && s.files[n-1].end < s.most/spoolFiles {
		return s.files[n-1], nil
	}
	path := s.path
	if s.made > 0 {
		path += "." + strconv.Itoa(s.made)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	s.made++
	s.files = append(s.files, &spoolFile{file: f})
	return s.files[len(s.files)-1], nil
}

// keep holds a chunk in memory in its place, when the disk refused it.
func (s *spool) keep(c protocol.Chunk) { s.entries = append(s.entries, spooled{chunk: c}) }

// pop returns the oldest chunk; with an error its data is not what it was, only
// as long.
func (s *spool) pop() (protocol.Chunk, error) {
	e := s.entries[0]
	s.entries = s.entries[1:]
	if len(s.entries) == 0 {
		s.entries, s.failed = nil, false
	}
	c := e.chunk
	if e.file == nil {
		return c, nil
	}
	var err error
	if e.size > 0 {
		c.Data = make([]byte, e.size)
		_, err = e.file.file.ReadAt(c.Data, e.at)
	}
	if e.file.left--; e.file.left == 0 {
		// If it fails, only the space is not free; what was read is good.
		s.failed = s.free(e.file) != nil
	}
	return c, err
}

// free gives back the space of a file that has no chunk any more.
func (s *spool) free(f *spoolFile) error {
	s.disk -= f.end
	f.end = 0
	if f == s.files[len(s.files)-1] {
		return f.file.Truncate(0)
	}
	s.files = slices.DeleteFunc(s.files, func(other *spoolFile) bool { return other == f })
	return errors.Join(f.file.Close(), os.Remove(f.file.Name()))
}

// remove closes and deletes the files.
func (s *spool) remove() error {
	var failed error
	for _, f := range s.files {
		failed = errors.Join(failed, f.file.Close(), os.Remove(f.file.Name()))
	}
	s.files = nil
	return failed
}
