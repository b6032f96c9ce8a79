package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// runConfig are the settings of forgeci run.
type runConfig struct {
	output
	submission
	slots     int
	artifacts string
	timeout   time.Duration
	failFast  bool
	debug     bool
}

func (a *app) runCommand() *cobra.Command {
	var cfg runConfig
	cmd := &cobra.Command{
		Use:   "run [DIR]",
		Short: "Run the workflow here and now, without a server",
		Long: `Run the workflow of the working tree on this machine, with the semantics of a
server: a snapshot of the tree, fresh directories for each job, the same rules
for needs, artifacts, retries and limits.

A private server and runner are started for it and end with it; nothing stays
but what --artifacts saves. Jobs find programs by this shell's PATH; otherwise
they have the environment that they have everywhere. The log of all jobs goes to
standard output, each line behind its job's name.

--artifacts saves each artifact in DIRECTORY/NAME. Artifacts of one name, such as
those of a matrix, are in DIRECTORY/NAME/JOB, and with --all, when several
workflows have the name, in DIRECTORY/NAME/WORKFLOW/JOB.

Interrupting the command cancels the run.`,
		Example: `  forgeci run
  forgeci run --job test
  forgeci run --file .forgeci/release.yaml --input version=1.2 --artifacts dist`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runLocally(cmd.Context(), &cfg, strings.Join(args, ""))
		},
	}
	cfg.output.bind(cmd, false)
	cfg.submission.bind(cmd)
	f := cmd.Flags()
	f.IntVar(&cfg.slots, "slots", 0, "how many jobs run at once; 0 is one for each processor")
	f.StringVar(&cfg.artifacts, "artifacts", "", "directory in which to save the artifacts of the run, replacing files that are there")
	f.DurationVar(&cfg.timeout, "timeout", 0, "cancel the run and exit with 124 after so long")
	f.BoolVar(&cfg.failFast, "fail-fast", false, "cancel the run at the first failed job")
	f.BoolVar(&cfg.debug, "debug", false, "print the log of the private server and runner, too")
	return cmd
}

func (a *app) runLocally(ctx context.Context, cfg *runConfig, dir string) error {
	if cfg.timeout < 0 || cfg.slots < 0 {
		return usage("--timeout and --slots are not negative")
	}
	co, err := cfg.find(dir)
	if err != nil {
		return err
	}
	inputs, err := a.examine(co, &cfg.submission)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	p, err := a.startPrivate(ctx, cfg)
	if err != nil {
		return err
	}
	defer p.close()
	created, err := a.send(ctx, p.client, co, &cfg.submission, inputs, "", "")
	if err != nil {
		return err
	}
	runs, err := a.followRuns(ctx, p, created, cfg)
	if err != nil {
		return a.cutShort(err, cfg.output, runs, !cfg.all)
	}
	if cfg.artifacts != "" {
		err = a.saveArtifacts(ctx, p.client, runs, cfg.artifacts)
	}
	if err := errors.Join(err, a.sumUp(runs, cfg)); err != nil {
		return err
	}
	return finish(runs)
}

// followRuns prints what happens until all runs are finished. When it is told to
// stop before, it cancels them and returns them as they are then.
func (a *app) followRuns(ctx context.Context, p *private, created []protocol.RunCreated, cfg *runConfig) ([]protocol.Run, error) {
	out := a.out
	if cfg.json() {
		out = a.err
	}
	bounded, cancel := within(ctx, cfg.timeout)
	defer cancel()
	runs := make([]protocol.Run, len(created))
	for i, r := range created {
		runs[i].ID = r.RunID
	}
	for i, r := range created {
		follower := a.newJobFollower(p.client, out)
		progress := a.newProgress("")
		following, quiet := context.WithCancel(context.WithoutCancel(ctx))
		run, err := a.awaitRun(bounded, p.client, r.RunID, waiting{failFast: cfg.failFast}, func(run protocol.Run) error {
			follower.changed(following, run)
			return progress.changed(run)
		})
		runs[i] = run
		if err != nil {
			a.cancelPrivate(ctx, p, runs[i:], err)
		} else {
			follower.changed(following, run)
			if e := follower.wait(following, logBound); e != nil {
				a.err.line(describe(e))
			}
		}
		quiet()
		progress.close()
		if err != nil {
			return runs, err
		}
	}
	return runs, nil
}

// logBound is how long the end of a log may take after the end of its run.
const logBound = 10 * time.Second

