package workspace

import (
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forgeci/internal/ci"
)

// unmountBelow detaches every file system that is mounted at path or below it:
// a step that runs as root can mount any directory of the machine into its
// workspace, and the removal must not go there. What cannot be detached is
// ci.ErrUnsafe, and nothing is deleted.
func unmountBelow(path string) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "list what is mounted").WithCause(err)
	}
	var below []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		at := unescape(f[4])
		if at == path || strings.HasPrefix(at, path+"/") {
			below = append(below, at)
		}
	}
	for _, b := range slices.Backward(below) { // the latest mount first
		if err := unix.Unmount(b, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return ci.Errorf(ci.ErrUnsafe, "a file system is mounted at %s: unmount it, nothing there was deleted", b).WithCause(err)
		}
	}
	return nil
}

// unescape undoes the octal escapes of /proc/self/mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
