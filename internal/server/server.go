// Package server composes a ForgeCI server: it opens the database and the blob
// store, wires engine, services, API and pages together, and listens. New starts
// nothing; Run owns every goroutine and returns when all have ended.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/blob/fs"
	"forgeci/internal/blob/s3"
	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/api"
	"forgeci/internal/server/artifact"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/logs"
	"forgeci/internal/server/reader"
	"forgeci/internal/server/snapshot"
	"forgeci/internal/server/store"
	"forgeci/internal/server/web"
	"forgeci/internal/workflow"
)

// Config says how a server runs. DataDir and Listen, or Listener, are required.
type Config struct {
	// DataDir holds the embedded database, local blobs, keys and bootstrap tokens.
	DataDir string
	// Passable lets other users pass through DataDir to what lies below it and is
	// open to them, as a job's user does to the workspaces of a runner there. What
	// the server keeps in it is closed to them all the same.
	Passable bool
	// Listen is the address to listen on.
	Listen string
	// Listener, when set, is listened on instead. The server closes it.
	Listener net.Listener
	// Database is a database URL; empty means SQLite in DataDir.
	Database string
	// Now overrides the database's time, as store.Options.Now does.
	Now func() int64
	// Blob configures an S3 bucket; nil means a directory in DataDir.
	Blob *s3.Config
	// LeaseTTL is the lease's length; 0 means ci.DefaultLeaseTTL.
	LeaseTTL time.Duration
	// TLSCert and TLSKey are files; both or none.
	TLSCert, TLSKey string
	// InsecureHTTP allows plain HTTP off loopback.
	InsecureHTTP bool
	// URL is where people reach the server; empty means the listen address.
	URL string
	// LogLimit bounds the log of one attempt in bytes; 0 means the default.
	LogLimit int64
	// Alone says that no other node works on the database.
	Alone   bool
	Version string
	Log     *slog.Logger
}

// Server is a composed server.
type Server struct {
	cfg      Config
	listener net.Listener
	lock     *os.File // of the data directory, held while it is open
	loopback bool
	store    *store.Store
	blob     blob.Store
	engine   *engine.Engine
	logs     *logs.Service
	artifact *artifact.Service
	snapshot *snapshot.Service
	http     *http.Server
	draining atomic.Bool
	started  chan struct{}
}

