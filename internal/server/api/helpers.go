package api

import (
	"runtime/debug"
	"strconv"
	"strings"

	"forgeci/internal/ci"
)

func stack() string { return string(debug.Stack()) }

// intParam reads a query parameter; absent is the default.
func intParam(get func(string) string, name string, absent, least, most int64) (int64, error) {
	s := get(name)
	if s == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		return 0, ci.Errorf(ci.ErrInvalid, "?%s=%s: a whole number from %d to %d is expected", name, clip(s, 40), least, most)
	}
	return n, nil
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
