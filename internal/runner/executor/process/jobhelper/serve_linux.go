package jobhelper

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// helper is the state of one helper process.
type helper struct {
	self int
	null int // /dev/null, the stdin of every step
	// signals are those that are to be set to their defaults for each fork.
	signals []uintptr
	group   *Group // the job's cgroup, nil where there is none; set before a job's first step, under mu
	wake    chan struct{}

	mu       sync.Mutex // guards what follows, and the socket's sending side
	idle     bool       // wait said that there is no child, and none was started since
	step     *step      // the latest
	closing  bool       // take no more steps
	killing  bool       // kill whatever is left
	asked    map[procID]bool
	leftover int
	// disturbed: this job had processes that did not end by themselves in time. Its
	// helper serves no other.
	disturbed bool
}

// procID names one process.
type procID struct {
	pid   int
	start uint64
}

// step is one step that was started.
type step struct {
	seq     uint32
	pid     int
	begun   time.Time
	exited  bool
	group   *Group
	older   map[int]uint64 // PID → start of the job's processes that were there before; only without a group
	watched bool
	kill    bool
	poke    chan struct{}
}

// serve is the life of a helper. It returns when the control socket is not
// usable from the start; else the process exits in finish.
func serve() int { //nolint:unparam // the code of the process
	// Processes are started from this thread: its signal mask is theirs, and
	// under cgroup v1 it enters the step's group for the time of the fork.
	runtime.LockOSThread()
	signals := ignoreSignals()
	inheritNothing(controlFD)
	syscall.Umask(0o022)
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	// Steps of the same user cannot read the environment of other steps from here.
	const prSetDumpable = 4
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetDumpable, 0, 0)
	if err := BecomeSubreaper(); err != nil {
		return 1
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 1
	}
	h := &helper{self: os.Getpid(), null: null, signals: signals, wake: make(chan struct{}, 1), idle: true, asked: map[procID]bool{}}
	go h.reap()
	for {
		m, fds, err := control(controlFD).receive()
		if err != nil {
			h.close(true)
			select {} // reap ends the process
		}
		h.handle(m, fds)
		for _, fd := range fds {
			_ = syscall.Close(fd)
		}
	}
}

func (h *helper) handle(m *Message, fds []int) {
	switch m.Kind { //nolint:exhaustive // the others are its own answers
	case KindOpen:
		h.send(&Message{Kind: KindReady, Text: h.open(m.Argv)})
	case KindStart:
		h.start(m, fds)
	case KindTerm, KindKill:
		h.endStep(m.Seq, m.Kind == KindKill)
	case KindClose:
		h.close(false)
	case KindFinish:
		h.close(true)
	}
}

// send sends a message to the runner. When the runner is gone, Read says so.
func (h *helper) send(m *Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	_ = control(controlFD).write(m)
}

