package server

import (
	"os"
	"path/filepath"

	"forgeci/internal/ci"
)

// takeData takes the data directory for this process: a second server on it would
// empty the first one's tmp and share its embedded database.
func (s *Server) takeData() error {
	f, err := os.OpenFile(filepath.Join(s.cfg.DataDir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "data directory: %v", err)
	}
	if !lockFile(f) {
		_ = f.Close()
		return ci.Errorf(ci.ErrConflict, "the data directory %s is in use by another server: stop it or give this one its own --data", s.cfg.DataDir)
	}
	s.lock = f
	return nil
}

// makePrivate makes a directory that only its owner can enter.
func makePrivate(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "data directory: %v", err)
	}
	return nil
}

// freshDir makes an empty directory: what an earlier process left aside is gone.
func freshDir(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "data directory: %v", err)
	}
	return makePrivate(dir)
}
