package cli

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/source"
	"forgeci/internal/source/git"
	"forgeci/internal/workflow"
)

// submission says what is run.
type submission struct {
	choosing
	jobs      []string
	inputs    []string
	untracked bool
}

func (s *submission) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.file, "file", "", "workflow file; the default is the only one of .forgeci.yaml and .forgeci/*.yaml")
	f.BoolVar(&s.all, "all", false, "take every workflow file, each as a run of its own")
	f.StringArrayVar(&s.jobs, "job", nil, "only this job and what it needs; may be repeated")
	f.StringArrayVar(&s.inputs, "input", nil, "an input of the workflow as name=value; may be repeated")
	f.BoolVar(&s.untracked, "untracked", false, "take in files that git neither tracks nor ignores")
	if err := cmd.MarkFlagFilename("file", "yaml"); err != nil {
		panic("cli: " + err.Error()) // the flag was added four lines before
	}
}

// values reads --input.
func (s *submission) values() (map[string]string, error) {
	values := map[string]string{}
	for _, in := range s.inputs {
		name, value, ok := strings.Cut(in, "=")
		if !ok || name == "" {
			return nil, usage("--input %q: write it as name=value", in)
		}
		if _, twice := values[name]; twice {
			return nil, usage("--input %q is given twice", name)
		}
		values[name] = value
	}
	return values, nil
}

// submitConfig are the settings of forgeci submit.
type submitConfig struct {
	connection
	output
	waiting
	submission
	message string
	key     string
}

func (a *app) submitCommand() *cobra.Command {
	var cfg submitConfig
	cmd := &cobra.Command{
		Use:   "submit [DIR]",
		Short: "Run the working tree on the server",
		Long: `Take a snapshot of the working tree as it is, uncommitted changes included, and run
its workflow on the server. What is changed afterwards does not change the run.

Ignored files are left out; files that git does not know yet are taken in by
--untracked. A directory that is no git checkout is taken whole. A snapshot that
the server has already is not sent again.

Standard output has the ID of the run alone. With --wait the command blocks
until the run is finished, tells on standard error what happens, and exits with
the run's result.`,
		Example: `  forgeci submit --wait
  run=$(forgeci submit --file .forgeci/nightly.yaml --input suite=full)`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.submit(cmd.Context(), &cfg, strings.Join(args, ""))
		},
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, true)
	cfg.waiting.bind(cmd)
	cfg.submission.bind(cmd)
	f := cmd.Flags()
	f.StringVar(&cfg.message, "message", "", "description of the run; the default is the commit's subject")
	f.StringVar(&cfg.key, "idempotency-key", "", "the same key with the same tree and settings gives the same run")
	return cmd
}

