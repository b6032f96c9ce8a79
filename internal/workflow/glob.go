package workflow

// glob is a pattern as a position automaton whose states are bits: state i is
// "the first i positions are matched". One byte of the value moves all states
// with a few word operations, so a match costs (positions/64) × bytes and never
// backtracks.
type glob struct {
	positions []position
	states    int // len(positions)+1
	// loop holds the states that stay on any byte (**), loopSegment those that
	// stay on any byte but "/" (*), loopRune those that stay on the
	// continuation bytes of a multi-byte character (after ? and sets).
	loop, loopSegment, loopRune bitset
	// skip1 and skip2 hold the states from which one or two positions may match
	// nothing.
	skip1, skip2 bitset
}

type position struct {
	kind positionKind
	set  *[4]uint64 // set: the bytes that it takes
	char byte       // literal
}

type positionKind int

const (
	literalByte  positionKind = iota
	anyOfSet                  // ? or [..]
	star                      // *
	doubleStar                // **
	segmentsOpen              // the entry of "**/": skips both positions, or goes on to the next
	segmentsLoop              // the loop of "**/": takes anything up to and with a "/"
)

// compileGlob reads a pattern without a leading "!".
func compileGlob(p string) glob {
	var g glob
	for i := 0; i < len(p); {
		c := p[i]
		switch {
		case c == '\\' && i+1 < len(p):
			g.positions = append(g.positions, position{kind: literalByte, char: p[i+1]})
			i += 2
		case c == '*':
			n := i
			for n < len(p) && p[n] == '*' {
				n++
			}
			g.stars(p, i, n)
			if k := len(g.positions); k > 0 && g.positions[k-1].kind == segmentsLoop {
				n++ // the "/" belongs to it
			}
			i = n
		case c == '?':
			g.positions = append(g.positions, position{kind: anyOfSet, set: notSlash()})
			i++
		case c == '[':
			if set, end, ok := class(p, i); ok {
				g.positions = append(g.positions, position{kind: anyOfSet, set: set})
				i = end
				continue
			}
			fallthrough
		default:
			g.positions = append(g.positions, position{kind: literalByte, char: c})
			i++
		}
	}
	g.prepare()
	return g
}

// stars adds the stars p[from:to]. Stars side by side are one, so that states
// that match nothing never stand in a chain.
func (g *glob) stars(p string, from, to int) {
	last := func() *position {
		if len(g.positions) == 0 {
			return nil
		}
		return &g.positions[len(g.positions)-1]
	}
	wholeSegment := to-from >= 2 && (from == 0 || p[from-1] == '/') && to < len(p) && p[to] == '/'
	switch {
	case wholeSegment:
		if l := last(); l != nil && l.kind == segmentsLoop {
			g.positions = g.positions[:len(g.positions)-2] // **/**/ is **/
		}
		g.positions = append(g.positions, position{kind: segmentsOpen}, position{kind: segmentsLoop})
	case to-from >= 2:
		g.positions = append(g.positions, position{kind: doubleStar})
	default:
		g.positions = append(g.positions, position{kind: star})
	}
}

func (g *glob) prepare() {
	g.states = len(g.positions) + 1
	g.loop, g.loopSegment, g.loopRune = newBitset(g.states), newBitset(g.states), newBitset(g.states)
	g.skip1, g.skip2 = newBitset(g.states), newBitset(g.states)
	for i, p := range g.positions {
		switch p.kind { //nolint:exhaustive // the others neither loop nor are skipped
		case star:
			g.loopSegment.set(i)
			g.skip1.set(i)
		case doubleStar:
			g.loop.set(i)
			g.skip1.set(i)
		case segmentsOpen:
			g.skip1.set(i)
			g.skip2.set(i)
		case segmentsLoop:
			g.loop.set(i)
		case anyOfSet:
			g.loopRune.set(i + 1)
		}
	}
}

// match reports whether the whole value matches.
func (g *glob) match(value string) bool {
	now, next := newBitset(g.states), newBitset(g.states)
	now.set(0)
	g.close(now)
	takes := map[byte]bitset{}
	for i := range len(value) {
		c := value[i]
		take, ok := takes[c]
		if !ok {
			take = g.takes(c)
			takes[c] = take
		}
		if !g.move(next, now, take, c) {
			return false
		}
		now, next = next, now
	}
	return now.has(g.states - 1)
}

