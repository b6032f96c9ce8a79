package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// patchDir holds the patches, from the module's root.
const patchDir = "internal/testkit/mutants"

// patch is one planted defect: a unified diff behind a header,
//
//	Breaks: the promise that it breaks
//	Tool: sim                      | test ./internal/server/engine TestName
//	Assertion: I3 fencing          | the words of the failure
//	Quick: yes
//
// of which the last line may be missing. For the simulation the assertion is the
// name of the invariant, and behind a colon words of its detail if the name alone
// says too little.
type patch struct {
	name      string
	breaks    string
	tool      string // toolSim or toolTest
	pkg, test string // of toolTest
	assertion string
	quick     bool
	files     []string // from the root, with slashes
	path      string
}

const (
	toolSim  = "sim"
	toolTest = "test"
	simPkg   = "./internal/sim"
)

// loadPatches reads all patches of a folder.
func loadPatches(dir string) ([]patch, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var out []patch
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		p, err := parsePatch(strings.TrimSuffix(filepath.Base(name), ".patch"), text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		p.path = name
		out = append(out, p)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no patches in %s", dir)
	}
	return out, nil
}

func parsePatch(name string, text []byte) (patch, error) {
	p := patch{name: name}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	header := true
	for lines.Scan() {
		line := lines.Text()
		if file, ok := strings.CutPrefix(line, "+++ b/"); ok {
			p.files = append(p.files, file)
		}
		if header = header && line != ""; !header {
			continue
		}
		key, value, _ := strings.Cut(line, ": ")
		value = strings.TrimSpace(value)
		switch key {
		case "Breaks":
			p.breaks = value
		case "Tool":
			p.tool = value
			if w := strings.Fields(value); len(w) == 3 && w[0] == toolTest && strings.HasPrefix(w[1], "./internal/") && strings.HasPrefix(w[2], "Test") {
				p.tool, p.pkg, p.test = toolTest, w[1], w[2]
			}
		case "Assertion":
			p.assertion = value
		case "Quick":
			p.quick = value == "yes"
		default:
			return p, fmt.Errorf("header line %q: Breaks, Tool, Assertion and Quick are expected", line)
		}
	}
	switch {
	case lines.Err() != nil:
		return p, lines.Err()
	case p.breaks == "" || p.assertion == "":
		return p, fmt.Errorf("the header needs Breaks and Assertion")
	case p.tool != toolSim && p.tool != toolTest:
		return p, fmt.Errorf("tool %q: sim, or test ./internal/… TestName, is expected", p.tool)
	case len(p.files) == 0:
		return p, fmt.Errorf("no file is changed")
	}
	for _, f := range p.files {
		if !strings.HasPrefix(f, "internal/") || strings.HasSuffix(f, "_test.go") || path.Clean(f) != f {
			return p, fmt.Errorf("%s: a mutant changes production code", f)
		}
	}
	return p, nil
}

// packages are the packages that the patch changes, as go names them; a statement
// file belongs to the package above it.
func (p patch) packages() []string {
	var out []string
	for _, f := range p.files {
		dir := path.Dir(f)
		if !strings.HasSuffix(f, ".go") {
			dir = path.Dir(dir)
		}
		if !slices.Contains(out, "./"+dir) {
			out = append(out, "./"+dir)
		}
	}
	return out
}

// apply writes patched copies of the patch's files under dir and returns the
// overlay that puts them in the place of the files of root. A patch that does
// not fit the tree any more is an error.
func (p patch) apply(ctx context.Context, root, dir string) (overlay string, err error) {
	replace := map[string]string{}
	for _, f := range p.files {
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(f)))
		if err != nil {
			return "", err
		}
		to := filepath.Join(dir, filepath.FromSlash(f))
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return "", err
		}
		if err := os.WriteFile(to, text, 0o600); err != nil {
			return "", err
		}
		replace[filepath.Join(root, filepath.FromSlash(f))] = to
	}
	cmd := exec.CommandContext(ctx, "git", "apply", "-C1", "--whitespace=nowarn", p.path)
	cmd.Dir = dir
	// The folder belongs to no repository, wherever it lies.
	cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("the patch does not apply any more; make it anew against the code as it is: %w\n%s", err, out)
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o600)
}
