// Package logs keeps what jobs write: it takes chunks from the attempts that own
// their jobs, makes them durable in groups, shows them while they arrive, and
// rewrites the log of an ended attempt into one compressed archive that can be
// read anywhere.
//
// # What is promised
//
// A byte that Append has acknowledged is in the object store and indexed in the
// database, and stays until an archive that holds it has been read back and
// verified. A byte that never arrived is a gap, a byte that a limit dropped a
// truncation: both are marked where they belong and nothing is invented. A chunk
// is known by its sequence number: the same chunk again is accepted, another one
// in its place refused.
//
// # Order and positions
//
// The order of a log is that of the sequence numbers its runner gave out. Every
// byte, also a dropped or lost one, has a position in that order; it is the same
// while the log grows, after it is sealed, and on every node, so a position is a
// cursor. What is visible of a log that grows is the part without a hole.
//
// A line is what one stream of one step writes up to a newline. Lines are
// numbered in the order in which they begin. A marker ends the line before it
// and begins one.
package logs

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// Config says what a Service works with. Zero values of limits mean the
// defaults.
type Config struct {
	Store *store.Store
	Blob  blob.Store
	Log   *slog.Logger
	// Incarnation of the database; part of every object's key.
	Incarnation string
	// Limit is how many bytes are stored of one attempt; DefaultLimit when 0.
	Limit int64
	// Pieces is in how many pieces they are stored at most; DefaultPieces when 0.
	// Each costs some memory when the log is sealed.
	Pieces int64
	// Window is how long the first chunk of a group waits for others. Zero suits
	// a local directory: a group is then what came while the last one was
	// written, or within 20 ms of it when it is busy. S3 wants 250 ms to 1 s.
	Window time.Duration
	// Writers is how many groups may be written at once; 1 when 0.
	Writers int
	// Memory bounds the bytes that wait to be stored, 32 MiB when 0; Cache those
	// of recent segments and frames kept for readers, 24 MiB when 0.
	Memory, Cache int64
	// Temp is the directory in which large archives are built; the system's when empty.
	Temp string
	// Retention is how long a sealed log is kept; 90 days when 0.
	Retention time.Duration
	// Poll is how often a follower looks for what other nodes stored, 1 s when 0.
	Poll time.Duration
	// LineText is how many bytes of one line are answered as text; 64 KiB when 0.
	LineText int
	// IDs makes the names of objects.
	IDs ci.IDSource
	// Monotonic is a clock that never jumps; nil means this process's.
	Monotonic func() time.Duration
	// Gather, when set and Run is not running, is called when chunks wait to be
	// stored and before those that wait are: the simulation, which has one thread,
	// makes other calls in it. nil: the chunks of each call are stored at once.
	Gather func()
}

// DefaultLimit is how much is stored of one attempt's log.
const DefaultLimit = 1 << 30

// DefaultPieces is in how many pieces one attempt's log is stored: with the usual
// delay of a runner, more than half a day of output without a pause.
const DefaultPieces = 1 << 20

// Service is the log service of one node. New starts nothing: calls work at once,
// each writing what waits by itself (Flush); Run adds groups that wait for others,
// sealing and collecting. All methods are safe for concurrent use.
type Service struct {
	cfg    Config
	budget *budget
	cache  *cache
	codec  *codec
	loads  chan struct{} // slots of concurrent loads from the store

	arrived chan struct{} // to the writers, capacity 1
	ended   chan struct{} // to the sealer, capacity 1

	sealing    sync.Mutex
	unrecorded []unrecorded // guarded by sealing

	mu sync.Mutex
	// guarded by mu
	queue    []*request
	queued   int64
	running  bool // writers of Run take what is queued
	stopped  bool
	hinted   map[store.AttemptKey]bool  // ended on this node, to be sealed at once
	doubted  map[store.AttemptKey]doubt // that could not be sealed for a reason of their own
	views    map[store.AttemptKey]*view
	clock    clock
	searched [2]searched // segments and archives, for orphans
}

// searched is how far objects have been searched for orphans: keys.
type searched struct {
	fresh string // of what comes of age; "" before the first time
	round string // of everything; "" at the beginning of a round
}

// clock remembers when the database's time was last read.
type clock struct {
	us int64
	at time.Duration // on the monotonic clock
}

// New returns a service that does not run yet.
func New(cfg Config) *Service {
	def(&cfg.Limit, DefaultLimit)
	def(&cfg.Pieces, DefaultPieces)
	def(&cfg.Writers, 1)
	def(&cfg.Memory, 32<<20)
	def(&cfg.Cache, 24<<20)
	def(&cfg.Retention, 90*24*time.Hour)
	def(&cfg.Poll, time.Second)
	def(&cfg.LineText, 64<<10)
	if cfg.Incarnation == "" {
		cfg.Incarnation = "0"
	}
	if cfg.Monotonic == nil {
		start := time.Now()
		cfg.Monotonic = func() time.Duration { return time.Since(start) }
	}
	return &Service{
		cfg: cfg, budget: newBudget(cfg.Memory), cache: newCache(cfg.Cache), codec: newCodec(),
		loads: make(chan struct{}, 8), arrived: make(chan struct{}, 1), ended: make(chan struct{}, 1),
		hinted: map[store.AttemptKey]bool{}, doubted: map[store.AttemptKey]doubt{}, views: map[store.AttemptKey]*view{},
	}
}

func def[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Run writes, seals and collects until ctx ends. Everything it started has ended
// when it returns; what waits to be written is answered ErrUnavailable.
func (s *Service) Run(ctx context.Context) error {
	s.mu.Lock()
	s.running = true
	s.mu.Unlock()
	var all sync.WaitGroup
	for range s.cfg.Writers {
		all.Go(func() { s.write(ctx) })
	}
	all.Go(func() { s.seal(ctx) })
	all.Go(func() { s.collect(ctx) })
	all.Wait()
	s.refuseAll()
	return ctx.Err()
}

// Ended is a hint, after the transaction that ended attempts (store.EndLogs) has
// committed on this node: their logs are sealed and followers told at once. A
// lost hint costs a few seconds.
func (s *Service) Ended(ks ...store.AttemptKey) {
	s.mu.Lock()
	for _, k := range ks {
		if len(s.hinted) < 10_000 {
			s.hinted[k] = true
		}
	}
	s.mu.Unlock()
	s.touch(ks...)
	wake(s.ended)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits for d, a wake-up or the end of ctx; it reports whether ctx goes on.
func pause(ctx context.Context, d time.Duration, woken <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-woken:
		return true
	case <-t.C:
		return true
	}
}

// now estimates the database's time, microseconds, without asking it more than
// once a minute. It dates objects; what counts is read in transactions.
func (s *Service) now(ctx context.Context) (int64, error) {
	s.mu.Lock()
	c := s.clock
	s.mu.Unlock()
	if age := s.cfg.Monotonic() - c.at; c.us != 0 && age < time.Minute {
		return c.us + age.Microseconds(), nil
	}
	var now int64
	err := s.cfg.Store.Read(ctx, func(tx *store.Tx) (err error) {
		now, err = tx.Now(ctx)
		return err
	})
	if err == nil {
		s.setNow(now)
	}
	return now, err
}

func (s *Service) setNow(us int64) {
	s.mu.Lock()
	s.clock = clock{us, s.cfg.Monotonic()}
	s.mu.Unlock()
}
