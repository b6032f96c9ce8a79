//go:build race

package workflow

// underRace is set when the race detector makes everything many times slower.
const underRace = true
