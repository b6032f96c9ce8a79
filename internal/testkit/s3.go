package testkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/blob/s3"
)

// The S3 server of the tests: Apache-2.0, with real signatures, checksums,
// multipart uploads and conditional writes.
const (
	s3Module  = "github.com/versity/versitygw/cmd/versitygw"
	s3Version = "v1.8.0"
)

// S3 returns the configuration of an empty bucket of its own for the test, on
// the one S3 server of this test process. The server is started on first use
// (about 0.1 s) and ends with the process; the bucket is removed with the test.
// On a machine that has never run it, the server is built first, from the Go
// module proxy, which takes some minutes. Tests may run in parallel.
//
// Call it outside a synctest bubble: it waits for real processes.
func S3(t testing.TB) s3.Config {
	t.Helper()
	server, err := sharedS3()
	if err != nil {
		t.Fatalf("start S3 server: %v", err)
	}
	RecordVersion(t, "versitygw (S3)", s3Version)
	bucket := "test-" + randomText(20)
	// Each directory of the server's data is a bucket.
	path := filepath.Join(server.root, "data", bucket)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatalf("make bucket: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(path); err != nil {
			t.Errorf("remove bucket: %v", err)
		}
	})
	return s3.Config{
		Endpoint:  server.addr,
		Region:    "us-east-1",
		Bucket:    bucket,
		AccessKey: s3AccessKey,
		SecretKey: server.secret,
		PathStyle: true,
	}
}

const s3AccessKey = "forgeci-test"

// sharedS3 starts the S3 server of this process once.
//
//nolint:gochecknoglobals // one server a process is the point; it is a function
var sharedS3 = sync.OnceValues(startS3)

// s3Server is a running S3 server.
type s3Server struct {
	addr   string
	secret string
	root   string // holds data/ and the log
	// alive is held open for as long as this process lives.
	alive io.WriteCloser
}

// s3Supervisor owns the server: when its input closes, which happens however
// the test process ends, it kills the server and removes its files.
const s3Supervisor = `
root=$1; shift
trap '' INT HUP TERM
"$@" >>"$root/log" 2>&1 </dev/null & pid=$!
while read -r word; do :; done
kill -KILL "$pid" 2>/dev/null; wait "$pid" 2>/dev/null
rm -rf "$root"
`

func startS3() (*s3Server, error) {
	program, err := builtS3()
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	root, err := os.MkdirTemp("", "forgeci-s3-")
	if err != nil {
		return nil, err
	}
	s := &s3Server{addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), secret: randomText(24), root: root}
	if err := s.launch(program); err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	return s, nil
}

// launch starts the server and waits until it answers.
func (s *s3Server) launch(program string) error {
	data := filepath.Join(s.root, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	cmd := exec.Command("/bin/sh", "-c", s3Supervisor, "s3-supervisor", s.root,
		program, "--port", s.addr, "--region", "us-east-1", "--quiet", "posix", data)
	cmd.Dir = s.root
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C", "ROOT_ACCESS_KEY=" + s3AccessKey, "ROOT_SECRET_KEY=" + s.secret}
	// A session of its own: what is sent to the test's process group must not
	// reach the supervisor.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	alive, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	s.alive = alive
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		err := s.answers(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			log, _ := os.ReadFile(filepath.Join(s.root, "log"))
			return errors.Join(fmt.Errorf("no answer within 30 s: %w\n%s", err, log), alive.Close(), cmd.Wait())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// answers makes one request without a signature; any answer will do.
func (s *s3Server) answers(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr+"/", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// builtS3 returns the path of the server's program, which it builds if this
// machine does not have it yet. Test processes that start at the same time wait
// for one of them to build it.
func builtS3() (string, error) {
	dir := filepath.Join(cacheDir(), "tools")
	path := filepath.Join(dir, "versitygw-"+s3Version)
	if isExecutable(path) {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	if isExecutable(path) {
		return path, nil
	}
	bin, err := os.MkdirTemp(dir, "building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(bin)
	cmd := exec.Command("go", "install", "-trimpath", s3Module+"@"+s3Version)
	cmd.Dir = bin // outside of this module
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); name != "GOBIN" && name != "GOFLAGS" && name != "CGO_ENABLED" {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, "GOBIN="+bin, "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go install %s@%s: %w\n%s", s3Module, s3Version, err, out)
	}
	return path, os.Rename(filepath.Join(bin, "versitygw"), path)
}
