package protocol_test

import (
	"errors"
	"strings"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// What cannot be an address or a token is told before anything is sent, and the
// secret in it is not shown.
func TestNewClientRefusesWithoutShowingSecrets(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		url, token string
		kind       ci.Kind
	}{
		{"http://user:hunter2@ci.example", "", ci.ErrInvalid},
		{"http://user:hunter2%zz@ci.example", "", ci.ErrInvalid},
		{"ftp://hunter2@ci.example", "", ci.ErrInvalid},
		{"http://ci.example", "hunter2\n", ci.ErrUnauthorized},
		{"http://ci.example", "hunter2\x00", ci.ErrUnauthorized},
		{"http://ci.example", "hunter2 x", ci.ErrUnauthorized},
		{"http://ci.example", "hunter2\xff", ci.ErrUnauthorized},
	} {
		_, err := protocol.NewClient(protocol.ClientConfig{BaseURL: c.url, Token: c.token})
		if !errors.Is(err, c.kind) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s %q: %v", c.url, c.token, err)
		}
	}
}
