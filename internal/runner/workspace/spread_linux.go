package workspace

import (
	"os"

	"golang.org/x/sys/unix"
)

// topDir is FS_TOPDIR_FL of linux/fs.h, the attribute T of chattr(1).
const topDir = 0x20000

// spread tells the file system that the directories in dir are not related. ext4
// then puts each into a group of inodes of its own choice. Otherwise all jobs
// share the group of dir, and where files were deleted a moment ago making one is
// slow: without a journal ext4 passes over every inode that was freed in the last
// minute (200 files of a source: 60 ms, spread 6 ms). Where there is no such hint,
// nothing changes.
func spread(dir *os.File) {
	flags, err := unix.IoctlGetUint32(int(dir.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil && flags&topDir == 0 {
		_ = unix.IoctlSetPointerInt(int(dir.Fd()), unix.FS_IOC_SETFLAGS, int(flags|topDir))
	}
}