// cancelPrivate cancels runs, reads them once more, and ends server and runner,
// which returns when the runs' processes have ended. Stopping the runner is faster
// than waiting until it hears of the cancellation.
func (a *app) cancelPrivate(ctx context.Context, p *private, runs []protocol.Run, why error) {
	a.err.line("cancelling: " + describe(why))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelBound)
	defer cancel()
	for i := range runs {
		_, err := p.client.Cancel(ctx, runs[i].ID)
		if err == nil || errors.Is(err, ci.ErrConflict) { // a conflict: it has just finished
			var now protocol.Run
			if now, err = p.client.Run(ctx, runs[i].ID); err == nil {
				runs[i] = now
			}
		}
		if err != nil {
			a.err.line(describe(err))
			break
		}
	}
	hurry, now := context.WithCancel(ctx)
	now()
	p.child.end(hurry.Done(), 0)
}

// cancelBound is how long the private server may take to record cancellations.
const cancelBound = 2 * time.Second

// sumUp ends the output with a line for each job, or with the document.
func (a *app) sumUp(runs []protocol.Run, cfg *runConfig) error {
	if cfg.json() {
		return a.printAwaited(cfg.output, runs, !cfg.all)
	}
	for _, r := range runs {
		st := status(r.State, r.Conclusion, r.Warnings)
		line := fmt.Sprintf("%s: %s", clean(r.Workflow), a.err.paint(st.style, st.text))
		if took := a.took(r.StartedAt, r.FinishedAt); took != "" {
			line += " in " + took
		}
		a.err.line(line)
	}
	return nil
}

// private is a server with a runner for one command.
type private struct {
	client *protocol.Client
	child  *child
	logs   *os.File
	dir    string
}

// startBound is how long a private server may take to answer.
const startBound = 20 * time.Second

// startPrivate starts a server and a runner in a temporary directory, on a free
// port of the loopback interface.
func (a *app) startPrivate(ctx context.Context, cfg *runConfig) (*private, error) {
	dir, err := os.MkdirTemp("", "forgeci-run-*")
	if err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "no temporary directory").WithCause(err)
	}
	p := &private{dir: dir}
	fail := func(err error) (*private, error) {
		p.close()
		return nil, err
	}
	if p.logs, err = os.OpenFile(filepath.Join(dir, "server.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600); err != nil {
		return fail(ci.Errorf(ci.ErrUnavailable, "no temporary file").WithCause(err))
	}
	var out io.Writer = p.logs
	if cfg.debug {
		out = io.MultiWriter(p.logs, a.err)
	}
	address := filepath.Join(dir, "address")
	args := []string{
		"server", "--data", filepath.Join(dir, "data"), "--listen", "127.0.0.1:0", "--address-file", address,
		"--runner", "--runner-slots", strconv.Itoa(cfg.slots), "--runner-path", a.getenv("PATH"),
	}
	if p.child, err = startChild(args, a.childEnvironment(), out); err != nil {
		return fail(err)
	}
	bounded, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	for {
		if b, err := os.ReadFile(address); err == nil && bytes.HasSuffix(b, []byte("\n")) {
			if p.client, err = privateClient(strings.TrimSpace(string(b)), filepath.Join(dir, "data")); err != nil {
				return fail(err)
			}
			return p, nil
		}
		select {
		case <-p.child.exited:
			return fail(ci.Errorf(ci.ErrUnavailable, "the private server did not start:\n%s", lastLines(p.logs.Name())))
		default:
		}
		if pause(bounded, 5*time.Millisecond) != nil {
			if cause := context.Cause(ctx); cause != nil {
				return fail(cause)
			}
			return fail(ci.Errorf(ci.ErrUnavailable, "the private server did not start within %s:\n%s", startBound, lastLines(p.logs.Name())))
		}
	}
}

func privateClient(server, data string) (*protocol.Client, error) {
	token, err := readTokenFile(filepath.Join(data, adminTokenName))
	if err != nil {
		return nil, err
	}
	return protocol.NewClient(protocol.ClientConfig{BaseURL: server, Token: token, Version: version()})
}

// close ends the server with its runner and removes the directory.
func (p *private) close() {
	if p.client != nil {
		p.client.CloseIdle()
	}
	if p.child != nil {
		p.child.end(nil, privateDrain)
	}
	if p.logs != nil {
		p.logs.Close()
	}
	_ = os.RemoveAll(p.dir) // a temporary directory
}

// privateDrain is how long the private server may take to end when nothing runs
// any more.
const privateDrain = 5 * time.Second

// lastLines returns the end of a log for an error message.
func lastLines(name string) string {
	b, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-8):], "\n")
}
