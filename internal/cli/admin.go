package cli

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"
)

// admin serves the process's profiles under /debug/pprof/ on --admin-listen, an
// address of the loopback interface, until the function that it returns is
// called. Without the flag nothing listens.
func (d *daemon) admin(ctx context.Context, log *slog.Logger) (stop func(), err error) {
	if d.adminListen == "" {
		return func() {}, nil
	}
	host, _, err := net.SplitHostPort(d.adminListen)
	if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
		return nil, usage("--admin-listen %q: it is HOST:PORT of the loopback interface, such as 127.0.0.1:6060; it asks nobody who they are", d.adminListen)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", d.adminListen)
	if err != nil {
		return nil, usage("--admin-listen: %s", err)
	}
	mux := http.NewServeMux()
	// Not the command line, which may hold secrets.
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/cmdline", http.NotFound)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := s.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.ErrorContext(ctx, "the admin listener has ended", "error", err)
		}
	}()
	log.InfoContext(ctx, "profiles", "url", "http://"+listener.Addr().String()+"/debug/pprof/")
	return func() {
		_ = s.Close() // a profile that is being taken is of no use without the process
		<-ended
	}, nil
}
