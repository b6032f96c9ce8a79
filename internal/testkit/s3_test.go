package testkit_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forgeci/internal/blob/s3"
	"forgeci/internal/ci"
	"forgeci/internal/testkit"
)

// Each call gives an empty bucket of its own on one server.
func TestS3GivesEachTestABucket(t *testing.T) {
	t.Parallel()
	one, two := testkit.S3(t), testkit.S3(t)
	if one.Endpoint != two.Endpoint || one.Bucket == two.Bucket {
		t.Errorf("%+v and %+v: want one server and two buckets", one, two)
	}
	for _, cfg := range []s3.Config{one, two} {
		store, err := s3.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if infos, err := store.List(t.Context(), "", "", 10); err != nil || len(infos) != 0 {
			t.Errorf("a new bucket holds %v, %v", infos, err)
		}
	}
}

// s3Child names the file into which the child of TestS3EndsWithTheProcess
// writes the address of its server.
const s3Child = "FORGECI_TESTKIT_S3_CHILD"

// The server ends with the test process, also when that is killed.
func TestS3EndsWithTheProcess(t *testing.T) {
	t.Parallel()
	if path := os.Getenv(s3Child); path != "" {
		cfg := testkit.S3(t)
		if err := os.WriteFile(path+".new", []byte(cfg.Endpoint+" "+cfg.Bucket+" "+cfg.AccessKey+" "+cfg.SecretKey), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		// It is killed before. Not <-t.Context().Done(): Go ends a process in which
		// nothing can happen any more.
		time.Sleep(time.Hour)
		return
	}
	deadline := time.Now().Add(5 * time.Minute)
	wait := func(what string, done func() bool) {
		t.Helper()
		for !done() {
			if time.Now().After(deadline) {
				t.Fatalf("not within 5 minutes: %s", what)
			}
			time.Sleep(20 * time.Millisecond) // another process's progress has no channel
		}
	}
	path := filepath.Join(t.TempDir(), "address")
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestS3EndsWithTheProcess$")
	cmd.Env = append(os.Environ(), s3Child+"="+path, "TMPDIR="+tmp)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // it was killed, or says why it ended
		close(ended)
	}()
	var said []byte
	wait("the child's server starts", func() bool {
		select {
		case <-ended:
			t.Fatalf("the child ended:\n%s", output.String())
		default:
		}
		var err error
		said, err = os.ReadFile(path)
		return err == nil
	})
	words := strings.Fields(string(said))
	cfg := s3.Config{Endpoint: words[0], Region: "us-east-1", Bucket: words[1], AccessKey: words[2], SecretKey: words[3], PathStyle: true}
	if _, err := s3.Open(t.Context(), cfg); err != nil {
		t.Fatalf("the child's server: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
	wait("the server is gone", func() bool {
		_, err := s3.Open(t.Context(), cfg)
		return errors.Is(err, ci.ErrUnavailable)
	})
	wait("its files are gone", func() bool {
		left, err := filepath.Glob(filepath.Join(tmp, "forgeci-s3-*"))
		return err == nil && len(left) == 0
	})
}
