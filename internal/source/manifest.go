// Package source is the immutable source of a run: it captures a working tree
// as a snapshot, verifies snapshots, and materialises them.
//
// A snapshot is an archive (package archive) of the tree's files and symbolic
// links. Directories are implied by what is in them, so an empty directory is
// not part of the source, as in git; and of a file's mode only the executable
// bit counts. What the snapshot holds is named by the digest of its manifest,
// which depends on the tree alone; the digest of the archive's bytes may change
// with the compressor and only guards the transport.
package source

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io/fs"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
)

// Entry is one file or link of a manifest.
type Entry struct {
	// Path is relative, clean and slash-separated; raw bytes.
	Path string
	// Kind is what stands there.
	Kind Kind
	// Size and SHA256 are those of the file's content; of a link, those of its
	// target's text.
	Size   int64
	SHA256 [32]byte
}

// Kind is a file's type and mode, as far as they count.
type Kind byte

// Kinds. Their values stand in the manifest's encoding.
const (
	Regular    Kind = 'f' // materialised with mode 0644
	Executable Kind = 'x' // 0755
	Symlink    Kind = 'l'
)

// Manifest lists a tree: entries strictly sorted by the bytes of their paths.
type Manifest []Entry

const manifestHeader = "forgeci source manifest 1\n"

// maxManifestPath bounds a path while a manifest is decoded.
const maxManifestPath = 64 << 10

// Encode returns the canonical encoding, of which the digest is taken: the line
// "forgeci source manifest 1", then for each entry its kind (one byte), the
// length of its path (4 bytes, big-endian), the path, the size (8 bytes,
// big-endian) and the SHA-256 (32 bytes). Different manifests never have the
// same encoding.
func (m Manifest) Encode() []byte {
	size := len(manifestHeader)
	for i := range m {
		size += 45 + len(m[i].Path)
	}
	b := append(make([]byte, 0, size), manifestHeader...)
	for i := range m {
		b = m[i].append(b)
	}
	return b
}

// append appends the entry's encoding.
func (e *Entry) append(b []byte) []byte {
	b = append(b, byte(e.Kind))
	b = binary.BigEndian.AppendUint32(b, uint32(len(e.Path)))
	b = append(b, e.Path...)
	b = binary.BigEndian.AppendUint64(b, uint64(e.Size))
	return append(b, e.SHA256[:]...)
}

// Digest returns the canonical source digest, "sha256:" and lower-case hex.
func (m Manifest) Digest() string {
	d := newDigester()
	for i := range m {
		d.add(&m[i])
	}
	return d.digest()
}

// digester takes the digest of a manifest entry by entry, of which it keeps none.
type digester struct {
	sum hash.Hash
	buf []byte
}

func newDigester() *digester {
	d := &digester{sum: sha256.New()}
	d.sum.Write([]byte(manifestHeader))
	return d
}

// add adds the next entry.
func (d *digester) add(e *Entry) {
	d.buf = e.append(d.buf[:0])
	d.sum.Write(d.buf)
}

// digest returns the digest of what was added.
func (d *digester) digest() string { return digestText([32]byte(d.sum.Sum(nil))) }

func digestText(sum [32]byte) string { return "sha256:" + hex.EncodeToString(sum[:]) }

// DecodeManifest reads an encoding. It accepts exactly what Encode returns for
// a sorted manifest with acceptable paths; anything else is ErrInvalid or
// ErrUnsafe.
func DecodeManifest(b []byte) (Manifest, error) {
	b, ok := bytes.CutPrefix(b, []byte(manifestHeader))
	if !ok {
		return nil, ci.Errorf(ci.ErrInvalid, "not a source manifest of version 1")
	}
	var m Manifest
	for len(b) > 0 {
		bad := ci.Errorf(ci.ErrInvalid, "source manifest: entry %d is malformed", len(m)+1)
		if len(b) < 5 {
			return nil, bad
		}
		e := Entry{Kind: Kind(b[0])}
		n := binary.BigEndian.Uint32(b[1:])
		if b = b[5:]; n > maxManifestPath || len(b) < int(n)+40 {
			return nil, bad
		}
		e.Path = string(b[:n])
		b = b[n:]
		e.Size = int64(binary.BigEndian.Uint64(b))
		copy(e.SHA256[:], b[8:40])
		b = b[40:]
		if e.Size < 0 || (e.Kind != Regular && e.Kind != Executable && e.Kind != Symlink) {
			return nil, bad
		}
		if err := archive.CheckPath(e.Path, false); err != nil {
			return nil, err
		}
		if len(m) > 0 && e.Path <= m[len(m)-1].Path {
			return nil, ci.Errorf(ci.ErrInvalid, "source manifest: entry %d is out of order", len(m)+1)
		}
		m = append(m, e)
	}
	return m, nil
}

// manifestOf translates the entries of an archive that judge has accepted.
func manifestOf(entries []archive.Entry) Manifest {
	m := make(Manifest, 0, len(entries))
	for i := range entries {
		m = append(m, entryOf(&entries[i]))
	}
	return m
}

func entryOf(a *archive.Entry) Entry {
	e := Entry{Path: a.Path, Kind: Regular, Size: a.Size, SHA256: a.SHA256}
	switch {
	case a.Type == archive.Symlink:
		e.Kind, e.Size, e.SHA256 = Symlink, int64(len(a.Link)), sha256.Sum256([]byte(a.Link))
	case a.Mode&0o100 != 0:
		e.Kind = Executable
	}
	return e
}

// canonicalMode returns the mode with which a file of the source is stored.
func canonicalMode(mode fs.FileMode) fs.FileMode {
	if mode&0o100 != 0 {
		return 0o755
	}
	return 0o644
}

// judge refuses what an archive may hold and a snapshot may not.
func judge(e archive.Entry) error {
	switch {
	case e.Type == archive.Dir:
		return ci.Errorf(ci.ErrUnsafe, "unsafe snapshot entry %q: a snapshot holds files and links only", e.Path)
	case e.Type == archive.File && e.Mode != 0o644 && e.Mode != 0o755:
		return ci.Errorf(ci.ErrUnsafe, "unsafe snapshot entry %q: mode %04o; a snapshot has 0644 and 0755 only", e.Path, e.Mode)
	case insideGit(e.Path):
		return ci.Errorf(ci.ErrUnsafe, "unsafe snapshot entry %q: git's own directory is never part of the source", e.Path)
	}
	return nil
}
