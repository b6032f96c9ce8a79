package cli

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"
)

func filtered(t testing.TB, color, reset bool, pieces ...string) string {
	t.Helper()
	var b bytes.Buffer
	f := &logFilter{w: &b, color: color, resetLines: reset}
	for _, p := range pieces {
		n, err := f.Write([]byte(p))
		if err != nil || n != len(p) {
			t.Fatalf("wrote %d of %d: %v", n, len(p), err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestCase_CLI_02_terminal(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, in, want string }{
		{"plain text", "hello\nworld\n", "hello\nworld\n"},
		{"no line end", "hello", "hello"},
		{"empty lines", "\n\na\n\n", "\n\na\n\n"},
		{"tabs", "a\tb\n", "a\tb\n"},
		{"other scripts", "grün 日本 🙂\n", "grün 日本 🙂\n"},
		{"colours", "\x1b[31mred\x1b[0m\n", "\x1b[31mred\x1b[0m\n"},
		{"colours of many kinds", "\x1b[1;38:2::1:2:3mx\x1b[m\n", "\x1b[1;38:2::1:2:3mx\x1b[m\n"},
		{"colours end with the log", "\x1b[31mred\n", "\x1b[31mred\n\x1b[0m"},
		{"cursor movement vanishes", "a\x1b[2J\x1b[1;1H\x1b[1Ab\n", "ab\n"},
		{"private modes vanish", "a\x1b[?25l\x1b[?1049hb\n", "ab\n"},
		{"a title vanishes", "a\x1b]0;owned\x07b\n", "ab\n"},
		{"a link vanishes, its text stays", "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\\n", "text\n"},
		{"device control vanishes", "a\x1bP+q\x1b\\b\n", "ab\n"},
		{"character sets vanish", "a\x1b(0b\x1b)Bc\n", "abc\n"},
		{"reset vanishes", "a\x1bcb\n", "ab\n"},
		{"an escape that begins nothing", "a\x1b\nb\n", "a^[\nb\n"},
		{"a sequence that is cut", "a\x1b[31", "a^[[31"},
		{"a title without end in its line", "a\x1b]0;x\nb\n", "a^[]0;x\nb\n"},
		{"a title without any end", "\x1b]0;" + strings.Repeat("x", 5000), "^[]0;" + strings.Repeat("x", 5000)},
		{"bell, backspace, delete", "\x07\b\x7f\n", "^G^H^?\n"},
		{"NUL and form feed", "\x00\x0c\n", "^@^L\n"},
		{"C1 controls as characters", "\u009bm\u0085\n", `\u009bm\u0085` + "\n"},
		{"C1 controls as bytes", "\x9b31m\n", `\x9b31m` + "\n"},
		{"not UTF-8", "\xff\xfe\x00\n", `\xff\xfe^@` + "\n"},
		{"cut UTF-8", "caf\xc3", `caf\xc3`},
		{"direction of writing", "a\u202eb\u2066c\n", `a\u202eb\u2066c` + "\n"},
		{"line separators", "a\u2028b\n", `a\u2028b` + "\n"},
		{"progress", "10%\r20%\r100%\n", "10%\n20%\n100%\n"},
		{"Windows line ends", "a\r\nb\r\r\n\r\n", "a\nb\n\n"},
		{"progress without end", "10%\r", "10%"},
		{"return at the start", "\rx\n", "x\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := filtered(t, true, false, tc.in); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			// Where the bytes are cut makes no difference.
			for i := range tc.in {
				if got := filtered(t, true, false, tc.in[:i], tc.in[i:]); got != tc.want {
					t.Fatalf("cut at %d: got %q, want %q", i, got, tc.want)
				}
			}
			if len(tc.in) < 100 {
				if got := filtered(t, true, false, strings.Split(tc.in, "")...); got != tc.want {
					t.Errorf("byte by byte: got %q, want %q", got, tc.want)
				}
			}
		})
	}
	if got := filtered(t, false, false, "\x1b[31mred\x1b[0m\n"); got != "red\n" {
		t.Errorf("without colours: got %q", got)
	}
	if got := filtered(t, true, true, "\x1b[31mred\nplain\n"); got != "\x1b[31mred\x1b[0m\nplain\n" {
		t.Errorf("lines of several jobs: got %q", got)
	}
}

// Whatever comes in, what goes out is UTF-8 whose only control characters are
// line ends, tabs and colours.
func FuzzLogFilter(f *testing.F) {
	f.Add([]byte("\x1b[31mred\x1b[0m\r\n\x1b]8;;x\x07\xff\xc3"), 3)
	f.Add([]byte("\x1bP\x1b\\\x1b[?1;2h\u009b\u202e"), 1)
	f.Fuzz(func(t *testing.T, in []byte, cut int) {
		whole := filtered(t, true, false, string(in))
		if cut >= 0 && cut <= len(in) {
			if got := filtered(t, true, false, string(in[:cut]), string(in[cut:])); got != whole {
				t.Errorf("cut at %d: got %q, want %q", cut, got, whole)
			}
		}
		if !utf8.ValidString(whole) {
			t.Errorf("not UTF-8: %q", whole)
		}
		for rest := whole; rest != ""; {
			if rest[0] == 0x1b {
				n, kind := escapeLength([]byte(rest))
				if kind != escapeColor {
					t.Fatalf("an escape sequence that is no colour: %q", rest[:min(len(rest), 20)])
				}
				rest = rest[n:]
				continue
			}
			r, n := utf8.DecodeRuneInString(rest)
			if hidden(r) && r != '\n' && r != '\t' {
				t.Fatalf("control character %U in %q", r, whole)
			}
			rest = rest[n:]
		}
	})
}

func TestPrefixer(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	p := &prefixer{w: &b, prefix: "job | "}
	for _, s := range []string{"a", "b\nc\n\nd"} {
		if _, err := p.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if want := "job | ab\njob | c\njob | \njob | d\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
	b.Reset()
	long := strings.Repeat("x", maxPrefixed+10)
	if _, err := p.Write([]byte(long)); err != nil {
		t.Fatal(err)
	}
	if got := strings.ReplaceAll(strings.ReplaceAll(b.String(), "job | ", ""), "\n", ""); len(got) < maxPrefixed {
		t.Errorf("%d bytes of a line without end were held back", len(long)-len(got))
	}
}
