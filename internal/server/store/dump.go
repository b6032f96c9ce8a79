package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Dump returns every row of every table as text, sorted, without the named
// tables and columns ("table" or "table.column"). Tests compare it before and
// after a call that must change nothing.
func (s *Store) Dump(ctx context.Context, skip ...string) ([]string, error) {
	rows, err := s.read.QueryContext(ctx, s.d.tablesSQL)
	if err != nil {
		return nil, s.wrap(err)
	}
	var tables []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		if !slices.Contains(skip, name) {
			tables = append(tables, name)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	_ = rows.Close()
	var out []string
	for _, name := range tables {
		lines, err := s.dumpTable(ctx, name, skip)
		if err != nil {
			return nil, fmt.Errorf("dump %s: %w", name, err)
		}
		out = append(out, lines...)
	}
	slices.Sort(out)
	return out, nil
}

func (s *Store) dumpTable(ctx context.Context, table string, skip []string) ([]string, error) {
	rows, err := s.read.QueryContext(ctx, "SELECT * FROM "+table) // a name from the catalogue
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	var out []string
	for rows.Next() {
		values := make([]any, len(columns))
		for i := range values {
			values[i] = new(any)
		}
		if err := rows.Scan(values...); err != nil {
			return nil, err
		}
		var line strings.Builder
		line.WriteString(table + ":")
		for i, c := range columns {
			if !slices.Contains(skip, table+"."+c) {
				fmt.Fprintf(&line, " %s=%v", c, *values[i].(*any))
			}
		}
		out = append(out, line.String())
	}
	return out, rows.Err()
}
