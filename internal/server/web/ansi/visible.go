package ansi

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// visible returns the name under which a character that would act or hide is
// shown, or "" for one that is shown as it is.
func visible(c rune) string {
	switch {
	case c == '\t':
		return ""
	case c < 0x20:
		return "^" + string(c+0x40) // caret notation: not every font has the control pictures
	case c == 0x7f:
		return "^?"
	case c >= 0x80 && c < 0xa0:
		return fmt.Sprintf("\u27e8U+%04X\u27e9", c)
	case Deceptive(c):
		return fmt.Sprintf("\u27e8U+%04X\u27e9", c)
	}
	return ""
}

// Deceptive reports whether c changes the direction of text, breaks lines where
// none is seen, or hides text: what a page must name instead of obey.
func Deceptive(c rune) bool {
	switch {
	case c == 0x00ad, c == 0x061c, c == 0x180e, c == 0xfeff,
		c == 0x200b, c >= 0x200e && c <= 0x200f,
		c >= 0x2028 && c <= 0x202e, c >= 0x2060 && c <= 0x206f,
		c >= 0xfff9 && c <= 0xfffb, c >= 0xe0000 && c <= 0xe007f:
		return true
	}
	return false
}

// Visible returns s with every deceptive character replaced by its name.
func Visible(s string) string {
	if !strings.ContainsFunc(s, Deceptive) {
		return s
	}
	var b strings.Builder
	for _, c := range s {
		if Deceptive(c) {
			b.WriteString(visible(c))
		} else {
			b.WriteRune(c)
		}
	}
	return b.String()
}

// Decoder turns the bytes of a stream, cut anywhere, into text: a character
// split over two pieces is put together, and bytes that are not UTF-8 become
// U+FFFD, one for each maximal part as browsers do. Its zero value is ready.
type Decoder struct {
	held []byte
}

// Decode returns the text of the next piece. The first bytes of a character
// whose rest is missing are held back until the next piece or Flush.
func (d *Decoder) Decode(piece []byte) string {
	b := piece
	if len(d.held) > 0 {
		b = append(d.held, piece...)
		d.held = nil
	}
	var out strings.Builder
	out.Grow(len(b))
	for len(b) > 0 {
		c, n := utf8.DecodeRune(b)
		if c != utf8.RuneError || n > 1 {
			out.WriteRune(c)
			b = b[n:]
			continue
		}
		n, whole := prefix(b)
		if !whole && n == len(b) {
			d.held = append([]byte(nil), b...)
			break
		}
		out.WriteRune(utf8.RuneError)
		b = b[n:]
	}
	return out.String()
}

// Flush returns what stands for the bytes held back at the end of a stream.
func (d *Decoder) Flush() string {
	if len(d.held) == 0 {
		return ""
	}
	d.held = nil
	return string(utf8.RuneError)
}

// prefix returns how many bytes at the start of b are the beginning of a
// character (at least 1), and whether a wrong byte, not the end of b, ended it.
func prefix(b []byte) (n int, broken bool) {
	var need int
	low, high := byte(0x80), byte(0xbf)
	switch c := b[0]; {
	case c >= 0xc2 && c <= 0xdf:
		need = 1
	case c >= 0xe0 && c <= 0xef:
		need = 2
		if c == 0xe0 {
			low = 0xa0
		} else if c == 0xed {
			high = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		need = 3
		if c == 0xf0 {
			low = 0x90
		} else if c == 0xf4 {
			high = 0x8f
		}
	default:
		return 1, true
	}
	for n = 1; n <= need; n++ {
		if n == len(b) {
			return n, false
		}
		if b[n] < low || b[n] > high {
			return n, true
		}
		low, high = 0x80, 0xbf
	}
	return n, true
}
