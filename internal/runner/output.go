package runner

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"

	"forgeci/internal/ci"
)

// Bounds of an output file.
const (
	maxOutputFile = 1 << 20
	maxOutputName = 128
)

// parseOutput reads the file that a step wrote to FORGECI_OUTPUT. It holds lines
//
//	NAME=value
//	NAME<<DELIMITER
//	any lines
//	DELIMITER
//
// and empty lines. A carriage return before a newline belongs to the newline. A
// block's value is its lines joined by newlines. Names are letters, digits, "_"
// and "-", not beginning with a digit or "-". A name that is set twice, a
// reserved name, a NUL, bytes that are not UTF-8 and a block without end are
// errors that name the line, because a value from outside may have been written
// without quoting (CASES YAML-10).
func parseOutput(file []byte) (map[string]string, error) {
	if len(file) > maxOutputFile {
		return nil, outputError(0, "the file has %d bytes, the limit is %d", len(file), maxOutputFile)
	}
	values, lineOf := map[string]string{}, map[string]int{}
	lines := bytes.Split(file, []byte("\n"))
	if len(lines[len(lines)-1]) == 0 {
		lines = lines[:len(lines)-1]
	}
	for i, raw := range lines {
		if bytes.IndexByte(raw, 0) >= 0 {
			return nil, outputError(i+1, "there is a NUL byte")
		}
		if !utf8.Valid(raw) {
			return nil, outputError(i+1, "the line is not UTF-8")
		}
	}
	text := func(i int) string { return string(bytes.TrimSuffix(lines[i], []byte("\r"))) }
	for i := 0; i < len(lines); i++ {
		line, begin := text(i), i+1
		if line == "" {
			continue
		}
		name, value, plain := strings.Cut(line, "=")
		head, delimiter, block := strings.Cut(line, "<<")
		switch {
		case block && (!plain || len(head) < len(name)):
			name = head
			if delimiter == "" {
				return nil, outputError(begin, "%s has no delimiter: write NAME<<DELIMITER", quote(line))
			}
			var body []string
			for i++; i < len(lines) && text(i) != delimiter; i++ {
				body = append(body, text(i))
			}
			if i == len(lines) {
				return nil, outputError(begin, "the block of %s has no end: no line is %s", quote(name), quote(delimiter))
			}
			value = strings.Join(body, "\n")
		case !plain:
			return nil, outputError(begin, "%s is neither NAME=value nor NAME<<DELIMITER", quote(line))
		}
		if err := checkOutputName(name); err != nil {
			return nil, outputError(begin, "%s", err.Detail)
		}
		if first := lineOf[name]; first > 0 {
			return nil, outputError(begin, "%s is set already in line %d", name, first)
		}
		values[name], lineOf[name] = value, begin
	}
	return values, nil
}

func outputError(line int, format string, args ...any) *ci.Error {
	e := ci.Errorf(ci.ErrInvalid, "the output file is not acceptable")
	e.Fields = []ci.FieldError{{File: "FORGECI_OUTPUT", Line: line, Column: min(line, 1), Detail: fmt.Sprintf(format, args...)}}
	return e
}

func checkOutputName(name string) *ci.Error {
	if name == "" {
		return ci.Errorf(ci.ErrInvalid, "the name is empty")
	}
	if len(name) > maxOutputName {
		return ci.Errorf(ci.ErrInvalid, "the name %s is longer than %d characters", quote(name), maxOutputName)
	}
	for i, c := range []byte(name) {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c != '-' && (c < '0' || c > '9')) {
			return ci.Errorf(ci.ErrInvalid, "%s is not a name: letters, digits, \"_\" and \"-\", beginning with a letter or \"_\"", quote(name))
		}
	}
	if reservedOutput(name) {
		return ci.Errorf(ci.ErrInvalid, "%s is a reserved name", name)
	}
	return nil
}

// reservedOutput reports whether a name could be mistaken for a variable of
// ForgeCI or one that changes what a loader, shell or interpreter runs.
func reservedOutput(name string) bool {
	name = strings.ToUpper(name)
	switch name {
	case "CI", "FORGECI", "PATH", "HOME", "SHELL", "IFS", "ENV", "BASH_ENV", "PROMPT_COMMAND", "SHELLOPTS",
		"BASHOPTS", "PS4", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PERL5LIB",
		"PERL5OPT", "RUBYLIB", "RUBYOPT", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH",
		"GIT_SSH", "GIT_SSH_COMMAND", "GIT_EXEC_PATH":
		return true
	}
	for _, prefix := range []string{"CI_", "FORGECI_", "LD_", "DYLD_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// quote shows untrusted text in a message: escaped and short.
func quote(s string) string {
	const most = 60
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return fmt.Sprintf("%q", s)
}
