package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forgeci/internal/blob/s3"
	"forgeci/internal/ci"
	"forgeci/internal/server"
)

// serverConfig are the settings of forgeci server.
type serverConfig struct {
	daemon
	data, listen, url         string
	database, databaseFile    string
	blob, blobCredentials     string
	leaseTTL                  time.Duration
	logLimit                  int64
	tlsCert, tlsKey           string
	insecure                  bool
	addressFile               string
	check                     bool
	runner                    bool
	runnerSlots               int
	runnerLabels              []string
	runnerPath, runnerJobUser string
	drain                     time.Duration
}

func (a *app) serverCommand() *cobra.Command {
	var cfg serverConfig
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run the server",
		Long: `Run the server: API, pages, queue, logs, artifacts.

Without any setting it keeps everything in ./data (an embedded database, files)
and listens on ` + defaultListen + `. Production has PostgreSQL (--database) and an
S3 bucket (--blob).

Its first tokens are files of the data directory: admin.token for people and
registration.token for runners. They work while the server listens on the
loopback interface only.

--runner starts a runner beside it as a process of its own, for trusted code.

SIGTERM or Ctrl-C drains: the runner beside it ends its jobs for --drain-timeout,
calls that have begun are answered. A second signal does not wait for jobs.`,
		Example: `  forgeci server --runner
  forgeci server --data /var/lib/forgeci --database postgres://forgeci@db/forgeci \
      --blob 's3://s3.example.com/forgeci?region=eu-1' --blob-credentials-file /run/secrets/s3`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.server(cmd.Context(), &cfg) },
	}
	f := cmd.Flags()
	f.StringVar(&cfg.data, "data", defaultData, "data directory; made if it is missing")
	a.env(f, "data", "FORGECI_DATA")
	f.StringVar(&cfg.listen, "listen", defaultListen, "address to listen on, host:port")
	a.env(f, "listen", "FORGECI_LISTEN")
	f.StringVar(&cfg.url, "url", "", "address under which people reach the server; the default is the listen address")
	a.env(f, "url", "FORGECI_URL")
	f.StringVar(&cfg.database, "database", "", "postgres://… or sqlite:PATH; the default is SQLite in the data directory")
	a.env(f, "database", "FORGECI_DATABASE")
	f.StringVar(&cfg.databaseFile, "database-file", "", "file that holds the database URL")
	a.env(f, "database-file", "FORGECI_DATABASE_FILE")
	f.StringVar(&cfg.blob, "blob", "", "s3://[KEY:SECRET@]HOST/BUCKET[/PREFIX][?region=R&insecure=true&style=host]; the default is the data directory")
	a.env(f, "blob", "FORGECI_BLOB")
	f.StringVar(&cfg.blobCredentials, "blob-credentials-file", "", "file that holds KEY:SECRET of the bucket")
	a.env(f, "blob-credentials-file", "FORGECI_BLOB_CREDENTIALS_FILE")
	f.DurationVar(&cfg.leaseTTL, "lease-ttl", ci.DefaultLeaseTTL, "how long a runner may be silent before its jobs are taken for lost")
	a.env(f, "lease-ttl", "FORGECI_LEASE_TTL")
	f.Int64Var(&cfg.logLimit, "log-limit", 0, "most bytes of one attempt's log; 0 is the default of the server")
	a.env(f, "log-limit", "FORGECI_LOG_LIMIT")
	f.StringVar(&cfg.tlsCert, "tls-cert", "", "certificate file, PEM")
	a.env(f, "tls-cert", "FORGECI_TLS_CERT")
	f.StringVar(&cfg.tlsKey, "tls-key", "", "key file of the certificate, PEM")
	a.env(f, "tls-key", "FORGECI_TLS_KEY")
	f.BoolVar(&cfg.insecure, "insecure-http", false, "allow plain HTTP off the loopback interface, when something in front encrypts")
	a.env(f, "insecure-http", "FORGECI_INSECURE_HTTP")
	f.StringVar(&cfg.addressFile, "address-file", "", "write the server's address into this file once it answers, for --listen with port 0")
	f.BoolVar(&cfg.check, "check", false, "print the effective settings, secrets masked, and exit")
	f.BoolVar(&cfg.runner, "runner", false, "start a runner beside the server")
	f.IntVar(&cfg.runnerSlots, "runner-slots", 0, "with --runner: how many jobs run at once; 0 is one for each processor")
	f.StringArrayVar(&cfg.runnerLabels, "runner-label", nil, "with --runner: a label on offer; may be repeated")
	f.StringVar(&cfg.runnerPath, "runner-path", "", "with --runner: PATH of the jobs")
	f.StringVar(&cfg.runnerJobUser, "runner-job-user", "", "with --runner: user that jobs run as; needs root")
	f.DurationVar(&cfg.drain, "drain-timeout", 30*time.Second, "with --runner: how long jobs may go on after SIGTERM")
	cfg.daemon.bind(a, cmd)
	return cmd
}

