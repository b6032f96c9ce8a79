package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/source"
	"forgeci/internal/testkit"
)

// Databases that a bench may run on.
const (
	sqlite   = "sqlite"
	postgres = "postgres"
)

// postgresCluster is the one cluster of a run of this program.
type postgresCluster struct{ server *testkit.PostgresServer }

// database returns the URL of an empty PostgreSQL database.
func (b *bench) database() (string, error) {
	if b.postgres == nil {
		s, err := testkit.OpenPostgres(true, b.postgresSettings()...)
		if err != nil {
			return "", err
		}
		b.logf("PostgreSQL %s, fsync on", s.Version())
		b.postgres = &postgresCluster{s}
	}
	return b.postgres.server.CreateDatabase()
}

// world is one server with its runners, each a process of its own, and a
// client with the administrator's token.
type world struct {
	b            *bench
	dir          string
	database     string // URL, empty for SQLite
	server       *process
	runners      []*process
	client       *protocol.Client
	registration string
	started      time.Duration // from exec to the first answer of /healthz
}

// open starts a server on an empty database of the kind.
func (b *bench) open(ctx context.Context, kind string, args ...string) (*world, error) {
	dir, err := os.MkdirTemp(b.dir, "world-")
	if err != nil {
		return nil, err
	}
	w := &world{b: b, dir: dir}
	if kind == postgres {
		if w.database, err = b.database(); err != nil {
			return nil, err
		}
		args = append(args, "--database", w.database)
	}
	if err := w.serve(ctx, args...); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

// serve starts the server and waits until it answers.
func (w *world) serve(ctx context.Context, args ...string) error {
	data, address := filepath.Join(w.dir, "data"), filepath.Join(w.dir, "address")
	listen, err := testkit.FreeAddress()
	if err != nil {
		return err
	}
	args = append([]string{"server", "--data", data, "--listen", listen, "--address-file", address, "--log-level", "warn"}, args...)
	url := "http://" + listen
	begun := time.Now()
	if w.server, err = w.b.start("server", w.b.binary, args...); err != nil {
		return err
	}
	if err := w.healthy(ctx, url); err != nil {
		return err
	}
	w.started = time.Since(begun)
	admin, err := os.ReadFile(filepath.Join(data, "admin.token"))
	if err != nil {
		return err
	}
	registration, err := os.ReadFile(filepath.Join(data, "registration.token"))
	if err != nil {
		return err
	}
	w.registration = strings.TrimSpace(string(registration))
	w.client, err = protocol.NewClient(protocol.ClientConfig{
		BaseURL: url, Token: strings.TrimSpace(string(admin)), HTTP: &http.Client{Transport: wideTransport()},
	})
	return err
}

// wideTransport keeps as many connections as a fleet of simulated runners needs.
func wideTransport() *http.Transport {
	t := protocol.NewTransport()
	t.Proxy = nil
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 4096, 4096
	return t
}

func (w *world) healthy(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer\n%s", w.server.tail())
		case <-w.server.exited:
			return fmt.Errorf("the server ended\n%s", w.server.tail())
		case <-time.After(time.Millisecond):
		}
	}
}

// addRunner starts a runner; awaitRunners waits until it is online.
func (w *world) addRunner(slots int) (*process, error) {
	n := len(w.runners) + 1
	token := filepath.Join(w.dir, "data", "registration.token")
	p, err := w.b.start("runner", w.b.binary, "runner", "--server", w.client.BaseURL(), "--token-file", token,
		"--data", filepath.Join(w.dir, "runner-"+strconv.Itoa(n)), "--name", "bench-"+strconv.Itoa(n),
		"--slots", strconv.Itoa(slots), "--log-level", "error")
	if err != nil {
		return nil, err
	}
	w.runners = append(w.runners, p)
	return p, nil
}

// awaitRunners waits until n runners are online.
func (w *world) awaitRunners(ctx context.Context, n int) error {
	return w.until(ctx, 30*time.Second, "runners online", func() (bool, error) {
		page, err := w.client.Runners(ctx, "")
		online := 0
		for _, r := range page.Items {
			if r.Status == "online" {
				online++
			}
		}
		return online >= n, err
	})
}

