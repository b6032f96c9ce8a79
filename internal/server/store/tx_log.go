package store

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// States of a log.
const (
	LogOpen    = "open"    // the attempt may append
	LogEnded   = "ended"   // complete; its bytes are still in segments
	LogSealed  = "sealed"  // its bytes are in its archive
	LogExpired = "expired" // its bytes have been deleted
)

// Log is the index row of one attempt's log.
type Log struct {
	Job     ci.JobID
	Epoch   int64
	Org     ci.OrgID
	State   string
	Bytes   int64 // stored
	Cut     int64 // discarded under limits
	Gap     int64 // never arrived; known when sealed
	Lines   int64 // known when sealed
	Extents int64
	// NextSeq is behind the last sequence number that is stored without a hole
	// before it, AheadSeq behind the highest stored one.
	NextSeq  int64
	AheadSeq int64
	// Streams holds the durable contiguous length of each stream, Finals the one
	// that the runner declared at the end.
	Streams map[LogStream]int64
	Finals  map[LogStream]int64
	// ArchiveKey names the object that holds the archive, from ArchiveAt on.
	ArchiveKey  string
	ArchiveAt   int64
	ArchiveSize int64
	IndexSize   int64
	IndexDigest string
	EndedUS     int64
	SealedUS    int64
}

// Key names the log's attempt.
func (l Log) Key() AttemptKey { return AttemptKey{l.Job, l.Epoch} }

// LogStream names one stream of an attempt. Its text is "step.stream".
type LogStream struct {
	Step   int
	Stream protocol.Stream
}

// MarshalText writes "step.stream".
func (s LogStream) MarshalText() ([]byte, error) {
	return []byte(strconv.Itoa(s.Step) + "." + strconv.Itoa(int(s.Stream))), nil
}

// UnmarshalText reads what MarshalText writes.
func (s *LogStream) UnmarshalText(b []byte) error {
	for i := len(b) - 1; i > 0; i-- {
		if b[i] != '.' {
			continue
		}
		step, err := strconv.Atoi(string(b[:i]))
		if err != nil {
			return err
		}
		stream, err := strconv.ParseUint(string(b[i+1:]), 10, 8)
		s.Step, s.Stream = step, protocol.Stream(stream)
		return err
	}
	return strconv.ErrSyntax
}

func scanLog(r scanner, v *Log) error {
	var streams, finals []byte
	err := r.Scan(&v.Job, &v.Epoch, &v.Org, &v.State, &v.Bytes, &v.Cut, &v.Gap, &v.Lines, &v.Extents, &v.NextSeq, &v.AheadSeq,
		&streams, &finals, &v.ArchiveKey, &v.ArchiveAt, &v.ArchiveSize, &v.IndexSize, &v.IndexDigest, &v.EndedUS, &v.SealedUS)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(streams, &v.Streams); err != nil {
		return err
	}
	return json.Unmarshal(finals, &v.Finals)
}

// LogExtent is a run of chunks of one stream with consecutive sequence numbers:
// where its bytes are, or how many were discarded in its place.
type LogExtent struct {
	Job       ci.JobID
	Epoch     int64
	Seq       int64 // of its first chunk
	LastSeq   int64
	Stream    LogStream
	Offset    int64 // in the stream
	Length    int64
	Discarded int64
	AtMicros  int64
	Newlines  int64
	FirstNL   int64 // position of the first newline, -1 when there is none
	LastNL    int64
	Digest    string // SHA-256 of the bytes, unpadded base64
	Segment   string
	SegmentAt int64
}

func scanExtent(r scanner, v *LogExtent) error {
	return r.Scan(&v.Job, &v.Epoch, &v.Seq, &v.LastSeq, &v.Stream.Step, &v.Stream.Stream, &v.Offset, &v.Length, &v.Discarded,
		&v.AtMicros, &v.Newlines, &v.FirstNL, &v.LastNL, &v.Digest, &v.Segment, &v.SegmentAt)
}

// LockLogs locks and returns the logs of attempts that have one, in order. At most
// one tuple per job.
func (t *Tx) LockLogs(ctx context.Context, rs []ci.LeaseRef) ([]Log, error) {
	return query(ctx, t, "LogsLock", scanLog, refs(rs, nil))
}

// CurrentLeases returns the jobs whose tuple is current.
func (t *Tx) CurrentLeases(ctx context.Context, rs []ci.LeaseRef, now int64) (map[ci.JobID]bool, error) {
	rows, err := query(ctx, t, "LeasesCurrent", scanString, refs(rs, nil), now)
	out := make(map[ci.JobID]bool, len(rows))
	for _, id := range rows {
		out[ci.JobID(id)] = true
	}
	return out, err
}

