package workflow

import (
	"slices"
	"strings"
)

// graph checks the needs of all jobs: every need is a job of the file, none
// needs itself, and there is no cycle (SPEC WF-3, QUE-03).
func (p *parser) graph(jobs []*job) {
	byKey := map[string]*job{}
	var keys []string
	for _, j := range jobs {
		byKey[j.key] = j
		keys = append(keys, j.key)
	}
	for _, j := range jobs {
		for i, need := range j.needs {
			switch {
			case need == j.key:
				p.add(j.needsAt[i], "job %s needs itself: remove it from needs", quote(j.key))
			case byKey[need] == nil:
				hint := "known jobs: " + list(keys)
				if near := nearest(need, keys); near != "" {
					hint = "did you mean " + near + "?"
				}
				p.add(j.needsAt[i], "unknown dependency %s in needs of job %s: %s", quote(need), quote(j.key), hint)
			}
		}
	}
	p.byKey = byKey
	p.cycles(jobs, byKey)
	p.checkConditions(keys)
}

// cycles reports each cycle that a depth-first walk closes, as "C -> D -> C".
func (p *parser) cycles(jobs []*job, byKey map[string]*job) {
	const (
		fresh = iota
		open
		done
	)
	state := map[*job]int{}
	var path []string
	var walk func(j *job)
	walk = func(j *job) {
		state[j] = open
		path = append(path, j.key)
		for _, need := range j.needs {
			n := byKey[need]
			if n == nil || n == j {
				continue
			}
			switch state[n] {
			case fresh:
				walk(n)
			case open:
				p.cycle(append(slices.Clone(path[slices.Index(path, need):]), need), byKey)
			}
		}
		path = path[:len(path)-1]
		state[j] = done
	}
	for _, j := range jobs {
		if state[j] == fresh {
			walk(j)
		}
	}
}

// cycle reports one cycle, at the first of its needs that is written: the order of
// a list alone makes none.
func (p *parser) cycle(keys []string, byKey map[string]*job) {
	var at pos
	var text strings.Builder
	text.WriteString(keys[0])
	for i, need := range keys[1:] {
		text.WriteString(" -> " + need)
		switch j := byKey[keys[i]]; {
		case !j.hasNeeds:
			text.WriteString(" (the order of the list)")
		case at == (pos{}):
			at = j.needsAt[slices.Index(j.needs, need)]
		}
	}
	cycle := text.String()
	if len(cycle) > 500 {
		cycle = cycle[:500] + "…"
	}
	p.add(at, "needs form a cycle: %s; remove one of them", cycle)
}

// ancestors returns the keys of all jobs that must finish before key, without
// key itself.
func ancestors(byKey map[string]*job, key string) map[string]bool {
	found := map[string]bool{}
	queue := []string{key}
	for len(queue) > 0 {
		j := byKey[queue[0]]
		queue = queue[1:]
		if j == nil {
			continue
		}
		for _, need := range j.needs {
			if !found[need] {
				found[need] = true
				queue = append(queue, need)
			}
		}
	}
	return found
}
