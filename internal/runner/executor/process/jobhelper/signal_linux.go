package jobhelper

import (
	"syscall"
	"unsafe"
)

// Dispositions of a signal, as the kernel knows them.
const (
	signalDefault = 0
	signalIgnore  = 1
)

const (
	lastSignal = 64
	maskSize   = lastSignal / 8
)

// sigaction is the kernel's struct sigaction, for reading and for dispositions
// that need no handler.
type sigaction struct{ handler, flags, restorer, mask uintptr }

// ignoreSignals makes this process ignore what is sent to a whole process group
// or service to end it: the helper ends after its job, not before. It returns
// the signals that a step would find ignored if nobody set them to default
// before the fork. All others the Go runtime has a handler for, since its start,
// and sets to default in each child, whatever they are set to here.
func ignoreSignals() []uintptr {
	var inherited []uintptr
	for sig := uintptr(1); sig <= lastSignal; sig++ {
		switch syscall.Signal(sig) { //nolint:exhaustive // all others are ignored
		case syscall.SIGKILL, syscall.SIGSTOP, // cannot be ignored
			syscall.SIGCHLD,                 // ignored, nobody could wait
			syscall.SIGURG, syscall.SIGPROF, // the Go runtime's own
			syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGTRAP,
			syscall.SIGABRT, syscall.SIGSYS, syscall.SIGPIPE: // defects of this program
			continue
		}
		if sig == 32 || sig == 33 {
			// Those of C libraries: nobody sends them here, and the Go runtime leaves
			// them as they are. Ignored by whoever started the runner, they would stay
			// ignored in the job.
			setSignals([]uintptr{sig}, signalDefault)
			continue
		}
		var now sigaction
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, 0, uintptr(unsafe.Pointer(&now)), maskSize, 0, 0)
		if errno == 0 && now.handler <= signalIgnore {
			inherited = append(inherited, sig)
		}
		setSignals([]uintptr{sig}, signalIgnore)
	}
	return inherited
}

// setSignals sets the disposition of signals.
func setSignals(signals []uintptr, disposition uintptr) {
	action := sigaction{handler: disposition}
	for _, sig := range signals {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&action)), 0, maskSize, 0, 0)
	}
}

// unblockSignals clears the calling thread's signal mask; a process started by
// this thread inherits it.
func unblockSignals() {
	const setMask = 2
	var none uint64
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&none)), 0, maskSize, 0, 0)
}
