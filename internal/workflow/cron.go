package workflow

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// cronField is one of the five fields of a cron expression.
type cronField struct {
	name      string
	low, high int
	words     []string // words[i] stands for low+i
}

// checkCron accepts five fields of numbers, names, ranges, steps and lists. It
// refuses what can never happen, like the 31st of February.
func checkCron(s string) error {
	fields := strings.Fields(s)
	if strings.HasPrefix(s, "@") {
		return fmt.Errorf("names like @daily are not used: write five fields, for example 0 3 * * *")
	}
	if len(fields) != 5 {
		return fmt.Errorf("it has %d fields: write five, minute hour day month weekday, for example 0 3 * * *", len(fields))
	}
	months := strings.Fields("jan feb mar apr may jun jul aug sep oct nov dec")
	days := strings.Fields("sun mon tue wed thu fri sat")
	kinds := []cronField{{"minute", 0, 59, nil}, {"hour", 0, 23, nil}, {"day of month", 1, 31, nil}, {"month", 1, 12, months}, {"day of week", 0, 7, days}}
	sets := make([][]int, 5)
	for i, k := range kinds {
		set, err := k.parse(fields[i])
		if err != nil {
			return err
		}
		sets[i] = set
	}
	if fields[4] == "*" {
		longest := 0
		for _, m := range sets[3] {
			longest = max(longest, []int{31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}[m-1])
		}
		if slices.Min(sets[2]) > longest {
			return fmt.Errorf("no month of it has a day %d", slices.Min(sets[2]))
		}
	}
	return nil
}

func (k cronField) parse(s string) ([]int, error) {
	var set []int
	for item := range strings.SplitSeq(s, ",") {
		span, stepText, stepped := strings.Cut(item, "/")
		step := 1
		if stepped {
			v, err := strconv.Atoi(stepText)
			if err != nil || v < 1 || v > k.high {
				return nil, fmt.Errorf("%s: step %s must be a number from 1 to %d", k.name, quote(stepText), k.high)
			}
			step = v
		}
		low, high := k.low, k.high
		if span != "*" {
			from, to, ranged := strings.Cut(span, "-")
			var err error
			if low, err = k.value(from); err != nil {
				return nil, err
			}
			switch {
			case ranged:
				if high, err = k.value(to); err != nil {
					return nil, err
				}
			case !stepped:
				high = low
			}
			if high < low {
				return nil, fmt.Errorf("%s: %s goes backwards", k.name, quote(span))
			}
		}
		for v := low; v <= high; v += step {
			set = append(set, v)
		}
	}
	return set, nil
}

func (k cronField) value(s string) (int, error) {
	if i := slices.Index(k.words, strings.ToLower(s)); i >= 0 {
		return k.low + i, nil
	}
	v, err := strconv.Atoi(s)
	if err != nil || v < k.low || v > k.high || len(s) > 2 {
		return 0, fmt.Errorf("%s %s must be from %d to %d", k.name, quote(s), k.low, k.high)
	}
	return v, nil
}