// move sets next to the states after one byte and reports whether there is one.
func (g *glob) move(next, now, take bitset, c byte) bool {
	n := len(now)
	next, take = next[:n], take[:n]
	loop, segment, loopRune, skip1, skip2 := g.loop[:n], g.loopSegment[:n], g.loopRune[:n], g.skip1[:n], g.skip2[:n]
	var inSegment, inRune uint64 // masks: all bits or none
	if c != '/' {
		inSegment = ^uint64(0)
	}
	if c&0xc0 == 0x80 {
		inRune = ^uint64(0)
	}
	var some, carry, carry1, carry2 uint64
	for w, s := range now {
		moved := s & take[w]
		v := moved<<1 | carry | carry1 | carry2 | s&(loop[w]|segment[w]&inSegment|loopRune[w]&inRune)
		carry = moved >> 63
		v, carry1, carry2 = skip(v, skip1[w], skip2[w])
		next[w] = v
		some |= v
	}
	return some != 0
}

// close adds the states that are reached without taking a byte.
func (g *glob) close(s bitset) {
	var carry1, carry2 uint64
	for w := range s {
		s[w], carry1, carry2 = skip(s[w]|carry1|carry2, g.skip1[w], g.skip2[w])
	}
}

// skip adds to one word the states that are reached without taking a byte, and
// returns what goes to the next word. At most "**/" followed by a star stand
// side by side, hence two rounds.
func skip(v, skip1, skip2 uint64) (closed, carry1, carry2 uint64) {
	v |= v&skip1<<1 | v&skip2<<2
	v |= v&skip1<<1 | v&skip2<<2
	return v, v & skip1 >> 63, v & skip2 >> 62
}

// takes returns the states whose next position takes the byte.
func (g *glob) takes(c byte) bitset {
	b := newBitset(g.states)
	for i := range g.positions {
		p := &g.positions[i]
		switch p.kind { //nolint:exhaustive // the others take no byte of their own
		case literalByte:
			if p.char == c {
				b.set(i)
			}
		case anyOfSet:
			if p.set[c>>6]>>(c&63)&1 == 1 {
				b.set(i)
			}
		case segmentsLoop:
			if c == '/' {
				b.set(i)
			}
		}
	}
	return b
}

// class reads the set that begins at p[i] == '[' and returns the bytes it takes
// and the end. Members are ASCII; a negated set takes every other character but
// "/", by its first byte.
func class(p string, i int) (*[4]uint64, int, bool) {
	j := i + 1
	negated := j < len(p) && (p[j] == '!' || p[j] == '^')
	if negated {
		j++
	}
	var set [4]uint64
	first := true
	for j < len(p) && (p[j] != ']' || first) {
		low, n, ok := member(p, j)
		if !ok {
			return nil, 0, false
		}
		j, first = n, false
		high := low
		if j+1 < len(p) && p[j] == '-' && p[j+1] != ']' {
			if high, n, ok = member(p, j+1); !ok || high < low {
				return nil, 0, false
			}
			j = n
		}
		for c := int(low); c <= int(high); c++ {
			set[c>>6] |= 1 << (c & 63)
		}
	}
	if j >= len(p) || first {
		return nil, 0, false
	}
	if negated {
		all := notSlash()
		for w := range set {
			set[w] = all[w] &^ set[w]
		}
	}
	set['/'>>6] &^= 1 << ('/' & 63)
	return &set, j + 1, true
}

// member reads one character of a set.
func member(p string, j int) (byte, int, bool) {
	if p[j] == '\\' {
		j++
	}
	if j >= len(p) || p[j] >= 0x80 {
		return 0, 0, false
	}
	return p[j], j + 1, true
}

// notSlash takes the first byte of every character but "/".
func notSlash() *[4]uint64 {
	all := ^uint64(0)
	return &[4]uint64{all &^ (1 << '/'), all, 0, all}
}

type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) set(i int)      { b[i>>6] |= 1 << (i & 63) }
func (b bitset) has(i int) bool { return b[i>>6]>>(i&63)&1 == 1 }
