package runner

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
)

// sources keeps the archives of sources that this runner has fetched, by the
// digest of their bytes, so that the next job of the same source does not fetch
// them again. What is kept grants nothing: a job gets the source that its lease
// names, and whoever takes an archive from here verifies it as if it had just
// been fetched. It is safe for concurrent use.
type sources struct {
	dir   string
	limit int64 // bytes

	mu sync.Mutex // held for changes of the directory
}

// defaultSources bounds the archives that are kept.
const defaultSources = 1 << 30

// openSources makes the directory, and removes what an earlier process of this
// runner was fetching when it ended.
func openSources(data string, limit int64) (*sources, error) {
	s := &sources{dir: filepath.Join(data, "sources"), limit: limit}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, diskError(err)
	}
	left, err := filepath.Glob(filepath.Join(data, "fetch-*"))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	if err != nil {
		return nil, diskError(err)
	}
	return s, nil
}

// path is where the archive with the digest is, if it is kept.
func (s *sources) path(digest string) string {
	return filepath.Join(s.dir, filepath.Base(strings.ReplaceAll(digest, ":", "-")))
}

// has reports whether the archive is kept, which a moment later it may not be,
// and makes it the last to go.
func (s *sources) has(digest string) bool {
	now := time.Now()
	return os.Chtimes(s.path(digest), now, now) == nil
}

// keep takes over the file of a verified archive and drops the archives that
// were not used for longest when there are too many.
func (s *sources) keep(file, digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Rename(file, s.path(digest)); err != nil {
		return errors.Join(diskError(err), os.Remove(file))
	}
	return s.trim(s.limit)
}

// drop forgets an archive that is not what it was.
func (s *sources) drop(digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Remove(s.path(digest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return diskError(err)
	}
	return nil
}

// clear drops everything: the disk is needed for jobs.
func (s *sources) clear() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trim(0)
}

// trim drops archives until what is left is within the limit; the caller holds mu.
func (s *sources) trim(limit int64) error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return diskError(err)
	}
	var total int64
	kept := make([]fs.FileInfo, 0, len(entries))
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			total += info.Size()
			kept = append(kept, info)
		}
	}
	for total > limit && len(kept) > 0 {
		oldest := 0
		for i := range kept {
			if kept[i].ModTime().Before(kept[oldest].ModTime()) {
				oldest = i
			}
		}
		if err := os.Remove(filepath.Join(s.dir, kept[oldest].Name())); err != nil {
			return diskError(err)
		}
		total -= kept[oldest].Size()
		kept = append(kept[:oldest], kept[oldest+1:]...)
	}
	return nil
}

// missing reports whether an archive was dropped between has and its use.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// spoiled reports whether a kept archive is not what its name says any more.
func spoiled(err error) bool { return errors.Is(err, ci.ErrDigest) }
