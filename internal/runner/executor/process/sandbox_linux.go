package process

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process/jobhelper"
)

// sandbox is one open sandbox.
type sandbox struct {
	exec *Executor
	job  executor.Job
	root string // the workspace, symbolic links resolved
	rec  *record
	file *os.File // the record's file, locked
	help *client

	mu      sync.Mutex // one step, or Close, at a time; guards what follows
	seq     uint32
	ran     bool // a step was started
	broken  bool // the helper is gone or silent
	closed  bool
	proof   protocol.Evidence
	streams []*stream // of all steps, those that have ended left out now and then
	scripts []string
}

// Open writes the record, then starts the job's helper. No process of the job
// exists before Run.
func (e *Executor) Open(ctx context.Context, job executor.Job) (executor.Sandbox, error) {
	if err := ctx.Err(); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "open sandbox").WithCause(context.Cause(ctx))
	}
	for _, dir := range []string{job.Workspace, job.Home, job.Tmp} {
		if !filepath.IsAbs(dir) {
			return nil, ci.Errorf(ci.ErrInvalid, "sandbox directory %q is not absolute", dir)
		}
	}
	root, err := filepath.EvalSymlinks(job.Workspace)
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "the workspace is not there").WithCause(err)
	}
	if job.Steps == "" {
		job.Steps = job.Tmp
	}
	runner, err := self()
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "open sandbox").WithCause(err)
	}
	rec := &record{ID: newID(), Attempt: attemptOf(job.Lease), Runner: runner}
	group := e.group(rec.ID)
	if group != nil {
		rec.CgroupVersion, rec.CgroupDir = group.Version, group.Dir
	}
	e.setLive(rec.ID, true)
	s := &sandbox{exec: e, job: job, root: root, rec: rec}
	if s.resume(group) {
		return s, nil
	}
	file, err := createRecord(e.opts.Dir, rec)
	if err != nil {
		e.setLive(rec.ID, false)
		return nil, ci.Errorf(ci.ErrUnavailable, "write sandbox record").WithCause(err)
	}
	s.file = file
	if err := s.startHelper(group); err != nil {
		s.forget()
		return nil, err
	}
	return s, nil
}

func (s *sandbox) startHelper(group *jobhelper.Group) error {
	help, err := startHelper(s.rec, s.file, s.exec.helperWait)
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "start the job's helper process").WithCause(err)
	}
	s.help = help
	if err := s.openJob(group); err != nil {
		help.kill()
		help.close()
		return err
	}
	return nil
}

// openJob has the helper make ready for the job. When it fails, no cgroup is left.
func (s *sandbox) openJob(group *jobhelper.Group) error {
	open := &jobhelper.Message{Kind: jobhelper.KindOpen}
	if group != nil {
		open.Argv = []string{group.Version, group.Dir}
	}
	var ready *jobhelper.Message
	err := s.help.send(open)
	if err == nil {
		ready, err = s.help.expect(0, jobhelper.KindReady)
	}
	if err == nil && ready.Text != "" {
		err = ci.Errorf(ci.ErrUnavailable, "make the job's cgroup: %s", ready.Text)
	}
	if err != nil && group != nil {
		_ = group.Remove()
	}
	return err
}

// forget removes the record of a sandbox of which nothing is left.
func (s *sandbox) forget() {
	_ = os.Remove(s.rec.path)
	_ = s.file.Close()
	s.exec.setLive(s.rec.ID, false)
}

func (e *Executor) setLive(id string, live bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if live {
		e.live[id] = true
	} else {
		delete(e.live, id)
	}
}

// Run implements executor.Sandbox.
func (s *sandbox) Run(ctx context.Context, step executor.Step) (executor.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return executor.Result{}, ci.Errorf(ci.ErrConflict, "the sandbox is closed")
	case s.broken:
		return executor.Result{}, errHelperGone()
	}
	start, err := s.prepare(step)
	if err != nil {
		return executor.Result{}, err
	}
	if ctx.Err() != nil { // as if the signal had come before the first instruction
		return executor.Result{ExitCode: 128 + int(syscall.SIGTERM), Signal: "SIGTERM"}, nil
	}
	out, errs, err := s.start(start, step)
	if err != nil {
		return executor.Result{}, err
	}
	exited, err := s.supervise(ctx)
	if err != nil {
		out.abandon()
		errs.abandon()
		return executor.Result{}, err
	}
	res := executor.Result{
		Duration: time.Duration(exited.Nanos),
		Leaked:   s.drain(ctx, out, errs),
	}
	status := syscall.WaitStatus(exited.Num)
	if status.Signaled() {
		res.ExitCode = 128 + int(status.Signal())
		res.Signal = unix.SignalName(status.Signal())
		if res.Signal == "" {
			res.Signal = fmt.Sprintf("SIG%d", int(status.Signal()))
		}
	} else {
		res.ExitCode = status.ExitStatus()
		if res.ExitCode != 0 {
			res.Line = s.failedLine()
		}
	}
	return res, nil
}

