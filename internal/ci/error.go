package ci

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Kind classifies an error. Kinds are sentinels: errors.Is(err, ci.ErrNotFound)
// holds for an *Error of that kind on the server, on the runner and in the
// command line alike, because the kind survives the wire.
type Kind string

// Error returns the kind's code.
func (k Kind) Error() string { return string(k) }

// Kinds.
const (
	ErrInvalid      Kind = "invalid"      // the request or file is wrong; Fields say where
	ErrUnauthorized Kind = "unauthorized" // no or bad credential
	ErrForbidden    Kind = "forbidden"    // the credential does not allow this
	ErrNotFound     Kind = "not_found"    // no such object for this caller
	ErrMethod       Kind = "method"       // there is such an address, but nothing to do with this method
	ErrConflict     Kind = "conflict"     // the object's state does not allow this, or the key was used for something else
	ErrLeaseLost    Kind = "lease_lost"   // the lease named is not current; Reject says why
	ErrRunEnded     Kind = "run_ended"    // the run has ended
	ErrGone         Kind = "gone"         // it existed and has expired or been deleted
	ErrTooLarge     Kind = "too_large"    // over a documented limit
	ErrRateLimited  Kind = "rate_limited" // try again after RetryAfter
	ErrUnavailable  Kind = "unavailable"  // a part that is needed is away; nothing was stored
	ErrDigest       Kind = "digest"       // bytes do not have the digest or size that was promised
	ErrUnsafe       Kind = "unsafe"       // an archive entry or path that would reach outside its root
	ErrIncompatible Kind = "incompatible" // protocol or database version too old or too new
	ErrInternal     Kind = "internal"     // a defect; the cause is in the server's log only
)

// Reject says why a lease was not accepted.
type Reject string

// Reject reasons. Each is counted and audited.
const (
	RejectNone       Reject = ""
	RejectRun        Reject = "wrong_run"
	RejectJob        Reject = "wrong_job"
	RejectRunner     Reject = "wrong_runner"
	RejectSession    Reject = "wrong_session"
	RejectLease      Reject = "wrong_lease"
	RejectEpoch      Reject = "wrong_epoch"
	RejectExpired    Reject = "lease_expired"
	RejectEnded      Reject = "lease_ended"    // the attempt has ended
	RejectCancelling Reject = "run_cancelling" // only heartbeat, logs and a cancelled completion are taken
	RejectRunEnded   Reject = "run_ended"
	RejectNotFound   Reject = "not_found" // no such job or session in the caller's tenant
)

// Rejects returns all reasons, without RejectNone.
func Rejects() []Reject {
	return []Reject{
		RejectRun, RejectJob, RejectRunner, RejectSession, RejectLease, RejectEpoch,
		RejectExpired, RejectEnded, RejectCancelling, RejectRunEnded, RejectNotFound,
	}
}

// FieldError points at one place in the input.
type FieldError struct {
	// Pointer is a JSON pointer (RFC 6901) into the request body, or empty.
	Pointer string `json:"pointer,omitempty"`
	// File, Line and Column (both from 1) locate a place in a workflow file.
	File   string `json:"file,omitempty"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	// Detail says what is wrong and what to do.
	Detail string `json:"detail"`
}

// String renders file:line:column: detail, leaving out what is not set.
func (f FieldError) String() string {
	var b strings.Builder
	switch {
	case f.File != "" && f.Line > 0:
		fmt.Fprintf(&b, "%s:%d:%d: ", f.File, f.Line, f.Column)
	case f.File != "":
		b.WriteString(f.File + ": ")
	case f.Pointer != "":
		b.WriteString(f.Pointer + ": ")
	}
	b.WriteString(f.Detail)
	return b.String()
}

// Error is the one error type that crosses package and process borders. Detail
// is safe to show to the caller; the wrapped cause is for the log only.
type Error struct {
	Kind       Kind
	Reject     Reject
	Detail     string
	Fields     []FieldError
	RetryAfter time.Duration
	cause      error
}

// Errorf returns an Error of the kind with a detail for the caller.
func Errorf(kind Kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Detail: fmt.Sprintf(format, args...)}
}

// Rejected returns the error for a lease that is not accepted.
func Rejected(r Reject) *Error {
	kind := ErrLeaseLost
	switch r {
	case RejectRunEnded:
		kind = ErrRunEnded
	case RejectNotFound:
		kind = ErrNotFound
	default:
	}
	return &Error{Kind: kind, Reject: r, Detail: "the lease is not current: " + string(r)}
}

// WithCause returns a copy of e that wraps cause; the cause is not shown to callers.
func (e *Error) WithCause(cause error) *Error {
	c := *e
	c.cause = cause
	return &c
}

// Error returns the detail, the fields and the cause, for logs and tests.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Detail)
	if e.Detail == "" {
		b.WriteString(string(e.Kind))
	}
	for _, f := range e.Fields {
		b.WriteString("\n" + f.String())
	}
	if e.cause != nil {
		b.WriteString(": " + e.cause.Error())
	}
	return b.String()
}

// Unwrap makes errors.Is work for the kind and for the cause.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.cause}
}

// KindOf returns the kind of err: the one it carries, or ErrInternal.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	if k, ok := errors.AsType[Kind](err); ok {
		return k
	}
	return ErrInternal
}

// RejectOf returns why a lease was refused, or RejectNone.
func RejectOf(err error) Reject {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reject
	}
	return RejectNone
}
