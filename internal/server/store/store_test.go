package store_test

import (
	"log/slog"
	"testing"

	"forgeci/internal/server/store"
)

func TestEveryStatementPreparesOnSQLite(t *testing.T) {
	t.Parallel()
	s, err := store.Open(t.Context(), store.Options{URL: "sqlite:" + t.TempDir() + "/x.db", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.PrepareAll(t.Context()); err != nil {
		t.Fatal(err)
	}
}
