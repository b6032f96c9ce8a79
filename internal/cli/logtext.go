package cli

import (
	"bytes"
	"fmt"
	"io"
	"unicode/utf8"
)

// maxEscape bounds an escape sequence; what is longer is none.
const maxEscape = 4096

// logFilter makes the bytes of a log safe for a terminal, as a stream: colours
// (SGR) pass, other escape sequences vanish, other control characters become
// visible, a carriage return starts a new line, and bytes that are not UTF-8
// are shown in hexadecimal. Nothing that a job prints can move the cursor, set
// a title, write to the clipboard or leave the terminal in another state.
type logFilter struct {
	w io.Writer
	// color lets SGR sequences through.
	color bool
	// resetLines ends colours at each line end, for lines of several jobs.
	resetLines bool

	pending []byte // a cut character or sequence
	buf     []byte
	column  bool // something stands in the present line
	cr      bool // a carriage return has been read and not yet acted on
	painted bool // colours are on
}

// Write filters p. It may hold back a few bytes until the next call or Close.
func (f *logFilter) Write(p []byte) (int, error) {
	in := p
	if len(f.pending) > 0 {
		in = append(f.pending, p...)
	}
	f.buf = f.buf[:0]
	rest := f.filter(in)
	f.pending = append([]byte(nil), rest...)
	if _, err := f.w.Write(f.buf); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close writes what was held back and ends colours.
func (f *logFilter) Close() error {
	f.buf = f.buf[:0]
	for len(f.pending) > 0 {
		// Cut for ever: show the first byte and look at the others again.
		f.show(f.pending[:1])
		f.pending = f.filter(f.pending[1:])
	}
	if f.painted {
		f.buf = append(f.buf, "\x1b[0m"...)
		f.painted = false
	}
	_, err := f.w.Write(f.buf)
	return err
}

// filter appends the safe form of in to f.buf and returns what is not complete.
func (f *logFilter) filter(in []byte) []byte {
	for len(in) > 0 {
		c := in[0]
		if f.cr && c != '\n' && c != '\r' {
			f.newline()
		}
		switch {
		case c == '\n':
			f.cr = false
			f.column = true // an empty line is a line
			f.newline()
			in = in[1:]
		case c == '\r':
			f.cr = f.column
			in = in[1:]
		case c == 0x1b:
			n, kind := escapeLength(in)
			switch kind {
			case escapeCut:
				return in
			case escapeColor:
				if f.color {
					f.buf = append(f.buf, in[:n]...)
					f.painted = !isReset(in[:n])
				}
			case escapeOther:
			case escapeNone:
				f.show(in[:1])
			}
			in = in[n:]
		case c == '\t' || c >= 0x20 && c < 0x7f:
			f.put(in[:1])
			in = in[1:]
		case c < utf8.RuneSelf:
			f.show(in[:1])
			in = in[1:]
		case !utf8.FullRune(in):
			return in
		default:
			r, n := utf8.DecodeRune(in)
			if r == utf8.RuneError && n == 1 || hidden(r) {
				f.show(in[:n])
			} else {
				f.put(in[:n])
			}
			in = in[n:]
		}
	}
	return nil
}

func (f *logFilter) put(b []byte) {
	f.column = true
	f.buf = append(f.buf, b...)
}

// show writes one character in its visible form.
func (f *logFilter) show(b []byte) {
	f.column = true
	f.buf = append(f.buf, clean(string(b))...)
}

func (f *logFilter) newline() {
	if f.column {
		if f.painted && f.resetLines {
			f.buf = append(f.buf, "\x1b[0m"...)
			f.painted = false
		}
		f.buf = append(f.buf, '\n')
	}
	f.cr, f.column = false, false
}

type escapeKind int

const (
	escapeNone  escapeKind = iota // an escape character that begins nothing
	escapeCut                     // the sequence goes on in the next bytes
	escapeColor                   // SGR
	escapeOther                   // a whole sequence of another kind
)

// escapeLength finds the sequence at the start of in, which begins with ESC.
func escapeLength(in []byte) (int, escapeKind) {
	if len(in) == 1 {
		return 1, escapeCut
	}
	switch c := in[1]; {
	case c == '[':
		for i := 2; i < len(in) && i < maxEscape; i++ {
			switch b := in[i]; {
			case b >= 0x40 && b <= 0x7e:
				if b == 'm' && len(bytes.Trim(in[2:i], "0123456789;:")) == 0 {
					return i + 1, escapeColor
				}
				return i + 1, escapeOther
			case b < 0x20 || b > 0x7e:
				return 1, escapeNone
			}
		}
	case c == ']' || c == 'P' || c == 'X' || c == '^' || c == '_':
		for i := 2; i < len(in) && i < maxEscape; i++ {
			switch {
			case in[i] == 0x07:
				return i + 1, escapeOther
			case in[i] == 0x1b && i+1 < len(in):
				if in[i+1] == '\\' {
					return i + 2, escapeOther
				}
				return 1, escapeNone
			case in[i] == '\n':
				return 1, escapeNone
			}
		}
	case c >= 0x20 && c <= 0x2f: // a character set: ESC ( B
		if len(in) > 2 {
			if in[2] >= 0x30 && in[2] <= 0x7e {
				return 3, escapeOther
			}
			return 1, escapeNone
		}
	case c >= 0x30 && c <= 0x7e:
		return 2, escapeOther
	default:
		return 1, escapeNone
	}
	if len(in) >= maxEscape {
		return 1, escapeNone
	}
	return len(in), escapeCut
}

func isReset(sgr []byte) bool {
	params := sgr[2 : len(sgr)-1]
	return len(bytes.Trim(params, "0;:")) == 0
}

// maxPrefixed is where a line without end is cut for the sake of memory.
const maxPrefixed = 64 << 10

// prefixer writes whole lines with a prefix, so that the lines of several jobs
// do not run into each other. A line is one Write. One prefixer serves one
// stream of one job.
type prefixer struct {
	w      io.Writer
	prefix string
	line   []byte
}

// Write takes bytes and writes the lines that they end.
func (p *prefixer) Write(b []byte) (int, error) {
	n := len(b)
	for {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			p.line = append(p.line, b...)
			if len(p.line) < maxPrefixed {
				return n, nil
			}
			return n, p.Close()
		}
		p.line = append(p.line, b[:i]...)
		b = b[i+1:]
		if err := p.flush(); err != nil {
			return 0, err
		}
	}
}

// Close writes a line that has no end yet.
func (p *prefixer) Close() error {
	if len(p.line) == 0 {
		return nil
	}
	return p.flush()
}

func (p *prefixer) flush() error {
	_, err := fmt.Fprintf(p.w, "%s%s\n", p.prefix, p.line)
	p.line = p.line[:0]
	return err
}
