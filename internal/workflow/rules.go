package workflow

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

const (
	namePattern = `^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$`
	envPattern  = `^[A-Za-z_][A-Za-z0-9_]*$`
	maxRetry    = 10
	maxPriority = 1000
)

var (
	nameRE  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(namePattern) })
	envRE   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(envPattern) })
	labelRE = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}(=[A-Za-z0-9][A-Za-z0-9._/:+-]{0,126})?$`)
	})
)

// Name accepts the name of a job, an input, an output, a matrix axis, a secret
// or an environment: 1 to 100 letters, digits, "_", "-" and ".", not beginning
// with "-" or ".". The error says what is wrong and is nil when nothing is.
func Name(s string) error {
	if nameRE().MatchString(s) {
		return nil
	}
	return nameError(s, "letters, digits, _, - and .", 100)
}

// Label accepts a runner label: "key" or "key=value" (SPEC decision 13). A
// comma is refused, since a label is never a list (QUE-02).
func Label(s string) error {
	if strings.Contains(s, ",") {
		return fmt.Errorf("a label holds no comma: write a list, [%s]", strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' }), ", "))
	}
	if labelRE().MatchString(s) {
		return nil
	}
	return nameError(s, "letters, digits, ., _, / and -, as key or key=value", 63)
}

// ArtifactName accepts the name of an artifact: 1 to 128 bytes of UTF-8
// without control characters, none of / \ : * ? " < > | and not ending or
// beginning with a space or ending with a dot, so that every system can store
// it as a file (ART-03). The error names the offending character.
func ArtifactName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("the name is empty: write a name")
	case len(s) > 128:
		return fmt.Errorf("the name has %d bytes: the limit is 128", len(s))
	case !utf8.ValidString(s):
		return fmt.Errorf("the name is not UTF-8")
	}
	for _, r := range s {
		if unicode.IsControl(r) || !unicode.IsPrint(r) && r != ' ' {
			return fmt.Errorf("the name holds the character %U, which cannot be printed: remove it", r)
		}
		if strings.ContainsRune(`/\:*?"<>|`, r) {
			return fmt.Errorf("the name holds %q, which not every system allows in a file name: use - instead", r)
		}
	}
	if strings.HasSuffix(s, ".") || s != strings.TrimSpace(s) {
		return fmt.Errorf("the name begins or ends with a space or ends with a dot: remove it")
	}
	return nil
}

func nameError(s, allowed string, limit int) error {
	switch {
	case s == "":
		return fmt.Errorf("it is empty: use %s", allowed)
	case len(s) > limit:
		return fmt.Errorf("it has %d bytes: the limit is %d", len(s), limit)
	}
	for i, r := range s {
		ok := r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r) || r == '_' || (i > 0 && (r == '-' || r == '.')))
		if !ok {
			return fmt.Errorf("the character %q is not allowed there: use %s", r, allowed)
		}
	}
	return fmt.Errorf("use %s", allowed)
}

// envName accepts the name of a variable that a workflow may set.
func envName(s string) error {
	if !envRE().MatchString(s) || len(s) > 255 {
		return fmt.Errorf("use letters, digits and _, not beginning with a digit")
	}
	if s == "FORGECI" || strings.HasPrefix(s, "FORGECI_") {
		return fmt.Errorf("FORGECI_ is reserved for the runner: choose another name")
	}
	return nil
}

// redirectsPrograms reports whether a variable makes a program load or contact
// something else. A step that gets secrets may not set one (SEC-01).
func redirectsPrograms(name string) bool {
	upper := strings.ToUpper(name)
	return strings.HasPrefix(upper, "LD_") || strings.HasPrefix(upper, "DYLD_") ||
		slices.Contains([]string{
			"PATH", "BASH_ENV", "ENV", "SHELLOPTS", "PROMPT_COMMAND", "NODE_OPTIONS", "PYTHONSTARTUP", "PYTHONPATH",
			"PERL5OPT", "RUBYOPT", "JAVA_TOOL_OPTIONS", "GIT_SSH_COMMAND", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
		}, upper)
}

// workspacePath accepts a slash-separated path that stays inside the workspace.
func workspacePath(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("the path is empty")
	case len(s) > DefaultLimits().Pattern:
		return fmt.Errorf("the path has %d bytes: the limit is %d", len(s), DefaultLimits().Pattern)
	case strings.ContainsFunc(s, unicode.IsControl):
		return fmt.Errorf("the path holds a control character: remove it")
	case path.IsAbs(s) || strings.HasPrefix(s, `\`) || len(s) > 1 && s[1] == ':':
		return fmt.Errorf("the path is absolute: write it relative to the workspace")
	case slices.Contains(strings.FieldsFunc(s, func(r rune) bool { return r == '/' || r == '\\' }), ".."):
		return fmt.Errorf("the path leaves the workspace with ..: files outside of it are not taken")
	case strings.HasPrefix(s, "~"):
		return fmt.Errorf("~ is not expanded: write a path relative to the workspace")
	}
	return nil
}

// cachePath accepts what workspacePath does and an absolute path, which
// declares a cache root in the job's own file system (SPEC CA-6).
func cachePath(s string) error {
	if path.IsAbs(s) && path.Clean(s) != "/" {
		return workspacePath(strings.TrimLeft(s, "/"))
	}
	return workspacePath(s)
}

var imageRE = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[A-Za-z0-9][A-Za-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$`)
})

func imageRef(s string) error {
	if len(s) > 512 || !imageRE().MatchString(s) {
		return errorText("it is not an image reference: write registry/name:tag or name@sha256:…")
	}
	return nil
}

func word(words, foreign map[string]string, s string) error {
	if _, ok := words[s]; ok {
		return nil
	}
	if own, ok := foreign[strings.ToLower(s)]; ok {
		return errorText("write " + own)
	}
	return errorText("use " + list(sortedKeys(words)))
}

func words(s string) map[string]string {
	m := map[string]string{}
	for w := range strings.FieldsSeq(s) {
		m[w] = w
	}
	return m
}

func osWord(s string) error {
	return word(words("linux darwin windows freebsd openbsd netbsd"), map[string]string{"macos": "darwin", "osx": "darwin", "mac": "darwin", "ubuntu": "linux", "debian": "linux", "win": "windows"}, s)
}

func archWord(s string) error {
	return word(words("amd64 arm64 arm 386 riscv64 ppc64le s390x loong64"), map[string]string{"x86_64": "amd64", "x64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "x86": "386", "i386": "386", "armv7": "arm"}, s)
}

func isolationWord(s string) error {
	return word(words("process sandbox container gvisor vm"), map[string]string{"docker": "container", "podman": "container", "none": "process", "host": "process", "shell": "process", "runsc": "gvisor", "kata": "vm", "microvm": "vm"}, s)
}
