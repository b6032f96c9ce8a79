package cli

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner"
	"forgeci/internal/runner/executor"
	"forgeci/internal/runner/executor/process"
	"forgeci/internal/runner/workspace"
)

// runnerConfig are the settings of forgeci runner.
type runnerConfig struct {
	daemon
	server, token, tokenFile string
	data                     string
	name                     string
	slots                    int
	labels                   []string
	size                     string
	jobUser                  string
	path                     string
	flush                    time.Duration
}

func (a *app) runnerCommand() *cobra.Command {
	var cfg runnerConfig
	cmd := &cobra.Command{
		Use:   "runner",
		Short: "Run jobs for a server, or look after its runners",
		Long: `Run jobs for a server. A runner asks the server for work; nothing has to reach it.

The first start needs the server's registration token (registration.token in the
server's data directory). The credential that it gets for it is kept in the data
directory, which makes it the same runner after a restart.

Jobs are processes of this machine (class process): for code that you trust. As
root, --job-user gives the jobs a user of their own; without one, jobs run as
root, which is accepted for a server on this machine only.

SIGTERM or Ctrl-C drains: running jobs end, nothing new is taken. A second signal
stops them and hands them back; so does SIGQUIT at once.`,
		Example: `  forgeci runner --server https://ci.example.com --token-file registration.token --label gpu
  forgeci runner list`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runner(cmd.Context(), &cfg) },
	}
	f := cmd.Flags()
	f.StringVar(&cfg.server, "server", "http://"+defaultListen, "address of the server")
	a.env(f, "server", "FORGECI_SERVER")
	a.bindToken(cmd, &cfg.token, &cfg.tokenFile, "registration token")
	f.StringVar(&cfg.data, "data", filepath.Join(defaultData, "runner"), "data directory: identity, workspaces, unsent logs")
	a.env(f, "data", "FORGECI_DATA")
	f.StringVar(&cfg.name, "name", "", "name shown to people; the default is the host's name")
	f.IntVar(&cfg.slots, "slots", 0, "how many jobs run at once; 0 is one for each processor")
	a.env(f, "slots", "FORGECI_SLOTS")
	f.StringArrayVar(&cfg.labels, "label", nil, "label on offer, key or key=value; may be repeated")
	f.StringVar(&cfg.size, "size", "", "size on offer, a word of the installation")
	f.StringVar(&cfg.jobUser, "job-user", "", "user that jobs run as; needs root")
	f.StringVar(&cfg.path, "path", "", "PATH of the jobs; the default is the system's")
	f.DurationVar(&cfg.flush, "flush-timeout", 30*time.Second, "how long a finished job waits for its log to arrive")
	cfg.daemon.bind(a, cmd)
	cmd.AddCommand(a.runnerListCommand(), a.runnerDrainCommand(), a.runnerFenceCommand())
	return cmd
}

func (a *app) runner(ctx context.Context, cfg *runnerConfig) error {
	if cfg.slots < 0 {
		return usage("--slots %d is negative", cfg.slots)
	}
	a.tokenName = registrationTokenName
	log := cfg.logger(a.err)
	if cfg.lifeline {
		log = log.With("process", "runner") // its lines stand between the server's
	}
	stopAdmin, err := cfg.admin(ctx, log)
	if err != nil {
		return err
	}
	defer stopAdmin()
	client, err := protocol.NewClient(protocol.ClientConfig{BaseURL: cfg.server, Version: version()})
	if err != nil {
		return err
	}
	token, err := a.registrationToken(cfg)
	if err != nil {
		return err
	}
	data, err := filepath.Abs(cfg.data)
	if err != nil {
		return usage("--data %q: %s", cfg.data, err)
	}
	user, err := cfg.user(ctx, log)
	if err != nil {
		return err
	}
	if err := makeRunnerData(data, user != nil); err != nil {
		return ci.Errorf(ci.ErrInvalid, "--data: %s", err)
	}
	rooms, err := workspace.Open(filepath.Join(data, "work"), log)
	if err != nil {
		return daemonError(err)
	}
	defer rooms.Close() //nolint:errcheck // the lock ends with the process
	exec, err := process.New(process.Options{Dir: filepath.Join(data, "sandboxes"), User: user, Path: cfg.path}, log)
	if err != nil {
		return err
	}
	r, err := runner.New(runner.Config{
		Client: client, RegistrationToken: token, DataDir: data, Name: cfg.name, Slots: cfg.slots, Labels: cfg.labels,
		Size: cfg.size, Executors: []executor.Executor{exec}, Workspaces: rooms, JobUser: user, Version: version(),
		FlushTimeout: cfg.flush, Log: log,
	})
	if err != nil {
		return err
	}
	defer cfg.watch(ctx, a.Stdin, log, r.Drain, r.Stop)()
	return r.Run(ctx)
}

