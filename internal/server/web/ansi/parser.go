package ansi

import "strings"

const esc = 0x1b

type state uint8

// States of the parser, after the usual state machine of video terminals.
const (
	ground state = iota
	escape       // ESC was read
	skip         // ESC with intermediate characters: one more ends it
	csi          // control sequence: parameters until a final character
	osc          // operating system command: text until BEL or ST
	blob         // DCS, APC, PM, SOS: the same, always dropped
)

type actionKind uint8

const (
	actNone  actionKind = iota
	actSGR              // text: the parameters
	actErase            // text: the parameter of erase-line
	actLink             // text: an accepted URL, or empty for the end of a link
)

type action struct {
	kind actionKind
	text string
}

// parser reads one control sequence.
type parser struct {
	state state
	buf   []byte
	// private is set by characters that make a sequence something other than the
	// standard one: ESC [ ? … , ESC [ … SP q.
	private bool
	// tail: ESC was read inside a string; a backslash ends the string.
	tail bool
}

// next takes a character. again is set when it was not part of the sequence
// and is to be treated as text.
func (p *parser) next(c rune) (a action, again bool) {
	if c == 0x18 || c == 0x1a { // CAN, SUB
		*p = parser{}
		return action{}, false
	}
	if p.state == osc || p.state == blob {
		return p.text(c)
	}
	if c == esc {
		*p = parser{state: escape}
		return action{}, false
	}
	switch p.state {
	case ground: // only 0x9b comes here
		*p = parser{state: csi}
	case escape:
		return action{}, p.afterEscape(c)
	case skip:
		if c < 0x20 || c > 0x2f {
			*p = parser{}
			return action{}, c > 0x7e || c < 0x20
		}
	case csi:
		return p.control(c)
	case osc, blob:
	}
	return action{}, false
}

func (p *parser) afterEscape(c rune) (again bool) {
	switch {
	case c == '[':
		*p = parser{state: csi}
	case c == ']':
		*p = parser{state: osc}
	case c == 'P', c == 'X', c == '^', c == '_':
		*p = parser{state: blob}
	case c >= 0x20 && c <= 0x2f:
		*p = parser{state: skip}
	default:
		*p = parser{}
		return c < 0x20 || c > 0x7e
	}
	return false
}

func (p *parser) control(c rune) (a action, again bool) {
	switch {
	case c >= '0' && c <= ';': // digits, colon, semicolon
		if len(p.buf) == maxCSI {
			*p = parser{}
			return action{}, true
		}
		p.buf = append(p.buf, byte(c))
		return action{}, false
	case c >= 0x20 && c <= 0x2f, c >= 0x3c && c <= 0x3f:
		p.private = true
		return action{}, false
	case c >= 0x40 && c <= 0x7e:
		if !p.private {
			switch c {
			case 'm':
				a = action{actSGR, string(p.buf)}
			case 'K':
				a = action{actErase, string(p.buf)}
			}
		}
		*p = parser{}
		return a, false
	default: // not part of any sequence
		*p = parser{}
		return action{}, true
	}
}

// text takes a character of a string and ends it at BEL or ST.
func (p *parser) text(c rune) (a action, again bool) {
	switch {
	case p.tail && c == '\\', c == 0x07, c == 0x9c:
		if p.state == osc {
			a = link(string(p.buf))
		}
		*p = parser{}
		return a, false
	case p.tail: // a new sequence began
		*p = parser{state: escape}
		return p.next(c)
	case c == esc:
		p.tail = true
	case len(p.buf) < maxOSC:
		p.buf = append(p.buf, string(c)...)
	}
	return action{}, false
}

// link reads the text of OSC 8: "8;parameters;URL". Other commands do nothing.
func link(text string) action {
	rest, ok := strings.CutPrefix(text, "8;")
	if !ok {
		return action{}
	}
	_, url, ok := strings.Cut(rest, ";")
	if !ok {
		return action{}
	}
	if !acceptable(url) {
		url = ""
	}
	return action{actLink, url}
}

// acceptable reports whether a URL may become a link: http or https with a
// host, printable ASCII without quotes, spaces, backslashes or angle brackets.
func acceptable(url string) bool {
	if len(url) > maxLink {
		return false
	}
	for i := range len(url) {
		if c := url[i]; c <= ' ' || c > '~' || strings.IndexByte("\"'<>\\`", c) >= 0 {
			return false
		}
	}
	scheme, rest, ok := strings.Cut(url, "://")
	scheme = strings.ToLower(scheme)
	return ok && (scheme == "http" || scheme == "https") && rest != "" && !strings.ContainsAny(rest[:1], "/?#:@")
}
