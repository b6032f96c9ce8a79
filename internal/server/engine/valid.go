package engine

import (
	"fmt"
	"strings"
	"unicode"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// Bounds of what a runner reports. A runner is trusted with its own job only, so
// nothing that it says may fill the database or break a constraint of it.
const (
	streamsMost  = 4000
	wordMost     = 64 // of reasons, operating systems, isolation classes and the like
	evidenceMost = 256
	labelsMost   = 1000
	labelMost    = 256
)

// invalid is the error about one field of a request.
func invalid(pointer, format string, args ...any) *ci.Error {
	detail := fmt.Sprintf(format, args...)
	return &ci.Error{
		Kind: ci.ErrInvalid, Detail: strings.ReplaceAll(strings.TrimPrefix(pointer, "/"), "/", ".") + ": " + detail,
		Fields: []ci.FieldError{{Pointer: pointer, Detail: detail}},
	}
}

// isWord reports whether s may be one of our words: a newer runner may know
// reasons that this server does not.
func isWord(s string) bool {
	return len(s) <= wordMost && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

// isText reports whether s is of 1 to most bytes and without control characters.
func isText(s string, most int) bool {
	return s != "" && len(s) <= most && strings.IndexFunc(s, unicode.IsControl) < 0
}

// validSteps checks step transitions. Names and signals are cut where they are
// written.
func validSteps(steps []protocol.StepUpdate) error {
	if len(steps) > protocol.MaxSteps {
		return ci.Errorf(ci.ErrTooLarge, "at most %d steps in one report", protocol.MaxSteps)
	}
	for i, s := range steps {
		at := fmt.Sprintf("/steps/%d", i)
		switch {
		case s.Index < 0 || s.Index >= protocol.MaxSteps:
			return invalid(at+"/index", "0 to %d is expected", protocol.MaxSteps-1)
		case s.State != ci.StateRunning && s.State != ci.StateFinished:
			return invalid(at+"/state", "%q: running or finished is expected", clip(string(s.State), wordMost))
		case !isWord(string(s.Conclusion)):
			return invalid(at+"/conclusion", "a word of at most %d letters, digits and _ is expected", wordMost)
		case !isWord(string(s.Reason)):
			return invalid(at+"/reason", "a word of at most %d letters, digits and _ is expected", wordMost)
		}
	}
	return nil
}

// validStreams checks the final lengths of log streams.
func validStreams(streams []protocol.StreamEnd) error {
	if len(streams) > streamsMost {
		return ci.Errorf(ci.ErrTooLarge, "at most %d streams in one result", streamsMost)
	}
	for i, s := range streams {
		at := fmt.Sprintf("/streams/%d", i)
		switch {
		case s.Step < protocol.StepSystem || s.Step >= protocol.MaxSteps:
			return invalid(at+"/step", "%d to %d is expected", protocol.StepSystem, protocol.MaxSteps-1)
		case s.Stream < protocol.Stdout || s.Stream > protocol.System:
			return invalid(at+"/stream", "%d to %d is expected", protocol.Stdout, protocol.System)
		case s.Length < 0 || s.Length > protocol.MaxStreamLength:
			return invalid(at+"/length", "0 to %d is expected", int64(protocol.MaxStreamLength))
		}
	}
	return nil
}

// validEvidence requires proof of termination.
func validEvidence(e protocol.Evidence) error {
	switch {
	case !e.Terminated:
		return invalid("/evidence/terminated", "an attempt ends only with proof that its sandbox has ended (terminated: true)")
	case !isText(e.How, evidenceMost):
		return invalid("/evidence/how", "1 to %d characters that say how it is known are expected", evidenceMost)
	}
	return nil
}

// validOffer checks what a session offers: it is kept for as long as the
// installation, once for each different offer.
func validOffer(o protocol.Offer) error {
	for _, f := range []struct{ name, value string }{{"os", o.OS}, {"arch", o.Arch}, {"size", o.Size}} {
		if f.value != "" && !isText(f.value, wordMost) {
			return invalid("/offer/"+f.name, "at most %d printable characters are expected", wordMost)
		}
	}
	classes := make([]string, len(o.Isolation))
	for i, c := range o.Isolation {
		classes[i] = string(c)
	}
	for _, l := range []struct {
		name      string
		values    []string
		most, len int
	}{{"isolation", classes, 16, wordMost}, {"labels", o.Labels, labelsMost, labelMost}, {"features", o.Features, labelsMost, labelMost}} {
		if len(l.values) > l.most {
			return &ci.Error{Kind: ci.ErrTooLarge, Detail: fmt.Sprintf("offer.%s: at most %d are possible", l.name, l.most)}
		}
		for i, v := range l.values {
			if !isText(v, l.len) {
				return invalid(fmt.Sprintf("/offer/%s/%d", l.name, i), "1 to %d printable characters are expected", l.len)
			}
		}
	}
	return nil
}

// validRefs checks the leases of a heartbeat: they are the one tuple that does
// not come in the header.
func validRefs(refs []ci.LeaseRef) error {
	for i, ref := range refs {
		if _, err := ci.ParseLeaseRef(ref.String()); err != nil {
			return invalid(fmt.Sprintf("/leases/%d", i), "malformed lease: the IDs of run, job, runner, session and lease and an epoch from 1 are expected")
		}
	}
	return nil
}

// validAttempts checks attempts that a runner names.
func validAttempts(at string, refs []protocol.AttemptRef) error {
	if len(refs) > 10_000 {
		return ci.Errorf(ci.ErrTooLarge, "at most 10000 attempts in one report")
	}
	for i, r := range refs {
		if !ci.HasPrefix(string(r.Job), ci.PrefixJob) || r.Epoch < 1 {
			return invalid(fmt.Sprintf("%s/%d", at, i), "the ID of a job and an epoch from 1 are expected")
		}
	}
	return nil
}