func (a *app) submit(ctx context.Context, cfg *submitConfig, dir string) error {
	if err := cfg.check(); err != nil {
		return err
	}
	if cfg.form == outputLines && !cfg.wait {
		return usage("--output jsonl needs --wait")
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
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	created, err := a.send(ctx, c, co, &cfg.submission, inputs, cfg.message, cfg.key)
	if err != nil {
		return a.begun(err, created, cfg)
	}
	return a.submitted(ctx, c, created, cfg.waiting, cfg.output, !cfg.all)
}

// begun ends a command that could not create all of its runs: those that are there
// are named as if they were all, and the code is that of the error.
func (a *app) begun(err error, created []protocol.RunCreated, cfg *submitConfig) error {
	if len(created) == 0 {
		return err
	}
	ids := a.nameRuns(created, cfg.output)
	switch {
	case !cfg.json():
		return err
	case !cfg.wait:
		return errors.Join(err, a.printJSON(created))
	}
	runs := make([]protocol.Run, len(ids))
	for i, id := range ids {
		runs[i].ID = id
	}
	return a.cutShort(err, cfg.output, runs, false)
}

// examine finds what is wrong with the workflow files before anything is started or
// sent, and tells what the runs will not have though the files say so. It returns
// the inputs.
func (a *app) examine(co checkout, s *submission) (map[string]string, error) {
	inputs, err := s.values()
	if err != nil {
		return nil, err
	}
	for _, file := range co.files {
		plan, err := co.plan(file, inputs, s.jobs)
		if err != nil {
			return nil, err
		}
		// What starts runs is no matter of the run that is being started.
		a.warnBriefly(slices.DeleteFunc(plan.Warnings, workflow.Warning.Starts))
	}
	return inputs, nil
}

// send captures the tree, uploads it if the server does not have it, and creates a
// run for each workflow file. With an error it returns those that it has created.
func (a *app) send(
	ctx context.Context, c *protocol.Client, co checkout, s *submission, inputs map[string]string, message, key string,
) ([]protocol.RunCreated, error) {
	type description struct {
		commit git.Commit
		err    error
	}
	described := make(chan description, 1)
	go func() {
		commit, err := co.describe(ctx)
		described <- description{commit, err}
	}()
	snap, err := source.Capture(ctx, co.root, source.CaptureOptions{Untracked: s.untracked})
	if err != nil {
		return nil, err
	}
	defer snap.Close() //nolint:errcheck // a temporary file that was only read
	if err := hasFiles(snap, co.files); err != nil {
		return nil, err
	}
	repoKey, err := co.key()
	if err != nil {
		return nil, err
	}
	repo, err := c.EnsureLocalRepo(ctx, protocol.EnsureLocalRepo{Name: filepath.Base(co.root), Key: repoKey})
	if err != nil {
		return nil, err
	}
	if err := a.upload(ctx, c, repo, snap); err != nil {
		return nil, err
	}
	d := <-described
	if d.err != nil {
		return nil, d.err
	}
	if message == "" {
		message = d.commit.Subject
	}
	if key == "" {
		key = ci.IDSource{}.New(ci.PrefixRequest)
	}
	created := make([]protocol.RunCreated, len(co.files))
	for i, file := range co.files {
		create := func() (protocol.RunCreated, error) {
			return c.CreateRun(ctx, repo.ID, fileKey(key, file, co.files), protocol.CreateRun{
				WorkflowPath: file, Snapshot: snap.Digest, CommitSHA: d.commit.SHA, Ref: d.commit.Ref,
				Message: message, Author: d.commit.Author, Dirty: d.commit.Dirty, Inputs: inputs, Jobs: s.jobs,
			})
		}
		if created[i], err = create(); errors.Is(err, ci.ErrNotFound) {
			// The snapshot may have been collected since, if this machine was suspended.
			if err = a.upload(ctx, c, repo, snap); err == nil {
				created[i], err = create()
			}
		}
		if err != nil {
			return created[:i], err
		}
	}
	return created, nil
}

// fileKey is the idempotency key of one of several runs of one command.
func fileKey(key, file string, files []string) string {
	if len(files) == 1 {
		return key
	}
	return key + "/" + file
}

// hasFiles makes sure that the snapshot holds the workflow files, which it does
// not when git does not know them yet.
func hasFiles(snap *source.Snapshot, files []string) error {
	for _, file := range files {
		if !slices.ContainsFunc(snap.Manifest, func(e source.Entry) bool { return e.Path == file }) {
			return usage("%s is not in the snapshot, because git does not track it: `git add` it, or take --untracked", file)
		}
	}
	return nil
}

// upload sends the snapshot unless the server has it.
func (a *app) upload(ctx context.Context, c *protocol.Client, repo protocol.Repo, snap *source.Snapshot) error {
	_, found, err := c.FindSnapshot(ctx, repo.ID, snap.Digest)
	if err != nil || found {
		return err
	}
	const worthTelling = 8 << 20
	if snap.Size > worthTelling {
		a.err.line(fmt.Sprintf("sending %s, %s", ci.Count(snap.Files, "file"), size(snap.Size)))
	}
	_, err = c.PutSnapshot(ctx, repo.ID, snap.Digest, snap.Open(), snap.Size)
	return err
}
