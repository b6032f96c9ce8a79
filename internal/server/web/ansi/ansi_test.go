package ansi_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"forgeci/internal/server/web/ansi"
)

type tableCase struct {
	Name  string
	Input string
	Lines []ansi.Line
}

// table is the one list of cases that this package and the browser's ansi.js hold to.
func table(t testing.TB) []tableCase {
	t.Helper()
	b, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []tableCase
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

func render(r *ansi.Renderer, pieces ...string) []ansi.Line {
	var lines []ansi.Line
	for _, p := range pieces {
		lines = append(lines, r.Feed(p)...)
	}
	if l, any := r.Pending(); any {
		lines = append(lines, l)
	}
	return lines
}

func TestCase_LOG_11_TableOfTerminalText(t *testing.T) {
	t.Parallel()
	for _, c := range table(t) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			var r ansi.Renderer
			if diff := cmp.Diff(c.Lines, render(&r, c.Input)); diff != "" {
				t.Errorf("input %q (-want +got):\n%s", c.Input, diff)
			}
		})
	}
}

func TestRendererGivesTheSameWhereverTextIsCut(t *testing.T) {
	t.Parallel()
	for _, c := range table(t) {
		if len(c.Input) > 1000 {
			continue
		}
		for at := range c.Input {
			var r ansi.Renderer
			if diff := cmp.Diff(c.Lines, render(&r, c.Input[:at], c.Input[at:])); diff != "" {
				t.Errorf("%s: cut at %d (-want +got):\n%s", c.Name, at, diff)
			}
		}
	}
}

func TestLineGivesWhatFeedGives(t *testing.T) {
	t.Parallel()
	for _, c := range table(t) {
		var whole, single ansi.Renderer
		want := whole.Feed(c.Input + "\n")
		for i, text := range strings.Split(c.Input, "\n") {
			if diff := cmp.Diff(want[i], single.Line(text)); diff != "" {
				t.Errorf("%s: line %d (-feed +line):\n%s", c.Name, i, diff)
			}
		}
	}
}

func TestDecoderPutsCharactersTogetherWhereverBytesAreCut(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"aé€😀z":            "aé€😀z",
		"\xff\xfe":         "\ufffd\ufffd",
		"a\xe2\x82":        "a\ufffd",
		"\xe2\x82b":        "\ufffdb",
		"\xf0\x9f\x98a":    "\ufffda",
		"\xed\xa0\x80":     "\ufffd\ufffd\ufffd",
		"\xc0\x80":         "\ufffd\ufffd",
		"\xf5\x80\x80\x80": "\ufffd\ufffd\ufffd\ufffd",
		"\x00":             "\x00",
	} {
		for i := range len(in) + 1 {
			for j := i; j <= len(in); j++ {
				var d ansi.Decoder
				got := d.Decode([]byte(in[:i])) + d.Decode([]byte(in[i:j])) + d.Decode([]byte(in[j:])) + d.Flush()
				if got != want {
					t.Errorf("Decode(%q) cut at %d and %d = %q, want %q", in, i, j, got, want)
				}
			}
		}
	}
}

func TestVisibleNamesWhatDeceives(t *testing.T) {
	t.Parallel()
	if got, want := ansi.Visible("evil\u202etxt.exe"), "evil⟨U+202E⟩txt.exe"; got != want {
		t.Errorf("Visible = %q, want %q", got, want)
	}
	if got := ansi.Visible("schön"); got != "schön" {
		t.Errorf("Visible changed harmless text to %q", got)
	}
}

func TestStylesheetKeepsEveryForegroundReadable(t *testing.T) {
	t.Parallel()
	for _, theme := range []ansi.Theme{ansi.Light(), ansi.Dark()} {
		for i := range 256 {
			c := theme.Foreground(i)
			if got := ansi.Contrast(c, theme.Background); got < 4.5 {
				t.Errorf("%s: colour %d is %s with contrast %.2f, want at least 4.5", theme.Name, i, c, got)
			}
		}
	}
	if got := len(ansi.Stylesheet()); got > 40<<10 {
		t.Errorf("the stylesheet has %d bytes", got)
	}
}

func FuzzRenderer(f *testing.F) {
	b, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		f.Fatal(err)
	}
	var cases []tableCase
	if err := json.Unmarshal(b, &cases); err != nil {
		f.Fatal(err)
	}
	for _, c := range cases {
		f.Add([]byte(c.Input), 3)
	}
	f.Fuzz(func(t *testing.T, in []byte, at int) {
		at = min(max(at, 0), len(in))
		var d, e ansi.Decoder
		whole := d.Decode(in) + d.Flush()
		if cut := e.Decode(in[:at]) + e.Decode(in[at:]) + e.Flush(); cut != whole {
			t.Fatalf("decoded differently when cut at %d: %q, %q", at, cut, whole)
		}
		if !utf8.ValidString(whole) {
			t.Fatalf("decoded to invalid UTF-8: %q", whole)
		}
		var r ansi.Renderer
		lines := render(&r, whole)
		html := ansi.HTML(lines)
		checkSafe(t, lines, html)
	})
}

// checkSafe fails unless html holds nothing but what HTML may write: a closed
// set of tags and attributes, and text without markup.
func checkSafe(t *testing.T, lines []ansi.Line, html string) {
	t.Helper()
	for _, l := range lines {
		for _, s := range l.Spans {
			for i := range len(s.Class) {
				if c := s.Class[i]; c != ' ' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
					t.Fatalf("class %q", s.Class)
				}
			}
			if s.Href != "" && !strings.HasPrefix(strings.ToLower(s.Href), "http://") && !strings.HasPrefix(strings.ToLower(s.Href), "https://") {
				t.Fatalf("link to %q", s.Href)
			}
			for _, c := range s.Text {
				if c < 0x20 && c != '\t' || ansi.Deceptive(c) || c >= 0x7f && c < 0xa0 {
					t.Fatalf("text %q holds a control character", s.Text)
				}
			}
		}
	}
	for rest := html; ; {
		_, after, ok := strings.Cut(rest, "<")
		if !ok {
			return
		}
		tag, after, ok := strings.Cut(after, ">")
		if !ok {
			t.Fatalf("unclosed tag in %q", html)
		}
		name, attrs, _ := strings.Cut(tag, " ")
		switch name {
		case "/span", "/a":
			if attrs != "" {
				t.Fatalf("tag %q", tag)
			}
		case "span", "a":
			if strings.ContainsAny(attrs, "<>'`") || strings.Contains(attrs, " on") {
				t.Fatalf("tag %q", tag)
			}
		default:
			t.Fatalf("tag %q", tag)
		}
		rest = after
	}
}
