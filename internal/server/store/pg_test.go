package store_test

import (
	"log/slog"
	"testing"

	"forgeci/internal/server/store"
	"forgeci/internal/testkit"
)

func TestEveryStatementPreparesOnPostgres(t *testing.T) {
	t.Parallel()
	s, err := store.Open(t.Context(), store.Options{URL: testkit.Postgres(t), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.PrepareAll(t.Context()); err != nil {
		t.Fatal(err)
	}
}
