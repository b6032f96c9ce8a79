package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"forgeci/internal/ci"
)

// Exit codes that scripts rely on.
const (
	exitSuccess   = 0
	exitFailed    = 1 // the run failed or timed out
	exitUsage     = 2 // wrong usage, or an invalid workflow
	exitCancelled = 3
	exitDenied    = 4 // not found or not allowed
	exitInfra     = 5 // infrastructure: no server, a lost runner, a defect

	exitTimeout     = 124 // --timeout passed, as timeout(1) says it
	exitInterrupted = 130 // 128 + SIGINT
	exitTerminated  = 143 // 128 + SIGTERM
)

// exitError ends the command with a code; err is printed unless it is nil.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// ended ends the command with a code and without a message of its own.
func ended(code int) error {
	if code == exitSuccess {
		return nil
	}
	return &exitError{code: code}
}

// usage is the error of a command line that cannot be meant.
func usage(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// stopped is why a command does not wait any more: the user or a bound of the user.
type stopped struct {
	code int
	text string
}

func (s stopped) Error() string { return s.text }

// interruptible returns a context that SIGINT and SIGTERM end. The second signal
// ends the process as if nobody had listened.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			if s == syscall.SIGTERM {
				cancel(stopped{exitTerminated, "terminated"})
				return
			}
			cancel(stopped{exitInterrupted, "interrupted"})
		case <-ctx.Done():
			signal.Stop(signals)
		}
	}()
	return ctx, func() { cancel(context.Canceled) }
}

// within bounds ctx by the user's --timeout; zero is no bound.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, d, stopped{exitTimeout, fmt.Sprintf("not finished within %s", d)})
}

// codeOf maps an error to the exit code.
func codeOf(err error) int {
	var exit *exitError
	var stop stopped
	switch {
	case err == nil:
		return exitSuccess
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &stop):
		return stop.code
	}
	switch ci.KindOf(err) {
	case ci.ErrInvalid, ci.ErrTooLarge, ci.ErrUnsafe:
		return exitUsage
	case ci.ErrUnauthorized, ci.ErrForbidden, ci.ErrNotFound, ci.ErrConflict, ci.ErrRunEnded, ci.ErrGone:
		return exitDenied
	case ci.ErrLeaseLost, ci.ErrRateLimited, ci.ErrUnavailable, ci.ErrDigest, ci.ErrIncompatible, ci.ErrMethod, ci.ErrInternal:
		return exitInfra
	default:
		return exitInfra
	}
}

// codeOfResult maps how a run or a job ended to the exit code.
func codeOfResult(c ci.Conclusion, reason ci.Reason) int {
	switch c {
	case ci.ConclusionSuccess, ci.ConclusionSkipped, ci.ConclusionCached:
		return exitSuccess
	case ci.ConclusionFailed:
		switch reason {
		case ci.ReasonInfrastructure, ci.ReasonAttemptsExhausted:
			return exitInfra
		default:
			return exitFailed
		}
	case ci.ConclusionTimedOut:
		return exitFailed
	case ci.ConclusionCancelled:
		return exitCancelled
	case ci.ConclusionAborted:
		return exitInfra
	default:
		return exitInfra
	}
}

// daemonError turns what keeps a server or a runner from starting (an address or
// a directory in use) into an error of infrastructure.
func daemonError(err error) error {
	if errors.Is(err, ci.ErrConflict) {
		return &exitError{exitInfra, err}
	}
	return err
}

// exit prints what is left to say of err and returns the exit code.
func (a *app) exit(err error) int {
	code := codeOf(err)
	var exit *exitError
	if err == nil || errors.As(err, &exit) && exit.err == nil {
		return code
	}
	if stop, ok := errors.AsType[stopped](err); ok {
		err = stop
	}
	a.printError(err)
	return code
}

// printError writes "forgeci: what" and, for errors in files, one line
// file:line:column for each place, which editors can jump to.
func (a *app) printError(err error) {
	var e *ci.Error
	if errors.As(err, &e) && len(e.Fields) > 0 {
		for _, f := range e.Fields {
			a.err.line(clean(place(f)))
		}
	}
	a.err.line(a.err.paint(red, "forgeci: ") + describe(err))
	for _, hint := range a.hints(err) {
		a.err.line("  " + hint)
	}
}

// place renders an error in an input by the name that it has on the command line.
func place(f ci.FieldError) string {
	if name, ok := strings.CutPrefix(f.Pointer, "/inputs/"); ok && f.File == "" {
		return "--input " + strings.NewReplacer("~1", "/", "~0", "~").Replace(name) + ": " + f.Detail
	}
	return f.String()
}

// describe renders an error for a person: the details of what was wrapped, each once.
func describe(err error) string {
	if e, ok := errors.AsType[*ci.Error](err); ok {
		text := e.Detail
		if text == "" {
			text = strings.ReplaceAll(string(e.Kind), "_", " ")
		}
		if e.Kind == ci.ErrUnavailable || e.Kind == ci.ErrIncompatible {
			if cause := causeText(e); cause != "" {
				text += " (" + cause + ")"
			}
		}
		return cleanText(text)
	}
	return cleanText(err.Error())
}

// causeText is the text of what a typed error wraps, if it wraps anything.
func causeText(e *ci.Error) string {
	if wrapped := e.Unwrap(); len(wrapped) > 1 { // the first is the kind
		return describe(wrapped[1])
	}
	return ""
}

// hints say what to do about an error.
func (a *app) hints(err error) []string {
	switch {
	case errors.Is(err, ci.ErrUnauthorized):
		return []string{
			"Give a token with --token-file or FORGECI_TOKEN. The server's first one is",
			a.tokenName + " in its data directory.",
		}
	case errors.Is(err, ci.ErrUnavailable):
		var e *ci.Error
		switch {
		case errors.As(err, &e) && e.RetryAfter > 0:
			return []string{"Try again in " + e.RetryAfter.String() + "."}
		case errors.Is(err, syscall.ECONNREFUSED):
			return []string{
				"Is a server running there? This one starts one: forgeci server --runner",
				"Another address is given with --server or FORGECI_SERVER.",
			}
		}
	}
	return nil
}