// prepare checks the step and writes its script.
func (s *sandbox) prepare(step executor.Step) (*jobhelper.Message, error) {
	if i := strings.IndexByte(step.Script, 0); i >= 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "the step's commands hold a NUL byte in line %d, which no shell can be given",
			1+strings.Count(step.Script[:i], "\n"))
	}
	argv, err := s.exec.shell(step.Shell)
	if err != nil {
		return nil, err
	}
	dir, err := s.workingDirectory(step.Dir)
	if err != nil {
		return nil, err
	}
	env, err := s.exec.environment(s.job, argv[0], s.rec.ID, step.Env)
	if err != nil {
		return nil, err
	}
	s.seq++
	script := s.stepFile("sh")
	if err := s.write(script, step.Script, 0o444); err != nil {
		return nil, err
	}
	env, err = s.traceErrors(argv[0], env)
	if err != nil {
		return nil, err
	}
	m := &jobhelper.Message{Kind: jobhelper.KindStart, Seq: s.seq, Dir: dir, Argv: append(argv, script), Env: env}
	if u := s.exec.opts.User; u != nil {
		m.User = &jobhelper.Credential{UID: u.UID, GID: u.GID, Groups: u.Groups}
	}
	return m, nil
}

// workingDirectory is the step's directory if it is one inside the workspace,
// also after symbolic links.
func (s *sandbox) workingDirectory(dir string) (string, error) {
	if strings.Contains(dir, "\x00") || !filepath.IsAbs(dir) {
		return "", ci.Errorf(ci.ErrInvalid, "working directory %q is not an absolute path", dir)
	}
	shown := dir
	if rel, err := filepath.Rel(s.job.Workspace, dir); err == nil {
		shown = rel
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", ci.Errorf(ci.ErrInvalid, "working directory %q does not exist in the workspace", shown).WithCause(err)
	}
	if rel, err := filepath.Rel(s.root, real); err != nil || !filepath.IsLocal(rel) {
		return "", ci.Errorf(ci.ErrUnsafe, "working directory %q is outside of the workspace", shown)
	}
	if fi, err := os.Stat(real); err != nil || !fi.IsDir() {
		return "", ci.Errorf(ci.ErrInvalid, "working directory %q is not a directory", shown)
	}
	return real, nil
}

// stepFile is the path of a file of the present step, with the extension.
func (s *sandbox) stepFile(ext string) string {
	return filepath.Join(s.job.Steps, fmt.Sprintf(".%s-%d.%s", s.rec.ID, s.seq, ext))
}

// write makes a file that was not there. It never follows a link: the directory
// may be writable by the job when both have the same user.
func (s *sandbox) write(path, text string, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err == nil {
		s.scripts = append(s.scripts, path)
		if _, err = f.WriteString(text); err == nil {
			err = f.Chmod(mode) // whatever the umask
		}
		if e := f.Close(); err == nil {
			err = e
		}
	}
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "write the step's script").WithCause(err)
	}
	return nil
}

// start starts the step and its output.
func (s *sandbox) start(m *jobhelper.Message, step executor.Step) (out, errs *stream, err error) {
	out, outFD, err := newStream(step.Stdout)
	if err != nil {
		return nil, nil, ci.Errorf(ci.ErrUnavailable, "make a pipe").WithCause(err)
	}
	errs, errFD, err := newStream(step.Stderr)
	if err != nil {
		_ = syscall.Close(outFD)
		out.close()
		return nil, nil, ci.Errorf(ci.ErrUnavailable, "make a pipe").WithCause(err)
	}
	err = s.help.send(m, outFD, errFD)
	_ = syscall.Close(outFD)
	_ = syscall.Close(errFD)
	var reply *jobhelper.Message
	if err == nil {
		reply, err = s.help.expect(m.Seq, jobhelper.KindStarted, jobhelper.KindFailed)
	}
	if err != nil {
		s.broken = true
	} else if reply.Kind == jobhelper.KindFailed {
		err = startError(reply)
	}
	if err != nil {
		out.close()
		errs.close()
		return nil, nil, sandboxError(err)
	}
	s.ran = true
	kept := s.streams[:0]
	for _, st := range s.streams {
		select {
		case <-st.ended:
			_ = st.r.Close()
		default:
			kept = append(kept, st)
		}
	}
	s.streams = append(kept, out, errs)
	return out, errs, nil
}

