package histories

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"forgeci/internal/testkit"
)

func TestMain(m *testing.M) {
	flag.Int("histories", 18, "how many histories TestHistories records; one in six on SQLite")
	flag.Uint64("seed", 1, "the first one's seed")
	flag.String("summary", "", "file for the one JSON object that TestHistories comes to")
	flag.Parse()
	os.Exit(m.Run())
}

func setting[T any](name string) T {
	v, _ := flag.Lookup(name).Value.(flag.Getter).Get().(T)
	return v
}

func newRand(seed, stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }

// checkFor bounds the search for an order of one history.
const checkFor = 60 * time.Second

// perWorld is how many histories share a database, one behind the other.
const perWorld = 25

// summary is what the recorded histories come to.
type summary struct {
	Histories    int      `json:"histories"`
	Operations   int      `json:"operations"`
	Linearizable int      `json:"linearizable"`
	Unknown      int      `json:"unknown"`
	Databases    []string `json:"databases"`
}

// What concurrent clients see of the lease calls is what one caller after the
// other would have seen, on both databases, whatever fails.
func TestHistories(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	sum := summary{Databases: []string{}}
	n, seed := setting[int]("histories"), setting[uint64]("seed")
	urls := map[string]func(*testing.T) string{
		"sqlite":   func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/forgeci.db" },
		"postgres": func(t *testing.T) string { return testkit.Postgres(t) },
	}
	todo := map[string][]uint64{}
	for i := range n {
		name := "postgres"
		if i%6 == 5 {
			name = "sqlite"
		}
		todo[name] = append(todo[name], seed+uint64(i))
	}
	t.Cleanup(func() { report(t, sum, n) })
	for name, seeds := range todo {
		for chunk := range slices.Chunk(seeds, perWorld) {
			t.Run(fmt.Sprintf("%s/%d", name, chunk[0]), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, urls[name](t))
				engine, version, err := w.store.Engine(w.ctx)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range chunk {
					ops, verdict := w.play(s)
					mu.Lock()
					sum.Histories++
					sum.Operations += ops
					if database := engine + " " + version; !slices.Contains(sum.Databases, database) {
						sum.Databases = append(sum.Databases, database)
					}
					switch verdict {
					case porcupine.Ok:
						sum.Linearizable++
					case porcupine.Unknown:
						sum.Unknown++
					case porcupine.Illegal:
					}
					mu.Unlock()
					if verdict != porcupine.Ok {
						break // one that has failed is enough of this database
					}
				}
				w.settled()
			})
		}
	}
}

// play records a history and judges it.
func (w *world) play(seed uint64) (int, porcupine.CheckResult) {
	w.t.Helper()
	h, err := w.newHistory(seed)
	defer h.leave()
	if err != nil {
		w.t.Fatal(err)
	}
	h.live()
	if err := h.finish(); err != nil {
		w.t.Errorf("stuck: %v\n%s", err, h.tell(facts{}, h.events(facts{}), nil))
		return len(h.ops), porcupine.Illegal
	}
	f, err := h.facts()
	if err != nil {
		w.t.Fatal(err)
	}
	all := h.events(f)
	for _, bad := range h.contradictions(f) {
		w.t.Errorf("%s\n%s", bad, h.tell(f, all, nil))
	}
	model := h.spec.model()
	verdict, info := porcupine.CheckOperationsVerbose(model, all, checkFor)
	switch verdict {
	case porcupine.Ok:
	case porcupine.Unknown:
		w.t.Errorf("no order was found or excluded in %s\n%s", checkFor, h.tell(f, all, nil))
	case porcupine.Illegal:
		best := longest(info)
		done := map[int]bool{}
		for _, i := range best {
			done[i] = true
		}
		w.t.Errorf("no order of the calls explains their answers; ! marks what the longest possible beginning leaves out\n%s\n%s", h.tell(f, all, done), h.replay(all, best))
	}
	return len(all), verdict
}

// longest returns the longest order of operations that was found.
func longest(info porcupine.LinearizationInfo) (best []int) {
	for _, part := range info.PartialLinearizations() {
		for _, order := range part {
			if len(order) > len(best) {
				best = order
			}
		}
	}
	return best
}

// replay tells the end of an order and the model's state behind it.
func (h *history) replay(all []porcupine.Operation, order []int) string {
	var b strings.Builder
	m := h.spec.model()
	s := m.Init()
	for n, i := range order {
		_, s = m.Step(s, all[i].Input, all[i].Output)
		if n > len(order)-25 {
			fmt.Fprintf(&b, "  ordered: %v: %v\n", all[i].Input, all[i].Output)
		}
	}
	fmt.Fprintf(&b, "  the model's state then: %s\n", s.(*state).text) //nolint:forcetypeassert // made by Step
	return b.String()
}

// settled asserts what must hold of a database's rows after any history.
func (w *world) settled() {
	w.t.Helper()
	bad, err := w.store.Inconsistencies(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, b := range bad {
		w.t.Error("inconsistent: " + b)
	}
}

func report(t *testing.T, sum summary, wanted int) {
	t.Helper()
	slices.Sort(sum.Databases)
	text, err := json.Marshal(sum)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(string(text))
	if file := setting[string]("summary"); file != "" {
		if err := os.WriteFile(file, append(text, '\n'), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if sum.Linearizable != wanted {
		t.Errorf("%d of %d histories are linearizable", sum.Linearizable, wanted)
	}
}
