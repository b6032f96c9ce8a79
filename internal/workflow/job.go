package workflow

import (
	"slices"
	"strings"

	"forgeci/internal/ci"
)

// job reads one job; what it does not set comes from defaults.
func (p *parser) job(key string, at pos, n, defaults *node) *job {
	j := &job{key: key, at: at, timeout: ci.DefaultJobTimeout}
	p.current = j
	if p.fields(n, tJob) == nil {
		return j
	}
	if v := n.get("needs"); v != nil {
		j.hasNeeds = true
		if !v.isNull() {
			j.needs, j.needsAt = p.needs(v)
		}
	}
	if v := n.get("matrix"); v != nil {
		j.legs = p.matrix(v)
		j.axes = keysOf(j.legs)
	}
	if v := n.get("if"); v != nil {
		j.condition = p.condition(v, false)
	}
	if v := p.inherit(n, defaults, "runs_on"); v != nil {
		j.runsOn = p.runsOn(v, j.axes)
	}
	if v := n.get("priority"); v != nil {
		j.priority = p.integer(v, "priority", -maxPriority, maxPriority)
	}
	if v := p.inherit(n, defaults, "image"); v != nil {
		j.image = p.image(v, j.axes)
	}
	if v := n.get("services"); v != nil {
		j.services = p.services(v, j.axes)
	}
	if v := n.get("env"); v != nil {
		j.env = p.env(v, j.axes)
	}
	if v := p.inherit(n, defaults, "shell"); v != nil {
		j.shell = p.oneOf(v, "shell", "sh", "bash")
	}
	if v := p.inherit(n, defaults, "working_directory"); v != nil {
		j.directory = p.checked(v, "working_directory", workspacePath)
	}
	if v := p.inherit(n, defaults, "timeout"); v != nil {
		if d := p.duration(v, "timeout"); d > 0 {
			j.timeout = d
		}
	}
	if v := p.inherit(n, defaults, "retry"); v != nil {
		j.retry = p.retry(v)
	}
	if v := n.get("allow_failure"); v != nil {
		j.allowFailure = p.boolean(v, "allow_failure")
	}
	if v := n.get("outputs"); v != nil {
		j.outputs = p.outputs(v)
	}
	p.files(j, n)
	if v := n.get("secrets"); v != nil {
		j.secrets = p.texts(v, "secret", secretName)
	}
	if v := n.get("identity"); v != nil {
		j.identity = p.identity(v)
	}
	if v := n.get("environment"); v != nil {
		if v.kind == mapping {
			p.add(v.at, "environment is the name of an environment, not a mapping: write env for variables")
		} else {
			j.environment = p.template(v, "environment", j.axes)
		}
	}
	if v := n.get("concurrency"); v != nil {
		j.concurrency = p.concurrency(v, j.axes)
	}
	if v := n.get("steps"); v != nil {
		j.steps = p.steps(v, j)
	}
	p.spreadSecrets(j)
	return j
}

// idleDefaults checks the defaults that no job took, since each has its own.
func (p *parser) idleDefaults(defaults *node, jobs []*job) {
	if defaults == nil {
		return
	}
	var axes []string
	for _, j := range jobs {
		axes = append(axes, j.axes...)
	}
	check := func(key string, read func(*node)) {
		if v := defaults.get(key); v != nil && !p.inherited[key] {
			read(v)
		}
	}
	check("runs_on", func(v *node) { p.runsOn(v, axes) })
	check("image", func(v *node) { p.image(v, axes) })
	check("shell", func(v *node) { p.oneOf(v, "shell", "sh", "bash") })
	check("working_directory", func(v *node) { p.checked(v, "working_directory", workspacePath) })
	check("timeout", func(v *node) { p.duration(v, "timeout") })
	check("retry", func(v *node) { p.retry(v) })
}

func (p *parser) needs(n *node) ([]string, []pos) {
	return p.placed(n, "need", func(s string) error {
		if base, _, isLeg := strings.Cut(s, " ("); isLeg {
			return errorText("needs takes the job's key, which stands for all its legs: write " + base)
		}
		return Name(s)
	})
}

func secretName(s string) error {
	if !envRE().MatchString(s) || len(s) > 100 {
		return errorText("use letters, digits and _, not beginning with a digit, at most 100")
	}
	return nil
}

// env reads variables. A value is the source text of what was written.
func (p *parser) env(n *node, axes []string) []setting {
	if n.isNull() {
		return nil
	}
	if n.kind != mapping {
		p.add(n.at, "env is a mapping of variables, not %s: write env: {NAME: value}", describe(n))
		return nil
	}
	var out []setting
	for _, e := range n.entries {
		if err := envName(e.key); err != nil {
			p.add(e.at, "variable %s: %v", quote(e.key), err)
			continue
		}
		v := p.template(e.value, "variable "+e.key, axes)
		if e.value.kind == scalar && strings.ContainsRune(e.value.text, 0) {
			p.add(e.value.at, "variable %s holds a NUL byte: remove it", e.key)
		}
		out = append(out, setting{e.key, v})
	}
	return out
}

