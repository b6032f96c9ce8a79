package ansi

import (
	"strconv"
	"strings"
)

// pen is the look of what is written: colours as palette index + 1, 0 for the
// default. It is comparable: equal pens look the same.
type pen struct {
	fore, back                                uint16
	bold, dim, italic, under, strike, inverse bool
	named                                     bool // a control character shown by name
	href                                      string
}

// control is the look of a character that is shown by its name.
func (p pen) control() pen {
	p.named = true
	return p
}

// class returns the CSS classes of the look. Foregrounds are f0 to f255,
// backgrounds b0 to b255 beside k ("on a background"); fx and bx are the
// default colours swapped by inverse.
func (p pen) class() string {
	if p == (pen{href: p.href}) {
		return ""
	}
	var b []byte
	add := func(s string) {
		if len(b) > 0 {
			b = append(b, ' ')
		}
		b = append(b, s...)
	}
	if p.named {
		add("ctl")
	}
	if p.inverse {
		if p.back == 0 {
			add("fx")
		} else {
			add("f" + strconv.Itoa(int(p.back)-1))
		}
		if p.fore == 0 {
			add("k bx")
		} else {
			add("k b" + strconv.Itoa(int(p.fore)-1))
		}
	} else {
		if p.fore != 0 {
			add("f" + strconv.Itoa(int(p.fore)-1))
		}
		if p.back != 0 {
			add("k b" + strconv.Itoa(int(p.back)-1))
		}
	}
	for _, a := range []struct {
		on   bool
		name string
	}{{p.bold, "bo"}, {p.dim, "di"}, {p.italic, "it"}, {p.under, "un"}, {p.strike, "st"}} {
		if a.on {
			add(a.name)
		}
	}
	return string(b)
}

// sgr applies the parameters of "select graphic rendition". Parameters are
// separated by semicolons; colons separate the parts of one parameter.
func (p *pen) sgr(text string) {
	params := strings.Split(text, ";")
	for i := 0; i < len(params); i++ {
		parts := strings.Split(params[i], ":")
		n := number(parts[0])
		switch {
		case n == 38 || n == 48 || n == 58:
			var c uint16
			if len(parts) > 1 {
				c = extendedColons(parts[1:])
			} else {
				var used int
				c, used = extended(params[i+1:])
				i += used
			}
			if n == 38 && c != 0 {
				p.fore = c
			} else if n == 48 && c != 0 {
				p.back = c
			}
		case n == 4 && len(parts) > 1:
			p.under = number(parts[1]) != 0
		default:
			p.simple(n)
		}
	}
}

func (p *pen) simple(n int) {
	switch {
	case n == 0:
		*p = pen{href: p.href}
	case n == 1:
		p.bold = true
	case n == 2:
		p.dim = true
	case n == 3:
		p.italic = true
	case n == 4, n == 21:
		p.under = true
	case n == 7:
		p.inverse = true
	case n == 9:
		p.strike = true
	case n == 22:
		p.bold, p.dim = false, false
	case n == 23:
		p.italic = false
	case n == 24:
		p.under = false
	case n == 27:
		p.inverse = false
	case n == 29:
		p.strike = false
	case n >= 30 && n <= 37:
		p.fore = uint16(n - 30 + 1)
	case n == 39:
		p.fore = 0
	case n >= 40 && n <= 47:
		p.back = uint16(n - 40 + 1)
	case n == 49:
		p.back = 0
	case n >= 90 && n <= 97:
		p.fore = uint16(n - 90 + 8 + 1)
	case n >= 100 && n <= 107:
		p.back = uint16(n - 100 + 8 + 1)
	}
}

// extended reads the parameters behind 38 or 48: "5;n" or "2;r;g;b". It returns
// the colour, 0 for a wrong one, and how many parameters it took.
func extended(params []string) (color uint16, used int) {
	if len(params) == 0 {
		return 0, 0
	}
	switch number(params[0]) {
	case 5:
		if len(params) < 2 {
			return 0, len(params)
		}
		return indexed(params[1]), 2
	case 2:
		if len(params) < 4 {
			return 0, len(params)
		}
		return nearest(params[1], params[2], params[3]), 4
	}
	return 0, 1
}

// extendedColons reads the same written with colons: "5:n", "2:r:g:b" or, with
// a colour space, "2:space:r:g:b".
func extendedColons(parts []string) uint16 {
	switch n := number(parts[0]); {
	case n == 5 && len(parts) >= 2:
		return indexed(parts[1])
	case n == 2 && len(parts) == 4:
		return nearest(parts[1], parts[2], parts[3])
	case n == 2 && len(parts) >= 5:
		return nearest(parts[2], parts[3], parts[4])
	}
	return 0
}

func indexed(s string) uint16 {
	n := number(s)
	if n > 255 {
		return 0
	}
	return uint16(n + 1)
}

// number reads a parameter; an empty one is 0, one that is too large is 9999.
func number(s string) int {
	n := 0
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 9999
		}
		n = min(n*10+int(s[i]-'0'), 9999)
	}
	return n
}

// nearest returns the palette colour (index + 1) closest to a 24-bit colour:
// the 6×6×6 cube or the grey ramp, the cube if both are equally close.
func nearest(rs, gs, bs string) uint16 {
	r, g, b := number(rs), number(gs), number(bs)
	if r > 255 || g > 255 || b > 255 {
		return 0
	}
	step := func(v int) (index, level int) {
		switch {
		case v < 48:
			return 0, 0
		case v < 115:
			return 1, 95
		default:
			i := (v - 35) / 40
			return i, 55 + i*40
		}
	}
	ri, rl := step(r)
	gi, gl := step(g)
	bi, bl := step(b)
	distance := func(x, y, z int) int { return (r-x)*(r-x) + (g-y)*(g-y) + (b-z)*(b-z) }
	grey := min(max(((r+g+b)/3-3)/10, 0), 23)
	level := 8 + grey*10
	if distance(level, level, level) < distance(rl, gl, bl) {
		return uint16(232 + grey + 1)
	}
	return uint16(16 + 36*ri + 6*gi + bi + 1)
}