// New opens what a server needs and binds its address; nothing is served before
// Run. What cannot be had is a typed error that says what to do.
func New(ctx context.Context, cfg Config) (*Server, error) {
	s := &Server{cfg: cfg, started: make(chan struct{})}
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Server) open(ctx context.Context) error {
	cfg := &s.cfg
	public := cfg.URL
	if err := makeData(cfg.DataDir, cfg.Passable); err != nil {
		return err
	}
	if err := s.takeData(); err != nil {
		return err
	}
	if err := s.listen(ctx); err != nil {
		return err
	}
	if cfg.Database == "" {
		cfg.Database = "sqlite:" + filepath.Join(cfg.DataDir, "forgeci.db")
	}
	var err error
	if s.store, err = store.Open(ctx, store.Options{URL: cfg.Database, Now: cfg.Now, Log: cfg.Log}); err != nil {
		return err
	}
	key, err := secretFile(filepath.Join(cfg.DataDir, "server.key"))
	if err != nil {
		return err
	}
	mount, err := s.openBlob(ctx, key)
	if err != nil {
		return err
	}
	s.engine, err = engine.New(ctx, engine.Config{
		Store: s.store, Log: cfg.Log, LeaseTTL: cfg.LeaseTTL, LogLimit: cfg.LogLimit,
		URL: cfg.URL, EvalIf: evalIf, Alone: cfg.Alone,
	})
	if err != nil {
		return err
	}
	org, err := s.engine.EnsureOrg(ctx, "default")
	if err != nil {
		return err
	}
	temp := filepath.Join(cfg.DataDir, "tmp")
	if err := freshDir(temp); err != nil {
		return err
	}
	people := auth.New(s.store, key, cfg.Log, time.Now)
	if err := s.bootstrap(ctx, org.ID, key); err != nil {
		return err
	}
	s.logs = logs.New(logs.Config{
		Store: s.store, Blob: s.blob, Log: cfg.Log, Incarnation: s.engine.Incarnation(),
		Limit: cfg.LogLimit, Window: s.logWindow(), Temp: temp,
	})
	s.artifact = artifact.New(artifact.Config{Store: s.store, Blob: s.blob, Log: cfg.Log, Incarnation: s.engine.Incarnation()})
	s.snapshot = snapshot.New(snapshot.Config{Store: s.store, Blob: s.blob, Log: cfg.Log, Incarnation: s.engine.Incarnation()})
	read := reader.New(s.store, s.engine, s.artifact)
	rest := api.New(api.Config{
		Engine: s.engine, Auth: people, Store: s.store, Blob: s.blob, Logs: s.logs, Artifacts: s.artifact, Snapshots: s.snapshot,
		Reader: read, Log: cfg.Log, TempDir: temp, Version: cfg.Version, Ready: s.ready,
	})
	site := web.New(web.Config{
		Reader: pages{read, s.logs, s.engine}, Actions: actions{s.engine}, Auth: signIn{people}, Log: cfg.Log,
		Version: cfg.Version, URL: public, Secure: cfg.TLSCert != "", Heartbeat: pageBeat,
	})
	s.http = &http.Server{
		Handler: s.handler(rest, site, mount), ReadHeaderTimeout: headerIn, IdleTimeout: idle,
		MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return nil
}

// evalIf evaluates a job's condition by the workflow's expression language.
func evalIf(expr string, c engine.Condition) (bool, error) {
	in := workflow.IfContext{Needs: map[string]workflow.Need{}, Inputs: c.Inputs, Matrix: c.Matrix}
	for key, r := range c.Needs {
		in.Needs[key] = workflow.Need{Conclusion: r.Conclusion, Outputs: r.Outputs, AllowFailure: r.Satisfied}
	}
	return workflow.EvalJobIf(expr, in)
}

// logWindow is how long log chunks are gathered before they are stored: not at
// all on a local disk, longer where each object is a request.
func (s *Server) logWindow() time.Duration {
	if s.cfg.Blob == nil {
		return 0
	}
	return 250 * time.Millisecond
}

func (s *Server) openBlob(ctx context.Context, key []byte) (mount http.Handler, err error) {
	if s.cfg.Blob != nil {
		s.blob, err = s3.Open(ctx, *s.cfg.Blob)
		return nil, err
	}
	local, err := fs.Open(filepath.Join(s.cfg.DataDir, "blobs"), fs.Options{SignKey: key})
	if err != nil {
		return nil, err
	}
	s.blob = local
	return local.Handler(func(w http.ResponseWriter, _ *http.Request, err error) { protocol.WriteProblem(w, err, "") }), nil
}

// handler joins API, pages and, for local blobs, their signed addresses.
func (s *Server) handler(rest *api.API, site *web.Site, blobs http.Handler) http.Handler {
	mux := http.NewServeMux()
	machine := rest.Handler()
	for _, p := range []string{"/v1", "/v1/", "/healthz", "/readyz", "/metrics", "/openapi.json"} {
		mux.Handle(p, machine)
	}
	if blobs != nil {
		mux.Handle("/v1/blobs", blobs)
	}
	for _, r := range site.Routes() {
		mux.Handle(r.Mux(), r.Handler)
	}
	return front(s.cfg.Log, mux)
}

// Addr is the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// URL is where people reach the server.
func (s *Server) URL() string { return s.cfg.URL }

// Started is closed when the server answers.
func (s *Server) Started() <-chan struct{} { return s.started }

// Tokens are the paths of the bootstrap tokens.
func (s *Server) Tokens() (admin, registration string) {
	return filepath.Join(s.cfg.DataDir, adminTokenFile), filepath.Join(s.cfg.DataDir, registrationTokenFile)
}

func (s *Server) ready(ctx context.Context) error {
	if s.draining.Load() {
		return ci.Errorf(ci.ErrUnavailable, "the server is stopping")
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return s.store.Ping(ctx)
}

// How long a stopping server lets calls finish.
const drainFor = 10 * time.Second

// Run serves until ctx ends: it then takes no new connections, answers open polls
// with nothing to do, lets calls finish, and stops its parts. A part that fails
// ends the server with its error.
func (s *Server) Run(ctx context.Context) error {
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	var wg sync.WaitGroup
	failed := make(chan error, 5)
	run := func(name string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(work); err != nil && work.Err() == nil {
				failed <- fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	run("engine", func(ctx context.Context) error { s.engine.Run(ctx); return nil })
	run("logs", s.logs.Run)
	run("artifacts", s.artifact.Run)
	run("snapshots", s.snapshot.Run)
	run("http", func(context.Context) error {
		close(s.started)
		err := s.http.Serve(s.listener)
		if errors.Is(err, http.ErrServerClosed) {
			return nil
		}
		return err
	})
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	s.draining.Store(true)
	s.engine.StopPolls()
	shut, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainFor)
	if e := s.http.Shutdown(shut); e != nil {
		s.cfg.Log.WarnContext(ctx, "calls that did not end in time are cut off", "after", drainFor)
		_ = s.http.Close()
	}
	cancel()
	stopWork()
	wg.Wait()
	return errors.Join(err, s.Close())
}

// Close releases what New opened; Run has done so when it returns.
func (s *Server) Close() error {
	var err error
	if s.listener != nil {
		_ = s.listener.Close()
	}
	if c, ok := s.blob.(interface{ Close() error }); ok {
		err = c.Close()
	}
	if s.store != nil {
		err = errors.Join(err, s.store.Close())
		s.store = nil
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

// listen binds the address: TLS when there is a certificate, plain HTTP only on
// loopback unless it is asked for.
func (s *Server) listen(ctx context.Context) error {
	cfg := &s.cfg
	if cfg.Listener != nil {
		cfg.Listen = cfg.Listener.Addr().String()
	}
	host, _, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return ci.Errorf(ci.ErrInvalid, "listen address %q: host:port is expected", cfg.Listen)
	}
	s.loopback = isLoopback(host)
	if !s.loopback && cfg.TLSCert == "" && !cfg.InsecureHTTP {
		return ci.Errorf(ci.ErrInvalid,
			"%s is not a loopback address: give --tls-cert and --tls-key, or --insecure-http if something in front encrypts", cfg.Listen)
	}
	if (cfg.TLSCert == "") != (cfg.TLSKey == "") {
		return ci.Errorf(ci.ErrInvalid, "--tls-cert and --tls-key belong together")
	}
	if s.listener = cfg.Listener; s.listener == nil {
		if s.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen); err != nil {
			return ci.Errorf(ci.ErrConflict, "cannot listen on %s: %v", cfg.Listen, err)
		}
	}
	s.listener = limited(s.listener)
	scheme := "http"
	if cfg.TLSCert != "" {
		pair, err := tls.LoadX509KeyPair(cfg.TLSCert, cfg.TLSKey)
		if err != nil {
			return ci.Errorf(ci.ErrInvalid, "--tls-cert, --tls-key: %v", err)
		}
		s.listener = tls.NewListener(s.listener, &tls.Config{
			Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12,
			NextProtos: []string{"h2", "http/1.1"},
		})
		scheme = "https"
	}
	if cfg.URL == "" {
		cfg.URL = scheme + "://" + s.listener.Addr().String()
	}
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	return nil
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
