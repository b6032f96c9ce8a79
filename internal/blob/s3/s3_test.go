package s3_test

import (
	"testing"
	"time"

	"forgeci/internal/blob/blobtest"
	"forgeci/internal/blob/s3"
	"forgeci/internal/testkit"
)

func TestStore(t *testing.T) {
	t.Parallel()
	blobtest.Run(t, func(t *testing.T) blobtest.Subject {
		cfg := testkit.S3(t)
		cfg.Prefix = "in/the-bucket"
		store, err := s3.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		// The service's clock is the machine's.
		return blobtest.Subject{Store: store, Pass: time.Sleep} //nolint:forbidigo // the age of what a real store keeps
	})
}