// startError says why the step's shell could not be started.
func startError(m *jobhelper.Message) error {
	switch errno := syscall.Errno(m.Num); errno {
	case syscall.E2BIG:
		return ci.Errorf(ci.ErrTooLarge, "the step's environment is larger than this system allows").WithCause(errno)
	case syscall.EACCES:
		return ci.Errorf(ci.ErrUnavailable, "the job's user may not start the shell in the workspace (%s)", m.Text)
	default:
		return ci.Errorf(ci.ErrUnavailable, "the step cannot be started (%s)", m.Text)
	}
}

// sandboxError makes err a typed one.
func sandboxError(err error) error {
	if ci.KindOf(err) != ci.ErrInternal {
		return err
	}
	return ci.Errorf(ci.ErrUnavailable, "the job's helper process cannot be reached").WithCause(err)
}

// supervise waits until the step's main process has ended, and when ctx is done
// until all processes of the step have, asked or forced.
func (s *sandbox) supervise(ctx context.Context) (*jobhelper.Message, error) {
	var exited *jobhelper.Message
	var grace, patience <-chan time.Time
	var end time.Time // when grace is over
	done, lost, cancelled, gone := ctx.Done(), s.job.Lost(), false, false
	signal := func(kind jobhelper.Kind) {
		if err := s.help.send(&jobhelper.Message{Kind: kind, Seq: s.seq}); err != nil {
			s.help.kill() // the events end by it
		}
	}
	stop := func(why context.Context) {
		if !cancelled {
			cancelled = true
			signal(jobhelper.KindTerm)
		}
		d := executor.Grace(why, s.job.Grace)
		if at := time.Now().Add(d); patience == nil && (end.IsZero() || at.Before(end)) {
			end, grace = at, time.After(d)
		}
	}
	for exited == nil || cancelled && !gone {
		select {
		case m, ok := <-s.help.events:
			switch {
			case !ok:
				s.broken = true
				s.help.kill()
				_, _ = s.killLost(context.WithoutCancel(ctx))
				return nil, errHelperGone()
			case m.Seq != s.seq:
			case m.Kind == jobhelper.KindExited:
				exited = m
			case m.Kind == jobhelper.KindStepGone:
				gone = true
			}
		case <-done:
			done = nil
			stop(ctx)
		case <-lost:
			lost = nil
			stop(s.job.Owned)
		case <-grace:
			grace = nil
			signal(jobhelper.KindKill)
			patience = time.After(s.exec.killWait)
		case <-patience:
			if exited != nil {
				return exited, nil // the rest is for Close to tell
			}
			return nil, ci.Errorf(ci.ErrUnavailable, "the step's processes do not end although they were killed")
		}
	}
	return exited, nil
}

// drain waits for the output of a step whose main process has ended and reports
// whether someone still holds it. All that the main process wrote is delivered,
// however slow the writers are, unless ctx is done.
func (s *sandbox) drain(ctx context.Context, streams ...*stream) (leaked bool) {
	if !s.settled(nil, time.After(s.exec.opts.DrainGrace), streams) {
		for _, st := range streams {
			st.finish()
		}
		if !s.settled(ctx.Done(), nil, streams) && !s.settled(nil, time.After(s.exec.opts.DrainGrace), streams) {
			for _, st := range streams {
				st.abandon()
			}
		}
	}
	for _, st := range streams {
		select {
		case <-st.settled:
			leaked = leaked || !st.isEOF()
		default: // a Write blocks; who holds the pipe is not known
		}
	}
	return leaked
}

// settled waits for all streams and returns false when one of the channels is
// first.
func (s *sandbox) settled(done <-chan struct{}, timer <-chan time.Time, streams []*stream) bool {
	for _, st := range streams {
		select {
		case <-st.settled:
		case <-done:
			return false
		case <-timer:
			return false
		}
	}
	return true
}
