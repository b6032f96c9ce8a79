package ci

import (
	"strconv"
	"strings"
	"time"
)

// LeaseRef is what the wire says about a lease: the whole ownership tuple. It
// grants nothing by itself; the server compares every field with the current
// lease, inside the transaction that commits an effect.
type LeaseRef struct {
	Run     RunID     `json:"run"`
	Job     JobID     `json:"job"`
	Runner  RunnerID  `json:"runner"`
	Session SessionID `json:"session"`
	Lease   LeaseID   `json:"lease"`
	// Epoch is the fencing token: the number of the attempt, from 1, only ever rising.
	Epoch int64 `json:"epoch"`
}

// String renders the tuple for the Forgeci-Lease header; ParseLeaseRef reads it.
func (r LeaseRef) String() string {
	return strings.Join([]string{
		string(r.Run), string(r.Job), string(r.Runner), string(r.Session), string(r.Lease),
		strconv.FormatInt(r.Epoch, 10),
	}, "/")
}

// ParseLeaseRef reads the form that String writes. Anything else, also with
// fields of the wrong kind, is ErrInvalid.
func ParseLeaseRef(s string) (LeaseRef, error) {
	bad := func() (LeaseRef, error) {
		return LeaseRef{}, Errorf(ErrInvalid, "malformed lease: expected run/job/runner/session/lease/epoch")
	}
	if len(s) > 512 {
		return bad()
	}
	p := strings.Split(s, "/")
	if len(p) != 6 {
		return bad()
	}
	for i, prefix := range []string{PrefixRun, PrefixJob, PrefixRunner, PrefixSession, PrefixLease} {
		if !HasPrefix(p[i], prefix) {
			return bad()
		}
	}
	epoch, err := strconv.ParseInt(p[5], 10, 64)
	if err != nil || epoch < 1 || strconv.FormatInt(epoch, 10) != p[5] {
		return bad()
	}
	return LeaseRef{
		Run: RunID(p[0]), Job: JobID(p[1]), Runner: RunnerID(p[2]),
		Session: SessionID(p[3]), Lease: LeaseID(p[4]), Epoch: epoch,
	}, nil
}

// Lease timing. Only the TTL is configured; everything else follows from it
// (SPEC decision 5).
const (
	DefaultLeaseTTL = 60 * time.Second
	MinLeaseTTL     = 2 * time.Second
)

// RenewEvery is how often a runner renews its leases.
func RenewEvery(ttl time.Duration) time.Duration { return ttl / 3 }

// LeaseMargin is how long before the end of the TTL, counted from the start of
// the request that last renewed it, a runner stops by itself.
func LeaseMargin(ttl time.Duration) time.Duration { return ttl / 12 }

// SweepEvery is how often the server looks for expired leases.
func SweepEvery(ttl time.Duration) time.Duration { return min(5*time.Second, ttl/4) }
