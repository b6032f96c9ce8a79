// Package graph lays out a run's jobs as a layered drawing, from left to right:
// every node stands to the right of all it needs, no two nodes overlap, and an
// edge that follows from others is not drawn. It is pure and deterministic.
package graph

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// Node is one box to place. Needs holds IDs of other nodes; unknown ones and
// the node itself are ignored.
type Node struct {
	ID    string
	Needs []string
}

// Sizes of the drawing, in pixels.
const (
	NodeWidth  = 188
	NodeHeight = 40
	columnGap  = 52
	rowGap     = 14
	lineGap    = 10 // between lines that pass through a column
	margin     = 6
)

// reduceLimit is the most nodes for which implied edges are searched; the
// search keeps a set of ancestors for each node.
const reduceLimit = 8000

// Box is a node's place: the corner at the top left, in the size NodeWidth by
// NodeHeight.
type Box struct {
	ID   string
	X, Y int
	// Rank is the length of the longest chain that leads to the node, from 0.
	Rank int
}

// Edge is one drawn line.
type Edge struct {
	// From and To are node IDs; one of them is empty where lines of several nodes
	// that need the same things run through one joint.
	From, To string
	// Joint names the joint that the line begins or ends in.
	Joint string
	// Path is the line as an SVG path; X1 < X2 always.
	Path   string
	X1, X2 int
}

// Layout is a finished drawing.
type Layout struct {
	Width, Height int
	Boxes         []Box // in the order of the nodes given
	Edges         []Edge
}

type kind uint8

const (
	box   kind = iota
	joint      // where lines of several nodes meet
	pass       // where a long line crosses a column
)

// vertex is a place in a layer. Real nodes stand in even layers, joints in odd ones.
type vertex struct {
	kind     kind
	layer    int
	up, down []int // neighbours to the left and right
	y        float64
	place    int // in its layer
}

type drawing struct {
	v      []vertex
	layers [][]int
	lines  [][]int // each: vertices from the left end to the right end
}

// Lay computes the layout of the nodes.
func Lay(nodes []Node) Layout {
	if len(nodes) == 0 {
		return Layout{}
	}
	needs, rank := analyse(nodes)
	d := build(needs, rank)
	d.order()
	d.align()
	return d.finish(nodes, rank)
}

// analyse returns for each node the needs to draw, as indices, and its rank. A
// need that would close a circle is left out.
func analyse(nodes []Node) (needs [][]int, rank []int) {
	index := make(map[string]int, len(nodes))
	for i, n := range nodes {
		if _, twice := index[n.ID]; !twice {
			index[n.ID] = i
		}
	}
	needs = make([][]int, len(nodes))
	users := make([][]int, len(nodes))
	open := make([]int, len(nodes))
	taken := make([]int, len(nodes)) // by which node, plus 1, a need was last taken
	for i, n := range nodes {
		for _, id := range n.Needs {
			j, ok := index[id]
			if ok && j != i && taken[j] != i+1 {
				taken[j] = i + 1
				needs[i] = append(needs[i], j)
				users[j] = append(users[j], i)
			}
		}
		open[i] = len(needs[i])
	}
	rank = make([]int, len(nodes))
	sorted := make([]int, 0, len(nodes))
	for i := range nodes {
		if open[i] == 0 {
			sorted = append(sorted, i)
		}
	}
	for at := 0; at < len(sorted); at++ {
		for _, u := range users[sorted[at]] {
			rank[u] = max(rank[u], rank[sorted[at]]+1)
			if open[u]--; open[u] == 0 {
				sorted = append(sorted, u)
			}
		}
	}
	for i := range nodes {
		if open[i] > 0 { // part of a circle or behind one: stands alone
			needs[i], rank[i] = nil, 0
			sorted = append(sorted, i)
		}
	}
	if len(nodes) <= reduceLimit {
		reduce(needs, rank, sorted)
	}
	return needs, rank
}

// reduce drops every need that follows from another need.
func reduce(needs [][]int, rank, sorted []int) {
	words := (len(needs) + 63) / 64
	above := make([][]uint64, len(needs)) // ancestors of each node, itself included
	for _, i := range sorted {
		set := make([]uint64, words)
		slices.SortStableFunc(needs[i], func(a, b int) int { return rank[b] - rank[a] })
		kept := needs[i][:0]
		for _, j := range needs[i] {
			if set[j/64]&(1<<(j%64)) != 0 {
				continue
			}
			kept = append(kept, j)
			for w, bits := range above[j] {
				set[w] |= bits
			}
		}
		slices.Sort(kept)
		needs[i] = kept
		set[i/64] |= 1 << (i % 64)
		above[i] = set
	}
}

