package graph_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"forgeci/internal/server/web/graph"
)

// check asserts what every layout promises.
func check(t interface {
	Helper()
	Errorf(string, ...any)
}, nodes []graph.Node, l graph.Layout,
) {
	t.Helper()
	if len(l.Boxes) != len(nodes) {
		t.Errorf("%d boxes for %d nodes", len(l.Boxes), len(nodes))
		return
	}
	byID := map[string]graph.Box{}
	for i, b := range l.Boxes {
		if b.ID != nodes[i].ID {
			t.Errorf("box %d is %q, want %q", i, b.ID, nodes[i].ID)
		}
		byID[b.ID] = b
		if b.X < 0 || b.Y < 0 || b.X+graph.NodeWidth > l.Width || b.Y+graph.NodeHeight > l.Height {
			t.Errorf("box %q at %d,%d is outside of %d×%d", b.ID, b.X, b.Y, l.Width, l.Height)
		}
	}
	sorted := slices.Clone(l.Boxes)
	slices.SortFunc(sorted, func(a, b graph.Box) int {
		if a.X != b.X {
			return a.X - b.X
		}
		return a.Y - b.Y
	})
	for i := 1; i < len(sorted); i++ {
		a, b := sorted[i-1], sorted[i]
		if a.X == b.X && b.Y < a.Y+graph.NodeHeight || a.X != b.X && b.X < a.X+graph.NodeWidth {
			t.Errorf("boxes %q and %q overlap", a.ID, b.ID)
		}
	}
	for _, n := range nodes {
		for _, need := range n.Needs {
			if from, ok := byID[need]; ok && need != n.ID && from.Rank >= byID[n.ID].Rank {
				t.Errorf("%q (rank %d) needs %q (rank %d)", n.ID, byID[n.ID].Rank, need, from.Rank)
			}
		}
	}
	// What is drawn leads from left to right and says exactly who comes after whom.
	into, outOf := map[string][]string{}, map[string][]string{}
	after := map[string][]string{}
	for _, e := range l.Edges {
		if e.X1 >= e.X2 {
			t.Errorf("edge %q to %q runs from %d to %d", e.From, e.To, e.X1, e.X2)
		}
		switch {
		case e.From != "" && e.To != "":
			after[e.To] = append(after[e.To], e.From)
		case e.From != "":
			into[e.Joint] = append(into[e.Joint], e.From)
		default:
			outOf[e.Joint] = append(outOf[e.Joint], e.To)
		}
	}
	for j, tos := range outOf {
		for _, to := range tos {
			after[to] = append(after[to], into[j]...)
		}
	}
	drawn, meant := closure(nodes, func(n graph.Node) []string { return after[n.ID] }), closure(nodes, func(n graph.Node) []string { return n.Needs })
	for _, n := range nodes {
		if !slices.Equal(drawn[n.ID], meant[n.ID]) {
			t.Errorf("%q: drawn behind %v, meant behind %v", n.ID, drawn[n.ID], meant[n.ID])
		}
	}
}

// closure lists all ancestors of each node; nodes come in an order in which
// needs precede.
func closure(nodes []graph.Node, needs func(graph.Node) []string) map[string][]string {
	all := map[string][]string{}
	for _, n := range nodes {
		set := map[string]bool{}
		for _, need := range needs(n) {
			set[need] = true
			for _, a := range all[need] {
				set[a] = true
			}
		}
		var list []string
		for id := range set {
			list = append(list, id)
		}
		slices.Sort(list)
		all[n.ID] = list
	}
	return all
}

func tree(parents, children, leaves int) []graph.Node {
	var nodes []graph.Node
	for p := range parents {
		nodes = append(nodes, graph.Node{ID: fmt.Sprintf("p%d", p)})
	}
	for p := range parents {
		for c := range children {
			nodes = append(nodes, graph.Node{ID: fmt.Sprintf("p%d-c%d", p, c), Needs: []string{fmt.Sprintf("p%d", p)}})
		}
	}
	for p := range parents {
		for c := range children {
			for l := range leaves {
				nodes = append(nodes, graph.Node{ID: fmt.Sprintf("p%d-c%d-l%d", p, c, l), Needs: []string{fmt.Sprintf("p%d-c%d", p, c)}})
			}
		}
	}
	return nodes
}

