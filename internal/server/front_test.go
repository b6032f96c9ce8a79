package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/protocol"
)

// pipes is a listener of connections inside a bubble, so that minutes of
// slowness cost nothing.
type pipes struct {
	in   chan net.Conn
	done chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.in:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	select {
	case <-p.done:
	default:
		close(p.done)
	}
	return nil
}
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// behindFront serves a handler behind the door in a bubble and gives connections to it.
func behindFront(t *testing.T, h http.HandlerFunc, f func(dial func() net.Conn)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &pipes{in: make(chan net.Conn), done: make(chan struct{})}
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		s := &http.Server{Handler: front(log, h), ReadHeaderTimeout: headerIn, IdleTimeout: idle}
		served := make(chan struct{})
		go func() { defer close(served); _ = s.Serve(l) }()
		f(func() net.Conn {
			client, server := net.Pipe()
			l.in <- server
			t.Cleanup(func() { _ = client.Close() })
			return client
		})
		_ = s.Close()
		<-served
	})
}

func readAll(w http.ResponseWriter, r *http.Request) {
	_, err := io.ReadAll(r.Body)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		http.Error(w, "late", http.StatusServiceUnavailable)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	}
}

// S17: a body or a header of one byte a second is given up after a bound, though
// each byte comes in time; one that keeps the pace is taken, however long it is.
func TestCase_S17_SlowRequestsDoNotHoldAConnection(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		head   string
		block  int
		every  time.Duration
		within time.Duration
		status int // 0: closed without an answer
	}{
		"header":       {"POST / HTTP/1.1\r\nX: ", 1, time.Second, headerIn, 0},
		"body":         {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", 1, time.Second, firstIn, 503},
		"chunked body": {"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n", 1, time.Second, firstIn, 503},
		"no body":      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n", 0, time.Second, firstIn, 503},
		"steady body":  {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n", 10_000, time.Second, time.Hour, 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			behindFront(t, readAll, func(dial func() net.Conn) {
				conn, began := dial(), time.Now()
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					_, _ = io.WriteString(conn, c.head)
					for {
						if _, err := conn.Write(bytes.Repeat([]byte("a"), c.block)); err != nil {
							return
						}
						time.Sleep(c.every)
					}
				}()
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				took := time.Since(began)
				switch {
				case c.status == 0 && err == nil:
					t.Errorf("answered %s", resp.Status)
				case c.status != 0 && (err != nil || resp.StatusCode != c.status):
					t.Errorf("%v %v, want %d", resp, err, c.status)
				}
				if took > c.within+2*time.Second {
					t.Errorf("held for %s, want at most %s", took, c.within)
				}
				_ = conn.Close()
				<-sent
			})
		})
	}
}

// Who has sent its body may wait for an answer for as long as that takes: a long
// poll is not cut, and its caller's going is noticed.
func TestALongPollIsNotCut(t *testing.T) {
	t.Parallel()
	var left chan error // of the bubble
	wait := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		select {
		case <-time.After(10 * time.Minute):
			_, _ = io.WriteString(w, "job")
		case <-r.Context().Done():
			left <- context.Cause(r.Context())
		}
	}
	behindFront(t, wait, func(dial func() net.Conn) {
		left = make(chan error, 1)
		conn := dial()
		go func() { _, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}") }()
		b := bufio.NewReader(conn)
		for range 2 { // a second request on the same connection has no deadline of the first
			resp, err := http.ReadResponse(b, nil)
			if err != nil {
				t.Fatal(err)
			}
			if body, _ := io.ReadAll(resp.Body); string(body) != "job" {
				t.Errorf("%q", body)
			}
			time.Sleep(time.Minute)
			go func() { _, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n") }()
		}
		synctest.Wait()
		_ = conn.Close()
		if err := <-left; err == nil {
			t.Error("the caller's going was not noticed")
		}
	})
}

// A reader that does not take its answer is given up; one that takes it slowly
// but steadily gets all of it.
func TestAStuckReaderIsGivenUp(t *testing.T) { //nolint:tparallel // its parts share a channel
	t.Parallel()
	const size = 8 << 20
	var ended chan time.Duration // of the bubble
	big := func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		_, _ = w.Write(make([]byte, size))
		ended <- time.Since(began)
	}
	for name, stuck := range map[string]bool{"stuck": true, "slow": false} {
		t.Run(name, func(t *testing.T) {
			behindFront(t, big, func(dial func() net.Conn) {
				ended = make(chan time.Duration, 1)
				conn := dial()
				_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				if stuck {
					if took := <-ended; took > blockOut+time.Second {
						t.Errorf("held for %s", took)
					}
					return
				}
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				n, buf := 0, make([]byte, 16<<10)
				for {
					k, err := resp.Body.Read(buf)
					if n += k; err != nil {
						break
					}
					time.Sleep(time.Second)
				}
				if n != size || <-ended < 5*time.Minute {
					t.Errorf("%d of %d bytes arrived", n, size)
				}
			})
		})
	}
}

// A panic of any handler is an answer, not a broken connection, and shows
// nothing; behind a begun answer the connection breaks.
func TestAPanicIsAProblem(t *testing.T) {
	t.Parallel()
	behindFront(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/begun" {
			_, _ = io.WriteString(w, "half")
		}
		panic("secret")
	}, func(dial func() net.Conn) {
		for _, path := range []string{"/", "/begun"} {
			conn := dial()
			_, _ = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if path == "/begun" {
				if err == nil {
					if _, err = io.ReadAll(resp.Body); err == nil {
						t.Error("a broken answer looks whole")
					}
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			var p protocol.Problem
			if json.Unmarshal(b, &p) != nil || p.Status != 500 || strings.Contains(string(b), "secret") {
				t.Errorf("%s", b)
			}
		}
	})
}

// S61: what a page of another site makes a browser send is refused with a
// problem document.
func TestCase_S61_RequestsOfOtherSitesChangeNothing(t *testing.T) {
	t.Parallel()
	behindFront(t, func(http.ResponseWriter, *http.Request) { t.Error("it got through") }, func(dial func() net.Conn) {
		for _, head := range []string{"Origin: http://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"} {
			for _, media := range []string{"application/x-www-form-urlencoded", "text/plain", "application/json", "multipart/form-data"} {
				conn := dial()
				go func() {
					_, _ = fmt.Fprintf(conn, "POST /v1/x HTTP/1.1\r\nHost: ci.example\r\n%s\r\nContent-Type: %s\r\nContent-Length: 2\r\n\r\n{}", head, media)
				}()
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				if resp.StatusCode != http.StatusForbidden || resp.Header.Get("Content-Type") != protocol.MediaProblem {
					t.Errorf("%s, %s: %s %s", head, media, resp.Status, resp.Header.Get("Content-Type"))
				}
			}
		}
	})
}