// WhyRefused says why a lease tuple is not (or was not, or is about not to be)
// accepted at a time, for the answer to its holder. It decides nothing.
func (t *Tx) WhyRefused(ctx context.Context, ref ci.LeaseRef, now int64) (ci.Reject, error) {
	l, ok, err := t.Lease(ctx, ref.Job)
	if err != nil {
		return ci.RejectNone, err
	}
	if !ok {
		a, ok, err := t.Attempt(ctx, ref.Job, ref.Epoch)
		if err != nil || !ok || a.Lease != ref.Lease {
			return ci.RejectLease, err
		}
		run, ok, err := t.Run(ctx, a.Run)
		if err == nil && ok && run.State == ci.StateFinished {
			return ci.RejectRunEnded, nil
		}
		return ci.RejectEnded, err
	}
	switch {
	case l.Run != ref.Run:
		return ci.RejectRun, nil
	case l.Epoch != ref.Epoch:
		return ci.RejectEpoch, nil
	case l.Runner != ref.Runner:
		return ci.RejectRunner, nil
	case l.Session != ref.Session:
		return ci.RejectSession, nil
	case l.ID != ref.Lease:
		return ci.RejectLease, nil
	case l.ExpiresUS <= now:
		return ci.RejectExpired, nil
	case l.Cancel != 0:
		return ci.RejectCancelling, nil
	default:
		return ci.RejectEnded, nil
	}
}

// LogExtents returns up to limit extents of an attempt from a sequence number on.
func (t *Tx) LogExtents(ctx context.Context, k AttemptKey, from int64, limit int) ([]LogExtent, error) {
	return query(ctx, t, "LogExtentsFrom", scanExtent, k.Job, k.Epoch, from, limit)
}

// LogExtentsOf returns all extents of logs that have few, by attempt.
func (t *Tx) LogExtentsOf(ctx context.Context, ks []AttemptKey) (map[AttemptKey][]LogExtent, error) {
	rows, err := query(ctx, t, "LogExtentsOf", scanExtent, attemptKeys(ks))
	out := make(map[AttemptKey][]LogExtent, len(ks))
	for _, e := range rows {
		k := AttemptKey{e.Job, e.Epoch}
		out[k] = append(out[k], e)
	}
	return out, err
}

// LogExtentsOver returns the extents that hold any of the sequence numbers
// first to last.
func (t *Tx) LogExtentsOver(ctx context.Context, k AttemptKey, first, last int64) ([]LogExtent, error) {
	return query(ctx, t, "LogExtentsOver", scanExtent, k.Job, k.Epoch, first, last)
}

// AppendLogs stores extents of one segment and the rows of their logs, of attempts
// whose lease is current: logs are locked ones, made are those that had no row. These
// may wait for another transaction; when one has a row behind that, or has lost its
// lease, the transaction has to be run again. Anything else that is not as it was is a
// defect of the caller.
func (t *Tx) AppendLogs(ctx context.Context, rs []ci.LeaseRef, logs, made []Log, es []LogExtent, segment string, size, now int64) error {
	set := refs(rs, nil)
	if len(made) > 0 {
		times, err := query(ctx, t, "LogsInsert", scanInt, set, now, positions(made))
		if err == nil && len(times) != len(made) {
			err = ErrSerialization
		}
		if err != nil {
			return err
		}
		now = slices.Max(times)
		if own, has := t.s.ownNow(); has {
			now = own
		}
	}
	m := make(map[string]any, len(es))
	held := int64(0)
	for i, e := range es {
		m[itoa(i)] = map[string]any{
			"j": e.Job, "e": e.Epoch, "q": e.Seq, "l": e.LastSeq, "s": e.Stream.Step, "t": e.Stream.Stream,
			"o": e.Offset, "n": e.Length, "d": e.Discarded, "a": e.AtMicros, "nl": e.Newlines, "fn": e.FirstNL, "ln": e.LastNL,
			"h": e.Digest, "p": e.SegmentAt,
		}
		held++
	}
	var err error
	if len(made) == 0 {
		err = t.later(ctx, "LogExtentsInsert", len(es), "log extents", set, now, object(m), segment)
	} else {
		var n int64
		if n, err = t.exec(ctx, "LogExtentsInsert", set, now, object(m), segment); err == nil && n != int64(len(es)) {
			err = ErrSerialization // a lease has run out since the caller looked
		}
	}
	if err != nil {
		return err
	}
	if len(logs) > 0 {
		if err := t.later(ctx, "LogsAdvance", len(logs), "logs", set, now, positions(logs)); err != nil {
			return err
		}
	}
	return t.insertObjects(ctx, []LogObject{{Key: segment, Size: size}}, map[string]int64{segment: held}, now)
}

