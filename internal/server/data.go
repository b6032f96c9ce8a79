package server

import (
	"errors"
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

// makeData makes the data directory, which others cannot enter, or only pass
// through; one that is there stays as open as it is. Before they may pass, what
// the server keeps in it is closed to them, also what was restored from a backup.
func makeData(dir string, passable bool) error {
	if !passable {
		return makePrivate(dir)
	}
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		err = closeOwn(dir)
	}
	if err == nil {
		err = changeMode(dir, func(m os.FileMode) os.FileMode { return m | 0o011 })
	}
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "data directory: %v", err)
	}
	return nil
}

// closeOwn closes what a server keeps in its data directory to other users.
func closeOwn(dir string) error {
	have, err := os.ReadDir(dir)
	for _, d := range have {
		for _, own := range []string{"forgeci.db*", "server.key", adminTokenFile, registrationTokenFile, "blobs", "tmp"} {
			if ok, _ := filepath.Match(own, d.Name()); ok && d.Type()&os.ModeSymlink == 0 {
				err = errors.Join(err, changeMode(filepath.Join(dir, d.Name()), func(m os.FileMode) os.FileMode { return m &^ 0o077 }))
			}
		}
	}
	return err
}

// changeMode changes the permissions of a file if they are not as they should be.
func changeMode(name string, to func(os.FileMode) os.FileMode) error {
	fi, err := os.Stat(name)
	if err != nil {
		return err
	}
	have := fi.Mode().Perm()
	if want := to(have); want != have {
		return os.Chmod(name, want)
	}
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