// makeRunnerData makes the data directory of a runner, closed to others; a job's
// user of its own passes through it to its workspace, whatever the umask is and
// whether it was made without one.
func makeRunnerData(dir string, passable bool) error {
	if !passable {
		return os.MkdirAll(dir, 0o700)
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	fi, err := os.Stat(dir)
	if err == nil && fi.Mode().Perm()&0o011 != 0o011 {
		err = os.Chmod(dir, fi.Mode().Perm()|0o011)
	}
	return err
}

// registrationToken finds the token: flags and environment, else the one that a
// server on this machine has put into the default data directory. None is no
// error: a runner that is registered needs none.
func (a *app) registrationToken(cfg *runnerConfig) (string, error) {
	token, err := a.readToken(cfg.token, cfg.tokenFile)
	if err != nil || token != "" || !loopback(cfg.server) {
		return token, err
	}
	name := filepath.Join(defaultData, registrationTokenName)
	if !exists(name) {
		return "", nil
	}
	return readTokenFile(name)
}

// user finds who jobs run as (SPEC decision 17).
func (c *runnerConfig) user(ctx context.Context, log *slog.Logger) (*executor.User, error) {
	switch {
	case c.jobUser != "":
		return executor.LookupUser(c.jobUser)
	case os.Geteuid() != 0:
		return nil, nil
	case !loopback(c.server):
		return nil, usage("jobs of a server on another machine do not run as root: give them a user with --job-user")
	default:
		log.WarnContext(ctx, "jobs run as root; --job-user (of a server: --runner-job-user) gives them a user of their own")
		return nil, nil
	}
}

// daemon are the settings of commands that run until they are told to end.
type daemon struct {
	level       string
	format      string
	adminListen string
	// lifeline: standard input is held by the parent; its end means that the
	// parent is gone.
	lifeline bool
}

func (d *daemon) bind(a *app, cmd *cobra.Command) {
	d.level, d.format = "info", "text"
	f := cmd.Flags()
	levels, formats := []string{"debug", "info", "warn", "error"}, []string{"text", "json"}
	f.Var(&choice{&d.level, levels}, "log-level", "debug, info, warn or error")
	a.env(f, "log-level", "FORGECI_LOG_LEVEL")
	f.Var(&choice{&d.format, formats}, "log-format", "text or json")
	a.env(f, "log-format", "FORGECI_LOG_FORMAT")
	registerChoices(cmd, "log-level", levels)
	registerChoices(cmd, "log-format", formats)
	f.StringVar(&d.adminListen, "admin-listen", "", "loopback address for profiles of this process (/debug/pprof/), such as 127.0.0.1:6060; nothing by default")
	a.env(f, "admin-listen", "FORGECI_ADMIN_LISTEN")
	f.BoolVar(&d.lifeline, lifelineFlag, false, "end when standard input ends")
	if err := f.MarkHidden(lifelineFlag); err != nil {
		panic("cli: " + err.Error()) // the flag was added one line before
	}
}

const lifelineFlag = "lifeline"

// logger writes one line for each record to standard error.
func (d *daemon) logger(w io.Writer) *slog.Logger {
	level := map[string]slog.Level{"debug": slog.LevelDebug, "warn": slog.LevelWarn, "error": slog.LevelError}[d.level]
	opts := &slog.HandlerOptions{Level: level}
	if d.format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// watch calls drain at the first signal and stop at the second, at SIGQUIT and
// when the parent is gone. A third signal ends the process as if nobody had
// listened. The function that it returns ends the watch.
func (d *daemon) watch(ctx context.Context, stdin io.Reader, log *slog.Logger, drain, stop func()) func() {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	signals := make(chan os.Signal, 3)
	notify(signals)
	gone := make(chan struct{})
	if d.lifeline {
		go func() {
			// An error is an end, too.
			_, _ = io.Copy(io.Discard, stdin)
			close(gone)
		}()
	}
	go func() {
		defer unnotify(signals)
		for drained := false; ; {
			select {
			case <-ctx.Done():
				return
			case <-gone:
				log.WarnContext(ctx, "the parent process is gone, stopping")
				stop()
				return
			case s := <-signals:
				if drained || isQuit(s) {
					log.InfoContext(ctx, "stopping", "signal", s.String())
					stop()
					return
				}
				drained = true
				log.InfoContext(ctx, "draining; a second signal stops at once", "signal", s.String())
				drain()
			}
		}
	}()
	return cancel
}
