package workflow

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"forgeci/internal/ci"
)

// pos is a place in the file, both parts from 1.
type pos struct{ line, col int }

// problems collects what is wrong with one file, each place and text once.
type problems struct {
	file  string
	limit int
	seen  map[ci.FieldError]bool
	list  []ci.FieldError
	more  int
}

func newProblems(file string, limit int) *problems {
	return &problems{file: file, limit: limit, seen: map[ci.FieldError]bool{}}
}

func (p *problems) add(at pos, format string, args ...any) {
	f := ci.FieldError{File: p.file, Line: at.line, Column: at.col, Detail: fmt.Sprintf(format, args...)}
	if p.seen[f] {
		return
	}
	if len(p.list) >= p.limit {
		p.more++
		return
	}
	p.seen[f] = true
	p.list = append(p.list, f)
}

// err returns nil or one *ci.Error with all problems in the order of the file.
func (p *problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	slices.SortStableFunc(p.list, func(a, b ci.FieldError) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	detail := fmt.Sprintf("%s: %d problems", p.file, len(p.list))
	switch {
	case p.more > 0:
		detail = fmt.Sprintf("%s: more than %d problems, the first %d are shown", p.file, p.limit, p.limit)
	case len(p.list) == 1:
		detail = p.file + ": 1 problem"
	}
	e := ci.Errorf(ci.ErrInvalid, "%s", detail)
	e.Fields = p.list
	return e
}

// quote shows a piece of the file inside a message: on one line, printable, at
// most 60 characters.
func quote(s string) string {
	const most = 60
	var b strings.Builder
	b.WriteByte('"')
	n := 0
	for _, r := range s {
		if n == most {
			b.WriteString("…")
			break
		}
		n++
		switch {
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == utf8.RuneError || !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// list joins words for a message: "a, b or c".
func list(words []string) string {
	const most = 12
	if len(words) == 0 {
		return "none"
	}
	if len(words) > most {
		return strings.Join(words[:most], ", ") + ", …"
	}
	if len(words) == 1 {
		return words[0]
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

// nearest returns the word that is at most two edits, and half of its length,
// away from s, or "".
func nearest(s string, words []string) string {
	best, bestDistance := "", 3
	for _, w := range words {
		if d := distance(s, w, bestDistance); d < bestDistance && d*2 <= len(w) {
			best, bestDistance = w, d
		}
	}
	return best
}

// distance is the Levenshtein distance of a and b, or limit if it is not below it.
func distance(a, b string, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit || len(a) > 64 {
		return limit
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return min(row[len(b)], limit)
}
