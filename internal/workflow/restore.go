package workflow

import (
	"slices"

	"forgeci/internal/ci"
)

// producers indexes what the jobs of a plan publish.
type producers struct {
	byKey map[string]*job
	key   map[string]string              // key or full name -> key
	names map[string]map[string][]string // key or full name -> artifact -> full names of its producers
}

func (b *builder) producers(specs []ci.JobSpec) producers {
	p := producers{byKey: b.file.byKey(), key: map[string]string{}, names: map[string]map[string][]string{}}
	for i := range specs {
		spec := &specs[i]
		for _, from := range slices.Compact([]string{spec.Key, spec.Name}) {
			p.key[from] = spec.Key
			if p.names[from] == nil {
				p.names[from] = map[string][]string{}
			}
			for _, out := range spec.Publish {
				p.names[from][out.Name] = append(p.names[from][out.Name], spec.Name)
			}
		}
	}
	return p
}

// restores checks that every restored artifact is published by an ancestor and
// names one producer: a key whose legs publish it under one name each must be
// narrowed to the leg (SPEC WF-3).
func (b *builder) restores(specs []ci.JobSpec) {
	index := b.producers(specs)
	up := map[string]map[string]bool{}
	for i := range specs {
		spec := &specs[i]
		j := index.byKey[spec.Key]
		for k := range spec.Restore {
			source := j.restore[k]
			if b.partial && (source.from.usesInputs() || source.name.usesInputs()) {
				continue
			}
			if up[j.key] == nil {
				up[j.key] = ancestors(index.byKey, j.key)
			}
			b.restore(index, j.key, &spec.Restore[k], source, up[j.key])
		}
	}
}

func (b *builder) restore(index producers, key string, r *ci.ArtifactRestore, source restore, up map[string]bool) {
	at := source.from.at
	from, ok := index.key[r.FromJob]
	switch {
	case !ok:
		hint := "known jobs: " + list(b.file.Keys)
		if near := nearest(r.FromJob, b.file.Keys); near != "" {
			hint = "did you mean " + near + "?"
		}
		b.add(at, "from_job names the unknown job %s: %s", quote(r.FromJob), hint)
		return
	case from == key:
		b.add(at, "job %s restores an artifact of itself: name an ancestor", quote(key))
		return
	case !up[from]:
		b.add(at, "from_job %s is no ancestor of job %s: add needs: [%s]", quote(r.FromJob), quote(key), from)
		return
	}
	switch found := index.names[r.FromJob][r.Name]; {
	case len(found) == 1:
		r.FromJob = found[0]
	case len(found) > 1:
		b.add(at, "%d legs of %s publish %s: name one leg in from_job (%s), or publish under a name that holds the leg's value", len(found), quote(r.FromJob), quote(r.Name), list(quoted(found)))
	case b.partial && slices.ContainsFunc(index.byKey[from].publish, func(p publish) bool { return p.name.usesInputs() }):
	default:
		b.add(source.name.at, "job %s does not publish %s (it publishes: %s)", quote(r.FromJob), quote(r.Name), list(sortedKeys(index.names[r.FromJob])))
	}
}

func quoted(words []string) []string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = quote(w)
	}
	return out
}
