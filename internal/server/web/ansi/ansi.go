// Package ansi turns the text of a log, terminal control included, into lines
// of spans that are safe to show on a page.
//
// What a terminal would do is done for colour and style (SGR), carriage
// return, backspace, erase-line and links (OSC 8, http and https only). Every
// other control sequence is dropped: a log can neither move through the page
// nor title it. Control characters and characters that change the direction or
// hide text are shown as a visible name. A span's Text is plain text; whoever
// writes it into HTML escapes it (html/template does).
//
// The log viewer in the browser has the same rules in static/ansi.js; both are
// held together by testdata/cases.json.
package ansi

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxColumns is the most characters of a line that are kept. What a line has
// beyond is counted in Line.Cut.
const MaxColumns = 16384

// Limits of a control sequence; a longer one is given up and what follows is text.
const (
	maxCSI  = 256
	maxOSC  = 8192
	maxLink = 2048
	// maxMarks is how many combining marks stay on one character.
	maxMarks = 16
)

// Span is a run of text of one look.
type Span struct {
	// Class holds the span's CSS classes, space-separated; empty for plain text.
	// Only letters, digits and spaces occur in it.
	Class string `json:"c,omitempty"`
	// Href is the target of a link: empty, or an absolute http or https URL.
	Href string `json:"h,omitempty"`
	// Text is plain text, to be escaped by whoever writes HTML.
	Text string `json:"t"`
}

// Line is one line of a log.
type Line struct {
	Spans []Span `json:"s"`
	// Cut is how many characters of the line are not in Spans.
	Cut int `json:"cut,omitempty"`
}

// Text returns the line's text without its looks.
func (l Line) Text() string {
	var b strings.Builder
	for _, s := range l.Spans {
		b.WriteString(s.Text)
	}
	return b.String()
}

// cell is one character position of a line.
type cell struct {
	text string
	pen  pen
}

// Renderer keeps the state of one stream: the current style and link, the line
// that is being written, and the control sequence that is being read. Its zero
// value is ready. It may be fed text cut anywhere between characters; decoding
// of bytes is Decoder's part. It is not for concurrent use.
type Renderer struct {
	pen    pen
	parser parser
	cells  []cell
	column int
	cut    int
}

// Feed takes the next piece of text and returns the lines that it completed.
func (r *Renderer) Feed(text string) []Line {
	var done []Line
	for _, c := range text {
		if c == '\n' {
			done = append(done, r.end())
			continue
		}
		r.put(c)
	}
	return done
}

// Line renders one line, given without its line end; a style that it leaves on
// stays on for the next.
func (r *Renderer) Line(text string) Line {
	for _, c := range text {
		if c != '\n' {
			r.put(c)
		}
	}
	return r.end()
}

// Pending returns the line being written as it looks now, and whether there is
// anything in it.
func (r *Renderer) Pending() (Line, bool) {
	return r.render(), len(r.cells) > 0 || r.cut > 0
}

func (r *Renderer) end() Line {
	l := r.render()
	r.cells, r.column, r.cut = r.cells[:0], 0, 0
	r.parser = parser{}
	return l
}

// put takes one character other than a newline.
func (r *Renderer) put(c rune) {
	if r.parser.state != ground || c == esc || c == 0x9b {
		action, again := r.parser.next(c)
		r.apply(action)
		if !again {
			return
		}
	}
	switch {
	case c == '\r':
		r.column = 0
	case c == '\b':
		r.column = max(r.column-1, 0)
	case isMark(c):
		r.mark(c)
	default:
		if name := visible(c); name != "" {
			r.print(name, r.pen.control())
			return
		}
		r.print(string(c), r.pen)
	}
}

func (r *Renderer) print(text string, p pen) {
	if r.column >= MaxColumns {
		r.cut++
		return
	}
	for len(r.cells) < r.column {
		r.cells = append(r.cells, cell{text: " "})
	}
	if r.column < len(r.cells) {
		r.cells[r.column] = cell{text, p}
	} else {
		r.cells = append(r.cells, cell{text, p})
	}
	r.column++
}

// mark adds a combining mark to the character before the cursor.
func (r *Renderer) mark(c rune) {
	at := min(r.column, len(r.cells)) - 1
	if at < 0 {
		r.print("\u25cc"+string(c), r.pen)
		return
	}
	if utf8.RuneCountInString(r.cells[at].text) > maxMarks {
		r.cut++
		return
	}
	r.cells[at].text += string(c)
}

// apply does what a finished control sequence asks for.
func (r *Renderer) apply(a action) {
	switch a.kind {
	case actNone:
	case actSGR:
		r.pen.sgr(a.text)
	case actErase:
		r.erase(a.text)
	case actLink:
		r.pen.href = a.text
	}
}

func (r *Renderer) erase(param string) {
	switch param {
	case "", "0":
		r.cells = r.cells[:min(r.column, len(r.cells))]
	case "1":
		for i := range min(r.column+1, len(r.cells)) {
			r.cells[i] = cell{text: " "}
		}
	case "2":
		r.cells = r.cells[:0]
	}
	if r.column < MaxColumns {
		r.cut = 0
	}
}

func (r *Renderer) render() Line {
	l := Line{Spans: []Span{}, Cut: r.cut}
	var b strings.Builder
	for i := 0; i < len(r.cells); {
		p := r.cells[i].pen
		b.Reset()
		for ; i < len(r.cells) && r.cells[i].pen == p; i++ {
			b.WriteString(r.cells[i].text)
		}
		l.Spans = append(l.Spans, Span{Class: p.class(), Href: p.href, Text: b.String()})
	}
	return l
}

// isMark reports whether c has no place of its own but belongs to the
// character before it.
func isMark(c rune) bool {
	return c >= 0x300 && unicode.In(c, unicode.Mn, unicode.Me, unicode.Mc) || c == 0x200c || c == 0x200d
}