// positions renders what is stored of logs.
func positions(logs []Log) string {
	m := make(map[string]any, len(logs))
	for _, g := range logs {
		m[string(g.Job)] = map[string]any{
			"e": g.Epoch, "o": g.Org, "b": g.Bytes, "c": g.Cut, "x": g.Extents, "q": g.NextSeq,
			"a": g.AheadSeq, "s": lengths(g.Streams),
		}
	}
	return object(m)
}

// LogObject is an object that holds bytes of logs.
type LogObject struct {
	Key  string
	Size int64
}

// insertObjects makes the rows of objects with what refers to each.
func (t *Tx) insertObjects(ctx context.Context, objects []LogObject, refs map[string]int64, now int64) error {
	m := make(map[string]any, len(objects))
	for _, o := range objects {
		m[o.Key] = map[string]any{"s": o.Size, "n": refs[o.Key]}
	}
	return t.later(ctx, "LogObjectsInsert", len(objects), "log objects", object(m), now)
}

// lengths renders lengths of streams as JSON.
func lengths(m map[LogStream]int64) string {
	if len(m) == 0 {
		return "{}"
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic("store: " + err.Error()) // only text and numbers go in
	}
	return string(b)
}

// LogEnd ends the log of an attempt.
type LogEnd struct {
	Job   ci.JobID
	Epoch int64
	Org   ci.OrgID
	// Streams are the final lengths that the runner declared; nil when the
	// attempt was lost.
	Streams []protocol.StreamEnd
}

// EndLogs marks logs as complete, in the transaction that ends their attempts:
// nothing is appended behind it. It may be repeated; the first end counts. What
// was declared and is not stored becomes a gap when the log is sealed.
func (t *Tx) EndLogs(ctx context.Context, ends []LogEnd, now int64) error {
	m := make(map[string]any, len(ends))
	for _, e := range ends {
		finals := make(map[LogStream]int64, len(e.Streams))
		for _, s := range e.Streams {
			finals[LogStream{s.Step, s.Stream}] = s.Length
		}
		m[string(e.Job)+"."+itoa(int(e.Epoch))] = map[string]any{"j": e.Job, "e": e.Epoch, "o": e.Org, "f": lengths(finals)}
	}
	return t.later(ctx, "LogsEnd", -1, "logs", object(m), now)
}

// Log returns an organisation's log.
func (t *Tx) Log(ctx context.Context, org ci.OrgID, k AttemptKey) (Log, bool, error) {
	return one(ctx, t, "LogGet", scanLog, k.Job, k.Epoch, org)
}

// EndedLogs returns up to limit logs that ended at or before a time and are not
// sealed, oldest first.
func (t *Tx) EndedLogs(ctx context.Context, beforeUS int64, limit int) ([]Log, error) {
	return query(ctx, t, "LogsEnded", scanLog, beforeUS, limit)
}

// releaseAtOnce is how many extents a log may have that are dropped when it is
// sealed; those of others are dropped behind that, in steps.
const releaseAtOnce = 200

// ReleasedLater reports whether the extents of a log are left when it is sealed.
func ReleasedLater(l Log) bool { return l.Extents > releaseAtOnce }

// SealLogs records the verified archives of ended logs and the objects that hold
// them, and drops the extents of those that have few. It returns the logs that
// were not sealed before: the archives of the others are nobody's, and an object
// that holds nothing else is not recorded.
func (t *Tx) SealLogs(ctx context.Context, logs []Log, objects []LogObject, now int64) (map[AttemptKey]bool, error) {
	m := make(map[string]any, len(logs))
	for i, l := range logs {
		left, releasing := int64(0), 0
		if ReleasedLater(l) {
			left, releasing = l.Extents, 1
		}
		m[itoa(i)] = map[string]any{
			"j": l.Job, "e": l.Epoch, "l": l.Lines, "g": l.Gap, "k": l.ArchiveKey, "p": l.ArchiveAt, "s": l.ArchiveSize,
			"i": l.IndexSize, "h": l.IndexDigest, "x": left, "r": releasing,
		}
	}
	rows, err := query(ctx, t, "LogsSeal", scanAttemptKey, object(m), now)
	if err != nil {
		return nil, err
	}
	won := make(map[AttemptKey]bool, len(rows))
	for _, k := range rows {
		won[k] = true
	}
	var drop []AttemptKey
	extents, held := int64(0), map[string]int64{}
	for _, l := range logs {
		if !won[l.Key()] {
			continue
		}
		held[l.ArchiveKey]++
		if l.Extents > 0 && !ReleasedLater(l) {
			drop = append(drop, l.Key())
			extents += l.Extents
		}
	}
	objects = slices.DeleteFunc(slices.Clone(objects), func(o LogObject) bool { return held[o.Key] == 0 })
	if len(objects) > 0 {
		if err := t.insertObjects(ctx, objects, held, now); err != nil {
			return nil, err
		}
	}
	if len(drop) == 0 {
		return won, nil
	}
	_, n, err := t.dropExtents(ctx, drop, int(extents))
	return won, changed(int64(n), int(extents), "log extents", err)
}

