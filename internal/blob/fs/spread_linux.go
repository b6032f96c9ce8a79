package fs

import (
	"os"

	"golang.org/x/sys/unix"
)

// topDir is FS_TOPDIR_FL of linux/fs.h, the attribute T of chattr(1).
const topDir = 0x20000

// spread tells the file system that the directories in path are not related: ext4
// puts each into a group of inodes of its own choice. Making a file in a group
// where files were deleted a moment ago is slow without a journal. Where there is
// no such hint, nothing changes.
func spread(path string) {
	dir, err := os.Open(path)
	if err != nil {
		return
	}
	defer dir.Close()
	flags, err := unix.IoctlGetUint32(int(dir.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil && flags&topDir == 0 {
		_ = unix.IoctlSetPointerInt(int(dir.Fd()), unix.FS_IOC_SETFLAGS, int(flags|topDir))
	}
}
