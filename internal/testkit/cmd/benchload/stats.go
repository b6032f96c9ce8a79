package main

import (
	"math"
	"slices"
	"time"
)

// quantile returns the smallest of the values that a share q of them does not
// exceed. It sorts them.
func quantile(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	i := int(math.Ceil(q*float64(len(values)))) - 1
	return values[max(i, 0)]
}

// ms is a duration in milliseconds with one decimal.
func ms(d time.Duration) float64 { return round1(float64(d) / float64(time.Millisecond)) }

// mib is a number of bytes in MiB with one decimal.
func mib(n int64) float64 { return round1(float64(n) / (1 << 20)) }

func round1(v float64) float64 { return math.Round(v*10) / 10 }

func round2(v float64) float64 { return math.Round(v*100) / 100 }
