package process

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forgeci/internal/ci"
)

// traceErrors lets bash tell the line at which errexit ends the script: BASH_ENV
// names a file that bash reads before the script, and in it a trap for ERR that
// writes the line to a file beside the script. The trap changes nothing of what the
// script does or prints: it runs under exactly the condition under which errexit
// ends the shell, functions and subshells do not inherit it, children of the
// shell do not get BASH_ENV, and a script that sets its own trap replaces it. A
// step that sets BASH_ENV keeps its own.
func (s *sandbox) traceErrors(shell string, env []string) ([]string, error) {
	if filepath.Base(shell) != "bash" {
		return env, nil
	}
	for _, kv := range env {
		if strings.HasPrefix(kv, "BASH_ENV=") {
			return env, nil
		}
	}
	u := s.exec.opts.User
	if u == nil {
		// Steps have the runner's user: they can make the file, and one prelude
		// serves all of them.
		s.scripts = append(s.scripts, s.stepFile("line"))
		prelude, err := s.exec.prelude()
		if err != nil {
			return nil, err
		}
		return append(env, "BASH_ENV="+prelude), nil
	}
	line, prelude := s.stepFile("line"), s.stepFile("env")
	if err := s.write(line, "", 0o600); err != nil {
		return nil, err
	}
	if err := os.Lchown(line, int(u.UID), int(u.GID)); err != nil {
		return nil, ci.Errorf(ci.ErrUnavailable, "give the step its files").WithCause(err)
	}
	if err := s.write(prelude, preludeOf(quote(line)), 0o444); err != nil {
		return nil, err
	}
	return append(env, "BASH_ENV="+prelude), nil
}

// preludeOf is what bash reads before a script, with the word that names the
// file for the line.
func preludeOf(line string) string {
	return "unset BASH_ENV\n" +
		`trap 'case $- in *e*) builtin printf %s "$LINENO" 2>/dev/null >|` + line + " ;; esac' ERR\n"
}

const preludeName = "prelude.bash"

// prelude returns the file that all steps without a user of their own read
// first. It names the file for the line by the script's. It is looked at each
// time: who may run steps may also change the runner's files.
func (e *Executor) prelude() (string, error) {
	path, want := filepath.Join(e.opts.Dir, preludeName), preludeOf(`"${0%.sh}.line"`)
	if have, err := os.ReadFile(path); err == nil && string(have) == want {
		return path, nil
	}
	beside := path + "." + newID()
	err := os.WriteFile(beside, []byte(want), 0o400)
	if err == nil {
		err = os.Rename(beside, path)
	}
	if err != nil {
		return "", ci.Errorf(ci.ErrUnavailable, "write the step's script").WithCause(err)
	}
	return path, nil
}

// quote quotes a path for use inside single quotes that are themselves quoted.
func quote(path string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`, "`", "\\`", `'`, `'\''`).Replace(path) + `"`
}

// failedLine is the line that the present step's trap wrote, or 0.
func (s *sandbox) failedLine() int {
	f, err := os.OpenFile(s.stepFile("line"), os.O_RDONLY, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	b := make([]byte, 16)
	n, _ := f.Read(b)
	line, err := strconv.Atoi(string(b[:n]))
	if err != nil || line < 1 {
		return 0
	}
	return line
}
