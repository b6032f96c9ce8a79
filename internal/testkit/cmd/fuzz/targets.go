package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// target is one fuzz function.
type target struct{ module, pkg, dir, name string }

// find reads the targets from the test files that this platform builds.
func find(ctx context.Context, only string, packages []string) ([]target, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-json=ImportPath,Dir,Module,TestGoFiles,XTestGoFiles"}, packages...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	var found []target
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Dir           string
			Module                    struct{ Path string }
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, err
		}
		for _, name := range slices.Concat(p.TestGoFiles, p.XTestGoFiles) {
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				return nil, err
			}
			for _, d := range file.Decls {
				f, ok := d.(*ast.FuncDecl)
				if ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Fuzz") && strings.Contains(f.Name.Name, only) {
					found = append(found, target{p.Module.Path, p.ImportPath, p.Dir, f.Name.Name})
				}
			}
		}
	}
}

// result is what the Go command said of a target.
type result struct {
	executions, interesting int64
	input                   string // that fails, below the package
	output                  string
}

// read takes the counts of the last line of progress and the input that failed.
func read(output string) result {
	r := result{output: output}
	progress := regexp.MustCompile(`execs: (\d+) .*?(?:new interesting: (\d+))?(?: \(total: \d+\))?\n`)
	for _, m := range progress.FindAllStringSubmatch(output, -1) {
		r.executions = number(m[1])
		if m[2] != "" {
			r.interesting = number(m[2])
		}
	}
	if m := regexp.MustCompile(`Failing input written to (\S+)`).FindStringSubmatch(output); m != nil {
		r.input = m[1]
	} else if m := regexp.MustCompile(`(?:--- FAIL:|seed corpus entry:) (Fuzz\w+)/(\S+)`).FindStringSubmatch(output); m != nil {
		r.input = filepath.Join("testdata", "fuzz", m[1], m[2])
	}
	return r
}

func number(s string) int64 {
	n, _ := strconv.ParseInt(s, 10, 64) // digits only; too many count as none
	return n
}
