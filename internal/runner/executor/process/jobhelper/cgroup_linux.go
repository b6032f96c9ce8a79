package jobhelper

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"
)

// Versions of the cgroup interface that a Group can use.
const (
	CgroupV1 = "1" // the freezer hierarchy
	CgroupV2 = "2" // with cgroup.kill (Linux 5.14)
)

// Group is one cgroup of a job or of a step: a directory that holds processes
// and, for a job, the groups of its steps.
type Group struct {
	Version string
	Dir     string
}

// Make creates the group's directory. Its parent "forgeci" is made when it is
// not there and removed by Remove when it is empty, possibly by another job at
// this very moment, hence the loop.
func (g Group) Make() error {
	var err error
	for range 10 {
		if err = os.Mkdir(parent(g.Dir), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err = os.Mkdir(g.Dir, 0o755); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return err
}

// Child is the group with the name inside g.
func (g Group) Child(name string) Group {
	return Group{Version: g.Version, Dir: g.Dir + "/" + name}
}

// Exists reports whether the group is there.
func (g Group) Exists() bool {
	_, err := os.Lstat(g.Dir)
	return err == nil
}

// PIDs lists the processes in the group and in the groups inside it.
func (g Group) PIDs() []int {
	var pids []int
	for _, dir := range g.dirs() {
		b, err := os.ReadFile(dir + "/cgroup.procs")
		if err != nil {
			continue
		}
		for _, line := range fields(string(b)) {
			// 0 is a process of another pid namespace, which has no number here.
			if pid, ok := atoi(line); ok && pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// Procs is PIDs with what /proc says of each; a process that left the group or
// ended meanwhile is not in it.
func (g Group) Procs() []Proc {
	var procs []Proc
	for _, pid := range g.PIDs() {
		if p, err := ReadProc(pid); err == nil && !p.Dead() {
			procs = append(procs, p)
		}
	}
	if len(procs) == 0 {
		return nil
	}
	// A number may have gone to another process between the two looks above, but
	// not to one that is in the group: a second look at the group settles it.
	in := map[int]bool{}
	for _, pid := range g.PIDs() {
		in[pid] = true
	}
	kept := procs[:0]
	for _, p := range procs {
		if in[p.PID] {
			kept = append(kept, p)
		}
	}
	return kept
}

// Empty reports whether no living process is in the group or inside it. A group
// that does not exist is empty.
func (g Group) Empty() bool {
	if g.Version == CgroupV2 {
		b, err := os.ReadFile(g.Dir + "/cgroup.events")
		if err != nil {
			return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
		}
		return populated(string(b)) == "0"
	}
	for _, dir := range g.dirs() {
		b, err := os.ReadFile(dir + "/cgroup.procs")
		if err == nil && len(b) > 0 {
			return false
		}
	}
	return true
}

// Kill kills every process in the group at one moment, so that none can fork
// away. It does not wait until they are gone.
func (g Group) Kill() {
	if g.Version == CgroupV2 {
		_ = os.WriteFile(g.Dir+"/cgroup.kill", []byte("1"), 0)
		return
	}
	state := g.Dir + "/freezer.state"
	_ = os.WriteFile(state, []byte("FROZEN"), 0)
	for range 50 { // a process in an uninterruptible sleep delays FROZEN; do not wait for it for ever
		b, err := os.ReadFile(state)
		if err != nil || string(b) == "FROZEN\n" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for _, p := range g.Procs() {
		_ = Signal(p, syscall.SIGKILL)
	}
	_ = os.WriteFile(state, []byte("THAWED"), 0)
}

// Remove removes the group, the groups inside it and its parent "forgeci" when
// that is empty. It fails while a process is in it.
func (g Group) Remove() error {
	var err error
	for range 50 {
		err = nil
		dirs := g.dirs()
		for _, dir := range slices.Backward(dirs) {
			if e := syscall.Rmdir(dir); e != nil && e != syscall.ENOENT {
				err = &fs.PathError{Op: "rmdir", Path: dir, Err: e}
			}
		}
		if err == nil || !g.Empty() {
			break
		}
		time.Sleep(time.Millisecond) // the kernel still counts processes that have just ended
	}
	if err == nil && hasSuffix(parent(g.Dir), "/forgeci") {
		_ = syscall.Rmdir(parent(g.Dir))
	}
	return err
}

// dirs returns the group's directory and those inside it, parents first.
func (g Group) dirs() []string {
	dirs := []string{g.Dir}
	for i := 0; i < len(dirs); i++ {
		entries, _ := os.ReadDir(dirs[i]) // one that is gone has none
		for _, e := range entries {
			if e.IsDir() {
				dirs = append(dirs, dirs[i]+"/"+e.Name())
			}
		}
	}
	return dirs
}

// populated is the value of the line "populated" of cgroup.events.
func populated(events string) string {
	f := fields(events)
	for i := 0; i+1 < len(f); i += 2 {
		if f[i] == "populated" {
			return f[i+1]
		}
	}
	return ""
}

// parent is the directory that holds the absolute path.
func parent(path string) string {
	i := len(path) - 1
	for i > 0 && path[i] != '/' {
		i--
	}
	return path[:max(i, 1)]
}

func hasSuffix(s, suffix string) bool {
	return len(s) >= len(suffix) && s[len(s)-len(suffix):] == suffix
}