func (p *parser) concurrency(n *node, axes []string) *concurrency {
	c := &concurrency{}
	if n.kind == scalar {
		c.group = p.template(n, "concurrency group", axes)
		return c
	}
	if p.fields(n, tConcurrency) == nil {
		return nil
	}
	if v := n.get("group"); v != nil {
		c.group = p.template(v, "concurrency group", axes)
	}
	if v := n.get("cancel_in_progress"); v != nil {
		c.cancel = p.boolean(v, "cancel_in_progress")
	}
	return c
}

func (p *parser) runsOn(n *node, axes []string) requirements {
	var r requirements
	labels := func(n *node) {
		for _, item := range p.many(n) {
			if t := p.template(item, "label", axes); !t.isZero() {
				r.labels = append(r.labels, t)
			}
		}
	}
	if n.kind != mapping {
		if n.isNull() {
			p.add(n.at, "runs_on is a label, a list of labels or {os, arch, size, isolation, labels}, not nothing")
			return r
		}
		labels(n)
		return r
	}
	p.fields(n, tRunsOn)
	read := func(key string) template {
		if v := n.get(key); v != nil {
			return p.template(v, key, axes)
		}
		return template{}
	}
	r.os, r.arch, r.size, r.isolation = read("os"), read("arch"), read("size"), read("isolation")
	if v := n.get("labels"); v != nil {
		labels(v)
	}
	return r
}

func (p *parser) image(n *node, axes []string) *image {
	img := &image{at: n.at}
	if n.kind == scalar && !n.isNull() {
		img.ref = p.template(n, "image", axes)
		return img
	}
	if p.fields(n, tImage) == nil {
		return nil
	}
	if v := n.get("ref"); v != nil {
		img.ref = p.template(v, "image", axes)
	}
	read := func(key string, rule func(string) error) string {
		if v := n.get(key); v != nil {
			return p.checked(v, key, rule)
		}
		return ""
	}
	img.dockerfile = read("dockerfile", workspacePath)
	img.context = read("context", workspacePath)
	img.target = read("target", Name)
	ref, dockerfile := n.get("ref"), n.get("dockerfile")
	switch {
	case ref == nil && dockerfile == nil:
		p.add(n.at, "image needs ref or dockerfile: write image: REFERENCE")
	case ref != nil && dockerfile != nil:
		p.add(n.at, "image has both ref and dockerfile: keep one")
	case ref != nil && (n.get("context") != nil || n.get("target") != nil):
		p.add(n.at, "context and target belong to dockerfile: remove them")
	}
	return img
}

func (p *parser) services(n *node, axes []string) []service {
	var out []service
	add := func(name string, at pos, body *node) {
		if err := serviceName(name); err != nil {
			p.add(at, "service name %s: %v", quote(name), err)
			return
		}
		if slices.ContainsFunc(out, func(s service) bool { return s.name == name }) {
			p.add(at, "two services are called %s: rename one", quote(name))
			return
		}
		s := service{name: name}
		switch {
		case body.kind == scalar && !body.isNull():
			s.image = p.template(body, "image", axes)
		case p.fields(body, tService) != nil:
			if v := body.get("image"); v != nil {
				s.image = p.template(v, "image", axes)
			}
			if v := body.get("env"); v != nil {
				s.env = p.env(v, axes)
			}
			if v := body.get("ports"); v != nil {
				for _, item := range p.many(v) {
					s.ports = append(s.ports, p.integer(item, "port", 1, 65535))
				}
			}
		}
		out = append(out, s)
	}
	switch n.kind {
	case mapping:
		for _, e := range n.entries {
			if v := e.value.get("name"); v != nil {
				p.add(v.at, "name is for a list of services: the key %s is the name, remove name", quote(e.key))
			}
			add(e.key, e.at, e.value)
		}
	case sequence:
		for _, item := range n.items {
			v := item.get("name")
			if v == nil {
				p.add(item.at, "a service in a list needs name: write - {name: db, image: REFERENCE}")
				continue
			}
			if name, ok := p.text(v, "service name"); ok {
				add(name, v.at, item)
			}
		}
	default:
		p.add(n.at, "services is a mapping of names, not %s: write services: {db: postgres:16}", describe(n))
	}
	return out
}

// serviceName accepts a DNS label.
func serviceName(s string) error {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(s)-1) {
			return errorText("it is a host name: use lower-case letters, digits and -")
		}
	}
	if s == "" || len(s) > 63 {
		return errorText("it is a host name: use 1 to 63 characters")
	}
	return nil
}

func (p *parser) identity(n *node) []string {
	if n.kind == mapping {
		if p.fields(n, tIdentity) == nil || n.get("audience") == nil {
			return nil
		}
		n = n.get("audience")
	}
	if n.isNull() {
		p.add(n.at, "identity needs an audience: write identity: [AUDIENCE]")
		return nil
	}
	return p.texts(n, "audience", func(s string) error {
		if s == "" || len(s) > 256 {
			return errorText("use 1 to 256 bytes")
		}
		return nil
	})
}

func (p *parser) outputs(n *node) []string {
	if n.kind == mapping {
		p.add(n.at, "outputs is a list of names, not a mapping: write outputs: [NAME]; a step sets it by writing NAME=value to $FORGECI_OUTPUT")
		return nil
	}
	if n.isNull() {
		return nil
	}
	out := p.texts(n, "output", Name)
	slices.Sort(out)
	return out
}
