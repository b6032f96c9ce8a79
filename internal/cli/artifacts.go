package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"forgeci/internal/archive"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// artifactsConfig are the settings of forgeci artifacts.
type artifactsConfig struct {
	connection
	output
}

func (a *app) artifactsCommand() *cobra.Command {
	var cfg artifactsConfig
	cmd := &cobra.Command{
		Use:     "artifacts RUN|JOB",
		Short:   "List and download the artifacts of a run",
		Example: "  forgeci artifacts run_01kb7z5v8c6q9d3m2e4r5t6y7u\n  forgeci artifacts get run_01kb7z5v8c6q9d3m2e4r5t6y7u app --to out",
		Args:    cobra.ExactArgs(1),
		RunE:    func(cmd *cobra.Command, args []string) error { return a.artifacts(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	cmd.AddCommand(a.artifactsListCommand(), a.artifactsGetCommand())
	return cmd
}

func (a *app) artifactsListCommand() *cobra.Command {
	var cfg artifactsConfig
	cmd := &cobra.Command{
		Use:   "list RUN|JOB",
		Short: "List the artifacts of a run or job",
		Args:  cobra.ExactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return a.artifacts(cmd.Context(), &cfg, args[0]) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	return cmd
}

func (a *app) artifacts(ctx context.Context, cfg *artifactsConfig, name string) error {
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	list, err := a.findArtifacts(ctx, c, name)
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(list)
	}
	if len(list) == 0 {
		a.err.line("no artifacts")
		return nil
	}
	a.artifactTable(list).write(a.out)
	return nil
}

// findArtifacts lists the artifacts of a run or of one job.
func (a *app) findArtifacts(ctx context.Context, c *protocol.Client, name string) ([]protocol.Artifact, error) {
	id, job, err := a.target(ctx, c, name, false)
	if err != nil {
		return nil, err
	}
	if job != "" {
		j, err := c.Job(ctx, job)
		if err != nil {
			return nil, err
		}
		id = j.Run.ID
	}
	r, err := c.Run(ctx, id)
	if err != nil {
		return nil, err
	}
	list := []protocol.Artifact{}
	for _, art := range r.Artifacts {
		if job == "" || art.Job == job {
			list = append(list, art)
		}
	}
	return list, nil
}

func (a *app) artifactTable(list []protocol.Artifact) *table {
	t := &table{head: []string{"ARTIFACT", "JOB", "SIZE", "FILES", "CREATED", "ID", ""}}
	for _, art := range list {
		note := ""
		switch {
		case art.Expired:
			note = "expired"
		case !art.Bound:
			note = "of an attempt that did not win"
		}
		t.add(text(art.Name), text(art.JobName), text(size(art.Bytes)), textf("%d", art.Files),
			text(a.ago(art.CreatedAt)), dimmed(art.ID), text(note))
	}
	return t
}

// artifactsGetConfig are the settings of forgeci artifacts get.
type artifactsGetConfig struct {
	connection
	output
	to, save string
	force    bool
}

func (a *app) artifactsGetCommand() *cobra.Command {
	var cfg artifactsGetConfig
	cmd := &cobra.Command{
		Use:   "get RUN|JOB NAME | get ARTIFACT",
		Short: "Download an artifact, verify it and unpack it",
		Long: `Download an artifact, verify its size and digest, and unpack it into a directory.

Nothing is unpacked from bytes that are not the ones the job published. Files
that are there already are left alone and the command exits with 2, unless
--force replaces them.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error { return a.artifactsGet(cmd.Context(), &cfg, args) },
	}
	cfg.connection.bind(a, cmd)
	cfg.output.bind(cmd, false)
	f := cmd.Flags()
	f.StringVar(&cfg.to, "to", "", "directory to unpack into; the default is the artifact's name")
	f.StringVar(&cfg.save, "save", "", "do not unpack: save the archive (tar, zstd) in this file")
	f.BoolVar(&cfg.force, "force", false, "replace files that are there")
	return cmd
}

func (a *app) artifactsGet(ctx context.Context, cfg *artifactsGetConfig, args []string) error {
	if cfg.to != "" && cfg.save != "" {
		return usage("--to and --save exclude each other")
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	c, err := a.dial(&cfg.connection)
	if err != nil {
		return err
	}
	var art protocol.Artifact
	if len(args) == 2 {
		list, err := a.findArtifacts(ctx, c, args[0])
		if err != nil {
			return err
		}
		if art, err = pickArtifact(list, args[1]); err != nil {
			return err
		}
	} else {
		if !ci.HasPrefix(args[0], ci.PrefixArtifact) {
			return ci.Errorf(ci.ErrNotFound, "%q is not an artifact (art_…); name a run or job and the artifact's name", args[0])
		}
		if art, err = c.Artifact(ctx, args[0]); err != nil {
			return err
		}
	}
	where, err := a.download(ctx, c, art, cfg)
	if err != nil {
		return err
	}
	if cfg.json() {
		return a.printJSON(struct {
			protocol.Artifact
			Path string `json:"path"`
		}{art, where})
	}
	a.err.linef("%s: %s, %s, verified", where, size(art.Bytes), ci.Count(art.Files, "file"))
	return nil
}

// pickArtifact finds the artifact of a name. Bound ones hide those of attempts
// that did not win.
func pickArtifact(list []protocol.Artifact, name string) (protocol.Artifact, error) {
	var bound, unbound []protocol.Artifact
	var names []string
	for _, art := range list {
		switch {
		case art.Name != name:
			names = append(names, art.Name)
		case art.Bound:
			bound = append(bound, art)
		default:
			unbound = append(unbound, art)
		}
	}
	found := bound
	if len(found) == 0 {
		found = unbound
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return protocol.Artifact{}, ci.Errorf(ci.ErrNotFound, "there is no artifact %q here; there are: %s", name, nameList(names))
	default:
		jobs := make([]string, len(found))
		for i, art := range found {
			jobs[i] = art.JobName + " (" + art.ID + ")"
		}
		return protocol.Artifact{}, usage("several jobs have an artifact %q; name the job or the artifact's ID: %s", clean(name), nameList(jobs))
	}
}

// download fetches the archive into a file beside its goal, verifies it, and
// unpacks or moves it. It returns where it is.
func (a *app) download(ctx context.Context, c *protocol.Client, art protocol.Artifact, cfg *artifactsGetConfig) (string, error) {
	goal := cfg.save
	if goal == "" {
		if goal = cfg.to; goal == "" {
			goal = filepath.Base(art.Name)
		}
	} else if _, err := os.Lstat(goal); err == nil && !cfg.force {
		return "", usage("%s is there already; --force replaces it", clean(goal))
	}
	above := filepath.Dir(filepath.Clean(goal))
	if err := os.MkdirAll(above, 0o777); err != nil { //nolint:gosec // the user's own directory, under the user's umask
		return "", ci.Errorf(ci.ErrInvalid, "%s", err)
	}
	tmp, err := os.CreateTemp(above, ".forgeci-*")
	if err != nil {
		return "", ci.Errorf(ci.ErrInvalid, "%s", err)
	}
	defer os.Remove(tmp.Name()) // it may have been moved
	defer tmp.Close()
	if err := fetch(ctx, c, art, tmp); err != nil {
		return "", err
	}
	if cfg.save != "" {
		if err := tmp.Chmod(0o644); err != nil {
			return "", err
		}
		if err := os.Rename(tmp.Name(), goal); err != nil {
			return "", ci.Errorf(ci.ErrInvalid, "%s", err)
		}
		return goal, nil
	}
	if _, err := tmp.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	_, err = archive.Unpack(ctx, tmp, goal, archive.ArtifactLimits(), archive.UnpackOptions{Replace: cfg.force})
	if errors.Is(err, ci.ErrConflict) && !cfg.force {
		return "", usage("%s, in %s; --force replaces files, --to names another directory", describe(err), clean(goal))
	}
	return goal, err
}

// fetch copies an artifact's archive and verifies size and digest.
func fetch(ctx context.Context, c *protocol.Client, art protocol.Artifact, w io.Writer) error {
	body, err := c.ArtifactContent(ctx, art.ID)
	if err != nil {
		return err
	}
	defer body.Close()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, sum), io.LimitReader(body, art.Size+1))
	if err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); n != art.Size || got != art.Digest {
		return ci.Errorf(ci.ErrDigest, "artifact %s (%s) arrived damaged: %d bytes of %s, expected %d of %s; nothing was kept",
			art.Name, art.ID, n, got, art.Size, art.Digest)
	}
	return nil
}
