package store

import (
	"context"
	"slices"
	"strings"
)

// Inconsistencies returns a sentence for each row that contradicts the rules of
// the schema which no constraint can say: running jobs and leases, queue and
// ready jobs, counters, winners. None is expected after any history; tests, the
// simulation and `server --check` ask it.
func (s *Store) Inconsistencies(ctx context.Context) ([]string, error) {
	var names []string
	for name := range s.stmts {
		if strings.HasPrefix(name, "Check") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var out []string
	err := s.Read(ctx, func(tx *Tx) error {
		out = nil
		for _, name := range names {
			rows, err := query(ctx, tx, name, scanString)
			if err != nil {
				return err
			}
			out = append(out, rows...)
		}
		return nil
	})
	return out, err
}

// Fenced returns the names of the statements that hold the fragment
// lease_is_current: those that commit an effect for a runner.
func Fenced() ([]string, error) {
	d := sqliteDialect()
	all, err := loadStatements(d)
	if err != nil {
		return nil, err
	}
	fence := d.rewrite(fragments().Replace("{{lease_is_current}}"))
	var out []string
	for name, text := range all {
		if strings.Contains(text, fence) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}
