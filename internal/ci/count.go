package ci

import "strconv"

// Count writes a number with its noun: 1 file, 2 files.
func Count[N int | int64](n N, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return strconv.FormatInt(int64(n), 10) + " " + noun
}
