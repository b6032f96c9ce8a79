package fs

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
)

// dirSyncer syncs directories, many callers by one sync: a caller's sync begins
// after its call and the call returns when it has ended.
type dirSyncer struct {
	sync func(path string) error

	mu   sync.Mutex // guards what follows
	dirs map[string]*dirState
}

type dirState struct {
	users int
	next  *syncBatch
	run   sync.Mutex // held while a sync is under way; LOCK ORDER: before dirSyncer.mu
}

type syncBatch struct {
	done chan struct{}
	err  error
}

// commit returns once the entries that dir has now are durable.
func (d *dirSyncer) commit(dir string) error {
	d.mu.Lock()
	st := d.dirs[dir]
	if st == nil {
		if d.dirs == nil {
			d.dirs = map[string]*dirState{}
		}
		st = &dirState{}
		d.dirs[dir] = st
	}
	st.users++
	b, leads := st.next, false
	if b == nil {
		b, leads = &syncBatch{done: make(chan struct{})}, true
		st.next = b
	}
	d.mu.Unlock()
	if leads {
		st.run.Lock()
		d.mu.Lock()
		st.next = nil
		d.mu.Unlock()
		b.err = d.sync(dir)
		close(b.done)
		st.run.Unlock()
	}
	<-b.done
	d.mu.Lock()
	defer d.mu.Unlock()
	if st.users--; st.users == 0 {
		delete(d.dirs, dir)
	}
	return b.err
}

// unopened is the error of a directory's sync that did not begin: there are too
// many open files, or the directory is gone.
type unopened struct{ error }

// Unwrap returns what the system said.
func (u unopened) Unwrap() error { return u.error }

// commitDir makes the entries of dir durable. A sync that failed breaks the
// store: the kernel may drop what it could not write and say nothing next time.
// After one that did not begin, the next one says how things are.
func (s *Store) commitDir(dir string) error {
	err := s.dirs.commit(dir)
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[unopened](err); !ok {
		s.broken.Store(true)
	}
	return diskError("sync directory", err)
}

// ensureDir makes dir and what is above it, durably.
func (s *Store) ensureDir(dir string) error {
	if _, ok := s.known.Load(dir); ok || dir == s.dir {
		return nil
	}
	above := filepath.Dir(dir)
	if err := s.ensureDir(above); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := s.commitDir(above); err != nil {
		return err
	}
	s.known.Store(dir, struct{}{})
	return nil
}

// forget removes what is known of dir and of the directories above it.
func (s *Store) forget(dir string) {
	for dir != s.dir {
		s.known.Delete(dir)
		dir = filepath.Dir(dir)
	}
}

// keyedMutex is one mutex per key.
type keyedMutex struct {
	mu   sync.Mutex // guards held
	held map[string]*keyLock
}

type keyLock struct {
	sync.Mutex
	users int
}

// lock locks key and returns the function that unlocks it.
func (k *keyedMutex) lock(key string) func() {
	k.mu.Lock()
	l := k.held[key]
	if l == nil {
		if k.held == nil {
			k.held = map[string]*keyLock{}
		}
		l = &keyLock{}
		k.held[key] = l
	}
	l.users++
	k.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.held, key)
		}
	}
}
