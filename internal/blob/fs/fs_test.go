package fs_test

import (
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"forgeci/internal/blob/blobtest"
	"forgeci/internal/blob/fs"
)

func TestStore(t *testing.T) {
	t.Parallel()
	blobtest.Run(t, func(t *testing.T) blobtest.Subject {
		var ahead atomic.Int64
		store, err := fs.Open(t.TempDir(), fs.Options{Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := store.Close(); err != nil {
				t.Error(err)
			}
		})
		server := httptest.NewServer(store.Handler(nil))
		t.Cleanup(server.Close)
		return blobtest.Subject{
			Store:         store,
			BaseURL:       server.URL,
			Pass:          func(d time.Duration) { ahead.Add(int64(d)) },
			VerifiesWhole: true,
		}
	})
}
