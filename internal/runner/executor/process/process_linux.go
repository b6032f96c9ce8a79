package process

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// Tracking is the means by which an executor knows which processes are a job's.
// Whatever it is, the job's helper is their subreaper as well.
type Tracking string

// Means of tracking, best first.
const (
	TrackBest      Tracking = ""          // the first of the following that works here
	TrackCgroup2   Tracking = "cgroup2"   // a cgroup v2 of its own, killed by the kernel at one stroke
	TrackCgroup1   Tracking = "cgroup1"   // a freezer cgroup v1 of its own
	TrackSubreaper Tracking = "subreaper" // the helper's descendants
)

// Options configure an Executor.
type Options struct {
	// Dir is where the executor keeps one record for each open sandbox, below the
	// runner's data directory. It is made if it is not there; no other live runner
	// may use it (workspace.Open sees to that).
	Dir string
	// User is who steps run as; nil means the runner's own user. Only root can set it.
	User *executor.User
	// Path is the PATH of the steps, and where their shell is looked for; empty
	// means DefaultPath.
	Path string
	// Tracking forces one means; New fails where it does not work.
	Tracking Tracking
	// DrainGrace is how long after a step's main process ended its output may stay
	// open; 0 means DefaultDrainGrace.
	DrainGrace time.Duration
}

// Defaults.
const (
	DefaultPath       = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	DefaultDrainGrace = 2 * time.Second
)

// Executor implements executor.Executor for class process. It is safe for
// concurrent use.
type Executor struct {
	opts  Options
	log   *slog.Logger
	group func(id string) *jobhelper.Group // nil group: track by subreaper alone

	helperWait, killWait time.Duration

	mu     sync.Mutex
	live   map[string]bool // IDs of this executor's open sandboxes
	parked []*parked       // helpers that wait for a job
}

// New makes an executor. It makes the calling process a child subreaper, for
// the rest of its life: should a job kill its helper, the job's processes fall
// to the runner, which then finds and kills them.
func New(opts Options, log *slog.Logger) (*Executor, error) {
	if !filepath.IsAbs(opts.Dir) {
		return nil, ci.Errorf(ci.ErrInvalid, "executor directory %q is not absolute", opts.Dir)
	}
	if opts.User != nil && os.Geteuid() != 0 {
		return nil, ci.Errorf(ci.ErrForbidden, "a job user needs a runner that runs as root")
	}
	if opts.Path == "" {
		opts.Path = DefaultPath
	}
	if opts.DrainGrace == 0 {
		opts.DrainGrace = DefaultDrainGrace
	}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "executor directory cannot be made").WithCause(err)
	}
	if err := jobhelper.BecomeSubreaper(); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "this system has no child subreapers").WithCause(err)
	}
	e := &Executor{opts: opts, log: log, live: map[string]bool{}, helperWait: defaultHelperWait, killWait: defaultKillWait}
	tracking, group, err := findTracking(opts.Tracking)
	if err != nil {
		return nil, err
	}
	e.group = group
	log.Debug("process executor", "tracking", string(tracking), "dir", opts.Dir)
	return e, nil
}

// Class returns ci.IsolationProcess.
func (e *Executor) Class() ci.Isolation { return ci.IsolationProcess }

// Check runs an empty step in a sandbox of its own.
func (e *Executor) Check(ctx context.Context) error {
	if _, err := e.shell(""); err != nil {
		return err
	}
	// Not below Dir, which is private to the runner, but where the steps' user can be.
	mine := e.checkPrefix()
	left, err := filepath.Glob(filepath.Join(os.TempDir(), mine+"*")) // by a runner that crashed here
	for i := 0; err == nil && i < len(left); i++ {
		err = os.RemoveAll(left[i])
	}
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "no temporary directory").WithCause(err)
	}
	dir, err := os.MkdirTemp("", mine)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "no temporary directory").WithCause(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return ci.Errorf(ci.ErrUnavailable, "no temporary directory").WithCause(err)
	}
	box, err := e.Open(ctx, executor.Job{Workspace: dir, Home: dir, Tmp: dir, Steps: dir})
	if err != nil {
		return err
	}
	var out strings.Builder
	res, err := box.Run(ctx, executor.Step{Script: "exit 0\n", Dir: dir, Stdout: io.Discard, Stderr: &out})
	if _, closeErr := box.Close(ctx); err == nil {
		err = closeErr
	}
	if err == nil && res.ExitCode != 0 {
		err = ci.Errorf(ci.ErrUnavailable, "an empty step ended with exit code %d: %s", res.ExitCode, out.String())
	}
	return err
}

