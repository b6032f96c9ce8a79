package cli

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// defaultListen is where a server listens when it is told nothing else, and so
// where a client looks for one.
const defaultListen = "127.0.0.1:8300"

// Files of a server's data directory.
const (
	adminTokenName        = "admin.token"
	registrationTokenName = "registration.token"
)

// defaultData is a server's data directory when it is told nothing else.
const defaultData = "data"

// connection says which server a command speaks to and as whom.
type connection struct {
	server    string
	token     string
	tokenFile string
}

func (c *connection) bind(a *app, cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.server, "server", "http://"+defaultListen, "address of the server")
	a.env(f, "server", "FORGECI_SERVER")
	a.bindToken(cmd, &c.token, &c.tokenFile, "API token")
}

func (a *app) bindToken(cmd *cobra.Command, token, file *string, what string) {
	f := cmd.Flags()
	f.StringVar(token, "token", "", what+"; others on this machine can see a command line, a file is better")
	a.env(f, "token", "FORGECI_TOKEN")
	f.StringVar(file, "token-file", "", "file that holds the "+what)
	a.env(f, "token-file", "FORGECI_TOKEN_FILE")
}

// dial returns a client. It sends nothing yet.
func (a *app) dial(c *connection) (*protocol.Client, error) {
	token, err := a.readToken(c.token, c.tokenFile)
	if err != nil {
		return nil, err
	}
	if token == "" {
		if token, err = adminToken(c.server); err != nil {
			return nil, err
		}
	}
	return protocol.NewClient(protocol.ClientConfig{BaseURL: c.server, Token: token, Version: version()})
}

// readToken returns the token that flags and environment give: a flag before
// the environment, --token before --token-file.
func (a *app) readToken(token, file string) (string, error) {
	if token != "" && (file == "" || a.fromEnv["token-file"] || !a.fromEnv["token"]) {
		return strings.TrimSpace(token), nil
	}
	if file == "" {
		return "", nil
	}
	return readTokenFile(file)
}

const maxToken = 4096

func readTokenFile(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", ci.Errorf(ci.ErrNotFound, "token file: %s", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxToken+1))
	if err != nil {
		return "", ci.Errorf(ci.ErrNotFound, "token file: %s", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" || len(b) > maxToken || strings.ContainsAny(token, " \n\t\r") {
		return "", ci.Errorf(ci.ErrInvalid, "token file %s does not hold one token", name)
	}
	return token, nil
}

// adminToken finds the token that a server on this machine has put into the
// default data directory below the working directory. A server elsewhere never
// gets it.
func adminToken(server string) (string, error) {
	name, err := filepath.Abs(filepath.Join(defaultData, adminTokenName))
	if err != nil {
		name = filepath.Join(defaultData, adminTokenName)
	}
	if !loopback(server) {
		return "", ci.Errorf(ci.ErrUnauthorized, "no token for %s", server)
	}
	token, err := readTokenFile(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ci.ErrNotFound) {
		return "", ci.Errorf(ci.ErrUnauthorized, "no token for %s: there is none at %s either", server, name)
	}
	return token, err
}

// loopback reports whether an address is one of this machine only.
func loopback(server string) bool {
	u, err := url.Parse(server)
	if err != nil {
		return false
	}
	if u.Hostname() == "localhost" {
		return true
	}
	ip := net.ParseIP(u.Hostname())
	return ip != nil && ip.IsLoopback()
}
