package store

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"unicode/utf8"

	"forgeci/internal/ci"
)

// The rows that engine loads, changes and writes back. Instants are
// microseconds in the database's time, 0 = not yet.

// Org is a tenant.
type Org struct {
	ID           ci.OrgID
	Name         string
	Weight       int64
	JobLimit     int64 // 0 = no limit
	Admitted     int64 // opened + running jobs
	VFT          int64
	RetryDefault string
	AuditSeq     int64
	AuditHash    string
}

func scanOrg(r scanner, v *Org) error {
	return r.Scan(&v.ID, &v.Name, &v.Weight, &v.JobLimit, &v.Admitted, &v.VFT, &v.RetryDefault, &v.AuditSeq, &v.AuditHash)
}

// Credential is a stored token: its hash finds it.
type Credential struct {
	ID        string
	Org       ci.OrgID
	Kind      string
	Actor     string
	Runner    ci.RunnerID
	CreatedUS int64
	ExpiresUS int64
	RevokedUS int64
}

func scanCredential(r scanner, v *Credential) error {
	return r.Scan(&v.ID, &v.Org, &v.Kind, &v.Actor, &v.Runner, &v.CreatedUS, &v.ExpiresUS, &v.RevokedUS)
}

// Repo is a repository.
type Repo struct {
	ID           ci.RepoID
	Org          ci.OrgID
	Host         string
	Name         string
	RetryDefault string
}

func scanRepo(r scanner, v *Repo) error {
	return r.Scan(&v.ID, &v.Org, &v.Host, &v.Name, &v.RetryDefault)
}

// Source is a published snapshot.
type Source struct {
	Digest     string
	BlobKey    string
	BlobDigest string
	Size       int64
	Files      int64
	Bytes      int64
	UsedUS     int64
}

func scanSource(r scanner, v *Source) error {
	return r.Scan(&v.Digest, &v.BlobKey, &v.BlobDigest, &v.Size, &v.Files, &v.Bytes, &v.UsedUS)
}

// Run is one run.
type Run struct {
	ID             ci.RunID
	Org            ci.OrgID
	Repo           ci.RepoID
	Number         int64
	Parent         ci.RunID
	Workflow       string
	Path           string
	WorkflowDigest string
	SourceDigest   string
	Plan           string // ci.Plan without jobs, JSON
	Event          string
	CommitSHA      string
	Ref            string
	Message        string
	Author         string
	Dirty          int64
	Actor          string
	Trust          ci.Trust
	RetryDefault   string
	Priority       int64
	State          ci.State
	Conclusion     ci.Conclusion
	Reason         ci.Reason
	CancelVersion  int64
	JobsLeft       int64
	Failed         int64
	TimedOut       int64
	Infra          int64
	Warn           int64
	CreatedUS      int64
	StartedUS      int64
	FinishedUS     int64

	wasState  ci.State
	wasCancel int64
}

func scanRun(r scanner, v *Run) error {
	err := r.Scan(&v.ID, &v.Org, &v.Repo, &v.Number, &v.Parent, &v.Workflow, &v.Path, &v.WorkflowDigest, &v.SourceDigest,
		&v.Plan, &v.Event, &v.CommitSHA, &v.Ref, &v.Message, &v.Author, &v.Dirty, &v.Actor, &v.Trust, &v.RetryDefault,
		&v.Priority, &v.State, &v.Conclusion, &v.Reason, &v.CancelVersion, &v.JobsLeft, &v.Failed, &v.TimedOut, &v.Infra,
		&v.Warn, &v.CreatedUS, &v.StartedUS, &v.FinishedUS)
	v.wasState, v.wasCancel = v.State, v.CancelVersion
	return err
}

// Job is one job without its spec.
type Job struct {
	ID           ci.JobID
	Run          ci.RunID
	Org          ci.OrgID
	Index        int64
	Name         string
	Key          string
	TimeoutUS    int64
	Shape        string
	Prio         int64
	Chain        int64
	AllowFailure int64
	OperationID  string
	NeedsLeft    int64
	State        ci.State
	Conclusion   ci.Conclusion
	Reason       ci.Reason
	Detail       string
	Generation   int64
	Epoch        int64
	Phase        ci.Phase
	InfraUsed    int64
	GrantedUsed  int64
	ExitCode     *int64
	Outputs      string
	PinnedFrom   ci.JobID
	DeadUS       int64
	RequeuedRun  ci.RunID
	ReadyUS      int64
	StartedUS    int64
	FinishedUS   int64

	wasState ci.State
	wasEpoch int64
}

