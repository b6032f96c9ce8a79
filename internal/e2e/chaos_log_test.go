package e2e_test

import (
	"crypto/sha256"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"testing"
	"time"

	"forgeci/internal/testkit"
)

// talk writes a lot, in pieces of very different sizes; talked is what comes out.
const talk = `#!/bin/sh
i=1
while [ $i -le 80 ]; do
	echo "piece $i"
	printf x
	seq $((i * 1000)) $((i * 1000 + 7 * i * (i % 5)))
	head -c $((i % 7 * 9000)) /dev/zero | tr '\0' "$((i % 10))"
	echo
	sleep 0.04
	i=$((i + 1))
done
touch "$SIGNS/talked"
`

func talked() string {
	var b strings.Builder
	for i := 1; i <= 80; i++ {
		fmt.Fprintf(&b, "piece %d\nx%s", i, numbers(i*1000, i*1000+7*i*(i%5)))
		b.WriteString(strings.Repeat(fmt.Sprint(i%10), i%7*9000))
		b.WriteByte('\n')
	}
	return b.String()
}

// The server is killed again and again while a job talks, and every request comes
// twice, late, and overtakes others: the log is what was written, to the byte.
func TestChaos_R15_ReceiverCrashes(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R15")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 15))
	for round := range setting[int]("rounds") {
		for name, conf := range some("R15", map[string]func(*testing.T) config{
			"sqlite and files": func(*testing.T) config { return config{ttl: calm} },
			"postgres and s3": func(t *testing.T) config {
				bucket := testkit.S3(t)
				return config{ttl: calm, database: testkit.StartPostgres(t, true).Database(t), blob: &bucket}
			},
		}) {
			seed := random.Uint64()
			t.Run(fmt.Sprint(round, " ", name), func(t *testing.T) {
				t.Parallel()
				random := mathrand.New(mathrand.NewPCG(seed, 0))
				w := newWorld(t, conf(t))
				network := testkit.NewRepeater(t, w.addr, seed, 20*time.Millisecond, 2*time.Second)
				m := w.machine("m")
				m.server = network.URL()
				m.start()
				id := w.submit("\n  - name: talk\n    steps: [./talk.sh]\n", map[string]string{"talk.sh": talk})
				crashes := 0
				for !w.there("talked") && crashes < 20 {
					pass(200*time.Millisecond + time.Duration(random.Int64N(int64(time.Second))))
					w.crash()
					w.serve()
					crashes++
				}
				sum.add("crashes", crashes)
				w.outcome(w.finished(id), "success", map[string]string{"talk": "success"})
				job := w.job(id, "talk")
				w.attempts(job, "success *")
				got, want := w.log(job.ID, 1, "stdout"), talked()
				if got != want {
					t.Errorf("the log has SHA-256 %x and %d bytes, want %x and %d", sha256.Sum256([]byte(got)), len(got), sha256.Sum256([]byte(want)), len(want))
				}
				sum.add("bytes", len(got))
				w.close()
			})
		}
	}
}

// The runner is killed while its job talks: what was acknowledged is kept, and
// what is kept is a beginning of what was written.
func TestChaos_R15_SenderCrashes(t *testing.T) {
	t.Parallel()
	sum := newTally(t, "R15-sender")
	random := mathrand.New(mathrand.NewPCG(setting[uint64]("seed"), 16))
	for round := range setting[int]("rounds") {
		after := time.Duration(random.Int64N(int64(3 * time.Second)))
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, config{ttl: calm})
			url, said := w.acknowledged(func() int { return 0 })
			m := w.machine("m")
			m.server = url
			m.start()
			id := w.submit("\n  - name: talk\n    steps: [./talk.sh]\n", map[string]string{"talk.sh": talk})
			w.until(patience, "the job to start", func() bool { return len(w.processes(1)) > 0 })
			pass(after)
			m.kill()
			w.gone(5 * time.Second)
			m.start() // reports that the attempt has ended
			w.finished(id)
			job := w.job(id, "talk")
			w.attempts(job, "aborted runner_restarted")
			got, acked := w.log(job.ID, 1, "stdout"), int64(0)
			for o, n := range said.by(0).length {
				if o.stream == "stdout" {
					acked = n
				}
			}
			if int64(len(got)) < acked || !strings.HasPrefix(talked(), got) {
				t.Errorf("%d bytes are kept, %d were acknowledged; a beginning of what was written: %v", len(got), acked, strings.HasPrefix(talked(), got))
			}
			sum.add("crashes", 1)
			sum.add("bytes acknowledged", int(acked))
			w.close()
		})
	}
}
