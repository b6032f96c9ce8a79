package server

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/store"
)

// Files of the data directory.
const (
	adminTokenFile        = "admin.token"
	registrationTokenFile = "registration.token"
)

// bootstrap makes the tokens of an installation without users (SPEC decision 16):
// files that only their owner can read, hashes in the database. They work on a
// loopback listener only.
// A token whose file is replaced or deleted is worth nothing from the next start
// on: a data directory, known by its key, has one of each kind.
func (s *Server) bootstrap(ctx context.Context, org ci.OrgID, key []byte) error {
	for _, b := range []struct {
		file  string
		kind  protocol.TokenKind
		word  string
		actor string
	}{
		{adminTokenFile, protocol.TokenAdmin, "admin", "admin"},
		{registrationTokenFile, protocol.TokenRegistration, "registration", "registration token"},
	} {
		token, err := tokenFile(filepath.Join(s.cfg.DataDir, b.file), b.kind)
		if err != nil {
			return err
		}
		if !s.loopback {
			continue
		}
		err = s.store.Write(ctx, func(tx *store.Tx) error {
			now, err := tx.Now(ctx)
			if err != nil {
				return err
			}
			c := store.Credential{ID: ci.IDSource{}.New(ci.PrefixToken), Org: org, Kind: b.word, Actor: b.actor, CreatedUS: now}
			if _, known, err := tx.CredentialByHash(ctx, auth.Hash(token)); err != nil {
				return err
			} else if !known {
				c.ID = ci.PrefixToken + "_" + auth.Hash(b.file + "\n" + string(key))[:26]
				if err := tx.DeleteCredential(ctx, c.ID); err != nil {
					return err
				}
			}
			return tx.InsertCredential(ctx, c, auth.Hash(token))
		})
		if err != nil {
			return err
		}
	}
	if !s.loopback {
		s.cfg.Log.WarnContext(ctx, "the bootstrap tokens are not accepted: the listener is not on loopback", "listen", s.cfg.Listen)
		return s.store.Write(ctx, func(tx *store.Tx) error {
			now, err := tx.Now(ctx)
			if err != nil {
				return err
			}
			return tx.RevokeBootstrap(ctx, now)
		})
	}
	return nil
}

// tokenFile reads a token, or makes one.
func tokenFile(path string, kind protocol.TokenKind) (string, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		token := strings.TrimSpace(string(b))
		if !protocol.ValidToken(token, kind) {
			return "", ci.Errorf(ci.ErrInvalid, "%s does not hold a token: delete it to get a new one", path)
		}
		return token, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", ci.Errorf(ci.ErrUnavailable, "%v", err)
	}
	token := protocol.NewToken(kind)
	return token, writePrivate(path, []byte(token+"\n"))
}

// secretFile reads a key of 32 bytes, or makes one.
func secretFile(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		if len(b) != 32 {
			return nil, ci.Errorf(ci.ErrInvalid, "%s does not hold a key of 32 bytes", path)
		}
		return b, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, ci.Errorf(ci.ErrUnavailable, "%v", err)
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	return key, writePrivate(path, key)
}

// writePrivate writes a file of mode 0600 whole or not at all.
func writePrivate(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return ci.Errorf(ci.ErrUnavailable, "%v", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return ci.Errorf(ci.ErrUnavailable, "%v", err)
	}
	return nil
}