func scanJob(r scanner, v *Job) error {
	var exit sql.NullInt64
	err := r.Scan(&v.ID, &v.Run, &v.Org, &v.Index, &v.Name, &v.Key, &v.TimeoutUS, &v.Shape, &v.Prio, &v.Chain, &v.AllowFailure,
		&v.OperationID, &v.NeedsLeft, &v.State, &v.Conclusion, &v.Reason, &v.Detail, &v.Generation, &v.Epoch, &v.Phase,
		&v.InfraUsed, &v.GrantedUsed, &exit, &v.Outputs, &v.PinnedFrom, &v.DeadUS, &v.RequeuedRun, &v.ReadyUS,
		&v.StartedUS, &v.FinishedUS)
	v.ExitCode = nullInt(exit)
	v.wasState, v.wasEpoch = v.State, v.Epoch
	return err
}

func nullInt(n sql.NullInt64) *int64 {
	if !n.Valid {
		return nil
	}
	return &n.Int64
}

// Need is a job that another needs, with what came of it.
type Need struct {
	Of           ci.JobID
	ID           ci.JobID
	Key          string
	Name         string
	State        ci.State
	Conclusion   ci.Conclusion
	AllowFailure int64
	Outputs      string
}

func scanNeed(r scanner, v *Need) error {
	return r.Scan(&v.Of, &v.ID, &v.Key, &v.Name, &v.State, &v.Conclusion, &v.AllowFailure, &v.Outputs)
}

// Attempt is one execution of a job.
type Attempt struct {
	Job          ci.JobID
	Epoch        int64
	Run          ci.RunID
	Org          ci.OrgID
	Runner       ci.RunnerID
	Session      ci.SessionID
	Lease        ci.LeaseID
	ClaimRequest string
	State        ci.State
	Phase        ci.Phase
	Conclusion   ci.Conclusion
	Reason       ci.Reason
	Detail       string
	Winner       int64
	Evidence     string
	ExitCode     *int64
	EndRequest   string
	EndDigest    string
	EndAnswer    string
	ClaimedUS    int64
	ExecutingUS  int64
	EndedUS      int64
}

// Ref returns the lease tuple under which the attempt was made.
func (a Attempt) Ref() ci.LeaseRef {
	return ci.LeaseRef{Run: a.Run, Job: a.Job, Runner: a.Runner, Session: a.Session, Lease: a.Lease, Epoch: a.Epoch}
}

func scanAttempt(r scanner, v *Attempt) error {
	var exit sql.NullInt64
	err := r.Scan(&v.Job, &v.Epoch, &v.Run, &v.Org, &v.Runner, &v.Session, &v.Lease, &v.ClaimRequest, &v.State, &v.Phase,
		&v.Conclusion, &v.Reason, &v.Detail, &v.Winner, &v.Evidence, &exit, &v.EndRequest, &v.EndDigest, &v.EndAnswer,
		&v.ClaimedUS, &v.ExecutingUS, &v.EndedUS)
	v.ExitCode = nullInt(exit)
	return err
}

// Lease is one live lease.
type Lease struct {
	Job        ci.JobID
	Run        ci.RunID
	Org        ci.OrgID
	ID         ci.LeaseID
	Runner     ci.RunnerID
	Session    ci.SessionID
	Epoch      int64
	Cancel     int64
	DeadlineUS int64
	ExpiresUS  int64
}

// Ref returns the ownership tuple.
func (l Lease) Ref() ci.LeaseRef {
	return ci.LeaseRef{Run: l.Run, Job: l.Job, Runner: l.Runner, Session: l.Session, Lease: l.ID, Epoch: l.Epoch}
}

func scanLease(r scanner, v *Lease) error {
	return r.Scan(&v.Job, &v.Run, &v.Org, &v.ID, &v.Runner, &v.Session, &v.Epoch, &v.Cancel, &v.DeadlineUS, &v.ExpiresUS)
}

// Queued is a row at the head of a shape's order.
type Queued struct {
	Job        ci.JobID
	Run        ci.RunID
	Org        ci.OrgID
	Prio       int64
	VFT        int64
	Generation int64
}

func scanQueued(r scanner, v *Queued) error {
	return r.Scan(&v.Job, &v.Run, &v.Org, &v.Prio, &v.VFT, &v.Generation)
}

// Runner is a registered runner.
type Runner struct {
	ID        ci.RunnerID
	Org       ci.OrgID
	Name      string
	PublicKey string
	Granted   string
	Status    string
	Session   ci.SessionID // its latest
}

func scanRunner(r scanner, v *Runner) error {
	return r.Scan(&v.ID, &v.Org, &v.Name, &v.PublicKey, &v.Granted, &v.Status, &v.Session)
}

// Session is one process life of a runner.
type Session struct {
	ID         ci.SessionID
	Org        ci.OrgID
	Runner     ci.RunnerID
	RequestID  string
	Offer      string // offer ID
	Slots      int64
	Protocol   int64
	Version    string
	Present    int64
	State      string // open, draining, ended
	OpenedUS   int64
	GoneUS     int64
	RunnerName string
	Status     string // of the runner
	Occupied   int64  // slots taken, quarantined ones included
}

