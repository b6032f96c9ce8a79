package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
)

// fullDevice takes so many bytes and no more.
type fullDevice struct{ left int }

func (d *fullDevice) Write(p []byte) (int, error) {
	n := min(d.left, len(p))
	d.left -= n
	if n < len(p) {
		return n, errors.New("no space left on device")
	}
	return n, nil
}

// An answer that could not be written whole is no success, whichever command
// gives it: a script would work with half of it.
func TestAnAnswerThatCannotBeWrittenIsNoSuccess(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"version", "--output", "json"}, {"schema"}, {"--help"}, {"completion", "bash"}} {
		for _, room := range []int{0, 5} {
			var stderr bytes.Buffer
			code := Main(t.Context(), Process{
				Args: args, Stdin: strings.NewReader(""), Stdout: &fullDevice{room}, Stderr: &stderr,
				LookupEnv: func(string) (string, bool) { return "", false }, Now: time.Now,
			})
			if code != exitInfra || !strings.Contains(stderr.String(), "no space left on device") {
				t.Errorf("%q with room for %d bytes: exit code %d, %q", args, room, code, stderr.String())
			}
		}
	}
}