// build makes the vertices and lines: nodes, a joint wherever at least two
// nodes need the same two or more, and passing places of long lines.
func build(needs [][]int, rank []int) *drawing {
	d := &drawing{v: make([]vertex, len(needs))}
	for i := range needs {
		d.v[i] = vertex{kind: box, layer: 2 * rank[i]}
	}
	groups := map[string][]int{}
	var keys []string
	for i, list := range needs {
		if len(list) == 0 {
			continue
		}
		var b strings.Builder
		for _, j := range list {
			b.WriteString(strconv.Itoa(j) + ",")
		}
		k := b.String()
		if groups[k] == nil {
			keys = append(keys, k)
		}
		groups[k] = append(groups[k], i)
	}
	for _, k := range keys {
		users := groups[k]
		list := needs[users[0]]
		if len(users) < 2 || len(list) < 2 {
			for _, u := range users {
				for _, j := range list {
					d.connect(j, u)
				}
			}
			continue
		}
		d.v = append(d.v, vertex{kind: joint, layer: 2*rank[users[0]] - 1})
		at := len(d.v) - 1
		for _, j := range list {
			d.connect(j, at)
		}
		for _, u := range users {
			d.connect(at, u)
		}
	}
	for i := range d.v {
		for d.v[i].layer >= len(d.layers) {
			d.layers = append(d.layers, nil)
		}
		d.layers[d.v[i].layer] = append(d.layers[d.v[i].layer], i)
	}
	return d
}

// connect adds a line, with a passing place in every column between its ends.
func (d *drawing) connect(from, to int) {
	line := []int{from}
	for l := d.v[from].layer + 2 - d.v[from].layer%2; l < d.v[to].layer; l += 2 {
		d.v = append(d.v, vertex{kind: pass, layer: l})
		line = append(line, len(d.v)-1)
	}
	line = append(line, to)
	for i := 1; i < len(line); i++ {
		a, b := line[i-1], line[i]
		d.v[a].down = append(d.v[a].down, b)
		d.v[b].up = append(d.v[b].up, a)
	}
	d.lines = append(d.lines, line)
}

// order arranges each layer so that few lines cross: places follow the mean
// place of the neighbours, sweeping from left to right and back.
func (d *drawing) order() {
	place := func(layer []int) {
		for i, v := range layer {
			d.v[v].place = i
		}
	}
	for _, l := range d.layers {
		place(l)
	}
	weight := make([]float64, len(d.v))
	arrange := func(layer []int, neighbours func(*vertex) []int) {
		for _, v := range layer {
			list := neighbours(&d.v[v])
			if len(list) == 0 {
				weight[v] = float64(d.v[v].place)
				continue
			}
			sum := 0.0
			for _, n := range list {
				sum += relative(d.v[n].place, len(d.layers[d.v[n].layer]))
			}
			weight[v] = sum / float64(len(list)) * float64(len(layer))
		}
		slices.SortStableFunc(layer, func(a, b int) int {
			switch {
			case weight[a] < weight[b]:
				return -1
			case weight[a] > weight[b]:
				return 1
			}
			return 0
		})
		place(layer)
	}
	for range 4 {
		for _, l := range d.layers {
			arrange(l, func(v *vertex) []int { return v.up })
		}
		for _, l := range slices.Backward(d.layers) {
			arrange(l, func(v *vertex) []int { return v.down })
		}
	}
	for _, l := range d.layers {
		arrange(l, func(v *vertex) []int { return v.up })
	}
}

func relative(place, of int) float64 { return (float64(place) + 0.5) / float64(of) }

// room returns the distance that two vertices keep, from centre to centre.
func room(a, b kind) float64 {
	half := func(k kind) float64 {
		if k == box {
			return float64(NodeHeight+rowGap) / 2
		}
		return lineGap / 2
	}
	return half(a) + half(b)
}