func scanSession(r scanner, v *Session) error {
	return r.Scan(&v.ID, &v.Org, &v.Runner, &v.RequestID, &v.Offer, &v.Slots, &v.Protocol, &v.Version, &v.Present,
		&v.State, &v.OpenedUS, &v.GoneUS, &v.RunnerName, &v.Status, &v.Occupied)
}

// Step is one step record.
type Step struct {
	Index      int64
	Name       string
	State      ci.State
	Conclusion ci.Conclusion
	Reason     ci.Reason
	ExitCode   *int64
	Signal     string
	DurationUS int64
}

func scanStep(r scanner, v *Step) error {
	var exit sql.NullInt64
	err := r.Scan(&v.Index, &v.Name, &v.State, &v.Conclusion, &v.Reason, &exit, &v.Signal, &v.DurationUS)
	v.ExitCode = nullInt(exit)
	return err
}

// Artifact is one generation.
type Artifact struct {
	ID        string
	Org       ci.OrgID
	Run       ci.RunID
	Job       ci.JobID
	Epoch     int64
	Name      string
	BlobKey   string
	Size      int64
	Digest    string
	Files     int64
	Bytes     int64
	State     string
	CreatedUS int64
	ExpiresUS int64
}

func (v *Artifact) fields() []any {
	return []any{
		&v.ID, &v.Org, &v.Run, &v.Job, &v.Epoch, &v.Name, &v.BlobKey, &v.Size, &v.Digest, &v.Files, &v.Bytes,
		&v.State, &v.CreatedUS, &v.ExpiresUS,
	}
}

func scanArtifact(r scanner, v *Artifact) error { return r.Scan(v.fields()...) }

// Binding makes an artifact generation a job's output in a run.
type Binding struct {
	Job      ci.JobID
	Name     string
	Artifact Artifact
}

func scanBinding(r scanner, v *Binding) error {
	return r.Scan(append([]any{&v.Job, &v.Name}, v.Artifact.fields()...)...)
}

// Audit is one entry of an organisation's trail.
type Audit struct {
	Org    ci.OrgID
	Seq    int64
	AtUS   int64
	Actor  string
	Action string
	Run    ci.RunID
	Job    ci.JobID
	Epoch  int64
	Object string
	Detail string
	Hash   string
}

func scanAudit(r scanner, v *Audit) error {
	return r.Scan(&v.Seq, &v.AtUS, &v.Actor, &v.Action, &v.Run, &v.Job, &v.Epoch, &v.Object, &v.Detail, &v.Hash)
}

// object renders a JSON object for a set-based statement: rows by key, each a value
// or an object of columns. The keys are sorted, or are by PostgreSQL, which gives
// every caller the same order of locks. It is on every hot path: encoding/json took
// 8 % of a busy server for it.
func object(m map[string]any) string {
	b := make([]byte, 0, 64*len(m)+2)
	b = append(b, '{')
	for i, k := range slices.Sorted(maps.Keys(m)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendText(b, k), ':')
		row, isRow := m[k].(map[string]any)
		if !isRow {
			b = appendValue(b, m[k])
			continue
		}
		b = append(b, '{')
		first := true
		for name, v := range row { // in any order: statements ask for fields by name
			if !first {
				b = append(b, ',')
			}
			first = false
			b = appendValue(append(appendText(b, name), ':'), v)
		}
		b = append(b, '}')
	}
	return string(append(b, '}'))
}

// appendValue appends what a column holds: text, a number, or null.
func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case string:
		return appendText(b, v)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case int:
		return strconv.AppendInt(b, int64(v), 10)
	case *int64:
		if v == nil {
			return append(b, "null"...)
		}
		return strconv.AppendInt(b, *v, 10)
	}
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.String:
		return appendText(b, r.String())
	case reflect.Uint8:
		return strconv.AppendUint(b, r.Uint(), 10)
	default:
		panic(fmt.Sprintf("store: a column does not hold %T", v))
	}
}

// appendText appends a JSON string. Most need no escaping.
func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= utf8.RuneSelf || c == '"' || c == '\\' {
			text, err := json.Marshal(s)
			if err != nil {
				panic("store: " + err.Error()) // a string always has a text
			}
			return append(b, text...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

// keys renders a set of IDs as the keys of a JSON object.
func keys[T ~string](ids []T) string {
	m := make(map[string]any, len(ids))
	for _, id := range ids {
		m[string(id)] = 1
	}
	return object(m)
}

// refs renders lease tuples for {{lease_is_current}}; extra adds fields by job.
func refs(rs []ci.LeaseRef, extra func(i int, fields map[string]any)) string {
	m := make(map[string]any, len(rs))
	for i, r := range rs {
		f := map[string]any{"r": r.Run, "l": r.Lease, "e": r.Epoch, "n": r.Runner, "s": r.Session}
		if extra != nil {
			extra(i, f)
		}
		m[string(r.Job)] = f
	}
	return object(m)
}