// open makes the job's cgroup and returns why it cannot.
func (h *helper) open(argv []string) string {
	if len(argv) != 2 {
		return ""
	}
	g := Group{Version: argv[0], Dir: argv[1]}
	if err := g.Make(); err != nil {
		return err.Error()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.group = &g
	return ""
}

func (h *helper) start(m *Message, fds []int) {
	fail := func(what string, err error) {
		errno := syscall.EIO
		_ = errors.As(err, &errno)
		h.send(&Message{Kind: KindFailed, Seq: m.Seq, Num: int64(errno), Text: what + ": " + err.Error()})
	}
	if len(fds) != 2 || len(m.Argv) == 0 {
		fail("start", syscall.EINVAL)
		return
	}
	st := &step{seq: m.Seq, poke: make(chan struct{}, 1)}
	attr := &syscall.ProcAttr{
		Dir:   m.Dir,
		Env:   m.Env,
		Files: []uintptr{uintptr(h.null), uintptr(fds[0]), uintptr(fds[1])},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	if m.User != nil {
		attr.Sys.Credential = &syscall.Credential{Uid: m.User.UID, Gid: m.User.GID, Groups: m.User.Groups}
	}
	if h.group != nil {
		g := h.group.Child("step-" + itoa(int(m.Seq)))
		if err := g.Make(); err != nil {
			fail("make cgroup", err)
			return
		}
		st.group = &g
	} else {
		st.older = h.present()
	}

	h.mu.Lock()
	if h.closing {
		h.mu.Unlock()
		fail("start", syscall.ECANCELED)
		return
	}
	st.begun = time.Now()
	setSignals(h.signals, signalDefault)
	unblockSignals()
	pid, err := h.fork(m.Argv, attr, st.group)
	setSignals(h.signals, signalIgnore)
	if err == nil {
		st.pid, h.step, h.idle = pid, st, false
		// Before reap can tell of its end.
		_ = control(controlFD).write(&Message{Kind: KindStarted, Seq: m.Seq, Num: int64(pid)})
	}
	h.mu.Unlock()
	h.wakeReaper()
	if err != nil {
		fail("start "+m.Argv[0]+" in "+m.Dir, err)
	}
}

// fork starts the program inside the group before its first instruction: under
// v2 the kernel does it, under v1 a new process is where the forking thread is.
func (h *helper) fork(argv []string, attr *syscall.ProcAttr, g *Group) (int, error) {
	if g == nil {
		return syscall.ForkExec(argv[0], argv, attr)
	}
	if g.Version == CgroupV2 {
		dir, err := syscall.Open(g.Dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		defer syscall.Close(dir)
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, dir
		return syscall.ForkExec(argv[0], argv, attr)
	}
	home := parent(parent(h.group.Dir))
	if err := os.WriteFile(g.Dir+"/tasks", []byte("0"), 0); err != nil {
		return 0, err
	}
	pid, err := syscall.ForkExec(argv[0], argv, attr)
	if e := os.WriteFile(home+"/tasks", []byte("0"), 0); e != nil && err == nil {
		// This thread would be frozen with the job: better no job.
		_ = syscall.Kill(pid, syscall.SIGKILL)
		return 0, e
	}
	return pid, err
}

// present is what is alive of the job now.
func (h *helper) present() map[int]uint64 {
	h.mu.Lock()
	idle := h.idle
	h.mu.Unlock()
	if idle {
		return nil
	}
	set := map[int]uint64{}
	for _, p := range h.descendants() {
		set[p.PID] = p.Start
	}
	return set
}

func (h *helper) descendants() []Proc {
	procs, err := Processes()
	if err != nil {
		return nil
	}
	return Descendants(procs, h.self)
}

// jobProcs is what is alive of the job: the cgroup's members and the helper's
// descendants, since a process of root can leave its cgroup.
func (h *helper) jobProcs() []Proc {
	procs := h.descendants()
	if h.group == nil {
		return procs
	}
	in := map[int]bool{}
	for _, p := range procs {
		in[p.PID] = true
	}
	for _, p := range h.group.Procs() {
		if !in[p.PID] {
			procs = append(procs, p)
		}
	}
	return procs
}

// stepProcs is what is alive of a step. Without a cgroup it is what was not
// there when the step began and does not descend from it; an orphan that an
// older background process made meanwhile counts as the step's.
func (h *helper) stepProcs(st *step) []Proc {
	if st.group != nil {
		return st.group.Procs()
	}
	procs, err := Processes()
	if err != nil {
		return nil
	}
	var roots []int
	for _, p := range procs {
		if start, ok := st.older[p.PID]; ok && start == p.Start {
			roots = append(roots, p.PID)
		}
	}
	not := map[int]bool{}
	for _, pid := range roots {
		not[pid] = true
	}
	for _, p := range Descendants(procs, roots...) {
		not[p.PID] = true
	}
	var found []Proc
	for _, p := range Descendants(procs, h.self) {
		if !not[p.PID] && !p.Dead() {
			found = append(found, p)
		}
	}
	return found
}

// endStep asks the step's processes to end, or kills them, and answers StepGone
// when none is left.
func (h *helper) endStep(seq uint32, kill bool) {
	h.mu.Lock()
	st := h.step
	if st == nil || st.seq != seq {
		h.mu.Unlock()
		return
	}
	h.disturbed = true
	st.kill = st.kill || kill
	begin := !st.watched
	st.watched = true
	h.mu.Unlock()
	if !kill {
		h.ask(h.stepProcs(st), false)
	}
	if begin {
		go h.watch(st)
		return
	}
	select {
	case st.poke <- struct{}{}:
	default:
	}
}

// watch sees to the end of a step that is to end. Without a cgroup one look can
// miss a process whose parent ends meanwhile, two in a row cannot miss the same.
func (h *helper) watch(st *step) {
	clean := 0
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		h.mu.Lock()
		exited, kill := st.exited, st.kill
		h.mu.Unlock()
		if kill {
			if st.group != nil {
				st.group.Kill()
			} else {
				KillFound(func() []Proc { return h.stepProcs(st) })
			}
		}
		left := h.stepProcs(st)
		if !kill {
			h.ask(left, true)
		}
		clean++
		if !exited || len(left) > 0 || st.group != nil && !st.group.Empty() {
			clean = 0
		}
		if clean == 2 {
			h.send(&Message{Kind: KindStepGone, Seq: st.seq})
			return
		}
		if clean == 1 {
			delay = time.Millisecond
		}
		select {
		case <-st.poke:
			delay = time.Millisecond
		case <-time.After(delay):
		}
	}
}

// close ends the job: it lets nothing more start, asks what is left to end, or
// kills it. reap sees the end.
func (h *helper) close(kill bool) {
	h.letReap()
	h.mu.Lock()
	first, firstKill := !h.closing, kill && !h.killing
	h.closing = true
	h.killing = h.killing || kill
	busy := !h.idle || h.group != nil && !h.group.Empty()
	// At once: finish must not begin another job while this one is being ended.
	h.disturbed = h.disturbed || busy
	h.mu.Unlock()
	if busy {
		var left []Proc
		for _, p := range h.jobProcs() {
			if !p.Dead() {
				left = append(left, p)
			}
		}
		if first {
			h.mu.Lock()
			h.leftover = len(left)
			h.mu.Unlock()
		}
		if !kill {
			h.ask(left, false)
			go h.askOrphans()
		}
	}
	if firstKill {
		go h.killAll()
	}
	h.wakeReaper()
}

// letReap gives reap the moment that it needs, after the last process has ended,
// to see that there is no other.
func (h *helper) letReap() {
	for range 10 {
		h.mu.Lock()
		settled := h.idle || h.step == nil || !h.step.exited
		h.mu.Unlock()
		if settled {
			return
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// ask sends SIGTERM to each of the processes that has not got it yet: to all, or
// to the orphans. A process that was made at the moment of the first look is an
// orphan when its parent has obeyed; what a parent starts to clean up after
// itself is not, and may finish.
func (h *helper) ask(procs []Proc, orphans bool) {
	h.mu.Lock()
	var fresh []Proc
	for _, p := range procs {
		id := procID{p.PID, p.Start}
		if !p.Dead() && !h.asked[id] && (!orphans || p.PPID == h.self) {
			h.asked[id] = true
			fresh = append(fresh, p)
		}
	}
	h.mu.Unlock()
	Terminate(fresh)
}

func (h *helper) askOrphans() {
	for delay := 10 * time.Millisecond; ; delay = min(2*delay, 200*time.Millisecond) {
		time.Sleep(delay)
		h.mu.Lock()
		killing := h.killing
		h.mu.Unlock()
		if killing {
			return
		}
		h.ask(h.jobProcs(), true)
	}
}

// killAll kills what is left again and again; the process ends when nothing is.
func (h *helper) killAll() {
	for delay := time.Millisecond; ; delay = min(2*delay, time.Second) {
		if h.group != nil {
			h.group.Kill()
			time.Sleep(delay)
		}
		KillFound(h.jobProcs)
		time.Sleep(delay)
	}
}

func (h *helper) wakeReaper() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// reap waits for every child: steps, and orphans of the job. It is the only
// place that waits.
func (h *helper) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // ECHILD: nothing of the job exists
			if !h.finish() {
				<-h.wake
			}
		default:
			h.reaped(pid, status)
		}
	}
}

func (h *helper) reaped(pid int, status syscall.WaitStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	st := h.step
	if st == nil || st.pid != pid || st.exited {
		return
	}
	st.exited = true
	_ = control(controlFD).write(&Message{
		Kind: KindExited, Seq: st.seq,
		Num: int64(status), Nanos: int64(time.Since(st.begun)),
	})
	if st.poke != nil {
		select {
		case st.poke <- struct{}{}:
		default:
		}
	}
}

// finish ends the helper when the job is closed and nothing of it is left, or
// makes it ready for another job; it returns whether reap should look again at
// once.
func (h *helper) finish() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	// A step may have been started between the wait and this lock; none can be
	// started while it is held.
	var status syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
	if err != syscall.ECHILD {
		if pid > 0 {
			h.mu.Unlock()
			h.reaped(pid, status)
			h.mu.Lock()
		}
		return true
	}
	h.idle = true
	if !h.closing {
		return false
	}
	var left error
	if h.group != nil {
		if !h.group.Empty() {
			time.Sleep(time.Millisecond)
			return true
		}
		left = h.group.Remove()
	}
	_, _ = syscall.Write(recordFD, []byte(EndedMark)) // before the runner can know
	gone := &Message{Kind: KindGone, Num: int64(h.leftover)}
	if left == nil && !h.disturbed && !h.killing {
		h.closing, h.step, h.group = false, nil, nil
		gone.Text = Again
		if control(controlFD).write(gone) == nil {
			return false
		}
	} else {
		_ = control(controlFD).write(gone)
	}
	os.Exit(0)
	return false
}