// until polls a condition; every read that fails ends it.
func (w *world) until(ctx context.Context, limit time.Duration, what string, holds func() (bool, error)) error {
	deadline := time.Now().Add(limit)
	for {
		ok, err := holds()
		if err != nil || ok {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("waited %s for %s in vain", limit, what)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.server.exited:
			return fmt.Errorf("the server ended\n%s", w.server.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// close ends all processes and removes the files.
func (w *world) close() error {
	var err error
	for _, p := range w.runners {
		err = errors.Join(err, p.stop())
	}
	if w.client != nil {
		w.client.CloseIdle()
	}
	if w.server != nil {
		err = errors.Join(err, w.server.stop())
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}

// repo returns a repository whose only snapshot is the given tree.
func (w *world) repo(ctx context.Context, name string) (protocol.Repo, error) {
	key := fmt.Sprintf("%064x", time.Now().UnixNano())
	return w.client.EnsureLocalRepo(ctx, protocol.EnsureLocalRepo{Name: name, Key: key})
}

// upload captures the tree and sends it; it returns the source's digest.
func (w *world) upload(ctx context.Context, repo protocol.Repo, dir string) (string, error) {
	snap, err := source.Capture(ctx, dir, source.CaptureOptions{TempDir: w.dir})
	if err != nil {
		return "", err
	}
	defer snap.Close() // it was only read
	_, err = w.client.PutSnapshot(ctx, repo.ID, snap.Digest, snap.Open(), snap.Size)
	return snap.Digest, err
}

// workflowFile is where every tree of a bench has its workflow.
const workflowFile = ".forgeci.yaml"

// tree writes files into a fresh directory.
func (w *world) tree(files map[string]string) (string, error) {
	dir, err := os.MkdirTemp(w.dir, "tree-")
	if err != nil {
		return "", err
	}
	for name, text := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// submit creates a run and returns it with its jobs.
func (w *world) submit(ctx context.Context, repo protocol.Repo, digest, key string) (ci.RunID, error) {
	created, err := w.client.CreateRun(ctx, repo.ID, key, protocol.CreateRun{WorkflowPath: workflowFile, Snapshot: digest})
	return created.RunID, err
}

// finished waits for the end of a run.
func (w *world) finished(ctx context.Context, run ci.RunID) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return w.client.RunEvents(ctx, run, protocol.Follow{GiveUp: time.Second}, func(protocol.RunSummary) error { return nil })
}

// succeeded checks that the job succeeded in its first attempt, and that its
// log is exactly what it should be.
func (w *world) succeeded(ctx context.Context, id ci.JobID, output string) (protocol.Job, error) {
	job, err := w.client.Job(ctx, id)
	if err != nil {
		return job, err
	}
	if job.State != ci.StateFinished || job.Conclusion != ci.ConclusionSuccess || len(job.Attempt) != 1 {
		return job, fmt.Errorf("job %s is %s %s after %d attempts: %s", id, job.State, job.Conclusion, len(job.Attempt), job.Detail)
	}
	log, err := w.client.JobLog(ctx, id, protocol.LogQuery{})
	if err != nil {
		return job, err
	}
	defer log.Close()
	text, err := io.ReadAll(io.LimitReader(log, 1<<20))
	if err != nil {
		return job, err
	}
	if string(text) != output || log.Truncated {
		return job, fmt.Errorf("job %s wrote %q instead of %q", id, text, output)
	}
	return job, nil
}

// onlyJob is the job of a run that has one.
func (w *world) onlyJob(ctx context.Context, run ci.RunID) (ci.JobID, error) {
	r, err := w.client.Run(ctx, run)
	if err != nil {
		return "", err
	}
	if len(r.JobList) != 1 {
		return "", fmt.Errorf("run %s has %d jobs", run, len(r.JobList))
	}
	return r.JobList[0].ID, nil
}