// align gives each vertex its height: as near to the mean of its neighbours as
// the order and the room between vertices allow.
func (d *drawing) align() {
	for _, l := range d.layers {
		for i := 1; i < len(l); i++ {
			d.v[l[i]].y = d.v[l[i-1]].y + room(d.v[l[i-1]].kind, d.v[l[i]].kind)
		}
	}
	settle := func(layer []int, neighbours func(*vertex) []int) {
		want := make([]float64, len(layer))
		for i, v := range layer {
			list := neighbours(&d.v[v])
			want[i] = d.v[v].y
			if len(list) > 0 {
				sum := 0.0
				for _, n := range list {
					sum += d.v[n].y
				}
				want[i] = sum / float64(len(list))
			}
		}
		d.spread(layer, want)
	}
	both := func(v *vertex) []int { return append(slices.Clip(v.up), v.down...) }
	for range 4 {
		for _, l := range d.layers {
			settle(l, func(v *vertex) []int { return v.up })
		}
		for _, l := range slices.Backward(d.layers) {
			settle(l, func(v *vertex) []int { return v.down })
		}
	}
	for _, l := range d.layers {
		settle(l, both)
	}
	for _, l := range d.layers {
		settle(l, func(v *vertex) []int { return v.up })
	}
}

// spread moves a layer's vertices to the heights nearest to the wanted ones (in
// the sense of least squares) that keep order and room: pool adjacent violators.
func (d *drawing) spread(layer []int, want []float64) {
	type block struct {
		sum   float64
		count int
	}
	offset := make([]float64, len(layer)) // from the first vertex when packed tight
	var blocks []block
	for i := range layer {
		if i > 0 {
			offset[i] = offset[i-1] + room(d.v[layer[i-1]].kind, d.v[layer[i]].kind)
		}
		blocks = append(blocks, block{want[i] - offset[i], 1})
		for n := len(blocks); n > 1 && blocks[n-2].sum/float64(blocks[n-2].count) > blocks[n-1].sum/float64(blocks[n-1].count); n-- {
			blocks[n-2].sum += blocks[n-1].sum
			blocks[n-2].count += blocks[n-1].count
			blocks = blocks[:n-1]
		}
	}
	i := 0
	for _, b := range blocks {
		for range b.count {
			d.v[layer[i]].y = b.sum/float64(b.count) + offset[i]
			i++
		}
	}
}

func (d *drawing) finish(nodes []Node, rank []int) Layout {
	top, bottom := math.Inf(1), math.Inf(-1)
	for i := range d.v {
		half := 4.0
		if d.v[i].kind == box {
			half = NodeHeight / 2
		}
		top, bottom = min(top, d.v[i].y-half), max(bottom, d.v[i].y+half)
	}
	y := func(v int) int { return int(math.Round(d.v[v].y-top)) + margin }
	left := func(v int) int {
		x := margin + d.v[v].layer/2*(NodeWidth+columnGap)
		if d.v[v].kind == joint {
			x += NodeWidth + columnGap/2
		}
		return x
	}
	right := func(v int) int {
		if d.v[v].kind == joint {
			return left(v)
		}
		return left(v) + NodeWidth
	}
	columns := (len(d.layers) + 1) / 2
	l := Layout{
		Width:  2*margin + columns*NodeWidth + (columns-1)*columnGap,
		Height: int(math.Ceil(bottom-top)) + 2*margin,
		Boxes:  make([]Box, len(nodes)),
		Edges:  make([]Edge, 0, len(d.lines)),
	}
	for i, n := range nodes {
		l.Boxes[i] = Box{ID: n.ID, X: left(i), Y: y(i) - NodeHeight/2, Rank: rank[i]}
	}
	for _, line := range d.lines {
		var b strings.Builder
		first, last := line[0], line[len(line)-1]
		e := Edge{X1: right(first), X2: left(last)}
		point(&b, "M", e.X1, y(first))
		for i := 1; i < len(line); i++ {
			x1, y1, x2, y2 := right(line[i-1]), y(line[i-1]), left(line[i]), y(line[i])
			if y1 == y2 {
				point(&b, "L", x2, y2)
			} else {
				middle := (x1 + x2) / 2
				point(&b, "C", middle, y1)
				point(&b, " ", middle, y2)
				point(&b, " ", x2, y2)
			}
			if d.v[line[i]].kind == pass {
				point(&b, "L", right(line[i]), y2)
			}
		}
		e.Path = b.String()
		if d.v[first].kind == joint {
			e.Joint = strconv.Itoa(first)
		} else {
			e.From = nodes[first].ID
		}
		if d.v[last].kind == joint {
			e.Joint = strconv.Itoa(last)
		} else {
			e.To = nodes[last].ID
		}
		l.Edges = append(l.Edges, e)
	}
	return l
}

func point(b *strings.Builder, op string, x, y int) {
	b.WriteString(op + strconv.Itoa(x) + " " + strconv.Itoa(y))
}
