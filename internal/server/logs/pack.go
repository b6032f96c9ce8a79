package logs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

const (
	// packedMost is the size up to which an archive shares an object with others of
	// its organisation: most logs are short, and an object for each would cost more
	// than what is in it.
	packedMost = 64 << 10
	packSize   = 1 << 20 // a pack is stored when it has this size
)

// pack is an object of archives, one behind the other.
type pack struct {
	logs []store.Log
	body []byte
}

// packs stores the archives of one round.
type packs struct {
	s    *Service
	now  int64 // the database's time, by which objects are named
	open map[ci.OrgID]*pack
	// What has been stored and verified, and is not recorded yet.
	sealed  []store.Log // with their archives
	objects []store.LogObject
}

func (p *packs) key() string {
	return objectKey(archivePrefix, p.s.cfg.Incarnation, p.now, p.s.cfg.IDs.New(ci.PrefixObject))
}

// stored notes an object that has been verified and the logs whose archives it
// holds.
func (p *packs) stored(o store.LogObject, logs ...store.Log) {
	p.objects = append(p.objects, o)
	p.sealed = append(p.sealed, logs...)
}

// add puts the archive of a log into a pack.
func (p *packs) add(ctx context.Context, l store.Log, archive []byte) error {
	k := p.open[l.Org]
	if k == nil {
		k = &pack{}
		p.open[l.Org] = k
	}
	l.ArchiveAt = int64(len(k.body))
	k.logs, k.body = append(k.logs, l), append(k.body, archive...)
	if len(k.body) < packSize {
		return nil
	}
	delete(p.open, l.Org)
	return p.close(ctx, k)
}

// closeAll stores the packs that are open.
func (p *packs) closeAll(ctx context.Context) error {
	var failed error
	for _, org := range slices.Sorted(maps.Keys(p.open)) {
		failed = errors.Join(failed, p.close(ctx, p.open[org]))
	}
	clear(p.open)
	return failed
}

// close stores a pack and reads it back: each archive in it is verified as a reader
// would, and one that is not good keeps no other waiting.
func (p *packs) close(ctx context.Context, k *pack) error {
	ctx, cancel := context.WithTimeout(ctx, archiving)
	defer cancel()
	o := store.LogObject{Key: p.key(), Size: int64(len(k.body))}
	if err := p.s.cfg.Blob.PutNew(ctx, o.Key, bytes.NewReader(k.body), o.Size, sha256.Sum256(k.body)); err != nil {
		return err
	}
	var good []store.Log
	back, failed := p.s.read(ctx, o.Key, 0, o.Size)
	if failed == nil {
		for _, l := range k.logs {
			l.ArchiveKey = o.Key
			if err := p.s.verifyPacked(l, back[l.ArchiveAt:l.ArchiveAt+l.ArchiveSize]); err != nil {
				failed = errors.Join(failed, err)
				p.s.doubt(err, false, l)
				continue
			}
			good = append(good, l)
		}
	}
	if len(good) == 0 {
		return errors.Join(failed, p.s.cfg.Blob.Delete(ctx, o.Key))
	}
	p.stored(o, good...)
	return failed
}

// verifyPacked verifies an archive that was read back as a part of a pack.
func (s *Service) verifyPacked(l store.Log, archive []byte) error {
	if l.IndexSize > int64(len(archive)) {
		return ci.Errorf(ci.ErrDigest, "the index of a log archive is out of bounds")
	}
	frames, lay, err := s.readIndex(l, archive[int64(len(archive))-l.IndexSize:])
	if err != nil {
		return err
	}
	return s.verifyFrames(l, frames, lay, func(f frame) ([]byte, error) {
		if f.at+f.size > int64(len(archive)) {
			return nil, ci.Errorf(ci.ErrDigest, "a frame of log archive %s is out of bounds", l.ArchiveKey)
		}
		return archive[f.at : f.at+f.size], nil
	})
}
