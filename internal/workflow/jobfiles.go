package workflow

import (
	"strings"

	"forgeci/internal/ci"
)

// files reads what moves files: cache, artifacts, reports and inputs.
func (p *parser) files(j *job, n *node) {
	if v := n.get("cache"); v != nil {
		for _, item := range p.many(v) {
			if c, ok := p.cache(item); ok {
				j.cache = append(j.cache, c)
			}
		}
	}
	if v := n.get("artifacts"); v != nil && p.fields(v, tArtifacts) != nil {
		if out := v.get("publish"); out != nil {
			p.publishes(j, out)
		}
		if in := v.get("restore"); in != nil {
			p.restores(j, in)
		}
	}
	if v := n.get("reports"); v != nil {
		for _, item := range p.many(v) {
			if p.fields(item, tReport) == nil {
				continue
			}
			var r ci.Report
			if k := item.get("kind"); k != nil {
				r.Kind = p.oneOf(k, "kind", "junit")
			}
			if s := item.get("path"); s != nil {
				r.Path = p.checked(s, "path", pathPattern)
			}
			j.reports = append(j.reports, r)
		}
	}
	if v := n.get("inputs"); v != nil {
		j.inputs = p.texts(v, "input pattern", inputPattern)
		if len(j.inputs) == 0 {
			p.add(v.at, "inputs has no pattern: write the files that the result depends on, or remove it")
		}
	}
}

// pathPattern accepts a pattern of files inside the workspace.
func pathPattern(s string) error {
	if err := workspacePath(s); err != nil {
		return err
	}
	return CheckPattern(strings.TrimPrefix(s, "./"))
}

func inputPattern(s string) error { return pathPattern(strings.TrimPrefix(s, "!")) }

func (p *parser) cache(n *node) (ci.Cache, bool) {
	c := ci.Cache{Version: "1"}
	if p.fields(n, tCache) == nil {
		return c, false
	}
	if v := n.get("kind"); v != nil {
		c.Kind = p.oneOf(v, "kind", "dependencies", "directory")
	}
	if v := n.get("version"); v != nil {
		c.Version = p.checked(v, "version", displayName)
	}
	if v := n.get("inputs"); v != nil {
		c.Inputs = p.texts(v, "input pattern", inputPattern)
	}
	if v := n.get("paths"); v != nil {
		if c.Paths = p.texts(v, "cache path", cachePath); len(p.many(v)) == 0 {
			p.add(v.at, "paths has no path: write the directories to keep")
		}
	}
	if v := n.get("restore_prefix"); v != nil {
		c.RestorePrefix = p.boolean(v, "restore_prefix")
		if c.RestorePrefix && c.Kind == "directory" {
			p.add(v.at, "restore_prefix is for kind: dependencies: results made from other inputs are never taken")
		}
	}
	return c, true
}

func (p *parser) publishes(j *job, n *node) {
	for _, item := range p.many(n) {
		if p.fields(item, tPublish) == nil {
			continue
		}
		var out publish
		if v := item.get("name"); v != nil {
			out.name = p.template(v, "artifact name", j.axes)
		}
		one, several := item.get("path"), item.get("paths")
		switch {
		case one == nil && several == nil:
			p.add(item.at, "a published artifact needs path: write path: FILE")
		case one != nil && several != nil:
			p.add(several.at, "path and paths are the same: keep one")
		default:
			v := one
			if v == nil {
				v = several
			}
			if out.paths = p.texts(v, "path", pathPattern); len(p.many(v)) == 0 {
				p.add(v.at, "the artifact has no path: write path: FILE")
			}
		}
		if v := item.get("optional"); v != nil {
			out.optional = p.boolean(v, "optional")
		}
		if v := item.get("retention"); v != nil {
			out.retention = p.duration(v, "retention")
		}
		j.publish = append(j.publish, out)
	}
}

func (p *parser) restores(j *job, n *node) {
	for _, item := range p.many(n) {
		if p.fields(item, tRestore) == nil {
			continue
		}
		in := restore{path: "."}
		if v := item.get("from_job"); v != nil {
			in.from = p.template(v, "from_job", j.axes)
		}
		if v := item.get("name"); v != nil {
			in.name = p.template(v, "artifact name", j.axes)
		}
		if v := item.get("path"); v != nil {
			in.path = p.checked(v, "path", workspacePath)
		}
		j.restore = append(j.restore, in)
	}
}
