package store

import (
	"encoding/json"
	"reflect"
	"testing"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// What statements are given reads back as what was put in, whatever is in a text.
func TestObjectsReadBack(t *testing.T) {
	t.Parallel()
	n := int64(-7)
	in := map[string]any{
		"a": 1, "job_\"x\"": 1,
		"b": map[string]any{
			"plain": "text of a job", "quoted": "say \"hi\" \\ \n\t\x01", "wide": "größe 日本 \u2028", "broken": "\xff\xfe", "html": "<b>&amp;",
			"id": ci.JobID("job_1"), "state": ci.StateRunning, "n": int64(1) << 62, "i": 3, "stream": protocol.Stderr,
			"code": &n, "none": (*int64)(nil), "empty": "",
		},
	}
	want, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var got, expected any
	if err := json.Unmarshal([]byte(object(in)), &got); err != nil {
		t.Fatalf("%v: %s", err, object(in))
	}
	if err := json.Unmarshal(want, &expected); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, expected) {
		t.Errorf("%v, want %v", got, expected)
	}
	if got := object(nil); got != "{}" {
		t.Errorf("of nothing: %s", got)
	}
}
