package ansi

import (
	"html/template"
	"strconv"
	"strings"
)

// HTML returns the spans of the lines as HTML, one line after the other with a
// newline between: span elements with a class, links with rel=noopener, and
// escaped text, nothing else.
func HTML(lines []Line) string {
	var b strings.Builder
	for i, l := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(string(l.HTML()))
	}
	return b.String()
}

// HTML returns one line's spans as HTML. It is safe as element content: all
// text is escaped, classes come from a closed set, links are checked.
func (l Line) HTML() template.HTML {
	var b strings.Builder
	for _, s := range l.Spans {
		text := template.HTMLEscapeString(s.Text)
		class := ""
		if s.Class != "" {
			class = ` class="` + s.Class + `"`
		}
		switch {
		case s.Href != "":
			b.WriteString(`<a` + class + ` href="` + template.HTMLEscapeString(s.Href) + `" rel="noopener noreferrer nofollow" target="_blank">` + text + `</a>`)
		case class != "":
			b.WriteString(`<span` + class + `>` + text + `</span>`)
		default:
			b.WriteString(text)
		}
	}
	if l.Cut > 0 {
		b.WriteString(`<span class="gap end">` + strconv.Itoa(l.Cut) + ` more characters</span>`)
	}
	return template.HTML(b.String()) //nolint:gosec // built from escaped text above
}
