package testkit_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

// echoServer answers every request with its path and body and counts them.
func echoServer(t *testing.T) (*testkit.Proxy, *http.Client, *atomic.Int32) {
	t.Helper()
	var served atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		served.Add(1)
		fmt.Fprintf(w, "%s %s", r.URL.Path, body)
	}))
	t.Cleanup(server.Close)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return testkit.NewProxy(t, server.Listener.Addr().String()), &http.Client{Transport: transport, Timeout: 10 * time.Second}, &served
}

func post(client *http.Client, url, body string) (string, error) {
	// A plain io.Reader has no length: the body goes in chunks. It cannot be
	// sent again either, so the client does not repeat the request by itself.
	resp, err := client.Post(url, "text/plain", io.MultiReader(strings.NewReader(body)))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func mustPost(t *testing.T, client *http.Client, url, body string) {
	t.Helper()
	want := url[strings.LastIndexByte(url, '/'):] + " " + body
	if got, err := post(client, url, body); err != nil || got != want {
		t.Fatalf("answer of %d bytes, %v; want %d bytes", len(got), err, len(want))
	}
}

func TestProxyCarriesBytesUnchanged(t *testing.T) {
	t.Parallel()
	p, client, _ := echoServer(t)
	mustPost(t, client, p.URL()+"/small", "x")
	mustPost(t, client, p.URL()+"/large", strings.Repeat("GET / HTTP/1.1\r\n\r\n", 200_000))
}

func TestProxyCutsTheReplyOfTheNthMatchingRequest(t *testing.T) {
	t.Parallel()
	p, client, served := echoServer(t)
	mustPost(t, client, p.URL()+"/complete", "warm up") // on the same connection
	cut := p.CutReply(2, func(r *http.Request) bool { return r.URL.Path == "/complete" })
	mustPost(t, client, p.URL()+"/complete", "1")
	mustPost(t, client, p.URL()+"/other", strings.Repeat("POST /complete HTTP/1.1\r\n\r\n", 100))
	select {
	case <-cut:
		t.Fatal("cut before its time")
	default:
	}
	if got, err := post(client, p.URL()+"/complete", "2"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("answer %q, %v; want a broken connection", got, err)
	}
	<-cut
	if served.Load() != 4 {
		t.Errorf("the server saw %d requests, want 4, the cut one included", served.Load())
	}
	mustPost(t, client, p.URL()+"/complete", "3")
}

func TestProxyStallHoldsBytesUntilItHeals(t *testing.T) {
	t.Parallel()
	p, client, served := echoServer(t)
	mustPost(t, client, p.URL()+"/before", "")
	p.Stall()
	done := make(chan error, 1)
	go func() {
		_, err := post(client, p.URL()+"/during", "")
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("an answer came through: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if served.Load() != 1 {
		t.Error("the request came through")
	}
	p.Heal()
	if err := <-done; err != nil {
		t.Errorf("after healing: %v", err)
	}
}

func TestProxyDelayHoldsBothDirections(t *testing.T) {
	t.Parallel()
	p, client, _ := echoServer(t)
	p.Delay(50 * time.Millisecond)
	start := time.Now()
	mustPost(t, client, p.URL()+"/x", "")
	if took := time.Since(start); took < 100*time.Millisecond {
		t.Errorf("a round trip took %v, want at least 100 ms", took)
	}
	p.Heal()
}

func TestProxyRefusesNewConnectionsOnly(t *testing.T) {
	t.Parallel()
	p, client, _ := echoServer(t)
	mustPost(t, client, p.URL()+"/open", "")
	p.Refuse()
	mustPost(t, client, p.URL()+"/open", "")
	client.CloseIdleConnections()
	if _, err := post(client, p.URL()+"/new", ""); err == nil {
		t.Error("a new connection was let in")
	}
	p.Heal()
	mustPost(t, client, p.URL()+"/again", "")
}

// dialEcho opens a raw connection to a server that sends back each line.
func dialEcho(t *testing.T) (p *testkit.Proxy, client net.Conn, server <-chan net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	conns := make(chan net.Conn, 1)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns <- conn
		}
	}()
	p = testkit.NewProxy(t, l.Addr().String())
	client, err = net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return p, client, conns
}