func (a *app) server(ctx context.Context, cfg *serverConfig) error {
	sc, err := cfg.config(a)
	if err != nil {
		return err
	}
	if cfg.check {
		cfg.print(a, sc)
		return nil
	}
	log := cfg.logger(a.err)
	sc.Log = log
	stopAdmin, err := cfg.admin(ctx, log)
	if err != nil {
		return err
	}
	defer stopAdmin()
	s, err := server.New(ctx, sc)
	if err != nil {
		return daemonError(err)
	}
	serving, stopServing := context.WithCancel(ctx)
	defer stopServing()
	beside, endRunner := context.WithCancel(ctx)
	defer endRunner()
	hurry, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{}) // the runner beside the server has ended, or there is none
	defer cfg.watch(ctx, a.Stdin, log, endRunner, func() { stop(); endRunner() })()
	go func() {
		defer close(ended)
		select {
		case <-s.Started():
			cfg.started(ctx, s, log)
		case <-beside.Done():
			return
		}
		if cfg.runner {
			supervise(beside, hurry.Done(), log, func() (*child, error) { return a.startRunner(s, cfg) }, cfg.drain)
			return
		}
		<-beside.Done()
	}()
	go func() {
		<-ended
		stopServing()
	}()
	err = s.Run(serving)
	stop()
	endRunner()
	<-ended
	return err
}

// started tells where the server is and where its first tokens are.
func (c *serverConfig) started(ctx context.Context, s *server.Server, log *slog.Logger) {
	admin, registration := s.Tokens()
	log.InfoContext(ctx, "listening", "address", s.Addr().String(), "url", s.URL(), "admin_token", admin, "registration_token", registration)
	if c.addressFile == "" {
		return
	}
	tmp := c.addressFile + ".new"
	err := os.WriteFile(tmp, []byte(c.local(s)+"\n"), 0o600)
	if err == nil {
		err = os.Rename(tmp, c.addressFile)
	}
	if err != nil {
		log.ErrorContext(ctx, "the address cannot be written", "file", c.addressFile, "error", err)
	}
}

// local is the address of the server for a process on this machine.
func (c *serverConfig) local(s *server.Server) string {
	if c.tlsCert != "" {
		return s.URL() // the certificate has its name, not the interface's
	}
	host, port, err := net.SplitHostPort(s.Addr().String())
	if err != nil {
		return s.URL()
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port)
}

// startRunner starts the runner beside the server (SPEC decision 10).
func (a *app) startRunner(s *server.Server, cfg *serverConfig) (*child, error) {
	_, registration := s.Tokens()
	args := []string{
		"runner", "--server", cfg.local(s), "--token-file", registration, "--data", filepath.Join(cfg.data, "runner"),
		"--slots", strconv.Itoa(cfg.runnerSlots), "--path", cfg.runnerPath, "--job-user", cfg.runnerJobUser,
		"--log-level", cfg.level, "--log-format", cfg.format,
	}
	for _, l := range cfg.runnerLabels {
		args = append(args, "--label", l)
	}
	return startChild(args, a.childEnvironment(), a.Stderr)
}

// config makes the server's own settings from flags and files.
func (c *serverConfig) config(a *app) (server.Config, error) {
	data, err := filepath.Abs(c.data)
	if err != nil {
		return server.Config{}, usage("--data %q: %s", c.data, err)
	}
	c.data = data
	if c.runnerSlots < 0 || c.drain < 0 || c.logLimit < 0 {
		return server.Config{}, usage("--runner-slots, --drain-timeout and --log-limit are not negative")
	}
	if c.leaseTTL < ci.MinLeaseTTL {
		return server.Config{}, usage("--lease-ttl %s: it is at least %s", c.leaseTTL, ci.MinLeaseTTL)
	}
	sc := server.Config{
		DataDir: data, Listen: c.listen, LeaseTTL: c.leaseTTL, TLSCert: c.tlsCert, TLSKey: c.tlsKey, InsecureHTTP: c.insecure,
		Passable: c.runner && c.runnerJobUser != "", URL: c.url, LogLimit: c.logLimit, Version: version(),
	}
	if sc.Database, err = secret(c.database, c.databaseFile, "database"); err != nil {
		return sc, err
	}
	if c.blob == "" {
		return sc, nil
	}
	credentials, err := secret("", c.blobCredentials, "blob-credentials")
	if err != nil {
		return sc, err
	}
	if credentials == "" && a.getenv("AWS_ACCESS_KEY_ID") != "" {
		credentials = a.getenv("AWS_ACCESS_KEY_ID") + ":" + a.getenv("AWS_SECRET_ACCESS_KEY")
	}
	sc.Blob, err = bucket(c.blob, credentials)
	return sc, err
}