func TestCase_UI_03_ShapesOfLargeWorkflows(t *testing.T) {
	t.Parallel()
	var chain, apart, dense, layers []graph.Node
	for i := range 300 {
		n := graph.Node{ID: fmt.Sprintf("step-%03d-%s", i, strings.Repeat("x", 190))}
		if i > 0 {
			n.Needs = []string{chain[i-1].ID}
		}
		chain = append(chain, n)
	}
	for i := range 100 {
		apart = append(apart, graph.Node{ID: fmt.Sprint(i)})
	}
	for i := range 400 { // each needs all before it
		n := graph.Node{ID: fmt.Sprint(i)}
		for j := range i {
			n.Needs = append(n.Needs, fmt.Sprint(j))
		}
		dense = append(dense, n)
	}
	for i := range 1000 { // two layers of 500, everything needs everything
		n := graph.Node{ID: fmt.Sprint(i)}
		if i >= 500 {
			for j := range 500 {
				n.Needs = append(n.Needs, fmt.Sprint(j))
			}
		}
		layers = append(layers, n)
	}
	for name, nodes := range map[string][]graph.Node{
		"2,000 jobs": tree(5, 20, 19),
		"diamond":    {{ID: "a"}, {ID: "b", Needs: []string{"a"}}, {ID: "c", Needs: []string{"a"}}, {ID: "d", Needs: []string{"b", "c", "a"}}},
		"chain":      chain,
		"apart":      apart,
		"dense":      dense,
		"layers":     layers,
		"one":        {{ID: "only"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			l := graph.Lay(nodes)
			if took := time.Since(start); took > 2*time.Second {
				t.Errorf("laid out %d nodes in %v, want under 2 s", len(nodes), took)
			}
			check(t, nodes, l)
		})
	}
}

func TestImpliedEdgesAreNotDrawnAndSharedNeedsMeetInOneJoint(t *testing.T) {
	t.Parallel()
	var dense []graph.Node
	for i := range 50 {
		n := graph.Node{ID: fmt.Sprint(i)}
		for j := range i {
			n.Needs = append(n.Needs, fmt.Sprint(j))
		}
		dense = append(dense, n)
	}
	if got := len(graph.Lay(dense).Edges); got != 49 {
		t.Errorf("a chain with all implied needs is drawn with %d lines, want 49", got)
	}
	var layers []graph.Node
	for i := range 40 {
		n := graph.Node{ID: fmt.Sprint(i)}
		if i >= 20 {
			for j := range 20 {
				n.Needs = append(n.Needs, fmt.Sprint(j))
			}
		}
		layers = append(layers, n)
	}
	if got := len(graph.Lay(layers).Edges); got != 40 {
		t.Errorf("20 jobs that all need the same 20 are drawn with %d lines, want 40", got)
	}
}

func TestCirclesAndUnknownNeedsDoNoHarm(t *testing.T) {
	t.Parallel()
	l := graph.Lay([]graph.Node{
		{ID: "a", Needs: []string{"b"}},
		{ID: "b", Needs: []string{"a"}},
		{ID: "c", Needs: []string{"c", "nobody"}},
		{ID: "d", Needs: []string{"a"}},
	})
	if len(l.Boxes) != 4 {
		t.Fatalf("%d boxes, want 4", len(l.Boxes))
	}
	if len(graph.Lay(nil).Boxes) != 0 {
		t.Error("boxes without nodes")
	}
}

func TestLayoutKeepsItsPromisesForAnyGraph(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var nodes []graph.Node
		for i := range rapid.IntRange(1, 40).Draw(t, "count") {
			n := graph.Node{ID: fmt.Sprint("n", i)}
			if i > 0 {
				for _, j := range rapid.SliceOfNDistinct(rapid.IntRange(0, i-1), 0, min(i, 5), rapid.ID[int]).Draw(t, "needs") {
					n.Needs = append(n.Needs, fmt.Sprint("n", j))
				}
			}
			nodes = append(nodes, n)
		}
		check(t, nodes, graph.Lay(nodes))
	})
}