func TestProxyResetBreaksBothSides(t *testing.T) {
	t.Parallel()
	p, client, conns := dialEcho(t)
	fmt.Fprintln(client, "hello")
	server := <-conns
	defer server.Close()
	if line, err := bufio.NewReader(server).ReadString('\n'); err != nil || line != "hello\n" {
		t.Fatalf("server read %q, %v", line, err)
	}
	p.Reset()
	for side, conn := range map[string]net.Conn{"client": client, "server": server} {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v, want a reset", side, err)
		}
	}
}

func TestProxyHalfOpenLosesEverythingAndTellsNobody(t *testing.T) {
	t.Parallel()
	p, client, conns := dialEcho(t)
	fmt.Fprintln(client, "hello")
	server := <-conns
	defer server.Close()
	if _, err := bufio.NewReader(server).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	p.HalfOpen()
	fmt.Fprintln(client, "lost")
	client.Close()
	if err := server.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var timeout net.Error
	if n, err := server.Read(make([]byte, 10)); n > 0 || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("server read %d bytes, %v; want silence", n, err)
	}
	if _, err := net.Dial("tcp", p.Addr()); err != nil {
		t.Errorf("a new connection: %v", err)
	}
	if fresh := <-conns; fresh.Close() != nil {
		t.Error("the new connection is broken")
	}
}

func TestProxyPassesAHalfClose(t *testing.T) {
	t.Parallel()
	_, client, conns := dialEcho(t)
	fmt.Fprint(client, "question")
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	server := <-conns
	if b, err := io.ReadAll(server); err != nil || string(b) != "question" {
		t.Fatalf("server read %q, %v", b, err)
	}
	fmt.Fprint(server, "answer")
	server.Close()
	if b, err := io.ReadAll(client); err != nil || string(b) != "answer" {
		t.Errorf("client read %q, %v", b, err)
	}
}

// A commit can be kept from the database, and the database's answer from the
// client: each is a moment of its own, and what the database holds then tells
// them apart.
func TestProxyBreaksAtACommit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		at   testkit.Moment
		want int
	}{"before": {testkit.Before, 1}, "after": {testkit.After, 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := testkit.Postgres(t)
			u, err := url.Parse(direct)
			if err != nil {
				t.Fatal(err)
			}
			p := testkit.NewPostgresProxy(t, u.Host)
			u.Host = p.Addr()
			through, other := connect(t, u.String()), connect(t, direct)
			insert := func(n int) error {
				tx, err := through.Begin(t.Context())
				if err != nil {
					return err
				}
				if _, err := tx.Exec(t.Context(), "INSERT INTO thing VALUES ($1, $2)", n, strings.Repeat("commit\x01", 20000)); err != nil {
					return err
				}
				return tx.Commit(t.Context())
			}
			if _, err := through.Exec(t.Context(), "CREATE TABLE thing (n INT, s TEXT)"); err != nil {
				t.Fatal(err)
			}
			called := false
			done := p.Break(2, c.at, nil, func() { called = true })
			if err := insert(1); err != nil {
				t.Fatal(err)
			}
			if err := insert(2); err == nil {
				t.Fatal("the second commit was answered")
			}
			<-done
			var n int
			if err := other.QueryRow(t.Context(), "SELECT count(*) FROM thing").Scan(&n); err != nil || n != c.want || !called || p.Passed() != 2 {
				t.Errorf("%d rows, want %d (%v); called: %v, %d commits passed", n, c.want, err, called, p.Passed())
			}
		})
	}
}

// A partition of one direction lets the other's bytes through.
func TestProxyStallsOneWay(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stall  func(*testkit.Proxy)
		served int32
	}{"to the server": {(*testkit.Proxy).StallToServer, 0}, "to the client": {(*testkit.Proxy).StallToClient, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, client, served := echoServer(t)
			c.stall(p)
			answered := make(chan error, 1)
			go func() {
				_, err := post(client, p.URL()+"/a", "x")
				answered <- err
			}()
			select {
			case err := <-answered:
				t.Fatalf("answered: %v", err)
			case <-time.After(200 * time.Millisecond):
			}
			if n := served.Load(); n != c.served {
				t.Errorf("the server was asked %d times, want %d", n, c.served)
			}
			p.Heal()
			if err := <-answered; err != nil {
				t.Error(err)
			}
		})
	}
}
