package runner

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/ci"
)

func TestCase_YAML_10_output_file_is_read_exactly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		file string
		want map[string]string
		line int    // of the error; -1 for an error without a line
		text string // in the error
	}{
		"empty":                   {file: "", want: map[string]string{}},
		"two values":              {file: "a=1\nb=2", want: map[string]string{"a": "1", "b": "2"}},
		"empty lines":             {file: "\n\na=1\n\n", want: map[string]string{"a": "1"}},
		"empty value":             {file: "a=\n", want: map[string]string{"a": ""}},
		"value with equals":       {file: "a=b=c\n", want: map[string]string{"a": "b=c"}},
		"value with marker":       {file: "a=b<<c\n", want: map[string]string{"a": "b<<c"}},
		"spaces are kept":         {file: "a= x \n", want: map[string]string{"a": " x "}},
		"carriage returns":        {file: "a=1\r\nb<<E\r\nx\r\ny\r\nE\r\n", want: map[string]string{"a": "1", "b": "x\ny"}},
		"block":                   {file: "m<<EOF\none\n\ntwo=2\nEOF\nb=2\n", want: map[string]string{"m": "one\n\ntwo=2", "b": "2"}},
		"block without lines":     {file: "m<<E\nE\n", want: map[string]string{"m": ""}},
		"delimiter with equals":   {file: "m<<a=b\nx\na=b\n", want: map[string]string{"m": "x"}},
		"indented end is body":    {file: "m<<E\n E\nE\n", want: map[string]string{"m": " E"}},
		"dash in name":            {file: "image-digest=x", want: map[string]string{"image-digest": "x"}},
		"block closed by body":    {file: "m<<EOF\nhello\nEOF\nNODE_OPTIONS=--require /tmp/x\nm2<<EOF\nrest\nEOF\n", line: 4, text: "NODE_OPTIONS is a reserved name"},
		"unterminated":            {file: "a=1\nm<<EOF\nx\n", line: 2, text: "no end"},
		"no delimiter":            {file: "m<<\nx\n", line: 1, text: "no delimiter"},
		"no name":                 {file: "=x\n", line: 1, text: "the name is empty"},
		"bad name":                {file: "a=1\nBAD NAME=1\n", line: 2, text: "BAD NAME"},
		"digit first":             {file: "1a=1\n", line: 1, text: "1a"},
		"unicode name":            {file: "naïve=1\n", line: 1, text: "is not a name"},
		"neither":                 {file: "a=1\njust text\n", line: 2, text: "just text"},
		"nul":                     {file: "a=1\nb=x\x00y\n", line: 2, text: "NUL"},
		"nul in block":            {file: "a<<E\nx\x00\nE\n", line: 2, text: "NUL"},
		"not utf-8":               {file: "a=caf\xe9\n", line: 1, text: "UTF-8"},
		"twice":                   {file: "a=1\nb=2\na=3\n", line: 3, text: "a is set already in line 1"},
		"path":                    {file: "PATH=/tmp\n", line: 1, text: "PATH is a reserved name"},
		"loader":                  {file: "LD_PRELOAD=/x\n", line: 1, text: "LD_PRELOAD is a reserved name"},
		"reserved in lower case":  {file: "ld_preload=/x\n", line: 1, text: "reserved"},
		"reserved prefix":         {file: "CI_TOKEN=x\n", line: 1, text: "reserved"},
		"reserved by block":       {file: "BASH_ENV<<E\nx\nE\n", line: 1, text: "reserved"},
		"two megabytes":           {file: "a=" + strings.Repeat("x", 2<<20), line: -1, text: "the limit is 1048576"},
		"name of 200 characters":  {file: strings.Repeat("n", 200) + "=x", line: 1, text: "longer than"},
		"escape in name is shown": {file: "a\x1b[2J=1\n", line: 1, text: `\x1b`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseOutput([]byte(c.file))
			if c.text == "" {
				if err != nil {
					t.Fatalf("refused: %v", err)
				}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Fatalf("values differ (-want +got):\n%s", diff)
				}
				return
			}
			var e *ci.Error
			if !errors.As(err, &e) || e.Kind != ci.ErrInvalid || len(e.Fields) != 1 {
				t.Fatalf("error is %v, want an invalid one with a place", err)
			}
			if want := max(c.line, 0); e.Fields[0].Line != want {
				t.Errorf("error names line %d, want %d", e.Fields[0].Line, want)
			}
			if !strings.Contains(e.Fields[0].Detail, c.text) {
				t.Errorf("error %q does not say %q", e.Fields[0].Detail, c.text)
			}
		})
	}
}

// Whatever is in the file, parsing ends, and every name it lets through is
// acceptable and every value is text that fits into JSON.
func FuzzParseOutput(f *testing.F) {
	f.Add([]byte("a=1\nb<<E\nx\nE\n"))
	f.Add([]byte("a<<=\n=\n"))
	f.Add([]byte("\r\n\x00=\n"))
	f.Fuzz(func(t *testing.T, file []byte) {
		values, err := parseOutput(file)
		if err != nil {
			if ci.KindOf(err) != ci.ErrInvalid {
				t.Fatalf("error of kind %s", ci.KindOf(err))
			}
			return
		}
		for name, value := range values {
			if checkOutputName(name) != nil || strings.ContainsRune(value, 0) || !strings.Contains(string(file), name) {
				t.Fatalf("accepted %q = %q", name, value)
			}
		}
	})
}