// ReleasingLogs returns sealed logs of which some extents are still to be dropped.
func (t *Tx) ReleasingLogs(ctx context.Context, limit int) ([]AttemptKey, error) {
	return query(ctx, t, "LogsReleasing", scanAttemptKey, limit)
}

// ReleaseExtents drops up to limit extents of sealed logs and what they held of
// their segments. It returns how many.
func (t *Tx) ReleaseExtents(ctx context.Context, ks []AttemptKey, limit int) (int, error) {
	logs, dropped, err := t.dropExtents(ctx, ks, limit)
	if err != nil || dropped == 0 {
		return 0, err
	}
	m := make(map[string]any, len(logs))
	for k, n := range logs {
		m[string(k.Job)+"."+itoa(int(k.Epoch))] = map[string]any{"j": k.Job, "e": k.Epoch, "n": n}
	}
	n, err := t.exec(ctx, "LogsReleased", object(m))
	return dropped, changed(n, len(logs), "logs", err)
}

// dropExtents drops up to limit extents of sealed logs and what they held of their
// segments. It returns how many, of each log and in all.
func (t *Tx) dropExtents(ctx context.Context, ks []AttemptKey, limit int) (map[AttemptKey]int64, int, error) {
	type row struct {
		key     AttemptKey
		segment string
	}
	rows, err := query(ctx, t, "LogExtentsRelease", func(r scanner, v *row) error {
		return r.Scan(&v.key.Job, &v.key.Epoch, &v.segment)
	}, attemptKeys(ks), limit)
	if err != nil || len(rows) == 0 {
		return nil, 0, err
	}
	logs, segments := map[AttemptKey]int64{}, map[string]int64{}
	for _, r := range rows {
		logs[r.key]++
		segments[r.segment]++
	}
	return logs, len(rows), t.unrefObjects(ctx, segments)
}

// unrefObjects counts references to objects down.
func (t *Tx) unrefObjects(ctx context.Context, refs map[string]int64) error {
	m := make(map[string]any, len(refs))
	for k, n := range refs {
		m[k] = map[string]any{"n": n}
	}
	return t.later(ctx, "LogObjectsUnref", len(refs), "log objects", object(m))
}

// FreeLogObjects returns up to limit objects that nothing refers to and that are
// older than a time. Nothing refers to one again: what did came with it.
func (t *Tx) FreeLogObjects(ctx context.Context, beforeUS int64, limit int) ([]string, error) {
	return query(ctx, t, "LogObjectsFree", scanString, beforeUS, limit)
}

// DeleteLogObjects forgets objects that have been deleted.
func (t *Tx) DeleteLogObjects(ctx context.Context, ks []string) error {
	_, err := t.exec(ctx, "LogObjectsDelete", keys(ks))
	return err
}

// KnownLogObjects returns those of the keys that are objects of logs.
func (t *Tx) KnownLogObjects(ctx context.Context, ks []string) (map[string]bool, error) {
	rows, err := query(ctx, t, "LogObjectsKnown", scanString, keys(ks))
	out := make(map[string]bool, len(rows))
	for _, r := range rows {
		out[r] = true
	}
	return out, err
}

// ExpireLogs marks up to limit logs sealed at or before a time as expired.
func (t *Tx) ExpireLogs(ctx context.Context, beforeUS int64, limit int) (int64, error) {
	return t.exec(ctx, "LogsExpire", beforeUS, limit)
}

// ExpiredLogs returns up to limit expired logs whose archive may still exist.
func (t *Tx) ExpiredLogs(ctx context.Context, limit int) ([]Log, error) {
	return query(ctx, t, "LogsExpired", scanLog, limit)
}

// ForgetArchives records that expired logs do not need their archives any more.
func (t *Tx) ForgetArchives(ctx context.Context, logs []Log) error {
	ks := make([]AttemptKey, len(logs))
	held := map[AttemptKey]string{}
	for i, l := range logs {
		ks[i] = l.Key()
		held[l.Key()] = l.ArchiveKey
	}
	rows, err := query(ctx, t, "LogsForget", scanAttemptKey, attemptKeys(ks))
	if err != nil || len(rows) == 0 {
		return err
	}
	refs := map[string]int64{}
	for _, k := range rows {
		refs[held[k]]++
	}
	return t.unrefObjects(ctx, refs)
}
