// Package jobhelper is the process that stands between a runner and one job:
// the parent of the job's steps and the reaper of everything they leave.
//
// The runner starts its own binary again under the name Name. The helper is a
// child subreaper, so every process of the job, also one that called setsid or
// forked twice, stays its descendant; when wait says that it has no child, no
// process of the job exists. It holds one end of a socket: when the runner
// dies, the socket ends and the helper kills the whole tree before it exits. When
// nothing of the job is left, and nothing had to be asked to end, it may be given
// the next job.
// Where there are cgroups the job's processes are in one of their own besides,
// the helper is outside of it, and the kernel kills them at one stroke.
//
// The helper runs in this package's init and never reaches main: a start of the
// whole binary costs several times as much CPU, for packages that a helper does
// not need. Packages are initialised in the order of their paths among those
// whose imports are; hence this one imports nothing but os and what os imports
// itself (a test sees to that), and is the first of the module. It is the one
// init of the product; a process not started under Name does nothing here.
//
// The functions that find and kill processes are exported because the runner
// does the same when a helper was killed and when it cleans up after a crash.
package jobhelper

import "os"

// Name is argv[0] of a helper.
const Name = "forgeci-job"

// Descriptors that a helper is started with, beside /dev/null as 0 and 1.
const (
	recordFD  = 2 // the sandbox's record, locked; crash texts go there too
	controlFD = 3 // one end of a stream socket, the runner has the other
)

// EndedMark is the line that a helper appends to its record when it has proven
// that no process of the job is left.
const EndedMark = "\nended\n"

func init() { //nolint:gochecknoinits // the reason is in the package comment
	if len(os.Args) > 0 && os.Args[0] == Name {
		os.Exit(serve())
	}
}
