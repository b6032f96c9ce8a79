package server

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/server/auth"
	"forgeci/internal/server/engine"
	"forgeci/internal/server/store"
	"forgeci/internal/server/web"
)

// Runners come and go without a run that changes: who watches the fleet is told to
// look all the same, who watches runs is not.
func TestPagesOfTheFleetAreLive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		st, err := store.Open(t.Context(), store.Options{URL: "sqlite:" + t.TempDir() + "/db", Log: log})
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		e, err := engine.New(t.Context(), engine.Config{Store: st, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		p := pages{engine: e}
		count := func(topic web.Topic) (n int) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			got, err := p.Watch(ctx, auth.Viewer{Org: "org_1"}, topic)
			if err != nil {
				t.Fatal(err)
			}
			for range got {
				n++
			}
			return n
		}
		if n := count(web.Topic{Fleet: true}); n < 10 || n > 12 {
			t.Errorf("%d hints about the fleet in a minute, want one every 5 s", n)
		}
		if n := count(web.Topic{}); n != 0 {
			t.Errorf("%d hints about runs in a minute without any", n)
		}

		changes := make(chan ci.RunID, 1)
		changes <- "run_1"
		close(changes)
		var all []web.Hint
		for h := range hints(t.Context(), changes, func() {}, time.Hour) {
			all = append(all, h)
		}
		if len(all) != 1 || all[0].Run != "run_1" {
			t.Errorf("hints %v, want the change alone", all)
		}
	})
}
