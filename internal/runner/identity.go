package runner

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Files of the identity in the data directory, both of mode 0600.
const (
	keyFile        = "runner.key"
	credentialFile = "credential.json"
)

// identity is who the runner is: an Ed25519 key that names it across restarts,
// and the credential that the server gave it. It is safe for concurrent use.
type identity struct {
	dir    string
	token  string // registration token, may be empty
	name   string
	labels []string
	server *link
	public ed25519.PublicKey

	mu sync.Mutex
	// have is the credential in use; guarded by mu.
	have credential
	// next is the credential that is being registered: a call without an answer is
	// repeated with the same one; guarded by mu.
	next string
}

// credential is what credential.json holds. Server keeps it from being shown
// to another server.
type credential struct {
	Server     string      `json:"server"`
	Runner     ci.RunnerID `json:"runner"`
	Credential string      `json:"credential"`
}

// openIdentity reads the key, or makes it, and reads the credential if there is
// one for this server.
func openIdentity(dir, token, name string, labels []string, server *link) (*identity, error) {
	id := &identity{dir: dir, token: token, name: name, labels: labels, server: server}
	path := filepath.Join(dir, keyFile)
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			return nil, fmt.Errorf("make the runner's key: %w", err)
		}
		id.public = public
		seed := base64.StdEncoding.EncodeToString(private.Seed()) + "\n"
		if err := writePrivate(path, []byte(seed)); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, ci.Errorf(ci.ErrUnavailable, "the runner's key %s cannot be read", path).WithCause(err)
	default:
		seed, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
		if err != nil || len(seed) != ed25519.SeedSize {
			return nil, ci.Errorf(ci.ErrInvalid,
				"%s is not a runner's key: remove it to register as a new runner", path)
		}
		private := ed25519.NewKeyFromSeed(seed)
		id.public = append(id.public, private[ed25519.SeedSize:]...)
	}
	var have credential
	path = filepath.Join(dir, credentialFile)
	text, err = os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, ci.Errorf(ci.ErrUnavailable, "the runner's credential %s cannot be read", path).WithCause(err)
	case json.Unmarshal(text, &have) != nil || have.Credential == "":
		return nil, ci.Errorf(ci.ErrInvalid, "%s is damaged: remove it to register again", path)
	case have.Server == server.base.BaseURL():
		id.have = have
		server.use(have.Credential)
	}
	return id, nil
}

// current returns the credential in use.
func (id *identity) current() credential {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.have
}

// renew replaces a credential that was refused (or is empty, when there is none
// yet) by registering again, once for all that ask. Without a registration
// token it is ErrUnauthorized.
func (id *identity) renew(ctx context.Context, refused string) error {
	id.mu.Lock()
	defer id.mu.Unlock()
	if id.have.Credential != refused {
		return nil
	}
	if id.token == "" {
		return ci.Errorf(ci.ErrUnauthorized, "the runner is not registered with %s: start it once with a registration token",
			id.server.base.BaseURL())
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if id.next == "" {
		id.next = protocol.NewToken(protocol.TokenRunner)
	}
	out, err := id.server.base.WithToken(id.token).Register(ctx, protocol.Register{
		Name: id.name, PublicKey: id.public, Labels: id.labels, Credential: id.next,
	})
	if errors.Is(err, ci.ErrConflict) {
		id.next = "" // it has been replaced
	}
	if err != nil {
		return err
	}
	id.next = ""
	next := credential{Server: id.server.base.BaseURL(), Runner: out.Runner, Credential: out.Credential}
	text, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("write the credential: %w", err)
	}
	if err := writePrivate(filepath.Join(id.dir, credentialFile), text); err != nil {
		return err
	}
	id.have = next
	id.server.use(out.Credential)
	return nil
}

// writePrivate replaces a file as a whole: mode 0600, durable when it returns.
func writePrivate(path string, text []byte) error {
	wrap := func(err error) error {
		return ci.Errorf(ci.ErrUnavailable, "%s cannot be written", path).WithCause(err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return wrap(err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return wrap(errors.Join(err, os.Remove(f.Name())))
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return wrap(err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return wrap(err)
	}
	return nil
}
