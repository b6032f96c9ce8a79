// Package archive is the one bounded reader and writer of archives: source
// snapshots, artifacts, caches.
//
// An archive is a tar (PAX) of files, directories and symbolic links, sorted by
// the bytes of their paths, without times and owners, compressed with zstd. The
// compressed stream is a sequence of independent frames of about FrameSize
// bytes, cut in places that depend on the entries alone, so that frames are
// made in parallel and the same entries give the same bytes whatever the number
// of workers. Any tar and zstd reads it.
//
// Paths are raw bytes with slashes: invalid UTF-8 is kept. What Pack writes,
// Read accepts under the same Limits; what Read accepts is strictly sorted (so
// nothing occurs twice), never goes through a link, and has no link whose
// target leaves the tree. Hard links, devices, fifos, sparse files are refused.
//
// Errors are *ci.Error and name the entry: ErrUnsafe (a name, link or type that
// is refused), ErrTooLarge (over a limit), ErrDigest (damaged or cut off),
// ErrConflict (a file changed while it was read, or stands where one should be
// written), ErrUnavailable (the disk refuses).
package archive

import (
	"io/fs"
	"runtime"
)

// Type is the type of an entry.
type Type byte

// Types of entries.
const (
	File    Type = 'f'
	Dir     Type = 'd'
	Symlink Type = 'l'
)

// Entry is one file, directory or symbolic link of an archive.
type Entry struct {
	// Path is relative, clean and slash-separated; raw bytes.
	Path string
	Type Type
	// Mode holds permission bits only (0o777); 0o777 for a symbolic link.
	Mode fs.FileMode
	// Size is the length of a file in bytes, 0 for the other types.
	Size int64
	// Link is the target of a symbolic link, as stored.
	Link string
	// SHA256 is the sum of a file's content where it is known: Pack and Unpack
	// set it, Scan, Walk and Read do not.
	SHA256 [32]byte

	// modified is the time of the last change when Scan or Walk saw the file, in
	// nanoseconds; Pack compares it.
	modified int64
}

// Limits bound an archive. They hold for Pack and for Read alike. The zero
// value refuses everything; start from SourceLimits or ArtifactLimits.
type Limits struct {
	// Entries is the largest number of entries.
	Entries int
	// Bytes is the largest sum of file sizes.
	Bytes int64
	// File is the largest size of one file.
	File int64
	// Path is the largest length of a path or a link's target in bytes.
	Path int
	// Names is the largest sum of the lengths of all paths and links' targets: what
	// whoever keeps the entries has to hold in memory.
	Names int64
	// Ratio is the largest ratio of bytes before to bytes after compression,
	// held at every point past the first 64 MiB.
	Ratio int64
	// ControlBytes admits names with control bytes other than NUL.
	ControlBytes bool
}

// SourceLimits are the bounds of a source snapshot: names without control
// bytes, paths as long as git and Linux take them, with 134 bytes to each of the
// most entries.
func SourceLimits() Limits {
	return Limits{Entries: 500_000, Bytes: 32 << 30, File: 8 << 30, Path: 4096, Names: 64 << 20, Ratio: 1000}
}

// ArtifactLimits are the bounds of an artifact: every name that a file system
// can hold comes back as it was.
func ArtifactLimits() Limits {
	return Limits{Entries: 1_000_000, Bytes: 1 << 40, File: 512 << 30, Path: 32 << 10, Names: 256 << 20, Ratio: 1000, ControlBytes: true}
}

// Stats counts an archive.
type Stats struct {
	// Entries counts all entries, Files the regular files among them.
	Entries, Files int
	// Bytes is the sum of the files' sizes.
	Bytes int64
}

// FrameSize is how many bytes before compression go into one zstd frame. One
// worker holds one frame before and one after compression: Pack needs about
// 6 MiB per worker, Read 8 MiB at most.
const FrameSize = 1 << 20

const (
	// maxWindow bounds what a decoder allocates for a frame made elsewhere.
	maxWindow = 8 << 20
	// ratioSlack is how much may be unpacked before Limits.Ratio is looked at.
	ratioSlack = 64 << 20
)

// workers returns how many workers to use when n are asked for: n, or one per
// processor up to four when n is not positive.
func workers(n int) int {
	if n > 0 {
		return n
	}
	return min(runtime.GOMAXPROCS(0), 4)
}