// checkPrefix begins the names of Check's directories, of this runner alone.
func (e *Executor) checkPrefix() string {
	sum := sha256.Sum256([]byte(e.opts.Dir))
	return fmt.Sprintf("forgeci-check-%x-", sum[:8])
}

// shell finds a step's shell and returns the words before the script's path.
func (e *Executor) shell(name string) ([]string, error) {
	switch name {
	case "":
		if argv, err := e.shell("bash"); err == nil {
			return argv, nil
		}
		return e.shell("sh")
	case "bash", "sh":
	default:
		return nil, ci.Errorf(ci.ErrInvalid, "shell %q is not known: use bash or sh", name)
	}
	for _, dir := range filepath.SplitList(e.opts.Path) {
		path := filepath.Join(dir, name)
		if !filepath.IsAbs(path) {
			continue
		}
		if _, err := exec.LookPath(path); err != nil {
			continue
		}
		if name == "sh" {
			return []string{path, "-e"}, nil
		}
		return []string{path, "--noprofile", "--norc", "-e", "-o", "pipefail"}, nil
	}
	return nil, ci.Errorf(ci.ErrInvalid, "this runner has no %s in its PATH", name)
}

// findTracking returns the best means that works here and a function that names
// the cgroup of a sandbox.
func findTracking(want Tracking) (Tracking, func(id string) *jobhelper.Group, error) {
	mounts := cgroupMounts()
	for _, t := range []Tracking{TrackCgroup2, TrackCgroup1} {
		if want != TrackBest && want != t {
			continue
		}
		version := jobhelper.CgroupV1
		if t == TrackCgroup2 {
			version = jobhelper.CgroupV2
		}
		base, ok := mounts[version]
		if !ok {
			continue
		}
		group := func(id string) *jobhelper.Group {
			return &jobhelper.Group{Version: version, Dir: filepath.Join(base, "forgeci", id)}
		}
		if tryGroup(group("probe-" + newID())) {
			return t, group, nil
		}
	}
	if want != TrackBest && want != TrackSubreaper {
		return "", nil, ci.Errorf(ci.ErrUnavailable, "process tracking by %s does not work here", want)
	}
	return TrackSubreaper, func(string) *jobhelper.Group { return nil }, nil
}

// tryGroup makes a cgroup, starts a process in it and removes it again.
func tryGroup(g *jobhelper.Group) bool {
	if g.Make() != nil {
		return false
	}
	defer func() { _ = g.Remove() }()
	if g.Version == jobhelper.CgroupV1 {
		// A process enters by writing to this file.
		f, err := os.OpenFile(filepath.Join(g.Dir, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			return false
		}
		return f.Close() == nil
	}
	if _, err := os.Stat(filepath.Join(g.Dir, "cgroup.kill")); err != nil {
		return false
	}
	return startInGroup(g) == nil
}

// cgroupMounts finds, for each version, the directory of the cgroup that this
// process is in.
func cgroupMounts() map[string]string {
	own := map[string]string{}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[0] == "0" && f[1] == "" {
			own[jobhelper.CgroupV2] = f[2]
		}
		for controller := range strings.SplitSeq(f[1], ",") {
			if controller == "freezer" {
				own[jobhelper.CgroupV1] = f[2]
			}
		}
	}
	mounts := map[string]string{}
	b, err = os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 3 {
			continue
		}
		var version string
		switch {
		case r[0] == "cgroup2":
			version = jobhelper.CgroupV2
		case r[0] == "cgroup" && strings.Contains(","+r[2]+",", ",freezer,"):
			version = jobhelper.CgroupV1
		default:
			continue
		}
		path, ok := own[version]
		if !ok || mounts[version] != "" {
			continue
		}
		rel, err := filepath.Rel(unescape(l[3]), path)
		if err != nil || !filepath.IsLocal(rel) {
			continue // mounted from elsewhere: our cgroup is not visible
		}
		mounts[version] = filepath.Join(unescape(l[4]), rel)
	}
	return mounts
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