// maxSecret bounds a file that holds a URL or a credential.
const maxSecret = 16 << 10

// secret takes a setting from its flag or from the file of its -file flag.
func secret(value, file, name string) (string, error) {
	if file == "" {
		return value, nil
	}
	if value != "" {
		return "", usage("--%s and --%s-file exclude each other", name, name)
	}
	f, err := os.Open(file)
	if err != nil {
		return "", usage("--%s-file: %s", name, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecret))
	if err != nil {
		return "", usage("--%s-file: %s", name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// bucket reads the URL of --blob. Credentials in a file or the environment stand
// in for those in the URL.
func bucket(text, credentials string) (*s3.Config, error) {
	bad := func(why string) (*s3.Config, error) {
		return nil, usage("--blob: %s; write it as s3://[KEY:SECRET@]HOST/BUCKET[/PREFIX][?region=R&insecure=true&style=host]", why)
	}
	u, err := url.Parse(text)
	if err != nil {
		return bad("not a URL") // the error would show the secret
	}
	name, prefix, _ := strings.Cut(strings.Trim(u.Path, "/"), "/")
	switch {
	case u.Scheme != "s3":
		return bad("the scheme is not s3")
	case u.Host == "" || name == "":
		return bad("host or bucket is missing")
	}
	c := &s3.Config{Endpoint: u.Host, Bucket: name, Prefix: prefix, Secure: true, PathStyle: true, Region: "us-east-1"}
	for key, values := range u.Query() {
		switch value := values[0]; {
		case key == "region":
			c.Region = value
		case key == "insecure" && (value == "true" || value == "false"):
			c.Secure = value == "false"
		case key == "style" && (value == "host" || value == "path"):
			c.PathStyle = value == "path"
		default:
			return bad(fmt.Sprintf("%s=%s is not known", key, value))
		}
	}
	if u.User != nil {
		password, _ := u.User.Password()
		c.AccessKey, c.SecretKey = u.User.Username(), password
	} else {
		c.AccessKey, c.SecretKey, _ = strings.Cut(credentials, ":")
	}
	if c.AccessKey == "" || c.SecretKey == "" {
		return bad("there are no credentials (--blob-credentials-file)")
	}
	return c, nil
}

// print shows the effective settings without secrets.
func (c *serverConfig) print(a *app, sc server.Config) {
	t := table{}
	row := func(name, value string) { t.add(text(name), text(value)) }
	row("data", sc.DataDir)
	row("listen", sc.Listen)
	row("url", sc.URL)
	row("database", masked(sc.Database))
	if sc.Blob == nil {
		row("blob", filepath.Join(sc.DataDir, "blobs"))
	} else {
		row("blob", fmt.Sprintf("s3://%s/%s", sc.Blob.Endpoint, strings.TrimSuffix(sc.Blob.Bucket+"/"+sc.Blob.Prefix, "/")))
	}
	row("lease-ttl", sc.LeaseTTL.String())
	row("log-limit", strconv.FormatInt(sc.LogLimit, 10))
	row("tls-cert", sc.TLSCert)
	row("tls-key", sc.TLSKey)
	row("insecure-http", strconv.FormatBool(sc.InsecureHTTP))
	row("runner", strconv.FormatBool(c.runner))
	row("admin-listen", c.adminListen)
	row("log-level", c.level)
	row("log-format", c.format)
	t.write(a.out)
}

// masked hides the password of a URL.
func masked(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return "[sealed]"
	}
	if u.Query().Has("password") {
		q := u.Query()
		q.Set("password", "[sealed]")
		u.RawQuery = q.Encode()
	}
	return u.Redacted()
}
